"""Options that several commands share, and how a command takes them."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:  # loads numpy
    from salcli.data.vectors import Columns

PARAMS_YAML = Path("params.yaml")
RUN = "Which run"
OVERRIDE = "Overrides of params.yaml (results go to scratch/)"
ALL = "all of params.yaml"
AS_TRAINED = "as in the training data, else found by name and type"
Command = TypeVar("Command", bound=Callable[..., None])


def taking(*shared: Parameter) -> Callable[[Command], Command]:
    """Let Typer see these options too. A command gets their values by name, or in `**given`."""
    names = {one.name for one in shared}

    def decorate(command: Command) -> Command:
        seen = signature(command).parameters.values()
        own = [one for one in seen if one.kind is not Parameter.VAR_KEYWORD and one.name not in names]
        command.__signature__ = Signature([*own, *shared])  # type: ignore[attr-defined]
        return command

    return decorate


def option(kind: Any, name: str, text: str, default: Any = None, **settings: Any) -> Parameter:
    """An option for `taking`, under its name without dashes."""
    annotation = Annotated[kind, typer.Option(name, help=text, **settings)]
    value_name = name.partition("/")[0][2:].replace("-", "_")
    return Parameter(value_name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def override(key: str, kind: Any, text: str, name: str = "") -> Parameter:
    """An option that stands for one key of params.yaml, as `--epochs` for `train_id.epochs`."""
    name = name or f"--{key.rpartition('.')[2].replace('_', '-')}"
    shown = option(kind | None, name, text, show_default=key, rich_help_panel=OVERRIDE)
    return shown.replace(name=key.replace(".", "__"))


def overrides_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of params.yaml, and the values that options gave them."""
    keys = {name.replace("__", "."): value for name, value in given.items() if name == "device" or "__" in name}
    return {key: value for key, value in keys.items() if value not in (None, [])}


def several(kind: Any, name: str, text: str, **settings: Any) -> Parameter:
    """An option that chooses experiments."""
    text = f"{text}; repeat for several."
    return option(list[kind] | None, name, text, show_default=ALL, rich_help_panel=RUN, **settings)


def _known_sets() -> list[str]:
    from salcli.data.catalogue import DATA_SETS

    return list(DATA_SETS)


def columns_of(vector: list[str] | None, **others: Any) -> "Columns":
    """The columns that --vector and its like name."""
    from salcli.data.vectors import Columns

    vectors = tuple(vector or ())
    return Columns(vectors[0] if len(vectors) == 1 else vectors or None, **others)


# --- of stages

PARAMS = option(Path, "--params", "The params file; its folder is the project.", PARAMS_YAML, rich_help_panel=RUN)
OOD = several(str, "--ood", "OOD set in the wild data", autocompletion=_known_sets)
UNSEEN = several(str, "--unseen", "OOD set that is only tested on", autocompletion=_known_sets)
PI = several(str, "--pi", "Share of OOD in the wild data, or unknown")
SEED = several(int, "--seed", "Seed", min=0)
VARIANT = several(str, "--variant", "Variant of SAL")
SCRATCH = option(bool, "--scratch", "Write to scratch/, and read from there first.", False, rich_help_panel=RUN)
READ_SCRATCH = option(bool, "--scratch", "Read from scratch/ first.", False, rich_help_panel=RUN)
SET = option(
    list[str] | None, "--set", "Set any key; repeat for several.", metavar="KEY=VALUE", rich_help_panel=OVERRIDE
)
DEVICES = "auto, cpu, cuda, cuda:N or mps."
DEVICE = option(str | None, "--device", DEVICES, show_default="device of params.yaml", rich_help_panel=RUN)

# --- of detectors

DETECTOR = option(
    Path | None,
    "--detector",
    "The detector.",
    show_default="detector.safetensors here, or that of the project's runs",
)
ID_QUANTILE = option(float, "--id-quantile", "Share of ID data to keep: what scores above its threshold is OOD.", 0.95)
ALLOW_IMPORT = option(
    bool, "--allow-import", "If the network is a custom one, import the module that the file names.", False
)
SCORING = (
    DETECTOR,
    ID_QUANTILE,
    option(
        list[str] | None,
        "--vector",
        "The column of vectors; or repeat for several columns of numbers.",
        metavar="COL",
        show_default=AS_TRAINED,
    ),
    option(str | None, "--row-id", "The column that names vectors.", metavar="COL", show_default=AS_TRAINED),
    option(int, "--batch-size", "Samples in a pass.", 256),
    option(str, "--device", DEVICES, "auto"),
    ALLOW_IMPORT,
)
