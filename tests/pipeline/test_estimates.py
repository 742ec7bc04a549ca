"""Held-out wild data: kept out of filter and training, scored by every method, and shown as estimates."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cli import refused, salcli, shown
from helpers.detectors import id_images
from helpers.quick import EXPERIMENT
from helpers.stages import params_of, written

from salcli.conformal.evidence import share_of_outliers
from salcli.conformal.resampling import estimated as estimated_from
from salcli.data.splits import hold_out
from salcli.errors import SalError
from salcli.methods.base import Head, Known
from salcli.pipeline import evaluate, extract, prepare, theory, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.pipeline.loading import classifier, id_representation
from salcli.report.results import Results, results_view
from salcli.sal.gradients import Representation
from salcli.store.files import read_arrays
from salcli.store.formats import OOD_TEST, WILD_HOLDOUT, WILD_SET, read_index, read_wild_truth, write_wild_truth
from salcli.store.layout import TEST_SCORES, Workspace

HOLDOUT = {"data.wild_holdout": 0.4, "train_ood.epochs": 1, "evaluate.methods": ["sal", "knn", "sal-plus", "odin"]}


def test_copies_are_held_out_together() -> None:
    equal = np.arange(100) % 40  # 100 samples, 40 contents
    is_held = hold_out(100, 0.2, seed=0, equal=equal)
    assert not {*equal[~is_held]} & {*equal[is_held]}
    assert abs(is_held.sum() - 20) <= 3
    assert (is_held == hold_out(100, 0.2, seed=0, equal=equal)).all()
    assert (is_held != hold_out(100, 0.2, seed=1, equal=equal)).any()
    for share in (0.001, 0.999):
        with pytest.raises(
            SalError, match=r"data\.wild_holdout 0\.\d+ of 100 wild samples \(40 different ones\) is (none|all)"
        ):
            hold_out(100, share, 0, equal)


@pytest.fixture(scope="module")
def estimated(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A project with held-out wild data, where every stage has run."""
    workspace = Workspace(shutil.copytree(built, tmp_path_factory.mktemp("held out") / "project"))
    params = params_of(workspace, HOLDOUT)
    prepare.prepare_wild(workspace, params.data, EXPERIMENT)
    for stage in (extract.run_wild, filter_stage.run, train_ood.run, evaluate.run):
        stage(workspace, params, EXPERIMENT)  # type: ignore[operator]
    return workspace


@pytest.fixture
def project(estimated: Workspace, tmp_path: Path) -> Workspace:
    return Workspace(shutil.copytree(estimated.root, tmp_path / "project"))


def estimates(workspace: Workspace) -> dict[str, Any]:
    return json.loads(workspace.find(EXPERIMENT.estimates).path.read_text())  # type: ignore[no-any-return]


def test_the_held_out_part_is_what_the_wild_set_lacks(built: Path, estimated: Workspace) -> None:
    both = Workspace(built), estimated
    before, after = (read_index(one.find(EXPERIMENT.wild), WILD_SET) for one in both)
    tests = [read_index(one.find(EXPERIMENT.ood_test), OOD_TEST) for one in both]
    held = read_index(estimated.find(EXPERIMENT.wild_holdout), WILD_HOLDOUT)
    assert sorted([*after, *held]) == sorted(before)  # disjoint, and so disjoint from all other parts
    assert len(held) == round(0.4 * len(before))
    np.testing.assert_array_equal(*tests)
    truth = read_wild_truth(estimated.find(EXPERIMENT.truth))
    assert truth is not None
    assert len(truth) == len(after)
    assert len(read_index(Workspace(built).find(EXPERIMENT.wild_holdout), WILD_HOLDOUT)) == 0


def test_filter_and_training_do_without_it(project: Workspace) -> None:
    params = params_of(project, HOLDOUT)
    made = EXPERIMENT.candidates, EXPERIMENT.network("sal")
    before = written(project, *made)
    for artifact in (EXPERIMENT.wild_holdout, EXPERIMENT.wild_holdout_representation):
        (project.root / artifact.path).unlink()
    filter_stage.run(project, params, EXPERIMENT)
    train_ood.run(project, params, EXPERIMENT)
    assert written(project, *made) == before


def test_the_truth_does_not_reach_the_estimates(project: Workspace) -> None:
    found = project.find(EXPERIMENT.truth)
    truth, before = read_wild_truth(found), estimates(project)
    assert truth is not None
    write_wild_truth(found.path, ~truth, {})
    evaluate.run(project, params_of(project, HOLDOUT), EXPERIMENT)
    assert estimates(project) == before


def test_every_method_scores_it_and_the_test_data_as_before(estimated: Workspace) -> None:
    scores = read_arrays(estimated.find(EXPERIMENT.evaluation("scores.h5")), TEST_SCORES)
    held = read_index(estimated.find(EXPERIMENT.wild_holdout), WILD_HOLDOUT)
    for name in HOLDOUT["evaluate.methods"]:  # type: ignore[attr-defined]
        assert len(scores[f"{name}/wild"]) == len(held)
        assert np.isfinite(scores[f"{name}/wild"]).all()
    found = estimates(estimated)
    assert found.keys() == {"pi", "methods", "chosen", "reason"}
    assert 0 <= found["pi"]["low"] <= found["pi"]["value"] <= found["pi"]["high"] <= 1
    assert found["chosen"] in HOLDOUT["evaluate.methods"]  # type: ignore[operator]


@pytest.mark.parametrize("change", ["none", "strange", "noise", "contrast"])
def test_changed_digits_are_called_drift_and_not_outliers(built: Path, change: str) -> None:
    """All 288 ID test digits are the wild data, changed or not; or with 60 images of noise among them."""
    workspace, rng, images = Workspace(built), np.random.default_rng(0), id_images(built, "test")
    wild = {
        "none": images,
        "strange": np.concatenate([images, rng.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8)]),
        "noise": np.clip(images + rng.normal(0, 40, images.shape), 0, 255).astype(np.uint8),
        "contrast": (0.5 * images).astype(np.uint8),
    }[change]
    network = classifier(workspace, EXPERIMENT)
    known = Known(Head.of(network.head), id_representation(workspace, "train", EXPERIMENT))
    pairs: dict[str, list[np.ndarray]] = {}
    for name in ("msp", "energy", "knn", "mahalanobis", "vim"):
        method = params_of(workspace, {}).method(name)
        method.fit(known)
        for x in (id_images(built, "calibration"), wild):
            with torch.no_grad():
                feature, logits = network.features_and_logits(torch.from_numpy(x))
            score = method.score(Representation(feature, logits, logits.argmax(1)))
            pairs.setdefault(name, []).append(score.double().numpy())
    counted = {name: (c, w) for name, (c, w) in pairs.items()}
    share = share_of_outliers(*counted["knn"])
    found = estimated_from(counted, share, "knn", {name: name for name in pairs}, rng, 200)
    if change in ("none", "strange"):
        true = 60 / 348 if change == "strange" else 0.0
        assert share.low <= true <= share.high
        assert bool(found.methods) == (change == "strange")
    else:
        assert (found.methods, found.chosen) == ({}, "knn")
        assert "differ from the calibration data as a whole" in found.reason


def test_without_a_holdout_nothing_is_estimated_but_the_share(built: Path) -> None:
    found, share = estimates(Workspace(built)), theory_share(built)
    assert found == {
        "pi": share, "methods": {}, "chosen": "sal-plus",
        "reason": "no wild data are held out (data.wild_holdout is 0)",
    }  # fmt: skip
    assert share["low"] > 0


def theory_share(built: Path) -> dict[str, float]:
    """π̂ by the committee, wherever it is shown."""
    with TemporaryDirectory() as folder:
        workspace = Workspace(shutil.copytree(built, Path(folder) / "copy"))
        return asdict(theory.run(workspace, params_of(workspace), EXPERIMENT).share)


def test_the_row_without_estimates_names_the_cure(built: Path) -> None:
    assert "data.wild_holdout: 0.2" in refused("table", "--estimates", "--params", f"{built}/params.yaml", root=built)


def test_the_table_shows_estimates_where_nothing_is_measured_or_if_asked_for(project: Workspace) -> None:
    number = {"value": 0.42, "low": 0.1, "high": 0.9}
    content = {
        "pi": {"value": 0.09, "low": 0.05, "high": 0.15},
        "methods": {"sal": {"fpr95": number, "auroc": number}},
        "chosen": "knn",
        "reason": "knn finds more",
    }
    project.find(EXPERIMENT.estimates).path.write_text(json.dumps(content))
    params = ["--params", f"{project.root}/params.yaml"]
    plain, both = salcli("table", *params).output, salcli("table", "--estimates", *params).output
    assert "est." not in plain
    assert "measured and estimated without labels" in both
    as_json = json.loads(salcli("table", "--estimates", "--format", "json", *params).output)
    (row,) = [row for row in as_json if row["method"] == "sal" and row["ood"] == EXPERIMENT.ood]
    assert (row["estimated_fpr95_low"], row["estimated_pi_high"], row["is_chosen"]) == (10, 15, False)

    path = project.find(EXPERIMENT.evaluation("metrics.json")).path
    metrics = json.loads(path.read_text())
    for own in (own for name, own in metrics.items() if name != "samples"):  # as if nobody knew what is OOD
        own |= dict.fromkeys(("fpr95", "auroc", "aupr_in", "aupr_out"))
    path.write_text(json.dumps(metrics))
    text = shown(results_view(Results.read([path]), 100))
    assert "estimated without labels" in text
    assert "π̂ = 9 (5–15)%" in text
    assert "knn finds more" in text
    (line,) = [line for line in text.splitlines() if " SAL " in line]
    assert line.count("42 (10–90)") == 2
    assert text.count("cannot tell") == 2 * 3  # the other methods

    none = dict.fromkeys(("value", "low", "high"))
    why = {"pi": none, "methods": {}, "chosen": "sal", "reason": "cannot tell: 9 held-out wild samples are too few"}
    project.find(EXPERIMENT.estimates).path.write_text(json.dumps(why))
    text = shown(results_view(Results.read([path]), 100))
    assert "9 held-out wild samples are too few" in text
    assert "π̂ =" not in text


def test_of_several_seeds_most_must_be_able_to_tell(project: Workspace) -> None:
    """The one whose π̂ is surely above 0 may be the one where it is too high."""
    number, none = {"value": 0.42, "low": 0.1, "high": 0.9}, dict.fromkeys(("value", "low", "high"))
    telling = {"pi": number, "methods": {"sal": {"fpr95": number, "auroc": number}}, "chosen": "sal", "reason": "yes"}
    silent = {"pi": none, "methods": {}, "chosen": "sal", "reason": "cannot tell: 9 are too few"}
    for seed in (1, 2):
        shutil.copytree(project.root / "runs/0", project.root / f"runs/{seed}")
    params = ["--all", "--params", f"{project.root}/params.yaml"]
    for n_telling, numbers in ((1, 0), (2, 2)):
        for seed in range(3):
            path = project.root / "runs" / str(seed) / Path(EXPERIMENT.estimates.path).relative_to("runs/0")
            path.write_text(json.dumps(telling if seed < n_telling else silent))
        text = salcli("table", "--estimates", *params).output
        assert text.count("42 (10–90)") == numbers + 1  # and π̂
        assert ("mean over the 2 of 3 seeds that can tell" in " ".join(text.split())) == (n_telling == 2)
        assert f"{EXPERIMENT.ood}, {3 - n_telling} of 3 seeds: cannot tell: 9 are too few." in text
