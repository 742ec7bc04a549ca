"""filter: every variant beside a dense SVD, every score beside its definition, and what the threshold promises."""

import json
import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compute import Watched
from helpers.quick import EXPERIMENT, SEED
from helpers.stages import (
    SlowScores,
    dense_gradients,
    params_of,
    probabilities,
    rewrite,
    right_singular_vectors,
    stored,
)

from salcli.errors import BadArtifactError, ParamsError, ThresholdError
from salcli.methods.sal import FilterParams
from salcli.params.schema import Params, separators
from salcli.pipeline import filter as filter_stage
from salcli.pipeline import theory, train_ood
from salcli.pipeline.filter import Filtered, compare
from salcli.pipeline.inputs import classifier, wild_samples
from salcli.sal.metrics import ood_metrics
from salcli.sal.seeding import generator
from salcli.sal.unlabeled import partial_excess
from salcli.store.formats import read_candidates, read_wild_truth
from salcli.store.layout import Artifact, Workspace, prepared_set

ID_TRAIN, CALIBRATION = (EXPERIMENT.id_representation(part) for part in ("train", "calibration"))
WILD = EXPERIMENT.wild_representation
N_CLASSES = 8
POST_HOC = [name for name in separators()[1:] if name not in ("committee", "learned")]


def run(workspace: Workspace, notes: Watched | None = None, **changes: Any) -> Filtered:
    """With keys of filter changed; a key with a dot is one of another section."""
    values = {key if "." in key else f"filter.{key}": value for key, value in changes.items()}
    return filter_stage.run(workspace, params_of(workspace, values), EXPERIMENT, notes)


def truth_of(workspace: Workspace) -> np.ndarray:
    is_ood = read_wild_truth(workspace.find(EXPERIMENT.truth))
    assert is_ood is not None
    return is_ood


# --- τ


def slow_tau(workspace: Workspace, params: FilterParams) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the wild data and of the ID data that the threshold is chosen on, from dense matrices."""
    id_train, calibration, wild = (stored(workspace, artifact) for artifact in (ID_TRAIN, CALIBRATION, WILD))
    labels = {"train": id_train["label"], "calibration": calibration["predicted"], "wild": wild["predicted"]}
    if params.labels == "random":
        for name, content in (("calibration", calibration), ("wild", wild)):
            drawn = generator(SEED, f"random-labels, {name}")
            labels[name] = drawn.integers(N_CLASSES, size=len(content["label"]))
    held_out = params.calibration == "holdout"
    chosen, chosen_label = (calibration, labels["calibration"]) if held_out else (id_train, labels["train"])
    id_rows = dense_gradients(id_train, labels["train"], params.gradient)
    per_class = params.reference == "class-conditional"
    rows_of = [id_rows[labels["train"] == k] if per_class else id_rows for k in range(N_CLASSES)]
    means = np.stack([rows.mean(axis=0) for rows in rows_of])
    wild_rows = dense_gradients(wild, labels["wild"], params.gradient) - means[labels["wild"]]
    chosen_rows = dense_gradients(chosen, chosen_label, params.gradient) - means[chosen_label]
    wild_tau, chosen_tau = np.full(len(wild_rows), np.nan), np.full(len(chosen_rows), np.nan)
    for k in range(N_CLASSES):
        in_wild = labels["wild"] == k if params.svd == "class-conditional" else slice(None)
        in_chosen = chosen_label == k if params.svd == "class-conditional" else slice(None)
        vectors = right_singular_vectors(wild_rows[in_wild], params.n_vectors)
        wild_tau[in_wild] = np.square(wild_rows[in_wild] @ vectors.T).sum(axis=1) / params.n_vectors
        if params.calibration == "id-svd":
            vectors = right_singular_vectors(chosen_rows[in_chosen], params.n_vectors)
        chosen_tau[in_chosen] = np.square(chosen_rows[in_chosen] @ vectors.T).sum(axis=1) / params.n_vectors
    return wild_tau, chosen_tau


@pytest.mark.parametrize("labels", ["predicted", "random"])
@pytest.mark.parametrize("gradient", ["full", "predicted-row"])
@pytest.mark.parametrize("reference", ["class-conditional", "global"])
@pytest.mark.parametrize("svd", ["class-conditional", "class-agnostic"])
def test_every_variant_of_tau_equals_a_dense_svd(
    svd: str, reference: str, gradient: str, labels: str, workspace: Workspace
) -> None:
    is_ood = truth_of(workspace)
    for calibration, n_vectors in product(("holdout", "train", "id-svd"), (1, 3)):
        options = {"calibration": calibration, "svd": svd, "reference": reference, "n_vectors": n_vectors}
        options |= {"gradient": gradient, "labels": labels, "threshold_quantile": 0.8}
        result = run(workspace, **options)
        wild, chosen = slow_tau(workspace, params_of(workspace, {f"filter.{k}": v for k, v in options.items()}).filter)
        found = result.candidates
        np.testing.assert_allclose(found.wild_score, wild, rtol=1e-6, atol=1e-13 * wild.max())
        np.testing.assert_allclose(found.calibration_score, chosen, rtol=1e-6, atol=1e-13 * chosen.max())
        n_below = math.ceil(0.8 * len(chosen))
        assert found.threshold == pytest.approx(np.sort(chosen)[n_below - 1], rel=1e-6)
        np.testing.assert_array_equal(found.index, np.flatnonzero(wild > found.threshold))
        assert result.errors is not None
        assert result.errors.err_in == pytest.approx(np.mean(wild[~is_ood] > found.threshold))
        assert result.errors.err_out == pytest.approx(np.mean(wild[is_ood] <= found.threshold))


def test_more_vectors_than_any_class_has_directions_measure_the_whole_distance(workspace: Workspace) -> None:
    """Where the vectors span all wild gradients of a class, the sum of squares is the squared length."""
    tau = run(workspace, n_vectors=500).candidates.wild_score
    id_train, wild = stored(workspace, ID_TRAIN), stored(workspace, WILD)
    rows = dense_gradients(id_train, id_train["label"])
    means = np.stack([rows[id_train["label"] == k].mean(axis=0) for k in range(N_CLASSES)])
    lengths = np.square(dense_gradients(wild, wild["label"]) - means[wild["label"]]).sum(axis=1)
    np.testing.assert_allclose(500 * tau, lengths, rtol=1e-4, atol=1e-9 * lengths.max())


def test_a_variant_is_filtered_with_its_overrides_into_its_own_folder(workspace: Workspace) -> None:
    params = params_of(workspace, {"variants": ["sal", "sal-2"], "variant.sal-2": {"filter": {"n_vectors": 2}}})
    before = (workspace.root / EXPERIMENT.candidates.path).read_bytes()
    own = filter_stage.run(workspace, params, EXPERIMENT.with_variant("sal-2"))
    assert own.written[0] == workspace.root / f"runs/{SEED}/{EXPERIMENT.ood}/pi-0.1/sal-2/candidates.h5"
    assert (workspace.root / EXPERIMENT.candidates.path).read_bytes() == before
    np.testing.assert_array_equal(own.candidates.wild_score, run(workspace, n_vectors=2).candidates.wild_score)


# --- the threshold


def test_a_higher_quantile_takes_fewer_candidates_by_the_same_scores(workspace: Workspace) -> None:
    results = [run(workspace, threshold_quantile=quantile).candidates for quantile in (0.7, 0.8, 0.9, 0.95)]
    for lower, higher in pairwise(results):
        np.testing.assert_array_equal(lower.wild_score, higher.wild_score)
        assert lower.threshold < higher.threshold
        assert set(higher.index) < set(lower.index)


def test_a_wild_sample_at_the_threshold_is_no_candidate(workspace: Workspace) -> None:
    """The calibration sample that sets the threshold is put among the wild data, by a score of single samples."""
    options = {"score": "gradnorm", "threshold_quantile": 0.8}
    before = run(workspace, **options).candidates
    at_threshold = int(np.flatnonzero(before.calibration_score == before.threshold)[0])
    held_out, wild = stored(workspace, CALIBRATION), stored(workspace, WILD)
    for name in ("logits", "feature", "label", "predicted"):
        wild[name][before.index[0]] = held_out[name][at_threshold]
    rewrite(workspace, WILD, wild)
    after = run(workspace, **options).candidates
    assert after.wild_score[before.index[0]] == after.threshold == before.threshold
    np.testing.assert_array_equal(after.index, before.index[1:])


def test_err_in_is_what_the_quantile_promises_however_held_out_samples_are_split(workspace: Workspace) -> None:
    """Calibration and wild ID samples are exchangeable: split them again and again, and count.

    A new sample is above the r-th smallest of n with probability 1 − r/(n + 1).
    """
    quantile, n_splits = 0.9, 30
    calibration, wild, is_id = stored(workspace, CALIBRATION), stored(workspace, WILD), ~truth_of(workspace)
    as_wild = {**calibration, "label": calibration["predicted"]}
    pool = {name: np.concatenate([as_wild[name], wild[name][is_id]]) for name in wild}
    rng, n, errors = np.random.default_rng(0), len(calibration["label"]), []
    for _ in range(n_splits):
        order = rng.permutation(len(pool["label"]))
        drawn = {name: values.copy() for name, values in wild.items()}
        for name, values in pool.items():
            drawn[name][is_id] = values[order[n:]]
        rewrite(workspace, CALIBRATION, {name: values[order[:n]] for name, values in pool.items()})
        rewrite(workspace, WILD, drawn)
        result = run(workspace, threshold_quantile=quantile)
        assert result.errors is not None
        errors.append(result.errors.err_in)
    standard_error = np.std(errors) / math.sqrt(n_splits)
    assert standard_error < 0.01
    assert np.mean(errors) == pytest.approx(1 - math.ceil(quantile * n) / (n + 1), abs=3 * standard_error)


def test_held_out_samples_are_scored_with_their_predicted_label_not_with_the_true_one(workspace: Workspace) -> None:
    before = run(workspace).candidates
    content = stored(workspace, CALIBRATION)
    rewrite(workspace, CALIBRATION, {**content, "label": (content["label"] + 1) % N_CLASSES})
    np.testing.assert_array_equal(run(workspace).candidates.calibration_score, before.calibration_score)


def test_the_order_of_the_wild_data_does_not_matter(workspace: Workspace) -> None:
    before = run(workspace).candidates
    content = stored(workspace, WILD)
    order = np.random.default_rng(0).permutation(len(content["label"]))
    rewrite(workspace, WILD, {name: values[order] for name, values in content.items()})
    after = run(workspace).candidates
    np.testing.assert_allclose(after.wild_score, before.wild_score[order], rtol=1e-6, atol=1e-13)
    assert after.threshold == pytest.approx(before.threshold, rel=1e-6)


def without_class_3(workspace: Workspace) -> None:
    """No wild sample is predicted as class 3 any more: others take the rows of those."""
    wild = stored(workspace, WILD)
    missing = wild["predicted"] == 3
    kept = np.where(missing, np.flatnonzero(~missing)[0], np.arange(len(missing)))
    rewrite(workspace, WILD, {name: values[kept] for name, values in wild.items()})


def test_calibration_samples_of_a_class_that_the_wild_data_lacks_are_counted_but_not_used(workspace: Workspace) -> None:
    without_class_3(workspace)
    result, held_out = run(workspace), stored(workspace, CALIBRATION)
    unscored = held_out["predicted"] == 3
    assert result.n_unscored == unscored.sum() > 0
    assert len(result.candidates.calibration_score) == (~unscored).sum()
    metrics = json.loads(workspace.find(EXPERIMENT.filter_metrics).path.read_text())
    assert metrics["n_calibration"] == len(held_out["label"])
    rows = held_out["predicted"] == 3
    only_class_3 = {name: np.repeat(values[rows], 3, axis=0) for name, values in held_out.items()}
    rewrite(workspace, CALIBRATION, only_class_3)
    with pytest.raises(ThresholdError, match="no calibration sample is predicted as a class that occurs"):
        run(workspace)


def test_what_is_written_is_what_is_returned(workspace: Workspace) -> None:
    result = run(workspace, threshold_quantile=0.9)
    found = read_candidates(workspace.find(EXPERIMENT.candidates))
    for name in ("index", "score", "predicted", "wild_score", "calibration_score", "threshold", "score_name"):
        np.testing.assert_array_equal(getattr(found, name), getattr(result.candidates, name))
    metrics = json.loads(workspace.find(EXPERIMENT.filter_metrics).path.read_text())
    assert result.errors is not None
    assert (metrics["err_in"], metrics["err_out"]) == (result.errors.err_in, result.errors.err_out)
    assert metrics["n_candidates"] == len(found.index)


# --- how well the classifier fits


def test_the_fit_is_read_off_the_logits(workspace: Workspace) -> None:
    """The slow truth: −log p of the true label."""
    content, held_out = stored(workspace, ID_TRAIN), stored(workspace, CALIBRATION)
    own = probabilities(content["logits"])[np.arange(len(content["label"])), content["label"]]
    fit = run(workspace).fit
    assert fit.train_risk == pytest.approx(-np.log(own).mean(), rel=1e-6)
    assert fit.train_accuracy == np.mean(content["predicted"] == content["label"])
    assert fit.calibration_accuracy == np.mean(held_out["predicted"] == held_out["label"])
    assert not fit.is_poor


@pytest.mark.parametrize("artifact", [ID_TRAIN, CALIBRATION], ids=["training", "calibration"])
def test_a_network_that_fits_either_id_part_badly_is_called_poor(artifact: Artifact, workspace: Workspace) -> None:
    content = stored(workspace, artifact)
    is_wrong = np.arange(len(content["label"])) % 8 == 0
    predicted = np.where(is_wrong, (content["label"] + 1) % N_CLASSES, content["label"])
    rewrite(workspace, artifact, {**content, "predicted": predicted})
    fit = run(workspace, threshold_quantile=0.8).fit
    assert fit.is_poor
    assert min(fit.train_accuracy, fit.calibration_accuracy) == pytest.approx(1 - is_wrong.mean())


# --- any score


@pytest.mark.parametrize("score", POST_HOC)
def test_a_score_separates_as_its_definition_says(workspace: Workspace, score: str) -> None:
    params = params_of(workspace)
    slow = SlowScores(classifier(workspace, EXPERIMENT), stored(workspace, ID_TRAIN), params)
    found, rows = run(workspace, score=score).candidates, slice(0, 30)
    images = wild_samples(workspace, params, EXPERIMENT).read(rows)
    expected = -np.array(slow(score, stored(workspace, WILD)["feature"][rows], images))
    np.testing.assert_allclose(found.wild_score[rows], expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    assert found.score_name == score
    assert found.threshold == np.sort(found.calibration_score)[math.ceil(0.95 * len(found.calibration_score)) - 1]
    np.testing.assert_array_equal(found.index, np.flatnonzero(found.wild_score > found.threshold))


@pytest.mark.parametrize("score", ["sal", "energy", "odin"])
def test_calibration_on_training_data_changes_the_threshold_alone(workspace: Workspace, score: str) -> None:
    usual, other = (run(workspace, score=score, calibration=name).candidates for name in ("holdout", "train"))
    np.testing.assert_array_equal(usual.wild_score, other.wild_score)
    assert len(usual.calibration_score) == len(stored(workspace, CALIBRATION)["label"])
    assert len(other.calibration_score) == len(stored(workspace, ID_TRAIN)["label"])
    assert usual.threshold != other.threshold


def test_a_training_sample_is_not_its_own_neighbour(workspace: Workspace) -> None:
    changes = {"methods.knn.k": 3}
    found = run(workspace, score="knn", calibration="train", **changes).candidates
    content = stored(workspace, ID_TRAIN)
    slow = SlowScores(classifier(workspace, EXPERIMENT), content, params_of(workspace, changes))
    for row in (0, 5, 77):
        others = np.delete(content["feature"].astype(float), row, axis=0)
        expected = -slow.knn(content["feature"][row].astype(float), others)
        assert found.calibration_score[row] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("score", "reads"), [("sal", 0), ("energy", 1), ("odin", 2)])
def test_only_what_a_score_needs_is_read(workspace: Workspace, score: str, reads: int) -> None:
    """Representations for τ; the classifier too for the others; images too for ODIN."""
    before = run(workspace, score=score).candidates
    if reads < 2:
        (workspace.root / prepared_set("digits-0-7").path).unlink()
    np.testing.assert_array_equal(run(workspace, score=score).candidates.index, before.index)


@pytest.mark.parametrize("score", ["energy", "knn"])
def test_training_and_theory_go_on_from_any_score(workspace: Workspace, quick_params: Params, score: str) -> None:
    found = run(workspace, score=score).candidates
    assert train_ood.run(workspace, quick_params, EXPERIMENT).n_outliers == len(found.index)
    checked = theory.run(workspace, quick_params, EXPERIMENT)
    assert checked.candidates.score_name == score
    assert checked.estimated is not None
    assert checked.mixture.score != "τ"


# --- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "energy", "calibration": "id-svd"}, "singular vectors, which only score sal has, not energy; use"),
        ({"score": "auto", "calibration": "train"}, "score auto needs calibration holdout"),
        ({"score": "enrgy"}, "did you mean energy?"),
        ({"score": "sal-posthoc"}, "no score is called sal-posthoc"),
        ({"score": "knn", "methods.knn.k": 463}, "methods.knn.k is 463, but there are only 462 ID training samples"),
        ({"score": "knn", "methods.knn.k": 462, "calibration": "train"}, "there are only 461 other ID training"),
        ({"score": "vim", "methods.vim.dim": 64}, r"methods\.vim\.dim is 64, but must be less than the 64 features"),
    ],
    ids=str,
)
def test_params_that_cannot_work_are_refused(workspace: Workspace, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message.replace("?", r"\?")):
        run(workspace, **changes)


def test_representations_of_another_classifier_are_refused(workspace: Workspace) -> None:
    made_from = {"id": "x", "classifier": "another", "wild": "x"}
    rewrite(workspace, ID_TRAIN, stored(workspace, ID_TRAIN), made_from=made_from)
    with pytest.raises(BadArtifactError, match="was made with another"):
        run(workspace)


def test_scores_that_are_no_numbers_are_refused_and_features_without_spread_are_mentioned(workspace: Workspace) -> None:
    content = stored(workspace, ID_TRAIN)
    content["feature"][:, 20:] = 0
    rewrite(workspace, ID_TRAIN, content)
    notes = Watched()
    run(workspace, notes, score="mahalanobis", threshold_quantile=0.5)
    (note,) = notes.notes
    assert "spread in 20 of 64 directions" in note
    content = stored(workspace, WILD)
    content["logits"][3] = np.nan
    rewrite(workspace, WILD, content)
    with pytest.raises(ThresholdError, match="energy gives NaN or infinity for 1 of"):
        run(workspace, score="energy")


# --- auto


def test_auto_tries_every_score_but_odin_with_its_own_threshold(workspace: Workspace) -> None:
    result = run(workspace, score="auto")
    names = [trial.score for trial in result.trials]
    assert names == ["sal", "sal-T100", *(name for name in POST_HOC if name != "odin"), "committee", "learned"]
    is_ood = truth_of(workspace)
    metrics = json.loads(workspace.find(EXPERIMENT.filter_metrics).path.read_text())
    assert metrics["score"] == result.candidates.score_name
    for trial in result.trials:
        changes = {"score": "sal", "temperature": 100} if trial.score == "sal-T100" else {"score": trial.score}
        alone = run(workspace, **changes)
        own = alone.candidates
        assert own.score_name == trial.score
        assert (trial.threshold, trial.n_candidates) == (own.threshold, len(own.index))
        scores = torch.from_numpy(own.calibration_score), torch.from_numpy(own.wild_score)
        assert trial.excess == pytest.approx(partial_excess(*scores))
        assert metrics["auto"][trial.score]["excess"] == trial.excess
        assert trial.errors == alone.errors
        assert trial.auroc == ood_metrics(-own.wild_score[~is_ood], -own.wild_score[is_ood]).auroc
        if trial.score == result.candidates.score_name:
            np.testing.assert_array_equal(own.index, result.candidates.index)


def test_auto_does_not_look_at_the_truth_and_repeats_itself(workspace: Workspace) -> None:
    before = run(workspace, score="auto")
    content = before.written[0].read_bytes()
    (workspace.root / EXPERIMENT.truth.path).unlink()
    after = run(workspace, score="auto")
    decisive = [[(t.score, t.threshold, t.excess, t.beaten) for t in one.trials] for one in (before, after)]
    assert decisive[0] == decisive[1]
    assert all(trial.errors is None for trial in after.trials)
    assert after.written[0].read_bytes() == content


def test_auto_leaves_out_a_score_that_cannot_be_computed_and_says_so(workspace: Workspace) -> None:
    notes = Watched()
    found = run(workspace, notes, score="auto", **{"methods.knn.k": 100_000})
    assert "knn" not in [trial.score for trial in found.trials]
    assert any(note.startswith("auto leaves out knn: methods.knn.k is 100000") for note in notes.notes)


def test_the_comparison_takes_a_surely_better_score_keeps_the_committee_among_equals_and_leaves_out_drift() -> None:
    ramp, ranks = torch.linspace(0, 1, 400).double(), (np.arange(400), np.arange(400))
    better = torch.where(ramp > 0.8, ramp + 1, ramp)
    scores = {"committee": (ramp, ramp), "all": (ramp + 5, ramp), "some": (better, ramp)}
    chosen, trials = compare(scores, ranks, 0.95, EXPERIMENT)
    assert chosen == "some"
    assert [trial.n_candidates for trial in trials] == [20, 400, 80]
    chosen, trials = compare({**scores, "moved": (ramp.sqrt(), ramp)}, ranks, 0.95, EXPERIMENT)
    assert chosen == "some"
    assert trials[3].excess > trials[2].excess
    equal = {"twin": (better, ramp), "committee": (better, ramp)}
    assert compare(equal, ranks, 0.95, EXPERIMENT)[0] == "committee"


# --- fdr


def test_fdr_takes_what_benjamini_and_hochberg_allow_and_says_when_that_is_nothing(workspace: Workspace) -> None:
    found = run(workspace, fdr=0.3).candidates
    assert found.threshold in found.calibration_score
    p = np.array(
        [(1 + (found.calibration_score >= score).sum()) / (1 + len(found.calibration_score)) for score in found.score]
    )
    assert p.max() <= 0.3 * len(p) / len(found.wild_score) + 1e-12
    with pytest.raises(
        ThresholdError, match=r"filter.fdr 0.001 finds no candidates: p-values of .* use more calibration"
    ):
        run(workspace, fdr=0.001)


def test_the_verdict_and_the_precision_are_written(workspace: Workspace) -> None:
    result, is_ood = run(workspace), truth_of(workspace)
    metrics = json.loads(workspace.find(EXPERIMENT.filter_metrics).path.read_text())
    assert metrics["verdict"] == result.sentence
    assert "more than ID data alone would give" in result.sentence
    assert metrics["precision"] == pytest.approx(is_ood[result.candidates.index].mean())
    assert metrics["estimated"]["precision"] == pytest.approx(metrics["precision"], abs=0.25)
