"""evaluate: every method's score on the test data is what its definition says, from one pass over them."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch
from conftest import OOD, SEED
from test_filter_variants import dense, right_singular_vectors
from torch import Tensor, nn

from salcli import params as params_module
from salcli.artifacts import layout
from salcli.artifacts.gradients import KIND, GradientFile
from salcli.artifacts.hdf5 import read_arrays, reading, write_arrays
from salcli.errors import SalError
from salcli.models.contrastive import ENCODERS
from salcli.models.network import Classifier
from salcli.params import Params, load_params
from salcli.progress import Silent
from salcli.rivals.odin import odin_logits
from salcli.stages import evaluate
from salcli.stages.evaluate import SCORES_KIND
from salcli.stages.inputs import classifier_of, id_images, ood_test_images
from salcli.stages.rival_scores import RIVALS
from salcli.stages.scoring import TRAINED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from salcli.artifacts.layout import Workspace
    from salcli.progress import Task

N_CLASSES = 8


class Notes(Silent):
    """Keeps what people are told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Task]:
        self.total, self.done = total, 0
        yield self

    def advance(self, n: int, **values: float) -> None:
        self.done += n

    def note(self, text: str) -> None:
        self.texts.append(text)


def run(workspace: Workspace, methods: list[str], notes: Notes | None = None, **overrides: object) -> np.ndarray:
    """Scores of the only or the last method: those of the ID test set, then those of the OOD test set."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    params, _ = load_params(workspace.root / "params.yaml", {"evaluate.methods": methods, **changes})
    evaluate.run(workspace, params, OOD, SEED, notes)
    with reading(workspace.find(layout.evaluation_scores(OOD, SEED)), SCORES_KIND) as file:
        return np.concatenate([file[f"{methods[-1]}/{side}"][:] for side in ("id", "ood")])


def all_images(workspace: Workspace, params: Params) -> Tensor:
    parts = id_images(workspace, params.data.id, "test", SEED).images, ood_test_images(workspace, OOD, SEED)
    return torch.cat([part.read(slice(None)) for part in parts])


# --- all methods


def test_every_method_is_scored_by_someone() -> None:
    assert set(get_args(params_module.Method)) == {*RIVALS, *TRAINED, *ENCODERS, "sal-posthoc", "odin"}


@pytest.mark.parametrize("method", sorted({*RIVALS, "sal-posthoc", "odin"} - {"ash"}))
def test_id_test_data_score_higher_than_digits_of_other_classes(workspace: Workspace, method: str) -> None:
    """ASH apart: of 64 features it keeps 3, and its exponential prefers the undecided."""
    scores = run(workspace, [method])
    params, _ = load_params(workspace.root / "params.yaml")
    n_id = len(id_images(workspace, params.data.id, "test", SEED))
    assert np.median(scores[:n_id]) > np.median(scores[n_id:])


def test_the_test_images_pass_the_id_classifier_once_and_once_more_for_odin(
    workspace: Workspace, quick_params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = Classifier.features
    monkeypatch.setattr(Classifier, "features", lambda self, images: seen.append(len(images)) or original(self, images))
    notes, n_images = Notes(), len(all_images(workspace, quick_params))
    run(workspace, [*RIVALS, "sal-posthoc", "odin"], notes)
    assert sum(seen) == n_images  # ODIN has its own way in, after the normalisation
    assert notes.done == notes.total == 2 * n_images


def test_methods_alone_and_together_give_the_same_scores(workspace: Workspace) -> None:
    for method in ("react", "vim", "sal-posthoc"):
        np.testing.assert_array_equal(run(workspace, [method]), run(workspace, ["knn", "odin", "dice", method]))


def test_every_method_works_in_a_lower_precision_and_in_small_batches(workspace: Workspace) -> None:
    methods = [*RIVALS, "sal-posthoc", "odin"]
    exact = run(workspace, methods)
    rough = run(workspace, methods, numerics__precision="bfloat16", evaluate__batch_size=100)
    assert 0 < np.abs(exact - rough).max() < 0.1 * np.abs(exact).max()
    assert np.corrcoef(exact, rough)[0, 1] > 0.9


def test_gradients_are_read_only_by_methods_that_need_them(workspace: Workspace) -> None:
    shutil.rmtree(workspace.root / "runs" / str(SEED) / OOD)
    (workspace.root / layout.id_gradients("train", SEED).name).unlink()
    run(workspace, ["msp", "energy", "ash", "gradnorm", "odin"])
    for method in ("knn", "sal-posthoc"):
        with pytest.raises(SalError, match="gradients"):
            run(workspace, [method])


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("odin", "odin_temperature", 1),
        ("odin", "odin_epsilon", 0.1),
        ("knn", "knn_k", 5),
        ("react", "react_percentile", 50),
        ("dice", "dice_percentile", 20),
        ("ash", "ash_percentile", 60),
        ("vim", "vim_dim", 10),
        ("sal-posthoc", "n_vectors", 3),
    ],
)
def test_every_parameter_reaches_its_method(workspace: Workspace, method: str, key: str, value: float) -> None:
    section = "filter" if key == "n_vectors" else "evaluate"
    assert not np.allclose(run(workspace, [method]), run(workspace, [method], **{f"{section}__{key}": value}))


def test_features_without_spread_are_said(workspace: Workspace) -> None:
    """Half of the units die; the network still has them all."""
    found = workspace.find(layout.id_gradients("train", SEED))
    stored = read_arrays(found, KIND)
    stored["feature"][:, 20:] = 0
    write_arrays(found.path, KIND, stored, GradientFile.open(found).about)
    notes = Notes()
    assert np.isfinite(run(workspace, ["mahalanobis", "vim"], notes)).all()
    singular, narrow = notes.texts
    assert "mahalanobis: within classes the ID training features spread in 20 of 64 directions" in singular
    assert narrow.startswith("vim: the ID training features span ")
    assert narrow.endswith(" instead of 32")


# --- ODIN


def test_odin_steps_against_the_gradient_of_the_normalised_input(workspace: Workspace, quick_params: Params) -> None:
    """The slow truth: one image after the other, the gradient of its largest log-probability."""
    network, _ = classifier_of(workspace, SEED)
    network.eval()
    scores = run(workspace, ["odin"], evaluate__odin_epsilon=0.05)
    (std,) = network.spec.std
    for place in (0, 5, 200, len(scores) - 1):
        image = all_images(workspace, quick_params)[place : place + 1]
        x = ((image.float() / 255 - network.mean) / network.std).requires_grad_()
        (network.head(network.backbone(x)) / 1000).log_softmax(1).max().backward()
        assert x.grad is not None
        with torch.no_grad():
            logits = network.head(network.backbone(x + 0.05 / std * x.grad.sign()))[0].double() / 1000
        assert scores[place] == pytest.approx(float(logits.exp().max() / logits.exp().sum()), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_odin_does_not_depend_on_the_batch_and_leaves_no_gradients(batch_size: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))
    images = torch.randn(7, 3, 2, 2)
    with torch.inference_mode():  # as in a pass over images
        parts = [odin_logits(network, part, [0.5, 1.0, 2.0], 1000.0, 0.1) for part in images.split(batch_size)]
    expected = []
    for image in images.double():
        step = numeric_gradient(network, image).sign() / torch.tensor([0.5, 1.0, 2.0])[:, None, None]
        expected.append(network((image + 0.1 * step)[None].float())[0])
    torch.testing.assert_close(torch.cat(parts), torch.stack(expected).detach(), rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in network.parameters())


def numeric_gradient(network: nn.Module, image: Tensor) -> Tensor:
    """Of the largest log-probability, by central differences: nothing of autograd."""
    precise = deepcopy(network).double()
    slope, change = torch.zeros_like(image), 1e-5
    with torch.no_grad():
        for place in np.ndindex(*image.shape):
            ends = []
            for sign in (1, -1):
                moved = image.clone()
                moved[place] += sign * change
                ends.append((precise(moved[None]) / 1000).log_softmax(1).max())
            slope[place] = ends[0] - ends[1]
    return slope


# --- SAL, post hoc


def slow_posthoc(workspace: Workspace, params: Params) -> np.ndarray:
    """Dense gradients of training, wild and test data, numpy's SVD, class by class."""
    chosen = params.filter
    network, _ = classifier_of(workspace, SEED)
    network.eval()
    with torch.no_grad():
        features, logits = network.features_and_logits(all_images(workspace, params))
    label = logits.argmax(1).numpy()
    probabilities = logits.double().softmax(1).numpy()
    stored = {"feature": features.numpy(), "residual": probabilities - np.eye(N_CLASSES)[label], "label": label}
    id_train, wild = (
        read_arrays(workspace.find(place), KIND)
        for place in (layout.id_gradients("train", SEED), layout.wild_gradients(OOD, SEED))
    )
    id_rows, wild_rows, test_rows = (dense(one, one["label"], chosen.gradient) for one in (id_train, wild, stored))
    scores = np.zeros(len(label))
    for k in range(N_CLASSES):
        own, of_class = label == k, id_train["label"] == k
        reference = (id_rows[of_class] if chosen.reference == "class-conditional" else id_rows).mean(axis=0)
        centred = wild_rows[wild["label"] == k] - reference
        if chosen.svd == "class-agnostic":
            means = np.stack([id_rows[id_train["label"] == c].mean(axis=0) for c in range(N_CLASSES)])
            centred = wild_rows - means[wild["label"]]
        vectors = right_singular_vectors(centred, chosen.n_vectors)
        scores[own] = -np.square((test_rows[own] - reference) @ vectors.T).sum(axis=1) / chosen.n_vectors
    return scores


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"filter.svd": "class-agnostic"},
        {"filter.reference": "global"},
        {"filter.n_vectors": 3},
        {"filter.gradient": "predicted-row"},
        {"filter.score": "gradnorm", "filter.threshold_quantile": 0.5},
    ],
    ids=str,
)
def test_sal_posthoc_is_minus_tau_of_the_test_data_as_the_filter_has_it(
    workspace: Workspace, changes: dict[str, Any]
) -> None:
    params, _ = load_params(workspace.root / "params.yaml", changes)
    found = run(workspace, ["sal-posthoc"], **{key.replace(".", "__"): value for key, value in changes.items()})
    expected = slow_posthoc(workspace, params)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_random_labels_give_another_post_hoc_score_and_the_same_each_time(workspace: Workspace) -> None:
    first, second = (run(workspace, ["sal-posthoc"], filter__labels="random") for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, run(workspace, ["sal-posthoc"]))


def test_a_class_that_no_wild_sample_is_predicted_as_counts_as_id_and_is_said(
    workspace: Workspace, quick_params: Params
) -> None:
    found = workspace.find(layout.wild_gradients(OOD, SEED))
    stored = read_arrays(found, KIND)
    lacking = stored["predicted"] != 3
    write_arrays(
        found.path, KIND, {name: values[lacking] for name, values in stored.items()}, GradientFile.open(found).about
    )
    notes = Notes()
    scores = run(workspace, ["sal-posthoc"], notes)
    network, _ = classifier_of(workspace, SEED)
    network.eval()
    with torch.no_grad():
        unknown = (network(all_images(workspace, quick_params)).argmax(1) == 3).numpy()
    assert unknown.sum() > 10
    assert (scores[unknown] == 0).all()
    assert (scores[~unknown] < 0).all()
    [text] = notes.texts
    assert text.startswith(f"sal-posthoc: {unknown.sum()} test samples are of classes that no wild sample is")


def test_wild_gradients_of_another_mixture_are_refused(workspace: Workspace) -> None:
    found = workspace.find(layout.wild_gradients(OOD, SEED))
    about = GradientFile.open(found).about
    write_arrays(found.path, KIND, read_arrays(found, KIND), {**about, "wild": "of-another"})
    with pytest.raises(SalError, match=r"gradients-wild\.h5 was made with"):
        run(workspace, ["sal-posthoc"])
    run(workspace, ["msp", "knn"])
