"""What the OOD classifier g_θ minimises (Eq. 8), with the sigmoid loss in place of the 0/1 loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus


def binary_sigmoid_risk(id_logit: Float[Tensor, " n"], outlier_logit: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    """Eq. 8: R⁺ on ID data plus R⁻ on candidate outliers, each an expectation over its own set.

    Halved, so that with batches of one size it is the mean over both, which loss weights refer to.
    """
    return (softplus(-id_logit).mean() + softplus(outlier_logit).mean()) / 2


def sal_objective(
    class_logits: Float[Tensor, "n k"],
    labels: Int[Tensor, " n"],
    id_logit: Float[Tensor, " i"],
    outlier_logit: Float[Tensor, " m"],
    loss_weight: float,
) -> Float[Tensor, ""]:
    """The ID risk of Eq. 3 plus the weighted binary risk of Eq. 8."""
    return cross_entropy(class_logits, labels) + loss_weight * binary_sigmoid_risk(id_logit, outlier_logit)
