"""STEP: SimCLR on ID and wild images, then a linear projection that keeps neighbours and draws the rest apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from salcli.engine.augmentation import Distortions
from salcli.engine.batches import Batches, LabeledRows, Rows, check_views_exist, viewed
from salcli.engine.inference import BATCH_SIZE, outputs_of
from salcli.engine.training import STEPS_BETWEEN_LOSSES, Run, SgdConfig
from salcli.errors import SalError
from salcli.methods.base import (
    Count,
    NotNegative,
    Phase,
    Phases,
    Positive,
    Section,
    SgdParams,
    Start,
    WildTrained,
    method,
)
from salcli.methods.contrastive import Projection, contrast_objective, two_views
from salcli.models.network import Classifier, NetworkSpec

ADAM_BETA2 = 0.999
AUTHORS_EPOCHS, AUTHORS_STEPS = 500, 1500  # of the features, of the projection


class StructureParams(Section):
    """The projection, and the neighbours that it keeps."""

    neighbours: Annotated[int, Field(ge=2, strict=True)]
    ridge: Positive
    steps: Count
    batch_size: Count
    lr: Positive
    weight_decay: NotNegative
    margin: Positive


class StepParams(SgdParams):
    """SimCLR by Adam, whose β₁ is the momentum; then the projection."""

    temperature: Positive
    projection: Count
    smallest_crop: Annotated[float, Field(gt=0, le=1)]
    structure: StructureParams


class StepNetwork(Classifier):
    """Its head is the projection; its class logits are minus the distances to the centres.

    The projection is as wide as the backbone's last features (the authors' choice).
    """

    kind: ClassVar[str] = "step"
    centres: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        width = self.backbone.n_features
        self.head = nn.Linear(sum(self.backbone.level_widths), width, bias=False)
        self.register_buffer("centres", torch.zeros(spec.n_classes, width))

    @classmethod
    def on_backbone_of(cls, classifier: Classifier) -> StepNetwork:
        """The projection starts from random weights."""
        network = cls(classifier.spec)
        network.backbone.load_state_dict(classifier.backbone.state_dict())
        return network

    def features_of_normalised(self, normalised: Tensor) -> Tensor:
        """The features of all depths side by side (n × D)."""
        return torch.cat(self.backbone.levels(normalised), dim=1)

    def class_logits(self, features: Tensor) -> Tensor:
        """Minus the distance to each class centre (n × K)."""
        return centre_scores(self.head(features).float(), self.centres)


@method("step", label="STEP", paper="Zhou et al., 2021")
class Step(WildTrained):
    """Distance to class centres in a projection that keeps the neighbours of ID and wild samples together.

    The network has the shape of the ID classifier's, but not its weights.
    """

    Params = StepParams
    network = StepNetwork
    needs_images = True
    in_one_process = True

    def phases(self, start: Start) -> Phases:
        check_views_exist(self.name, "rivals", start.training)
        assert start.wild is not None
        own: StepParams = self.params
        together = _together(start.training, start.wild)
        with start.random(f"train-step/{start.ood}") as generator:
            encoder = Classifier(start.spec)
            draws = start.generator(f"step views/{start.ood}")
            images, views = Batches(together, start.compute), partial(two_views, Distortions(own.smallest_crop, draws))
            # each image is its own class, so that its other view should be the nearest
            objective = partial(contrast_objective, n_views=2, temperature=own.temperature, among_own_views=True)
            run = Run(
                network=Projection(encoder, own.projection),
                objective=objective,
                batches=viewed(images, views),
                n_samples=len(together),
                params=own,
                compute=start.compute,
                generator=generator,
                stateful={"views": draws},
                optimizer=_adam,
            )
            yield Phase("contrast", run, own.model_dump(exclude={"structure"}))
        with start.random(f"train-step/{start.ood}/projection") as generator:
            network = StepNetwork.on_backbone_of(encoder)
            self._project(network, together.rows, start, generator)
        return network

    def _project(self, network: StepNetwork, rows: Rows, start: Start, generator: torch.Generator) -> None:
        """Fit the projection to the neighbours of all samples, then take the centres of the labeled ones."""
        own, device = self.params.structure, start.compute.device
        with start.progress.task("STEP, features", len(rows), "samples") as task:
            (features,) = outputs_of(network, network.features, rows, BATCH_SIZE, start.compute, task)
        known = features[: len(start.training)]
        try:
            to_white = whitening(known, own.ridge)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise SalError(
                "the covariance of the features has no inverse; raise methods.step.structure.ridge "
                f"(it is {own.ridge:g})"
            ) from None
        near = nearest_others(features.double() @ to_white.T, own.neighbours - 1)
        with start.progress.task("STEP, projection", own.steps, "steps") as task:
            losses = projection_steps(network.head, features.to(device), *near, own, generator)
            for step, loss in enumerate(losses, start=1):
                is_shown = step % STEPS_BETWEEN_LOSSES == 0 or step == own.steps
                if is_shown and not loss.isfinite():
                    raise SalError(
                        "the loss of STEP's projection is NaN or infinite; try a smaller methods.step.structure.lr "
                        f"(it is {own.lr:g})"
                    )
                task.advance(1, **({"loss": float(loss)} if is_shown else {}))
        with torch.no_grad():
            projected = network.head(known.to(device)).cpu()  # sums in double precision, which not every device has
            network.centres.copy_(class_centres(projected, start.training.labels, network.spec.n_classes))

    def score(self, network: StepNetwork, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return -outputs[0].double().amax(1)

    def is_short(self) -> bool:
        return bool(self.params.epochs < AUTHORS_EPOCHS or self.params.structure.steps < AUTHORS_STEPS)


def _together(training: LabeledRows, wild: Rows) -> LabeledRows:
    """ID training and wild samples in this order, each its own class: the wild ones have no labels."""
    index = np.concatenate([training.rows.index, wild.index])  # both count through the ID set first
    return LabeledRows(Rows(wild.arrays, index), torch.arange(len(index)), len(index))


def _adam(weights: Iterable[nn.Parameter], params: SgdConfig) -> torch.optim.Optimizer:
    betas = (params.momentum, ADAM_BETA2)
    return torch.optim.Adam(weights, params.lr, betas=betas, weight_decay=params.weight_decay)


def whitening(id_features: Float[Tensor, "m d"], ridge: float) -> Float[Tensor, "d d"]:
    """W with WᵀW = (Σ + ridge · I)⁻¹, Σ the covariance of the labeled data: ‖Wx − Wy‖ is a Mahalanobis distance."""
    exact = id_features.double()
    centred = exact - exact.mean(0)
    covariance = centred.T @ centred / max(1, len(exact) - 1)
    factor = torch.linalg.cholesky(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))
    matrix: Tensor = torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=torch.float64), upper=False)
    return matrix


def nearest_others(points: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """How far the nearest neighbours of each point are, itself left out, and which they are.

    Exact, and in bounded memory: scikit-learn goes block by block. Few points have fewer neighbours.
    """
    from sklearn.neighbors import NearestNeighbors  # slow to load, and scores do without it

    found = NearestNeighbors(n_neighbors=min(k, len(points) - 1), algorithm="brute").fit(points.double().numpy())
    distance, index = found.kneighbors()
    return torch.from_numpy(distance), torch.from_numpy(index)


def structure_loss(
    anchor: Float[Tensor, "b d"],
    neighbour: Float[Tensor, "b d"],
    other: Float[Tensor, "b d"],
    limit: Float[Tensor, " b"],
    margin: float,
) -> Float[Tensor, ""]:
    """Of projected points: anchors, each with one of its neighbours and with any other point.

    Keep: the squared distance to a neighbour shall not exceed its limit. Unzip: any two points shall be far apart,
    until the mean over all pairs and coordinates of their squared difference reaches the margin.
    """
    keep = ((anchor - neighbour).square().sum(1) - limit).clamp(min=0).mean()
    unzip = (margin - (anchor - other).square().mean()).clamp(min=0)
    return keep + unzip


def projection_steps(
    projection: nn.Linear,
    features: Float[Tensor, "n d"],
    distance: Float[Tensor, "n k"],
    index: Int[Tensor, "n k"],
    schedule: StructureParams,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Fit the projection to all points, labeled and wild; gives the loss of each step as it is done.

    Draws on the CPU, so that the same seed gives the same triples on every device.
    """
    n, k = index.shape
    # the authors' index gives squared distances, and their loss squares what it is given
    limit = distance.pow(4)
    optimizer = torch.optim.Adam(projection.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay)
    for _ in range(schedule.steps):
        anchor, other = torch.randint(0, n, (2, schedule.batch_size), generator=generator)
        column = torch.randint(0, k, (schedule.batch_size,), generator=generator)
        neighbour = index[anchor, column]
        near, joined, far = (projection(features[which.to(features.device)]) for which in (anchor, neighbour, other))
        loss = structure_loss(near, joined, far, limit[anchor, column].to(features), schedule.margin)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.detach()


def class_centres(points: Float[Tensor, "m d"], labels: Int[Tensor, " m"], n_classes: int) -> Float[Tensor, "c d"]:
    """The mean of each class. A class without a sample is never the nearest: its centre is NaN."""
    count = labels.bincount(minlength=n_classes)
    total = points.double().new_zeros(n_classes, points.shape[1]).index_add(0, labels, points.double())
    return (total / count[:, None]).to(points)


def centre_scores(points: Float[Tensor, "n d"], centres: Float[Tensor, "c d"]) -> Float[Tensor, "n c"]:
    """Minus the distance to each centre: the nearest class scores highest."""
    if torch.compiler.is_compiling():  # ONNX has no cdist
        distance = (points[:, None] - centres).norm(dim=2)
    else:
        distance = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return -torch.where(distance.isnan() & points.isfinite().all(1)[:, None], torch.inf, distance)
