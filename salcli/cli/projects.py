"""Commands around experiments: init, presets, methods, data."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from salcli.cli.options import PARAMS_YAML, columns_of, option, taking
from salcli.cli.session import say
from salcli.errors import SalError

HERE = Path()
CUSTOM, COLUMNS, NETWORK = "Custom data", "Columns of vectors (.parquet, .npz)", "Network of images"
BY_NAME = "found by name"


_custom = partial(option, rich_help_panel=CUSTOM)
_column = partial(option, rich_help_panel=COLUMNS, metavar="COL")
_network = partial(option, rich_help_panel=NETWORK)
Service = StrEnum("Service", ["github"])


def _preset_names() -> list[str]:
    from salcli.params.presets import additions, presets

    return [*presets(), *additions()]


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
    from salcli.params.presets import additions, preset, presets, text
    from salcli.report.console import console
    from salcli.report.listings import preset_syntax, preset_table

    if name is None:
        console.print(preset_table(presets().values(), additions().values()))
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


@taking(
    _custom(
        Path | None,
        "--id",
        "Labeled samples: images in one folder per class or a CSV of path,label; or vectors in a .parquet, .npz or "
        ".npy file.",
    ),
    _custom(
        list[Path] | None,
        "--wild",
        "Mixed, unlabeled samples: any folder of images, or vectors; repeat for several.",
    ),
    _custom(list[Path] | None, "--test-ood", "Samples known to be OOD, to test on; repeat for several sets."),
    _custom(
        Path | None,
        "--calibration",
        "Labeled samples from the source of the wild ones, to set thresholds with: the cure for drift.",
        show_default="held-out part of --id",
    ),
    _column(
        list[str] | None,
        "--vector",
        "The column of vectors; or repeat for several columns of numbers.",
        show_default="found by type",
    ),
    _column(str | None, "--label", "The column of classes.", show_default=BY_NAME),
    _column(
        str | None, "--row-id", "The column that names rows in the report and in predictions.", show_default=BY_NAME
    ),
    _column(list[str] | None, "--show", "A column that the report shows; repeat for several."),
    _network(
        str | None,
        "--model",
        "torchvision:NAME, timm:NAME, one of salcli's, or MODULE:NAME, which is imported (your code runs).",
        metavar="NAME",
        show_default="by data and machine",
    ),
    _network(bool, "--frozen", "Do not train it: embed every image once, and fit linear heads.", False),
    _network(
        str | None,
        "--weights",
        "The network's state dict, .safetensors or .pt, or pretrained: what torchvision or timm publish.",
        metavar="FILE",
    ),
    _network(str | None, "--head", "The network's last linear layer, if it is not found."),
    _network(str | None, "--mean", "Mean that the network's input is normalized with, 0 to 1: 0.5 or R,G,B."),
    _network(str | None, "--std", "Its standard deviation, in the same form."),
    _network(
        int | None,
        "--image-size",
        "Pixels of the images that the network sees.",
        metavar="N",
        min=1,
        show_default="by its weights, or by your images",
    ),
)
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder; it is created if it does not exist.")
    ] = HERE,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Which experiment, and what to add to it: see `salcli presets`; repeat for several.",
            show_default="default",
            autocompletion=_preset_names,
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any key of its params.yaml; repeat for several."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite params.yaml and dvc.yaml.")] = False,
    no_dvc: Annotated[bool, typer.Option("--no-dvc", help="Do not initialize DVC.")] = False,
    ci: Annotated[
        Service | None,
        typer.Option("--ci", help="Write a workflow: dvc repro, the table as a comment, failure if FPR95 gets worse."),
    ] = None,
    **given: Any,
) -> None:
    """Make a folder ready for `dvc repro`: params.yaml, dvc.yaml, and DVC itself.

    With --id and --wild, for custom images or vectors: looks at them first, and shows what it found and plans.
    """
    from salcli.params.presets import preset as find
    from salcli.params.reading import parse_assignment
    from salcli.project.init import create, refuse_to_overwrite

    values, chosen = dict(parse_assignment(text) for text in assignments or []), find(*preset or ())
    is_custom = any(given.values())
    if is_custom:
        from salcli.project.network_choice import NetworkOptions, channel_values
        from salcli.project.planning import plan_project
        from salcli.report.console import ConsoleProgress, console
        from salcli.report.listings import plan_table

        options = [name for name, value in given.items() if value]
        if missing := " and ".join(f"--{name}" for name in ("id", "wild") if name not in options):
            there = options[0].replace("_", "-")
            raise SalError(f"--{there} needs {missing} as well: labeled and unlabeled samples")
        if chosen.name != "default":
            raise SalError(f"--preset {chosen.name} is for published data; leave it out, or --id and --wild")
        for name in ("weights", "head", "mean", "std"):
            if name in options and "model" not in options:
                raise SalError(f"--{name} is about a network; name that with --model")
        refuse_to_overwrite(folder, force)
        if given["image_size"]:
            values.setdefault("data.image_size", given["image_size"])
        named = {name: given[name] for name in ("label", "row_id")}
        columns = columns_of(given["vector"], show=tuple(given["show"] or ()), **named)
        mean_and_std = (channel_values(f"--{name}", given[name]) for name in ("mean", "std"))
        network = NetworkOptions(given["model"], given["head"], given["weights"], given["frozen"], *mean_and_std)
        paths = given["id"], given["wild"], given["test_ood"] or [], given["calibration"]
        plan = plan_project(folder, chosen, values, *paths, columns, network, ConsoleProgress())
        values = plan.values
        console.print(plan_table(plan))
        for note in plan.notes:
            say(f"note: {note}", "dim")
        for warning in plan.warnings:
            say(f"warning: {warning}", "bold yellow")
    project = create(folder, chosen, values, force=force, dvc=not no_dvc, custom=is_custom, ci=ci or "")
    created, kept = (
        [name for name in names if not name.startswith(".dvc/p")] for names in (project.created, project.kept)
    )
    say(f"created in {project.folder}: {', '.join(created)}")
    if kept:
        say(f"left as it was: {', '.join(kept)}", "yellow")
    if project.missing_sets:
        say(f"data to fetch: {', '.join(project.missing_sets)}")
    for note in project.notes:
        say(f"note: {note}", "dim")
    if project.has_dvc and not project.is_in_git:
        say("no git repository: fine for dvc repro; for dvc exp, git init && dvc config core.no_scm false", "dim")
    go_there = [] if folder == HERE else [f"cd {quote(str(folder))}"]
    say(f"next: {' && '.join([*go_there, *project.next_commands])}", "bold")


# -- salcli data

data = typer.Typer(
    help="List data sets and fetch them from the web.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


Format = StrEnum("Format", ["rich", "json"])
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

    return [name for name, record in DATA_SETS.items() if record.files]


@data.command("list")
def list_data(
    root: Root = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to write the list.")] = Format.rich,
) -> None:
    """Show every data set: what it is, where it comes from, and whether it is here."""
    from salcli.data.catalogue import DATA_SETS, custom_paths
    from salcli.data.fetching import status
    from salcli.params.reading import lookup, read_yaml
    from salcli.report.console import console
    from salcli.report.listings import data_json, data_table

    folder = _root(root)
    asked_for = lookup(read_yaml(PARAMS_YAML), "data.custom") if PARAMS_YAML.exists() else None
    custom: dict[str, list[Path]] = {}
    for name, paths in asked_for.items() if isinstance(asked_for, dict) else ():
        custom[str(name)] = custom_paths(paths if isinstance(paths, list) else str(paths), Path())
    found = {record: status(name, folder) for name, record in DATA_SETS.items()}
    if output_format is Format.json:
        print(data_json(found, custom))
        return
    console.print(data_table(found, console.width))
    for name, paths in custom.items():
        for path in paths:
            say(f"{name}: {path} ({'✓' if path.exists() else 'missing'})")
    option = f" --root {quote(str(root))}" if root else ""
    for line in (
        f"\n✓ found below {folder}",
        "custom: a folder of images NAME/ or an array file NAME.npz there stands in for the set",
        "not stated: the authors name no licence",
        f"get a set: salcli data fetch NAME{option}",
        *dict.fromkeys(f"by hand: {one.by_hand}" for one in DATA_SETS.values() if one.by_hand),
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


def _root(option: Path | None) -> Path:
    from salcli.data.catalogue import data_root
    from salcli.params.reading import params_data_root

    return data_root(option, None if option else params_data_root(PARAMS_YAML))
