"""The paper's experiments: presets.yaml holds how each differs from the default params.yaml."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from textwrap import wrap
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from salcli.errors import UsageMistakeError, unknown_name
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
    comments: dict[str, str] = field(default_factory=dict)  # dotted keys with a comment of their own


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
        raise UsageMistakeError(
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
            comments={**chosen.comments, **one.comments},
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
    """A complete params.yaml: the default's text with the preset's values, comments and header, then `values`."""
    written = default_text()
    if chosen.name != DEFAULT:
        body = written.partition("\n\n")[2]
        written = f"{_header(chosen)}\n{_commented(edited(body, chosen.values), chosen.comments)}"
    return edited(written, values or {})


def default_text() -> str:
    """The default params.yaml as it is written."""
    return DEFAULT_PARAMS.read_text(encoding="utf-8")


@cache
def default_params() -> dict[str, Any]:
    """The default values. Shared: `with_overrides` copies them."""
    values: dict[str, Any] = YAML(typ="safe", pure=True).load(default_text())
    return values


@cache
def _written() -> CommentedMap:
    written: CommentedMap = YAML().load(OVERRIDES.read_text(encoding="utf-8"))  # round trip: the comments count
    return written


def _preset(name: str, about: CommentedMap) -> Preset:
    values: dict[str, Any] = {}
    comments: dict[str, str] = {}
    for layer in _layers(about):
        changed = _flat(layer, default_params())
        values |= changed
        comments = {key: text for key, text in comments.items() if key not in changed} | _comments(layer)
    return Preset(name, about["title"], about["paper"], about["note"], about.get("not_stated", ""), values, comments)


def _layers(about: CommentedMap) -> Iterator[CommentedMap]:
    """Overrides, those that count less first. A base is nothing but overrides; others have them under `set`."""
    bases = about.get("extends", [])
    for base in [bases] if isinstance(bases, str) else bases:
        yield from _layers(_written()["bases"].get(base) or _written()["additions"][base])
    yield about.get("set", CommentedMap()) if "title" in about else about


def _flat(overrides: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested overrides by dotted key. What is not a section of the default params (a new variant) stays a mapping."""
    flat: dict[str, Any] = {}
    for key, value in overrides.items():
        if prefix == "" and key == "extends":
            continue
        section = defaults.get(key)
        if isinstance(value, dict) and isinstance(section, dict) and section:
            flat |= _flat(value, section, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value))  # built-in types instead of ruamel's
    return flat


def _comments(overrides: CommentedMap, prefix: str = "") -> dict[str, str]:
    """The comments at the ends of lines, by dotted key."""
    found: dict[str, str] = {}
    for key, value in overrides.items():
        if isinstance(value, CommentedMap):
            found |= _comments(value, f"{prefix}{key}.")
        tokens = overrides.ca.items.get(key)
        first_line = tokens[2].value.partition("\n")[0] if tokens and tokens[2] else ""
        if first_line.startswith("#"):
            found[prefix + key] = first_line.removeprefix("#").strip()
    return found


def _commented(written: str, comments: Mapping[str, str]) -> str:
    """The text with other comments at the ends of the lines of some keys."""
    content, lines = YAML().load(written), written.splitlines(keepends=True)
    for key, comment in comments.items():
        *sections, last = key.split(".")
        section = content
        for name in sections:
            section = section[name]
        line, _ = section.lc.key(last)
        code = lines[line].partition(" #")[0].rstrip()
        lines[line] = f"{code:<27} # {comment}\n"
    return "".join(lines)


def _header(chosen: Preset) -> str:
    note = wrap(f"Note: {chosen.note}", width=116, break_long_words=False, break_on_hyphens=False)
    paper = [f"Paper: {chosen.paper} (Du et al., ICLR 2024)"] if chosen.paper else []
    lines = [f"{chosen.name}: {chosen.title}", *paper, *note]
    return "".join(f"# {line}\n" for line in lines)
