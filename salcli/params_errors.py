"""What is wrong with a params.yaml, in words: every mistake with its key."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from salcli.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


def listing(error: ValidationError, model: type[BaseModel]) -> str:
    """A line for each mistake; `model` knows the keys that there are."""
    lines = [_explain(detail, model) for detail in error.errors()]
    width = max(len(key) for key, _ in lines)
    return "\n".join(f"  {key:<{width}}  {message}" for key, message in lines)


def _explain(detail: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    """The dotted key and one sentence."""
    where = [str(part) for part in detail["loc"]]
    key, value = ".".join(where), detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return key, f"no such key{_nearest_key(where, model)}"
        case "missing":
            return key, "is missing"
        case "literal_error":
            expected = detail["ctx"]["expected"]
            choices = re.findall(r"'(.*?)'", expected)
            return key, f"must be {expected}, got {value!r}{did_you_mean(str(value), choices)}"
        case "value_error":
            return key, str(detail["ctx"]["error"])
        case "model_type":
            return key, f"must be a section of keys and values, got {value!r}"
        case "tuple_type":
            return key, f"must be a list, got {value!r}"
        case kind:
            message = detail["msg"].replace("Input should be", "must be")
            return key, f"{message}, got {value!r}{_as_share(value) if kind.startswith('less_than') else ''}"


def _as_share(value: float) -> str:
    """People write 95 for 0.95; every upper bound that they can miss so is 1."""
    return f" (did you mean {value / 100:g}?)" if 2 <= value < 100 else ""


def _nearest_key(where: list[str], model: type[BaseModel]) -> str:
    """In its own section, else anywhere: people forget the section."""
    section: Any = model
    for part in where[:-1]:
        section = section.model_fields[part.replace("-", "_")].annotation
    own_keys = [field.alias or name for name, field in section.model_fields.items()]
    return did_you_mean(where[-1], own_keys) or did_you_mean(".".join(where), _dotted_keys(model))


def _dotted_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _dotted_keys(inner, f"{prefix}{field.alias or name}.")
        else:
            keys.append(prefix + name)
    return keys
