"""train-ood: fit the OOD classifier g_θ on ID data and candidate outliers (Eq. 8)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import check_made_with, fingerprint
from salcli.artifacts.resume import ResumePoint
from salcli.compute.augmentation import Augmentation
from salcli.compute.numerics import computing
from salcli.models.network import OodClassifier
from salcli.progress import Silent
from salcli.sal.objective import sal_objective
from salcli.seeding import derived_seed
from salcli.stages.batches import Batches, EndlessImages
from salcli.stages.inputs import classifier_of, id_images, wild_images
from salcli.training import Batch, BatchResult, Epoch, Run, reproducible, train

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Found, Workspace
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
        others = {"outliers": EndlessImages(wild.select(candidates.is_candidate), compute, generator)}
        if params.train_ood.candidate_id:
            others["wild_id"] = EndlessImages(wild.select(~candidates.is_candidate), compute, generator)
        network = OodClassifier.on_top_of(classifier)
        course = Run(
            network=network,
            objective=partial(_objective, loss_weight=params.train_ood.loss_weight),
            batches=Batches(training, compute, Augmentation(params.train_ood.augment, augment_generator), others),
            n_samples=len(training),
            params=params.train_ood,
            compute=compute,
            generator=generator,
            stateful={"augmentation": augment_generator, **others},
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
            write_network(written[0], network, made_with)
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


def _matching_candidates(workspace: Workspace, classifier: Found, ood: str, seed: int) -> Candidates:
    found = workspace.find(layout.candidates(ood, seed))
    candidates = read_candidates(found)
    gradients = workspace.how_to_make(layout.wild_gradients(ood, seed))  # candidates know of both through the gradients
    check_made_with(found, candidates.network, classifier, first=gradients)
    check_made_with(found, candidates.wild, workspace.find(layout.wild_mixture(ood, seed)), first=gradients)
    return candidates
