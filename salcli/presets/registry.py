"""The presets by name: their first lines say what they are, the rest is a params.yaml as it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML

from salcli.errors import unknown_name

DEFAULT = "default"
HEADER = re.compile(
    r"# (?P<name>[\w-]+): (?P<title>.+)\n# Paper: (?P<paper>.+) \(.+\)\n# Note: (?P<note>(?:.+\n)+?)#\n"
)
# params.yaml of the repository, which starts without such lines
DEFAULT_HEADER = {
    "title": "a first look, on small images",
    "paper": "",
    "note": "no download and no GPU; minutes on a laptop.",
}


@dataclass(frozen=True)
class Preset:
    """A params.yaml that is ready to use. `paper` is the place in the paper, empty where there is none."""

    name: str
    title: str
    paper: str
    note: str
    params: dict[str, Any]
    text: str


@cache
def presets() -> dict[str, Preset]:
    """All of them: the default, then in alphabetical order."""
    found = {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in files("salcli.presets").iterdir()
        if file.name.endswith(".yaml")
    }
    return {name: _parse(name, found[name]) for name in sorted(found, key=lambda name: (name != DEFAULT, name))}


def preset(name: str) -> Preset:
    """Look one up."""
    if name not in presets():
        raise unknown_name("preset", name, presets())
    return presets()[name]


def _parse(name: str, text: str) -> Preset:
    header = HEADER.match(text)
    about = header.groupdict() if header else DEFAULT_HEADER
    return Preset(
        name=name,
        title=about["title"],
        paper=about["paper"],
        note=about["note"].replace("\n# ", " ").strip(),
        params=YAML(typ="safe", pure=True).load(text),
        text=text,
    )
