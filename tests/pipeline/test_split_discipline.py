"""Split discipline: no sample has two roles, and the truth about the wild data reaches neither filter nor training."""

from itertools import combinations

import numpy as np
import pytest
from helpers.quick import EXPERIMENT, OOD
from helpers.stages import params_of, written

from salcli.detector import stage as detector
from salcli.errors import BadArtifactError
from salcli.params.schema import Params
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.store.files import read_header
from salcli.store.formats import (
    OOD_TEST,
    WILD_SET,
    read_id_split,
    read_index,
    read_samples,
    read_wild_truth,
    write_wild_truth,
)
from salcli.store.layout import Workspace, prepared_set

RIVALS = ["woods"]


@pytest.mark.parametrize("mixing", ["disjoint", "recycle"])
def test_id_train_calibration_wild_id_test_ood_test_are_disjoint(
    mixing: str, workspace: Workspace, quick_params: Params
) -> None:
    """By content, not only by index: a sample that is twice in the source data must not be in two parts.

    Recycled ID samples recur in the wild data, and only there.
    """
    data = quick_params.data.model_copy(update={"mixing": mixing})
    for experiment in quick_params.experiments():
        prepare.prepare_wild(workspace, data, experiment)
    id_set = read_samples(workspace.find(prepared_set(quick_params.data.id)))
    for experiment in quick_params.experiments():
        split, wild = (
            read_id_split(workspace.find(experiment.split)),
            read_index(workspace.find(experiment.wild), WILD_SET),
        )
        ood_set = read_samples(workspace.find(prepared_set(experiment.ood)))
        everything = np.concatenate([id_set.array, ood_set.array])
        roles = {
            "ID train": split.train,
            "ID calibration": split.calibration,
            "wild": wild,
            "ID test": split.test,
            "OOD test": read_index(workspace.find(experiment.ood_test), OOD_TEST) + len(id_set),
        }
        assert all(len(index) for index in roles.values())
        assert set(wild[wild < len(id_set)]) <= set(split.wild)
        assert (len(set(wild)) < len(wild)) == (mixing == "recycle")
        for one, other in combinations(roles, 2):
            contents = [{sample.tobytes() for sample in everything[roles[role]]} for role in (one, other)]
            assert not contents[0] & contents[1], (one, other)


def results(workspace: Workspace, params: Params) -> list[bytes]:
    """Everything that comes after the wild data are mixed."""
    extract.run_wild(workspace, params, EXPERIMENT)
    for variant in ("sal-plus", "sal"):
        filter_stage.run(workspace, params, EXPERIMENT.with_variant(variant))
    for rival in (None, *RIVALS):
        train_ood.run(workspace, params, EXPERIMENT, rival=rival)
    evaluate.run(workspace, params, EXPERIMENT)
    detector.run(workspace, params, EXPERIMENT)
    networks = [EXPERIMENT.network(name) for name in ("sal", *RIVALS)]
    metrics = [EXPERIMENT.evaluation(name) for name in ("scores.h5", "metrics.json")]
    lists = [EXPERIMENT.with_variant(variant).candidates for variant in ("sal", "sal-plus")]
    return written(workspace, *lists, *networks, *metrics, EXPERIMENT.detector)


def test_the_truth_reaches_neither_filter_nor_training_nor_evaluation(workspace: Workspace) -> None:
    """Inverted or deleted, the truth changes no byte of what they write."""
    methods = ["sal", *RIVALS, "msp", "knn", "sal-posthoc", "sal-plus"]
    params = params_of(workspace, {"rivals": RIVALS, "train_ood.epochs": 1, "evaluate.methods": methods})
    before, truth = results(workspace, params), workspace.find(EXPERIMENT.truth)
    is_ood = read_wild_truth(truth)
    assert is_ood is not None
    write_wild_truth(truth.path, ~is_ood, read_header(truth).about)
    assert results(workspace, params) == before
    truth.path.unlink()
    assert results(workspace, params) == before
    assert filter_stage.run(workspace, params, EXPERIMENT).errors is None


def another_split(workspace: Workspace, params: Params) -> None:
    shares = params.data.id_shares.model_copy(update={"train": 0.42, "test": 0.1})
    prepare.prepare_split(workspace, params.data.model_copy(update={"id_shares": shares}), EXPERIMENT)


def test_what_was_made_with_another_split_is_refused(workspace: Workspace, quick_params: Params) -> None:
    """A classifier of another split may have been trained on what is wild, calibration or test data now."""
    another_split(workspace, quick_params)
    for stage in (extract.run_id, extract.run_wild, filter_stage.run, train_ood.run, evaluate.run, detector.run):
        with pytest.raises(BadArtifactError, match=r"was made with another id\.h5"):
            stage(workspace, quick_params, EXPERIMENT)
    train_id.run(workspace, params_of(workspace, {"train_id.epochs": 1}), EXPERIMENT)
    with pytest.raises(BadArtifactError, match=rf"wild\.h5 was made with another id\.h5 .* prepare wild --ood {OOD}"):
        extract.run_wild(workspace, quick_params, EXPERIMENT)
