"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PARAMS_YAML = Path("params.yaml")
RUN = "Which run"
OVERRIDE = "Overrides of params.yaml (the outcome goes to scratch/)"


def _known_ood_sets() -> list[str]:
    from salcli.data.catalogue import DATA_SETS

    return list(DATA_SETS)


ParamsFile = Annotated[
    Path, typer.Option("--params", help="The params file; its folder is the workspace.", rich_help_panel=RUN)
]
OodSets = Annotated[
    list[str] | None,
    typer.Option(
        "--ood",
        help="OOD set; repeat for several.",
        show_default="all of params.yaml",
        autocompletion=_known_ood_sets,
        rich_help_panel=RUN,
    ),
]
UnseenSets = Annotated[
    list[str] | None,
    typer.Option(
        "--unseen",
        help="OOD set that is tested on alone; repeat for several.",
        show_default="data.test_ood of params.yaml",
        autocompletion=_known_ood_sets,
        rich_help_panel=RUN,
    ),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option(
        "--seed",
        min=0,
        help="Seed; repeat for several.",
        show_default="all of params.yaml",
        rich_help_panel=RUN,
    ),
]
Scratch = Annotated[
    bool,
    typer.Option("--scratch", help="Go on from the files in scratch/, where there are any.", rich_help_panel=RUN),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key; repeat for several.", rich_help_panel=OVERRIDE),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="auto, cpu, cuda, cuda:N or mps. Changes no file's place.",
        show_default="device of params.yaml",
        rich_help_panel=RUN,
    ),
]


def override(key: str, explanation: str, **options: Any) -> Any:
    """An option that stands for one key of params.yaml."""
    return typer.Option(help=explanation, show_default=key, rich_help_panel=OVERRIDE, **options)
