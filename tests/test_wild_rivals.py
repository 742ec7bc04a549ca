"""OE, Energy-OE, WOODS and SCONE as stages: the same start and schedule as SAL, without its filter."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, get_args

import h5py
import numpy as np
import pytest
import torch
from conftest import OOD, SEED
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.fingerprint import fingerprint
from salcli.cli.app import app
from salcli.models.network import Classifier, EnergyClassifier
from salcli.params import Params, WildRival, load_params
from salcli.progress import Silent
from salcli.rivals.wild_losses import Constraints
from salcli.stages import evaluate, train_ood
from salcli.stages.inputs import id_images, ood_test_images
from salcli.stages.scoring import TRAINED
from salcli.stages.wild_methods import WILD_METHODS, _ConstrainedCourse

if TYPE_CHECKING:
    from salcli.artifacts.layout import Workspace

RIVALS = tuple(name for name in get_args(WildRival) if name != "step")  # test_train_step.py has the other


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def params_with(workspace: Workspace, overrides: dict[str, Any] | None = None) -> Params:
    return load_params(workspace.root / "params.yaml", {"rivals": list(RIVALS), **(overrides or {})})[0]


def train(workspace: Workspace, method: str, overrides: dict[str, Any] | None = None) -> tuple[Classifier, list[str]]:
    notes = Notes()
    train_ood.run(workspace, params_with(workspace, overrides), OOD, SEED, notes, method=method)
    found = workspace.find(layout.trained_network(method, OOD, SEED))
    return read_network(found, TRAINED[method][0]), notes.said


def id_logits(workspace: Workspace, network: Classifier) -> tuple[torch.Tensor, torch.Tensor]:
    training = id_images(workspace, "digits-0-7", "train", SEED)
    with torch.inference_mode():
        return Classifier.forward(network, training.images.read(slice(None))), training.labels


def test_every_method_that_can_be_trained_can_be_scored() -> None:
    assert {*TRAINED} == {*WILD_METHODS, "step"} == {"sal", *get_args(WildRival)}


def test_rivals_are_trained_and_scored_beside_sal(workspace: Workspace) -> None:
    """Each score is what its definition says of the stored network's logits."""
    params = params_with(workspace, {"evaluate.methods": ["sal", *RIVALS]})
    for method in RIVALS:
        train_ood.run(workspace, params, OOD, SEED, method=method)
    evaluated = evaluate.run(workspace, params, OOD, SEED)
    assert list(evaluated.metrics) == ["sal", *RIVALS]
    images = ood_test_images(workspace, OOD, SEED).read(slice(None))
    with h5py.File(workspace.find(layout.evaluation_scores(OOD, SEED)).path) as file:
        scores = {method: file[f"{method}/ood"][:] for method in RIVALS}
    for method in RIVALS:
        network = read_network(workspace.find(layout.trained_network(method, OOD, SEED)), TRAINED[method][0])
        with torch.inference_mode():
            logits = Classifier.forward(network, images)
        energy = logits.exp().sum(1).log()
        if method == "oe":
            expected = (logits.exp() / logits.exp().sum(1, keepdim=True)).amax(1)
        elif method == "energy-oe":
            expected = energy
        else:
            assert isinstance(network, EnergyClassifier)
            expected = -(network.outlier_line.weight.item() * energy + network.outlier_line.bias.item())
        np.testing.assert_allclose(scores[method], expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", RIVALS)
def test_a_rival_needs_neither_the_filter_nor_the_gradients(workspace: Workspace, method: str) -> None:
    before, _ = train(workspace, method, {"train_ood.epochs": 1})
    for place in (layout.candidates(OOD, SEED), layout.wild_gradients(OOD, SEED), layout.wild_truth(OOD, SEED)):
        workspace.find(place).path.unlink()
    other = {"train_ood.epochs": 1, "train_ood.loss_weight": 3.0, "filter.threshold_quantile": 0.5}
    after, _ = train(workspace, method, other)
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("oe", "oe.loss_weight", 5.0),
        ("energy-oe", "energy-oe.loss_weight", 1.0),
        ("energy-oe", "energy-oe.m_in", -30),
        ("energy-oe", "energy-oe.m_out", 5),
        ("woods", "woods.false_alarms", 0.3),
        ("woods", "woods.loss_factor", 50.0),
        ("woods", "woods.multiplier_lr", 9.0),
        ("scone", "scone.margin", -3),
    ],
)
def test_each_number_changes_its_own_rival(workspace: Workspace, method: str, key: str, value: float) -> None:
    epochs = {"train_ood.epochs": 2}
    before, _ = train(workspace, method, epochs)
    after, _ = train(workspace, method, {**epochs, f"train_rival.{key}": value})
    assert not torch.equal(before.head.weight, after.head.weight)
    header = read_header(workspace.find(layout.trained_network(method, OOD, SEED)))
    assert header.about["train_rival"][key.split(".")[1]] == value


@pytest.mark.parametrize("method", RIVALS)
def test_a_rival_learns_in_a_lower_precision(workspace: Workspace, method: str) -> None:
    network, _ = train(workspace, method, {"train_ood.epochs": 1, "numerics.precision": "bfloat16"})
    logits, labels = id_logits(workspace, network)
    assert float((logits.argmax(1) == labels).double().mean()) > 0.5


def test_a_network_without_a_finite_loss_is_the_worst_of_all(workspace: Workspace) -> None:
    """Whatever comes after it, and however far that is from the constraints."""
    course = _ConstrainedCourse(None, None, None, tolerance=0.05)  # type: ignore[arg-type]
    far_off = Constraints(0.9, 0.05, 7.0, 0.1)
    for lost in (Constraints(float("nan"), 0.05, 0.1, 0.1), Constraints(0.0, 0.05, float("nan"), 0.1)):
        assert course._short_of(far_off) < course._short_of(lost)


def test_scone_without_a_margin_is_woods(workspace: Workspace) -> None:
    woods, _ = train(workspace, "woods", {"train_ood.epochs": 2})
    scone, _ = train(workspace, "scone", {"train_ood.epochs": 2, "train_rival.scone.margin": 0})
    assert all(torch.equal(value, scone.state_dict()[name]) for name, value in woods.state_dict().items())


def test_woods_starts_from_the_classifier_with_as_many_false_alarms_as_it_may_have(workspace: Workspace) -> None:
    classifier = read_network(workspace.find(layout.classifier(SEED)), Classifier)
    logits, _ = id_logits(workspace, classifier)
    threshold = float(np.quantile(logits.logsumexp(1).numpy(), 0.05))
    network = EnergyClassifier.on_top_of(classifier, threshold)
    assert float((network.ood_logit(logits) < 0).double().mean()) == pytest.approx(0.05, abs=0.01)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in classifier.state_dict().items())


def test_woods_that_cannot_meet_a_constraint_says_so_and_gives_the_nearest(workspace: Workspace) -> None:
    impossible = {"train_ood.epochs": 4, "train_rival.woods.loss_factor": 1e-6, "train_rival.woods.tolerance": 0.0}
    network, (note,) = train(workspace, "woods", impossible)
    assert note.startswith("woods: the constraints cannot be met. In epoch ")
    assert 1 <= int(note.split("In epoch ")[1].split(",")[0]) <= 4
    logits, labels = id_logits(workspace, network)
    assert isinstance(network, EnergyClassifier)
    with torch.inference_mode():
        alarms = float(torch.sigmoid(-network.ood_logit(logits)).mean())
    loss = float(cross_entropy(logits, labels))
    assert f"{100 * alarms:.3g}% false alarms (at most 5%) and a loss of {loss:.4g} (at most " in note
    assert "a larger loss_factor" in note  # what is broken, and nothing else
    assert ("a larger false_alarms" in note) == (alarms > 0.05)


def test_woods_names_the_false_alarms_where_those_are_too_many(workspace: Workspace) -> None:
    impossible = {"train_ood.epochs": 1, "train_rival.woods.false_alarms": 1e-4, "train_rival.woods.loss_factor": 1e6}
    _, (note,) = train(workspace, "woods", {**impossible, "train_rival.woods.tolerance": 0.0})
    assert note.endswith("more epochs or a larger false_alarms may help")
    assert "(at most 0.01%)" in note


def test_woods_that_meets_its_constraints_says_nothing(workspace: Workspace) -> None:
    network, notes = train(workspace, "woods", {"train_ood.epochs": 2, "train_rival.woods.tolerance": 0.99})
    assert notes == []
    logits, labels = id_logits(workspace, network)
    assert float(cross_entropy(logits, labels)) < 1


def test_auto_margins_are_mean_energies_at_the_start(workspace: Workspace) -> None:
    """Of ID data and of noise: with those numbers given, the same network comes out."""
    classifier = read_network(workspace.find(layout.classifier(SEED)), Classifier)
    of_id = -float(id_logits(workspace, classifier)[0].logsumexp(1).mean())
    noise = np.random.default_rng(0).integers(0, 256, (462, 1, 8, 8), dtype=np.uint8)
    with torch.inference_mode():
        of_noise = -float(classifier(torch.from_numpy(noise)).logsumexp(1).mean())
    automatic, _ = train(workspace, "energy-oe", {"train_ood.epochs": 1})
    given, _ = train(
        workspace,
        "energy-oe",
        {"train_ood.epochs": 1, "train_rival.energy-oe.m_in": of_id, "train_rival.energy-oe.m_out": of_noise},
    )
    torch.testing.assert_close(automatic.head.weight, given.head.weight, rtol=1e-4, atol=1e-5)


def test_the_classifier_of_another_wild_set_is_refused(workspace: Workspace) -> None:
    train(workspace, "oe", {"train_ood.epochs": 1})
    place = workspace.find(layout.trained_network("oe", OOD, SEED)).path
    assert read_header(workspace.find(layout.trained_network("oe", OOD, SEED))).about["wild"] == fingerprint(
        workspace.find(layout.wild_mixture(OOD, SEED))
    )
    other = workspace.root / layout.trained_network("oe", "photo-patches", SEED).name
    other.write_bytes(place.read_bytes())
    params = params_with(workspace, {"rivals": ["oe"], "evaluate.methods": ["oe"]})
    with pytest.raises(Exception, match=r"was made with another wild\.h5"):
        evaluate.run(workspace, params, "photo-patches", SEED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train-ood", "--method", "wods"], "no method is called wods (did you mean woods?)"),
        (["evaluate", "--method", "woods"], "methods names woods, which needs training with the wild data"),
        (["train-ood", "--set", "rivals=[wods]"], "did you mean woods?"),
        (["train-ood", "--set", "train_rival.woods.penalty_growth=1"], "must be greater than 1, got 1"),
        (["evaluate", "--set", "rivals=[oe]", "--method", "oe"], "salcli train-ood --method oe --ood digits-8-9"),
    ],
    ids=["unknown", "not a rival", "unknown rival", "number", "not trained"],
)
def test_bad_input_is_one_message(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(workspace.root)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_command_trains_sal_and_all_rivals(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.root)
    command = ["train-ood", "--epochs", "1", "--ood", OOD, "--set", "rivals=[oe, woods]"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    made = workspace.root / "scratch" / f"runs/{SEED}/{OOD}/networks"
    assert sorted(path.stem for path in made.iterdir()) == ["oe", "sal", "woods"]
    assert "next: salcli evaluate --ood digits-8-9 --scratch" in result.stdout  # --set rivals is in the params already
    lines = [line.split() for line in result.stdout.splitlines()]
    wild = next(line[3] for line in lines if line[:3] == [OOD, "0", "OE"])
    assert wild == "642"  # all wild samples, not the candidates


def test_the_command_says_how_to_score_what_params_do_not_name(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.root)
    trained = CliRunner().invoke(app, ["train-ood", "--method", "oe", "--ood", OOD])
    command = "salcli evaluate --set 'rivals=[oe]' --ood digits-8-9"
    assert f"next: {command}" in trained.stdout
    scored = CliRunner().invoke(app, shlex.split(command)[1:])
    assert scored.exit_code == 0, scored.output
    assert " OE " in scored.stdout
