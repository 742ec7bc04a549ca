"""train-ood --method step: SimCLR on ID and wild images, then a projection and class centres (Zhou et al., 2021)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import fingerprint
from salcli.artifacts.resume import ResumePoint
from salcli.compute.augmentation import Augmentation
from salcli.compute.distortions import Distortions
from salcli.compute.image_rows import ImageRows
from salcli.compute.numerics import computing
from salcli.errors import TrainingError
from salcli.inference import in_batches
from salcli.models.contrastive import Projection
from salcli.models.network import Classifier
from salcli.models.step import StepNetwork
from salcli.rivals.contrast import nearest_is_alike, supervised_contrast
from salcli.rivals.step import NeighbourGraph, ProjectionSchedule, projection_steps, whitening
from salcli.seeding import derived_seed
from salcli.stages.batches import Batches
from salcli.stages.inputs import LabeledImages, classifier_of, id_images, mixture_of, wild_images
from salcli.stages.views import check_views_exist, viewed
from salcli.training import STEPS_BETWEEN_FIGURES, Batch, BatchResult, Epoch, Run, reproducible, train

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor, nn

    from salcli.artifacts.layout import Workspace
    from salcli.compute.numerics import Compute
    from salcli.params import Params
    from salcli.params_rivals import StepParams
    from salcli.params_section import SgdParams
    from salcli.progress import Progress

STEP = "step"
BATCH_OF_FEATURES = 512
ADAM_BETA2 = 0.999


def train_step(
    workspace: Workspace, params: Params, ood: str, seed: int, progress: Progress
) -> tuple[Epoch, list[Path]]:
    """Train one network, which has the shape of the ID classifier's, but not its weights.

    Gives the last epoch, with the final network's accuracy on the ID training data, and what was written. The accuracy
    of the curve is another one: the share of images that find their other view nearest.
    """
    classifier, found = classifier_of(workspace, seed)
    training = id_images(workspace, params.data.id, "train", seed)
    wild = wild_images(workspace, params.data.id, ood, seed)
    check_views_exist(STEP, "rivals", training)
    made_with = {
        "method": STEP,
        "network": fingerprint(found),
        "wild": fingerprint(mixture_of(workspace, ood, seed)),
        "ood": ood,
        "seed": seed,
        "train_rival": params.train_rival.step.model_dump(),
        "numerics": params.numerics.model_dump(),
    }
    with computing(params) as compute:
        if compute.processes.size > 1:
            raise TrainingError(f"{STEP} compares all views of a batch; train it in one process (--method {STEP})")
        stage = _Stage(params.train_rival.step, training, _together(training, wild), compute, progress)
        where = f"{ood}, seed {seed}"
        point = workspace.target(layout.resume_state(f"train-{STEP}", seed, ood))
        with reproducible(seed, f"train-step/{ood}") as generator:
            encoder = Classifier(classifier.spec)
            view_generator = torch.Generator().manual_seed(derived_seed(seed, f"step views/{ood}"))
            curve = stage.contrast(encoder, generator, view_generator, point, made_with, where)
        with reproducible(seed, f"train-step/{ood}/projection") as generator:
            network = StepNetwork.on_top_of(encoder)
            accuracy = stage.project(network, generator, where)
        places = layout.trained_network, layout.training_curve
        written = [workspace.target(place(STEP, ood, seed)) for place in places]
        if compute.processes.is_main:
            write_network(written[0], network, made_with)
            write_curve(written[1], [asdict(epoch) for epoch in curve])
            point.unlink(missing_ok=True)
    return replace(curve[-1], accuracy=accuracy), written


@dataclass(frozen=True)
class _Stage:
    """What both parts of the training have in common."""

    params: StepParams
    training: LabeledImages
    together: LabeledImages
    compute: Compute
    progress: Progress

    def contrast(
        self,
        encoder: Classifier,
        generator: torch.Generator,
        view_generator: torch.Generator,
        point: Path,
        made_with: dict[str, Any],
        where: str,
    ) -> list[Epoch]:
        """SimCLR: two views of each image should be alike, and unlike all others of the batch."""
        distort = Distortions(self.params.smallest_crop, view_generator)
        images = Batches(self.together, self.compute, Augmentation("none", torch.Generator()))
        course = Run(
            network=Projection(encoder, self.params.projection),
            objective=partial(_objective, temperature=self.params.temperature),
            batches=viewed(images, partial(_views, distort)),
            n_samples=len(self.together),
            params=self.params,
            compute=self.compute,
            generator=generator,
            stateful={"views": view_generator},
            optimiser=_adam,
        )
        with self.progress.task(f"train-ood, {STEP}, {where}", course.n_images, "images") as task:
            # another projection needs no other features
            own = {"train_rival": self.params.model_dump(exclude={"structure"})}
            config = made_with | own | {"processes": self.compute.processes.size}
            return train(course, task, ResumePoint(point, config, task))

    def project(self, network: StepNetwork, generator: torch.Generator, where: str) -> float:
        """Fit the projection to the neighbours of all samples, then take the centres of the labeled ones.

        Gives the share of these whose nearest centre is their own.
        """
        own, device = self.params.structure, self.compute.device
        images = self.together.images
        with self.progress.task(f"features, {where}", len(images), "images") as task:
            batches = in_batches(network, network.features, images, BATCH_OF_FEATURES, self.compute, task)
            features = torch.cat([part for (part,) in batches])
        known = features[: len(self.training)]
        try:
            to_white = whitening(known, own.ridge)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise TrainingError(
                "the variances of the features have no inverse; raise train_rival.step.structure.ridge "
                f"(it is {own.ridge:g})"
            ) from None
        graph = NeighbourGraph.of(features.double() @ to_white.T, own.neighbours - 1)
        schedule = ProjectionSchedule(own.steps, own.batch_size, own.lr, own.weight_decay, own.margin)
        with self.progress.task(f"projection, {where}", own.steps, "steps") as task:
            losses = projection_steps(network.head, features.to(device), graph, schedule, generator)
            for step, loss in enumerate(losses, start=1):
                is_shown = step % STEPS_BETWEEN_FIGURES == 0 or step == own.steps
                task.advance(1, **({"loss": _finite(float(loss), own.lr)} if is_shown else {}))
        network.set_centres(known.to(device), self.training.labels)
        with torch.inference_mode():
            predicted = network.class_scores(known.to(device)).argmax(1).cpu()
        return float((predicted == self.training.labels).double().mean())


def _finite(loss: float, lr: float) -> float:
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss of STEP's projection is not finite; try a smaller train_rival.step.structure.lr (it is {lr:g})"
        )
    return loss


def _together(training: LabeledImages, wild: ImageRows) -> LabeledImages:
    """ID training and wild images in this order; each is a class of its own, for nothing is known of the wild ones."""
    source = np.concatenate([training.index, wild.source])  # both count through the ID set first
    n = len(source)
    return LabeledImages(ImageRows(wild.sets, source), torch.arange(n), source, n)


def _views(distort: Distortions, images: Tensor, itself: Tensor) -> Batch:
    return distort(distort.mirrored(images.repeat(2, 1, 1, 1))), itself.repeat(2)


def _objective(network: nn.Module, batch: Batch, *, temperature: float) -> BatchResult:
    """The loss, and how many images find their other view nearest."""
    views, itself = batch
    features = network(views)
    is_found = nearest_is_alike(features, itself, len(itself))
    return BatchResult(supervised_contrast(features, itself, temperature), is_found.sum() / 2)


def _adam(weights: Iterable[nn.Parameter], params: SgdParams) -> torch.optim.Optimizer:
    betas = (params.momentum, ADAM_BETA2)
    return torch.optim.Adam(weights, params.lr, betas=betas, weight_decay=params.weight_decay)
