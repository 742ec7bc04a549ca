"""What the OOD classifier minimises, against sums over samples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from salcli.sal.gradients import last_layer_residual
from salcli.sal.objective import BinaryLoss, binary_risk, sal_objective

LOGITS = st.lists(st.floats(-20, 20), min_size=1, max_size=8)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(id_logits=LOGITS, outlier_logits=LOGITS, loss=st.sampled_from(["logistic", "sigmoid"]))
def test_the_binary_risk_is_the_mean_of_two_mean_losses(
    id_logits: list[float], outlier_logits: list[float], loss: BinaryLoss
) -> None:
    """Slow reference, sample by sample, with p = σ(x): −log p or 1 − p for ID, −log(1 − p) or p for outliers."""

    def of(x: float) -> float:
        return math.log(1 + math.exp(-x)) if loss == "logistic" else 1 / (1 + math.exp(x))

    positive, negative = [of(x) for x in id_logits], [of(-x) for x in outlier_logits]
    expected = (sum(positive) / len(positive) + sum(negative) / len(negative)) / 2
    found = binary_risk(double(id_logits), double(outlier_logits), loss)
    assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_extreme_logits_stay_finite_and_are_worth_their_size() -> None:
    wrong = binary_risk(torch.tensor([-1e4]), torch.tensor([1e4]))
    right = binary_risk(torch.tensor([1e4]), torch.tensor([-1e4]))
    assert float(wrong) == 1e4
    assert float(right) == 0


@given(seed=st.integers(0, 1000), n=st.integers(1, 6), n_classes=st.integers(2, 5), weight=st.floats(0.1, 20))
def test_the_objective_is_the_log_loss_of_the_classes_plus_the_weighted_binary_risk(
    seed: int, n: int, n_classes: int, weight: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    class_logits = torch.randn(n, n_classes, generator=rng, dtype=torch.float64).requires_grad_()
    labels = torch.randint(n_classes, (n,), generator=rng)
    # the ID side may be larger than the labeled batch: candidate ID data can join it
    id_logit, outlier_logit = (torch.randn(size, generator=rng, dtype=torch.float64) for size in (2 * n, n + 1))
    found = sal_objective(class_logits, labels, id_logit, outlier_logit, weight)
    probabilities = class_logits.detach().softmax(1).tolist()
    risks = [-math.log(row[label]) for row, label in zip(probabilities, labels.tolist(), strict=True)]
    expected = sum(risks) / n + weight * float(binary_risk(id_logit, outlier_logit))
    assert float(found.detach()) == pytest.approx(expected, rel=1e-9)
    found.backward()  # type: ignore[no-untyped-call]
    assert class_logits.grad is not None
    torch.testing.assert_close(class_logits.grad, last_layer_residual(class_logits.detach(), labels) / n)
