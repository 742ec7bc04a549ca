"""What stage commands share: options, params with overrides, the experiments to run, and the closing lines."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from salcli.errors import ParamsError, UsageMistakeError, unknown_name
from salcli.progress import world_size

if TYPE_CHECKING:  # torch is loaded by the commands that need it
    from rich.console import RenderableType

    from salcli.params.schema import Override, Params
    from salcli.report.console import ConsoleProgress
    from salcli.store.layout import Experiment, Workspace

PARAMS_YAML = Path("params.yaml")
RUN = "Which run"
OVERRIDE = "Overrides of params.yaml (results go to scratch/)"
# They change where a command computes, not what.
NOT_A_RESULT = {"device", "launcher", "timeout"}
LAUNCHED = "SALCLI_LAUNCHED"  # marks what we started, or a launcher with one process would start itself for ever
# how later commands differ in the options that choose experiments
LACKS = {"train-id": {"--ood", "--pi", "--variant"}, "table": {"--ood", "--pi", "--seed", "--variant"}}
RENAMES = {("train-ood", "--variant"): "--method"}
R = TypeVar("R")


def _known_sets() -> list[str]:
    from salcli.data.catalogue import DATA_SETS

    return list(DATA_SETS)


def _of_run(*names: str, text: str, default: str = "all of params.yaml", **options: Any) -> Any:
    return typer.Option(*names, help=text, show_default=default, rich_help_panel=RUN, **options)


def override(key: str, explanation: str, *names: str) -> Any:
    """An option that stands for one key of params.yaml."""
    return typer.Option(*names, help=explanation, show_default=key, rich_help_panel=OVERRIDE)


ParamsFile = Annotated[
    Path, typer.Option("--params", help="The params file; its folder is the project.", rich_help_panel=RUN)
]
OodSets = Annotated[
    list[str] | None, _of_run("--ood", text="OOD set in the wild data; repeat for several.", autocompletion=_known_sets)
]
UnseenSets = Annotated[
    list[str] | None,
    _of_run("--unseen", text="OOD set that is only tested on; repeat for several.", autocompletion=_known_sets),
]
Shares = Annotated[
    list[str] | None, _of_run("--pi", text="Share of OOD in the wild data, or unknown; repeat for several.")
]
Seeds = Annotated[list[int] | None, _of_run("--seed", text="Seed; repeat for several.", min=0)]
Variants = Annotated[list[str] | None, _of_run("--variant", text="Variant of SAL; repeat for several.")]
Scratch = Annotated[
    bool, typer.Option("--scratch", help="Write to scratch/, and read from there first.", rich_help_panel=RUN)
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key; repeat for several.", rich_help_panel=OVERRIDE),
]
Device = Annotated[
    str | None, _of_run("--device", text="auto, cpu, cuda, cuda:N or mps.", default="device of params.yaml")
]


@dataclass(frozen=True)
class Session:
    """One run of a stage command."""

    params: "Params"
    workspace: "Workspace"
    experiments: "list[Experiment]"
    unseen_sets: tuple[str, ...]
    chosen: dict[str, tuple[Any, ...]]  # options and their values, for the next command
    progress: "ConsoleProgress"

    @classmethod
    def open(
        cls,
        command: str,
        params_file: Path,
        assignments: list[str] | None,
        flags: dict[str, Any] | None = None,
        *,
        ood: list[str] | None = None,
        pi: list[str] | None = None,
        seed: list[int] | None = None,
        variant: list[str] | None = None,
        unseen: list[str] | None = None,
        scratch: bool = False,
        parallel: bool = True,
        elsewhere: tuple[str, ...] = (),
    ) -> "Session":
        """Load params with flags and assignments, and say what they changed. Overrides make it a scratch run.

        `elsewhere` are keys that change nothing but a file at a path that the user gave.

        A command that is not `parallel` runs in one process only.
        """
        from salcli.params.reading import parse_assignment
        from salcli.params.schema import load_params
        from salcli.report.console import ConsoleProgress
        from salcli.store.layout import Experiment, Workspace

        overrides = dict(parse_assignment(text) for text in assignments or [])
        _warn_of_unread(command, list(overrides))
        overrides |= {key: value for key, value in (flags or {}).items() if value is not None}
        params, changed = load_params(params_file, overrides)
        if parallel:
            _launch(params.launcher)
        elif world_size() > 1:
            raise UsageMistakeError("this command runs in one process; start it without torchrun")
        _check_ood("--ood", ood, params)
        _check_ood("--unseen", unseen, params)
        for name in variant or []:
            if name not in params.variant:
                raise unknown_name("variant", name, params.variant)
        is_scratch = scratch or any(change.key not in {*NOT_A_RESULT, *elsewhere} for change in changed)
        _announce(changed, params_file, is_scratch)
        shares = [_share(text) for text in pi or []]
        selected = {"--ood": ood, "--pi": pi, "--seed": seed, "--variant": variant}
        assigned = {"--ood": "data.ood", "--pi": "data.pi", "--seed": "seeds", "--variant": "variants"}
        keys = {change.key: change.value for change in changed}
        chosen = {name: dict.fromkeys(selected[name] or keys.get(key, ())) for name, key in assigned.items()}
        return cls(
            params=params,
            workspace=Workspace(params_file.parent, scratch=is_scratch),
            experiments=[
                Experiment(one_seed, one_ood, one_pi, one_variant)
                for one_ood in dict.fromkeys(ood or params.data.ood)
                for one_pi in dict.fromkeys(shares or params.data.pi)
                for one_seed in dict.fromkeys(seed or params.seeds)
                for one_variant in dict.fromkeys(variant or params.variants)
            ],
            unseen_sets=tuple(dict.fromkeys(unseen or params.data.test_ood)),
            chosen={
                "--params": (params_file,) if params_file != PARAMS_YAML else (),
                **{option: tuple(values) for option, values in chosen.items()},
            },
            progress=ConsoleProgress(),
        )

    @property
    def of_seeds(self) -> "list[Experiment]":
        """One experiment for each seed, for what depends on nothing else."""
        from salcli.store.layout import Experiment

        return [Experiment(seed) for seed in dict.fromkeys(experiment.seed for experiment in self.experiments)]

    @property
    def of_wild_sets(self) -> "list[Experiment]":
        """One experiment for each wild set, for what does not depend on the variant."""
        from salcli.store.layout import SAL

        return list(dict.fromkeys(experiment.with_variant(SAL) for experiment in self.experiments))

    def run(self, stage: Callable[..., R], experiments: "Iterable[Experiment]", **options: Any) -> list[R]:
        """The results of a stage for each experiment, by all processes that torchrun started."""
        name = " ".join([stage.__module__.rpartition(".")[2].replace("_", "-"), *map(str, options.values())]).strip()
        done = []
        with self._processes():
            for experiment in experiments:
                with self.workspace.running(name, experiment):
                    done.append(stage(self.workspace, self.params, experiment, progress=self.progress, **options))
        return done

    def _processes(self) -> AbstractContextManager[object]:
        if world_size() == 1:
            return nullcontext()
        from salcli.engine.device import joined

        return joined(self.params.timeout)

    def finish(
        self, view: "RenderableType", written: Iterable[Path], next_command: str = "", *, outside: Iterable[Path] = ()
    ) -> None:
        """Print the outcome, what was written and what comes next. `outside` are files at paths the user gave."""
        from salcli.report.console import console

        console.print(view)
        if self.workspace.read_from_scratch:
            say(f"read from scratch/: {', '.join(self.workspace.read_from_scratch)}", "yellow")
        shown = [*(path.relative_to(self.workspace.root) for path in written), *outside]
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        say(f"wrote {', '.join(map(str, shown[:4]))}{more}; worked {self.progress.seconds:.1f} s", "dim")
        if next_command and "DVC_STAGE" not in os.environ:  # DVC knows what comes next
            say(f"next: {next_command}{self._options_of(next_command)}", "dim")

    def _options_of(self, next_command: str) -> str:
        """The options of this run that the next command knows as well, as they are typed."""
        name = next_command.rpartition("salcli ")[2].split()[0]
        known = {option: values for option, values in self.chosen.items() if option not in LACKS.get(name, ())}
        typed = [
            f" {RENAMES.get((name, option), option)} {shlex.quote(str(value))}"
            for option, values in known.items()
            for value in values
        ]
        return "".join(typed) + (" --scratch" if self.workspace.scratch else "")


def say(line: str, style: str = "") -> None:
    """Print a line as it is; a long command is not broken, so that it can be copied."""
    from salcli.report.console import console

    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _announce(changed: "list[Override]", params_file: Path, is_scratch: bool) -> None:
    for change in changed:
        say(f"override: {change.key} = {change.value} ({params_file.name}: {change.in_file})", "yellow")
    if is_scratch:
        say("scratch run: writes to scratch/, what `dvc repro` builds stays as it is", "yellow")


def _share(text: str) -> float | str:
    """π as it is written in paths: 0.1, 1 or unknown."""
    if text == "unknown":
        return text
    try:
        value = float(text)
    except ValueError:
        raise ParamsError(f"--pi {text}: must be a number in (0, 1], or unknown") from None
    if not 0 < value <= 1:
        raise ParamsError(f"--pi {text}: must be a number in (0, 1], or unknown")
    return int(value) if value == int(value) else value


def _check_ood(option: str, names: list[str] | None, params: "Params") -> None:
    from salcli.data.catalogue import DATA_SETS

    for name in names or []:
        known = [*DATA_SETS, *params.data.custom]
        if name not in known:
            raise unknown_name("OOD set", name, known)
        if name == params.data.id:
            raise ParamsError(f"{option} {name}: that is the ID set (data.id); name another one")


def _warn_of_unread(command: str, assigned: list[str]) -> None:
    """Warn of keys that no stage of this command depends on, by what the pipeline says."""
    if not assigned:
        return
    pipeline = (files("salcli.project") / "pipeline.yaml").read_text(encoding="utf-8")
    stages = [text for text in re.split(r"\n\n(?=  [\w-]+:\n)", pipeline) if f"salcli {command}" in text]
    if not stages:
        return
    read = {"seeds", "launcher", "timeout", "device", "variant", "data"}
    read |= {found for stage in stages for found in re.findall(r"^      - ([a-z_]+)\b", stage, re.MULTILINE)}
    for key in assigned:
        if key.split(".")[0] not in read:
            say(f"warning: {key} changes nothing here; give it to the command that reads it", "bold yellow")


def _launch(launcher: str) -> None:
    """Run the same command under `launcher`, in several processes, and exit with its code; return if there is none.

    DVC sees the same command whatever the launcher is, so another machine makes nothing run again.
    """
    if launcher == "none" or LAUNCHED in os.environ or {"WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise UsageMistakeError(f"launcher {launcher!r} cannot be read: {error}; see launcher in params.yaml") from None
    if not words:
        raise UsageMistakeError("launcher is empty; it must be none, or a command such as torchrun --nproc-per-node 4")
    # as a module, so that it is the one of this environment
    program = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else words[:1]
    command = [*program, *words[1:], "-m", "salcli", *sys.argv[1:]]
    try:
        done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ, LAUNCHED: "1"})
    except OSError as error:
        raise UsageMistakeError(
            f"launcher {launcher!r} cannot be started: {error.strerror}; see launcher in params.yaml"
        ) from None
    raise typer.Exit(done.returncode)
