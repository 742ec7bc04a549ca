"""params.yaml as frozen, typed sections, and what follows from them: variants, methods, experiments.

This module decides what is computed, so an edit re-runs every stage; what only says that params are wrong is in
checks.py. It holds no defaults: every key stands in the file. The hyper-parameters of a method are declared with the
method (salcli/methods); everything else is declared here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from salcli.data.catalogue import DATA_SETS, labeled_sets
from salcli.data.folders import NAME, RESERVED
from salcli.data.sets import LARGEST_SIDE
from salcli.data.vectors import Columns
from salcli.errors import ParamsError, SalError, unknown_name
from salcli.methods.base import (
    ALL_ID,
    Count,
    IdTrained,
    InputScore,
    Method,
    Penalty,
    PostHoc,
    Section,
    Share,
    Solver,
    TrainParams,
    WildTrained,
    built_in,
    find_method,
    is_custom_method,
)
from salcli.methods.sal import TAU, FilterParams, Sal, Tau, TrainOodParams
from salcli.models.backbones import (
    AUTO,
    LINEAR,
    check_backbone_name,
    import_path,
    is_hooked,
    takes_vectors,
    wide_resnet_size,
)
from salcli.models.custom import make_importable
from salcli.params.checks import explained, mistakes
from salcli.params.reading import check_groups, lookup, read_yaml, with_overrides
from salcli.store.layout import UNKNOWN, Experiment

T = TypeVar("T")
RECYCLE = "recycle"

# -- checks of single values


@contextmanager
def _collected() -> Iterator[None]:
    """pydantic collects what is wrong from ValueErrors only."""
    try:
        yield
    except SalError as error:
        raise ValueError(str(error)) from None


def _each_once(items: tuple[T, ...]) -> tuple[T, ...]:
    repeated = sorted({str(item) for item in items if items.count(item) > 1})
    if repeated:
        raise ValueError(f"must name each item once, got {', '.join(repeated)} more than once")
    return items


def _not_empty(items: tuple[T, ...]) -> tuple[T, ...]:
    if not items:
        raise ValueError("must name at least one item, got []")
    return items


Distinct = Annotated[tuple[T, ...], Field(strict=False), AfterValidator(_each_once)]
SomeDistinct = Annotated[Distinct[T], AfterValidator(_not_empty)]


def _custom_sets(paths: dict[str, Any]) -> dict[str, Any]:
    """Names that can be part of commands, file names and dvc.yaml, and are not those of known sets."""
    for name in paths:
        if not NAME.fullmatch(name):
            raise ValueError(f"a set's name must be of a-z, 0-9, - and _, and start with a letter, got {name!r}")
        if name in DATA_SETS or name in RESERVED:
            raise ValueError(f"{name} is taken; choose another name")
    return paths


def _set_of(kind: str, known: Iterable[str]) -> AfterValidator:
    """The name of a known or custom set."""

    @_collected()
    def check(name: str, info: ValidationInfo) -> str:
        sets = [*known, *info.data.get("custom", ())]
        if name not in sets:
            raise unknown_name(kind, name, sets)
        return name

    return AfterValidator(check)


def _not_the_id_set(names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    if info.data.get("id") in names:
        raise ValueError(f"must not name the ID set, got {info.data['id']}")
    return names


@_collected()
def _groups(groups: dict[str, tuple[str, ...]], info: ValidationInfo) -> dict[str, tuple[str, ...]]:
    check_groups(groups, {*info.data.get("ood", ()), *info.data.get("test_ood", ())})
    return groups


def _used_once(name: str, info: ValidationInfo) -> str:
    if name in (info.data.get("id"), *info.data.get("ood", ()), *info.data.get("test_ood", ())):
        raise ValueError(f"must be a set of its own, but {name} is ID, wild or test data, too")
    return name


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shares(value: object) -> tuple[float | str, ...]:
    """Shares of OOD data, or only `unknown`. They become part of paths, so 1.0 must be written as DVC writes it: 1."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, got {value!r} (did you mean [{value}]?)")
    for one in value:
        if one != UNKNOWN and not (_is_number(one) and 0 < one <= 1):
            raise ValueError(f"must be shares above 0 and at most 1, or [unknown], got {one!r}")
        if one != UNKNOWN and str(one) != f"{one:g}":
            raise ValueError(f"write {one:g} instead of {one}")
    if UNKNOWN in value and len(value) > 1:
        raise ValueError("must be either shares or [unknown]")
    return _each_once(_not_empty(tuple(one if one == UNKNOWN else float(one) for one in value)))


def _test_share(value: object) -> object:
    if value == "official" or (_is_number(value) and 0 < value < 1):  # type: ignore[operator]
        return value
    raise ValueError(f"must be official, or a share between 0 and 1, got {value!r}")


@_collected()
def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9]\d?))?", name):  # torch knows no larger numbers
        raise unknown_name("device", name, ["auto", "cpu", "cuda", "cuda:0", "mps"])
    return name


def _channel_values(value: object, info: ValidationInfo) -> object:
    if value == AUTO:
        return value
    numbers, positive = value if isinstance(value, list | tuple) else (), info.field_name == "std"
    if not numbers or not all(_is_number(one) and (one > 0 or not positive) for one in numbers):
        kind = "positive number" if positive else "number"
        raise ValueError(f"must be auto, or a list with one {kind} for each channel, got {value!r}")
    return tuple(float(one) for one in numbers)


def _trained_methods(kind: type[Method]) -> Any:
    """A list of methods of a kind, each once."""
    others = {"rivals": WildTrained, "encoders": IdTrained, "evaluate.methods": PostHoc}

    @_collected()
    def check(name: str) -> str:
        if is_custom_method(name) and "." in name:  # DVC takes methods.NAME for a path of keys
            raise ValueError(f"{name}: a method that is trained must be in a module without dots, such as my_code:Mine")
        for key, other in others.items():
            if other is not kind and name in built_in(other):
                raise ValueError(f"{name} belongs in {key}")
        find_method(name, kind)
        return name

    return Distinct[Annotated[str, AfterValidator(check)]]


def separators() -> list[str]:
    """The built-in scores that `filter` can separate with; τ, which is sal-posthoc as a row, first."""
    return [TAU, *(name for name in built_in(PostHoc) if name != Tau.name), *built_in(InputScore)]


@_collected()
def _score(score: str) -> str:
    if is_custom_method(score):
        found = find_method(score)
        needs_more = getattr(found, "needs_wild", False) or getattr(found, "needs_calibration", False)
        if not issubclass(found, PostHoc | InputScore) or needs_more:
            raise ValueError(
                f"{score} cannot separate the wild data; a PostHoc score without needs_wild and needs_calibration can"
            )
    elif score not in separators():
        raise unknown_name("score", score, separators())
    return score


OodSet = Annotated[str, _set_of("OOD set", DATA_SETS)]
Path_ = Annotated[str, Field(min_length=1)]
Paths = Path_ | Annotated[tuple[Path_, ...], Field(strict=False, min_length=1)]

# -- sections


class IdShares(Section):
    """Shares of the four disjoint parts of the ID data."""

    train: Share
    calibration: Annotated[float, Field(ge=0, lt=1)]  # 0 where a calibration set is given
    wild: Annotated[float, Field(ge=0, lt=1)]  # 0 where wild data come as they are
    test: Annotated[float | Literal["official"], PlainValidator(_test_share)]  # official: the published test samples

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        total = self.train + self.calibration + self.wild + (0 if self.test == "official" else self.test)
        if not math.isclose(total, 1, abs_tol=1e-6):
            others = "train, calibration and wild " if self.test == "official" else ""
            raise ValueError(f"{others}must add up to 1, got {total:g}")
        return self


class ColumnsParams(Section):
    """Which columns of a table hold what. null: found by name and type (salcli/data/vectors.py)."""

    vector: Path_ | Annotated[tuple[Path_, ...], Field(strict=False)] | None  # one column of lists, or numeric columns
    label: Path_ | None
    id: Path_ | None
    show: Distinct[Path_]  # in the report

    @property
    def named(self) -> Columns:
        return Columns(self.vector, self.label, self.id, self.show)


class DataParams(Section):
    """What is ID, what is OOD, and how they are mixed. Vectors have neither image_size nor channels."""

    root: Path_
    custom: Annotated[dict[str, Paths], AfterValidator(_custom_sets)]
    columns: ColumnsParams
    id: Annotated[str, _set_of("ID set", labeled_sets())]
    ood: Annotated[SomeDistinct[OodSet], AfterValidator(_not_the_id_set)]
    test_ood: Annotated[Distinct[OodSet], AfterValidator(_not_the_id_set)]
    groups: Annotated[dict[str, SomeDistinct[str]], AfterValidator(_groups)]
    calibration: Annotated[str, _set_of("set of data.custom", ()), AfterValidator(_used_once)] | None
    # null: vectors, or what a frozen backbone was trained with
    image_size: Annotated[int, Field(ge=1, le=LARGEST_SIDE, strict=True)] | None
    channels: Literal[1, 3] | None
    on_bad_image: Literal["fail", "skip"]
    pi: Annotated[tuple[float | str, ...], PlainValidator(_shares)]
    id_shares: IdShares
    ood_wild_share: Share
    mixing: Literal["disjoint", "recycle"]
    wild_holdout: Annotated[float, Field(ge=0, lt=1)]

    @model_validator(mode="after")
    def _mixed_or_not(self) -> Self:
        if UNKNOWN in self.pi and self.id_shares.wild > 0:
            raise ValueError("pi is unknown: the wild data come as they are, so id_shares.wild must be 0")
        if UNKNOWN not in self.pi and self.id_shares.wild == 0:
            raise ValueError("id_shares.wild is 0, which is for wild data that come as they are: set pi to [unknown]")
        if self.calibration is not None and self.id_shares.calibration > 0:
            raise ValueError(f"{self.calibration} is the calibration set, so id_shares.calibration must be 0")
        if self.mixing == RECYCLE and UNKNOWN in self.pi:
            raise ValueError("mixing must be disjoint where pi is unknown: nothing is mixed")
        return self

    def may_hold_copies(self, name: str) -> bool:
        """Whether samples of an OOD set have to be compared with the ID data: published sets are known to differ."""
        return self.calibration is not None or name in self.custom


class ModelParams(Section):
    """The network, its weights, and what its input is normalised with.

    Mean and std of images are on a scale of 0 to 1. auto: what pretrained weights were trained with, else those of the
    ID training data.
    """

    backbone: Annotated[str, AfterValidator(_collected()(check_backbone_name))]
    weights: Path_ | None  # a state dict, or `pretrained`: those that torchvision or timm publish
    frozen: bool  # embed every set once, and train linear heads on the vectors
    head: Path_ | None
    code: Path_
    drop_rate: Annotated[float, Field(ge=0, lt=1)]
    mean: Annotated[tuple[float, ...] | Literal["auto"], PlainValidator(_channel_values)]
    std: Annotated[tuple[float, ...] | Literal["auto"], PlainValidator(_channel_values)]

    @model_validator(mode="after")
    def _options_fit_backbone(self) -> Self:
        if self.drop_rate > 0 and wide_resnet_size(self.backbone) is None:
            raise ValueError(f"drop_rate must be 0 for {self.backbone}: only a wide ResNet (wrn-40-2) has dropout")
        if self.head is not None and not is_hooked(self.backbone):
            raise ValueError(f"head must be null for {self.backbone}: only MODULE:NAME and timm:NAME have one to name")
        return self

    @property
    def takes_vectors(self) -> bool:
        """Whether the samples that it is trained on are vectors: as they were given, or made by the frozen backbone."""
        return self.frozen or takes_vectors(self.backbone)

    @property
    def trained(self) -> str:
        """The backbone that is trained: on the vectors of a frozen one, only linear heads are."""
        return LINEAR if self.frozen else self.backbone

    @property
    def brings_weights(self) -> bool:
        """A custom network may come with its weights."""
        return self.weights is not None or import_path(self.backbone) is not None


class NumericsParams(Section):
    """Precision and kernels."""

    precision: Literal["float32", "bfloat16", "float16"]
    deterministic: bool
    compile: bool


class TrainIdParams(TrainParams):
    """How the ID classifier is trained, or where its weights come from."""

    epochs: Annotated[int, Field(ge=0, le=10**9, strict=True)]
    solver: Solver
    penalty: Penalty


class CheckedFilterParams(FilterParams):
    """With a score that there is: only here all scores are known."""

    score: Annotated[str, AfterValidator(_score)]


class ExtractGradsParams(Section):
    """The pass that extracts features and logits."""

    batch_size: Count


class EvaluateParams(Section):
    """Which methods are compared."""

    methods: SomeDistinct[str]
    batch_size: Count


class DetectorParams(Section):
    """Which method the detector uses, and how its file is written."""

    method: str
    float16: bool


class _MethodsBase(Section):
    """Hyper-parameters by method. Those of custom methods, MODULE:NAME, are kept apart."""

    custom: dict[str, Any] = Field(alias="MODULE:NAME")

    @model_validator(mode="before")
    @classmethod
    def _set_custom_apart(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        custom = {name: value for name, value in raw.items() if is_custom_method(str(name))}
        return {name: value for name, value in raw.items() if name not in custom} | {"MODULE:NAME": custom}

    @model_validator(mode="after")
    @_collected()
    def _validate_custom(self) -> Self:
        sections: dict[str, Any] = {
            f"custom_{i}": (find_method(name).Params, Field(alias=name)) for i, name in enumerate(self.custom)
        }
        given = {name: values or {} for name, values in self.custom.items()}
        checked = dict(create_model("CustomParams", **sections).model_validate(given))  # its errors name method and key
        self.custom.update(zip(self.custom, checked.values(), strict=True))
        return self

    def of(self, name: str) -> Any:
        """One method's, by the name that params.yaml uses."""
        if is_custom_method(name):
            return self.custom[name] if name in self.custom else find_method(name).Params()
        return getattr(self, name.replace("-", "_"), None)


_fields: dict[str, Any] = {
    name.replace("-", "_"): (found.Params, Field(alias=name))
    for name, found in built_in().items()
    if found.Params.model_fields
}
MethodsParams = create_model("MethodsParams", __base__=_MethodsBase, **_fields)


class Params(Section):
    """All of params.yaml."""

    seeds: SomeDistinct[Annotated[int, Field(ge=0, lt=2**32, strict=True)]]
    variants: SomeDistinct[str]
    filters: Distinct[str]
    variant: dict[str, dict[str, dict[str, Any]]]
    rivals: _trained_methods(WildTrained)  # type: ignore[valid-type]
    encoders: _trained_methods(IdTrained)  # type: ignore[valid-type]
    device: Annotated[str, AfterValidator(_device)]
    launcher: Path_
    timeout: Count  # seconds
    numerics: NumericsParams
    data: DataParams
    model: ModelParams
    train_id: TrainIdParams
    extract_grads: ExtractGradsParams
    filter: CheckedFilterParams
    train_ood: TrainOodParams
    methods: MethodsParams
    evaluate: EvaluateParams
    detector: DetectorParams

    @model_validator(mode="before")
    @classmethod
    def _all_methods(cls, raw: Any) -> Any:
        """`methods: all` stands for every method that there is a network for."""
        match raw:
            case {"evaluate": {"methods": "all"}}:
                lists = [raw.get(key) for key in ("variants", "rivals", "encoders")]
                trained = [str(name) for names in lists if isinstance(names, list) for name in names]
                post_hoc = [*built_in(PostHoc), *built_in(InputScore)]
                return raw | {"evaluate": raw["evaluate"] | {"methods": [*dict.fromkeys([*trained, *post_hoc])]}}
        return raw

    def for_variant(self, name: str) -> Params:
        """The params of one variant of SAL: with its overrides of filter and train_ood."""
        if name not in self.variant:
            raise unknown_name("variant", name, self.variant)
        return self.model_copy(update={section: self.overridden(name, section) for section in self.variant[name]})

    def overridden(self, variant: str, section: str) -> Section:
        """A section with the overrides of a variant."""
        before: Section = getattr(self, section)
        return type(before).model_validate({**before.model_dump(), **self.variant[variant][section]})

    @property
    def incumbent(self) -> str:
        """What `report` and `review` show, and the detector unless another method is significantly better."""
        return [*self.filters, *self.variants][0]

    def experiments(self) -> list[Experiment]:
        """Every OOD set with every π, seed and variant, also of `filters`."""
        axes = product(self.data.ood, self.data.pi, self.seeds, [*self.variants, *self.filters])
        return [Experiment(seed, ood, pi, variant) for ood, pi, seed, variant in axes]

    def filter_score(self) -> Any:
        """What the filter scores by."""
        return Tau(self.filter) if self.filter.score == TAU else self.method(self.filter.score)

    def method(self, name: str) -> Any:
        """A method with its hyper-parameters: a variant of SAL, a rival, an encoder or a post-hoc score."""
        if name in self.variants:
            return Sal(self.for_variant(name).train_ood)
        return find_method(name.removesuffix(f"@{ALL_ID}")).from_params(self)


# -- loading


@dataclass(frozen=True)
class Override:
    """A value that a flag set instead of the file's."""

    key: str
    value: Any
    in_file: Any


def load_params(path: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Params, list[Override]]:
    """Parse the file with `overrides` (dotted key → value), and say which of them changed it."""
    raw = read_yaml(path)
    changed = [
        Override(key, value, lookup(raw, key)) for key, value in (overrides or {}).items() if lookup(raw, key) != value
    ]
    whole = f"{path.name} with its overrides" if overrides else path.name
    return validated(with_overrides(raw, overrides or {}), whole, path.parent), changed


def validated(raw: Mapping[str, Any], name: str, folder: Path = Path()) -> Params:
    """The params, or one error that lists everything that is wrong with the file of this name.

    Custom networks and methods are imported from the folder that model.code names.
    """
    code = lookup(raw, "model.code")
    if isinstance(code, str):
        make_importable(folder / Path(code).expanduser())
    try:
        params = Params.model_validate(raw)
        wrong = list(mistakes(params))
    except ValidationError as error:
        wrong = list(explained(error, Params))
    if wrong:
        width = max(len(key) for key, _ in wrong)
        lines = [f"  {key:<{width}}  {message}" for key, message in wrong]
        raise ParamsError("\n".join([f"{name} is not valid", *lines]))
    return params
