"""What is wrong with params.yaml, in words: what its sections say of each other, and what pydantic found.

Nothing here decides what is computed, so an edit of this module re-runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from salcli.errors import SalError, did_you_mean, unknown_name
from salcli.methods.base import (
    ALL_ID,
    LBFGS,
    SGD,
    IdTrained,
    InputScore,
    PostHoc,
    WildTrained,
    built_in,
    find_method,
    is_custom_method,
)
from salcli.methods.sal import SAL_PLUS
from salcli.models.backbones import AUTO, LINEAR, is_published, takes_vectors
from salcli.models.pretrained import PRETRAINED

if TYPE_CHECKING:
    from salcli.params.schema import Params

VARIANT_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
# folders beside those of the variants, and a table row
NOT_VARIANTS = {"representation", "networks", "evaluation", "average"}


def mistakes(params: Params) -> Iterator[tuple[str, str]]:
    """Each mistake as its key and one sentence."""
    if wrong := list(_wrong_variants(params)):
        yield from wrong  # others would follow from these
        return
    yield from _wrong_protocols(params)
    yield from _wrong_network(params)
    if params.model.takes_vectors:
        yield from _wrong_for_vectors(params)
    for name in params.evaluate.methods:
        yield from _wrong_method(params, "evaluate.methods", name)
    if params.detector.method != AUTO:
        yield from _wrong_method(params, "detector.method", params.detector.method, AUTO)
    yield from _missing_params(params)


def _wrong_variants(params: Params) -> Iterator[tuple[str, str]]:
    for key, name in [("variants", one) for one in params.variants] + [("filters", one) for one in params.filters]:
        if name not in params.variant:
            yield key, f"names {name}, which variant does not define{did_you_mean(name, params.variant)}"
        elif key == "filters" and name in params.variants:
            yield key, f"names {name}, which is filtered already as one of variants"
        elif key == "filters" and name == SAL_PLUS:
            continue
        elif not VARIANT_NAME.fullmatch(name) or name in NOT_VARIANTS or name in built_in():
            yield key, f"{name!r} cannot be a variant's name; use a-z, 0-9, -, _ and ., such as sal-2"
    for name, overrides in params.variant.items():
        if unknown := overrides.keys() - {"filter", "train_ood"}:
            yield f"variant.{name}", f"may override filter and train_ood, got {', '.join(sorted(unknown))}"
        for section in sorted(overrides.keys() - unknown):
            try:
                params.overridden(name, section)
            except ValidationError as error:
                yield from explained(error, type(getattr(params, section)), f"variant.{name}.{section}.")


def _wrong_protocols(params: Params) -> Iterator[tuple[str, str]]:
    """What is held out is what a variant needs, and ID data are recycled in the released protocol only."""
    data, known = params.data, built_in()
    own = {name: params.variant[name].get("filter", {}) for name in (*params.variants, *params.filters)}
    calibrations = {name: one.get("calibration", params.filter.calibration) for name, one in own.items()}
    held_out = [name for name, one in calibrations.items() if one == "holdout"]
    held_out += [
        one
        for one in params.evaluate.methods
        if one in known and getattr(params.method(one), "needs_calibration", False)
    ]
    others = [name for name, one in calibrations.items() if one != "id-svd"]
    if data.mixing == "recycle" and others:
        yield (
            "data.mixing",
            f"is recycle, which is the released code's, but {', '.join(others)} is not (calibration id-svd); "
            "use disjoint, or the preset released",
        )
    if data.calibration is None and data.id_shares.calibration == 0 and held_out:
        yield (
            "data.id_shares.calibration",
            f"is 0, but {', '.join(held_out)} needs held-out ID data; give it a share, name a set in "
            "data.calibration, or set filter.calibration to train or id-svd",
        )


def _wrong_network(params: Params) -> Iterator[tuple[str, str]]:
    data, model, train_id = params.data, params.model, params.train_id
    name = model.backbone
    if train_id.solver == LBFGS and model.trained != LINEAR:
        yield "train_id", f"solver lbfgs fits linear heads, on vectors; for {name} use sgd, or freeze it"
    if train_id.solver == SGD and train_id.epochs == 0 and (model.frozen or not model.brings_weights):
        yield "train_id", "epochs is 0, so model.weights must name a file; or train for at least one epoch"
    if params.train_ood.solver == LBFGS and model.trained != LINEAR:
        yield "train_ood.solver", f"lbfgs fits linear heads, on vectors; for {name} use sgd"
    if model.frozen and takes_vectors(name):
        yield "model.frozen", f"is for networks that take images; {name} takes vectors"
    elif model.frozen and not model.brings_weights:
        yield (
            "model.frozen",
            "needs trained weights: set model.weights to a file, or to pretrained for torchvision: and timm: "
            f"networks, got {name} without",
        )
    if model.weights == PRETRAINED and not is_published(name):
        yield "model.weights", f"only torchvision: and timm: publish weights; name a file for {name}"
    if takes_vectors(name):
        for key, value in (("image_size", data.image_size), ("channels", data.channels)):
            if value is not None:
                yield f"data.{key}", f"must be null for vectors, which {name} takes, got {value}"
    elif not model.frozen and None in (data.image_size, data.channels):
        yield "data.image_size", f"and data.channels must be given for images, which {name} takes"


def _wrong_for_vectors(params: Params) -> Iterator[tuple[str, str]]:
    for key in ("rivals", "encoders"):
        for name in getattr(params, key):
            if getattr(find_method(name), "needs_images", False):
                yield key, f"{name} learns from views of images, and these samples are vectors; remove it"
    for key, section in (("train_id", params.train_id), ("train_ood", params.train_ood)):
        if section.augment != "none":
            yield f"{key}.augment", f"must be none for vectors, got {section.augment}"
    if not params.model.frozen and (params.model.mean, params.model.std) != (AUTO, AUTO):
        yield "model.mean", "and model.std must be auto for vectors: they are standardized with the ID data's"


def _wrong_method(params: Params, where: str, name: str, *also: str) -> Iterator[tuple[str, str]]:
    """A method that has to be trained must be named where that is done."""
    score, _, network = name.partition("@")
    if network:
        found = built_in(PostHoc).get(score) or built_in(InputScore).get(score)
        if found is None or getattr(found, "needs_wild", False) or getattr(found, "needs_calibration", False):
            yield where, f"{name} must be a post-hoc score of ID data alone, such as knn@{ALL_ID}"
        elif network != ALL_ID or ALL_ID not in params.encoders or where != "evaluate.methods":
            yield where, f"{name} is a row of evaluate.methods, with {ALL_ID} named in encoders, too"
    elif name not in (*params.variants, *params.rivals, *params.encoders):
        known = [*params.variants, *built_in(), *also]
        try:
            if name not in known and not is_custom_method(name):
                raise unknown_name("method", name, known)
            found = find_method(name)
        except SalError as error:
            yield where, str(error)
            return
        for key, kind in (("rivals", WildTrained), ("encoders", IdTrained)):
            if issubclass(found, kind):
                yield where, f"names {name}, which has to be trained; name it in {key}, too"


def _missing_params(params: Params) -> Iterator[tuple[str, str]]:
    """DVC needs the key of a method that is trained, also where it has nothing to set."""
    trained = [*params.rivals, *params.encoders]
    for name in dict.fromkeys([*trained, *params.evaluate.methods, params.filter.score, params.detector.method]):
        if not is_custom_method(name) or name in params.methods.custom:
            continue
        with suppress(SalError):  # `_wrong_method` names it
            needed = [key for key, value in find_method(name).Params.model_fields.items() if value.is_required()]
            if needed or name in trained:
                keys = ", ".join(f"{key}: …" for key in needed)
                yield "methods", f"has no entry for {name}; add {name}: {{{keys}}}"


# -- errors in words


def explained(error: ValidationError, model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each mistake as its dotted key and one sentence; `model` knows the valid keys."""
    for detail in error.errors():
        where = [str(part) for part in detail["loc"]]
        yield f"{prefix}{'.'.join(where)}".rstrip("."), _sentence(detail, where, model)


def _sentence(detail: ErrorDetails, where: list[str], model: type[BaseModel]) -> str:
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return f"no such key{_nearest_key(where, model)}"
        case "missing":
            return "is missing"
        case "literal_error":
            expected = detail["ctx"]["expected"]
            choices = re.findall(r"'(.*?)'", expected)
            return f"must be {expected}, got {value!r}{did_you_mean(str(value), choices)}"
        case "value_error":
            return str(detail["ctx"]["error"])
        case "model_type" | "model_attributes_type":
            return f"must be a section of keys and values, got {value!r}"
        case "tuple_type":
            return f"must be a list, got {value!r}"
        case kind:
            message = detail["msg"].replace("Input should be", "must be")
            return f"{message}, got {value!r}{_as_share(value) if kind.startswith('less_than') else ''}"


def _as_share(value: float) -> str:
    """People write 95 for 0.95; every upper bound that can be missed in this way is 1."""
    return f" (did you mean {value / 100:g}?)" if 2 <= value < 100 else ""


def _nearest_key(where: list[str], model: type[BaseModel]) -> str:
    """In the same section, else anywhere: people forget the section."""
    section: Any = model
    for part in where[:-1]:
        custom = find_method(part).Params if is_custom_method(part) else None
        section = custom or section.model_fields[part.replace("-", "_")].annotation
    keys = [field.alias or name for name, field in section.model_fields.items()]
    return did_you_mean(where[-1], keys) or did_you_mean(".".join(where), _dotted_keys(model))


def _dotted_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _dotted_keys(inner, f"{prefix}{field.alias or name}.")
        else:
            keys.append(prefix + (field.alias or name))
    return keys
