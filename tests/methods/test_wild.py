"""OE, Energy-OE, WOODS and SCONE: losses, gradients and updates are those of pytorch-ood. Energy-VOS: as in WOODS."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_ood.loss import EnergyMarginLoss, EnergyRegularizedLoss, OutlierExposureLoss
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from salcli.methods.wild import ConstrainedEnergyLoss, EnergyOe, EnergyVos, OutlierExposure, Scone

# The numbers of WOODS: ours, and what the library calls them.
CONSTRAINTS = {"false_alarms": 0.05, "loss_factor": 2.0, "multiplier_lr": 0.7, "penalty_growth": 1.5, "tolerance": 0.05}
THEIR_NAMES = ("false_alarm_cutoff", "ce_tol", "lr_lam", "penalty_mult", "constraint_tol")


def batch(seed: int, n: int, m: int = 3, k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """ID logits, labels, wild logits."""
    generator = torch.Generator().manual_seed(seed)
    id_logits, wild_logits = (3 * torch.randn(size, k, generator=generator) for size in (n, m))
    return id_logits, torch.randint(0, k, (n,), generator=generator), wild_logits


def as_the_library_takes_them(id_logits: Tensor, labels: Tensor, wild_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of all samples, and labels that are negative for OOD."""
    return torch.cat([id_logits, wild_logits]), torch.cat([labels, labels.new_full((len(wild_logits),), -1)])


def assert_same_loss_and_gradients(ours: Tensor, theirs: Tensor, of: list[Tensor], atol: float = 1e-8) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    pairs = zip(torch.autograd.grad(ours, of), torch.autograd.grad(theirs, of), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=atol)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 50),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    weight=st.floats(0.01, 2),
    margins=st.tuples(st.floats(-9, 1), st.floats(-9, 1)),
)
def test_oe_and_energy_oe(seed: int, sizes: tuple[int, int], weight: float, margins: tuple[float, float]) -> None:
    id_logits, labels, wild_logits = batch(seed, *sizes)
    of = [id_logits.requires_grad_(), wild_logits.requires_grad_()]
    together = as_the_library_takes_them(id_logits, labels, wild_logits)
    # a mean over each side's own samples; the library's mean over all would weight them by their number
    of_id, of_wild = OutlierExposureLoss(weight, reduction=None)(*together).split(sizes)
    oe = OutlierExposure(OutlierExposure.Params(schedule=None, loss_weight=weight))
    assert_same_loss_and_gradients(oe.loss(id_logits, labels, wild_logits), of_id.mean() + of_wild.mean(), of)
    energy_oe = EnergyOe(EnergyOe.Params(schedule=None, loss_weight=weight, m_in="auto", m_out="auto"))
    energy_oe.m_in, energy_oe.m_out = margins
    theirs = EnergyRegularizedLoss(weight, *margins)(*together)
    assert_same_loss_and_gradients(energy_oe.loss(id_logits, labels, wild_logits), theirs, of)


@given(seed=st.integers(0, 50), n=st.integers(1, 9), weight=st.floats(0.01, 9))
def test_energy_vos_is_a_logistic_regression_of_id_against_wild_on_the_energy(seed: int, n: int, weight: float) -> None:
    id_logits, labels, wild_logits = batch(seed, n, n)
    energy_vos = EnergyVos(EnergyVos.Params(schedule=None, loss_weight=weight))
    line = energy_vos.line = nn.Linear(1, 1)
    of = [id_logits.requires_grad_(), wild_logits.requires_grad_(), *line.parameters()]
    energies = torch.cat([id_logits, wild_logits]).logsumexp(1)
    is_ood = torch.arange(2 * n) >= n
    binary = binary_cross_entropy_with_logits(line(energies[:, None]).squeeze(1), is_ood.float())
    theirs = cross_entropy(id_logits, labels) + weight * binary
    assert_same_loss_and_gradients(energy_vos.loss(id_logits, labels, wild_logits), theirs, of, 1e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 50), margin=st.floats(-3, 1), bias=st.floats(-1, 4), loss_before=st.floats(0.01, 3))
def test_woods_and_scone_over_epochs(seed: int, margin: float, bias: float, loss_before: float) -> None:
    id_logits, labels, wild_logits = batch(seed, 9, 7)
    line = nn.Linear(1, 1)
    nn.init.constant_(line.weight, -0.8)
    nn.init.constant_(line.bias, bias)
    of = [id_logits.requires_grad_(), wild_logits.requires_grad_(), *line.parameters()]
    ours = ConstrainedEnergyLoss(line, loss_before, Scone.Params(schedule=None, margin=margin, **CONSTRAINTS))
    renamed = dict(zip(THEIR_NAMES, CONSTRAINTS.values(), strict=True))
    theirs = EnergyMarginLoss(full_train_loss=loss_before, eta=margin, **renamed)
    for epoch in range(4):
        together = as_the_library_takes_them(id_logits, labels, wild_logits)
        assert_same_loss_and_gradients(ours(id_logits, labels, wild_logits), theirs(*together, line), of)
        all_id, all_labels, _ = batch(seed + 100 + epoch, 40)
        reached = ours.update(all_id, all_labels)
        theirs.update_hyperparameters(nn.Identity(), [(all_id, all_labels)], line)
        state = ours.get_state()
        np.testing.assert_allclose(state["multipliers"], [theirs.lam, theirs.lam2], rtol=1e-6)
        expected = [theirs.in_constraint_weight, theirs.ce_constraint_weight]
        np.testing.assert_allclose(state["penalty_weights"], expected, rtol=1e-6)
        alarms = float(torch.sigmoid(-0.8 * all_id.logsumexp(1) + bias).mean())
        excess = max(alarms - 0.05, float(cross_entropy(all_id, all_labels)) - 2 * loss_before)
        assert (reached.false_alarms, reached.excess) == pytest.approx((alarms, excess), rel=1e-4, abs=1e-6)
