"""What the theorems speak of: against slow and obvious computations, and against what was mixed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import OOD, SEED
from hypothesis import given
from hypothesis import strategies as st
from test_cli import salcli
from test_gradients import SEEDS
from test_gradients import random_factors as gradients

from salcli.artifacts import layout
from salcli.artifacts.gradients import GradientFile
from salcli.artifacts.layout import Workspace
from salcli.params import Params
from salcli.sal.gradients import Factors
from salcli.sal.mixture import best_bin, estimated_share
from salcli.sal.theory import (
    discrepancy,
    error_curve,
    estimated_error_curve,
    gradient_moments,
    outlier_mean_bound,
    required_discrepancy,
)
from salcli.sal.threshold import separation_errors
from salcli.stages import extract_grads, prepare, theory
from salcli.stages import filter as filter_stage


def random_factors(seed: int, n: int) -> Factors:
    return gradients(n, 3, 5, seed)


def normal(seed: int, n: int, mean: float = 0.0) -> torch.Tensor:
    return mean + torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- ζ


@given(SEEDS, st.integers(2, 40), st.integers(2, 40))
def test_zeta_is_the_norm_of_the_difference_of_the_dense_mean_gradients(seed: int, n: int, m: int) -> None:
    P, Q = random_factors(seed, n), random_factors(seed + 1, m)
    dense = [factors.dense().double() for factors in (P, Q)]
    found = discrepancy(gradient_moments(P), gradient_moments(Q))
    assert found.zeta == pytest.approx(float((dense[0].mean(0) - dense[1].mean(0)).norm()), rel=1e-6)
    noise = sum(float(one.var(0).sum()) / len(one) for one in dense)
    assert found.noise == pytest.approx(math.sqrt(noise), rel=1e-5)


def test_without_noise_the_square_of_zeta_is_right_on_average() -> None:
    """Two samples of one distribution: ζ is never zero, but its square without the noise averages to it."""
    pool = random_factors(0, 4_000)
    squares, raw = [], []
    for trial in range(300):
        chosen = torch.randperm(len(pool), generator=torch.Generator().manual_seed(trial))
        found = discrepancy(gradient_moments(pool[chosen[:30]]), gradient_moments(pool[chosen[30:70]]))
        squares.append(found.zeta**2 - found.noise**2)
        raw.append(found.zeta**2)
    assert abs(np.mean(squares)) < 4 * np.std(squares) / math.sqrt(len(squares))
    assert np.mean(raw) > 10 * abs(np.mean(squares))


def test_zeta_of_a_mixture_is_pi_times_that_of_its_outliers() -> None:
    inliers, outliers = random_factors(0, 90), random_factors(1, 10)
    mixed = Factors(*(torch.cat(pair) for pair in zip(vars(inliers).values(), vars(outliers).values(), strict=True)))
    moments = [gradient_moments(one) for one in (inliers, mixed, outliers)]
    whole, part = discrepancy(moments[0], moments[1]).zeta, discrepancy(moments[0], moments[2]).zeta
    assert whole == pytest.approx(0.1 * part, rel=1e-6)


def test_one_sample_has_no_noise_estimate() -> None:
    assert math.isnan(gradient_moments(random_factors(0, 1)).mean_square_error)


def test_the_condition_is_that_of_table_5() -> None:
    shown = [round(required_discrepancy(pi), 2) for pi in (0.05, 0.1, 0.2, 0.5, 0.9, 1.0)]
    assert shown == [0.23, 0.32, 0.45, 0.71, 0.96, 1.01]
    assert outlier_mean_bound(2.0, 0.5) == pytest.approx(0.98 * 4 / 0.5)


# --- errors against T


@given(SEEDS, st.integers(1, 30))
def test_the_error_curve_is_the_errors_at_every_threshold(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, 5, m).astype(float))  # with ties
    is_ood = torch.from_numpy(rng.random(m) < 0.5)
    threshold = scores.unique()
    curve = error_curve(scores, is_ood, threshold)
    for at, T in enumerate(threshold):
        slow = separation_errors(scores > T, is_ood)
        np.testing.assert_allclose((curve.err_in[at], curve.err_out[at]), (slow.err_in, slow.err_out), atol=1e-12)


def test_the_estimated_errors_are_near_the_true_ones() -> None:
    wild, is_ood = torch.cat([normal(0, 8_000), normal(1, 2_000, 2.0)]), torch.arange(10_000) >= 8_000
    threshold = torch.linspace(-2, 4, 30, dtype=torch.float64)
    true = error_curve(wild, is_ood, threshold)
    found = estimated_error_curve(wild, normal(2, 8_000), 0.2, threshold)
    torch.testing.assert_close(found.err_in, true.err_in, atol=0.02, rtol=0)
    torch.testing.assert_close(found.err_out, true.err_out, atol=0.05, rtol=0)


def test_without_outliers_err_out_is_not_defined() -> None:
    curve = estimated_error_curve(normal(0, 9), normal(1, 9), 0.0, normal(2, 3))
    assert curve.err_out.isnan().all()


# --- π


@given(SEEDS, st.integers(1, 30), st.integers(1, 30))
def test_best_bin_is_the_best_of_all_bins(seed: int, n: int, m: int) -> None:
    """The slow truth: every place between all scores."""
    rng = np.random.default_rng(seed)
    id_scores, wild_scores = rng.integers(0, 9, n).astype(float), rng.integers(0, 9, m).astype(float)
    width = math.sqrt(math.log(40) / 2 / m) + math.sqrt(math.log(40) / 2 / n)
    best = min(
        (np.mean(wild_scores <= c) / np.mean(id_scores <= c) + 1.01 * width / np.mean(id_scores <= c))
        for c in np.arange(-0.5, 10)
        if np.mean(id_scores <= c) > 0
    )
    pi, bound = best_bin(torch.from_numpy(id_scores), torch.from_numpy(wild_scores))
    assert bound == pytest.approx(best)
    assert 0 <= pi <= 1


@pytest.mark.parametrize("pi", [0.0, 0.05, 0.3, 0.9])
def test_pi_is_found_where_a_score_separates(pi: float) -> None:
    n_ood = int(pi * 10_000)
    wild = torch.cat([normal(0, 10_000 - n_ood), normal(1, n_ood, 6.0)])
    useless = normal(3, 10_000), normal(4, 10_000)
    found = estimated_share({"useless": useless, "good": (normal(2, 10_000), wild)})
    assert found.pi == pytest.approx(pi, abs=0.02)
    if pi > 0.01:
        assert found.score == "good"


@pytest.mark.parametrize("ood", ["digits-8-9", "photo-patches"])
def test_pi_is_estimated_to_five_points_on_the_embedded_default(
    workspace: Workspace, quick_params: Params, ood: str
) -> None:
    """Mean absolute error over the values of π. docs/theory.md has the figures over many seeds."""
    errors = []
    for pi in (0.05, 0.1, 0.2, 0.3, 0.5):
        params = quick_params.model_copy(update={"data": quick_params.data.model_copy(update={"pi": pi})})
        prepare.prepare_wild(workspace, params.data, ood, SEED)
        extract_grads.run_wild(workspace, params, ood, SEED)
        filter_stage.run(workspace, params, ood, SEED)
        result = theory.run(workspace, params, ood, SEED)
        assert result.truth
        assert result.truth.pi == pytest.approx(pi, abs=0.01)
        errors.append(abs(result.mixture.pi - result.truth.pi))
    assert np.mean(errors) <= 0.05


# --- the stage


def test_zeta_of_the_stage_is_that_of_dense_gradients_with_predicted_labels(
    workspace: Workspace, quick_params: Params
) -> None:
    result = theory.run(workspace, quick_params, OOD, SEED)
    means = {}
    for place in (
        layout.id_gradients("train", SEED),
        layout.id_gradients("calibration", SEED),
        layout.wild_gradients(OOD, SEED),
    ):
        file = GradientFile.open(workspace.find(place))
        (chunk,) = file.relabelled(file.predicted).chunks()
        means[place.name.rsplit("-", 1)[1]] = chunk.dense().double().mean(0)
    assert result.held_out.zeta == pytest.approx(float((means["calibration.h5"] - means["wild.h5"]).norm()), rel=1e-5)
    assert result.on_training_data.zeta == pytest.approx(float((means["train.h5"] - means["wild.h5"]).norm()), rel=1e-5)


def test_the_errors_at_t_are_those_that_the_filter_reported(workspace: Workspace, quick_params: Params) -> None:
    reported = json.loads((workspace.root / layout.filter_metrics(OOD, SEED).name).read_text())
    result = theory.run(workspace, quick_params, OOD, SEED)
    assert result.truth
    found = result.errors_at_threshold(result.truth.errors)
    assert found == pytest.approx((reported["err_in"], reported["err_out"]), abs=1e-12)
    assert result.truth.mean_tau_ood > 10 * result.truth.mean_tau_id
    assert result.truth.mean_tau_ood > result.bound


def test_without_the_truth_all_else_is_the_same(workspace: Workspace, quick_params: Params) -> None:
    known = theory.run(workspace, quick_params, OOD, SEED)
    (workspace.root / layout.wild_truth(OOD, SEED).name).unlink()
    unknown = theory.run(workspace, quick_params, OOD, SEED)
    assert unknown.truth is None
    assert unknown.pi == known.mixture.pi == unknown.mixture.pi
    assert (unknown.held_out, unknown.mean_tau) == (known.held_out, known.mean_tau)
    assert known.estimated
    assert unknown.estimated
    torch.testing.assert_close(unknown.estimated.err_out, known.estimated.err_out)


# --- the command


@pytest.fixture
def here(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workspace.root)
    return workspace.root


def test_the_command_shows_tables_and_writes_figures(here: Path) -> None:
    result = salcli("theory", "--ood", OOD)
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("1.011 √π", "τ wild OOD", OOD))
    assert max(map(len, result.stdout.splitlines())) <= 100
    folder = here / "runs" / str(SEED) / OOD
    assert (folder / "theory.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / "theory.svg").read_text()
    content = json.loads((folder / "theory.json").read_text())
    assert content["zeta"] > 0
    assert len(content["errors"]["threshold"]) == len(content["errors"]["err_in"])


def test_the_command_works_without_the_truth_and_with_other_filters(here: Path) -> None:
    (here / layout.wild_truth(OOD, SEED).name).unlink()
    assert salcli("filter", "--ood", OOD, "--score", "gradnorm").exit_code == 0
    assert salcli("filter", "--ood", "photo-patches", "--calibration", "train").exit_code == 0
    result = salcli("theory", "--scratch")
    assert result.exit_code == 0, result.output
    assert (here / "scratch" / layout.theory_figure(OOD, SEED, "png").name).exists()


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        (layout.wild_gradients(OOD, SEED), f"salcli extract-grads --ood {OOD} --seed {SEED}"),
        (layout.id_gradients("calibration", SEED), f"salcli extract-grads --seed {SEED}"),
        (layout.candidates(OOD, SEED), f"salcli filter --ood {OOD} --seed {SEED}"),
    ],
    ids=["wild gradients", "ID gradients", "candidates"],
)
def test_a_missing_input_is_named_with_the_command_that_makes_it(
    here: Path, missing: layout.Artifact, command: str
) -> None:
    (here / missing.name).unlink()
    result = salcli("theory", "--ood", OOD)
    assert result.exit_code == 2
    assert f"{missing.name} is not there yet; make it with: {command}" in " ".join(result.output.split())


def test_candidates_of_other_wild_data_are_refused(here: Path, quick_params: Params) -> None:
    data = quick_params.data.model_copy(update={"pi": 0.3})
    prepare.prepare_wild(Workspace(here), data, OOD, SEED)
    extract_grads.run_wild(Workspace(here), quick_params, OOD, SEED)
    result = salcli("theory", "--ood", OOD)
    assert result.exit_code == 2
    assert "are of different wild data" in " ".join(result.output.split())
