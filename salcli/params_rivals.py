"""The sections of params.yaml with the numbers of rivals that are trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from salcli import params_checks as check
from salcli.params_section import Count, NotNegative, Number, Positive, Section, SgdParams, Share


class OeParams(Section):
    """Outlier Exposure (Hendrycks et al., 2019): wild samples should be predicted as every class alike."""

    loss_weight: Positive


class EnergyOeParams(Section):
    """Energy-OE (Liu et al., 2020): the energies of ID and wild samples should be beyond these margins."""

    loss_weight: Positive
    m_in: Annotated[float | Literal["auto"], PlainValidator(check.auto_or_number)]
    m_out: Annotated[float | Literal["auto"], PlainValidator(check.auto_or_number)]


class WoodsParams(Section):
    """WOODS (Katz-Samuels et al., 2022): wild samples should be called OOD, as far as two constraints allow."""

    false_alarms: Share
    loss_factor: Positive
    multiplier_lr: Positive
    penalty_growth: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    tolerance: NotNegative


class SconeParams(WoodsParams):
    """SCONE (Bai et al., 2023): WOODS with a margin on the energy of wild samples."""

    margin: Number


class StructureParams(Section):
    """STEP's projection, and the neighbours that it keeps."""

    neighbours: Annotated[int, Field(ge=2, strict=True)]
    ridge: Positive
    steps: Count
    batch_size: Count
    lr: Positive
    weight_decay: NotNegative
    margin: Positive


class StepParams(SgdParams):
    """STEP (Zhou et al., 2021): SimCLR by Adam, whose β₁ is the momentum; then a linear projection."""

    temperature: Positive
    projection: Count
    smallest_crop: Annotated[float, Field(gt=0, le=1)]
    structure: StructureParams


class TrainRivalParams(Section):
    """The numbers of each rival that is trained with the wild data. All but STEP have the schedule of train_ood."""

    oe: OeParams
    energy_oe: Annotated[EnergyOeParams, Field(alias="energy-oe")]
    woods: WoodsParams
    scone: SconeParams
    step: StepParams

    def of(self, rival: str) -> Section:
        """One rival's."""
        section = getattr(self, rival.replace("-", "_"))
        assert isinstance(section, Section)
        return section


class HeadParams(SgdParams):
    """Linear heads on the features of a frozen encoder; at 60, 75 and 90 % of the epochs, lr is multiplied."""

    lr_drop: Annotated[float, Field(gt=0, le=1)]


class EncoderParams(SgdParams):
    """An encoder that is trained by contrast; the learning rate goes up in a line, then down in a cosine."""

    warmup_epochs: Annotated[int, Field(ge=0, strict=True)]
    warmup_lr: Positive
    temperature: Positive
    projection: Count
    smallest_crop: Annotated[float, Field(gt=0, le=1)]
    head: HeadParams

    @model_validator(mode="after")
    def _has_time_to_warm_up(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs is {self.warmup_epochs}, but must be less than epochs, {self.epochs}")
        return self


class TrainEncoderParams(Section):
    """The numbers of each rival that is trained from scratch on the ID data."""

    knn_plus: Annotated[EncoderParams, Field(alias="knn-plus")]
    csi: EncoderParams

    def of(self, encoder: str) -> EncoderParams:
        """One rival's."""
        section = getattr(self, encoder.replace("-", "_"))
        assert isinstance(section, EncoderParams)
        return section
