"""Outlier scores of the wild data by any score, and of the ID data that its threshold is chosen on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from salcli.artifacts import layout
from salcli.artifacts.fingerprint import check_made_with
from salcli.artifacts.gradients import GradientFile
from salcli.compute.devices import resolve_device
from salcli.compute.numerics import computing
from salcli.errors import BadArtifactError, ParamsError, ThresholdError
from salcli.progress import Silent
from salcli.rivals.head import Head
from salcli.sal.scores import gradnorm_outlier_scores
from salcli.stages.inputs import classifier_of, id_images, mixture_of, wild_images
from salcli.stages.odin_pass import odin_scores
from salcli.stages.rival_scores import HYPERPARAMETERS, RIVALS, IdKnowledge
from salcli.stages.tau import tau, unlabeled

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from salcli.artifacts.layout import Workspace
    from salcli.models.network import Classifier
    from salcli.params import Params
    from salcli.progress import Progress, Task
    from salcli.stages.inputs import IdPart
    from salcli.stages.rival_scores import Score

# τ first: `auto` keeps it unless another one is better.
SEPARATORS = ("sal", "gradnorm", "odin", *(name for name in RIVALS if name != "gradnorm"))


@dataclass(frozen=True)
class Gradients:
    """The stored gradients of one experiment."""

    id_train: GradientFile
    calibration: GradientFile
    wild: GradientFile

    @classmethod
    def open(cls, workspace: Workspace, ood: str, seed: int) -> Gradients:
        """All of one network."""
        places = (
            layout.id_gradients("train", seed),
            layout.id_gradients("calibration", seed),
            layout.wild_gradients(ood, seed),
        )
        files = [GradientFile.open(workspace.find(place)) for place in places]
        for file in files:
            if file.network != files[0].network:
                raise BadArtifactError(
                    f"{file.found.path} was made with network {file.network}, {files[0].found.path} with "
                    f"{files[0].network}; make all gradients again: salcli extract-grads --ood {ood} --seed {seed}"
                )
        return cls(*files)


def made_with(name: str, params: Params) -> dict[str, Any]:
    """What of params.yaml, beside the filter section, a score depends on."""
    used: dict[str, Any] = {f"evaluate.{key}": getattr(params.evaluate, key) for key in HYPERPARAMETERS.get(name, ())}
    return {**used, "numerics": params.numerics.model_dump()} if name == "odin" else used


@dataclass(frozen=True)
class Separators:
    """One experiment's wild and calibrating samples, and everything that scores them. Higher = outlier."""

    workspace: Workspace
    params: Params
    ood: str
    seed: int
    gradients: Gradients
    progress: Progress

    def all_scores(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By every score that can be had; τ alone has to."""
        found = {SEPARATORS[0]: self.scores(SEPARATORS[0])}
        for name in SEPARATORS[1:]:
            try:
                found[name] = self.scores(name)
            except (ThresholdError, ParamsError) as error:
                with self.progress.task(f"filter, {self.ood}, seed {self.seed}", 1, "scores") as task:
                    task.note(f"auto does without {name}: {error}")
                    task.advance(1)
        return found

    def scores(self, name: str) -> tuple[Tensor, Tensor]:
        """Of the wild data, and of the ID data that the threshold is chosen on."""
        n_classes, n_samples = self.gradients.wild.n_classes, len(self.gradients.wild) + len(self._calibrating)
        total = (n_classes, "classes") if name == "sal" else (n_samples, "samples")
        what = "" if self.params.filter.score == "sal" else f", {name}"
        with self.progress.task(f"filter, {self.ood}, seed {self.seed}{what}", *total) as task:
            if name == "sal":
                return self._tau(task)
            if name == "gradnorm":
                task.advance(n_samples)
                return gradnorm_outlier_scores(self.gradients.wild), gradnorm_outlier_scores(self._calibrating)
            wild, calibrating = self._odin(task) if name == "odin" else self._rival(name, task)
        for score in (wild, calibrating):
            if n_undefined := int((~score.isfinite()).sum()):
                raise ThresholdError(
                    f"{name} gives no finite number for {n_undefined} of {len(score)} samples; use another score"
                )
        return wild, calibrating

    @property
    def _calibrates_on_training_data(self) -> bool:
        return self.params.filter.calibration != "holdout"

    @property
    def _calibrating(self) -> GradientFile:
        return self.gradients.id_train if self._calibrates_on_training_data else self.gradients.calibration

    def _tau(self, task: Task) -> tuple[Tensor, Tensor]:
        params, id_train, device = self.params.filter, self.gradients.id_train, resolve_device(self.params.device)
        wild = unlabeled(self.gradients.wild, params, self.seed, "wild")
        if params.calibration == "id-svd":
            (wild_tau,) = tau(wild, [wild], id_train, params, device, task)
            (id_tau,) = tau(id_train, [id_train], id_train, params, device, Silent())
            return wild_tau, id_tau
        calibrating = id_train
        if params.calibration == "holdout":
            calibrating = unlabeled(self.gradients.calibration, params, self.seed, "calibration")
        wild_tau, id_tau = tau(wild, [wild, calibrating], id_train, params, device, task)
        return wild_tau, id_tau

    def _rival(self, name: str, task: Task) -> tuple[Tensor, Tensor]:
        """From the stored features; the last layer gives the logits."""
        gradients, head = self.gradients, Head.of(self._classifier.head)
        known = IdKnowledge(self._classifier.head, lambda: gradients.id_train, self.params.evaluate, task)
        of_wild = of_calibrating = RIVALS[name](known)
        if name == "knn" and self._calibrates_on_training_data:
            of_calibrating = RIVALS[name](replace(known, of_known_samples=True))
        return (
            _chunk_by_chunk(of_wild, gradients.wild, head, task),
            _chunk_by_chunk(of_calibrating, self._calibrating, head, task),
        )

    def _odin(self, task: Task) -> tuple[Tensor, Tensor]:
        """From the images: the one score that needs gradients w.r.t. them."""
        workspace, data_id, file = self.workspace, self.params.data.id, self.gradients.wild
        network = self._classifier
        check_made_with(file.found, file.wild, mixture_of(workspace, self.ood, self.seed))
        part: IdPart = "train" if self._calibrates_on_training_data else "calibration"
        image_sets = (
            wild_images(workspace, data_id, self.ood, self.seed),
            id_images(workspace, data_id, part, self.seed).images,
        )
        batch_size = self.params.extract_grads.batch_size
        with computing(self.params) as compute:
            score = -odin_scores(network, image_sets, self.params.evaluate, batch_size, compute, task)
        return score[: len(image_sets[0])], score[len(image_sets[0]) :]

    @cached_property
    def _classifier(self) -> Classifier:
        """The network that gave the gradients."""
        network, found = classifier_of(self.workspace, self.seed)
        check_made_with(self.gradients.wild.found, self.gradients.wild.network, found)
        return network


def _chunk_by_chunk(score: Score, file: GradientFile, head: Head, task: Task) -> Tensor:
    parts = []
    for chunk in file.chunks():
        parts.append(-score(chunk.feature, head.logits(chunk.feature)).double())
        task.advance(len(chunk))
    return torch.cat(parts)
