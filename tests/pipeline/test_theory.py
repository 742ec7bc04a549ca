"""theory: the quantities of the theorems, against dense gradients and against what was mixed."""

import json

import numpy as np
import pytest
from helpers.quick import EXPERIMENT, SEED
from helpers.stages import dense_gradients, params_of, probabilities, stored

from salcli.params.schema import Params
from salcli.pipeline import extract, prepare, theory
from salcli.pipeline import filter as filter_stage
from salcli.store.layout import Experiment, Workspace

WILD = EXPERIMENT.wild_representation


@pytest.mark.parametrize("ood", ["digits-8-9", "photo-patches"])
def test_pi_is_estimated_to_five_points_on_the_default_data(
    workspace: Workspace, quick_params: Params, ood: str
) -> None:
    """Mean absolute error over several π. docs/theory.md has the numbers over many seeds."""
    errors = []
    for pi in (0.05, 0.2, 0.5):
        experiment = Experiment(SEED, ood, pi)
        prepare.prepare_wild(workspace, quick_params.data, experiment)
        extract.run_wild(workspace, quick_params, experiment)
        filter_stage.run(workspace, quick_params, experiment)
        result = theory.run(workspace, quick_params, experiment)
        assert result.truth
        assert result.truth.pi == pytest.approx(pi, abs=0.01)
        errors.append(abs(result.share.value - result.truth.pi))
    assert np.mean(errors) <= 0.05


def test_the_pairwise_distance_is_that_of_the_rows_of_the_labels(workspace: Workspace, quick_params: Params) -> None:
    """As the authors' code takes them: (p − 1) f of the true label for ID data, of the predicted one for wild data."""
    rows = []
    for artifact, name in ((EXPERIMENT.id_representation("train"), "label"), (WILD, "predicted")):
        content = stored(workspace, artifact)
        p = probabilities(content["logits"])[np.arange(len(content[name])), content[name]]
        rows.append((p - 1)[:, None] * content["feature"])
    slow = np.mean([np.linalg.norm(rows[1] - row, axis=1).mean() for row in rows[0]])
    assert theory.run(workspace, quick_params, EXPERIMENT).pairwise == pytest.approx(slow, rel=1e-5)


def test_the_errors_at_t_are_those_that_the_filter_reported(workspace: Workspace, quick_params: Params) -> None:
    reported = json.loads((workspace.root / EXPERIMENT.filter_metrics.path).read_text())
    result = theory.run(workspace, quick_params, EXPERIMENT)
    assert result.truth
    found = result.errors_at_threshold(estimated=False)
    assert found == pytest.approx((reported["err_in"], reported["err_out"], 1 - reported["precision"]), abs=1e-12)
    assert result.truth.mean_tau_ood > 10 * result.truth.mean_tau_id
    assert result.truth.mean_tau_ood > result.least_mean
    bounds = result.err_out_bounds
    assert result.truth.err_out <= bounds["by_mean"] <= bounds["by_zeta"] <= 1
    content = json.loads(result.written[0].read_text())
    assert (content["zeta"], content["zeta_pairwise"]) == (result.held_out.zeta, result.pairwise)
    assert sum(content["gradients"]["is_outlier"]) == int(result.truth.is_ood.sum())
    assert len(content["errors"]["threshold"]) == len(content["errors"]["err_in"])


def test_tau_of_the_theorems_is_the_papers_whatever_the_filter_has(workspace: Workspace, quick_params: Params) -> None:
    """One ∇̄ and one v of the wild gradients for all classes; π̂ is the committee's."""
    usual = theory.run(workspace, quick_params, EXPERIMENT)
    for changes in (
        {"filter.score": "knn"},
        {"filter.score": "sal-plus", "filter.threshold_quantile": None},
        {"filter.directions": "wild"},
    ):
        filter_stage.run(workspace, params_of(workspace, changes), EXPERIMENT)
        result = theory.run(workspace, quick_params, EXPERIMENT)
        assert (result.tau, result.share) == (usual.tau, usual.share), changes
    id_train, wild = (stored(workspace, one) for one in (EXPERIMENT.id_representation("train"), WILD))
    gradients = dense_gradients(wild, wild["predicted"]) - dense_gradients(id_train, id_train["label"]).mean(axis=0)
    tau = (gradients @ np.linalg.svd(gradients, full_matrices=False)[2][0]) ** 2
    assert (usual.tau.mean, usual.tau.largest) == pytest.approx((tau.mean(), tau.max()), rel=1e-5)
