"""What a command loads and builds before it starts: `dvc repro` starts dozens of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from conftest import OOD, SEED
from rich.text import Text
from typer.testing import CliRunner

from salcli.artifacts.layout import Workspace
from salcli.cli import app
from salcli.cli.help_text import in_markup
from salcli.cli.lazy_group import LazyGroup

# Each takes from 0.1 to 2 s. sympy comes with torch's compiler.
SLOW = {"matplotlib", "pandas", "pytorch_ood", "sklearn", "scipy.stats", "sympy", "torchvision", "torch._dynamo"}
SCRATCH = ["--seed", str(SEED), "--scratch"]
STAGES = {
    "prepare": (["prepare", "wild", "--ood", OOD], {"torch", "scipy"} | SLOW),
    "train-id": (["train-id", "--set", "train_id.epochs=1"], {"PIL"} | SLOW),
    "extract-grads": (["extract-grads", "wild", "--ood", OOD], {"PIL"} | SLOW),
    "filter": (["filter", "--ood", OOD], {"PIL"} | SLOW),
    "train-ood": (["train-ood", "--ood", OOD, "--method", "woods", "--set", "train_ood.epochs=1"], {"PIL"} | SLOW),
    "evaluate": (["evaluate", "own", "--ood", OOD], {"PIL"} | SLOW - {"pandas"}),
}


def imported_by(arguments: list[str], folder: Path) -> set[str]:
    """The modules that the real program imports until it has ended well."""
    command = [sys.executable, "-X", "importtime", "-m", "salcli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_nothing_slow_that_it_does_without(stage: str, workspace: Workspace) -> None:
    arguments, unused = STAGES[stage]
    modules = imported_by([*arguments, *SCRATCH], workspace.root)
    assert f"salcli.stages.{stage.replace('-', '_')}" in modules
    assert not modules & unused


def group() -> LazyGroup:
    built = typer.main.get_command(app)
    assert isinstance(built, LazyGroup)
    return built


@pytest.mark.parametrize("name", group().later)
def test_the_outline_of_a_command_is_what_the_command_says_of_itself(name: str) -> None:
    outline, whole = group().commands[name], group().whole(name)
    assert isinstance(outline.help, str)
    assert outline.help == whole.help.split("\n\n")[0]
    assert (outline.name, outline.hidden) == (whole.name, whole.hidden)
    assert outline.params == []
    assert whole.params or whole.commands


def test_a_command_that_is_not_there_is_refused_and_the_nearest_named() -> None:
    refused = CliRunner().invoke(app, ["evalute"], prog_name="salcli")
    assert refused.exit_code == 2
    assert "Did you mean 'evaluate'?" in refused.output


@pytest.mark.parametrize(
    ("docstring", "shown", "bold"),
    [
        ("Plain.", "Plain.", []),
        ("Run `dvc repro` again.", "Run dvc repro again.", ["dvc repro"]),
        ("It is **estimated**, 2 ** 3 times.", "It is estimated, 2 ** 3 times.", ["estimated"]),
        ("One\n    line.\n\n    Another\n    one.", "One line.\n\nAnother one.", []),
        ("A list [a, b] and [bold]brackets[/bold].", "A list [a, b] and [bold]brackets[/bold].", []),
        (None, "", []),
    ],
)
def test_docstrings_are_shown_as_they_are_meant(docstring: str | None, shown: str, bold: list[str]) -> None:
    text = Text.from_markup(in_markup(docstring) or "")
    assert text.plain == shown
    assert [text.plain[span.start : span.end] for span in text.spans] == bold


def test_help_leaves_the_modules_that_it_does_without_to_others() -> None:
    program = (
        "import sys; from salcli.cli.help_text import UNUSED, prepare_help; prepare_help()\n"
        "assert 'typer.rich_utils' in sys.modules and not set(UNUSED) & set(sys.modules)\n"
        "from rich.markdown import Markdown; from rich.traceback import Traceback\n"
        "print(Markdown('*x*').markup, Traceback.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "*x* Traceback\n", done.stderr
