"""What a single value of params.yaml may be. Each check gives the value back, or says what would be right."""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeGuard, TypeVar

from pydantic import Field, PlainValidator, TypeAdapter, ValidationInfo

from salcli.data.catalogue import DATA_SETS, labeled_sets
from salcli.data.own_sets import NAME, TAKEN
from salcli.errors import SalError, unknown_name
from salcli.models.backbone_names import check_backbone_name

T = TypeVar("T")
UNKNOWN = "unknown"


def some_each_once(items: tuple[T, ...]) -> tuple[T, ...]:
    """A list that is not empty and repeats nothing."""
    if not items:
        raise ValueError("must name at least one item, got []")
    return each_once(items)


def each_once(items: tuple[T, ...]) -> tuple[T, ...]:
    """A list that repeats nothing."""
    repeated = sorted({str(item) for item in items if items.count(item) > 1})
    if repeated:
        raise ValueError(f"must name each item once, got {', '.join(repeated)} more than once")
    return items


def own_sets(places: dict[str, str]) -> dict[str, str]:
    """Names that can stand in commands, file names and dvc.yaml, and that are not those of known sets."""
    for name in places:
        if not NAME.fullmatch(name):
            raise ValueError(f"a set's name must be of a-z, 0-9, - and _, and begin with a letter, got {name!r}")
        if name in DATA_SETS or name in TAKEN:
            raise ValueError(f"{name} has a meaning of its own here; choose another name")
    return places


def labeled(name: str, info: ValidationInfo) -> str:
    """A data set that can be the ID set."""
    sets = [*labeled_sets(), *info.data.get("own", ())]
    if name not in sets:
        raise ValueError(str(unknown_name("ID set", name, sets)))
    return name


def known(name: str, info: ValidationInfo) -> str:
    """A data set of the catalogue, or of one's own."""
    sets = [*DATA_SETS, *info.data.get("own", ())]
    if name not in sets:
        raise ValueError(str(unknown_name("OOD set", name, sets)))
    return name


_PI: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(gt=0, le=1, strict=True)])


def share_or_unknown(value: object) -> object:
    """`unknown`, or a share that may be 1."""
    return value if value == UNKNOWN else _PI.validate_python(value)


def not_the_id_set(names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """OOD sets, none of which is the ID set."""
    if info.data.get("id") in names:
        raise ValueError(f"must not name the ID set, got {info.data['id']}")
    return names


def device(name: str) -> str:
    """A device's name; whether it is there is another question."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9]\d?))?", name):  # torch knows no larger numbers
        raise ValueError(str(unknown_name("device", name, ["auto", "cpu", "cuda", "cuda:0", "mps"])))
    return name


def backbone(name: str) -> str:
    """A network that can be built."""
    try:
        return check_backbone_name(name)
    except SalError as error:
        raise ValueError(str(error)) from None


def _is_number(value: object) -> TypeGuard[float]:
    """An int or a float, and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def channel_values(*, positive: bool) -> PlainValidator:
    """`auto`, or a number for each channel."""

    def check(value: object) -> object:
        if value == "auto":
            return value
        numbers = value if isinstance(value, list | tuple) else ()
        if not numbers or not all(_is_number(one) and (one > 0 or not positive) for one in numbers):
            kind = "positive number" if positive else "number"
            raise ValueError(f"must be auto, or a list with one {kind} for each channel, got {value!r}")
        return tuple(float(one) for one in numbers)

    return PlainValidator(check)


def test_share(value: object) -> object:
    """`official`, or a share."""
    if value == "official" or (_is_number(value) and 0 < value < 1):
        return value
    raise ValueError(f"must be official, or a share between 0 and 1, got {value!r}")


def auto_or_count(value: object) -> object:
    """`auto`, or a count."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"must be auto or an integer of at least 1, got {value!r}")


def auto_or_number(value: object) -> object:
    """`auto`, or a number."""
    if value == "auto":
        return value
    if _is_number(value):
        return float(value)
    raise ValueError(f"must be auto or a number, got {value!r}")
