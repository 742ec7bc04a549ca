"""train-ood: fit the OOD classifier g_θ on ID data and candidate outliers (Eq. 8)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import check_made_with, fingerprint
from salcli.artifacts.resume import ResumePoint
from salcli.compute.augmentation import Augmentation
from salcli.compute.image_rows import DeviceImages
from salcli.compute.numerics import computing
from salcli.models.network import OodClassifier
from salcli.progress import Silent
from salcli.sal.objective import sal_objective
from salcli.seeding import derived_seed
from salcli.stages.inputs import LabeledImages, classifier_of, id_images, wild_images
from salcli.training import Batch, BatchResult, Epoch, Run, Stateful, reproducible, train

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from salcli.artifacts.layout import Found, Workspace
    from salcli.compute.image_rows import ImageRows
    from salcli.compute.numerics import Compute
    from salcli.params import Params
    from salcli.progress import Progress


@dataclass(frozen=True)
class TrainedOodClassifier:
    """The figures of the run and what was written."""

    ood: str
    seed: int
    n_candidates: int
    last_epoch: Epoch
    written: list[Path]


def run(
    workspace: Workspace, params: Params, ood: str, seed: int, progress: Progress | None = None
) -> TrainedOodClassifier:
    """Train one OOD classifier."""
    classifier, found = classifier_of(workspace, seed)
    training = id_images(workspace, params.data.id, "train", seed)
    wild = wild_images(workspace, params.data.id, ood, seed)
    candidates = _matching_candidates(workspace, found, ood, seed)
    made_with = {
        "network": fingerprint(found),
        "wild": candidates.wild,
        "ood": ood,
        "seed": seed,
        "n_candidates": len(candidates.index),
        "train_ood": params.train_ood.model_dump(),
        "numerics": params.numerics.model_dump(),
    }
    with computing(params) as compute, reproducible(seed, f"train-ood/{ood}") as generator:
        augment_generator = torch.Generator().manual_seed(derived_seed(seed, f"augment/{ood}"))
        batches = _Batches(
            training=training,
            outliers=EndlessImages(wild.select(candidates.is_candidate), compute, generator),
            wild_id=EndlessImages(wild.select(~candidates.is_candidate), compute, generator)
            if params.train_ood.candidate_id
            else None,
            compute=compute,
            augment=Augmentation(params.train_ood.augment, augment_generator),
        )
        course = Run(
            network=OodClassifier.on_top_of(classifier),
            objective=partial(_objective, loss_weight=params.train_ood.loss_weight),
            batches=batches,
            n_samples=len(training),
            params=params.train_ood,
            compute=compute,
            generator=generator,
            stateful={"augmentation": augment_generator, **batches.stateful},
        )
        with (progress or Silent()).task(f"train-ood, {ood}, seed {seed}", course.n_images, "images") as task:
            config = {
                **made_with,
                "candidates": fingerprint(workspace.find(layout.candidates(ood, seed))),
                "processes": compute.processes.size,
            }
            point = workspace.target(layout.resume_state("train-ood", seed, ood))
            keeper = ResumePoint(point, config, task)
            curve = train(course, task, keeper)
        written = [workspace.target(place(ood, seed)) for place in (layout.ood_classifier, layout.train_ood_curve)]
        if compute.processes.is_main:
            write_network(written[0], course.network, made_with)
            write_curve(written[1], [asdict(epoch) for epoch in curve])
            keeper.clear()
    return TrainedOodClassifier(ood, seed, len(candidates.index), curve[-1], written)


def _objective(network: nn.Module, batch: Batch, *, loss_weight: float) -> BatchResult:
    """`batch`: ID images, their labels, as many outliers, and maybe as many wild images that count as ID."""
    images, labels, *others = batch
    n = len(labels)
    # one pass, so that batch norm sees the mixture that it will see in use
    class_logits, ood_logit = network(torch.cat([images, *others]))
    id_logit, outlier_logit = torch.cat([ood_logit[:n], ood_logit[2 * n :]]), ood_logit[n : 2 * n]
    loss = sal_objective(class_logits[:n], labels, id_logit, outlier_logit, loss_weight)
    return BatchResult(loss, (class_logits[:n].argmax(1) == labels).sum())


class _Batches:
    """This process's part of every batch, on the device, augmented."""

    def __init__(
        self,
        training: LabeledImages,
        outliers: EndlessImages,
        wild_id: EndlessImages | None,
        compute: Compute,
        augment: Augmentation,
    ) -> None:
        self._images = DeviceImages(training.images, compute.device, resident=True)
        self._labels = training.labels.to(compute.device)
        self._outliers, self._wild_id = outliers, wild_id
        self._compute, self._augment = compute, augment

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What a resumed run has to put back."""
        sources = {"outliers": self._outliers, "wild_id": self._wild_id}
        return {name: source for name, source in sources.items() if source is not None}

    def __call__(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        part_of = self._compute.processes.part
        own = [positions[part_of(len(positions))] for positions in order]
        others = [
            source.batches([len(positions) for positions in order])
            for source in (self._outliers, self._wild_id)
            if source is not None
        ]
        for positions, mine, images, *further in zip(order, own, self._images.batches(own), *others, strict=True):
            n, part = len(positions), part_of(len(positions))
            changed, *others_changed = (self._augment(some, n, part) for some in (images, *further))
            yield changed, self._labels[mine.to(self._compute.device)], *others_changed


class EndlessImages:
    """Draws images without replacement, and begins anew when all have been drawn."""

    def __init__(self, images: ImageRows, compute: Compute, generator: torch.Generator) -> None:
        self._images = DeviceImages(images, compute.device, resident=True)
        self._part_of = compute.processes.part
        self._generator = generator
        self._waiting = torch.empty(0, dtype=torch.int64)

    def draw(self, n: int) -> Tensor:
        """The positions of the next n images."""
        while len(self._waiting) < n:
            order = torch.randperm(len(self._images), generator=self._generator)
            self._waiting = torch.cat([self._waiting, order])
        drawn, self._waiting = self._waiting[:n], self._waiting[n:]
        return drawn

    def batches(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """This process's part of the next batches of these sizes."""
        return self._images.batches([self.draw(n)[self._part_of(n)] for n in sizes])

    def get_state(self) -> Tensor:
        """The positions that are drawn already and wait."""
        return self._waiting

    def set_state(self, state: Tensor) -> None:
        """Go on from there."""
        self._waiting = state


def _matching_candidates(workspace: Workspace, classifier: Found, ood: str, seed: int) -> Candidates:
    found = workspace.find(layout.candidates(ood, seed))
    candidates = read_candidates(found)
    gradients = workspace.how_to_make(layout.wild_gradients(ood, seed))  # candidates know of both through the gradients
    check_made_with(found, candidates.network, classifier, first=gradients)
    check_made_with(found, candidates.wild, workspace.find(layout.wild_mixture(ood, seed)), first=gradients)
    return candidates
