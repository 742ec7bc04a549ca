"""Energy after activations or weights were cut: ReAct, DICE, ASH. Higher = more ID-like."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from pytorch_ood.detector import DICE, ReAct
from torch import Tensor

from salcli.rivals.head import Head
from salcli.rivals.logit_scores import energy


def react(
    features: Float[Tensor, "n d"],
    head: Head,
    id_features: Float[Tensor, "m d"],
    id_labels: Int[Tensor, " m"],
    percentile: float,
) -> Float[Tensor, " n"]:
    """Energy of features clipped at a percentile of all ID training activations (Sun et al., 2021)."""
    detector = ReAct(None, head.logits, percentile=percentile / 100).fit_feature_maps(id_features, id_labels)
    score: Tensor = -detector.predict_feature_maps(features)
    return score


def dice(
    features: Float[Tensor, "n d"],
    head: Head,
    id_features: Float[Tensor, "m d"],
    id_labels: Int[Tensor, " m"],
    percentile: float,
) -> Float[Tensor, " n"]:
    """Energy with the weights alone whose mean contribution on ID data is above a percentile (Sun and Li, 2022)."""
    detector = DICE(None, head.weight, head.bias, percentile / 100).fit_features(id_features, id_labels)
    # its own prediction multiplies every feature with every class: n·K·D numbers
    return energy(Head(detector.masked_w.double(), head.bias).logits(features))


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
