"""One run of a command: its params, its workspace, what it overrode, and what it says at the end."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from salcli.artifacts.layout import SCRATCH, Workspace
from salcli.cli.launcher import launch
from salcli.cli.options import PARAMS_YAML
from salcli.data.catalogue import DATA_SETS
from salcli.errors import ParamsError, UsageMistakeError, unknown_name
from salcli.models.backbone_names import import_path
from salcli.models.own_code import make_importable
from salcli.params import Params, load_params
from salcli.params_file import parse_assignment
from salcli.ranks import world_size
from salcli.reporting.console import console
from salcli.reporting.progress import ConsoleProgress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from salcli.params import Override

# Where to compute changes how a file is made, not which file it is.
NOT_A_RESULT = {"device", "launcher"}
ALWAYS_READ = {"seeds", "data.ood", "data.test_ood", "launcher"}


@dataclass(frozen=True)
class Session:
    """What a stage command works with."""

    params: Params
    workspace: Workspace
    chosen: dict[str, str]  # options that the next command needs as well, as one types them
    ood_sets: tuple[str, ...]
    unseen_sets: tuple[str, ...]
    seeds: tuple[int, ...]
    progress: ConsoleProgress

    @classmethod
    def open(
        cls,
        params_file: Path,
        assignments: list[str] | None,
        flags: dict[str, Any],
        *,
        reads: tuple[str, ...],
        ood: list[str] | None = None,
        unseen: list[str] | None = None,
        seed: list[int] | None = None,
        scratch: bool = False,
        parallel: bool = False,
    ) -> Session:
        """Load params with flags laid over them, and say what they changed; `reads` are the keys that matter here.

        A command that is not `parallel` runs in one process only.
        """
        overrides = dict(parse_assignment(text) for text in assignments or [])
        assigned = list(overrides)
        overrides |= {key: value for key, value in flags.items() if value is not None}
        params, changed = load_params(params_file, overrides)
        _warn_of_unread(assigned, {*flags, *reads})
        if parallel:
            launch(params.launcher)
        elif world_size() > 1:
            raise UsageMistakeError("this command runs in one process; start it without torchrun")
        if import_path(params.model.backbone):
            make_importable(params_file.parent / Path(params.model.code).expanduser())
        ood_sets = _known_ood("--ood", ood, params) or params.data.ood
        unseen_sets = _known_ood("--unseen", unseen, params) or params.data.test_ood
        seeds = tuple(dict.fromkeys(seed or params.seeds))
        is_scratch = scratch or any(override.key not in NOT_A_RESULT for override in changed)
        _announce(changed, params_file, is_scratch)
        return cls(
            params=params,
            workspace=Workspace(params_file.parent, write_to_scratch=is_scratch, read_from_scratch=scratch),
            chosen={
                "--params": _typed("--params", [params_file] if params_file != PARAMS_YAML else []),
                "--ood": _typed("--ood", ood_sets if ood or "data.ood" in overrides else []),
                "--seed": _typed("--seed", seeds if seed or "seeds" in overrides else []),
                "--scratch": " --scratch" if is_scratch else "",
            },
            ood_sets=ood_sets,
            unseen_sets=unseen_sets,
            seeds=seeds,
            progress=ConsoleProgress(),
        )

    def processes(self) -> AbstractContextManager[object]:
        """Inside, all processes that torchrun started work together."""
        if world_size() == 1:
            return nullcontext()
        from salcli.compute.processes import joined

        return joined()

    def experiments(self) -> list[tuple[str, int]]:
        """Every OOD set with every seed."""
        return [(ood, seed) for ood in self.ood_sets for seed in self.seeds]

    def finish(
        self,
        written: Iterable[Path],
        next_command: str,
        *,
        takes: tuple[str, ...] = ("--ood", "--seed"),
        outside: Iterable[Path] = (),
    ) -> None:
        """Say what was written and what comes next, if anything, with the options that it takes as well.

        `outside` are files that lie where the user wanted them.
        """
        if self.workspace.inputs_from_scratch:
            names = sorted(set(self.workspace.inputs_from_scratch))
            _say(f"read from {SCRATCH}/: {', '.join(names)}", "yellow")
        shown = [*(path.relative_to(self.workspace.root) for path in written), *outside]
        head = ", ".join(str(path) for path in shown[:4])
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        _say(f"wrote {head}{more}; worked {self.progress.seconds:.1f} s", "dim")
        if next_command and "DVC_STAGE" not in os.environ:  # DVC knows what comes next
            options = "".join(self.chosen[option] for option in ("--params", *takes, "--scratch"))
            _say(f"next: {next_command}{options}", "dim", soft_wrap=True)  # a broken command could not be copied


def evaluate_command(key: str, listed: Iterable[str], trained: Iterable[str]) -> str:
    """What scores the networks that were just trained, also those that params.yaml does not list under `key`."""
    names = list(dict.fromkeys([*listed, *(name for name in trained if name != "sal")]))
    return "salcli evaluate" if names == list(listed) else f"salcli evaluate --set '{key}=[{', '.join(names)}]'"


def _warn_of_unread(assigned: list[str], read: set[str]) -> None:
    for key in assigned:
        if not any(key == known or key.startswith(f"{known}.") for known in read | ALWAYS_READ):
            _say(f"warning: {key} changes nothing here; give it to the command that reads it", "bold yellow")


def _typed(option: str, values: Iterable[object]) -> str:
    return "".join(f" {option} {quote(str(value))}" for value in values)


def _announce(changed: list[Override], params_file: Path, is_scratch: bool) -> None:
    for override in changed:
        _say(f"override: {override.key} = {override.value} ({params_file.name}: {override.in_file})", "yellow")
    if is_scratch:
        _say(f"scratch run: writes to {SCRATCH}/, what `dvc repro` builds stays as it is", "yellow")


def _say(line: str, style: str, **options: Any) -> None:
    console.print(line, style=style, highlight=False, markup=False, **options)


def _known_ood(option: str, names: list[str] | None, params: Params) -> tuple[str, ...]:
    for name in names or []:
        known = [*DATA_SETS, *params.data.own]
        if name not in known:
            raise unknown_name("OOD set", name, known)
        if name == params.data.id:
            raise ParamsError(f"{option} {name}: that is the ID set (data.id); name another one")
    return tuple(dict.fromkeys(names or []))
