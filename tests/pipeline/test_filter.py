"""filter: every variant of τ beside a dense decomposition, every rule for a list, and what they promise."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.quick import EXPERIMENT, SEED
from helpers.stages import Arrays, dense_gradients, params_of, probabilities, rewrite, stored, top_eigenvectors
from torch import Tensor

from salcli.conformal.evidence import certificate, p_values, threshold, verdict
from salcli.errors import ParamsError, ThresholdError
from salcli.methods.base import Known
from salcli.methods.sal import FilterParams
from salcli.methods.separation import FilterScores, Separation, filter_scores, separate
from salcli.params.schema import Params, separators
from salcli.pipeline import filter as filter_stage
from salcli.pipeline import theory, train_ood
from salcli.pipeline.filter import Filtered
from salcli.pipeline.loading import classifier, id_representation, wild_representation
from salcli.sal.gradients import Representation
from salcli.sal.seeding import generator
from salcli.store.formats import read_candidates, read_wild_truth
from salcli.store.layout import Workspace

ID_TRAIN, CALIBRATION = (EXPERIMENT.id_representation(part) for part in ("train", "calibration"))
WILD = EXPERIMENT.wild_representation
N_CLASSES = 8
PAPER = {"calibration": "train", "directions": "wild"}
RELEASED = {"calibration": "id-svd", "directions": "wild", "gradient": "predicted-row"}


def run(workspace: Workspace, **changes: Any) -> Filtered:
    """With keys of filter changed; a key with a dot is one of another section."""
    values = {key if "." in key else f"filter.{key}": value for key, value in changes.items()}
    return filter_stage.run(workspace, params_of(workspace, values), EXPERIMENT)


def truth_of(workspace: Workspace) -> np.ndarray:
    is_ood = read_wild_truth(workspace.find(EXPERIMENT.truth))
    assert is_ood is not None
    return is_ood


def metrics_of(workspace: Workspace) -> dict[str, Any]:
    return json.loads(workspace.find(EXPERIMENT.filter_metrics).path.read_text())  # type: ignore[no-any-return]


# -- τ


def slow_tau(workspace: Workspace, params: FilterParams) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the wild data and of the ID data that the threshold is chosen on, from dense matrices."""
    parts = dict(zip(("train", "calibration", "wild"), (ID_TRAIN, CALIBRATION, WILD), strict=True))
    content = {name: stored(workspace, artifact) for name, artifact in parts.items()}
    labels = {name: one["label" if name == "train" else "predicted"] for name, one in content.items()}
    for name in {"predicted": (), "random-wild": ("wild",), "random": ("calibration", "wild")}[params.labels]:
        drawn = generator(SEED, f"random-labels, {name}")
        labels[name] = drawn.integers(N_CLASSES, size=len(labels[name]))
    rows = {name: dense_gradients(one, labels[name], params.gradient) for name, one in content.items()}
    per_class, is_pool = params.reference == "class-conditional", params.directions == "pool"
    of = [rows["train"][labels["train"] == k] if per_class else rows["train"] for k in range(N_CLASSES)]
    means = np.stack([one.mean(axis=0) for one in of])
    rows = {name: one - means[labels[name]] for name, one in rows.items()}
    chosen = "calibration" if params.calibration == "holdout" else "train"
    found = {name: np.zeros(len(labels[name])) for name in ("wild", chosen)}
    for k in range(N_CLASSES) if params.svd == "class-conditional" else [None]:
        own = {name: one if k is None else one[labels[name] == k] for name, one in rows.items()}
        for name, values in found.items():
            spread_of = [name] if params.calibration == "id-svd" else ["wild", *(["calibration"] if is_pool else [])]
            others = np.concatenate([own[one] for one in spread_of])
            second_moment = (
                others.T @ others / len(others) - (own["train"].T @ own["train"] / len(own["train"])) * is_pool
            )
            vectors = top_eigenvectors(second_moment, params.n_vectors)
            values[slice(None) if k is None else labels[name] == k] = (
                np.square(own[name] @ vectors).sum(axis=1) / params.n_vectors
            )
    return found["wild"], found[chosen]


@pytest.mark.parametrize("labels", ["predicted", "random"])
@pytest.mark.parametrize("gradient", ["full", "predicted-row"])
@pytest.mark.parametrize("reference", ["class-conditional", "global"])
@pytest.mark.parametrize("svd", ["class-conditional", "class-agnostic"])
def test_every_variant_of_tau_equals_a_dense_decomposition(
    svd: str, reference: str, gradient: str, labels: str, workspace: Workspace
) -> None:
    is_ood = truth_of(workspace)
    for calibration, directions, n_vectors in (
        ("holdout", "pool", 1),
        ("holdout", "pool", 2),
        ("holdout", "wild", 3),
        ("train", "wild", 1),
        ("id-svd", "wild", 3),
    ):
        options = {"calibration": calibration, "directions": directions, "n_vectors": n_vectors}
        own = "random-wild" if (labels, directions, calibration) == ("random", "wild", "holdout") else labels
        options |= {"svd": svd, "reference": reference, "gradient": gradient, "labels": own, "threshold_quantile": 0.8}
        result = run(workspace, **options)
        wild, chosen = slow_tau(workspace, params_of(workspace, {f"filter.{k}": v for k, v in options.items()}).filter)
        found = read_candidates(workspace.find(EXPERIMENT.candidates))
        np.testing.assert_allclose(found.wild_score, wild, rtol=1e-5, atol=1e-11 * wild.max(), err_msg=str(options))
        np.testing.assert_allclose(found.calibration_score, chosen, rtol=1e-5, atol=1e-11 * chosen.max())
        ranked, n = np.sort(chosen), len(chosen)
        T = {
            "holdout": ranked[-int(0.2 * (n + 1) + 1e-9)],
            "train": ranked[math.ceil(0.8 * n) - 1],
            "id-svd": np.quantile(chosen**0.5, 0.8) ** 2,
        }[calibration]
        assert found.threshold == pytest.approx(T, rel=1e-5)
        np.testing.assert_array_equal(found.index, np.flatnonzero(found.wild_score > found.threshold))
        assert result.errors is not None
        assert result.errors.err_in == pytest.approx(np.mean(found.wild_score[~is_ood] > found.threshold))
        assert result.errors.err_out == pytest.approx(np.mean(found.wild_score[is_ood] <= found.threshold))
        has_evidence = directions == "pool"
        assert (result.separation.verdict is not None) == np.isfinite(found.p_value).all() == has_evidence
        assert has_evidence or "; " in result.sentence


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
        found = run(workspace, **RELEASED, threshold_quantile=quantile).separation.candidates
        np.testing.assert_array_equal(found, authors_filter(head, id_train, wild, quantile))
        assert 0 < len(found) < len(wild["label"])
    assert metrics_of(workspace)["protocol"] == "released code"


# -- the list


def test_a_wild_sample_at_the_threshold_is_no_candidate(workspace: Workspace) -> None:
    """The calibration sample that sets the threshold is put among the wild data, by a score of single samples."""
    options = {"score": "gradnorm", "threshold_quantile": 0.8}
    before = run(workspace, **options).separation
    at_threshold = int(np.flatnonzero(before.scores.calibration.numpy() == before.threshold)[0])
    held_out, wild = stored(workspace, CALIBRATION), stored(workspace, WILD)
    for name in ("logits", "feature", "label", "predicted"):
        wild[name][before.candidates[0]] = held_out[name][at_threshold]
    rewrite(workspace, WILD, wild)
    after = run(workspace, **options).separation
    assert after.scores.wild[before.candidates[0]] == after.threshold == before.threshold
    np.testing.assert_array_equal(after.candidates, before.candidates[1:])


def filter_params(**changes: Any) -> FilterParams:
    usual = {
        "score": "knn", "threshold_quantile": 0.95, "fdr": None, "certified": None, "calibration": "holdout",
        "directions": "pool", "temperature": 1, "svd": "class-conditional", "reference": "class-conditional",
        "n_vectors": 1, "gradient": "full", "labels": "predicted",
    }  # fmt: skip
    return FilterParams(**{**usual, **changes})


def separated(calibration: np.ndarray, wild: np.ndarray, **changes: Any) -> Separation:
    pair = torch.from_numpy(calibration), torch.from_numpy(wild)
    return separate(FilterScores(*pair, pair), filter_params(**changes))


@pytest.mark.parametrize("rule", [{"threshold_quantile": 0.9}, {"fdr": 0.2}, {"certified": 0.6}], ids=str)
@pytest.mark.parametrize("pi", [0.0, 0.2])
def test_each_rule_keeps_its_promise_over_many_deals(rule: dict[str, float], pi: float) -> None:
    rng, is_ood = np.random.default_rng(0), np.arange(200) < 200 * pi
    id_taken, false, broken, n_taken, found = [], [], [], [], []
    for _ in range(400):
        own = separated(rng.normal(size=150), rng.normal(size=200) + 3.5 * is_ood, **rule)
        taken = own.candidates
        n_taken.append(len(taken))
        id_taken.append(np.mean(np.isin(np.flatnonzero(~is_ood), taken)))
        false.append(np.mean(~is_ood[taken]) if len(taken) else 0.0)
        broken.append(len(taken) > 0 and np.mean(is_ood[taken]) < rule.get("certified", 0))
        assert own.verdict is not None
        found.append(own.verdict.kind == "found")
        assert own.verdict.certified <= len(taken)
        assert len(taken) in (0, 200) or own.scores.wild.numpy()[taken].min() > own.threshold
    noise = 3 / math.sqrt(400)
    if "threshold_quantile" in rule and not rule.get("fdr") and not rule.get("certified"):
        assert np.mean(id_taken) == pytest.approx(15 / 151, abs=noise * np.std(id_taken))
    if "fdr" in rule:
        assert np.mean(false) <= 0.2 + noise * np.std(false)
    if "certified" in rule:
        assert np.mean(broken) <= 0.05 + noise * 0.22
    assert np.mean(n_taken) >= 0.5 * 200 * pi
    assert np.mean(found) > 0.95 if pi else np.mean(found) <= 0.025 + noise * 0.16


def test_the_list_of_each_rule_is_its_definition_also_with_ties() -> None:
    rng = np.random.default_rng(1)
    for seed in range(30):
        c, w = rng.integers(0, 12, 80).astype(float), rng.integers(0, 12, 60).astype(float) + 6 * (np.arange(60) < 20)
        by_quantile, by_fdr, by_share = (separated(c, w, **one) for one in ({}, {"fdr": 0.3}, {"certified": 0.5}))
        assert by_quantile.threshold == threshold(c, 0.05)
        p = p_values(c, w)
        ranked = np.sort(p)
        passed = np.flatnonzero(ranked <= 0.3 * np.arange(1, 61) / 60 + 1e-12)
        flagged = p <= ranked[passed[-1]] if len(passed) else np.zeros(60, bool)
        np.testing.assert_array_equal(by_fdr.candidates, np.flatnonzero(flagged), err_msg=str(seed))
        lists = [np.flatnonzero(w > T) for T in np.unique(w) - 0.5]  # equal scores are in or out together
        enough = [own for own in lists if certificate(c, w, own)[-1] >= 0.5 * len(own)]
        assert len(by_share.candidates) == max(map(len, enough), default=0)
        np.testing.assert_array_equal(by_quantile.p_value, p)
        order = np.argsort(-w, kind="stable")
        np.testing.assert_array_equal(by_quantile.certified, certificate(c, w, order))


def test_false_discoveries_are_controlled_by_the_score_that_ranks_the_list() -> None:
    """Of a score with others that certify it, such as SAL+: a sample that these flag may be far down the list."""
    rng, is_ood, false = np.random.default_rng(2), np.arange(200) < 60, []
    for _ in range(200):
        own = torch.from_numpy(rng.normal(size=150)), torch.from_numpy(rng.normal(size=200) + 3 * is_ood)
        other = torch.from_numpy(rng.normal(size=150)), torch.from_numpy(rng.normal(size=200) + 3 * is_ood)
        found = separate(FilterScores(*own, other), filter_params(fdr=0.2))
        np.testing.assert_array_equal(found.p_value, p_values(*(one.numpy() for one in other)))
        false.append(np.mean(~is_ood[found.candidates]) if len(found.candidates) else 0.0)
    assert np.mean(false) <= 0.2 + 3 * np.std(false) / math.sqrt(200)


def test_null_takes_what_is_more_likely_an_outlier_and_the_committee_certifies_it(workspace: Workspace) -> None:
    own, is_ood = run(workspace, score="sal-plus", threshold_quantile=None), truth_of(workspace)
    found = own.separation
    assert found.threshold == 0
    np.testing.assert_array_equal(found.candidates, np.flatnonzero(found.scores.wild > 0))
    assert is_ood[found.candidates].mean() > 0.6
    committee = run(workspace, score="committee").separation
    np.testing.assert_array_equal(found.p_value, committee.p_value)
    assert found.verdict is not None
    assert committee.verdict is not None
    pair = [one.numpy() for one in (committee.scores.calibration, committee.scores.wild)]
    assert found.verdict == verdict(*pair, found.candidates)
    assert found.verdict.share == committee.verdict.share


def test_many_deals_of_real_samples_keep_err_in(workspace: Workspace) -> None:
    """ID samples of all parts are dealt again, by scores that see calibration and wild samples together."""
    network = classifier(workspace, EXPERIMENT)
    id_train, calibration = (
        id_representation(workspace, part, EXPERIMENT).whole() for part in ("train", "calibration")
    )
    wild, is_ood = wild_representation(workspace, EXPERIMENT).whole(), torch.from_numpy(truth_of(workspace))
    parts = calibration, wild.take(torch.nonzero(~is_ood).flatten())
    pool = Representation(
        *(torch.cat([getattr(one, name) for one in parts]) for name in ("feature", "logits", "label"))
    )
    err_in: dict[str, list[float]] = {"sal": [], "committee": []}
    for seed in range(40):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(pool)))
        known = Known.of(network, id_train, wild=pool.take(order[120:]), calibration=pool.take(order[:120]))
        for name, own in err_in.items():
            params = params_of(workspace, {"filter.score": name})
            scores = filter_scores(params.filter_score(), known, params.filter)
            own.append(len(separate(scores, params.filter).candidates) / len(scores.wild))
    for name, own in err_in.items():
        assert np.mean(own) == pytest.approx(6 / 121, abs=3 * np.std(own) / math.sqrt(40)), name


# -- what is written


def test_the_files_hold_what_is_returned_and_the_verdict(workspace: Workspace) -> None:
    result, is_ood = run(workspace, threshold_quantile=0.9), truth_of(workspace)
    found, metrics, own = (
        read_candidates(workspace.find(EXPERIMENT.candidates)),
        metrics_of(workspace),
        result.separation,
    )
    for name, expected in {
        "index": own.candidates, "wild_score": own.scores.wild, "calibration_score": own.scores.calibration,
        "p_value": own.p_value, "certified": own.certified, "threshold": own.threshold, "score_name": "sal",
        "predicted": stored(workspace, WILD)["predicted"],
    }.items():  # fmt: skip
        np.testing.assert_array_equal(getattr(found, name), expected)
    assert result.errors is not None
    assert (metrics["err_in"], metrics["err_out"]) == (result.errors.err_in, result.errors.err_out)
    assert metrics["precision"] == pytest.approx(is_ood[found.index].mean())
    assert (metrics["verdict"], metrics["evidence"]["kind"]) == (result.sentence, "found")
    assert metrics["evidence"]["share"]["low"] <= is_ood.mean() <= metrics["evidence"]["share"]["high"]
    assert f"at least {metrics['evidence']['certified']:,} of them" in result.sentence
    assert metrics["n_candidates"] == len(found.index)


def test_an_empty_list_is_written_and_read(workspace: Workspace) -> None:
    result = run(workspace, fdr=0.001)
    found = read_candidates(workspace.find(EXPERIMENT.candidates))
    assert (found.threshold, len(found.index)) == (math.inf, 0)
    assert result.errors is not None
    assert result.errors.err_in == 0
    assert math.isnan(result.errors.precision)


def test_the_fit_is_read_off_the_logits(workspace: Workspace) -> None:
    """The slow truth: −log p of the true label."""
    content, held_out = stored(workspace, ID_TRAIN), stored(workspace, CALIBRATION)
    own = probabilities(content["logits"])[np.arange(len(content["label"])), content["label"]]
    fit = run(workspace).fit
    assert fit.train_risk == pytest.approx(-np.log(own).mean(), rel=1e-6)
    assert fit.train_accuracy == np.mean(content["predicted"] == content["label"])
    assert fit.calibration_accuracy == np.mean(held_out["predicted"] == held_out["label"])


def test_training_and_theory_go_on_from_any_score(workspace: Workspace, quick_params: Params) -> None:
    found = run(workspace, score="knn").separation.candidates
    assert train_ood.run(workspace, quick_params, EXPERIMENT).n_outliers == len(found)
    checked = theory.run(workspace, quick_params, EXPERIMENT)
    assert checked.candidates.score_name == "knn"
    assert checked.estimated is not None


@pytest.mark.parametrize("score", separators())
def test_every_score_separates(workspace: Workspace, score: str) -> None:
    own = run(workspace, score=score).separation
    assert 0 <= len(own.candidates) < 0.4 * len(own.scores.wild)
    assert (own.verdict is None) == (score == "spectral")


def test_spectral_projects_on_singular_vectors_of_the_wild_features(workspace: Workspace) -> None:
    own = run(workspace, score="spectral", **{"methods.spectral.n_vectors": 3}).separation.scores
    wild, calibration = (stored(workspace, artifact)["feature"].astype(float) for artifact in (WILD, CALIBRATION))
    _, sigma, vectors = np.linalg.svd(wild - wild.mean(axis=0), full_matrices=False)
    for found, features in ((own.wild, wild), (own.calibration, calibration)):
        projected = (features - wild.mean(axis=0)) @ vectors[:3].T
        np.testing.assert_allclose(found, (sigma[:3] * projected**2).mean(axis=1), rtol=1e-6)


# -- bad input


def test_what_cannot_be_done_is_one_message(workspace: Workspace) -> None:
    for changes, message in (
        ({"threshold_quantile": 0.999}, r"0\.999 needs at least 999 calibration samples, got 115"),
        ({"score": "spectral", "fdr": 0.1}, "score spectral has no p-values"),
        ({"score": "knn", "methods.knn.k": 100_000}, r"methods\.knn\.k is 100000"),
    ):
        with pytest.raises((ThresholdError, ParamsError), match=message):
            run(workspace, **changes)
    for changes, message in (
        ({"directions": "wild", "fdr": 0.1}, "fdr needs p-values"),
        ({**PAPER, "score": "committee"}, "use calibration holdout"),
        ({"calibration": "train"}, "use directions wild"),
        ({"fdr": 0.1, "certified": 0.5}, "use one of them"),
        ({"threshold_quantile": None}, "only score sal-plus has"),
        ({"labels": "random-wild", "certified": 0.5}, "certified needs p-values"),
    ):
        with pytest.raises(ParamsError, match=message):
            run(workspace, **changes)


def test_degenerate_scores_are_decided_without_an_error() -> None:
    equal = separated(np.ones(100), np.ones(50))
    assert (len(equal.candidates), equal.verdict.kind) == (0, "nothing found")  # type: ignore[union-attr]
    assert len(separated(np.arange(100.0), np.zeros(0)).candidates) == 0
    with pytest.raises(ThresholdError, match="there are no ID samples to choose T on"):
        separated(np.zeros(0), np.arange(5.0))
