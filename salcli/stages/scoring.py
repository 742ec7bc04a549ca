"""What every method of `evaluate` says about the test data: one pass of each network, and one more for ODIN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from salcli.artifacts import layout
from salcli.artifacts.candidates import read_filter_params
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.fingerprint import check_made_with
from salcli.artifacts.gradients import GradientFile
from salcli.inference import in_batches
from salcli.models.contrastive import ENCODERS, RotationClassifier
from salcli.models.network import Classifier, EnergyClassifier, OodClassifier
from salcli.models.step import StepNetwork
from salcli.params import FilterParams
from salcli.progress import Silent
from salcli.rivals.logit_scores import energy, msp
from salcli.sal.gradients import Factors, last_layer_residual
from salcli.stages.encoder_schedules import is_short, is_short_step
from salcli.stages.inputs import LabeledImages, classifier_of, id_images, mixture_of, whole_split
from salcli.stages.odin_pass import odin_scores
from salcli.stages.rival_scores import RIVALS, IdKnowledge, knn_score
from salcli.stages.tau import tau, unknown_labels, unlabeled

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from salcli.artifacts.layout import Workspace
    from salcli.compute.image_rows import ImageRows
    from salcli.compute.numerics import Compute
    from salcli.inference import Outputs
    from salcli.params import Params
    from salcli.progress import Task


def _ood_logit(network: Classifier, outputs: list[Tensor]) -> Tensor:
    return outputs[1].double()


def _line_in_energy(network: Classifier, outputs: list[Tensor]) -> Tensor:
    assert isinstance(network, EnergyClassifier)
    with torch.inference_mode():
        return network.double().ood_logit(outputs[0].double())


# Networks that were trained with the wild data: their kind, and how what they say of images becomes a score.
TRAINED: dict[str, tuple[type[Classifier], Callable[[Classifier, list[Tensor]], Tensor]]] = {
    "sal": (OodClassifier, _ood_logit),
    "oe": (Classifier, lambda _, outputs: msp(outputs[0])),
    "energy-oe": (Classifier, lambda _, outputs: energy(outputs[0])),
    "woods": (EnergyClassifier, _line_in_energy),
    "scone": (EnergyClassifier, _line_in_energy),
    "step": (StepNetwork, lambda _, outputs: outputs[0].double().amax(1)),
}


@dataclass(frozen=True)
class TestScores:
    """One method's scores (higher = more ID-like) and the accuracy of the network they come from."""

    id: np.ndarray
    ood: np.ndarray
    id_accuracy: float
    has_short_schedule: bool = False  # trained for fewer epochs than its authors train


def n_passes(methods: tuple[str, ...]) -> int:
    """How often all test images go through a network."""
    of_their_own = {*TRAINED, *ENCODERS} & set(methods)
    return len(of_their_own) + ("odin" in methods) + bool(set(methods) - of_their_own)


@dataclass(frozen=True)
class Scoring:
    """The test data, and everything that methods score them with."""

    workspace: Workspace
    params: Params
    ood: str
    seed: int
    id_test: LabeledImages
    ood_test: ImageRows
    compute: Compute
    task: Task

    def scores(self) -> dict[str, TestScores]:
        """Of all methods of params.yaml, in its order."""
        methods = self.params.evaluate.methods
        # first the ID classifier: a damaged one would only look like another one to the OOD classifier's check
        found = self._of_the_id_classifier() if set(methods) - {*TRAINED, *ENCODERS} else {}
        found |= {method: self._of_an_encoder(method) for method in methods if method in ENCODERS}
        found |= {method: self._of_a_trained_network(method) for method in methods if method in TRAINED}
        return {method: found[method] for method in methods}

    def _of_a_trained_network(self, method: str) -> TestScores:
        """What a network says that was trained with the wild data."""
        found = self.workspace.find(layout.trained_network(method, self.ood, self.seed))
        kind, score_of = TRAINED[method]
        network = read_network(found, kind)
        made_with = read_header(found).about
        # of another mixture it may have seen what is in the OOD test set now
        for link, place in (
            ("network", layout.classifier(self.seed)),
            ("wild", layout.wild_mixture(self.ood, self.seed)),
        ):
            check_made_with(found, str(made_with.get(link)), self.workspace.find(place))
        outputs = self._outputs(network, network.forward)
        scores = self._split(score_of(network.cpu(), outputs), outputs[0])
        return replace(scores, has_short_schedule=method == "step" and is_short_step(made_with["train_rival"]))

    def _of_an_encoder(self, method: str) -> TestScores:
        """What a network says that was trained from scratch on the ID data, in another way."""
        found = self.workspace.find(layout.encoder(method, self.seed))
        network = read_network(found, ENCODERS[method])
        made_with = read_header(found).about
        # of another split it may have seen test samples
        check_made_with(found, str(made_with.get("split")), whole_split(self.workspace, self.seed))
        if isinstance(network, RotationClassifier):
            (logits,) = self._outputs(network, network.forward)
            score = msp(logits)
        else:
            features, logits = self._outputs(network, network.features_and_logits)
            score = self._knn(network, features)
        return replace(self._split(score, logits), has_short_schedule=is_short(method, made_with["train_encoder"]))

    def _knn(self, network: Classifier, features: Tensor) -> Tensor:
        """Among the training data as this network sees them."""
        training, chosen = id_images(self.workspace, self.params.data.id, "train", self.seed), self.params.evaluate
        batches = in_batches(network, network.features, training.images, chosen.batch_size, self.compute, self.task)
        return knn_score(features, torch.cat([batch for (batch,) in batches]), chosen.knn_k)

    def _of_the_id_classifier(self) -> dict[str, TestScores]:
        """All others. ID and OOD test data are scored together, so that every method is fitted once."""
        network, _ = classifier_of(self.workspace, self.seed)
        features, logits = self._outputs(network, network.features_and_logits)
        known = IdKnowledge(network.head, lambda: self._id_train, self.params.evaluate, self.task)
        scores: dict[str, Tensor] = {}
        for method in self.params.evaluate.methods:
            if method in RIVALS:
                scores[method] = RIVALS[method](known)(features, logits)
            elif method == "odin":
                chosen = self.params.evaluate
                scores[method] = odin_scores(
                    network, self._image_sets, chosen, chosen.batch_size, self.compute, self.task
                )
            elif method == "sal-posthoc":
                scores[method] = self._sal_posthoc(features, logits)
        return {method: self._split(score, logits) for method, score in scores.items()}

    def _sal_posthoc(self, features: Tensor, logits: Tensor) -> Tensor:
        """−τ with the filter's ∇̄ and v, which are made again from the stored gradients.

        Where no wild sample is predicted as a class, there is no outlier of that class to look like: τ is 0, as it is
        along every direction in which the wild gradients do not spread.
        """
        chosen, predicted = self.filter_params, logits.argmax(1)
        label = unknown_labels(predicted, logits.shape[1], chosen, self.seed, "test")
        test = Factors(last_layer_residual(logits, label), features, label)
        wild = unlabeled(self._wild, chosen, self.seed, "wild")
        (outlier_score,) = tau(wild, [test], self._id_train, chosen, self.compute.device, Silent())
        undefined = outlier_score.isnan() & features.isfinite().all(1)
        if n_undefined := int(undefined.sum()):
            self.task.note(
                f"sal-posthoc: {n_undefined} test samples are of classes that no wild sample is predicted as; "
                "nothing in the wild data speaks against them, so they count as ID"
            )
        return -torch.where(undefined, 0.0, outlier_score)

    @cached_property
    def filter_params(self) -> FilterParams:
        """The filter section of params.yaml; where scratch/ has candidates of another filter, that of those."""
        place = layout.candidates(self.ood, self.seed)
        if not self.workspace.is_in_scratch(place):
            return self.params.filter
        chosen = FilterParams(**read_filter_params(self.workspace.find(place)))
        if chosen != self.params.filter:
            self.task.note("sal-posthoc: with the filter that made the candidates in scratch/")
        return chosen

    @cached_property
    def _id_train(self) -> GradientFile:
        """Features and gradients of the training data."""
        return self._gradients(layout.id_gradients("train", self.seed))

    @property
    def _wild(self) -> GradientFile:
        file = self._gradients(layout.wild_gradients(self.ood, self.seed))
        check_made_with(file.found, file.wild, mixture_of(self.workspace, self.ood, self.seed))
        return file

    def _gradients(self, place: layout.Artifact) -> GradientFile:
        file = GradientFile.open(self.workspace.find(place))
        check_made_with(file.found, file.network, self.workspace.find(layout.classifier(self.seed)))
        return file

    def _outputs(self, network: Classifier, of_batch: Callable[[Tensor], Outputs]) -> list[Tensor]:
        """Outputs of a network on the ID test set and, below, on the OOD test set."""
        batches = [
            batch
            for images in self._image_sets
            for batch in in_batches(network, of_batch, images, self.params.evaluate.batch_size, self.compute, self.task)
        ]
        return [torch.cat(parts) for parts in zip(*batches, strict=True)]

    @property
    def _image_sets(self) -> list[ImageRows]:
        """Those that have images: where nobody knows what is OOD, there is no OOD test set."""
        return [images for images in (self.id_test.images, self.ood_test) if len(images)]

    def _split(self, score: Tensor, logits: Tensor) -> TestScores:
        n_id = len(self.id_test)
        accuracy = (logits[:n_id].argmax(1) == self.id_test.labels).double().mean()
        return TestScores(score[:n_id].numpy(), score[n_id:].numpy(), float(accuracy))
