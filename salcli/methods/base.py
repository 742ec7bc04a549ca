"""What a method is: its name, label, paper and hyper-parameters, and how it scores, fits or trains.

A method is declared where its formula is. The params schema, the rows and labels of tables, `salcli methods` and the
table in docs/rivals.md are derived from these declarations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from torch import Tensor, nn

from salcli.engine.augmentation import Augmentation
from salcli.engine.batches import Batches, EndlessRows, LabeledRows, Rows
from salcli.engine.device import Compute
from salcli.engine.inference import BATCH_SIZE, outputs_of
from salcli.engine.linear_heads import FullFit
from salcli.engine.training import SCHEDULES, Epoch, Objective, Run, classification, reproducible
from salcli.errors import ParamsError, SalError, ThresholdError, unknown_name
from salcli.models.backbones import LINEAR
from salcli.models.custom import import_object
from salcli.models.network import AsGiven, Classifier, NetworkSpec
from salcli.progress import Progress, Silent, Task
from salcli.sal.gradients import Representation, RepresentationSource, of_each_sample
from salcli.sal.seeding import derived_seed
from salcli.sal.tau import CPU

# -- hyper-parameters

Share = Annotated[float, Field(gt=0, lt=1)]
# bounds far beyond sense, within which float32 and int64 do not overflow
Count = Annotated[int, Field(ge=1, le=10**9, strict=True)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Percentile = Annotated[float, Field(ge=1, lt=100)]  # from 1 on: a share such as 0.9 is a mistake


SGD, LBFGS = "sgd", "lbfgs"
Solver = Literal["sgd", "lbfgs"]


def _auto_or_positive(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "auto" or (is_number and 0 < value < float("inf")):  # type: ignore[operator]
        return value
    raise ValueError(f"must be auto or a positive number, got {value!r}")


Penalty = Annotated[float | Literal["auto"], PlainValidator(_auto_or_positive)]  # ½ · penalty · ‖W‖² on the mean loss


class Section(BaseModel):
    """A section of params.yaml: frozen, with no unknown keys and no values of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SgdParams(Section):
    """A training run by stochastic gradient descent."""

    epochs: Count
    batch_size: Annotated[int, Field(ge=2, le=10**9, strict=True)]
    lr: Positive
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NotNegative


class TrainParams(SgdParams):
    """With Nesterov momentum."""

    schedule: Literal["cosine", "constant", "steps"]  # engine.training.SCHEDULES
    augment: Literal["none", "flip-crop"]


# -- methods


class Method(ABC):  # noqa: B024
    """A row of a table. `Params` are its hyper-parameters, which params.yaml holds under methods.NAME."""

    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    Params: ClassVar[type[Section]] = Section

    def __init__(self, params: Any = None) -> None:
        self.params: Any = params

    @classmethod
    def from_params(cls, params: Any) -> Method:
        """The method with its hyper-parameters of params.yaml."""
        return cls(params.methods.of(cls.name))

    # -- a fitted method in a detector's file: its settings, which JSON can say, and its state, which are tensors

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters that scores of new samples depend on."""
        return self.params.model_dump(mode="json") if isinstance(self.params, Section) else {}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Method:
        return cls(cls.Params.model_validate(settings)) if settings else cls()

    def compact(self, seed: int) -> None:  # noqa: B027
        """Keep only what scores of new samples need; by itself, all that `fit` stored. A SalError: it cannot."""

    def state(self) -> dict[str, Tensor]:
        """What `fit` stored: the attributes that are tensors, numbers, or data classes and dicts of them."""
        return flattened({name: value for name, value in vars(self).items() if name != "params"})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`. What is not a tensor needs an annotation that says what it is."""
        kinds = get_type_hints(type(self))
        for name in dict.fromkeys(name.partition("/")[0] for name in state):
            if callable(getattr(type(self), name, None)):
                raise ValueError(f"{name} is not what {self.name} is fitted to")
            setattr(self, name, restored(kinds.get(name, Tensor), below(state, name)))


def flattened(value: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors and numbers in a value, by their path in it. Entries of inner dicts are numbered: order counts."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, bool | int | float):
        return {name: torch.tensor(value, dtype=torch.float64)}
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    elif isinstance(value, Method):
        return {f"{name}/{key}": tensor for key, tensor in value.state().items()}
    elif isinstance(value, dict) and name:
        value = {f"{i:03}:{key}": one for i, (key, one) in enumerate(value.items())}
    if not isinstance(value, dict):
        raise TypeError(f"{name} is neither a tensor nor a number, nor a data class or dict of them")
    found = [flattened(one, f"{name}/{key}" if name else key) for key, one in value.items()]
    return {key: tensor for own in found for key, tensor in own.items()}


def below(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The part of a state that belongs to an attribute."""
    return {key[len(name) + 1 :]: tensor for key, tensor in state.items() if key == name or key.startswith(f"{name}/")}


def restored(kind: Any, state: Mapping[str, Tensor]) -> Any:
    """A value of the annotated kind from the tensors in it. A LookupError or ValueError: they do not fit it."""
    if isinstance(kind, UnionType):  # or None, before it is fitted
        kind = get_args(kind)[0]
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{one.name: restored(kinds[one.name], below(state, one.name)) for one in fields(kind)})  # type: ignore[operator]
    if get_origin(kind) is dict:
        names = sorted({name.partition("/")[0] for name in state})
        return {name.partition(":")[2]: restored(get_args(kind)[1], below(state, name)) for name in names}
    tensor = state[""]
    return kind(tensor.item()) if kind in (bool, int, float) else tensor


@dataclass(frozen=True)
class Head:
    """The last linear layer of a network, in float64 on the CPU."""

    weight: Float[Tensor, "k d"]
    bias: Float[Tensor, " k"]

    @classmethod
    def of(cls, layer: nn.Linear) -> Head:
        return cls(layer.weight.detach().cpu().double(), layer.bias.detach().cpu().double())

    def logits(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        return features.double() @ self.weight.T + self.bias


@dataclass(frozen=True, eq=False)
class Known:
    """What a post-hoc method may know before it scores: the head, labeled ID data, unlabeled wild data.

    Equal methods are fitted once, and a source is scored once by them, because scores are also made of other scores.
    """

    head: Head
    id_train: RepresentationSource
    wild: RepresentationSource | None = None
    seed: int = 0
    device: torch.device = CPU
    note: Callable[[str], None] = lambda text: None
    as_given: AsGiven = field(default_factory=AsGiven)  # undoes the standardization of vectors
    calibration: RepresentationSource | None = None  # held-out ID data
    is_frozen: bool = False  # the features have not been trained on the ID training data
    task: Task = field(default_factory=Silent)
    cache: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Classifier, id_train: RepresentationSource, **others: Any) -> Known:
        """With what the network says."""
        is_frozen = network.spec.backbone == LINEAR
        return cls(Head.of(network.head), id_train, as_given=network.as_given, is_frozen=is_frozen, **others)

    @cached_property
    def features(self) -> Float[Tensor, "m d"]:
        """Of the ID training data, in memory."""
        return torch.cat([chunk.feature for chunk in self.id_train.chunks()])

    def fitted(self, method: P) -> P:
        """This method, or an equal one that is fitted already."""
        key = method.name, repr(method.params)
        if key not in self.cache:
            method.fit(self)
            self.cache[key] = method
        found: P = self.cache[key]
        return found

    def scores(self, method: PostHoc, *sources: RepresentationSource) -> list[Float[Tensor, " n"]]:
        """Of all samples of the sources."""
        own = self.fitted(method)
        key = own, *sources
        if key not in self.cache:
            self.cache[key] = own.scores_of(*sources)
        found: list[Tensor] = self.cache[key]
        return found


P = TypeVar("P", bound="PostHoc")


class PostHoc(Method):
    """A score of the ID classifier's features and logits; it trains no network."""

    needs_wild: ClassVar[bool] = False
    needs_calibration: ClassVar[bool] = False  # held-out ID data

    def fit(self, known: Known) -> None:
        """Learn what the score needs of the ID training data."""

    @abstractmethod
    def score(self, x: Representation) -> Float[Tensor, " n"]:
        """An outlier score: higher = more OOD."""

    def score_training_samples(self, x: Representation) -> Float[Tensor, " n"]:
        """Of samples that the method was fitted on."""
        return self.score(x)

    is_exact: ClassVar[bool] = True  # calibration and wild samples are treated in the same way, so p-values are exact

    def exact_scores(self) -> Sequence[tuple[Tensor, Tensor]] | None:
        """Exact scores of calibration and wild data that stand beside those of a score that is not; None: none do.

        The first ones certify, the second ones tell drift and the share of outliers.
        """
        return None

    def exact_scores_of(self, new: RepresentationSource) -> tuple[Float[Tensor, " n"], Float[Tensor, " h"]] | None:
        """Exact scores of calibration data and of data that nothing was fitted to; None: those of `scores` are."""
        return None

    def held_out_scores(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"]] | None:
        """Of calibration and wild data, by models that have not seen them; None where it learns from neither."""
        return None

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        """Of all samples of a source, chunk by chunk."""
        return of_each_sample(source, self.score_training_samples if fitted_on else self.score)

    def scores_of(self, *sources: RepresentationSource) -> list[Float[Tensor, " n"]]:
        """Of several sources, which some scores compute together."""
        return [self.scores(source) for source in sources]


def finite(name: str, scores: Tensor) -> Tensor:
    """The scores, or an error that says how many are not defined."""
    if n_undefined := int((~scores.isfinite()).sum()):
        raise ThresholdError(
            f"{name} gives NaN or infinity for {n_undefined} of {len(scores)} samples; use another score"
        )
    return scores


class InputScore(Method):
    """A score that needs the samples themselves, because it takes gradients w.r.t. them."""

    @abstractmethod
    def outputs(self, network: Classifier) -> Callable[[Tensor], Tensor]:
        """What a pass over samples computes of each batch."""

    @abstractmethod
    def score(self, outputs: Tensor) -> Float[Tensor, " n"]:
        """An outlier score of the outputs of all samples: higher = more OOD."""


@dataclass(frozen=True)
class Start:
    """What a training may use: labeled ID data, unlabeled wild data, the ID classifier. Never the truth."""

    seed: int
    training: LabeledRows
    compute: Compute
    spec: NetworkSpec
    ood: str = ""
    classifier: Classifier | None = None  # of methods that start from it
    wild: Rows | None = None
    is_candidate: np.ndarray | None = None  # of the wild data; for SAL alone
    schedule: TrainParams | None = None  # of train_ood, which SAL and most rivals share
    batch_size: int = BATCH_SIZE  # of passes without gradients
    progress: Progress = field(default_factory=Silent)

    def random(self, purpose: str) -> AbstractContextManager[torch.Generator]:
        """Inside, torch's global random stream depends on the seed and the purpose alone; gives one for the order."""
        return reproducible(self.seed, purpose)

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, purpose))

    def logits(self, network: Classifier, rows: Rows) -> Tensor:
        """Class logits of all rows, in evaluation mode."""
        return outputs_of(network, network.forward, rows, self.batch_size, self.compute)[0]

    def features(self, network: Classifier, rows: Rows) -> Tensor:
        """Features of all rows, in evaluation mode."""
        return outputs_of(network, network.features, rows, self.batch_size, self.compute)[0]

    def fine_tuning(
        self, network: Classifier, others: Mapping[str, Rows], generator: torch.Generator, **options: Any
    ) -> Run:
        """A run with the schedule of train_ood. Each batch has ID samples and labels, then as many of each of `others`.

        The draws are the same for all methods: they see the same samples in the same order.
        """
        assert self.schedule is not None
        return self.run(network, self.schedule, generator, f"augment/{self.ood}", others, **options)

    def run(
        self,
        network: Classifier,
        params: TrainParams,
        generator: torch.Generator,
        augment: str = "augment",  # the purpose of these draws
        others: Mapping[str, Rows] | None = None,
        objective: Objective = classification,
        stateful: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Run:
        """A run on the labeled ID data and, in each batch, as many of each of `others`."""
        draws = self.generator(augment)
        sources = {name: EndlessRows(rows, self.compute, generator) for name, rows in (others or {}).items()}
        return Run(
            network=network,
            objective=objective,
            batches=Batches(self.training, self.compute, Augmentation(params.augment, draws), sources),
            n_samples=len(self.training),
            params=params,
            compute=self.compute,
            generator=generator,
            stateful={"augmentation": draws, **sources, **(stateful or {})},
            schedule=SCHEDULES[params.schedule],
            **options,
        )


@dataclass(frozen=True)
class Phase:
    """One training run of a method. `settings` are the params that it depends on: others do not restart it."""

    name: str
    run: Run | FullFit
    settings: Mapping[str, Any]


Phases = Generator[Phase, list[Epoch], Classifier]


class Trained(Method):
    """A method that trains its own network."""

    network: ClassVar[type[Classifier]] = Classifier
    needs_images: ClassVar[bool] = False
    in_one_process: ClassVar[bool] = False  # whether its loss compares all samples of a batch

    def settings(self) -> dict[str, Any]:
        """How it was trained does not count any more."""
        return super().settings() if is_custom_method(self.name) else {}

    @abstractmethod
    def phases(self, start: Start) -> Phases:
        """Yields one run after the other; each is trained before the next is asked for. Returns the network."""

    def outputs(self, network: Any) -> Callable[[Tensor], Tensor | tuple[Tensor, ...]]:
        """What a pass over the test data computes."""
        forward: Callable[[Tensor], Tensor | tuple[Tensor, ...]] = network.forward
        return forward

    def fit(self, network: Any, over_training_data: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> None:
        """Learn what the score needs of the ID training data, by a pass over them."""

    @abstractmethod
    def score(self, network: Any, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        """An outlier score of what `outputs` gave for all samples: higher = more OOD."""

    def class_logits(self, outputs: list[Tensor]) -> Float[Tensor, "n k"]:
        """Which of the outputs the accuracy is computed from."""
        return outputs[0]

    def is_short(self) -> bool:
        """Whether the params train less than the method's authors do; tables then say so."""
        return False


class WildTrained(Trained):
    """Trained with labeled ID data and the wild data: SAL and its rivals."""


class IdTrained(Trained):
    """Trained from scratch on labeled ID data alone, in another way than the ID classifier."""

    @property
    def images(self) -> Literal["train", "all"]:
        """Of the ID data: the labeled part, or all but the test's."""
        return getattr(self.params, "images", "train")


ALL_ID = "all-id"  # the encoder that is the ID classifier, trained on all ID data but the test's


def of_all_id(row: str) -> bool:
    """Whether a row is a post-hoc score of that network, such as knn@all-id."""
    return row.endswith(f"@{ALL_ID}")


# -- finding methods

M = TypeVar("M", bound=type[Method])
_BUILT_IN: dict[str, type[Method]] = {}
FAMILIES = Path(__file__).parent


def method(name: str, *, label: str, paper: str) -> Callable[[M], M]:
    """Declare a method under the name that params.yaml and the CLI use."""

    def declare(declared: M) -> M:
        declared.name, declared.label, declared.paper = name, label, paper
        _BUILT_IN[name] = declared
        return declared

    return declare


def built_in(kind: type[Method] = Method) -> dict[str, type[Method]]:
    """All methods of a kind that come with salcli, in a fixed order."""
    for family in sorted(module.name for module in iter_modules([str(FAMILIES)])):
        import_module(f"salcli.methods.{family}")
    return {name: _BUILT_IN[name] for name in sorted(_BUILT_IN) if issubclass(_BUILT_IN[name], kind)}


def is_custom_method(name: str) -> bool:
    """Whether it is MODULE:NAME, a class of the user's."""
    return ":" in name


def find_method(name: str, kind: type[Method] = Method) -> type[Method]:
    """The method of a name. MODULE:NAME is imported, which runs the user's code."""
    known = built_in(kind)
    if name in known:
        return known[name]
    if not is_custom_method(name):
        raise unknown_name("method", name, known)
    found = import_object(name, "method")
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise SalError(f"{name} is not a class derived from salcli.methods.base.{kind.__name__}; see docs/extending.md")
    found.name, found.label = name, found.label or found.__name__
    return found


def check_count(key: str, value: int, at_most: int, of_what: str) -> None:
    if value > at_most:
        raise ParamsError(f"{key} is {value}, but there are only {at_most} {of_what}")
