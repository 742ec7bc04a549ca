"""filter: every variant beside a dense SVD, and what the threshold promises."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.quick import EXPERIMENT, SEED
from helpers.stages import Arrays, dense_gradients, params_of, probabilities, rewrite, right_singular_vectors, stored
from torch import Tensor

from salcli.errors import ThresholdError
from salcli.methods.sal import PREFERRED, FilterParams
from salcli.params.schema import Params, separators
from salcli.pipeline import filter as filter_stage
from salcli.pipeline import theory, train_ood
from salcli.pipeline.filter import Filtered
from salcli.pipeline.loading import classifier
from salcli.sal.metrics import ood_metrics
from salcli.sal.score_choice import choose_score, partial_excess
from salcli.sal.seeding import generator
from salcli.store.formats import read_candidates, read_wild_truth
from salcli.store.layout import Workspace

ID_TRAIN, CALIBRATION = (EXPERIMENT.id_representation(part) for part in ("train", "calibration"))
WILD = EXPERIMENT.wild_representation
N_CLASSES = 8
POST_HOC = [name for name in separators()[1:] if name not in ("committee", "learned")]


def run(workspace: Workspace, **changes: Any) -> Filtered:
    """With keys of filter changed; a key with a dot is one of another section."""
    values = {key if "." in key else f"filter.{key}": value for key, value in changes.items()}
    return filter_stage.run(workspace, params_of(workspace, values), EXPERIMENT)


def truth_of(workspace: Workspace) -> np.ndarray:
    is_ood = read_wild_truth(workspace.find(EXPERIMENT.truth))
    assert is_ood is not None
    return is_ood


def metrics_of(workspace: Workspace) -> dict[str, Any]:
    return json.loads(workspace.find(EXPERIMENT.filter_metrics).path.read_text())


def slow_tau(workspace: Workspace, params: FilterParams) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the wild data and of the ID data that the threshold is chosen on, from dense matrices."""
    id_train, calibration, wild = (stored(workspace, artifact) for artifact in (ID_TRAIN, CALIBRATION, WILD))
    labels = {"train": id_train["label"], "calibration": calibration["predicted"], "wild": wild["predicted"]}
    if params.labels != "predicted":
        for name, content in (("calibration", calibration), ("wild", wild)):
            if params.labels == "random-wild" and name != "wild":
                continue
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
    for calibration, n_vectors in (("holdout", 1), ("holdout", 3), ("train", 1), ("id-svd", 3)):
        options = {"calibration": calibration, "svd": svd, "reference": reference, "n_vectors": n_vectors}
        own = "random-wild" if (labels, calibration, n_vectors) == ("random", "holdout", 3) else labels
        options |= {"gradient": gradient, "labels": own, "threshold_quantile": 0.8}
        result = run(workspace, **options)
        wild, chosen = slow_tau(workspace, params_of(workspace, {f"filter.{k}": v for k, v in options.items()}).filter)
        found = result.candidates
        np.testing.assert_allclose(found.wild_score, wild, rtol=1e-6, atol=1e-13 * wild.max())
        np.testing.assert_allclose(found.calibration_score, chosen, rtol=1e-6, atol=1e-13 * chosen.max())
        n_below = math.ceil(0.8 * len(chosen))
        threshold = np.sort(chosen)[n_below - 1] if calibration != "id-svd" else np.quantile(chosen**0.5, 0.8) ** 2
        assert found.threshold == pytest.approx(threshold, rel=1e-6)
        np.testing.assert_array_equal(found.index, np.flatnonzero(wild > found.threshold))
        assert result.errors is not None
        assert result.errors.err_in == pytest.approx(np.mean(wild[~is_ood] > found.threshold))
        assert result.errors.err_out == pytest.approx(np.mean(wild[is_ood] <= found.threshold))


def authors_filter(head: torch.nn.Linear, id_train: Arrays, wild: Arrays, quantile: float) -> np.ndarray:
    """Which wild samples the authors' main.py takes: from what it does, step by step, with gradients by autograd.

    Of each gradient w.r.t. the last weight only the row of its label (ID: true, wild: predicted) is used, centred by
    the mean row of that class in the ID data, and projected on the top singular vector of its own set and class. T is
    numpy's quantile of the absolute projections of all ID samples; outliers are above it.
    """

    def loss(weight: Tensor, feature: Tensor, label: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(feature @ weight.T + head.bias.double(), label)

    def rows(content: Arrays, labels: np.ndarray) -> np.ndarray:
        features, classes = torch.from_numpy(content["feature"]).double(), torch.from_numpy(labels)
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(head.weight.double(), features, classes)
        return gradients[torch.arange(len(labels)), classes].detach().numpy()

    id_rows, wild_rows = rows(id_train, id_train["label"]), rows(wild, wild["predicted"])
    scores = []
    for own, labels in ((id_rows, id_train["label"]), (wild_rows, wild["predicted"])):
        found = np.zeros(len(own))
        for k in np.unique(labels):
            centred = own[labels == k] - id_rows[id_train["label"] == k].mean(axis=0)
            _, _, vectors = np.linalg.svd(centred, full_matrices=False)
            found[labels == k] = abs(centred @ vectors[0])
        scores.append(found)
    return np.flatnonzero(scores[1] > np.quantile(scores[0], quantile))


def test_the_released_protocol_takes_the_candidates_of_the_authors_code(workspace: Workspace) -> None:
    head = classifier(workspace, EXPERIMENT).head
    id_train, wild = stored(workspace, ID_TRAIN), stored(workspace, WILD)
    for quantile in (0.95, 0.9, 0.83):
        released = {"calibration": "id-svd", "gradient": "predicted-row", "threshold_quantile": quantile}
        found = run(workspace, **released).candidates.index
        np.testing.assert_array_equal(found, authors_filter(head, id_train, wild, quantile))
        assert 0 < len(found) < len(wild["label"])
    assert metrics_of(workspace)["protocol"] == "released code"


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


def test_calibration_samples_of_a_class_that_the_wild_data_lacks_are_counted_but_not_used(workspace: Workspace) -> None:
    wild, held_out = stored(workspace, WILD), stored(workspace, CALIBRATION)
    missing, unscored = wild["predicted"] == 3, held_out["predicted"] == 3
    kept = np.where(missing, np.flatnonzero(~missing)[0], np.arange(len(missing)))
    rewrite(workspace, WILD, {name: values[kept] for name, values in wild.items()})
    result = run(workspace)
    assert result.n_unscored == unscored.sum() > 0
    assert len(result.candidates.calibration_score) == (~unscored).sum()
    assert metrics_of(workspace)["n_calibration"] == len(held_out["label"])
    rewrite(workspace, CALIBRATION, {name: np.repeat(values[unscored], 3, axis=0) for name, values in held_out.items()})
    with pytest.raises(ThresholdError, match="no calibration sample is predicted as a class that occurs"):
        run(workspace)


def test_the_files_hold_what_is_returned_and_the_verdict(workspace: Workspace) -> None:
    result, is_ood = run(workspace, threshold_quantile=0.9), truth_of(workspace)
    found, metrics = read_candidates(workspace.find(EXPERIMENT.candidates)), metrics_of(workspace)
    for name in ("index", "score", "predicted", "wild_score", "calibration_score", "threshold", "score_name"):
        np.testing.assert_array_equal(getattr(found, name), getattr(result.candidates, name))
    assert result.errors is not None
    assert (metrics["err_in"], metrics["err_out"]) == (result.errors.err_in, result.errors.err_out)
    assert metrics["verdict"] == result.sentence
    assert metrics["precision"] == pytest.approx(is_ood[found.index].mean())
    assert metrics["estimated"]["precision"] == pytest.approx(metrics["precision"], abs=0.25)


def test_the_fit_is_read_off_the_logits(workspace: Workspace) -> None:
    """The slow truth: −log p of the true label."""
    content, held_out = stored(workspace, ID_TRAIN), stored(workspace, CALIBRATION)
    own = probabilities(content["logits"])[np.arange(len(content["label"])), content["label"]]
    fit = run(workspace).fit
    assert fit.train_risk == pytest.approx(-np.log(own).mean(), rel=1e-6)
    assert fit.train_accuracy == np.mean(content["predicted"] == content["label"])
    assert fit.calibration_accuracy == np.mean(held_out["predicted"] == held_out["label"])


def test_training_and_theory_go_on_from_any_score(workspace: Workspace, quick_params: Params) -> None:
    found = run(workspace, score="knn").candidates
    assert train_ood.run(workspace, quick_params, EXPERIMENT).n_outliers == len(found.index)
    checked = theory.run(workspace, quick_params, EXPERIMENT)
    assert checked.candidates.score_name == "knn"
    assert checked.estimated is not None
    assert checked.mixture.score != "τ"


def test_auto_tries_every_score_but_odin_with_its_own_threshold_and_without_the_truth(workspace: Workspace) -> None:
    result = run(workspace, score="auto")
    content = result.written[0].read_bytes()
    names = [trial.score for trial in result.trials]
    single = [name for name in POST_HOC if name not in ("odin", "spectral")]
    assert names == ["sal", "sal-T100", *single, "committee", "blend"]
    is_ood = truth_of(workspace)
    metrics = metrics_of(workspace)
    assert metrics["score"] == result.candidates.score_name
    assert result.candidates.score_name == "blend"
    for trial in result.trials[:-1]:
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
    (workspace.root / EXPERIMENT.truth.path).unlink()
    blind = run(workspace, score="auto")
    decisive = [[(t.score, t.threshold, t.excess, t.beaten) for t in one.trials] for one in (result, blind)]
    assert decisive[0] == decisive[1]
    assert all(trial.errors is None for trial in blind.trials)
    assert blind.written[0].read_bytes() == content


def test_spectral_projects_on_singular_vectors_of_the_wild_features(workspace: Workspace) -> None:
    found = run(workspace, score="spectral", **{"methods.spectral.n_vectors": 3}).candidates
    wild, calibration = (stored(workspace, artifact)["feature"].astype(float) for artifact in (WILD, CALIBRATION))
    _, sigma, vectors = np.linalg.svd(wild - wild.mean(axis=0), full_matrices=False)
    for own, features in ((found.wild_score, wild), (found.calibration_score, calibration)):
        projected = (features - wild.mean(axis=0)) @ vectors[:3].T
        np.testing.assert_allclose(own, (sigma[:3] * projected**2).mean(axis=1), rtol=1e-6)


def test_auto_leaves_out_a_score_that_cannot_be_computed_and_says_so(workspace: Workspace) -> None:
    found = run(workspace, score="auto", **{"methods.knn.k": 100_000})
    assert "knn" not in [trial.score for trial in found.trials]
    assert any(note.startswith("auto leaves out knn: methods.knn.k is 100000") for note in found.notes)
    assert json.loads(workspace.find(EXPERIMENT.filter_metrics).path.read_text())["notes"] == found.notes


def test_auto_takes_the_blend_or_what_has_not_drifted() -> None:
    ramp, ranks = torch.linspace(0, 1, 400).double(), (np.arange(400), np.arange(400))
    some, moved = torch.where(ramp > 0.8, ramp + 1, ramp), ramp.sqrt()
    scores = {"energy": (some, ramp), "committee": (ramp, ramp), "blend": (some, ramp)}
    chosen, trials = choose_score(scores, ranks, 0.95, PREFERRED, np.random.default_rng(0))
    assert chosen == "blend"
    assert [trial.n_candidates for trial in trials] == [80, 20, 80]
    without_blend = {**scores, "blend": (moved, ramp)}
    assert choose_score(without_blend, ranks, 0.95, PREFERRED, np.random.default_rng(0))[0] == "committee"
    drifted = {"committee": (moved, ramp), "blend": (ramp + 5, ramp), "msp": (some, ramp)}
    assert choose_score(drifted, ranks, 0.95, PREFERRED, np.random.default_rng(0))[0] == "msp"


def test_fdr_takes_what_benjamini_and_hochberg_allow_and_says_when_that_is_nothing(workspace: Workspace) -> None:
    found = run(workspace, fdr=0.3).candidates
    assert found.threshold in found.calibration_score
    reference = found.calibration_score
    p = np.array([(1 + (reference >= score).sum()) / (1 + len(reference)) for score in found.score])
    assert p.max() <= 0.3 * len(p) / len(found.wild_score) + 1e-12
    with pytest.raises(ThresholdError, match=r"filter.fdr 0.001 finds no candidates: p-values of .* use more"):
        run(workspace, fdr=0.001)
