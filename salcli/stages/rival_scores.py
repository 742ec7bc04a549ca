"""The rivals that need no more than one pass of the ID classifier and the stored training features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from salcli.errors import ParamsError
from salcli.rivals.activation_scores import ash, dice, react
from salcli.rivals.feature_scores import TiedGaussians, VirtualLogits, knn, vim_rule
from salcli.rivals.head import Head
from salcli.rivals.logit_scores import energy, gradnorm, msp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from salcli.artifacts.gradients import GradientFile
    from salcli.params import EvaluateParams
    from salcli.progress import Task


@dataclass(frozen=True)
class ClassifierOutputs:
    """What the ID classifier says about the test data, and what else a rival may look at."""

    features: Tensor  # n, D
    logits: Tensor  # n, K
    last_layer: nn.Linear
    open_id_train: Callable[[], GradientFile]
    params: EvaluateParams
    task: Task

    @cached_property
    def head(self) -> Head:
        """The last layer."""
        return Head.of(self.last_layer)

    @cached_property
    def known(self) -> tuple[Tensor, Tensor]:
        """Features (m × D) and labels (m) of the ID training data, read once and only if a rival asks for them."""
        file = self.open_id_train()
        return torch.cat([chunk.feature for chunk in file.chunks()]), file.label


def knn_score(features: Tensor, id_features: Tensor, id_labels: Tensor, k: int) -> Tensor:
    """KNN, where there are so many neighbours."""
    if k > len(id_labels):
        raise ParamsError(f"evaluate.knn_k is {k}, but there are only {len(id_labels)} ID training samples")
    return knn(features, id_features, id_labels, k)


def _mahalanobis(of: ClassifierOutputs) -> Tensor:
    fitted, width = TiedGaussians.fit(*of.known), of.features.shape[1]
    if fitted.rank < width:
        of.task.note(
            f"mahalanobis: within classes the ID training features spread in {fitted.rank} of {width} directions; "
            "the others do not count (pseudo-inverse)"
        )
    return fitted.score(of.features)


def _vim(of: ClassifierOutputs) -> Tensor:
    width = of.features.shape[1]
    asked = vim_rule(width) if of.params.vim_dim == "auto" else of.params.vim_dim
    if asked >= width:
        raise ParamsError(
            f"evaluate.vim_dim is {asked}, but must be less than the {width} features of the network; "
            f"auto would be {vim_rule(width)}"
        )
    fitted = VirtualLogits.fit(of.head, *of.known, asked)
    if fitted.dim < asked:
        of.task.note(
            f"vim: the ID training features span {fitted.rank} dimensions, so its principal space has {fitted.dim} "
            f"instead of {asked}"
        )
    return fitted.score(of.features)


RIVALS: dict[str, Callable[[ClassifierOutputs], Tensor]] = {
    "msp": lambda of: msp(of.logits),
    "mahalanobis": _mahalanobis,
    "energy": lambda of: energy(of.logits),
    "knn": lambda of: knn_score(of.features, *of.known, of.params.knn_k),
    "react": lambda of: react(of.features, of.head, *of.known, of.params.react_percentile),
    "dice": lambda of: dice(of.features, of.head, *of.known, of.params.dice_percentile),
    "ash": lambda of: ash(of.features, of.head, of.params.ash_percentile),
    "gradnorm": lambda of: gradnorm(of.features, of.logits),
    "vim": _vim,
}
