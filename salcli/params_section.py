"""What sections of params.yaml are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Percentile = Annotated[float, Field(ge=1, lt=100)]  # from 1 on: a share like 0.9 is a mistake


class Section(BaseModel):
    """Frozen; takes no key that it does not know and no value of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SgdParams(Section):
    """A training run by stochastic gradient descent."""

    epochs: Count
    batch_size: Annotated[int, Field(ge=2, strict=True)]
    lr: Positive
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NotNegative
