"""What the OOD classifier g_θ minimises: Eq. 8 with a smooth loss in place of the 0/1 loss.

The paper's text says sigmoid loss, σ(−z), a smooth step; its authors' code takes the logistic loss, −log σ(z).
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

BinaryLoss = Literal["logistic", "sigmoid"]


def binary_risk(
    id_logit: Float[Tensor, " n"], outlier_logit: Float[Tensor, " m"], loss: BinaryLoss = "logistic"
) -> Float[Tensor, ""]:
    """Eq. 8: R⁺ on ID data plus R⁻ on candidate outliers, each an expectation over its own set.

    Halved, which Eq. 8 is not: with batches of one size it is then the mean over both, as in the authors' code, whose
    loss weight of 10 refers to that.
    """
    wrong = softplus if loss == "logistic" else Tensor.sigmoid
    return (wrong(-id_logit).mean() + wrong(outlier_logit).mean()) / 2


def sal_objective(
    class_logits: Float[Tensor, "n k"],
    labels: Int[Tensor, " n"],
    id_logit: Float[Tensor, " i"],
    outlier_logit: Float[Tensor, " m"],
    loss_weight: float,
    loss: BinaryLoss = "logistic",
) -> Float[Tensor, ""]:
    """The ID risk of Eq. 3 plus the weighted binary risk of Eq. 8."""
    return cross_entropy(class_logits, labels) + loss_weight * binary_risk(id_logit, outlier_logit, loss)
