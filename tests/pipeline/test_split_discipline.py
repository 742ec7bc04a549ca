"""Split discipline of the stages: no image has two roles, and the wild truth reaches nobody. (Was in test_splits.)"""

from itertools import combinations

import numpy as np
import pytest
from helpers.quick import OOD, SEED

from salcli.artifacts import layout
from salcli.artifacts.fingerprint import fingerprint
from salcli.artifacts.hdf5 import read_arrays, write_arrays
from salcli.artifacts.images import read_image_set
from salcli.artifacts.layout import Workspace
from salcli.artifacts.splits import WILD_TRUTH, read_id_split, read_ood_test, read_wild_source, read_wild_truth
from salcli.errors import BadArtifactError
from salcli.params import Params
from salcli.stages import evaluate, extract_grads, prepare, train_id, train_ood
from salcli.stages import filter as filter_stage


def test_in_a_built_workspace_no_image_has_two_roles(workspace: Workspace, quick_params: Params) -> None:
    """By content, not by index: what stands twice in the source data may not be split across roles unseen."""
    id_set = read_image_set(workspace.find(layout.prepared_set(quick_params.data.id)))
    split = read_id_split(workspace.find(layout.id_split(SEED)))
    for ood in quick_params.data.ood:
        ood_set = read_image_set(workspace.find(layout.prepared_set(ood)))
        everything = np.concatenate([id_set.array, ood_set.array])
        mixture = workspace.find(layout.wild_mixture(ood, SEED))
        roles = {
            "ID train": split.train,
            "ID calibration": split.calibration,
            "wild": read_wild_source(mixture),
            "ID test": split.test,
            "OOD test": read_ood_test(mixture) + len(id_set),
        }
        for one, other in combinations(roles, 2):
            assert not set(roles[one]) & set(roles[other]), (one, other)
            twins = {image.tobytes() for image in everything[roles[one]]} & {
                image.tobytes() for image in everything[roles[other]]
            }
            assert not twins, (one, other, len(twins))


def test_the_truth_never_reaches_filter_or_training(workspace: Workspace, quick_params: Params) -> None:
    """With the truth turned upside down, candidates and OOD classifier are the same to the byte."""
    before = _results(workspace, quick_params)
    truth = workspace.find(layout.wild_truth(OOD, SEED))
    write_arrays(truth.path, WILD_TRUTH, {"is_ood": ~read_wild_truth(truth)}, {})
    assert _results(workspace, quick_params) == before
    truth.path.unlink()
    assert _results(workspace, quick_params) == before
    assert filter_stage.run(workspace, quick_params, OOD, SEED).errors is None


def _results(workspace: Workspace, params: Params) -> list[str]:
    filter_stage.run(workspace, params, OOD, SEED)
    train_ood.run(workspace, params, OOD, SEED)
    places = layout.candidates(OOD, SEED), layout.trained_network("sal", OOD, SEED)
    return [fingerprint(workspace.find(place)) for place in places]


def test_gradients_of_the_wild_data_do_not_say_where_a_sample_comes_from(workspace: Workspace) -> None:
    stored = read_arrays(workspace.find(layout.wild_gradients(OOD, SEED)), "gradients")
    np.testing.assert_array_equal(stored["index"], np.arange(len(stored["index"])))
    assert set(stored) == {"feature", "residual", "label", "predicted", "index"}


def test_what_was_made_with_another_split_is_refused(workspace: Workspace, quick_params: Params) -> None:
    """A classifier of another split may have been trained on what is wild, calibration or test data now."""
    other_shares = quick_params.data.id_shares.model_copy(update={"train": 0.42, "test": 0.1})
    prepare.prepare_split(workspace, quick_params.data.model_copy(update={"id_shares": other_shares}), SEED)
    for stage in (
        lambda: extract_grads.run_id(workspace, quick_params, SEED),
        lambda: extract_grads.run_wild(workspace, quick_params, OOD, SEED),
        lambda: train_ood.run(workspace, quick_params, OOD, SEED),
        lambda: evaluate.run(workspace, quick_params, OOD, SEED),
    ):
        with pytest.raises(BadArtifactError, match=r"was made with another id\.h5"):
            stage()


def test_a_wild_mixture_of_another_split_is_refused(workspace: Workspace, quick_params: Params) -> None:
    other_shares = quick_params.data.id_shares.model_copy(update={"train": 0.42, "test": 0.1})
    prepare.prepare_split(workspace, quick_params.data.model_copy(update={"id_shares": other_shares}), SEED)
    train_id.run(workspace, quick_params, SEED)
    with pytest.raises(BadArtifactError, match=r"wild\.h5 was made with another id\.h5 .* salcli prepare --ood"):
        extract_grads.run_wild(workspace, quick_params, OOD, SEED)
