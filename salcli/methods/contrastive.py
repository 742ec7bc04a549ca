"""Rivals that learn their features by contrast from labeled ID data, then fit linear heads on them: KNN+ and CSI.

And the network of baselines that train on all ID data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from salcli.engine.augmentation import Distortions
from salcli.engine.batches import Batch, Batches, check_views_exist, viewed
from salcli.engine.training import BatchResult, Run, drops, lars, momentum_sgd, warm_up_then_cosine
from salcli.methods.base import (
    Count,
    IdTrained,
    Phase,
    Phases,
    Positive,
    SgdParams,
    Start,
    TrainParams,
    check_count,
    method,
)
from salcli.methods.features import Neighbours
from salcli.methods.logits import msp
from salcli.models.network import Classifier, NetworkSpec

SUPCON_TEMPERATURE = 0.07  # SupCon's authors scale the loss of all other temperatures to this one
N_ROTATIONS = 4


# -- the loss


def supervised_contrast(
    features: Float[Tensor, "n d"], labels: Int[Tensor, " n"], temperature: float
) -> Float[Tensor, ""]:
    """What views of one class share, against all other views of a batch (Khosla et al., 2020).

    Mean over all views of minus the mean log-probability of the others of their class among all others. Features have
    unit length. A view that is alone in its class has no pair, and adds nothing to the sum. CSI calls the same loss
    SupNT-Xent, with a class for every pair of class and rotation.
    """
    similarity = _products(features) / temperature
    is_itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
    others = similarity.masked_fill(is_itself, -torch.inf)
    log_probability = similarity - others.logsumexp(dim=1, keepdim=True)
    is_pair = (labels[:, None] == labels) & ~is_itself
    n_pairs = is_pair.sum(dim=1).clamp(min=1)
    return -(torch.where(is_pair, log_probability, 0.0).sum(dim=1) / n_pairs).mean()


def nearest_is_alike(features: Float[Tensor, "n d"], labels: Int[Tensor, " n"], n_images: int) -> Bool[Tensor, " n"]:
    """Whether the nearest view of another image is of the same class: how well the features tell classes apart.

    Views are stacked, so that row i is of image i mod `n_images`.
    """
    image = torch.arange(len(features), device=features.device) % n_images
    similarity = _products(features.detach())
    nearest = similarity.masked_fill(image[:, None] == image, -torch.inf).argmax(dim=1)
    return labels[nearest] == labels


def _products(features: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
    """Of all pairs, in float32 also under autocast: small temperatures magnify rounding errors."""
    with torch.autocast(features.device.type, enabled=False):
        return features.float() @ features.float().T


def contrast_objective(
    network: nn.Module, batch: Batch, *, n_views: int, temperature: float, among_own_views: bool = False
) -> BatchResult:
    """The loss, and for how many images the nearest view is alike: of another image, or also among its own views."""
    views, labels = batch
    features = network(views)
    is_alike = nearest_is_alike(features, labels, len(labels) // (1 if among_own_views else n_views))
    return BatchResult(supervised_contrast(features, labels, temperature), is_alike.sum() / n_views)


def two_views(distort: Distortions, images: Tensor, labels: Tensor) -> Batch:
    return distort(distort.mirrored(images.repeat(2, 1, 1, 1))), labels.repeat(2)


# -- CSI's rotations, stacked: all images at 0°, at 90°, …


def rotated(images: Shaped[Tensor, "n c s s"]) -> Shaped[Tensor, "m c s s"]:
    return torch.cat([torch.rot90(images, turns, (2, 3)) for turns in range(N_ROTATIONS)])


def rotation_labels(n_images: int, device: torch.device) -> Int[Tensor, " m"]:
    return torch.arange(N_ROTATIONS, device=device).repeat_interleave(n_images)


def joint_labels(labels: Int[Tensor, " n"], n_classes: int) -> Int[Tensor, " m"]:
    """One class for every pair of class and rotation: K · rotation + class."""
    return rotation_labels(len(labels), labels.device) * n_classes + labels.repeat(N_ROTATIONS)


def marginal_logits(joint: Float[Tensor, "m j"]) -> Float[Tensor, "n k"]:
    """Class logits of n images from joint logits (4n × 4K): the mean over rotations of the logits of the true rotation.

    Its largest softmax probability is CSI's score; its largest entry is the predicted class.
    """
    n, k = joint.shape[0] // N_ROTATIONS, joint.shape[1] // N_ROTATIONS
    blocks = joint.reshape(N_ROTATIONS, n, N_ROTATIONS, k)
    return torch.stack([blocks[turns, :, turns] for turns in range(N_ROTATIONS)]).mean(dim=0)


# -- networks


class ContrastiveClassifier(Classifier):
    """KNN+: a classifier on SupCon features."""

    kind: ClassVar[str] = "contrastive-classifier"


class RotationClassifier(Classifier):
    """CSI: two more heads tell which rotation an image has, and class and rotation together (4 · K)."""

    kind: ClassVar[str] = "rotation-classifier"

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.rotation_head = nn.Linear(self.n_features, N_ROTATIONS)
        self.joint_head = nn.Linear(self.n_features, N_ROTATIONS * spec.n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class logits (n × K), averaged over all rotations of the images."""
        return marginal_logits(self.joint_head(self.features(rotated(images))))


class Projection(nn.Module):
    """Backbone and, for training alone, two more layers: images to unit vectors that are compared."""

    def __init__(self, classifier: Classifier, width: int) -> None:
        super().__init__()
        self.classifier = classifier
        n = classifier.n_features
        self.layers = nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, width))

    def forward(self, images: Tensor) -> Tensor:
        return normalize(self.layers(self.classifier.features(images)).float(), dim=1)


class Heads(nn.Module):
    """Some linear heads of a network, trained while the rest of it stays as it is."""

    def __init__(self, *heads: nn.Linear) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        return tuple(head(features) for head in self.heads)


# -- the methods


class HeadParams(SgdParams):
    """Linear heads on frozen features; the learning rate is multiplied by lr_drop at 60, 75 and 90% of the epochs."""

    lr_drop: Annotated[float, Field(gt=0, le=1)]


class EncoderParams(SgdParams):
    """Training by contrast: the learning rate rises linearly, then falls with a cosine."""

    images: Literal["train", "all"]
    warmup_epochs: Annotated[int, Field(ge=0, strict=True)]
    warmup_lr: Positive
    temperature: Positive
    projection: Count
    smallest_crop: Annotated[float, Field(gt=0, le=1)]
    head: HeadParams

    @model_validator(mode="after")
    def _has_time_to_warm_up(self) -> EncoderParams:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs is {self.warmup_epochs}, but must be less than epochs, {self.epochs}")
        return self


class _Contrastive(IdTrained):
    """Trains the features by contrast, then the heads on the frozen features."""

    Params = EncoderParams
    needs_images = True
    in_one_process = True
    authors_epochs: ClassVar[tuple[int, int]]  # of the features, of the heads
    optimizer = staticmethod(momentum_sgd)  # of the features

    @abstractmethod
    def views(self, distort: Distortions, network: Any, images: Tensor, labels: Tensor) -> Batch:
        """What is compared, and labels of what should be alike."""

    @abstractmethod
    def contrast(self, network: nn.Module, batch: Batch) -> BatchResult: ...

    @abstractmethod
    def heads(self, network: Any) -> Heads: ...

    @abstractmethod
    def head_views(self, distort: Distortions, images: Tensor, labels: Tensor) -> Batch:
        """Images to fit the heads on."""

    @abstractmethod
    def classify(self, network: Any, heads: nn.Module, batch: Batch) -> BatchResult:
        """`batch`: features and labels."""

    def phases(self, start: Start) -> Phases:
        check_views_exist(self.name, "encoders", start.training)
        own: EncoderParams = self.params
        images = Batches(start.training, start.compute)
        with start.random(f"train-encoder/{self.name}") as generator:
            network = self.network(start.spec)
            draws = start.generator(f"{self.name}/views")
            views = partial(self.views, Distortions(own.smallest_crop, draws), network)
            run = Run(
                network=Projection(network, own.projection),
                objective=self.contrast,
                batches=viewed(images, views),
                n_samples=len(start.training),
                params=own,
                compute=start.compute,
                generator=generator,
                stateful={"views": draws},
                optimizer=self.optimizer,
                schedule=partial(
                    warm_up_then_cosine, warm_up_share=own.warmup_epochs / own.epochs, start=own.warmup_lr / own.lr
                ),
            )
            yield Phase("contrast", run, own.model_dump(exclude={"head"}))
        with start.random(f"train-encoder/{self.name}/heads") as generator:
            draws = start.generator(f"{self.name}/head views")
            distort = Distortions(own.smallest_crop, draws)
            network.eval()

            def frozen_features(images: Tensor, labels: Tensor) -> Batch:
                views, labels = self.head_views(distort, images, labels)
                with torch.no_grad(), start.compute.autocast():
                    return network.features(views).float(), labels

            run = Run(
                network=self.heads(network),
                objective=partial(self.classify, network),
                batches=viewed(images, frozen_features),
                n_samples=len(start.training),
                params=own.head,
                compute=start.compute,
                generator=generator,
                stateful={"views": draws},
                optimizer=momentum_sgd,
                schedule=partial(drops, factor=own.head.lr_drop),
            )
            yield Phase("heads", run, own.model_dump())
        return network

    def is_short(self) -> bool:
        of_features, of_heads = self.authors_epochs
        return bool(self.params.epochs < of_features or self.params.head.epochs < of_heads)


@method("knn-plus", label="KNN+", paper="Sun et al., 2022")
class KnnPlus(_Contrastive):
    """KNN on features of SupCon (Khosla et al., 2020): two views of each image; then a linear head for the classes."""

    network = ContrastiveClassifier
    authors_epochs = (500, 100)
    k: int
    nearest: Neighbours

    def __init__(self, params: Any = None, k: int = 50) -> None:
        super().__init__(params)
        self.k = k

    @classmethod
    def from_params(cls, params: Any) -> KnnPlus:
        return cls(params.methods.of(cls.name), k=params.methods.of("knn").k)

    def views(self, distort: Distortions, network: Any, images: Tensor, labels: Tensor) -> Batch:
        return two_views(distort, images, labels)

    def contrast(self, network: nn.Module, batch: Batch) -> BatchResult:
        result = contrast_objective(network, batch, n_views=2, temperature=self.params.temperature)
        return BatchResult(result.loss * self.params.temperature / SUPCON_TEMPERATURE, result.n_correct)

    def heads(self, network: Any) -> Heads:
        return Heads(network.head)

    def head_views(self, distort: Distortions, images: Tensor, labels: Tensor) -> Batch:
        """No change of colours."""
        return distort.cropped(distort.mirrored(images)), labels

    def classify(self, network: Any, heads: nn.Module, batch: Batch) -> BatchResult:
        features, labels = batch
        (logits,) = heads(features)
        return BatchResult(cross_entropy(logits, labels), (logits.argmax(1) == labels).sum())

    def outputs(self, network: Classifier) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return network.features_and_logits

    def fit(self, network: Classifier, over_training_data: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> None:
        features = over_training_data(network.features)
        check_count("methods.knn.k", self.k, len(features), "ID training samples")
        self.nearest = Neighbours.of(features, self.k)

    def score(self, network: Classifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return self.nearest.distance(outputs[0])

    def compact(self, seed: int) -> None:
        self.nearest = self.nearest.thinned(seed)

    def class_logits(self, outputs: list[Tensor]) -> Float[Tensor, "n k"]:
        return outputs[1]


@method("csi", label="CSI", paper="Tack et al., 2020")
class Csi(_Contrastive):
    """With labels: two views of each image in all four rotations, as if those were classes."""

    network = RotationClassifier
    authors_epochs = (700, 100)
    optimizer = staticmethod(lars)

    def views(self, distort: Distortions, network: Any, images: Tensor, labels: Tensor) -> Batch:
        one, other = distort.mirrored(images.repeat(2, 1, 1, 1)).chunk(2)
        label = joint_labels(labels, network.spec.n_classes)
        return distort(torch.cat([rotated(one), rotated(other)])), label.repeat(2)

    def contrast(self, network: nn.Module, batch: Batch) -> BatchResult:
        return contrast_objective(network, batch, n_views=8, temperature=self.params.temperature)

    def heads(self, network: Any) -> Heads:
        return Heads(network.head, network.rotation_head, network.joint_head)

    def head_views(self, distort: Distortions, images: Tensor, labels: Tensor) -> Batch:
        return distort(rotated(distort.mirrored(images))), labels

    def classify(self, network: Any, heads: nn.Module, batch: Batch) -> BatchResult:
        """`batch`: features of all rotations, and labels. The class head learns from images at 0° alone."""
        features, labels = batch
        n = len(labels)
        of_class, of_rotation, of_both = heads(features)
        loss = (
            cross_entropy(of_class[:n], labels)
            + cross_entropy(of_rotation, rotation_labels(n, labels.device))
            + cross_entropy(of_both, joint_labels(labels, network.spec.n_classes))
        )
        return BatchResult(loss, (of_class[:n].argmax(1) == labels).sum())

    def score(self, network: Classifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return msp(outputs[0])


# -- baselines


@method("all-id", label="MSP", paper="Du et al., 2024")
class OnAllId(IdTrained):
    """The ID classifier, trained on all ID data but the test's, as the paper's baselines without wild data are.

    Post-hoc scores of this network are rows such as knn@all-id.
    """

    Params = TrainParams
    images = "all"

    def phases(self, start: Start) -> Phases:
        with start.random("train-all-id") as generator:
            network = Classifier(start.spec)
            yield Phase("", start.run(network, self.params, generator), self.params.model_dump())
        return network

    def score(self, network: Classifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return msp(outputs[0])
