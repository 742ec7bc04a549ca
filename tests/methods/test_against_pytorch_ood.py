"""A second reference beside the definitions written out: pytorch-ood, where it has the same score or loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_ood.detector import DICE, KNN, ODIN, EnergyBased, MaxSoftmax, ReAct, ViM
from pytorch_ood.detector import Mahalanobis as TheirMahalanobis
from pytorch_ood.loss import EnergyMarginLoss, EnergyRegularizedLoss, OutlierExposureLoss
from torch import Tensor, nn

from salcli.methods.activations import Dice, React
from salcli.methods.base import Head
from salcli.methods.features import Knn, Mahalanobis, Vim
from salcli.methods.logits import energy, msp
from salcli.methods.odin import odin_logits
from salcli.methods.wild import ConstrainedEnergyLoss, energy_oe_loss, oe_loss

SEEDS, LABELS = st.integers(0, 10_000), torch.arange(60) % 4
Make = Callable[..., Tensor]
MakeHead = Callable[..., Head]
Batch = Callable[..., tuple[Tensor, Tensor, Tensor]]


@settings(max_examples=20)
@given(seed=SEEDS, n_classes=st.integers(1, 6), scale=st.floats(0.1, 50), temperature=st.floats(0.1, 1000))
def test_scores_of_logits(random_matrix: Make, seed: int, n_classes: int, scale: float, temperature: float) -> None:
    logits = random_matrix(seed, 5, n_classes, scale)
    torch.testing.assert_close(msp(logits, temperature), -MaxSoftmax.score(logits, temperature), rtol=1e-9, atol=0)
    torch.testing.assert_close(energy(logits), -EnergyBased.score(logits), rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(seed=SEEDS, k=st.integers(1, 60))
def test_knn(random_head: MakeHead, activations: Make, score_of: Make, seed: int, k: int) -> None:
    known, features = activations(seed, 60, 20), activations(seed + 1, 9, 20)
    theirs = KNN(None, k=k).fit_features(known, LABELS).predict_features(features)
    found = score_of(Knn, random_head(seed, n_features=20), features, known, k=k)
    torch.testing.assert_close(found, -theirs.double(), rtol=1e-6, atol=1e-6)


@settings(max_examples=20)
@given(seed=SEEDS, percentile=st.floats(1, 99))
def test_react_and_dice(random_head: MakeHead, activations: Make, score_of: Make, seed: int, percentile: float) -> None:
    head, known, features = random_head(seed), activations(seed + 2, 60), activations(seed + 3, 5)
    react = ReAct(None, head.logits, percentile=percentile / 100).fit_feature_maps(known, LABELS)
    found = score_of(React, head, features, known, percentile=percentile)
    torch.testing.assert_close(found, -react.predict_feature_maps(features), rtol=1e-6, atol=1e-6)
    dice = DICE(None, head.weight, head.bias, percentile / 100).fit_features(known, LABELS)
    contribution = head.weight.float() * known.mean(0)
    if (contribution - dice.threshold).abs().min() > 1e-6:  # else rounding decides which side a weight is on
        found = score_of(Dice, head, features, known, percentile=percentile)
        torch.testing.assert_close(found, -dice.predict_features(features).double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=20)
@given(seed=SEEDS, dim=st.integers(1, 6))
def test_mahalanobis_and_vim_up_to_the_single_precision_of_the_library(
    random_head: MakeHead, random_matrix: Make, score_of: Make, seed: int, dim: int
) -> None:
    stretched = torch.tensor([64.0, 32, 16, 8, 4, 2, 1]) / 16
    head, known = random_head(seed), random_matrix(seed + 2, 60, 7).float() * stretched
    features = random_matrix(seed + 3, 5, 7).float()
    # its covariance is a sum over all 60 samples, not a mean, and it halves the distance
    theirs = 120 * TheirMahalanobis(None).fit_features(known, LABELS).predict_features(features).double()
    found = score_of(Mahalanobis, head, features, known, LABELS)
    torch.testing.assert_close(found, -theirs, rtol=1e-3, atol=1e-3)
    theirs = ViM(None, dim, head.weight, head.bias).fit_features(known, LABELS).predict_features(features).double()
    found = score_of(Vim, head, features, known, dim=dim)
    torch.testing.assert_close(found, -theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_odin(temperature: float) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 16), nn.ReLU(), nn.Linear(16, 5))
    images, std = torch.randn(8, 3, 4, 4), [0.5, 1.0, 2.0]
    theirs = ODIN(network, eps=0.1, temperature=temperature, norm_std=std).predict(images)
    found = msp(odin_logits(network, images, std, temperature, 0.1), temperature)
    torch.testing.assert_close(found, -theirs.double(), rtol=1e-6, atol=0)


def as_the_library_takes_them(id_logits: Tensor, labels: Tensor, wild_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of all samples, and labels that are negative for OOD."""
    return torch.cat([id_logits, wild_logits]), torch.cat([labels, labels.new_full((len(wild_logits),), -1)])


def assert_same_loss_and_gradients(ours: Tensor, theirs: Tensor, of: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    pairs = zip(torch.autograd.grad(ours, of), torch.autograd.grad(theirs, of), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@settings(max_examples=20)
@given(seed=st.integers(0, 50), n=st.integers(1, 9), m=st.integers(1, 9), weight=st.floats(0.01, 2))
def test_oe_and_energy_oe(batch: Batch, seed: int, n: int, m: int, weight: float) -> None:
    id_logits, labels, wild_logits = batch(seed, n, m)
    of = [id_logits.requires_grad_(), wild_logits.requires_grad_()]
    together = as_the_library_takes_them(id_logits, labels, wild_logits)
    # a mean over each side's own samples; the library's mean over all would weight them by their number
    of_id, of_wild = OutlierExposureLoss(weight, reduction=None)(*together).split([n, m])
    assert_same_loss_and_gradients(oe_loss(id_logits, labels, wild_logits, weight), of_id.mean() + of_wild.mean(), of)
    theirs = EnergyRegularizedLoss(weight, -5.0, -3.0)(*together)
    ours = energy_oe_loss(id_logits, labels, wild_logits, weight, (-5.0, -3.0))
    assert_same_loss_and_gradients(ours, theirs, of)


@settings(max_examples=20)
@given(seed=st.integers(0, 50), margin=st.floats(-3, 1), bias=st.floats(-1, 4), loss_before=st.floats(0.01, 3))
def test_woods_and_scone_over_epochs(
    batch: Batch,
    line: Callable[..., nn.Linear],
    constraints: dict[str, float],
    seed: int,
    margin: float,
    bias: float,
    loss_before: float,
) -> None:
    id_logits, labels, wild_logits = batch(seed, 9, 7)
    outlier_line = line(-0.8, bias)
    of = [id_logits.requires_grad_(), wild_logits.requires_grad_(), *outlier_line.parameters()]
    ours = ConstrainedEnergyLoss(outlier_line, loss_before, margin=margin, **constraints)
    theirs = EnergyMarginLoss(
        full_train_loss=loss_before,
        eta=margin,
        false_alarm_cutoff=constraints["false_alarms"],
        ce_tol=constraints["loss_factor"],
        lr_lam=constraints["multiplier_lr"],
        penalty_mult=constraints["penalty_growth"],
        constraint_tol=constraints["tolerance"],
    )
    for epoch in range(4):
        together = as_the_library_takes_them(id_logits, labels, wild_logits)
        assert_same_loss_and_gradients(ours(id_logits, labels, wild_logits), theirs(*together, outlier_line), of)
        all_id, all_labels, _ = batch(seed + 100 + epoch, 40)
        ours.update(all_id, all_labels)
        theirs.update_hyperparameters(nn.Identity(), [(all_id, all_labels)], outlier_line)
        state = ours.get_state()
        np.testing.assert_allclose(state["multipliers"], [theirs.lam, theirs.lam2], rtol=1e-6)
        expected = [theirs.in_constraint_weight, theirs.ce_constraint_weight]
        np.testing.assert_allclose(state["penalty_weights"], expected, rtol=1e-6)
