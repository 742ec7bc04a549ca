"""filter.score: every post-hoc score separates as its definition says; auto chooses among them."""

from __future__ import annotations

import json
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import OOD, SEED
from test_evaluate_methods import Notes
from test_rivals import slow_knn
from torch import Tensor, nn
from typer.testing import CliRunner

from salcli import params as params_module
from salcli.artifacts import layout
from salcli.artifacts.candidates import read_candidates
from salcli.artifacts.gradients import KIND, GradientFile
from salcli.artifacts.hdf5 import read_arrays, write_arrays
from salcli.artifacts.layout import Workspace
from salcli.artifacts.splits import read_wild_truth
from salcli.cli.app import app
from salcli.errors import BadArtifactError, ParamsError, ThresholdError
from salcli.metrics import ood_metrics
from salcli.models.network import Classifier
from salcli.params import Params, load_params
from salcli.stages import filter as filter_stage
from salcli.stages import theory, train_ood
from salcli.stages.auto_score import compare
from salcli.stages.filter import Filtered
from salcli.stages.inputs import classifier_of, id_images, wild_images
from salcli.stages.separators import SEPARATORS, Gradients, Separators

POST_HOC = [name for name in SEPARATORS if name != "sal"]


def filtered(workspace: Workspace, score: str, notes: Notes | None = None, **overrides: object) -> Filtered:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    params, _ = load_params(workspace.root / "params.yaml", {"filter.score": score, **changes})
    return filter_stage.run(workspace, params, OOD, SEED, notes)


def test_every_score_that_params_know_can_separate() -> None:
    assert set(get_args(params_module.FilterScore)) == {*SEPARATORS, "auto"}
    assert {*get_args(params_module.PosthocMethod), "sal"} - {"sal-posthoc"} == set(SEPARATORS)


# --- the slow truth, from the network and the images


class Slow:
    """Every score once more, in plain float64, from nothing but images and weights."""

    def __init__(self, workspace: Workspace, params: Params) -> None:
        self.network, _ = classifier_of(workspace, SEED)
        self.network = self.network.double()
        for name in ("mean", "std"):
            setattr(self.network, name, getattr(self.network, name).double())
        train = id_images(workspace, params.data.id, "train", SEED)
        self.known, self.known_label = self.features(train.images.read(slice(None))), train.labels
        self.weight, self.bias = self.network.head.weight.detach(), self.network.head.bias.detach()
        self.params = params.evaluate

    def features(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            normalised = (images.double() / 255 - self.network.mean) / self.network.std
            return self.network.backbone(normalised)

    def score(self, name: str, images: Tensor) -> np.ndarray:
        """Higher = outlier."""
        features = self.features(images)
        logits = features @ self.weight.T + self.bias
        own = getattr(self, f"_{name}")(features, logits) if name != "odin" else self._odin(images)
        return -np.asarray(own)

    def _msp(self, _: Tensor, logits: Tensor) -> Tensor:
        return logits.softmax(1).max(1).values

    def _energy(self, _: Tensor, logits: Tensor) -> Tensor:
        return logits.exp().sum(1).log()

    def _gradnorm(self, features: Tensor, logits: Tensor) -> list[float]:
        gradients = []
        for feature in features:
            weight = self.weight.clone().requires_grad_()
            uniform = torch.full((1, len(weight)), 1 / len(weight)).double()
            loss = nn.functional.cross_entropy((weight @ feature + self.bias)[None], uniform)
            (gradient,) = torch.autograd.grad(loss, weight)
            gradients.append(float(gradient.abs().sum()))
        return gradients

    def _knn(self, features: Tensor, _: Tensor) -> list[float]:
        return [slow_knn(row, self.known.tolist(), self.params.knn_k) for row in features.tolist()]

    def _react(self, features: Tensor, _: Tensor) -> Tensor:
        clip = np.quantile(self.known.numpy(), self.params.react_percentile / 100)
        return self._energy(features, features.clamp(max=float(clip)) @ self.weight.T + self.bias)

    def _dice(self, features: Tensor, _: Tensor) -> Tensor:
        contribution = self.known.mean(0) * self.weight
        kept = contribution > np.percentile(contribution.numpy(), self.params.dice_percentile)
        return self._energy(features, features @ (self.weight * kept).T + self.bias)

    def _ash(self, features: Tensor, _: Tensor) -> list[float]:
        n_kept = features.shape[1] - round(features.shape[1] * self.params.ash_percentile / 100)
        energies = []
        for feature in features:
            kept = feature * (feature >= feature.sort(descending=True).values[n_kept - 1])
            scaled = kept * torch.exp(feature.sum() / kept.sum())
            energies.append(float(torch.logsumexp(self.weight @ scaled + self.bias, 0)))
        return energies

    def _mahalanobis(self, features: Tensor, _: Tensor) -> np.ndarray:
        labels = self.known_label.numpy()
        means = np.stack([self.known.numpy()[labels == k].mean(0) for k in range(len(self.weight))])
        centred = self.known.numpy() - means[labels]
        inverse = np.linalg.pinv(centred.T @ centred / len(centred), rcond=1e-12, hermitian=True)
        differences = features.numpy()[:, None] - means[None]
        return -np.einsum("nkd,de,nke->nk", differences, inverse, differences).min(1)

    def _vim(self, features: Tensor, logits: Tensor) -> Tensor:
        origin = -torch.linalg.pinv(self.weight) @ self.bias
        values, vectors = torch.linalg.eigh((self.known - origin).T @ (self.known - origin))
        left_over = vectors[:, : features.shape[1] - features.shape[1] // 2]
        known_logits = self.known @ self.weight.T + self.bias
        norm = ((self.known - origin) @ left_over).norm(dim=1)
        scale = known_logits.max(1).values.mean() / norm.mean()
        assert values[0] >= -1e-9
        return self._energy(features, logits) - scale * ((features - origin) @ left_over).norm(dim=1)

    def _odin(self, images: Tensor) -> list[float]:
        chosen, found = self.params, []
        for image in images:
            x = ((image[None].double() / 255 - self.network.mean) / self.network.std).requires_grad_()
            certainty = (self.network.head(self.network.backbone(x)) / chosen.odin_temperature).log_softmax(1).max()
            (gradient,) = torch.autograd.grad(certainty, x)
            step = chosen.odin_epsilon * gradient.sign() / self.network.std
            with torch.no_grad():
                logits = self.network.head(self.network.backbone(x + step))
            found.append(float((logits / chosen.odin_temperature).softmax(1).max()))
        return found


N_CHECKED = 40


@pytest.mark.parametrize("score", POST_HOC)
def test_a_scores_candidates_are_those_of_a_slow_recomputation_from_the_images(
    workspace: Workspace, quick_params: Params, score: str
) -> None:
    slow, result = Slow(workspace, quick_params), filtered(workspace, score)
    wild = wild_images(workspace, quick_params.data.id, OOD, SEED).read(slice(N_CHECKED))
    held_out = id_images(workspace, quick_params.data.id, "calibration", SEED).images.read(slice(None))
    found, expected = result.candidates, slow.score(score, wild)
    atol = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(found.wild_score[:N_CHECKED], expected, rtol=2e-4, atol=atol)
    calibration = slow.score(score, held_out)
    np.testing.assert_allclose(found.calibration_score, calibration, rtol=2e-4, atol=atol)
    threshold = np.sort(calibration)[int(np.ceil(0.95 * len(calibration))) - 1]
    assert found.threshold == pytest.approx(threshold, rel=2e-4, abs=atol)
    surely = np.abs(expected - threshold) > 2 * atol
    taken = found.is_candidate[:N_CHECKED]
    np.testing.assert_array_equal(taken[surely], (expected > threshold)[surely])
    assert (found.score_name, found.is_candidate.sum()) == (score, (found.wild_score > found.threshold).sum())


@pytest.mark.parametrize("score", POST_HOC)
def test_a_score_is_minus_what_evaluate_says_of_the_same_images(
    workspace: Workspace, quick_params: Params, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from salcli.stages import evaluate

    wild = wild_images(workspace, quick_params.data.id, OOD, SEED)
    monkeypatch.setattr(evaluate, "ood_test_images", lambda *_: wild)
    params, _ = load_params(workspace.root / "params.yaml", {"evaluate.methods": [score]})
    evaluate.run(workspace, params, OOD, SEED)
    scores = read_arrays_of(workspace, f"{score}/ood")
    found = filtered(workspace, score).candidates.wild_score
    np.testing.assert_allclose(found, -scores, rtol=1e-4, atol=1e-5 * np.abs(scores).max())


def read_arrays_of(workspace: Workspace, name: str) -> np.ndarray:
    from salcli.artifacts.hdf5 import read_array
    from salcli.stages.evaluate import SCORES_KIND

    return read_array(workspace.find(layout.evaluation_scores(OOD, SEED)), SCORES_KIND, name)


# --- calibration


@pytest.mark.parametrize("score", ["energy", "odin", "vim"])
def test_calibration_on_training_data_changes_the_threshold_alone(workspace: Workspace, score: str) -> None:
    usual, other = (
        filtered(workspace, score, filter__calibration=calibration).candidates for calibration in ("holdout", "train")
    )
    np.testing.assert_array_equal(usual.wild_score, other.wild_score)
    assert len(other.calibration_score) == len(read_arrays(train_gradients(workspace), KIND)["label"])
    assert usual.threshold != other.threshold


def test_a_training_sample_is_not_its_own_neighbour(workspace: Workspace, quick_params: Params) -> None:
    found = filtered(workspace, "knn", filter__calibration="train", evaluate__knn_k=3).candidates
    known = read_arrays(train_gradients(workspace), KIND)["feature"].astype(float).tolist()
    for place in (0, 5, 77):
        others = known[:place] + known[place + 1 :]
        assert found.calibration_score[place] == pytest.approx(-slow_knn(known[place], others, 3), abs=1e-6)


def train_gradients(workspace: Workspace) -> Any:
    return workspace.find(layout.id_gradients("train", SEED))


# --- bad input


@pytest.mark.parametrize("score", ["energy", "gradnorm", "auto"])
def test_only_tau_has_singular_vectors(workspace: Workspace, score: str) -> None:
    with pytest.raises(ParamsError, match=f"singular vectors, which only score sal has, not {score}; use holdout or"):
        filtered(workspace, score, filter__calibration="id-svd")


@pytest.mark.parametrize("score", ["knn"])
def test_more_neighbours_than_samples_are_refused_as_evaluate_does(workspace: Workspace, score: str) -> None:
    n = len(read_arrays(train_gradients(workspace), KIND)["label"])
    with pytest.raises(ParamsError, match=f"evaluate.knn_k is {n + 1}, but there are only {n} ID training samples"):
        filtered(workspace, score, evaluate__knn_k=n + 1)
    with pytest.raises(ParamsError, match=f"there are only {n - 1} other ID training samples"):
        filtered(workspace, score, evaluate__knn_k=n, filter__calibration="train")


def test_other_mistakes_are_told_as_by_evaluate(workspace: Workspace) -> None:
    with pytest.raises(ParamsError, match=r"evaluate\.vim_dim is 64, but must be less than the 64 features"):
        filtered(workspace, "vim", evaluate__vim_dim=64)
    found = train_gradients(workspace)
    stored = read_arrays(found, KIND)
    stored["feature"][:, 20:] = 0
    write_arrays(found.path, KIND, stored, GradientFile.open(found).about)
    notes = Notes()
    filtered(workspace, "mahalanobis", notes, filter__threshold_quantile=0.5)
    (said,) = notes.texts
    assert "spread in 20 of 64 directions" in said


def test_gradients_of_another_classifier_are_refused(workspace: Workspace) -> None:
    found = workspace.find(layout.wild_gradients(OOD, SEED))
    for place in (layout.id_gradients("train", SEED), layout.id_gradients("calibration", SEED)):
        other = workspace.find(place)
        about = {**GradientFile.open(other).about, "network": "another"}
        write_arrays(other.path, KIND, read_arrays(other, KIND), about)
    about = {**GradientFile.open(found).about, "network": "another"}
    write_arrays(found.path, KIND, read_arrays(found, KIND), about)
    with pytest.raises(BadArtifactError, match="was made with another classifier"):
        filtered(workspace, "energy")


def test_scores_that_are_no_numbers_are_refused(workspace: Workspace) -> None:
    found = workspace.find(layout.wild_gradients(OOD, SEED))
    stored = read_arrays(found, KIND)
    stored["feature"][3] = np.nan
    write_arrays(found.path, KIND, stored, GradientFile.open(found).about)
    with pytest.raises(ThresholdError, match="energy gives no finite number for 1 of"):
        filtered(workspace, "energy")


@pytest.mark.parametrize(("score", "reads"), [("sal", 0), ("gradnorm", 0), ("energy", 1), ("odin", 2)])
def test_only_what_a_score_needs_is_read(workspace: Workspace, score: str, reads: int) -> None:
    """Nothing but gradients for τ; the classifier for the others; images for ODIN."""
    before = filtered(workspace, score).candidates
    if reads < 2:
        (workspace.root / layout.prepared_set("digits-0-7").name).unlink()
    if reads < 1:
        (workspace.root / layout.classifier(SEED).name).unlink()
    np.testing.assert_array_equal(filtered(workspace, score).candidates.index, before.index)


# --- what comes after


@pytest.mark.parametrize("score", ["energy", "knn"])
def test_training_and_theory_go_on_from_any_score(workspace: Workspace, quick_params: Params, score: str) -> None:
    found = filtered(workspace, score).candidates
    assert train_ood.run(workspace, quick_params, OOD, SEED).n_outliers == len(found.index)
    checked = theory.run(workspace, quick_params, OOD, SEED)
    assert checked.candidates.score_name == score
    assert checked.estimated is not None
    assert checked.mixture.score != "τ"  # there is none in the file


# --- auto


def test_auto_tries_every_score_with_its_own_threshold(workspace: Workspace) -> None:
    result = filtered(workspace, "auto")
    assert result.comparison is not None
    assert [trial.score for trial in result.comparison.trials] == list(SEPARATORS)
    is_ood = read_wild_truth(workspace.find(layout.wild_truth(OOD, SEED)))
    stored = json.loads(workspace.find(layout.filter_metrics(OOD, SEED)).path.read_text())
    assert stored["score"] == result.comparison.chosen == result.candidates.score_name
    for trial in result.comparison.trials:
        alone = filtered(workspace, trial.score)
        own, truth = alone.candidates, result.comparison.diagnosis[trial.score]
        assert (trial.threshold, trial.n_candidates) == (own.threshold, len(own.index))
        above = np.mean(own.wild_score > own.threshold) - np.mean(own.calibration_score > own.threshold)
        assert trial.excess == pytest.approx(above)
        assert stored["auto"][trial.score]["excess"] == trial.excess
        assert truth.errors == alone.errors
        assert truth.auroc == ood_metrics(-own.wild_score[~is_ood], -own.wild_score[is_ood]).auroc
        if trial.score == result.comparison.chosen:
            np.testing.assert_array_equal(own.index, result.candidates.index)


def test_auto_does_not_look_at_the_truth_and_repeats_itself(workspace: Workspace) -> None:
    before = filtered(workspace, "auto")
    stored = workspace.find(layout.candidates(OOD, SEED)).path.read_bytes()
    (workspace.root / layout.wild_truth(OOD, SEED).name).unlink()
    after = filtered(workspace, "auto")
    assert before.comparison
    assert after.comparison
    assert (after.comparison.trials, after.comparison.chosen) == (before.comparison.trials, before.comparison.chosen)
    assert after.comparison.diagnosis == {}
    assert workspace.find(layout.candidates(OOD, SEED)).path.read_bytes() == stored


def test_auto_takes_a_planted_better_score(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One score is told where the outliers are; the others are what they are."""
    is_ood = torch.from_numpy(read_wild_truth(workspace.find(layout.wild_truth(OOD, SEED))))
    original = Separators.scores

    def planted(self: Separators, name: str) -> tuple[Tensor, Tensor]:
        wild, calibrating = original(self, name)
        if name == "knn":
            ranks = torch.linspace(0, 1, len(calibrating)).double()
            return torch.where(is_ood, 2.0, torch.linspace(0, 1, len(wild)).double()), ranks
        generator = torch.Generator().manual_seed(len(name))
        return torch.rand(len(wild), generator=generator).double(), torch.rand(
            len(calibrating), generator=generator
        ).double()

    monkeypatch.setattr(Separators, "scores", planted)
    result = filtered(workspace, "auto")
    assert result.candidates.score_name == "knn"
    assert result.errors
    assert result.errors.err_out == 0


def test_auto_keeps_tau_where_all_are_equal(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Separators.scores
    monkeypatch.setattr(Separators, "scores", lambda self, _: original(self, "sal"))
    assert filtered(workspace, "auto").candidates.score_name == "sal"


def test_a_score_that_takes_everything_is_not_chosen() -> None:
    ramp = torch.linspace(0, 1, 200).double()
    scores = {"sal": (ramp, ramp), "all": (ramp + 5, ramp), "some": (torch.where(ramp > 0.5, ramp + 1, ramp), ramp)}
    chosen, trials = compare(scores, 0.95, OOD, SEED)
    assert chosen == "some"
    assert [trial.n_candidates for trial in trials] == [10, 200, 100]


def test_odin_passes_the_images_once_and_the_others_not_at_all(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = Classifier.normalised
    monkeypatch.setattr(
        Classifier, "normalised", lambda self, images: seen.append(len(images)) or original(self, images)
    )
    gradients = Gradients.open(workspace, OOD, SEED)
    filtered(workspace, "vim")
    assert not seen
    filtered(workspace, "auto")
    assert sum(seen) == len(gradients.wild) + len(gradients.calibration)


# --- the command


@pytest.mark.parametrize("score", ["energy", "auto"])
def test_the_command_filters_with_any_score(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, score: str) -> None:
    monkeypatch.chdir(workspace.root)
    result = CliRunner().invoke(app, ["filter", "--ood", OOD, "--score", score], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    stored = read_candidates(Workspace(workspace.root, read_from_scratch=True).find(layout.candidates(OOD, SEED)))
    assert "--scratch" in result.output
    if score == "energy":
        assert "−Energy with digits-8-9" in result.output
        assert stored.score_name == "energy"
    else:
        rows = [line for line in result.output.splitlines() if "%" in line and line.strip().startswith(("τ", "−"))]
        assert len(rows) == len(SEPARATORS)
        assert sum("◀" in row for row in rows) == 1
        assert max(map(len, result.output.splitlines())) <= 100


def test_an_unknown_score_gets_the_nearest_name(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.root)
    result = CliRunner().invoke(app, ["filter", "--score", "enrgy"])
    assert isinstance(result.exception, ParamsError) or result.exit_code == 2
    assert "did you mean energy?" in str(result.exception) + result.output


# --- auto, where not every score can be had


def test_auto_does_without_a_score_that_cannot_be_had_and_says_so(workspace: Workspace) -> None:
    notes = Notes()
    found = filtered(workspace, "auto", notes, evaluate__knn_k=100_000)
    assert found.comparison is not None
    assert "knn" not in [trial.score for trial in found.comparison.trials]
    assert any(note.startswith("auto does without knn: evaluate.knn_k is 100000") for note in notes.texts)


def test_auto_on_the_data_that_scores_are_fitted_to_is_refused(workspace: Workspace) -> None:
    with pytest.raises(ParamsError, match="score auto needs calibration holdout"):
        filtered(workspace, "auto", filter__calibration="train")
