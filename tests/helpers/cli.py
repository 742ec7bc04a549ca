"""Running commands: in this process, as a new process, and as one that must be refused; and what people see."""

import io
import os
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from salcli.cli.app import app
from salcli.params.schema import Params, load_params

CONSOLE_SCRIPT = str(Path(sys.executable).with_name("salcli"))


def salcli(*arguments: str, stdin: bytes = b"") -> Result:
    """Run a command in this process. An exception that is not meant for users is raised."""
    return CliRunner().invoke(app, list(arguments), prog_name="salcli", input=stdin, catch_exceptions=False)


def init(folder: Path, *arguments: str) -> tuple[str, Params]:
    """What `salcli init` says, in one line, and the params.yaml that it wrote."""
    done = salcli("init", str(folder), *arguments)
    assert done.exit_code == 0, done.stderr
    return " ".join(done.stdout.split()), load_params(folder / "params.yaml")[0]


def process(*command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process."""
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def files(root: Path) -> dict[str, bytes]:
    """Every file with its content, except for locks and the state of unfinished trainings."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix not in {".pt", ".lock"}]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def refused(*arguments: str, root: Path, stdin: bytes = b"") -> str:
    """The error message of a command, after a check that there is only one and that no file was touched."""
    before = files(root)
    result = salcli(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stderr.count("error:") == 1
    assert files(root) == before
    return str(result.stderr)


def shown(renderable: RenderableType, width: int = 100) -> str:
    """As in a terminal, after a check that it fits."""
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text
