"""Commands around experiments: init, presets, methods, data."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from salcli.cli.session import PARAMS_YAML, say
from salcli.errors import UsageMistakeError

HERE = Path()
CUSTOM = "Custom data, custom network"


def _preset_names() -> list[str]:
    from salcli.params.presets import presets

    return list(presets())


def list_presets(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show the params.yaml of this one.", autocompletion=_preset_names),
    ] = None,
) -> None:
    """List the experiments of the paper: data, GPU memory and work.

    GPU memory and work are estimated, not measured. Memory: 0.5 GB + 12 bytes × weights + 4 bytes × activations of an
    image × images in a step. Work: training images × epochs, summed over experiments, and the passes for gradients and
    scores.
    """
    from salcli.params.presets import preset, presets, text
    from salcli.report.console import console
    from salcli.report.listings import preset_syntax, preset_table

    if name is None:
        console.print(preset_table(presets().values()))
    elif console.is_terminal:
        console.print(preset_syntax(preset(name)))
    else:
        print(text(preset(name)), end="")


def list_methods(
    markdown: Annotated[bool, typer.Option("--markdown", help="Write the table of docs/rivals.md.")] = False,
) -> None:
    """List every method: name, label, paper, what it needs, hyper-parameters."""
    from salcli.methods.base import built_in
    from salcli.report.console import console
    from salcli.report.listings import methods_grid

    if markdown:
        print(methods_grid(built_in(), with_summary=True).markdown())
    else:
        console.print(methods_grid(built_in()).rich())


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder; it is created if it does not exist.")
    ] = HERE,
    preset: Annotated[
        str, typer.Option("--preset", help="Which experiment: see `salcli presets`.", autocompletion=_preset_names)
    ] = "default",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any key of its params.yaml; repeat for several."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite params.yaml and dvc.yaml.")] = False,
    no_dvc: Annotated[bool, typer.Option("--no-dvc", help="Do not initialise DVC.")] = False,
    id_path: Annotated[
        Path | None,
        typer.Option(
            "--id", help="Labeled images: one folder per class, or a CSV of path,label.", rich_help_panel=CUSTOM
        ),
    ] = None,
    wild: Annotated[
        Path | None,
        typer.Option("--wild", help="Mixed, unlabeled images: any folder.", rich_help_panel=CUSTOM),
    ] = None,
    test_ood: Annotated[
        list[Path] | None,
        typer.Option(
            "--test-ood", help="Images known to be OOD, to test on; repeat for several.", rich_help_panel=CUSTOM
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="MODULE:NAME, which is imported (your code runs), timm:NAME, torchvision:NAME or one of salcli's.",
            rich_help_panel=CUSTOM,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            help="The network's state dict, .safetensors or .pt; train-id then trains nothing.",
            rich_help_panel=CUSTOM,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", help="The network's last linear layer, if it is not found.", rich_help_panel=CUSTOM),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            "--mean",
            help="Mean that the network's input is normalised with, 0 to 1: 0.5 or R,G,B.",
            rich_help_panel=CUSTOM,
        ),
    ] = None,
    std: Annotated[
        str | None, typer.Option("--std", help="Its standard deviation, in the same form.", rich_help_panel=CUSTOM)
    ] = None,
) -> None:
    """Make a folder ready for `dvc repro`: params.yaml, dvc.yaml, and DVC itself.

    With --id and --wild, for custom images: looks at them first, and shows what it found and plans.
    """
    from salcli.params.presets import preset as find
    from salcli.params.reading import parse_assignment
    from salcli.project.init import create, refuse_to_overwrite

    values, chosen = dict(parse_assignment(text) for text in assignments or []), find(preset)
    given = {"--id": id_path, "--wild": wild, "--test-ood": test_ood, "--model": model, "--weights": weights}
    given |= {"--head": head, "--mean": mean, "--std": std}
    if any(given.values()):
        from salcli.project.planning import NetworkOptions, channel_values, plan_project
        from salcli.report.console import ConsoleProgress, console
        from salcli.report.listings import plan_table

        _check_options(given, preset)
        assert id_path is not None
        assert wild is not None
        refuse_to_overwrite(folder, force)
        normalisation = channel_values("--mean", mean), channel_values("--std", std)
        network = NetworkOptions(model, head, weights, *normalisation) if model else None
        plan = plan_project(folder, chosen, values, id_path, wild, test_ood or [], network, ConsoleProgress())
        values = plan.values
        console.print(plan_table(plan))
        for note in plan.notes:
            say(f"note: {note}", "dim")
        for warning in plan.warnings:
            say(f"warning: {warning}", "bold yellow")
    project = create(folder, chosen, values, force=force, dvc=not no_dvc, custom=any(given.values()))
    created, kept = (
        [name for name in names if not name.startswith(".dvc/p")] for names in (project.created, project.kept)
    )
    say(f"created in {project.folder}: {', '.join(created)}")
    if kept:
        say(f"left as it was: {', '.join(kept)}", "yellow")
    if project.missing_sets:
        say(f"data to fetch: {', '.join(project.missing_sets)}")
    if project.has_dvc and not project.is_in_git:
        say("no git repository: fine for dvc repro; for dvc exp, git init && dvc config core.no_scm false", "dim")
    go_there = [] if folder == HERE else [f"cd {quote(str(folder))}"]
    say(f"next: {' && '.join([*go_there, *project.next_commands])}", "bold")


def _check_options(given: Mapping[str, object], preset: str) -> None:
    missing = [option for option in ("--id", "--wild") if not given[option]]
    if missing:
        there = next(option for option, value in given.items() if value)
        raise UsageMistakeError(f"{there} needs {' and '.join(missing)} as well: labeled and unlabeled images")
    if preset != "default":
        raise UsageMistakeError(f"--preset {preset} is for published data; leave it out, or --id and --wild")
    alone = [option for option in ("--weights", "--head", "--mean", "--std") if given[option] and not given["--model"]]
    if alone:
        raise UsageMistakeError(f"{alone[0]} is about a network; name that with --model")


# -- salcli data

data = typer.Typer(
    help="List data sets and fetch them from the web.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    rich = "rich"
    json = "json"


Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="The folder of all data sets.",
        show_default="$SALCLI_DATA, data.root of ./params.yaml, or data/raw",
    ),
]


def _fetched_sets() -> list[str]:
    from salcli.data.catalogue import DATA_SETS

    return [name for name, record in DATA_SETS.items() if not record.is_embedded]


@data.command("list")
def list_data(
    root: Root = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to write the list.")] = Format.rich,
) -> None:
    """Show every data set: what it is, where it comes from, and whether it is here."""
    from salcli.data.catalogue import DATA_SETS
    from salcli.data.fetching import status
    from salcli.report.console import console
    from salcli.report.listings import data_json, data_table

    folder = _root(root)
    found = {record: status(name, folder) for name, record in DATA_SETS.items()}
    custom = _custom_sets()
    if output_format is Format.json:
        print(data_json(found, custom))
        return
    console.print(data_table(found, console.width))
    for name, path in custom.items():
        say(f"{name}: {path} ({'✓' if path.exists() else 'missing'})")
    option = f" --root {quote(str(root))}" if root else ""
    for line in (
        f"\n✓ found below {folder}",
        "custom: a folder of images NAME/ or an array file NAME.npz there stands in for the set",
        "not stated: the authors name no licence",
        f"get a set: salcli data fetch NAME{option}",
    ):
        say(line, "dim")


@data.command("fetch")
def fetch_data(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="Data sets, as `salcli data list` names them.", autocompletion=_fetched_sets
        ),
    ],
    root: Root = None,
) -> None:
    """Download data sets, compare their checksums and unpack them. Resumes an interrupted download."""
    from salcli.data.fetching import fetch
    from salcli.report.console import ConsoleProgress

    try:
        for done in fetch(names, _root(root), ConsoleProgress()):
            where = ", ".join(str(path) for path in done.paths) or "comes with salcli, nothing to fetch"
            say(f"{done.name}: {f'{done.outcome}: ' if done.paths else ''}{where}")
    except KeyboardInterrupt:
        say("what has arrived is kept: the same command resumes from there", "dim")
        raise


def _custom_sets() -> dict[str, Path]:
    """The sets of data.custom in ./params.yaml, with their paths."""
    from salcli.data.catalogue import custom_path
    from salcli.params.reading import lookup, read_yaml

    custom = lookup(read_yaml(PARAMS_YAML), "data.custom") if PARAMS_YAML.exists() else None
    sets = custom.items() if isinstance(custom, dict) else ()
    return {str(name): custom_path(str(path), Path()) for name, path in sets}


def _root(option: Path | None) -> Path:
    from salcli.data.catalogue import data_root
    from salcli.params.reading import params_data_root

    return data_root(option, None if option else params_data_root(PARAMS_YAML))
