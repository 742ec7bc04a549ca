"""What stage commands share: params with overrides, the experiments to run, and the closing lines."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from salcli.cli.options import PARAMS_YAML, overrides_in
from salcli.errors import ParamsError, SalError, unknown_name
from salcli.progress import world_size

if TYPE_CHECKING:  # torch is loaded by the commands that need it
    from rich.console import RenderableType

    from salcli.params.schema import Params
    from salcli.report.console import ConsoleProgress
    from salcli.store.layout import Experiment, Workspace

# They change where a command computes, not what.
NOT_A_RESULT = {"device", "launcher", "timeout"}
OF_COMMAND = ExitStack()  # closed when the command ends (cli/app.py)
LAUNCHED = "SALCLI_LAUNCHED"  # marks what we started, or a launcher with one process would start itself for ever
# options that choose experiments, and the keys of params.yaml they choose from
SELECTED = {"ood": "data.ood", "pi": "data.pi", "seed": "seeds", "variant": "variants"}
# how later commands differ in these options
LACKS = {"train-id": {"--ood", "--pi", "--variant"}, "table": {"--ood", "--pi", "--seed", "--variant"}}
RENAMES = {("train-ood", "--variant"): "--method"}
R = TypeVar("R")


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
        cls, command: str, given: Mapping[str, Any], *, parallel: bool = True, elsewhere: tuple[str, ...] = ()
    ) -> "Session":
        """Load params with what options changed, and say what that was. Overrides make it a scratch run.

        `given` are values of shared options (cli/options.py). `elsewhere` are keys that change nothing but a file at a
        path that the user gave. A command that is not `parallel` runs in one process only.
        """
        from salcli.params.reading import parse_assignment
        from salcli.params.schema import load_params
        from salcli.report.console import ConsoleProgress
        from salcli.store.layout import Experiment, Workspace

        assignments = dict(parse_assignment(text) for text in given.get("set") or [])
        _warn_of_unread(command, assignments)
        params_file: Path = given["params"]
        params, changed = load_params(params_file, {**assignments, **overrides_in(given)})
        if parallel:
            _launch(params.launcher)
        elif world_size() > 1:
            raise SalError("this command runs in one process; start it without torchrun")
        _check_names(given, params)
        is_scratch = bool(given.get("scratch")) or any(one.key not in {*NOT_A_RESULT, *elsewhere} for one in changed)
        for change in changed:
            say(f"override: {change.key} = {change.value} ({params_file.name}: {change.in_file})", "yellow")
        if is_scratch:
            say("scratch run: writes to scratch/, what `dvc repro` builds stays as it is", "yellow")
        if world_size() > 1:
            from salcli.engine.device import joined

            OF_COMMAND.enter_context(joined(params.timeout))
        shares = [_share(text) for text in given.get("pi") or []]
        assigned = {change.key: change.value for change in changed}
        variants = [*([] if command == "filter" else params.filters), *params.variants]
        chosen = {"--params": [params_file] if params_file != PARAMS_YAML else []}
        chosen |= {f"--{name}": given.get(name) or assigned.get(key, ()) for name, key in SELECTED.items()}
        return cls(
            params=params,
            workspace=Workspace(params_file.parent, scratch=is_scratch),
            experiments=[
                Experiment(seed, ood, pi, variant)
                for ood in dict.fromkeys(given.get("ood") or params.data.ood)
                for pi in dict.fromkeys(shares or params.data.pi)
                for seed in dict.fromkeys(given.get("seed") or params.seeds)
                for variant in dict.fromkeys(given.get("variant") or variants)
            ],
            unseen_sets=tuple(dict.fromkeys(given.get("unseen") or params.data.test_ood)),
            chosen={name: tuple(dict.fromkeys(values)) for name, values in chosen.items()},
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
        stage_name = stage.__module__.rpartition(".")[2].replace("_", "-")
        name = " ".join([stage_name, *(str(value) for value in options.values() if value)])
        done = []
        for experiment in experiments:
            with self.workspace.running(name, experiment):
                done.append(stage(self.workspace, self.params, experiment, progress=self.progress, **options))
        return done

    def finish(
        self,
        view: "RenderableType",
        written: Iterable[Path],
        next_command: str = "",
        *,
        notes: Iterable[str] = (),
        short: str = "",
    ) -> None:
        """Print the outcome, what was written and what comes next; with DVC, only `short`, if it is given.

        DVC starts a command for each experiment, with the same notes: there `salcli table` shows them, once.
        """
        from salcli.report.console import console

        if short and "DVC_STAGE" in os.environ:
            say(f"{short}; worked {self.progress.seconds:.1f} s", "dim")
            return
        console.print(view)
        for note in dict.fromkeys(notes if "DVC_STAGE" not in os.environ else ()):
            console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
        if self.workspace.read_from_scratch:
            say(f"read from scratch/: {', '.join(self.workspace.read_from_scratch)}", "yellow")
        root = self.workspace.root
        shown = [path.relative_to(root) if path.is_relative_to(root) else path for path in written]
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


def written(done: Iterable[Any]) -> list[Path]:
    """The files that stages wrote, by their results."""
    return [path for one in done for path in one.written]


def say(line: str, style: str = "") -> None:
    """Print a line as it is; a long command is not broken, so that it can be copied."""
    from salcli.report.console import console

    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def say_last(lines: Iterable[str]) -> None:
    """Print the last word of a custom project: the verdict in bold, a note in yellow."""
    for i, line in enumerate(lines):
        say(line, "yellow" if line.startswith("note: ") else "" if i else "bold")


def _share(text: str) -> float | str:
    """π as params have it: a number or unknown."""
    if text == "unknown":
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 1:
        raise ParamsError(f"--pi {text}: must be a number in (0, 1], or unknown")
    return value


def _check_names(given: Mapping[str, Any], params: "Params") -> None:
    from salcli.data.catalogue import DATA_SETS

    known = [*DATA_SETS, *params.data.custom]
    for option in ("ood", "unseen"):
        for name in given.get(option) or []:
            if name not in known:
                raise unknown_name("OOD set", name, known)
            if name == params.data.id:
                raise ParamsError(f"--{option} {name}: that is the ID set (data.id); name another one")
    for name in given.get("variant") or []:
        if name not in params.variant:
            raise unknown_name("variant", name, params.variant)


def _warn_of_unread(command: str, assigned: Collection[str]) -> None:
    """Warn of keys that no stage of this command depends on, by what the pipeline says."""
    from salcli.params.reading import read_yaml

    if not assigned:
        return
    read = {"seeds", "launcher", "timeout", "device", "variant", "data"}
    with as_file(files("salcli.project") / "pipeline.yaml") as pipeline:
        stages = [one for one in read_yaml(pipeline)["stages"].values() if f"salcli {command}" in str(one["cmd"])]
    for stage in stages:
        read |= {key.split(".")[0] for key in stage["params"] if isinstance(key, str)}
    for key in assigned:
        if stages and key.split(".")[0] not in read:
            say(f"warning: {key} changes nothing here; give it to the command that reads it", "bold yellow")


def _launch(launcher: str) -> None:
    """Run the same command under `launcher`, in several processes, and exit with its code; return if there is none.

    DVC sees the same command whatever the launcher is, so another machine makes nothing run again.
    """
    if launcher == "none" or LAUNCHED in os.environ or {"WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return
    try:
        program, *options = shlex.split(launcher)
        # so that it is the one of this environment
        torchrun = [sys.executable, "-c", "from salcli.engine.device import torchrun; torchrun()"]
        command = [*(torchrun if program == "torchrun" else [program]), *options, "-m", "salcli", *sys.argv[1:]]
        running = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ, LAUNCHED: "1"})
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SalError(
            f"launcher {launcher!r} cannot be started: {reason}; it must be none, or a command such as "
            "torchrun --nproc-per-node 4"
        ) from None
    try:
        raise typer.Exit(running.wait())
    finally:  # Ctrl-C or SIGTERM: the launcher ends its processes, which would go on without it
        running.terminate()
        running.wait()
