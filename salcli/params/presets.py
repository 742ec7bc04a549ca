"""The paper's experiments: presets.yaml holds how each differs from the default params.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from textwrap import wrap
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from salcli.errors import unknown_name
from salcli.params.reading import edited, with_overrides

DEFAULT = "default"
PACKAGE = files("salcli")
DEFAULT_PARAMS = PACKAGE / "params" / "params.yaml"  # also the repository's own params.yaml, which links to it
OVERRIDES = PACKAGE / "params" / "presets.yaml"


@dataclass(frozen=True)
class Preset:
    """An experiment; `paper` is where the paper has it, empty for the default."""

    name: str
    title: str
    paper: str
    note: str
    values: dict[str, Any] = field(default_factory=dict)  # dotted keys of params.yaml that differ from the default
    comments: dict[str, str] = field(default_factory=dict)  # dotted keys with a comment of their own


@cache
def presets() -> dict[str, Preset]:
    """All presets in the order of the file: the default first."""
    written = YAML().load(OVERRIDES.read_text(encoding="utf-8"))  # round trip: the comments count
    found = {}
    for name, about in written["presets"].items():
        layers = [about.get("set", CommentedMap())]
        base = about.get("extends")
        while base is not None:
            layers.insert(0, written["bases"][base])
            base = layers[0].get("extends")
        values: dict[str, Any] = {}
        comments: dict[str, str] = {}
        for layer in layers:
            changed = _flat(layer, default_params())
            values |= changed
            comments = {key: text for key, text in comments.items() if key not in changed} | _comments(layer)
        if name != DEFAULT:
            trained = [one for key in ("variants", "rivals", "encoders") for one in values.get(key, [])]
            # all-id is no row, but the network of rows such as knn@all-id
            values["evaluate.methods"] = [one for one in (*trained, *about.get("scores", [])) if one != "all-id"]
        found[name] = Preset(name, about["title"], about["paper"], about["note"], values, comments)
    return found


def preset(name: str) -> Preset:
    """Look one up by name."""
    if name not in presets():
        raise unknown_name("preset", name, presets())
    return presets()[name]


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
            flat[prefix + key] = _plain(value)
    return flat


def _plain(value: Any) -> Any:
    """Built-in types instead of ruamel's, which remember how they were written."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


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
    lines = [f"{chosen.name}: {chosen.title}", f"Paper: {chosen.paper} (Du et al., ICLR 2024)", *note]
    return "".join(f"# {line}\n" for line in lines)
