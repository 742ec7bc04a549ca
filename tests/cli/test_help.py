"""What a user sees before any command runs: help, version, completion. It is fast because nothing heavy is imported."""

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
ROOT = typer.main.get_command(app)
assert isinstance(ROOT, TyperGroup)
DATA = ROOT.commands["data"]
assert isinstance(DATA, TyperGroup)
COMMANDS: dict[str, Any] = {name: one for name, one in ROOT.commands.items() if name != "data"}
COMMANDS |= {f"data {name}": one for name, one in DATA.commands.items()}


# --- imports


def imported_by(*arguments: str, cwd: Path) -> set[str]:
    """The modules that the real program imports until it ends without an error."""
    done = process(sys.executable, "-X", "importtime", "-m", "salcli", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "unused"),
    [
        ("--help", HEAVY),
        ("filter --help", HEAVY),
        ("table", {"torch", "salcli.params.schema"} | SLOW),
        ("data list", {"torch", "pandas", "salcli.params.schema"} | SLOW),
        (f"filter --ood {OOD} --scratch", {"pandas", "PIL"} | SLOW),
        (f"evaluate own --ood {OOD} --method msp", {"PIL"} | SLOW),
    ],
)
def test_a_command_imports_nothing_slow_that_it_does_not_need(command: str, unused: set[str], here: Path) -> None:
    modules = imported_by(*command.split(), cwd=here)
    assert "salcli.cli.app" in modules
    assert not modules & unused


@pytest.mark.slow
def test_the_console_script_is_the_same_program() -> None:
    by_script, by_module = process(CONSOLE_SCRIPT, "--version"), process(sys.executable, "-m", "salcli", "--version")
    assert by_script.stdout == by_module.stdout == f"salcli {__version__}\n"
    assert by_script.returncode == by_module.returncode == 0


# --- help


def test_the_help_names_every_command_and_no_hidden_one() -> None:
    shown = salcli("--help").output
    named = re.findall(r"^│ ([a-z][a-z-]+) ", shown, re.MULTILINE)
    assert named == [*PANELS["Data and experiments"], "data", *(
        name for panel, commands in PANELS.items() if panel != "Data and experiments" for name in commands
    )]  # fmt: skip


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


def test_without_a_command_the_help_is_shown() -> None:
    result = salcli()
    assert result.exit_code == 2
    assert "Usage: salcli" in result.output


# --- completion


def complete(*words: str) -> list[str]:
    """What the shell would offer for the last word."""
    done = process(
        CONSOLE_SCRIPT, _SALCLI_COMPLETE="complete_bash", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_commands_options_and_names_are_completed() -> None:
    assert complete("salcli", "tra") == ["train-id", "train-ood", "train-encoder"]
    assert complete("salcli", "filter", "--thr") == ["--threshold-quantile"]
    assert complete("salcli", "filter", "--ood", "digits-8") == ["digits-8-9"]
    assert complete("salcli", "table", "--format", "l") == ["latex"]
    assert complete("salcli", "init", "--preset", "mix") == ["mixing-ratio"]


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
