"""evaluate: every method's score on the test data is what its definition says; unseen sets stay apart."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers.quick import EXPERIMENT, OOD
from helpers.stages import (
    SlowScores,
    dense_gradients,
    params_of,
    rewrite,
    right_singular_vectors,
    stored,
    written,
)

from salcli.errors import BadArtifactError, MissingArtifactError
from salcli.methods.base import InputScore, PostHoc, built_in
from salcli.params.schema import Params
from salcli.pipeline import evaluate, extract, prepare
from salcli.pipeline.inputs import classifier, id_samples, ood_test_samples
from salcli.sal.metrics import ood_metrics
from salcli.store.files import read_arrays
from salcli.store.formats import read_samples, read_wild_set
from salcli.store.layout import Workspace, prepared_set, unseen_set

POST_HOC = [*built_in(PostHoc), *built_in(InputScore)]
MADE_OF_OTHERS = ("sal-posthoc", "committee", "separator")
ID_TRAIN, WILD = EXPERIMENT.id_representation("train"), EXPERIMENT.wild_representation
N_CLASSES = 8
UNSEEN = "photo-patches"


def run(workspace: Workspace, *methods: str, **values: Any) -> dict[str, np.ndarray]:
    """Scores of each method: those of the ID test set, then those of the OOD test set."""
    evaluate.run(workspace, params_of(workspace, {"evaluate.methods": list(methods), **values}), EXPERIMENT)
    scores = read_arrays(workspace.find(EXPERIMENT.evaluation("scores.h5")), evaluate.SCORES)
    return {name: np.concatenate([scores[f"{name}/{side}"] for side in ("id", "ood")]) for name in methods}


def of_test_data(workspace: Workspace) -> dict[str, np.ndarray]:
    parts = [stored(workspace, one) for one in (EXPERIMENT.id_representation("test"), EXPERIMENT.test_representation())]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# --- all methods


def test_every_post_hoc_score_is_its_definition(workspace: Workspace) -> None:
    """On some ID and some OOD test samples, from features and from images."""
    params, methods = params_of(workspace), [name for name in POST_HOC if name not in MADE_OF_OTHERS]
    slow = SlowScores(classifier(workspace, EXPERIMENT), stored(workspace, ID_TRAIN), params)
    parts = id_samples(workspace, params, "test", EXPERIMENT).rows, ood_test_samples(workspace, params, EXPERIMENT)
    images, features = torch.cat([part.read(slice(None)) for part in parts]), of_test_data(workspace)["feature"]
    rows = [0, 5, 99, 287, 288, 300, len(features) - 1]
    for name, found in run(workspace, *methods).items():
        expected = np.array(slow(name, features[rows], images[rows]))
        np.testing.assert_allclose(found[rows], expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def test_metrics_are_those_of_the_stored_scores(workspace: Workspace, quick_params: Params) -> None:
    done = evaluate.run(workspace, quick_params, EXPERIMENT)
    assert list(done.metrics) == ["sal", *POST_HOC]
    scores = read_arrays(workspace.find(EXPERIMENT.evaluation("scores.h5")), evaluate.SCORES)
    content = json.loads(workspace.find(EXPERIMENT.evaluation("metrics.json")).path.read_text())
    assert content["samples"] == {"id_test": 288, "ood_test": 106}
    logits, labels = of_test_data(workspace)["logits"][:288], of_test_data(workspace)["label"][:288]
    for name, metrics in done.metrics.items():
        assert metrics == ood_metrics(scores[f"{name}/id"], scores[f"{name}/ood"])
        assert content[name]["fpr95"] == metrics.fpr95
        assert name == "sal" or content[name]["id_accuracy"] == np.mean(logits.argmax(1) == labels)
        if name != "ash":  # of 64 features it keeps 3, and its exponential prefers undecided samples
            assert np.median(scores[f"{name}/id"]) > np.median(scores[f"{name}/ood"])
    roc = workspace.find(EXPERIMENT.evaluation("roc.csv")).path.read_text()
    histogram = workspace.find(EXPERIMENT.evaluation("histogram.csv")).path.read_text()
    assert all(f"\n{name}," in roc and f"\n{name}," in histogram for name in done.metrics)


# --- SAL, post hoc


def slow_posthoc(workspace: Workspace, params: Params) -> np.ndarray:
    """Dense gradients of training, wild and test data, numpy's SVD, class by class."""
    own, test = params.filter, of_test_data(workspace)
    id_train, wild, label = stored(workspace, ID_TRAIN), stored(workspace, WILD), test["predicted"]
    id_rows, wild_rows = (dense_gradients(one, one["label"], own.gradient) for one in (id_train, wild))
    test_rows = dense_gradients(test, label, own.gradient)
    per_class = np.stack([id_rows[id_train["label"] == k].mean(axis=0) for k in range(N_CLASSES)])
    means = per_class if own.reference == "class-conditional" else np.repeat(id_rows.mean(0)[None], N_CLASSES, 0)
    scores = np.zeros(len(label))
    for k in range(N_CLASSES):
        rows = wild["label"] == k if own.svd == "class-conditional" else slice(None)
        vectors = right_singular_vectors(wild_rows[rows] - means[wild["label"]][rows], own.n_vectors)
        is_own = label == k
        scores[is_own] = -np.square((test_rows[is_own] - means[k]) @ vectors.T).sum(axis=1) / own.n_vectors
    return scores


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"filter.svd": "class-agnostic"},
        {"filter.reference": "global"},
        {"filter.n_vectors": 3},
        {"filter.gradient": "predicted-row"},
        {"filter.score": "gradnorm"},
    ],
    ids=str,
)
def test_sal_posthoc_is_minus_tau_of_the_test_data_as_the_filter_has_it(
    workspace: Workspace, changes: dict[str, Any]
) -> None:
    expected = slow_posthoc(workspace, params_of(workspace, changes))
    found = run(workspace, "sal-posthoc", **changes)["sal-posthoc"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_missing_or_foreign_representation_is_refused_by_methods_that_need_it(workspace: Workspace) -> None:
    rewrite(workspace, WILD, stored(workspace, WILD), made_from={"classifier": "x", "wild": "another"})
    with pytest.raises(BadArtifactError, match=r"wild\.h5 was made with another"):
        run(workspace, "sal-posthoc")
    run(workspace, "msp", "knn")
    (workspace.root / ID_TRAIN.path).unlink()
    with pytest.raises(MissingArtifactError, match=r"id-train\.h5 does not exist yet; make it with: salcli extract-g"):
        run(workspace, "knn")


# --- unseen sets


def test_a_set_in_the_wild_of_another_experiment_is_tested_on_what_is_kept_out_there(workspace: Workspace) -> None:
    """The two sets may share images, as Tiny-ImageNet crop and resize do."""
    params = params_of(workspace, {"data.ood": [OOD, UNSEEN], "data.test_ood": [OOD]})
    prepare.prepare_set(workspace, params, OOD, artifact=unseen_set(OOD))
    tested = ood_test_samples(workspace, params, EXPERIMENT, OOD).index
    n_id = len(read_samples(workspace.find(prepared_set(params.data.id))))
    wild = read_wild_set(workspace.find(EXPERIMENT.wild)).source
    assert not set(tested) & set(wild[wild >= n_id] - n_id)
    assert len(tested) == 106


def test_an_unseen_set_is_tested_on_its_published_test_images_and_has_its_own_files(workspace: Workspace) -> None:
    params = params_of(workspace, {"data.ood": [OOD], "data.test_ood": [UNSEEN]})
    prepare.prepare_set(workspace, params, UNSEEN, artifact=unseen_set(UNSEEN))
    is_test = read_samples(workspace.find(unseen_set(UNSEEN))).is_test
    rows = ood_test_samples(workspace, params, EXPERIMENT, UNSEEN)
    np.testing.assert_array_equal(rows.index, np.flatnonzero(is_test))
    with pytest.raises(MissingArtifactError, match=f"salcli extract-grads unseen --unseen {UNSEEN} --ood {OOD}"):
        evaluate.run(workspace, params, EXPERIMENT, unseen=UNSEEN)
    extract.run_unseen(workspace, params, EXPERIMENT, UNSEEN)
    before = written(workspace, EXPERIMENT.evaluation("metrics.json"))
    done = evaluate.run(workspace, params, EXPERIMENT, unseen=UNSEEN)
    assert written(workspace, EXPERIMENT.evaluation("metrics.json")) == before
    assert (done.test_set, done.n_id_test, done.n_ood_test) == (UNSEEN, 288, 600)
    assert workspace.find(EXPERIMENT.evaluation("metrics.json", UNSEEN)).path.is_file()
