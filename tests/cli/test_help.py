"""What a user sees before any command runs: help, version, completion. It is fast because nothing heavy is imported."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from helpers.cli import CONSOLE_SCRIPT, process, salcli
from helpers.quick import OOD
from rich.markdown import Markdown
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


# --- imports

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
    done = process(sys.executable, "-c", IMPORTED, *unused, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    for (command, modules), imported in zip(unused.items(), json.loads(done.stderr), strict=True):
        assert not modules & set(imported), command


@pytest.mark.slow
def test_the_console_script_is_the_same_program() -> None:
    by_script, by_module = process(CONSOLE_SCRIPT, "--version"), process(sys.executable, "-m", "salcli", "--version")
    assert by_script.stdout == by_module.stdout == f"salcli {__version__}\n"
    assert by_script.returncode == by_module.returncode == 0


# --- help


def test_the_help_names_every_command_and_no_hidden_one() -> None:
    named = re.findall(r"^│ ([a-z][a-z-]+) ", salcli("--help").output, re.MULTILINE)
    assert sorted(named) == sorted(["data", *(name for commands in PANELS.values() for name in commands)])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_explained_within_100_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 100)
    command = COMMANDS[name]
    result = salcli(*name.split(), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    said = squeezed(result.stdout)
    for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
        assert text
        assert text.split("\n\n")[0].rstrip().endswith((".", ")"))
        assert squeezed(plain(text)) in said  # in full: no bracket is lost, no line is broken off
    for word in ("lest", "whoever", "mend", "anew", "one's own", "goes on"):
        assert not re.search(rf"\b{word}\b", result.stdout)


def squeezed(text: str) -> str:
    """Without white space and the frames of panels, which depend on the width."""
    return re.sub(r"[\s│]", "", text)


def plain(text: str) -> str:
    parsed = Markdown(text.split("\n\n")[0]).parsed
    return "".join(child.content or " " for token in parsed for child in token.children or ())


# --- completion


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_works_in_a_real_shell() -> None:
    script = f"""
        export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"
        eval "$(_SALCLI_COMPLETE=source_bash salcli)"
        complete -p salcli
        COMP_WORDS=(salcli filter --ood ph) COMP_CWORD=3
        _salcli_completion salcli
        echo "offers: ${{COMPREPLY[*]}}"
    """
    done = process("bash", "-c", script)
    assert "-F _salcli_completion salcli" in done.stdout
    assert "offers: photo-patches" in done.stdout
