"""sweep-pi: all that depends on the share π of OOD in the wild data, for many values of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.fingerprint import fingerprint_of_file
from salcli.compute.processes import processes
from salcli.errors import ThresholdError
from salcli.progress import Silent
from salcli.source import stage_fingerprint
from salcli.stages import evaluate, extract_grads, prepare, theory, train_ood
from salcli.stages import filter as filter_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from salcli.artifacts.layout import Workspace
    from salcli.params import Params
    from salcli.progress import Progress, Task

METHOD = "sal"


@dataclass(frozen=True)
class SweepPoint:
    """One experiment at one π. Shares, not percent; None where a figure is not defined (no wild ID data at π = 1)."""

    ood: str
    pi: float
    seed: int
    n_wild: int
    n_candidates: int
    err_in: float | None
    err_out: float | None
    fpr95: float
    auroc: float
    aupr_in: float
    aupr_out: float
    id_accuracy: float
    zeta: float  # Definition 2, on held-out ID data
    zeta_without_noise: float


@dataclass(frozen=True)
class PiSweep:
    """All points, and why some are missing."""

    points: list[SweepPoint]
    n_known: int  # points of an earlier run
    gaps: list[str]


def run(
    workspace: Workspace,
    params: Params,
    shares: Sequence[float],
    experiments: Sequence[tuple[str, int]],
    progress: Progress | None = None,
) -> PiSweep:
    """Run every experiment (OOD set, seed) at every π. What an earlier run has finished is not done again.

    Everything that does not depend on π has to be there: the data, the split, the ID classifier and its gradients.
    """
    fingerprint = cache(fingerprint_of_file)
    code = stage_fingerprint("pi_sweep")
    every = [
        _Experiment.at(pi, workspace, params, ood, seed, fingerprint, code)
        for ood, seed in experiments
        for pi in shares
    ]
    # what the main process knows, all know: else they might not do the same
    points = processes().from_main([one.known() for one in every])
    waiting = [place for place, known in enumerate(points) if known is None]
    for place in waiting:  # before all else: a π that cannot be mixed is an error, and should be one at once
        every[place].mix()
    processes().wait()
    gaps = []
    for count, place in enumerate(waiting, start=1):
        one = every[place]
        try:
            points[place] = one.run(_Labelled(progress or Silent(), f"{count}/{len(waiting)}, π {one.pi:g}"))
        except ThresholdError as error:  # the other values of π are worth seeing all the same
            gaps.append(f"π {one.pi:g}, {one.ood}, seed {one.seed} is left out: {error}")
    return PiSweep([point for point in points if point], len(points) - len(waiting), gaps)


@dataclass(frozen=True)
class _Experiment:
    """One OOD set, seed and π, in a folder of its own."""

    pi: float
    ood: str
    seed: int
    workspace: Workspace
    params: Params
    made_with: dict[str, Any]  # as JSON gives it back

    @classmethod
    def at(
        cls,
        pi: float,
        workspace: Workspace,
        params: Params,
        ood: str,
        seed: int,
        fingerprint: Callable[[Path], str],
        code: str,
    ) -> _Experiment:
        """Fails where something is missing that the experiment has to be given."""
        data = params.data.model_copy(update={"pi": pi})
        scoring = params.evaluate.model_copy(update={"methods": (METHOD,)})
        chosen = params.model_copy(update={"data": data, "evaluate": scoring})
        inputs = {place.name: fingerprint(workspace.find(place).path) for place in _inputs(params, ood, seed)}
        own = workspace.within(layout.pi_sweep_folder(pi))
        return cls(pi, ood, seed, own, chosen, _made_with(chosen, inputs, code))

    @property
    def _record(self) -> Path:
        return self.workspace.target(layout.pi_sweep_point(self.ood, self.seed))

    def known(self) -> SweepPoint | None:
        """The outcome, if an earlier run has written it down with the same params, inputs and code."""
        try:
            content = json.loads(self._record.read_text(encoding="utf-8"))
            return SweepPoint(**content["figures"]) if content["made_with"] == self.made_with else None
        except (OSError, ValueError, LookupError, TypeError):  # whatever is wrong with it, it can be made again
            return None

    def mix(self) -> None:
        """Mix the wild data."""
        if processes().is_main:
            prepare.prepare_wild(self.workspace, self.params.data, self.ood, self.seed)

    def run(self, progress: Progress) -> SweepPoint:
        """From the wild data to the figures. Of several processes one writes, so the others wait after each step."""
        together, experiment = processes(), (self.workspace, self.params, self.ood, self.seed, progress)
        extract_grads.run_wild(*experiment)
        together.wait()
        filtered = filter_stage.run(self.workspace, self.params, self.ood, self.seed, progress)
        together.wait()
        train_ood.run(*experiment)
        together.wait()
        evaluated = evaluate.run(*experiment)
        point = None
        if together.is_main:
            point = self._point(filtered, evaluated, theory.run(*experiment))
            content = {"made_with": self.made_with, "figures": asdict(point)}
            write_text(self._record, json.dumps(content, indent=2) + "\n")
        point = together.from_main(point)
        assert point is not None
        return point

    def _point(
        self, filtered: filter_stage.Filtered, evaluated: evaluate.Evaluated, checked: theory.TheoryCheck
    ) -> SweepPoint:
        errors, metrics = filtered.errors, evaluated.metrics[METHOD]
        assert metrics is not None  # what is mixed has an OOD test set
        return SweepPoint(
            ood=self.ood,
            pi=self.pi,
            seed=self.seed,
            n_wild=len(filtered.candidates.wild_score),
            n_candidates=len(filtered.candidates.index),
            err_in=_defined(errors.err_in) if errors else None,
            err_out=_defined(errors.err_out) if errors else None,
            **asdict(metrics),
            id_accuracy=evaluated.id_accuracy[METHOD],
            zeta=checked.held_out.zeta,
            zeta_without_noise=checked.held_out.without_noise,
        )


def _defined(value: float) -> float | None:
    """JSON knows no NaN."""
    return None if math.isnan(value) else value


def _inputs(params: Params, ood: str, seed: int) -> list[layout.Artifact]:
    """All that does not depend on π."""
    return [
        layout.prepared_set(params.data.id),
        layout.prepared_ood_set(ood),
        layout.id_split(seed),
        layout.classifier(seed),
        *(layout.id_gradients(part, seed) for part in ("train", "calibration")),
    ]


def _made_with(params: Params, inputs: dict[str, str], code: str) -> dict[str, Any]:
    """All that the figures depend on."""
    return {
        "inputs": inputs,
        "data": {"id": params.data.id, "pi": params.data.pi, "ood_wild_share": params.data.ood_wild_share},
        "numerics": params.numerics.model_dump(mode="json"),
        "extract_grads": params.extract_grads.model_dump(mode="json"),
        "filter": params.filter.model_dump(mode="json"),
        "train_ood": params.train_ood.model_dump(mode="json"),
        "evaluate": params.evaluate.model_dump(mode="json", exclude={"methods"}),  # numbers of the filter's scores
        "code": code,
        "torch": torch.__version__,
    }


@dataclass(frozen=True)
class _Labelled:
    """Says with each step which experiment it belongs to."""

    progress: Progress
    label: str

    def task(self, name: str, total: int, unit: str) -> AbstractContextManager[Task]:
        return self.progress.task(f"{self.label}: {name}", total, unit)
