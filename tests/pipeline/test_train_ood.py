"""train-ood: SAL with its candidates or with what a person decided, and its rivals with all wild data."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compute import Watched
from helpers.quick import EXPERIMENT, OOD
from helpers.stages import params_of, written
from torch.nn.functional import cross_entropy

from salcli.errors import BadArtifactError, MissingArtifactError
from salcli.methods.base import WildTrained, built_in
from salcli.methods.wild import Constraints, EnergyClassifier, _BestNetwork
from salcli.models.network import Classifier, OodClassifier
from salcli.pipeline import evaluate, train_ood
from salcli.pipeline.inputs import classifier, id_samples, ood_test_samples
from salcli.pipeline.review import rows_for_review, write_review
from salcli.pipeline.train_ood import TrainedNetwork
from salcli.store.files import fingerprint, read_arrays, read_header
from salcli.store.formats import read_candidates, read_network
from salcli.store.layout import Experiment, Workspace

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


def test_sal_learns_from_the_candidates(workspace: Workspace) -> None:
    candidates = read_candidates(workspace.find(EXPERIMENT.candidates))
    done, network, notes = train(workspace, None)
    assert (done.method, done.n_outliers, notes) == ("sal", len(candidates.index), [])
    assert [path.name for path in done.written] == ["sal.safetensors", "train-sal.csv"]
    logits, labels = id_logits(workspace, network)
    assert (logits.argmax(1) == labels).double().mean() > 0.9
    about = read_header(workspace.find(EXPERIMENT.network("sal"))).about
    assert about["params"]["epochs"] == 1
    assert about["n_outliers"] == len(candidates.index)
    assert about["made_from"]["wild"] == fingerprint(workspace.find(EXPERIMENT.wild).path)


@pytest.mark.parametrize("values", [{"loss_weight": 1.0}, {"candidate_id": True}, {"augment": "flip-crop"}], ids=str)
def test_each_option_of_sal_changes_its_network(workspace: Workspace, values: dict[str, Any]) -> None:
    _, usual, _ = train(workspace, None)
    _, other, _ = train(workspace, None, {f"train_ood.{key}": value for key, value in values.items()})
    assert not same(usual, other)


def test_a_variant_is_trained_with_its_overrides_from_its_own_candidates(workspace: Workspace) -> None:
    values = {"variants": ["sal", "sal-2"], "variant.sal-2": {"train_ood": {"loss_weight": 1.0}}, **ONE_EPOCH}
    params, experiment = params_of(workspace, values), EXPERIMENT.with_variant("sal-2")
    with pytest.raises(MissingArtifactError, match="make it with: salcli filter --variant sal-2 --ood digits-8-9"):
        train_ood.run(workspace, params, experiment)
    (workspace.root / experiment.candidates.path).parent.mkdir()
    (workspace.root / experiment.candidates.path).write_bytes(*written(workspace, EXPERIMENT.candidates))
    train_ood.run(workspace, params, experiment)
    own = read_network(workspace.find(experiment.network("sal-2")), OodClassifier)
    _, expected, _ = train(workspace, None, {"train_ood.loss_weight": 1.0})
    assert same(own, expected)


def test_a_review_changes_what_sal_learns_from_and_is_noted(workspace: Workspace) -> None:
    params, path = params_of(workspace), workspace.root / "reviewed.csv"
    rows = rows_for_review(workspace, params, EXPERIMENT, n_below=2)
    n, values = len(read_candidates(workspace.find(EXPERIMENT.candidates)).index), {"train_ood.review": "reviewed.csv"}
    _, usual, _ = train(workspace, None)
    write_review(path, rows)
    done, kept, notes = train(workspace, None, values)
    assert (done.n_outliers, notes) == (n, ["reviewed: 0 candidates dropped, 0 wild samples added"])
    assert same(kept, usual)
    text = path.read_text().splitlines()
    text[1] = text[1].removesuffix("keep") + "drop"
    text[-2:] = [line + "add" for line in text[-2:]]
    path.write_text("\n".join(text))
    done, changed, notes = train(workspace, None, values)
    assert (done.n_outliers, notes) == (n + 1, ["reviewed: 1 candidates dropped, 2 wild samples added"])
    assert not same(changed, usual)
    assert read_header(workspace.find(EXPERIMENT.network("sal"))).about["review"]["dropped"] == 1
    path.write_text(text[0] + "\n")
    done, untouched, notes = train(workspace, None, values)
    assert notes == ["reviewed.csv does not mention this experiment, so its candidates stay as they are"]
    assert same(untouched, usual)
    _, _, notes = train(workspace, "oe", values)
    assert notes == []


# --- rivals


def test_rivals_are_trained_and_scored_beside_sal(workspace: Workspace) -> None:
    """Each score is what its definition says of the stored network's logits."""
    params = params_of(workspace, {**ONE_EPOCH, "rivals": RIVALS, "evaluate.methods": ["sal", *RIVALS]})
    for rival in RIVALS:
        assert train_ood.run(workspace, params, EXPERIMENT, rival=rival).n_outliers == 642
    assert list(evaluate.run(workspace, params, EXPERIMENT).metrics) == ["sal", *RIVALS]
    images = ood_test_samples(workspace, params, EXPERIMENT).read(slice(None))
    scores = read_arrays(workspace.find(EXPERIMENT.evaluation("scores.h5")), evaluate.SCORES)
    for rival in RIVALS:
        kind = built_in()[rival].network  # type: ignore[attr-defined]
        network = read_network(workspace.find(EXPERIMENT.network(rival)), kind)
        with torch.inference_mode():
            logits = Classifier.forward(network, images)
        energy = logits.exp().sum(1).log()
        if rival == "oe":
            expected = (logits.exp() / logits.exp().sum(1, keepdim=True)).amax(1)
        elif rival == "energy-oe":
            expected = energy
        else:
            expected = -(network.outlier_line.weight.item() * energy + network.outlier_line.bias.item())
        np.testing.assert_allclose(scores[f"{rival}/ood"], expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_needs_neither_the_filter_nor_the_representations(workspace: Workspace, rival: str) -> None:
    _, before, _ = train(workspace, rival)
    for artifact in (EXPERIMENT.candidates, EXPERIMENT.wild_representation, EXPERIMENT.truth):
        workspace.find(artifact).path.unlink()
    _, after, _ = train(workspace, rival, {"train_ood.loss_weight": 3.0, "filter.threshold_quantile": 0.5})
    assert same(before, after)


@pytest.mark.parametrize(
    ("rival", "changes"),
    [
        ("oe", {"loss_weight": 5.0}),
        ("energy-oe", {"loss_weight": 1.0, "m_in": -30, "m_out": 5}),
        ("woods", {"false_alarms": 0.3, "loss_factor": 50.0, "multiplier_lr": 9.0}),
        ("scone", {"margin": -3}),
    ],
)
def test_each_number_changes_its_own_rival(workspace: Workspace, rival: str, changes: dict[str, float]) -> None:
    epochs = {"train_ood.epochs": 2}
    _, before, _ = train(workspace, rival, epochs)
    for key, value in changes.items():
        _, after, _ = train(workspace, rival, {**epochs, f"methods.{rival}.{key}": value})
        assert not torch.equal(before.head.weight, after.head.weight), key
        assert read_header(workspace.find(EXPERIMENT.network(rival))).about["params"][key] == value


@pytest.mark.parametrize("rival", ["oe", "woods"])
def test_a_rival_learns_in_a_lower_precision(workspace: Workspace, rival: str) -> None:
    _, network, _ = train(workspace, rival, {"numerics.precision": "bfloat16"})
    logits, labels = id_logits(workspace, network)
    assert float((logits.argmax(1) == labels).double().mean()) > 0.5


def test_scone_without_a_margin_is_woods(workspace: Workspace) -> None:
    _, woods, _ = train(workspace, "woods")
    _, scone, _ = train(workspace, "scone", {"methods.scone.margin": 0})
    assert same(woods, scone)


def test_woods_starts_from_the_classifier_with_as_many_false_alarms_as_it_may_have(workspace: Workspace) -> None:
    start = classifier(workspace, EXPERIMENT)
    logits, _ = id_logits(workspace, start)
    network = EnergyClassifier.on_top_of(start, float(np.quantile(logits.logsumexp(1).numpy(), 0.05)))
    assert float((network.ood_logit(logits) < 0).double().mean()) == pytest.approx(0.05, abs=0.01)
    assert same(start, network)


def test_woods_that_cannot_meet_a_constraint_says_so_and_keeps_the_nearest(workspace: Workspace) -> None:
    values = {"train_ood.epochs": 3, "methods.woods.loss_factor": 1e-6, "methods.woods.tolerance": 0.0}
    _, network, (note,) = train(workspace, "woods", values)
    assert note.startswith("the constraints cannot be met. In epoch ")
    logits, labels = id_logits(workspace, network)
    with torch.inference_mode():
        alarms = float(torch.sigmoid(-network.ood_logit(logits)).mean())
    loss = float(cross_entropy(logits, labels))
    assert f"{100 * alarms:.3g}% false alarms (at most 5%) and a loss of {loss:.4g} (at most " in note
    assert "a larger loss_factor" in note  # what is broken, and nothing else
    assert ("a larger false_alarms" in note) == (alarms > 0.05)
    few_alarms = {"methods.woods.false_alarms": 1e-4, "methods.woods.loss_factor": 1e6, "methods.woods.tolerance": 0.0}
    _, _, (note,) = train(workspace, "woods", few_alarms)
    assert note.endswith("more epochs or a larger false_alarms may help")
    assert "(at most 0.01%)" in note
    _, _, notes = train(workspace, "woods", {"methods.woods.tolerance": 0.99})
    assert notes == []


def test_a_network_with_nan_is_the_worst_of_all() -> None:
    best = object.__new__(_BestNetwork)  # no training is needed to compare
    best._tolerance = 0.05
    far_off = best._violation(Constraints(0.9, 0.05, 7.0, 0.1))
    for broken in (Constraints(math.nan, 0.05, 0.1, 0.1), Constraints(0.0, 0.05, math.nan, 0.1)):
        assert far_off < best._violation(broken)


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


def test_the_network_of_another_wild_set_is_refused_and_a_missing_one_is_named(workspace: Workspace) -> None:
    params = params_of(workspace, {**ONE_EPOCH, "rivals": ["oe"], "evaluate.methods": ["oe"]})
    with pytest.raises(MissingArtifactError, match=f"make it with: salcli train-ood --method oe --ood {OOD} --pi 0.1"):
        evaluate.run(workspace, params, EXPERIMENT)
    train_ood.run(workspace, params, EXPERIMENT, rival="oe")
    other = Experiment(EXPERIMENT.seed, "photo-patches", 0.1)
    (workspace.root / other.network("oe").path).write_bytes(*written(workspace, EXPERIMENT.network("oe")))
    with pytest.raises(BadArtifactError, match=r"was made with another wild\.h5"):
        evaluate.run(workspace, params, other)
