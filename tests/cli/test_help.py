"""What a user sees before any command runs: help and version. It is fast because nothing heavy is imported."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from helpers.cli import process, salcli
from helpers.quick import OOD
from typer.core import TyperGroup

from salcli import __version__
from salcli.cli.app import PANELS, app

HEAVY = {"torch", "torchvision", "numpy", "pandas", "scipy", "sklearn", "matplotlib", "h5py", "salcli.params.schema"}
SLOW = {"matplotlib", "pytorch_ood", "sklearn", "scipy.stats", "sympy", "torchvision", "torch._dynamo"}
LIGHT, STAGES = {"torch", "salcli.params.schema"} | SLOW, {"PIL"} | SLOW
ROOT = typer.main.get_command(app)
assert isinstance(ROOT, TyperGroup)
DATA = ROOT.commands["data"]
assert isinstance(DATA, TyperGroup)
COMMANDS: dict[str, Any] = {name: one for name, one in ROOT.commands.items() if name != "data"}
COMMANDS |= {f"data {name}": one for name, one in DATA.commands.items()}


# Runs commands one after the other in one process, and says what was imported after each.
IMPORTED = """
import json, sys
from salcli.cli import main
seen = []
for command in sys.argv[1:]:
    sys.argv = ["salcli", *command.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
    seen.append(list(sys.modules))
print(json.dumps(seen), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "unused",
    [
        {"--help": HEAVY, "filter --help": HEAVY, "data list": LIGHT | {"pandas"}, "table": LIGHT},
        {f"filter --ood {OOD} --scratch": STAGES | {"pandas"}, f"evaluate own --ood {OOD} --method msp": STAGES},
    ],
    ids=["quick commands", "stages"],
)
def test_a_command_imports_nothing_slow_that_it_does_not_need(unused: dict[str, set[str]], here: Path) -> None:
    salcli("table")  # params.yaml is checked once, by the schema
    done = process(sys.executable, "-c", IMPORTED, *unused, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    for (command, modules), imported in zip(unused.items(), json.loads(done.stderr), strict=True):
        assert not modules & set(imported), command


def test_the_help_names_every_command_and_no_hidden_one() -> None:
    assert salcli("--version").stdout == f"salcli {__version__}\n"
    named = re.findall(r"^│ ([a-z][a-z-]+) ", salcli("--help").output, re.MULTILINE)
    assert sorted(named) == sorted(["data", *(name for commands in PANELS.values() for name in commands)])


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_explained_and_fits(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    command = COMMANDS[name]
    result = salcli(*name.split(), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    assert not re.search(r"<[\w|-]* {2}", result.stdout), "a list of choices is broken in the middle of a word"
    for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
        assert text
        assert text.split("\n\n")[0].rstrip().endswith((".", ")"))
