"""Energy after activations or weights were cut: ReAct, DICE, ASH. Higher = more ID-like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from salcli.rivals.head import Head
from salcli.rivals.logit_scores import energy


def fitted_react(
    head: Head, id_features: Float[Tensor, "m d"], id_labels: Int[Tensor, " m"], percentile: float
) -> Callable[[Tensor], Tensor]:
    """Energy of features clipped at a percentile of all ID training activations (Sun et al., 2021)."""
    from pytorch_ood.detector import ReAct

    detector = ReAct(None, head.logits, percentile=percentile / 100).fit_feature_maps(id_features, id_labels)
    return lambda features: -detector.predict_feature_maps(features)


def fitted_dice(
    head: Head, id_features: Float[Tensor, "m d"], id_labels: Int[Tensor, " m"], percentile: float
) -> Callable[[Tensor], Tensor]:
    """Energy with the weights alone whose mean contribution on ID data is above a percentile (Sun and Li, 2022)."""
    from pytorch_ood.detector import DICE

    detector = DICE(None, head.weight, head.bias, percentile / 100).fit_features(id_features, id_labels)
    # its own prediction multiplies every feature with every class: n·K·D numbers
    sparse = Head(detector.masked_w.double(), head.bias)
    return lambda features: energy(sparse.logits(features))


def ash(features: Float[Tensor, "n d"], head: Head, percentile: float) -> Float[Tensor, " n"]:
    """ASH-S (Djurisic et al., 2023): energy of a sample's largest activations, times exp(sum before / sum after).

    Ours: pytorch-ood's gives NaN for a sample without activations, and keeps none of only a few features.
    """
    features = features.double()
    n_kept = max(1, features.shape[1] - round(features.shape[1] * percentile / 100))
    values, places = features.topk(n_kept, dim=1)
    after = values.sum(dim=1)
    ratio = torch.where(after > 0, features.sum(dim=1) / after, 1.0)
    pruned = torch.zeros_like(features).scatter(1, places, values * ratio.exp()[:, None])
    return energy(head.logits(pruned))
