"""Every variant of the filter, on real gradients, beside a dense re-computation; and what it promises."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import OOD, SEED

from salcli.artifacts import layout
from salcli.artifacts.candidates import read_candidates
from salcli.artifacts.gradients import KIND, GradientFile
from salcli.artifacts.hdf5 import read_arrays, write_arrays
from salcli.artifacts.splits import read_wild_truth
from salcli.errors import ThresholdError
from salcli.params import FilterParams, Params
from salcli.seeding import generator
from salcli.stages import filter as filter_stage

if TYPE_CHECKING:
    from salcli.artifacts.layout import Artifact, Workspace
    from salcli.stages.filter import Filtered

ID_TRAIN = layout.id_gradients("train", SEED)
CALIBRATION = layout.id_gradients("calibration", SEED)
WILD = layout.wild_gradients(OOD, SEED)
N_CLASSES = 8

Arrays = dict[str, np.ndarray]


def run(workspace: Workspace, params: Params, **changes: Any) -> Filtered:
    chosen = params.filter.model_copy(update=changes)
    return filter_stage.run(workspace, params.model_copy(update={"filter": chosen}), OOD, SEED)


def arrays(workspace: Workspace, place: Artifact) -> Arrays:
    return read_arrays(workspace.find(place), KIND)


def rewrite(workspace: Workspace, place: Artifact, content: Arrays) -> None:
    """Other gradients in the same file, as if the same network had given them."""
    found = workspace.find(place)
    write_arrays(found.path, KIND, content, GradientFile.open(found).about)


# ---- the slow truth


def slow_tau(workspace: Workspace, params: FilterParams) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the wild data and of the ID data that the threshold is chosen on, from dense matrices."""
    id_train, calibration, wild = (arrays(workspace, place) for place in (ID_TRAIN, CALIBRATION, WILD))
    labels = {"train": id_train["label"], "calibration": calibration["predicted"], "wild": wild["predicted"]}
    if params.labels == "random":
        for name, stored in (("calibration", calibration), ("wild", wild)):
            rng = generator(SEED, f"random-labels, {name}")
            labels[name] = rng.integers(N_CLASSES, size=len(stored["label"]))
    chosen, chosen_labels = (
        (calibration, labels["calibration"]) if params.calibration == "holdout" else (id_train, labels["train"])
    )
    if params.score == "gradnorm":
        return slow_gradnorm(wild), slow_gradnorm(chosen)
    id_rows = dense(id_train, labels["train"], params.gradient)
    means = np.stack(
        [
            id_rows[labels["train"] == k].mean(axis=0)
            if params.reference == "class-conditional"
            else id_rows.mean(axis=0)
            for k in range(N_CLASSES)
        ]
    )
    wild_rows = dense(wild, labels["wild"], params.gradient) - means[labels["wild"]]
    chosen_rows = dense(chosen, chosen_labels, params.gradient) - means[chosen_labels]
    own_vectors = params.calibration == "id-svd"
    wild_tau, chosen_tau = np.full(len(wild_rows), np.nan), np.full(len(chosen_rows), np.nan)
    for k in range(N_CLASSES):
        in_wild = labels["wild"] == k if params.svd == "class-conditional" else slice(None)
        in_chosen = chosen_labels == k if params.svd == "class-conditional" else slice(None)
        vectors = right_singular_vectors(wild_rows[in_wild], params.n_vectors)
        wild_tau[in_wild] = np.square(wild_rows[in_wild] @ vectors.T).sum(axis=1) / params.n_vectors
        if own_vectors:
            vectors = right_singular_vectors(chosen_rows[in_chosen], params.n_vectors)
        chosen_tau[in_chosen] = np.square(chosen_rows[in_chosen] @ vectors.T).sum(axis=1) / params.n_vectors
    return wild_tau, chosen_tau


def dense(stored: Arrays, label: np.ndarray, gradient: str) -> np.ndarray:
    """One flat gradient for each sample; labels are changed in single precision, as the file has it."""
    one_hot = np.eye(N_CLASSES, dtype=np.float32)
    residual = stored["residual"] + (one_hot[stored["label"]] - one_hot[label])
    matrices = residual[:, :, None].astype(float) * stored["feature"][:, None, :].astype(float)  # n, K, D
    if gradient == "predicted-row":
        return matrices[np.arange(len(label)), label]
    return matrices.reshape(len(label), -1)


def right_singular_vectors(matrix: np.ndarray, n_vectors: int) -> np.ndarray:
    return _svd(matrix.tobytes(), matrix.shape)[:n_vectors]


@cache
def _svd(content: bytes, shape: tuple[int, int]) -> np.ndarray:
    """Most variants share their matrices with others."""
    _, values, vectors = np.linalg.svd(np.frombuffer(content).reshape(shape), full_matrices=False)
    return vectors[values > 1e-6 * values[0]][:5]


def slow_gradnorm(stored: Arrays) -> np.ndarray:
    probabilities = stored["residual"].astype(float) + np.eye(N_CLASSES)[stored["label"]]
    return -np.abs(probabilities - 1 / N_CLASSES).sum(axis=1) * np.abs(stored["feature"].astype(float)).sum(axis=1)


# ---- every variant


def assert_equals_the_slow_truth(workspace: Workspace, whole: Params, params: FilterParams) -> None:
    result = filter_stage.run(workspace, whole.model_copy(update={"filter": params}), OOD, SEED)
    wild_tau, calibration_tau = slow_tau(workspace, params)
    found = result.candidates
    np.testing.assert_allclose(found.wild_score, wild_tau, rtol=1e-6, atol=1e-13 * np.abs(wild_tau).max())
    np.testing.assert_allclose(
        found.calibration_score, calibration_tau, rtol=1e-6, atol=1e-13 * np.abs(calibration_tau).max()
    )
    n_below = math.ceil(params.threshold_quantile * len(calibration_tau))
    assert found.threshold == pytest.approx(np.sort(calibration_tau)[n_below - 1], rel=1e-6)
    np.testing.assert_array_equal(found.index, np.flatnonzero(wild_tau > found.threshold))
    is_ood = read_wild_truth(workspace.find(layout.wild_truth(OOD, SEED)))
    assert result.errors is not None
    assert result.errors.err_in == pytest.approx(np.mean(wild_tau[~is_ood] > found.threshold))
    assert result.errors.err_out == pytest.approx(np.mean(wild_tau[is_ood] <= found.threshold))


@pytest.mark.parametrize("labels", ["predicted", "random"])
@pytest.mark.parametrize("gradient", ["full", "predicted-row"])
@pytest.mark.parametrize("n_vectors", [1, 3])
@pytest.mark.parametrize("reference", ["class-conditional", "global"])
@pytest.mark.parametrize("svd", ["class-conditional", "class-agnostic"])
def test_every_variant_of_tau_equals_a_dense_svd(
    svd: str, reference: str, n_vectors: int, gradient: str, labels: str, workspace: Workspace, quick_params: Params
) -> None:
    for calibration in ("holdout", "train", "id-svd"):
        options = {
            "calibration": calibration,
            "svd": svd,
            "reference": reference,
            "n_vectors": n_vectors,
            "gradient": gradient,
            "labels": labels,
        }
        params = FilterParams(**{**quick_params.filter.model_dump(), **options, "threshold_quantile": 0.8})
        assert_equals_the_slow_truth(workspace, quick_params, params)


@pytest.mark.parametrize("calibration", ["holdout", "train"])
def test_gradnorm_equals_its_definition(calibration: str, workspace: Workspace, quick_params: Params) -> None:
    options = {"score": "gradnorm", "calibration": calibration, "threshold_quantile": 0.8}
    assert_equals_the_slow_truth(workspace, quick_params, quick_params.filter.model_copy(update=options))


# ---- each option changes what it should, and nothing else


@pytest.mark.parametrize("calibration", ["train", "id-svd"])
def test_the_calibration_set_changes_the_threshold_but_no_score_of_the_wild_data(
    calibration: str, workspace: Workspace, quick_params: Params
) -> None:
    usual, other = run(workspace, quick_params), run(workspace, quick_params, calibration=calibration)
    np.testing.assert_array_equal(other.candidates.wild_score, usual.candidates.wild_score)
    assert len(usual.candidates.calibration_score) == len(arrays(workspace, CALIBRATION)["label"])
    assert len(other.candidates.calibration_score) == len(arrays(workspace, ID_TRAIN)["label"])
    assert other.candidates.threshold != usual.candidates.threshold


@pytest.mark.parametrize(
    "change",
    [
        {"svd": "class-agnostic"},
        {"reference": "global"},
        {"n_vectors": 2},
        {"gradient": "predicted-row"},
        {"labels": "random"},
        {"score": "gradnorm"},
    ],
    ids=str,
)
def test_every_other_option_changes_the_scores_of_wild_and_calibration_data(
    change: dict[str, Any], workspace: Workspace, quick_params: Params
) -> None:
    usual, other = run(workspace, quick_params), run(workspace, quick_params, threshold_quantile=0.8, **change)
    assert not np.allclose(other.candidates.wild_score, usual.candidates.wild_score, rtol=1e-3)
    assert not np.allclose(other.candidates.calibration_score, usual.candidates.calibration_score, rtol=1e-3)
    assert other.fit == usual.fit


def test_a_higher_quantile_takes_fewer_candidates_by_the_same_scores(
    workspace: Workspace, quick_params: Params
) -> None:
    results = [
        run(workspace, quick_params, threshold_quantile=quantile).candidates for quantile in (0.7, 0.8, 0.9, 0.95)
    ]
    for lower, higher in pairwise(results):
        np.testing.assert_array_equal(lower.wild_score, higher.wild_score)
        assert lower.threshold < higher.threshold
        assert set(higher.index) < set(lower.index)


def test_more_vectors_add_squares_to_those_of_fewer(workspace: Workspace, quick_params: Params) -> None:
    one, two, five = (n * run(workspace, quick_params, n_vectors=n).candidates.wild_score for n in (1, 2, 5))
    assert (two >= one * (1 - 1e-9)).all()
    assert (five >= two * (1 - 1e-9)).all()


def test_more_vectors_than_any_class_has_directions_measure_the_whole_distance(
    workspace: Workspace, quick_params: Params
) -> None:
    """Where the vectors span all wild gradients of a class, the sum of squares is the squared length."""
    tau = run(workspace, quick_params, n_vectors=500).candidates.wild_score
    id_train, wild = arrays(workspace, ID_TRAIN), arrays(workspace, WILD)
    rows = dense(id_train, id_train["label"], "full")
    means = np.stack([rows[id_train["label"] == k].mean(axis=0) for k in range(N_CLASSES)])
    lengths = np.square(dense(wild, wild["label"], "full") - means[wild["label"]]).sum(axis=1)
    np.testing.assert_allclose(500 * tau, lengths, rtol=1e-4, atol=1e-9 * lengths.max())


def test_gradnorm_does_not_look_at_what_only_tau_needs(workspace: Workspace, quick_params: Params) -> None:
    options = {"score": "gradnorm", "threshold_quantile": 0.8}
    usual = run(workspace, quick_params, **options).candidates
    others = {"svd": "class-agnostic", "reference": "global", "n_vectors": 3, "gradient": "predicted-row"}
    for name, value in {**others, "labels": "random"}.items():
        other = run(workspace, quick_params, **options, **{name: value}).candidates
        np.testing.assert_allclose(other.wild_score, usual.wild_score, rtol=1e-6)
        np.testing.assert_allclose(other.calibration_score, usual.calibration_score, rtol=1e-6)


def test_random_labels_are_the_same_in_every_run(workspace: Workspace, quick_params: Params) -> None:
    one, other = (run(workspace, quick_params, labels="random", threshold_quantile=0.8) for _ in range(2))
    np.testing.assert_array_equal(one.candidates.wild_score, other.candidates.wild_score)


def test_held_out_samples_are_scored_with_their_predicted_label_not_with_the_true_one(
    workspace: Workspace, quick_params: Params
) -> None:
    """Other true labels, with the gradients that belong to them, give the same threshold."""
    before = run(workspace, quick_params).candidates
    stored = arrays(workspace, CALIBRATION)
    wrong = (stored["label"] + 1) % N_CLASSES
    one_hot = np.eye(N_CLASSES, dtype=np.float32)
    residual = stored["residual"] + (one_hot[stored["label"]] - one_hot[wrong])
    rewrite(workspace, CALIBRATION, {**stored, "label": wrong, "residual": residual})
    after = run(workspace, quick_params).candidates
    # to the digits that are left of p − 1 after a label was changed and changed back in single precision
    np.testing.assert_allclose(
        after.calibration_score, before.calibration_score, rtol=1e-2, atol=1e-6 * before.threshold
    )
    np.testing.assert_array_equal(after.index, before.index)


def test_the_order_of_the_wild_data_does_not_matter(workspace: Workspace, quick_params: Params) -> None:
    before = run(workspace, quick_params).candidates
    stored = arrays(workspace, WILD)
    order = np.random.default_rng(0).permutation(len(stored["label"]))
    rewrite(workspace, WILD, {name: values[order] for name, values in stored.items()})
    after = run(workspace, quick_params).candidates
    np.testing.assert_allclose(after.wild_score, before.wild_score[order], rtol=1e-6, atol=1e-13)
    assert after.threshold == pytest.approx(before.threshold, rel=1e-6)


def test_a_wild_sample_at_the_threshold_is_no_candidate(workspace: Workspace, quick_params: Params) -> None:
    """The calibration sample that sets the threshold is put among the wild data, by a score that looks at no other."""
    options = {"score": "gradnorm", "threshold_quantile": 0.8}
    before = run(workspace, quick_params, **options).candidates
    at_threshold = int(np.flatnonzero(before.calibration_score == before.threshold)[0])
    held_out, stored = arrays(workspace, CALIBRATION), arrays(workspace, WILD)
    for name in ("residual", "feature", "label", "predicted"):
        stored[name][before.index[0]] = held_out[name][at_threshold]
    rewrite(workspace, WILD, stored)
    after = run(workspace, quick_params, **options).candidates
    assert after.wild_score[before.index[0]] == after.threshold == before.threshold
    np.testing.assert_array_equal(after.index, before.index[1:])


def test_what_is_written_is_what_is_returned(workspace: Workspace, quick_params: Params) -> None:
    result = run(workspace, quick_params, threshold_quantile=0.9)
    stored = read_candidates(workspace.find(layout.candidates(OOD, SEED)))
    for name in ("index", "score", "predicted", "wild_score", "calibration_score", "threshold", "score_name"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(result.candidates, name))
    np.testing.assert_array_equal(stored.score, stored.wild_score[stored.index])
    np.testing.assert_array_equal(stored.predicted, arrays(workspace, WILD)["predicted"][stored.index])
    metrics = json.loads(workspace.find(layout.filter_metrics(OOD, SEED)).path.read_text())
    assert result.errors is not None
    assert (metrics["err_in"], metrics["err_out"]) == (result.errors.err_in, result.errors.err_out)
    assert metrics["n_candidates"] == len(stored.index)
    assert metrics["n_wild"] == len(stored.wild_score)


# ---- what the filter promises


def test_err_in_is_what_the_quantile_promises_however_held_out_samples_are_dealt(
    workspace: Workspace, quick_params: Params
) -> None:
    """Calibration and wild ID samples are exchangeable: deal them anew, again and again, and count.

    A new sample is above the r-th smallest of n with probability 1 − r/(n + 1).
    """
    quantile, n_deals = 0.9, 30
    calibration, wild = arrays(workspace, CALIBRATION), arrays(workspace, WILD)
    is_id = ~read_wild_truth(workspace.find(layout.wild_truth(OOD, SEED)))
    one_hot = np.eye(N_CLASSES, dtype=np.float32)
    predicted = calibration["predicted"]
    residual = calibration["residual"] + (one_hot[calibration["label"]] - one_hot[predicted])
    as_wild = {**calibration, "label": predicted, "residual": residual}
    pool = {name: np.concatenate([as_wild[name], wild[name][is_id]]) for name in wild}
    rng, n = np.random.default_rng(0), len(predicted)
    errors = []
    for _ in range(n_deals):
        order = rng.permutation(len(pool["label"]))
        dealt_wild = {name: values.copy() for name, values in wild.items()}
        for name, values in pool.items():
            dealt_wild[name][is_id] = values[order[n:]]
        rewrite(workspace, CALIBRATION, {name: values[order[:n]] for name, values in pool.items()})
        rewrite(workspace, WILD, dealt_wild)
        result = run(workspace, quick_params, threshold_quantile=quantile)
        assert result.errors is not None
        errors.append(result.errors.err_in)
    standard_error = np.std(errors) / math.sqrt(n_deals)
    assert standard_error < 0.01
    assert np.mean(errors) == pytest.approx(1 - math.ceil(quantile * n) / (n + 1), abs=3 * standard_error)


def test_the_fit_is_read_off_the_gradients(workspace: Workspace, quick_params: Params) -> None:
    """The slow truth: −log p of the true label, from the probabilities."""
    stored = arrays(workspace, ID_TRAIN)
    probabilities = stored["residual"].astype(float) + np.eye(N_CLASSES)[stored["label"]]
    own = probabilities[np.arange(len(stored["label"])), stored["label"]]
    fit = run(workspace, quick_params).fit
    assert fit.train_risk == pytest.approx(-np.log(own).mean(), rel=1e-5)
    assert fit.train_accuracy == np.mean(stored["predicted"] == stored["label"])
    held_out = arrays(workspace, CALIBRATION)
    assert fit.calibration_accuracy == np.mean(held_out["predicted"] == held_out["label"])
    assert not fit.is_poor


@pytest.mark.parametrize("place", [ID_TRAIN, CALIBRATION], ids=["training", "calibration"])
def test_a_network_that_fits_either_id_part_badly_is_called_poor(
    place: Artifact, workspace: Workspace, quick_params: Params
) -> None:
    """Every eighth prediction is made a wrong one."""
    stored = arrays(workspace, place)
    right = stored["label"]
    every_eighth = np.arange(len(right)) % 8 == 0
    rewrite(workspace, place, {**stored, "predicted": np.where(every_eighth, (right + 1) % N_CLASSES, right)})
    fit = run(workspace, quick_params, threshold_quantile=0.8).fit
    assert fit.is_poor
    assert min(fit.train_accuracy, fit.calibration_accuracy) == pytest.approx(1 - every_eighth.mean())


def test_calibration_samples_of_a_class_that_the_wild_data_lacks_are_counted_but_not_used(
    workspace: Workspace, quick_params: Params
) -> None:
    stored, held_out = arrays(workspace, WILD), arrays(workspace, CALIBRATION)
    missing = stored["predicted"] == 3
    kept = np.where(missing, np.flatnonzero(~missing)[0], np.arange(len(missing)))
    before = run(workspace, quick_params).candidates.calibration_score
    rewrite(workspace, WILD, {name: values[kept] for name, values in stored.items()})
    result = run(workspace, quick_params)
    unscored = held_out["predicted"] == 3
    assert result.n_unscored == unscored.sum() > 0
    same_class = stored["predicted"][kept[missing][0]]
    untouched = held_out["predicted"][~unscored] != same_class
    np.testing.assert_allclose(result.candidates.calibration_score[untouched], before[~unscored][untouched], rtol=1e-6)
    metrics = json.loads(workspace.find(layout.filter_metrics(OOD, SEED)).path.read_text())
    assert metrics["n_calibration"] == len(held_out["label"])


def test_where_no_calibration_sample_can_be_scored_the_error_says_so(
    workspace: Workspace, quick_params: Params
) -> None:
    held_out = arrays(workspace, CALIBRATION)
    absent = np.full_like(held_out["predicted"], 3)
    rewrite(workspace, CALIBRATION, {**held_out, "predicted": absent})
    stored = arrays(workspace, WILD)
    missing = stored["predicted"] == 3
    kept = np.where(missing, np.flatnonzero(~missing)[0], np.arange(len(missing)))
    rewrite(workspace, WILD, {name: values[kept] for name, values in stored.items()})
    with pytest.raises(ThresholdError, match="no calibration sample is predicted as a class that occurs"):
        run(workspace, quick_params)
