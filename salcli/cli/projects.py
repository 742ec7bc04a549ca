"""Commands that come before the pipeline: which experiments there are, and a folder for one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HERE = Path()


def _preset_names() -> list[str]:
    from salcli.presets import presets as known

    return list(known())


PresetName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Show this one's YAML.", autocompletion=_preset_names)
]


def presets(name: PresetName = None) -> None:
    """List the experiments of the paper that are ready to run, or show one of them.

    GPU memory and work are **estimated**, not measured. Memory: 0.5 GB + 12 bytes × weights + 4 bytes × activations
    of an image × images in a step. Work: training images × epochs, summed over seeds and OOD sets, and the passes
    for gradients and scores.
    """
    from salcli.presets import preset as find
    from salcli.presets import presets as known
    from salcli.reporting.console import console
    from salcli.reporting.preset_table import preset_syntax, preset_table

    if name is None:
        console.print(preset_table(known().values()))
    elif console.is_terminal:
        console.print(preset_syntax(find(name)))
    else:
        print(find(name).text, end="")


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder; it is made where there is none.")]
ChosenPreset = Annotated[
    str, typer.Option("--preset", help="Which experiment: see `salcli presets`.", autocompletion=_preset_names)
]


def init(
    folder: Folder = HERE,
    preset: ChosenPreset = "default",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any key of its params.yaml; repeat for several."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite params.yaml and dvc.yaml.")] = False,
    no_dvc: Annotated[bool, typer.Option("--no-dvc", help="Leave DVC uninitialised.")] = False,
) -> None:
    """Make a folder ready for `dvc repro`: params.yaml, dvc.yaml, and DVC itself."""
    from shlex import quote

    from salcli.params_file import parse_assignment
    from salcli.presets import preset as find
    from salcli.project import create
    from salcli.reporting.console import console

    values = dict(parse_assignment(text) for text in assignments or [])
    project = create(folder, find(preset), values, force=force, dvc=not no_dvc)

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    made, kept = ([name for name in names if not name.startswith(".dvc/p")] for names in (project.made, project.kept))
    say(f"made in {project.folder}: {', '.join(made)}")
    if kept:
        say(f"left as it was: {', '.join(kept)}", "yellow")
    if project.missing_sets:
        say(f"data to fetch: {', '.join(project.missing_sets)}")
    go_there = [] if folder == HERE else [f"cd {quote(str(folder))}"]
    say(f"next: {' && '.join([*go_there, *project.next_commands])}", "bold")
