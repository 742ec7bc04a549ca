"""train-encoder: rivals that learn their features by contrast, from labeled ID data alone (KNN+, CSI)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import fingerprint
from salcli.artifacts.resume import ResumePoint
from salcli.compute.augmentation import Augmentation
from salcli.compute.distortions import Distortions
from salcli.compute.numerics import computing
from salcli.compute.schedules import drops, warm_up_then_cosine
from salcli.inference import accuracy
from salcli.models.contrastive import ENCODERS, Projection
from salcli.progress import Silent
from salcli.seeding import derived_seed
from salcli.stages.batches import Batches
from salcli.stages.encoder_methods import method_for, momentum_sgd
from salcli.stages.inputs import id_images
from salcli.stages.network_spec import code_of_network, network_spec
from salcli.stages.views import check_views_exist, viewed
from salcli.training import Epoch, Run, reproducible, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from salcli.artifacts.layout import Workspace
    from salcli.compute.numerics import Compute
    from salcli.models.network import Classifier
    from salcli.params import Params
    from salcli.params_rivals import EncoderParams
    from salcli.progress import Progress
    from salcli.stages.encoder_methods import EncoderMethod
    from salcli.stages.inputs import LabeledImages
    from salcli.training import Batch

EVALUATION_BATCH = 512


@dataclass(frozen=True)
class TrainedEncoder:
    """The figures of both runs and what was written."""

    encoder: str
    seed: int
    last_epoch: Epoch
    last_head_epoch: Epoch
    test_accuracy: float
    written: list[Path]


def run(
    workspace: Workspace, params: Params, encoder: str, seed: int, progress: Progress | None = None
) -> TrainedEncoder:
    """Train one encoder by contrast, then its heads on the frozen features."""
    training = id_images(workspace, params.data.id, "train", seed)
    test = id_images(workspace, params.data.id, "test", seed)
    check_views_exist(encoder, "encoders", training)
    with computing(params) as compute:
        stage = _Stage(workspace, params, encoder, seed, training, compute, progress or Silent())
        with reproducible(seed, f"train-encoder/{encoder}") as generator:
            network = ENCODERS[encoder](network_spec(params.model, training))
            curve = stage.contrast(network, generator)
        with reproducible(seed, f"train-encoder/{encoder}/heads") as generator:
            head_curve = stage.fit_heads(network, generator)
        with stage.progress.task("accuracy", len(test), "images") as task:
            test_accuracy = accuracy(network, test.images, test.labels, EVALUATION_BATCH, compute, task)
    places = layout.encoder(encoder, seed), layout.encoder_curve(encoder, seed)
    written = [workspace.target(place) for place in places]
    write_network(written[0], network, stage.made_with)
    afterwards = [replace(epoch, epoch=len(curve) + epoch.epoch) for epoch in head_curve]  # one axis for a plot
    phases = {"contrast": curve, "heads": afterwards}
    write_curve(written[1], [{"phase": phase, **asdict(epoch)} for phase, epochs in phases.items() for epoch in epochs])
    stage.clear()
    return TrainedEncoder(encoder, seed, curve[-1], head_curve[-1], test_accuracy, written)


@dataclass(frozen=True)
class _Stage:
    """What both runs have in common."""

    workspace: Workspace
    params: Params
    encoder: str
    seed: int
    training: LabeledImages
    compute: Compute
    progress: Progress

    @property
    def own(self) -> EncoderParams:
        return self.params.train_encoder.of(self.encoder)

    @property
    def made_with(self) -> dict[str, Any]:
        """All that the network depends on."""
        return {
            "encoder": self.encoder,
            "data": self.params.data.id,
            "seed": self.seed,
            "split": fingerprint(self.workspace.find(layout.id_split(self.seed))),
            "train_encoder": self.own.model_dump(),
            "model": self.params.model.model_dump(),
            **code_of_network(self.workspace, self.params.model),
            "numerics": self.params.numerics.model_dump(),
        }

    def contrast(self, network: Classifier, generator: torch.Generator) -> list[Epoch]:
        """Train the features."""
        method, distort_generator = self._method(network, "views")
        own = self.own
        run = Run(
            network=Projection(network, own.projection),
            objective=method.contrast,
            batches=viewed(self._images(), method.views),
            n_samples=len(self.training),
            params=own,
            compute=self.compute,
            generator=generator,
            stateful={"views": distort_generator},
            optimiser=method.optimiser,
            schedule=partial(
                warm_up_then_cosine, warm_up_share=own.warmup_epochs / own.epochs, start=own.warmup_lr / own.lr
            ),
        )
        # other heads need no other features
        made_with = self.made_with | {"train_encoder": own.model_dump(exclude={"head"})}
        return self._train(run, f"train-{self.encoder}", made_with)

    def fit_heads(self, network: Classifier, generator: torch.Generator) -> list[Epoch]:
        """Fit the heads on features that stay as they are."""
        method, distort_generator = self._method(network, "head views")
        features = partial(_frozen_features, network.eval(), self.compute)
        run = Run(
            network=method.heads(),
            objective=method.classify,
            batches=viewed(self._images(), lambda *batch: features(*method.head_views(*batch))),
            n_samples=len(self.training),
            params=self.own.head,
            compute=self.compute,
            generator=generator,
            stateful={"views": distort_generator},
            optimiser=momentum_sgd,
            schedule=partial(drops, factor=self.own.head.lr_drop),
        )
        return self._train(run, f"train-{self.encoder}-heads", self.made_with)

    def clear(self) -> None:
        """Both runs are over."""
        for what in (f"train-{self.encoder}", f"train-{self.encoder}-heads"):
            self.workspace.target(layout.resume_state(what, self.seed)).unlink(missing_ok=True)

    def _method(self, network: Classifier, purpose: str) -> tuple[EncoderMethod, torch.Generator]:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, f"{self.encoder}/{purpose}"))
        return method_for(network, self.own, Distortions(self.own.smallest_crop, generator)), generator

    def _images(self) -> Batches:
        return Batches(self.training, self.compute, Augmentation("none", torch.Generator()))

    def _train(self, run: Run, what: str, made_with: dict[str, Any]) -> list[Epoch]:
        with self.progress.task(f"{what}, seed {self.seed}", run.n_images, "images") as task:
            keeper = ResumePoint(self.workspace.target(layout.resume_state(what, self.seed)), made_with, task)
            return train(run, task, keeper)


def _frozen_features(network: Classifier, compute: Compute, images: Tensor, labels: Tensor) -> Batch:
    with torch.no_grad(), compute.autocast():
        return network.features(images).float(), labels
