"""train-ood: train a network with the wild data: SAL's OOD classifier g_θ (Eq. 8), or a rival's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import check_made_with, fingerprint
from salcli.artifacts.resume import ResumePoint
from salcli.compute.augmentation import Augmentation
from salcli.compute.numerics import computing
from salcli.progress import Silent
from salcli.seeding import derived_seed
from salcli.stages.batches import Batches, EndlessImages
from salcli.stages.inputs import classifier_of, id_images, mixture_of, wild_images
from salcli.stages.reviewed import Reviewed, reviewed
from salcli.stages.train_step import STEP, train_step
from salcli.stages.wild_methods import WILD_METHODS, Start
from salcli.training import Epoch, Run, reproducible, train

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Found, Workspace
    from salcli.params import Params
    from salcli.progress import Progress

SAL = "sal"
METHODS = (*WILD_METHODS, STEP)


@dataclass(frozen=True)
class TrainedWithWild:
    """The figures of the run and what was written."""

    method: str
    ood: str
    seed: int
    n_outliers: int | None  # what it took for outliers: candidates, or all wild samples; STEP takes none for one
    last_epoch: Epoch
    written: list[Path]


def run(
    workspace: Workspace, params: Params, ood: str, seed: int, progress: Progress | None = None, *, method: str = SAL
) -> TrainedWithWild:
    """Train one network."""
    if method == STEP:  # in two parts of its own, which begin with ID and wild images together
        last_epoch, written = train_step(workspace, params, ood, seed, progress or Silent())
        return TrainedWithWild(method, ood, seed, None, last_epoch, written)
    classifier, found = classifier_of(workspace, seed)
    training = id_images(workspace, params.data.id, "train", seed)
    wild = wild_images(workspace, params.data.id, ood, seed)
    # rivals do without the filter, so another filter is nothing to them
    candidates = _matching_candidates(workspace, found, ood, seed) if method == SAL else None
    review = _review(workspace, params, candidates, ood, seed)
    is_candidate = review.is_candidate if review else candidates.is_candidate if candidates else None
    n_outliers = len(wild) if is_candidate is None else int(is_candidate.sum())
    made_with = {
        "method": method,
        "network": fingerprint(found),
        "wild": fingerprint(mixture_of(workspace, ood, seed)),
        "ood": ood,
        "seed": seed,
        "n_outliers": n_outliers,
        **_chosen(params, method),
        **({"review": review.made_with} if review else {}),
        "numerics": params.numerics.model_dump(),
    }
    # the same draws for all rivals: they see the same images in the same order
    with computing(params) as compute, reproducible(seed, f"train-ood/{ood}") as generator:
        chosen = WILD_METHODS[method](Start(classifier, training, wild, is_candidate, params, compute))
        augment_generator = torch.Generator().manual_seed(derived_seed(seed, f"augment/{ood}"))
        others = {name: EndlessImages(images, compute, generator) for name, images in chosen.others.items()}
        course = Run(
            network=chosen.network,
            objective=chosen.objective,
            batches=Batches(training, compute, Augmentation(params.train_ood.augment, augment_generator), others),
            n_samples=len(training),
            params=params.train_ood,
            compute=compute,
            generator=generator,
            stateful={"augmentation": augment_generator, **others, **chosen.stateful},
            after_epoch=chosen.after_epoch,
        )
        config = {**made_with, "processes": compute.processes.size}
        if candidates is not None:
            config["candidates"] = fingerprint(workspace.find(layout.candidates(ood, seed)))
        what = f"train-ood, {method}, {ood}, seed {seed}"
        with (progress or Silent()).task(what, course.n_images, "images") as task:
            point = workspace.target(layout.resume_state(f"train-{method}", seed, ood))
            keeper = ResumePoint(point, config, task)
            if params.train_ood.review and candidates:
                task.note(str(review or f"not in {params.train_ood.review}, so its candidates stay as they are"))
            curve = train(course, task, keeper)
            if note := chosen.finish():
                task.note(f"{method}: {note}")
        places = layout.trained_network, layout.training_curve
        written = [workspace.target(place(method, ood, seed)) for place in places]
        if compute.processes.is_main:
            write_network(written[0], chosen.network, made_with)
            write_curve(written[1], [asdict(epoch) for epoch in curve])
            keeper.clear()
    return TrainedWithWild(method, ood, seed, n_outliers, curve[-1], written)


def _chosen(params: Params, method: str) -> dict[str, Any]:
    """The params that a method is trained with: all share a schedule."""
    schedule = params.train_ood.model_dump(exclude={"review"})  # what matters is what it says, not where it lies
    if method == SAL:
        return {"train_ood": schedule}
    own = ("loss_weight", "candidate_id")  # SAL's
    shared = {key: value for key, value in schedule.items() if key not in own}
    return {"train_ood": shared, "train_rival": params.train_rival.of(method).model_dump()}


def _review(
    workspace: Workspace, params: Params, candidates: Candidates | None, ood: str, seed: int
) -> Reviewed | None:
    """What a person decided about the candidates, where params name a list."""
    if candidates is None or params.train_ood.review is None:
        return None
    found = workspace.find(layout.candidates(ood, seed))
    return reviewed(workspace.given(params.train_ood.review), candidates, found, ood, seed)


def _matching_candidates(workspace: Workspace, classifier: Found, ood: str, seed: int) -> Candidates:
    found = workspace.find(layout.candidates(ood, seed))
    candidates = read_candidates(found)
    gradients = workspace.how_to_make(layout.wild_gradients(ood, seed))  # candidates know of both through the gradients
    check_made_with(found, candidates.network, classifier, first=gradients)
    check_made_with(found, candidates.wild, workspace.find(layout.wild_mixture(ood, seed)), first=gradients)
    return candidates
