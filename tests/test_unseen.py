"""OOD test sets of a kind that was not in the wild data: disjoint from everything that was trained with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from conftest import OOD, SEED
from test_cli import salcli
from test_resume import params_with

from salcli.artifacts import layout
from salcli.artifacts.images import read_image_set
from salcli.artifacts.splits import read_wild_source
from salcli.errors import MissingArtifactError
from salcli.reporting.results import Results, asked_for
from salcli.stages import evaluate, prepare
from salcli.stages.inputs import unseen_ood_images

if TYPE_CHECKING:
    from salcli.artifacts.layout import Workspace

UNSEEN = "photo-patches"


def test_a_set_that_is_nowhere_in_the_wild_is_tested_on_as_published(workspace: Workspace) -> None:
    params = params_with(workspace, data__ood=[OOD], data__test_ood=[UNSEEN])
    prepare.prepare_unseen_set(workspace, params.data, UNSEEN)
    rows = unseen_ood_images(workspace, params.data, UNSEEN, SEED)
    is_test = read_image_set(workspace.find(layout.unseen_set(UNSEEN))).is_test
    assert is_test is not None
    np.testing.assert_array_equal(rows.source, np.flatnonzero(is_test))


def test_a_set_without_test_images_of_its_own_is_tested_on_as_a_whole(workspace: Workspace) -> None:
    params = params_with(workspace, data__ood=[UNSEEN], data__test_ood=[OOD])
    prepare.prepare_unseen_set(workspace, params.data, OOD)
    rows = unseen_ood_images(workspace, params.data, OOD, SEED)
    np.testing.assert_array_equal(rows.source, np.arange(354))


def test_a_set_in_the_wild_of_another_experiment_is_tested_on_what_is_kept_out_there(workspace: Workspace) -> None:
    """The two sets may be made of the same pictures, as Tiny-ImageNet crop and resize are."""
    params = params_with(workspace, data__ood=[OOD, UNSEEN], data__test_ood=[OOD])
    prepare.prepare_unseen_set(workspace, params.data, OOD)
    tested = unseen_ood_images(workspace, params.data, OOD, SEED).source
    n_id = len(read_image_set(workspace.find(layout.prepared_set(params.data.id))))
    wild = read_wild_source(workspace.find(layout.wild_mixture(OOD, SEED)))
    assert not set(tested) & set(wild[wild >= n_id] - n_id)
    assert len(tested) == 106


def test_figures_on_an_unseen_set_lie_apart_and_join_the_table(workspace: Workspace) -> None:
    params = params_with(workspace, data__ood=[OOD], data__test_ood=[UNSEEN])
    prepare.prepare_unseen_set(workspace, params.data, UNSEEN)
    before = (workspace.root / layout.metrics(OOD, SEED).name).read_bytes()
    result = evaluate.run(workspace, params, OOD, SEED, unseen=UNSEEN)
    assert (workspace.root / layout.metrics(OOD, SEED).name).read_bytes() == before
    assert (result.ood, result.test_set, result.n_ood_test) == (OOD, UNSEEN, 600)
    figures = json.loads((workspace.root / f"runs/{SEED}/{OOD}/unseen/{UNSEEN}/metrics.json").read_text())
    assert figures["sal"]["fpr95"] == result.metrics["sal"].fpr95
    results = Results.from_folder(workspace.root / "runs", asked_for(params))
    assert results.ood_sets == [OOD, UNSEEN]
    assert results.n_left_out == 1  # the other experiment of this workspace
    both = Results.from_folder(workspace.root / "runs")
    assert both.ood_sets == [OOD, UNSEEN, f"{UNSEEN} (wild {OOD})"]
    [unseen] = [row for row in both.rows() if row.ood == f"{UNSEEN} (wild {OOD})" and row.method == "sal"]
    assert unseen.mean["fpr95"] == pytest.approx(100 * figures["sal"]["fpr95"])


def test_an_unseen_set_that_is_not_prepared_says_how(workspace: Workspace) -> None:
    params = params_with(workspace, data__ood=[OOD], data__test_ood=[UNSEEN])
    with pytest.raises(MissingArtifactError, match=r"data/unseen/photo-patches\.h5 is not there yet"):
        evaluate.run(workspace, params, OOD, SEED, unseen=UNSEEN)


def test_the_id_set_is_no_unseen_set(workspace: Workspace) -> None:
    result = salcli("evaluate", "--params", str(workspace.root / "params.yaml"), "--unseen", "digits-0-7")
    assert result.exit_code == 2
    assert "--unseen digits-0-7: that is the ID set (data.id); name another one" in result.stderr


def test_without_unseen_sets_there_is_nothing_to_test_on(workspace: Workspace) -> None:
    result = salcli("evaluate", "unseen", "--params", str(workspace.root / "params.yaml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: there is nothing to test on: data.test_ood is empty")


def test_an_unseen_set_that_is_in_the_wild_counts_once(workspace: Workspace) -> None:
    options = ["--params", str(workspace.root / "params.yaml"), "--unseen", OOD]
    assert salcli("prepare", "unseen-set", *options).exit_code == 0
    shown = salcli("evaluate", *options, "--ood", OOD, "--method", "msp").stdout
    assert shown.count("MSP") == 1
    assert "±" not in shown


def test_each_part_of_an_evaluation_writes_its_own_files_alone(workspace: Workspace) -> None:
    """DVC has a stage for each, so neither may do the other's work."""
    params = ["--params", str(workspace.root / "params.yaml"), "--ood", OOD, "--method", "msp", "--unseen", UNSEEN]
    assert salcli("prepare", "unseen-set", *params[:2], "--unseen", UNSEEN).exit_code == 0
    scratch = workspace.root / "scratch" / f"runs/{SEED}/{OOD}"
    assert salcli("evaluate", "own", *params).exit_code == 0
    assert sorted(path.name for path in scratch.iterdir()) == ["histogram.csv", "metrics.json", "roc.csv", "scores.h5"]
    assert salcli("evaluate", "unseen", *params).exit_code == 0
    assert len(list((scratch / "unseen" / UNSEEN).iterdir())) == 4
