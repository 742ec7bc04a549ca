"""params.yaml as frozen, typed sections. Holds no defaults: every key stands in the file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from salcli import params_checks as check
from salcli.errors import ParamsError
from salcli.method_names import Encoder, FilterScore, Method, PosthocMethod, WildRival
from salcli.models.backbone_names import import_path, is_hooked, wide_resnet_size
from salcli.params_errors import listing
from salcli.params_file import lookup, read_yaml, with_overrides
from salcli.params_rivals import TrainEncoderParams, TrainRivalParams
from salcli.params_section import Count, NotNegative, Percentile, Positive, Section, SgdParams, Share

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


OodSets = Annotated[tuple[Annotated[str, AfterValidator(check.known)], ...], Field(strict=False)]


class IdShares(Section):
    """Shares of the four disjoint parts of the ID data."""

    train: Share
    calibration: Share
    wild: Annotated[float, Field(ge=0, lt=1)]  # 0 where wild data come as they are
    # official: the images that were published for testing; the rest is dealt
    test: Annotated[float | Literal["official"], PlainValidator(check.test_share)]

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        total = self.train + self.calibration + self.wild + (0 if self.test == "official" else self.test)
        if not math.isclose(total, 1, abs_tol=1e-6):
            others = "train, calibration and wild " if self.test == "official" else ""
            raise ValueError(f"{others}must add up to 1, got {total:g}")
        return self


class DataParams(Section):
    """What is ID, what is OOD, and how they are mixed."""

    root: Annotated[str, Field(min_length=1)]
    own: Annotated[dict[str, Annotated[str, Field(min_length=1)]], AfterValidator(check.own_sets)]
    id: Annotated[str, AfterValidator(check.labeled)]
    ood: Annotated[OodSets, AfterValidator(check.some_each_once), AfterValidator(check.not_the_id_set)]
    test_ood: Annotated[OodSets, AfterValidator(check.each_once), AfterValidator(check.not_the_id_set)]
    image_size: Count
    channels: Literal[1, 2, 3]
    on_bad_image: Literal["fail", "skip"]
    pi: Annotated[float | Literal["unknown"], PlainValidator(check.share_or_unknown)]
    id_shares: IdShares
    ood_wild_share: Share

    @model_validator(mode="after")
    def _mixed_or_not(self) -> Self:
        if self.pi == check.UNKNOWN and self.id_shares.wild > 0:
            raise ValueError("pi is unknown: the wild data come as they are, so id_shares.wild must be 0")
        if self.pi != check.UNKNOWN and self.id_shares.wild == 0:
            raise ValueError("id_shares.wild is 0, which is for wild data that come as they are: set pi to unknown")
        return self


class ModelParams(Section):
    """The network, and what its input is normalised with (on a scale of 0 to 1; auto: of the training images)."""

    backbone: Annotated[str, AfterValidator(check.backbone)]
    head: Annotated[str, Field(min_length=1)] | None
    code: Annotated[str, Field(min_length=1)]
    drop_rate: Annotated[float, Field(ge=0, lt=1)]
    mean: Annotated[tuple[float, ...] | Literal["auto"], check.channel_values(positive=False)]
    std: Annotated[tuple[float, ...] | Literal["auto"], check.channel_values(positive=True)]

    @model_validator(mode="after")
    def _has_use_for_dropout(self) -> Self:
        if self.drop_rate > 0 and wide_resnet_size(self.backbone) is None:
            raise ValueError(f"drop_rate must be 0 for {self.backbone}: only a wide ResNet (wrn-40-2) has dropout")
        return self

    @model_validator(mode="after")
    def _has_a_head_to_name(self) -> Self:
        if self.head is not None and not is_hooked(self.backbone):
            raise ValueError(f"head must be null for {self.backbone}: only MODULE:NAME and timm:NAME have one to name")
        return self


class NumericsParams(Section):
    """How exactly to compute."""

    precision: Literal["float32", "bfloat16", "float16"]
    deterministic: bool
    compile: bool


class TrainParams(SgdParams):
    """With Nesterov momentum and a cosine schedule."""

    augment: Literal["none", "flip-crop"]


class TrainIdParams(TrainParams):
    """How the ID classifier is trained, or where its weights come from."""

    epochs: Annotated[int, Field(ge=0, strict=True)]
    weights: Annotated[str, Field(min_length=1)] | None


def _trained_somehow(train_id: TrainIdParams, info: ValidationInfo) -> TrainIdParams:
    """A network of the user's own may come with weights of its own."""
    model: ModelParams | None = info.data.get("model")
    if train_id.epochs == 0 and train_id.weights is None and not (model and import_path(model.backbone)):
        raise ValueError("epochs is 0, so weights must name a file; or train for at least one epoch")
    return train_id


class ExtractGradsParams(Section):
    """The pass over ID and wild data."""

    batch_size: Count


class FilterParams(Section):
    """How candidate outliers are separated from the wild data."""

    score: FilterScore
    threshold_quantile: Share
    calibration: Literal["holdout", "train", "id-svd"]
    svd: Literal["class-conditional", "class-agnostic"]
    reference: Literal["class-conditional", "global"]
    n_vectors: Count
    gradient: Literal["full", "predicted-row"]
    labels: Literal["predicted", "random"]

    @model_validator(mode="after")
    def _has_singular_vectors(self) -> Self:
        if self.calibration == "id-svd" and self.score != "sal":
            raise ValueError(
                f"calibration id-svd is about singular vectors, which only score sal has, not {self.score}; "
                "use holdout or train"
            )
        if self.calibration == "train" and self.score == "auto":
            raise ValueError(
                "score auto needs calibration holdout: on the data that scores are fitted to, the one that fits them "
                "best would win"
            )
        return self


class TrainOodParams(TrainParams):
    """How the OOD classifier is trained."""

    loss_weight: Positive
    candidate_id: bool
    review: Annotated[str, Field(min_length=1)] | None


class EvaluateParams(Section):
    """Which methods are compared."""

    methods: Annotated[tuple[Method, ...], Field(strict=False), AfterValidator(check.some_each_once)]
    odin_temperature: Positive
    odin_epsilon: NotNegative
    knn_k: Count
    react_percentile: Percentile
    dice_percentile: Percentile
    ash_percentile: Percentile
    vim_dim: Annotated[int | Literal["auto"], PlainValidator(check.auto_or_count)]
    batch_size: Count


def _only_trained(evaluate: EvaluateParams, info: ValidationInfo) -> EvaluateParams:
    """Methods that something is trained for, if they need it."""
    for key, kind, need in (
        ("rivals", WildRival, "training with the wild data"),
        ("encoders", Encoder, "training from scratch"),
    ):
        untrained = {*evaluate.methods} & {*get_args(kind)} - {*info.data.get(key, get_args(kind))}
        if untrained:
            names = ", ".join(method for method in evaluate.methods if method in untrained)
            raise ValueError(f"methods names {names}, which needs {need}; name it in {key}, too")
    return evaluate


class Params(Section):
    """All of params.yaml."""

    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**32, strict=True)], ...],
        Field(strict=False),
        AfterValidator(check.some_each_once),
    ]
    device: Annotated[str, AfterValidator(check.device)]
    launcher: Annotated[str, Field(min_length=1)]
    numerics: NumericsParams
    data: DataParams
    model: ModelParams
    train_id: Annotated[TrainIdParams, AfterValidator(_trained_somehow)]
    extract_grads: ExtractGradsParams
    filter: FilterParams
    train_ood: TrainOodParams
    rivals: Annotated[tuple[WildRival, ...], Field(strict=False), AfterValidator(check.each_once)]
    train_rival: TrainRivalParams
    encoders: Annotated[tuple[Encoder, ...], Field(strict=False), AfterValidator(check.each_once)]
    train_encoder: TrainEncoderParams
    evaluate: Annotated[EvaluateParams, AfterValidator(_only_trained)]

    @model_validator(mode="before")
    @classmethod
    def _all_methods(cls, raw: Any) -> Any:
        """`methods: all` stands for every method that there is a network for."""
        match raw:
            case {"evaluate": {"methods": "all"}}:
                trained = [
                    name
                    for key, kind in (("rivals", WildRival), ("encoders", Encoder))
                    for name in get_args(kind)
                    if isinstance(raw.get(key), list) and name in raw[key]  # others are complained of where they stand
                ]
                return raw | {"evaluate": raw["evaluate"] | {"methods": ["sal", *trained, *get_args(PosthocMethod)]}}
        return raw


@dataclass(frozen=True)
class Override:
    """A value that a flag put in place of the file's."""

    key: str
    value: Any
    in_file: Any


def load_params(path: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Params, list[Override]]:
    """Parse the file with `overrides` (dotted key → value) laid over it, and say which of them changed it."""
    raw = read_yaml(path)
    changed = [
        Override(key, value, lookup(raw, key)) for key, value in (overrides or {}).items() if lookup(raw, key) != value
    ]
    whole = f"{path.name} with its overrides" if overrides else path.name
    return validated(with_overrides(raw, overrides or {}), whole), changed


def validated(raw: Mapping[str, Any], name: str) -> Params:
    """The sections of a params.yaml of that name, or one error with all that is wrong with it."""
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        raise ParamsError(f"{name} is not valid\n{listing(error, Params)}") from None
