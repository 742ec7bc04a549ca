"""Commands that come before the pipeline: which experiments there are, and a folder for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from salcli.errors import UsageMistakeError

HERE = Path()
OWN = "Images and network of your own (docs/own-data.md)"


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
    id_place: Annotated[
        Path | None,
        typer.Option("--id", help="Labeled images: one folder a class, or a CSV of path,label.", rich_help_panel=OWN),
    ] = None,
    wild: Annotated[
        Path | None,
        typer.Option("--wild", help="Unlabeled images: any folder. What of it is OOD is unknown.", rich_help_panel=OWN),
    ] = None,
    test_ood: Annotated[
        list[Path] | None,
        typer.Option("--test-ood", help="Images known to be OOD, to test on; repeat for several.", rich_help_panel=OWN),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="MODULE:NAME, which is imported (your code runs), timm:NAME, torchvision:NAME or one of salcli's.",
            rich_help_panel=OWN,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="Its state dict, .safetensors or .pt: no training then.", rich_help_panel=OWN),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", help="Its last linear layer, where that is not found.", rich_help_panel=OWN),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option("--mean", help="What its input is normalised with, 0 to 1: 0.5 or R,G,B.", rich_help_panel=OWN),
    ] = None,
    std: Annotated[str | None, typer.Option("--std", help="Likewise.", rich_help_panel=OWN)] = None,
) -> None:
    """Make a folder ready for `dvc repro`: params.yaml, dvc.yaml, and DVC itself.

    With `--id` and `--wild`, for images of your own: looks at them first, and shows what it found and plans.
    """
    from shlex import quote

    from salcli.params_file import parse_assignment
    from salcli.presets import preset as find
    from salcli.project import create, refuse_to_overwrite
    from salcli.reporting.console import console

    values, chosen, made_by = dict(parse_assignment(text) for text in assignments or []), find(preset), ""
    given = {"--id": id_place, "--wild": wild, "--test-ood": test_ood, "--model": model, "--weights": weights}
    given |= {"--head": head, "--mean": mean, "--std": std}
    if any(given.values()):
        from salcli.cli.own_project import MADE_BY, numbers, own_preset, own_values

        _check_options(given, preset)
        assert id_place is not None
        assert wild is not None
        refuse_to_overwrite(folder, force)
        normalisation = {"mean": numbers("--mean", mean), "std": numbers("--std", std)}
        network = {"backbone": model, "head": head, "weights": weights, **normalisation}
        values = own_values(folder, chosen, values, id_place, wild, test_ood or [], network)
        chosen, made_by = own_preset(chosen), MADE_BY
    project = create(folder, chosen, values, force=force, dvc=not no_dvc, made_by=made_by)

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    made, kept = ([name for name in names if not name.startswith(".dvc/p")] for names in (project.made, project.kept))
    say(f"made in {project.folder}: {', '.join(made)}")
    if kept:
        say(f"left as it was: {', '.join(kept)}", "yellow")
    if project.missing_sets:
        say(f"data to fetch: {', '.join(project.missing_sets)}")
    if project.has_dvc and not project.is_in_git:
        say("no git repository: fine for dvc repro; for dvc exp, git init && dvc config core.no_scm false", "dim")
    go_there = [] if folder == HERE else [f"cd {quote(str(folder))}"]
    say(f"next: {' && '.join([*go_there, *project.next_commands])}", "bold")


def _check_options(given: Mapping[str, object], preset: str) -> None:
    """What belongs together."""
    missing = [option for option in ("--id", "--wild") if not given[option]]
    if missing:
        there = next(option for option, value in given.items() if value)
        raise UsageMistakeError(f"{there} needs {' and '.join(missing)} as well: labeled and unlabeled images")
    if preset != "default":
        raise UsageMistakeError(f"--preset {preset} is for published data; leave it out, or --id and --wild")
    alone = [option for option in ("--weights", "--head", "--mean", "--std") if given[option] and not given["--model"]]
    if alone:
        raise UsageMistakeError(f"{alone[0]} is about a network; name that with --model")
