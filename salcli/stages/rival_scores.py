"""The rivals that need no more than one pass of the ID classifier and the stored training features.

Each is fitted once and then asked as often as one likes: `evaluate` asks for all test samples at once, `filter` for one
chunk of the wild samples after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from salcli.errors import ParamsError
from salcli.rivals.activation_scores import ash, fitted_dice, fitted_react
from salcli.rivals.feature_scores import TiedGaussians, VirtualLogits, fitted_knn, knn, vim_rule
from salcli.rivals.head import Head
from salcli.rivals.logit_scores import energy, gradnorm, msp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from salcli.artifacts.gradients import GradientFile
    from salcli.params import EvaluateParams
    from salcli.progress import Task

    Score = Callable[[Tensor, Tensor], Tensor]  # of features (n × D) and logits (n × K); higher = more ID-like


@dataclass(frozen=True)
class IdKnowledge:
    """What a rival may know of the ID data before it scores a sample."""

    last_layer: nn.Linear
    open_id_train: Callable[[], GradientFile]
    params: EvaluateParams
    task: Task
    of_known_samples: bool = False  # the training samples themselves are scored: no one is its own neighbour

    @cached_property
    def head(self) -> Head:
        """The last layer."""
        return Head.of(self.last_layer)

    @cached_property
    def known(self) -> tuple[Tensor, Tensor]:
        """Features (m × D) and labels (m) of the ID training data, read once and only if a rival asks for them."""
        file = self.open_id_train()
        return torch.cat([chunk.feature for chunk in file.chunks()]), file.label

    @property
    def width(self) -> int:
        """How many features the network has."""
        return self.last_layer.in_features


def _knn(of: IdKnowledge) -> Score:
    k, n = of.params.knn_k, len(of.known[1]) - of.of_known_samples
    _check_neighbours(k, n, "other " if of.of_known_samples else "")
    # a known sample's nearest neighbour is itself, so the k-th other one comes one place later
    score = fitted_knn(of.known[0], k + of.of_known_samples)
    return lambda features, _: score(features)


def knn_score(features: Tensor, id_features: Tensor, k: int) -> Tensor:
    """KNN among the features of another network than the ID classifier."""
    _check_neighbours(k, len(id_features))
    return knn(features, id_features, k)


def _check_neighbours(k: int, n: int, other: str = "") -> None:
    if k > n:
        raise ParamsError(f"evaluate.knn_k is {k}, but there are only {n} {other}ID training samples")


def _mahalanobis(of: IdKnowledge) -> Score:
    fitted = TiedGaussians.fit(*of.known)
    if fitted.rank < of.width:
        of.task.note(
            f"mahalanobis: within classes the ID training features spread in {fitted.rank} of {of.width} directions; "
            "the others do not count (pseudo-inverse)"
        )
    return lambda features, _: fitted.score(features)


def _vim(of: IdKnowledge) -> Score:
    asked = vim_rule(of.width) if of.params.vim_dim == "auto" else of.params.vim_dim
    if asked >= of.width:
        raise ParamsError(
            f"evaluate.vim_dim is {asked}, but must be less than the {of.width} features of the network; "
            f"auto would be {vim_rule(of.width)}"
        )
    fitted = VirtualLogits.fit(of.head, of.known[0], asked)
    if fitted.dim < asked:
        of.task.note(
            f"vim: the ID training features span {fitted.rank} dimensions, so its principal space has {fitted.dim} "
            f"instead of {asked}"
        )
    return lambda features, _: fitted.score(features)


def _react(of: IdKnowledge) -> Score:
    score = fitted_react(of.head, of.known[0], of.params.react_percentile)
    return lambda features, _: score(features)


def _dice(of: IdKnowledge) -> Score:
    score = fitted_dice(of.head, of.known[0], of.params.dice_percentile)
    return lambda features, _: score(features)


RIVALS: dict[str, Callable[[IdKnowledge], Score]] = {
    "msp": lambda _: lambda _, logits: msp(logits),
    "mahalanobis": _mahalanobis,
    "energy": lambda _: lambda _, logits: energy(logits),
    "knn": _knn,
    "react": _react,
    "dice": _dice,
    "ash": lambda of: lambda features, _: ash(features, of.head, of.params.ash_percentile),
    "gradnorm": lambda _: gradnorm,
    "vim": _vim,
}
# What each reads of the evaluate section, beside ODIN's.
HYPERPARAMETERS = {
    "knn": ("knn_k",),
    "react": ("react_percentile",),
    "dice": ("dice_percentile",),
    "ash": ("ash_percentile",),
    "vim": ("vim_dim",),
    "odin": ("odin_temperature", "odin_epsilon"),
}
