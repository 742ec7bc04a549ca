"""Energy after activations or weights were cut: ReAct, DICE, ASH. Higher = more ID-like."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from salcli.rivals.head import Head
from salcli.rivals.logit_scores import energy


def fitted_react(head: Head, id_features: Float[Tensor, "m d"], percentile: float) -> Callable[[Tensor], Tensor]:
    """Energy of features clipped at a percentile of all ID training activations (Sun et al., 2021)."""
    limit = float(np.percentile(id_features.numpy(), percentile))
    return lambda features: energy(head.logits(features.clamp(max=limit)))


def fitted_dice(head: Head, id_features: Float[Tensor, "m d"], percentile: float) -> Callable[[Tensor], Tensor]:
    """Energy with the weights alone whose mean contribution on ID data is above a percentile (Sun and Li, 2022)."""
    contribution = head.weight * id_features.mean(dim=0, dtype=torch.float64)
    is_kept = contribution > float(np.percentile(contribution.numpy(), percentile))
    sparse = Head(head.weight * is_kept, head.bias)
    return lambda features: energy(sparse.logits(features))


def ash(features: Float[Tensor, "n d"], head: Head, percentile: float) -> Float[Tensor, " n"]:
    """ASH-S (Djurisic et al., 2023): energy of a sample's largest activations, times exp(sum before / sum after).

    At least one is kept, and a sample without activations stays as it is.
    """
    features = features.double()
    n_kept = max(1, features.shape[1] - round(features.shape[1] * percentile / 100))
    values, places = features.topk(n_kept, dim=1)
    after = values.sum(dim=1)
    ratio = torch.where(after > 0, features.sum(dim=1) / after, 1.0)
    pruned = torch.zeros_like(features).scatter(1, places, values * ratio.exp()[:, None])
    return energy(head.logits(pruned))
