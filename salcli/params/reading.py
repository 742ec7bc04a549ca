"""Reading params.yaml as plain values, setting overrides, and editing its text. Needs neither pydantic nor torch."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from salcli.errors import ParamsError, UnknownNameError, check_regular, unknown_name

AVERAGE = "average"  # the section of a table that has the mean over all sets


def read_yaml(path: Path) -> dict[str, Any]:
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ParamsError(
            f"{path} does not exist; start salcli in a folder with a params.yaml, or name one with --params"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path} cannot be read: {error}") from None
    content = parsed(text, path.name)
    if content is None:
        raise ParamsError(f"{path.name} is empty")
    if not isinstance(content, dict):
        raise ParamsError(f"{path.name} must hold keys and values, got {content!r:.60}")
    return content


def parse_assignment(text: str) -> tuple[str, Any]:
    """KEY=VALUE of --set: a dotted key and a YAML value."""
    key, separator, value = text.partition("=")
    if not separator or not all(part.strip() for part in key.split(".")):
        raise ParamsError(f"--set {text}: must be KEY=VALUE, for example --set filter.threshold_quantile=0.9")
    return key.strip(), parsed(value, f"--set {text}: the value")


def parsed(text: str, name: str) -> Any:
    """YAML 1.2, as DVC reads it: 1e-3 is a number."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except Exception as error:  # odd text gives odd exceptions: !!bool x is a KeyError
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark and "\n" in text else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ParamsError(f"{name} is not valid YAML: {problem}{line}") from None


def lookup(content: Mapping[str, Any], key: str) -> Any:
    """The value behind a dotted key, None where there is none."""
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def with_overrides(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with every dotted key set. Unknown keys are set too: validation then names them."""
    merged = deepcopy(dict(content))
    for key, value in overrides.items():
        _set(merged, key, value)
    return merged


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(content.get(section), dict):
            content[section] = {}
        content = content[section]
    content[last] = value


def edited(text: str, values: Mapping[str, Any]) -> str:
    """The text of a params file with dotted keys set; everything else, comments too, stays as it is.

    Unknown keys are set as well: validation then names them.
    """
    if not values:
        return text
    yaml = YAML()  # round trip: as safe as its safe loader, and keeps comments
    yaml.width = 4096  # never breaks a line
    yaml.preserve_quotes = True
    # ruamel would write nothing after the colon
    yaml.representer.add_representer(type(None), lambda it, _: it.represent_scalar("tag:yaml.org,2002:null", "null"))
    content = yaml.load(text)
    for key, value in values.items():
        _set(content, key, _as_written(value))
    written = StringIO()
    yaml.dump(content, written)
    return written.getvalue()


def _as_written(value: Any, inside: bool = False) -> Any:
    """Lists and mappings stay on one line, as people write them. Inside them, DVC reads MODULE:NAME only in quotes."""
    items: CommentedSeq | CommentedMap
    if isinstance(value, list):
        items = CommentedSeq(_as_written(one, inside=True) for one in value)
    elif isinstance(value, dict):
        items = CommentedMap({key: _as_written(one, inside=True) for key, one in value.items()})
    else:
        return DoubleQuotedScalarString(value) if inside and isinstance(value, str) and ":" in value else value
    items.fa.set_flow_style()
    return items


def check_groups(groups: Mapping[str, Any], sets: Collection[str]) -> None:
    """Raise a SalError for what is no test set; a group must not be called like a section of a table."""
    for group, names in groups.items():
        if not isinstance(names, list | tuple):
            raise ParamsError(f"{group} must be a list, got {names!r} (did you mean [{names}]?)")
        if group in sets or group == AVERAGE:
            raise UnknownNameError(f"{group} is taken by a section of the table; call the group something else")
        for name in names:
            if name not in sets:
                raise unknown_name("set of data.ood and data.test_ood", str(name), sets)


def params_data_root(params_file: Path) -> str | None:
    """data.root of a params file; None where there is no such file or key."""
    if not params_file.exists():
        return None
    root = lookup(read_yaml(params_file), "data.root")
    if root is not None and not (isinstance(root, str) and root.strip()):
        raise ParamsError(f"{params_file}: data.root must be a folder, got {root!r:.60}")
    return root
