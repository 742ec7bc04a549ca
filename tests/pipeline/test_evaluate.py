"""evaluate: metrics are those of the scores, whose definitions tests/methods has; unseen sets stay apart."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cli import salcli
from helpers.quick import EXPERIMENT, OOD
from helpers.stages import params_of, rewrite, stored, written

from salcli.errors import MissingArtifactError
from salcli.methods.base import InputScore, Known, PostHoc, built_in
from salcli.pipeline import evaluate, extract, prepare
from salcli.pipeline import filter as filter_stage
from salcli.pipeline.loading import classifier, id_representation, ood_test_samples, wild_representation
from salcli.sal.gradients import Representation
from salcli.sal.metrics import ood_metrics
from salcli.store.files import read_arrays
from salcli.store.formats import WILD_SET, read_index, read_samples
from salcli.store.layout import TEST_SCORES, Workspace, prepared_set, unseen_set

POST_HOC = [*built_in(PostHoc), *built_in(InputScore)]
UNSEEN = "photo-patches"
LEFT_OUT = "committee leaves out knn: methods.knn.k is 100000"
EVALUATE_COMMITTEE = ("own", "--ood", OOD, "--method", "committee", "--set", "methods.knn.k=100000")


def run(workspace: Workspace, *methods: str, **values: Any) -> dict[str, np.ndarray]:
    """Scores of each method: those of the ID test set, then those of the OOD test set."""
    evaluate.run(workspace, params_of(workspace, {"evaluate.methods": list(methods), **values}), EXPERIMENT)
    scores = read_arrays(workspace.find(EXPERIMENT.evaluation("scores.h5")), TEST_SCORES)
    return {name: np.concatenate([scores[f"{name}/{side}"] for side in ("id", "ood")]) for name in methods}


def of_test_data(workspace: Workspace) -> dict[str, np.ndarray]:
    parts = [stored(workspace, one) for one in (EXPERIMENT.id_representation("test"), EXPERIMENT.test_representation())]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_rows_that_share_fits_and_scores_are_those_of_each_method_alone(workspace: Workspace) -> None:
    names = ["knn", "sal-plus", "sal-posthoc", "committee"]
    together = run(workspace, *names)
    for name in names:
        np.testing.assert_array_equal(together[name], run(workspace, name)[name])


def test_what_a_fit_has_to_say_is_stored_and_shown_once_by_the_table(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC starts a command for each experiment: there none of them prints it."""
    monkeypatch.chdir(workspace.root)
    assert salcli("evaluate", *EVALUATE_COMMITTEE).stdout.count(LEFT_OUT) == 1
    monkeypatch.setenv("DVC_STAGE", "evaluate@x")
    assert LEFT_OUT not in salcli("evaluate", *EVALUATE_COMMITTEE).stdout
    scratch = Workspace(workspace.root, scratch=True)
    content = json.loads(scratch.find(EXPERIMENT.evaluation("metrics.json")).path.read_text())
    assert [note[: len(LEFT_OUT)] for note in content["committee"]["notes"]] == [LEFT_OUT]
    assert salcli("table", "--scratch").stdout.count(LEFT_OUT) == 1


def test_metrics_are_those_of_the_stored_scores(built: Path) -> None:
    workspace = Workspace(built)
    scores = read_arrays(workspace.find(EXPERIMENT.evaluation("scores.h5")), TEST_SCORES)
    content = json.loads(workspace.find(EXPERIMENT.evaluation("metrics.json")).path.read_text())
    assert content.pop("samples") == {"id_test": 288, "ood_test": 106}
    assert list(content) == ["sal", *POST_HOC]
    logits, labels = of_test_data(workspace)["logits"][:288], of_test_data(workspace)["label"][:288]
    for name, row in content.items():
        metrics = asdict(ood_metrics(scores[f"{name}/id"], scores[f"{name}/ood"]))
        assert {key: row[key] for key in metrics} == metrics
        assert name == "sal" or row["id_accuracy"] == np.mean(logits.argmax(1) == labels)
        if name not in ("ash", "spectral"):  # of 64 features ASH keeps 3; digits are far from the mean wild feature
            assert np.median(scores[f"{name}/id"]) < np.median(scores[f"{name}/ood"])
    roc = workspace.find(EXPERIMENT.evaluation("roc.csv")).path.read_text()
    histogram = workspace.find(EXPERIMENT.evaluation("histogram.csv")).path.read_text()
    assert all(f"\n{name}," in roc and f"\n{name}," in histogram for name in content)


@pytest.mark.parametrize(
    "changes",
    [{}, {"svd": "class-agnostic", "directions": "pool"}, {"reference": "global"}, {"gradient": "predicted-row"}],
    ids=str,
)
def test_sal_posthoc_is_tau_of_the_test_data_as_the_filter_has_it(
    workspace: Workspace, changes: dict[str, Any]
) -> None:
    """tests/pipeline/test_filter.py compares the filter's τ of held-out data with a dense SVD."""
    values = {f"filter.{key}": value for key, value in ({"directions": "wild"} | changes).items()}
    found = run(workspace, "sal-posthoc", **values)["sal-posthoc"]
    if values["filter.directions"] == "wild":  # else v is of the calibration data, too
        rewrite(workspace, EXPERIMENT.id_representation("calibration"), of_test_data(workspace))
        tau = filter_stage.run(workspace, params_of(workspace, values), EXPERIMENT).separation.scores.calibration
    else:
        own, network = params_of(workspace, values), classifier(workspace, EXPERIMENT)
        id_train, calibration = (id_representation(workspace, part, EXPERIMENT) for part in ("train", "calibration"))
        wild = wild_representation(workspace, EXPERIMENT)
        known = Known.of(network, id_train, wild=wild, calibration=calibration)
        content = {name: torch.from_numpy(value) for name, value in of_test_data(workspace).items()}
        tested = Representation(content["feature"], content["logits"], content["label"])
        tau = known.scores(own.filter_score(), tested)[0]
    np.testing.assert_allclose(found, tau, rtol=1e-4, atol=1e-5 * float(tau.max()))


def test_the_row_of_sal_plus_is_the_h_that_the_filter_has(workspace: Workspace) -> None:
    """Of the same fit: the filter lists held-out scores, and evaluate has those of the whole fit, for new samples."""
    found = run(workspace, "sal-plus", "committee")
    params, network = params_of(workspace), classifier(workspace, EXPERIMENT)
    id_train, calibration = (id_representation(workspace, part, EXPERIMENT) for part in ("train", "calibration"))
    wild = wild_representation(workspace, EXPERIMENT)
    known = Known.of(network, id_train, wild=wild, calibration=calibration, seed=EXPERIMENT.seed)
    test = id_representation(workspace, "test", EXPERIMENT)
    for name, score in found.items():
        expected = known.scores(params.method(name), test)[0]
        np.testing.assert_allclose(score[: len(test)], expected, rtol=1e-6, atol=1e-9)
    content = json.loads(workspace.find(EXPERIMENT.evaluation("metrics.json")).path.read_text())
    assert content["sal-plus"]["label"] == "SAL+"
    assert content["sal-plus"]["fpr95"] <= content["committee"]["fpr95"]


def test_a_set_in_the_wild_of_another_experiment_is_tested_on_what_is_kept_out_there(workspace: Workspace) -> None:
    """The two sets may share images, as Tiny-ImageNet crop and resize do."""
    params = params_of(workspace, {"data.ood": [OOD, UNSEEN], "data.test_ood": [OOD]})
    prepare.prepare_set(workspace, params, OOD, artifact=unseen_set(OOD))
    tested = ood_test_samples(workspace, params, EXPERIMENT, OOD).index
    n_id = len(read_samples(workspace.find(prepared_set(params.data.id))))
    wild = read_index(workspace.find(EXPERIMENT.wild), WILD_SET)
    assert not set(tested) & set(wild[wild >= n_id] - n_id)
    assert len(tested) == 106


def test_an_unseen_set_is_tested_on_its_published_test_images_and_has_its_own_files(workspace: Workspace) -> None:
    methods = ["sal", "knn", "sal-posthoc"]
    params = params_of(workspace, {"data.ood": [OOD], "data.test_ood": [UNSEEN], "evaluate.methods": methods})
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
