"""train-ood: fit the OOD classifier g_θ on ID data and candidate outliers (Eq. 8)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import check_made_with, fingerprint
from salcli.devices import resolve_device
from salcli.models.network import OodClassifier
from salcli.progress import Silent
from salcli.sal.objective import sal_objective
from salcli.stages.inputs import classifier_of, id_images, wild_images
from salcli.training import BatchResult, Epoch, n_images_seen, reproducible, train

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
    device = resolve_device(params.device)
    classifier, found = classifier_of(workspace, seed)
    training = id_images(workspace, params.data.id, "train", seed)
    wild = wild_images(workspace, params.data.id, ood, seed)
    candidates = _matching_candidates(workspace, found, ood, seed)
    with reproducible(seed, f"train-ood/{ood}") as generator:
        network = OodClassifier.on_top_of(classifier).to(device)
        images, labels = training.images.to(device), training.labels.to(device)
        outliers = EndlessBatches(wild[candidates.is_candidate].to(device), generator)
        wild_id = EndlessBatches(wild[~candidates.is_candidate].to(device), generator)

        def objective(batch: Tensor) -> BatchResult:
            n = len(batch)
            parts = [images[batch], outliers.draw(n)]
            if params.train_ood.candidate_id:
                parts.append(wild_id.draw(n))
            # one pass, so that batch norm sees the mixture that it will see in use
            class_logits, ood_logit = network.outputs(torch.cat(parts))
            id_logit, outlier_logit = torch.cat([ood_logit[:n], ood_logit[2 * n :]]), ood_logit[n : 2 * n]
            loss = sal_objective(class_logits[:n], labels[batch], id_logit, outlier_logit, params.train_ood.loss_weight)
            return BatchResult(loss, (class_logits[:n].argmax(1) == labels[batch]).sum())

        n_seen = n_images_seen(len(training), params.train_ood)
        with (progress or Silent()).task(f"train-ood, {ood}, seed {seed}", n_seen, "images") as task:
            curve = list(train(network, objective, len(training), params.train_ood, generator, task))
    written = [workspace.target(place(ood, seed)) for place in (layout.ood_classifier, layout.train_ood_curve)]
    made_with = {
        "network": fingerprint(found),
        "wild": candidates.wild,
        "ood": ood,
        "seed": seed,
        "n_candidates": len(candidates.index),
        "train_ood": params.train_ood.model_dump(),
    }
    write_network(written[0], network, made_with)
    write_curve(written[1], [asdict(epoch) for epoch in curve])
    return TrainedOodClassifier(ood, seed, len(candidates.index), curve[-1], written)


class EndlessBatches:
    """Draws samples without replacement, and begins anew when all have been drawn."""

    def __init__(self, images: Tensor, generator: torch.Generator) -> None:
        self._images = images
        self._generator = generator
        self._waiting = torch.empty(0, dtype=torch.int64)

    def draw(self, n: int) -> Tensor:
        """The next n images."""
        while len(self._waiting) < n:
            order = torch.randperm(len(self._images), generator=self._generator)
            self._waiting = torch.cat([self._waiting, order])
        drawn, self._waiting = self._waiting[:n], self._waiting[n:]
        return self._images[drawn]


def _matching_candidates(workspace: Workspace, classifier: Found, ood: str, seed: int) -> Candidates:
    found = workspace.find(layout.candidates(ood, seed))
    candidates = read_candidates(found)
    gradients = workspace.how_to_make(layout.wild_gradients(ood, seed))  # candidates know of both through the gradients
    check_made_with(found, candidates.network, classifier, first=gradients)
    check_made_with(found, candidates.wild, workspace.find(layout.wild_mixture(ood, seed)), first=gradients)
    return candidates
