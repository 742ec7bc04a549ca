"""train-ood: SAL with its candidates or with what a person decided, and its rivals with all wild data."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compute import Watched
from helpers.quick import EXPERIMENT
from helpers.stages import params_of
from torch.nn.functional import cross_entropy

from salcli.errors import SalError
from salcli.methods.base import WildTrained, built_in
from salcli.models.network import Classifier, OodClassifier
from salcli.pipeline import evaluate, train_ood
from salcli.pipeline.loading import classifier, id_samples, ood_test_samples
from salcli.pipeline.train_ood import TrainedNetwork
from salcli.project.review import rows_for_review, write_review
from salcli.store.files import read_arrays, read_header
from salcli.store.formats import read_candidates, read_network, write_candidates
from salcli.store.layout import TEST_SCORES, Workspace

RIVALS = [name for name in built_in(WildTrained) if name != "step"]  # test_train_encoder.py has the other
ONE_EPOCH = {"train_ood.epochs": 1}


def train(
    workspace: Workspace, rival: str | None, values: dict[str, Any] | None = None
) -> tuple[TrainedNetwork, Any, list[str]]:
    """The result, the stored network, and what was noted."""
    notes, params = Watched(), params_of(workspace, {**ONE_EPOCH, **(values or {})})
    done = train_ood.run(workspace, params, EXPERIMENT, notes, rival=rival)
    network = built_in()[rival].network if rival else OodClassifier  # type: ignore[attr-defined]
    return done, read_network(workspace.find(EXPERIMENT.network(done.method)), network), notes.notes


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def id_logits(workspace: Workspace, network: Classifier) -> tuple[torch.Tensor, torch.Tensor]:
    training = id_samples(workspace, params_of(workspace), "train", EXPERIMENT)
    with torch.inference_mode():
        return Classifier.forward(network, training.rows.read(slice(None))), training.labels


# --- SAL


def test_a_review_changes_what_sal_learns_from_and_is_noted(workspace: Workspace) -> None:
    params, path = params_of(workspace), workspace.root / "reviewed.csv"
    rows = rows_for_review(workspace, params, EXPERIMENT, n_below=2)
    n, values = len(read_candidates(workspace.find(EXPERIMENT.candidates)).index), {"train_ood.review": "reviewed.csv"}
    assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)
    assert {row.file for row in rows} == {""}, "of wild data that we mixed, a file name could tell the truth"
    _, usual, _ = train(workspace, None)
    write_review(path, rows)
    assert same(train(workspace, None, values)[1], usual)
    text = path.read_text().splitlines()
    text[1] = text[1].removesuffix("keep") + "drop"
    text[-2:] = [line + "add" for line in text[-2:]]
    path.write_text("\n".join(text))
    done, changed, notes = train(workspace, None, values)
    assert (done.n_outliers, notes) == (n + 1, ["reviewed: 1 candidates dropped, 2 wild samples added"])
    assert not same(changed, usual)
    path.write_text(text[0] + "\n")  # does not mention this experiment
    assert same(train(workspace, None, values)[1], usual)


def test_all_wild_samples_may_be_candidates_but_then_none_counts_as_id(workspace: Workspace) -> None:
    found = workspace.find(EXPERIMENT.candidates)
    candidates, about = read_candidates(found), read_header(found).about
    n_wild = len(candidates.wild_score)
    write_candidates(found.path, replace(candidates, index=np.arange(n_wild)), about)
    assert train(workspace, None)[0].n_outliers == n_wild
    with pytest.raises(SalError, match="all wild samples are candidate outliers"):
        train(workspace, None, {"train_ood.candidate_id": True})


# --- rivals


def test_a_rival_may_have_another_schedule_than_sal(workspace: Workspace) -> None:
    for rival in ("oe", "woods"):
        keys = ("train_ood.schedule", f"methods.{rival}.schedule")
        shared, own = (train(workspace, rival, {key: "steps"})[1] for key in keys)
        assert same(own, shared)
        assert not same(own, train(workspace, rival)[1])


def test_rivals_are_trained_and_scored_beside_sal(workspace: Workspace) -> None:
    """Each score is what its definition says of the stored network's logits."""
    params = params_of(workspace, {**ONE_EPOCH, "rivals": RIVALS, "evaluate.methods": ["sal", *RIVALS]})
    for rival in RIVALS:
        assert train_ood.run(workspace, params, EXPERIMENT, rival=rival).n_outliers == 642
    assert list(evaluate.run(workspace, params, EXPERIMENT).metrics) == ["sal", *RIVALS]
    images = ood_test_samples(workspace, params, EXPERIMENT).read(slice(None))
    scores = read_arrays(workspace.find(EXPERIMENT.evaluation("scores.h5")), TEST_SCORES)
    for rival in RIVALS:
        kind = built_in()[rival].network  # type: ignore[attr-defined]
        network = read_network(workspace.find(EXPERIMENT.network(rival)), kind)
        with torch.inference_mode():
            logits = Classifier.forward(network, images)
        energy = logits.exp().sum(1).log()
        if rival == "oe":
            expected = -(logits.exp() / logits.exp().sum(1, keepdim=True)).amax(1)
        elif rival.startswith("energy"):
            expected = -energy
        else:
            expected = network.outlier_line.weight.item() * energy + network.outlier_line.bias.item()
        np.testing.assert_allclose(scores[f"{rival}/ood"], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_woods_that_cannot_meet_a_constraint_says_so_and_keeps_the_nearest(workspace: Workspace) -> None:
    values = {"train_ood.epochs": 3, "methods.woods.loss_factor": 1e-6, "methods.woods.tolerance": 0.0}
    _, network, (note,) = train(workspace, "woods", values)
    assert note.startswith("the constraints cannot be met. In epoch ")
    loss = float(cross_entropy(*id_logits(workspace, network)))
    assert f" and a loss of {loss:.4g} (at most " in note
    assert "a larger loss_factor" in note


def test_auto_margins_are_mean_energies_at_the_start(workspace: Workspace) -> None:
    """Of ID data and of noise: with those numbers given, the same network comes out."""
    start = classifier(workspace, EXPERIMENT)
    of_id = -float(id_logits(workspace, start)[0].logsumexp(1).mean())
    noise = np.random.default_rng(0).integers(0, 256, (462, 1, 8, 8), dtype=np.uint8)
    with torch.inference_mode():
        of_noise = -float(start(torch.from_numpy(noise)).logsumexp(1).mean())
    _, automatic, _ = train(workspace, "energy-oe")
    given = {"methods.energy-oe.m_in": of_id, "methods.energy-oe.m_out": of_noise}
    _, network, _ = train(workspace, "energy-oe", given)
    torch.testing.assert_close(automatic.head.weight, network.head.weight, rtol=1e-4, atol=1e-5)
