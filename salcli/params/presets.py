"""The paper's experiments: presets.yaml holds how each differs from the default params.yaml."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from textwrap import wrap
from typing import Any

from ruamel.yaml import YAML

from salcli.errors import SalError, unknown_name
from salcli.params.reading import edited, with_overrides

DEFAULT = "default"
AND = " + "  # between the names of an experiment and its additions
CAPTIONS = (
    "Rivals have the schedules of the captions (caption-schedules); those of their own papers: one more "
    "`--preset own-schedules`."
)
PACKAGE = files("salcli")
DEFAULT_PARAMS = PACKAGE / "params" / "params.yaml"  # also the repository's own params.yaml, which links to it
OVERRIDES = PACKAGE / "params" / "presets.yaml"


@dataclass(frozen=True)
class Preset:
    """An experiment, or what can be added to one; `paper` is where the paper has it, empty for the default."""

    name: str
    title: str
    paper: str
    note: str
    not_stated: str = ""  # what the paper leaves open, where we took what its other tables have
    values: dict[str, Any] = field(default_factory=dict)  # dotted keys of params.yaml that differ from the default


@cache
def presets() -> dict[str, Preset]:
    """All experiments in the order of the file: the default first."""
    found = {}
    for name, about in _written()["presets"].items():
        one = _preset(name, about)
        if name != DEFAULT:
            trained = [row for key in ("variants", "rivals", "encoders") for row in one.values.get(key, [])]
            # all-id is no row, but the network of rows such as knn@all-id
            one.values["evaluate.methods"] = [row for row in (*trained, *about.get("scores", [])) if row != "all-id"]
        found[name] = one
    return found


@cache
def additions() -> dict[str, Preset]:
    """What can be added to any experiment."""
    return {name: _preset(name, about) for name, about in _written()["additions"].items()}


def preset(*names: str) -> Preset:
    """Look up an experiment, the default if none is named, with the additions that are named."""
    known = presets() | additions()
    for name in names:
        if name not in known:
            raise unknown_name("preset", name, known)
    experiments = [name for name in names if name in presets()] or [DEFAULT]
    if len(experiments) > 1:
        raise SalError(
            f"presets {' and '.join(experiments)} are experiments: take one; to any, add {', '.join(additions())}"
        )
    chosen = presets()[experiments[0]]
    added = [additions()[name] for name in names if name in additions()]
    if not added and _has_scheduled_rivals(chosen):
        return replace(chosen, note=f"{chosen.note} {CAPTIONS}")
    for one in added:
        chosen = replace(
            chosen,
            name=f"{chosen.name}{AND}{one.name}",
            note=f"{chosen.note} With {one.name}: {one.note}",
            values={**chosen.values, **one.values},
        )
    return chosen


def _has_scheduled_rivals(chosen: Preset) -> bool:
    """Whether it trains methods whose schedules an addition changes."""
    trained = {row for key in ("rivals", "encoders") for row in chosen.values.get(key, [])}
    return any(key.split(".")[1] in trained for one in additions().values() for key in one.values)


def resolved(chosen: Preset, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every key of params.yaml with the preset's value, or that of `values` (by dotted key)."""
    return with_overrides(default_params(), {**chosen.values, **(values or {})})


def text(chosen: Preset, values: Mapping[str, Any] | None = None) -> str:
    """A complete params.yaml: the default's text with the preset's header and values, then `values`."""
    written = default_text()
    if chosen.name != DEFAULT:
        _, _, body = written.partition("\n\n")
        written = f"{_header(chosen)}\n{body}"
    return edited(written, {**chosen.values, **(values or {})})


def default_text() -> str:
    """The default params.yaml as it is written."""
    return DEFAULT_PARAMS.read_text(encoding="utf-8")


@cache
def default_params() -> dict[str, Any]:
    """The default values. Shared: `with_overrides` copies them."""
    values: dict[str, Any] = YAML(typ="safe", pure=True).load(default_text())
    return values


@cache
def _written() -> dict[str, Any]:
    written: dict[str, Any] = YAML(typ="safe", pure=True).load(OVERRIDES.read_text(encoding="utf-8"))
    return written


def _preset(name: str, about: Mapping[str, Any]) -> Preset:
    values: dict[str, Any] = {}
    for layer in _layers(about):
        values |= _flat(layer, default_params())
    return Preset(name, about["title"], about["paper"], about["note"], about.get("not_stated", ""), values)


def _layers(about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Overrides, those that count less first. A base is nothing but overrides; others have them under `set`."""
    bases = about.get("extends", [])
    for base in [bases] if isinstance(bases, str) else bases:
        yield from _layers(_written()["bases"].get(base) or _written()["additions"][base])
    yield about.get("set", {}) if "title" in about else {key: about[key] for key in about if key != "extends"}


def _flat(overrides: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested overrides by dotted key. What is not a section of the default params (a new variant) stays a mapping."""
    flat: dict[str, Any] = {}
    for key, value in overrides.items():
        section = defaults.get(key)
        if isinstance(value, dict) and isinstance(section, dict) and section:
            flat |= _flat(value, section, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _header(chosen: Preset) -> str:
    note = wrap(f"Note: {chosen.note}", width=116, break_long_words=False, break_on_hyphens=False)
    paper = [f"Paper: {chosen.paper} (Du et al., ICLR 2024)"] if chosen.paper else []
    lines = [f"{chosen.name}: {chosen.title}", *paper, *note]
    return "".join(f"# {line}\n" for line in lines)
