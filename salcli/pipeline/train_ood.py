"""train-ood: train a network with the wild data: SAL's OOD classifier g_θ (Eq. 8), or a rival's.

train-encoder: train a rival's network from scratch on the ID data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from salcli.engine.batches import LabeledRows
from salcli.engine.device import computing
from salcli.engine.inference import accuracy
from salcli.engine.linear_heads import ROUNDS, FullFit
from salcli.engine.training import Epoch, train
from salcli.errors import SalError
from salcli.methods.base import LBFGS, IdTrained, Start, Trained, TrainParams, WildTrained, find_method
from salcli.models.network import Classifier
from salcli.params.schema import Params
from salcli.pipeline.loading import classifier, id_samples, wild_samples
from salcli.pipeline.network_spec import code_of_network, network_spec
from salcli.progress import Progress, Silent
from salcli.store.files import fingerprint, write_csv
from salcli.store.formats import ResumePoint, read_candidates, write_network
from salcli.store.layout import Artifact, Experiment, Workspace
from salcli.store.review import reviewed


@dataclass(frozen=True)
class TrainedNetwork:
    """The metrics of the run and what was written."""

    method: str
    label: str
    experiment: Experiment
    last_epochs: dict[str, Epoch]  # by phase
    written: list[Path]
    n_outliers: int | None = None  # what counted as outliers: candidates, or all wild samples; None for encoders
    train_accuracy: float | None = None  # of a method whose curve does not show it
    test_accuracy: float | None = None


def run(
    workspace: Workspace,
    params: Params,
    experiment: Experiment,
    progress: Progress | None = None,
    *,
    rival: str | None = None,
) -> TrainedNetwork:
    """Train SAL in the experiment's variant, or a rival."""
    name = rival or experiment.variant
    params = params if rival else params.for_variant(name)
    method: WildTrained = find_method(rival, WildTrained).from_params(params) if rival else params.method(name)  # type: ignore[assignment]
    network = classifier(workspace, experiment)
    training, wild = id_samples(workspace, params, "train", experiment), wild_samples(workspace, params, experiment)
    settings: dict[str, Any] = {
        "ood": experiment.ood,
        "train_ood": params.train_ood.model_dump(include={*TrainParams.model_fields}),
        "n_outliers": len(wild),
    }
    is_candidate, note = None, ""
    if not rival:  # rivals do without the filter, so another filter does not change them
        found = workspace.find(experiment.candidates)
        candidates, given = read_candidates(found), params.train_ood.review
        is_candidate = candidates.is_candidate
        review = reviewed(workspace.given(given), candidates, found, experiment) if given else None
        if review:
            is_candidate, note = review.is_candidate, str(review)
            settings["review"] = review.about
        elif given:
            note = f"{given} does not mention this experiment, so its candidates stay as they are"
        settings |= {"n_outliers": int(is_candidate.sum()), "candidates": fingerprint(found.path)}
    with computing(params.device, params.numerics) as compute:
        start = Start(
            seed=experiment.seed,
            training=training,
            compute=compute,
            spec=network.spec,
            ood=experiment.ood,
            classifier=network,
            wild=wild,
            is_candidate=is_candidate,
            schedule=params.train_ood,
            batch_size=params.extract_grads.batch_size,
            progress=progress or Silent(),
        )
        artifacts = experiment.network(name), experiment.curve(name)
        job = _Job(workspace, params, experiment, method, name, start, settings, artifacts)
        trained, curves = job.run(note)
        # contrast counts something else, and so does a fit of the OOD head
        is_head_alone = not rival and params.train_ood.solver == LBFGS
        is_accuracy = len(curves) == 1 and "" in curves and not is_head_alone
        train_accuracy = None if is_accuracy else job.accuracy_of(trained, training)
        label, n_outliers = method.label if rival else name, settings["n_outliers"]
        return job.written(trained, curves, label, n_outliers=n_outliers, train_accuracy=train_accuracy)


def run_encoder(
    workspace: Workspace, params: Params, experiment: Experiment, encoder: str, progress: Progress | None = None
) -> TrainedNetwork:
    """Train a rival's network from scratch on the ID data."""
    method: IdTrained = find_method(encoder, IdTrained).from_params(params)  # type: ignore[assignment]
    training = id_samples(workspace, params, method.images, experiment)
    test = id_samples(workspace, params, "test", experiment)
    settings = {
        "data": params.data.id,
        "model": params.model.model_dump(),
        **code_of_network(workspace, params.model),
    }
    with computing(params.device, params.numerics) as compute:
        spec = network_spec(params.model, training)
        start = Start(experiment.seed, training, compute, spec, progress=progress or Silent())
        seed_only = Experiment(experiment.seed)
        artifacts = experiment.encoder(encoder), experiment.encoder_curve(encoder)
        job = _Job(workspace, params, seed_only, method, encoder, start, settings, artifacts)
        trained, curves = job.run()
        test_accuracy = job.accuracy_of(trained, test)
        return job.written(trained, curves, method.label, test_accuracy=test_accuracy)


@dataclass(frozen=True)
class _Job:
    """The phases of one method, each resumable."""

    workspace: Workspace
    params: Params
    experiment: Experiment
    method: Trained
    name: str
    start: Start
    settings: dict[str, Any]
    artifacts: tuple[Artifact, Artifact]  # the network, the curve of its training

    def about(self) -> dict[str, Any]:
        own = self.method.params.model_dump() if self.method.params else {}
        return self.workspace.about(
            self.artifacts[0],
            method=self.name,
            seed=self.experiment.seed,
            params=own,
            numerics=self.params.numerics.model_dump(),
            **{key: value for key, value in self.settings.items() if key != "candidates"},
        )

    def run(self, note: str = "") -> tuple[Classifier, dict[str, list[Epoch]]]:
        n_processes = self.start.compute.processes.size
        if self.method.in_one_process and n_processes > 1:
            raise SalError(f"{self.method.label} compares all samples of a batch; train it in one process")
        curves: dict[str, list[Epoch]] = {}
        phases = self.method.phases(self.start)
        fixed = {**self.about(), **self.settings, "processes": n_processes, "params": None}
        phase = next(phases)
        while True:
            what = " ".join(filter(None, (self.name, phase.name)))
            total = (ROUNDS, "rounds") if isinstance(phase.run, FullFit) else (phase.run.total_samples, "samples")
            with self.start.progress.task(f"{what}, {self.experiment}", *total) as task:
                if note and not curves:
                    task.note(note)
                if isinstance(phase.run, FullFit):  # takes seconds: nothing to resume
                    curves[phase.name], _ = phase.run.run(task)
                else:
                    keeper = ResumePoint(self._state(phase.name), {**fixed, "params": dict(phase.settings)}, task)
                    curves[phase.name] = train(phase.run, task, keeper)
            try:
                phase = phases.send(curves[phase.name])
            except StopIteration as finished:
                return finished.value, curves

    def written(self, network: Classifier, curves: dict[str, list[Epoch]], label: str, **known: Any) -> TrainedNetwork:
        """Write the network and its curve."""
        written = [self.workspace.target(artifact) for artifact in self.artifacts]
        last = {phase: curve[-1] for phase, curve in curves.items()}
        result = TrainedNetwork(self.name, label, self.experiment, last, written, **known)
        if not self.start.compute.processes.is_main:
            return result
        write_network(written[0], network, self.about())
        rows, n_before = [], 0
        for phase, curve in curves.items():  # one axis for a plot
            rows += [
                {**({"phase": phase} if phase else {}), **asdict(epoch), "epoch": n_before + epoch.epoch}
                for epoch in curve
            ]
            n_before += len(curve)
        write_csv(written[1], rows, [*rows[0]])
        for phase in curves:
            self._state(phase).unlink(missing_ok=True)
        return result

    def accuracy_of(self, network: Classifier, samples: LabeledRows) -> float:
        with self.start.progress.task("accuracy", len(samples), "samples") as task:
            return accuracy(network, samples, self.start.compute, task)

    def _state(self, phase: str) -> Path:
        what = "-".join(filter(None, ("train", self.name, phase)))
        return self.workspace.target(self.experiment.resume_state(what))
