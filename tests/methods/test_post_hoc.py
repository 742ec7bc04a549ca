"""Post-hoc scores, each beside its definition written out. A higher score is more OOD."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.networks import random_images, shaken
from helpers.representations import activations, random_head, random_matrix, represented, score_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_ood.detector import DICE, GEN, KNN, NCI, RMD, SCALE, SHE, EnergyBased, MaxSoftmax, ReAct, ViM, fDBD
from pytorch_ood.detector import Mahalanobis as TheirMahalanobis
from pytorch_ood.detector import MaxLogit as TheirMaxLogit
from torch import Tensor

from salcli.errors import ModelError, ParamsError
from salcli.methods import features as feature_scores
from salcli.methods.activations import Ash, Dice, React, Scale
from salcli.methods.base import Head, Known
from salcli.methods.features import (
    Fdbd,
    Knn,
    Mahalanobis,
    MahalanobisPlus,
    Nci,
    Neighbours,
    RelativeMahalanobis,
    She,
    Vim,
    VirtualLogits,
    vim_rule,
)
from salcli.methods.logits import Energy, Gen, MaxLogit, Msp, energy, gradnorm, msp
from salcli.methods.odin import Odin
from salcli.methods.sal import FilterParams, Tau
from salcli.models.network import AsGiven, Classifier, NetworkSpec
from salcli.sal.gradients import Gradients, Representation
from salcli.sal.tau import Spectrum, class_conditional_tau

SEEDS = st.integers(0, 10_000)
Matrix = Callable[..., Tensor]
Score = Callable[..., Tensor]


def test_confident_predictions_keep_their_order_in_double_precision() -> None:
    """In float32 both probabilities are 1, and the ranking would be lost."""
    logits = torch.tensor([[20.0, 0.0], [25.0, 0.0]])
    assert float(logits.softmax(1)[0, 0]) == float(logits.softmax(1)[1, 0])
    assert msp(logits)[0] > msp(logits)[1]
    assert msp(logits).dtype == energy(logits).dtype == torch.float64


@settings(max_examples=20)
@given(seed=SEEDS, n_classes=st.integers(2, 6))
def test_gradnorm_is_the_norm_that_a_backward_pass_gives(seed: int, n_classes: int) -> None:
    features = activations(seed, 4).double()
    layer = torch.nn.Linear(7, n_classes, dtype=torch.float64)
    expected = []
    for feature in features:
        layer.zero_grad()
        (-layer(feature).log_softmax(0).sum() / n_classes).backward()  # cross-entropy with uniform targets
        assert layer.weight.grad is not None
        expected.append(float(layer.weight.grad.abs().sum()))
    assert (-gradnorm(features, layer(features).detach())).tolist() == pytest.approx(expected)


@settings(max_examples=20)
@given(seed=SEEDS, n_features=st.integers(1, 40))
def test_ash_keeps_each_samples_largest_activations_and_scales_them(seed: int, n_features: int) -> None:
    head, features = random_head(seed, n_features=n_features), activations(seed + 2, 5, n_features)
    shaped = np.zeros((5, n_features))
    for row, own in zip(shaped, features.numpy().astype(float), strict=True):
        kept = np.argsort(own)[::-1][: max(1, n_features - round(0.95 * n_features))]
        row[kept] = own[kept] * math.exp(own.sum() / own[kept].sum()) if own.any() else 0
    logits = shaped @ head.weight.numpy().T + head.bias.numpy()  # large ones: exp alone would overflow
    expected = logits.max(1) + np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
    found = score_of(Ash, head, features, features, percentile=95.0)
    np.testing.assert_allclose(-found, expected, rtol=1e-9, atol=1e-9)


def slow_mahalanobis(features: np.ndarray, known: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Means, centred samples, numpy's pseudo-inverse, every distance."""
    means = {k: known[labels == k].mean(0) for k in np.unique(labels)}
    centred = np.stack([row - means[k] for row, k in zip(known, labels, strict=True)])
    precision = np.linalg.pinv(centred.T @ centred / len(known), rcond=1e-12, hermitian=True)
    return np.array([min((x - m) @ precision @ (x - m) for m in means.values()) for x in features])


@pytest.mark.parametrize("cause", ["dead units", "equal units", "few samples", "fewer samples than features"])
def test_a_singular_covariance_is_inverted_where_it_can_be(cause: str) -> None:
    known, features = random_matrix(0, 60, 5).float(), random_matrix(1, 6, 5).float()
    if cause == "dead units":
        known[:, 3:] = 0
    elif cause == "equal units":
        known[:, 4] = known[:, 3]
        known[:, 2] = known[:, 3]
    else:
        known = known[: 5 if cause == "few samples" else 4]
    labels, notes = torch.arange(len(known)) % 2, []
    found = score_of(Mahalanobis, random_head(2, n_features=5), features, known, labels, notes)
    rank = 2 if cause == "fewer samples than features" else 3
    assert f"the ID training features spread in {rank} of 5 directions" in notes[0]
    expected = slow_mahalanobis(features.double().numpy(), known.double().numpy(), labels.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.min() > 0


# --- the leaders of OpenOOD's table, from their papers' formulas, sample by sample


def slow_scores(head: Head, features: np.ndarray, known: np.ndarray, labels: np.ndarray) -> dict[type, list[float]]:
    weight, bias = head.weight.numpy(), head.bias.numpy()
    mean, covariance = known.mean(0), np.cov(known.T, bias=True)
    right = (known @ weight.T + bias).argmax(1) == labels
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (features, known)]
    found: dict[type, list[float]] = {kind: [] for kind in (MaxLogit, Gen, Scale, Fdbd, Nci, She)}
    for f in features:
        logits = weight @ f + bias
        k, p = logits.argmax(), np.exp(logits) / np.exp(logits).sum()
        others = [j for j in range(len(bias)) if j != k]
        distances = [(logits[k] - logits[j]) / np.linalg.norm(weight[k] - weight[j]) for j in others]
        largest = np.sort(f)[::-1][: len(f) - round(0.6 * len(f))].sum()
        factor = np.exp(f.sum() / largest) if largest > 0 else np.e
        own = known[right & (labels == k)]
        found[MaxLogit].append(-max(logits))
        found[Gen].append(sum(q**0.1 * (1 - q) ** 0.1 for q in sorted(p)[-3:]))
        found[Scale].append(-np.log(np.exp(weight @ f * factor + bias).sum()))
        found[Fdbd].append(-np.mean(distances) / np.linalg.norm(f - mean))
        found[Nci].append(-weight[k] @ (f - mean) / np.linalg.norm(f - mean) - 0.01 * np.abs(f).sum())
        found[She].append(-f @ own.mean(0) if len(own) else 0.0)
    background = [(f - mean) @ np.linalg.inv(covariance) @ (f - mean) for f in features]
    found[RelativeMahalanobis] = list(slow_mahalanobis(features, known, labels) - background)
    found[MahalanobisPlus] = list(slow_mahalanobis(*unit, labels))
    return found


NUMBERS = {Gen: {"gamma": 0.1, "most_classes": 3}, Scale: {"percentile": 60.0}, Nci: {"alpha": 0.01}}


@pytest.mark.parametrize("kind", [MaxLogit, Gen, Scale, Fdbd, Nci, She, RelativeMahalanobis, MahalanobisPlus])
@pytest.mark.parametrize("of", ["activations", "vectors"])
def test_a_score_is_its_papers_formula(kind: type, of: str) -> None:
    head, labels = random_head(0), torch.arange(90) % 3  # no sample is of the last class
    make = activations if of == "activations" else lambda seed, n: random_matrix(seed, n, 7).float()
    known, features = make(1, 90), make(2, 40)
    found = score_of(kind, head, features, known, labels, **NUMBERS.get(kind, {}))
    expected = slow_scores(head, features.double().numpy(), known.double().numpy(), labels.numpy())[kind]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_extreme_samples_have_finite_scores() -> None:
    """The mean of all training features, no activation at all, a certain prediction, two classes with equal weights."""
    head, known = random_head(0), torch.eye(7).repeat(4, 1)
    head.weight[1] = head.weight[0]
    features = torch.stack([known.mean(0), torch.zeros(7), 1e4 * known[0], -known[0]])
    for kind in (Scale, Ash, Fdbd, Nci, She, Gen, RelativeMahalanobis, MahalanobisPlus):
        numbers = {"percentile": 85.0} if kind in (Scale, Ash) else NUMBERS.get(kind, {})
        assert score_of(kind, head, features, known, torch.arange(28) % 4, **numbers).isfinite().all(), kind.name


def test_vectors_are_put_on_the_sphere_as_they_were_given() -> None:
    """Standardization would change the angles."""
    head, labels, undo = random_head(0), torch.arange(90) % 3, AsGiven(torch.linspace(1, 4, 7), torch.ones(7))
    known, features, method = random_matrix(1, 90, 7), random_matrix(2, 9, 7), MahalanobisPlus()
    method.fit(Known(head, represented(head, known, labels), as_given=undo))
    given = [undo(rows).numpy() / np.linalg.norm(undo(rows), axis=1, keepdims=True) for rows in (features, known)]
    np.testing.assert_allclose(method.scores(represented(head, features)), slow_mahalanobis(*given, labels.numpy()))


def slow_vim(features: np.ndarray, head: Head, known: np.ndarray, dim: int) -> np.ndarray:
    weight, bias = head.weight.numpy(), head.bias.numpy()
    origin = -np.linalg.pinv(weight) @ bias
    principal = np.linalg.svd(known - origin)[2][:dim]

    def left_over(rows: np.ndarray) -> np.ndarray:
        shifted = rows - origin
        return np.linalg.norm(shifted - shifted @ principal.T @ principal, axis=1)

    alpha = (known @ weight.T + bias).max(1).mean() / left_over(known).mean()
    return alpha * left_over(features) - np.log(np.exp(features @ weight.T + bias).sum(1))


def test_vim_leaves_a_direction_over_where_the_training_features_span_few() -> None:
    """Else their own left-over is zero, and its scale infinite."""
    head = Head(random_matrix(0, 4, 7), torch.zeros(4, dtype=torch.float64))
    known, features, notes = activations(1, 50), activations(2, 5), []
    known[:, 3:] = 0
    found = score_of(Vim, head, features, known, notes=notes, dim=5)
    assert "span 3 dimensions, so its principal space has 2 instead of 5" in notes[0]
    np.testing.assert_allclose(found, slow_vim(features.double().numpy(), head, known.double().numpy(), 2), rtol=1e-6)
    nothing = Representation(torch.zeros(50, 7), torch.zeros(50, 4), torch.arange(50) % 4)
    collapsed = VirtualLogits.fit(Known(head, nothing), 3)
    assert collapsed.rank == 0
    torch.testing.assert_close(collapsed.score(features), energy(head.logits(features)))


def test_vim_of_fewer_training_samples_than_features() -> None:
    head, known, features = random_head(0), activations(1, 6), activations(2, 5)
    found = score_of(Vim, head, features, known, dim=3)
    np.testing.assert_allclose(found, slow_vim(features.double().numpy(), head, known.double().numpy(), 3), rtol=1e-6)


def test_a_principal_space_of_all_features_is_an_error() -> None:
    head, known = random_head(0), activations(1, 50)
    with pytest.raises(ParamsError, match="must be less than the 7 features of the network; auto would be 3"):
        score_of(Vim, head, known, known, dim=7)
    assert [vim_rule(width) for width in (1, 64, 767, 768, 2048)] == [0, 32, 383, 512, 1000]  # the authors' rule


# --- KNN, beside all distances in float64

N_KNOWN, D = 600, 96


def slow_kth_distances(features: Tensor, known: Tensor, k: int) -> np.ndarray:
    """Every difference in float64."""
    sphere = [(rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)).double().numpy() for rows in (features, known)]
    differences = sphere[0][:, None] - sphere[1][None]  # n, m, d
    return np.sort(np.sqrt((differences**2).sum(axis=2)), axis=1)[:, k - 1]


def cloud(n: int, seed: int, spread: float = 1.0) -> Tensor:
    centre = torch.rand(D, generator=torch.Generator().manual_seed(0))
    return (centre + spread * torch.randn(n, D, generator=torch.Generator().manual_seed(seed))).relu()


@pytest.mark.parametrize("k", [1, 50, N_KNOWN])
def test_float32_finds_a_neighbour_as_far_as_the_one_of_float64(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block. Products are exact to 1e-7, so squared distances are."""
    monkeypatch.setattr(feature_scores, "PRODUCTS_AT_ONCE", 7 * N_KNOWN)
    known, queries = cloud(N_KNOWN, 1), torch.cat([cloud(80, 2), cloud(20, 1)])
    known[:50], queries[:3] = known[0], 0.0  # equal ones, and some at no length
    found = Neighbours.of(known, k).distance(queries)
    np.testing.assert_allclose(found.square(), slow_kth_distances(queries, known, k) ** 2, rtol=1e-6, atol=2e-7)
    near = Neighbours.of(cloud(N_KNOWN, 1, 1e-3), k).distance(cloud(30, 2, 1e-3))
    np.testing.assert_allclose(
        near.square(), slow_kth_distances(cloud(30, 2, 1e-3), cloud(N_KNOWN, 1, 1e-3), k) ** 2, atol=1e-6
    )


def test_the_neighbours_of_a_training_sample_are_the_other_samples() -> None:
    """Else each would be its own nearest neighbour, and training data would look too much like ID data."""
    known = cloud(12, 1)
    x = Representation(known, torch.zeros(12, 2), torch.zeros(12, dtype=torch.int64))
    head = Head(torch.zeros(2, D), torch.zeros(2))
    knn = Knn(Knn.Params(k=3))
    knn.fit(Known(head, x))
    np.testing.assert_allclose(knn.scores(x, fitted_on=True), slow_kth_distances(known, known, 3 + 1), rtol=1e-5)
    with pytest.raises(ParamsError, match=r"methods\.knn\.k is 13, but there are only 12 ID training samples"):
        Knn(Knn.Params(k=13)).fit(Known(head, x))


# --- ODIN, beside its definition: one sample at a time, with one backward pass each

STD = (0.2, 0.3, 0.5)


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.0014, 0.1])
def test_odin_is_msp_after_a_step_that_makes_the_prediction_more_certain(temperature: float, epsilon: float) -> None:
    torch.manual_seed(0)
    network = Classifier(NetworkSpec("small-cnn", 4, (0.4, 0.5, 0.6), STD)).eval()
    shaken(network.backbone)
    images, expected = random_images(6, 3, 8, 8), []
    for image in images:
        x = network.normalised(image[None]).requires_grad_()
        certainty = (network.head(network.backbone(x)) / temperature).log_softmax(1).max()
        (gradient,) = torch.autograd.grad(certainty, x)
        step = epsilon * gradient.sign() / torch.tensor(STD)[:, None, None]
        logits = network.head(network.backbone(x + step)).double() / temperature
        expected.append(float(logits.softmax(1).max().detach()))
    odin = Odin(Odin.Params(temperature=temperature, epsilon=epsilon))
    with torch.inference_mode():  # as a pass over samples computes them
        found = odin.score(odin.outputs(network)(images))
    assert (-found).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_network_without_gradients_is_refused() -> None:
    network = Classifier(NetworkSpec("small-cnn", 4, (0.4, 0.5, 0.6), STD)).eval()
    network.backbone.forward = torch.no_grad()(network.backbone.forward)
    with pytest.raises(ModelError, match="odin needs gradients"):
        Odin(Odin.Params(temperature=1, epsilon=0.1)).outputs(network)(random_images(2, 3, 8, 8))


def test_a_nearly_constant_dimension_of_vectors_does_not_saturate_the_scores() -> None:
    """Divided by its std, ε would be a step of a million standard deviations."""
    torch.manual_seed(0)
    network = Classifier(NetworkSpec("linear", 2, (0.0,) * 4, (1.0, 0.05, 1e-9, 1e-20))).eval()
    vectors = torch.randn(20, 4) * torch.tensor(network.spec.std)
    odin = Odin(Odin.Params(temperature=1000, epsilon=0.0014))
    with torch.inference_mode():
        found, plain = odin.score(odin.outputs(network)(vectors)), network(vectors).softmax(1).amax(1)
    assert len(found.unique()) == 20
    assert torch.equal((-found).argsort(), plain.argsort()), "of two classes and a linear network, the step is the same"


@pytest.mark.parametrize("gradient", ["full", "predicted-row"])
@pytest.mark.parametrize("directions", ["pool", "wild"])
def test_sal_post_hoc_is_tau_and_0_for_classes_that_nothing_is_predicted_as(gradient: str, directions: str) -> None:
    head, notes = random_head(0), []
    known, calibration, wild, test = (represented(head, activations(seed, 80)) for seed in (1, 2, 3, 4))
    calibration, wild = (one.take(torch.nonzero(one.predicted != 1).flatten()) for one in (calibration, wild))
    test.feature[5], test.logits[5] = torch.nan, torch.nan
    params = FilterParams(
        score="sal", threshold_quantile=0.95, fdr=None, certified=None, calibration="holdout", directions=directions,
        temperature=1, svd="class-conditional", reference="class-conditional", n_vectors=1, gradient=gradient,
        labels="predicted",
    )  # fmt: skip
    method = Tau(params)
    method.fit(Known(head, known, wild, note=notes.append, calibration=calibration))
    row_only, is_pool = gradient == "predicted-row", directions == "pool"
    others = [Gradients(x, x.predicted, row_only) for x in ([calibration, wild] if is_pool else [wild])]
    spectrum = Spectrum(Gradients(known, known.label, row_only), others, is_pool)
    of_classes = spectrum.of_classes(range(4), class_conditional_reference=True)
    (tau,) = class_conditional_tau(of_classes, [Gradients(test, test.predicted, row_only)])
    lacks = (test.predicted == 1) & ~test.feature.isnan().any(1)
    expected = torch.where(lacks, 0.0, tau)
    torch.testing.assert_close(method.scores(test), expected, equal_nan=True)
    assert 0 < int(lacks.sum()) < len(test)
    assert expected[5].isnan()
    assert f"{int(lacks.sum())} samples are of classes that no wild sample is predicted as" in notes[0]
    assert method.is_exact == is_pool
    method.compact(0)  # as a detector's file has it
    rows = torch.arange(len(test)) != 5
    torch.testing.assert_close(method.score(test)[rows], expected[rows], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("seed", "percentile"), [(0, 10.0), (1, 50.0), (2, 80.0), (3, 95.0), (4, 99.9)])
def test_scores_are_those_of_pytorch_ood(seed: int, percentile: float) -> None:
    """Up to the single precision of the library, where it has the same score."""
    head, labels = random_head(10 * seed), torch.arange(60) % 4
    known, features = activations(10 * seed + 2, 60), activations(10 * seed + 3, 5)
    logits, layer = head.logits(features), torch.nn.Linear(7, 4)
    layer.load_state_dict(dict(vars(head)))
    theirs = {
        (Msp,): MaxSoftmax.score(logits),
        (Energy,): EnergyBased.score(logits),
        (Knn, ("k", 7)): KNN(None, k=7).fit_features(known, labels).predict_features(features),
        (React, ("percentile", percentile)): ReAct(None, head.logits, percentile=percentile / 100)
        .fit_feature_maps(known, labels)
        .predict_feature_maps(features),
        (Dice, ("percentile", percentile)): DICE(None, head.weight, head.bias, percentile / 100)
        .fit_features(known, labels)
        .predict_features(features),
        (Vim, ("dim", 3)): ViM(None, 3, head.weight, head.bias).fit_features(known, labels).predict_features(features),
        # its covariance is a sum over all 60 samples, not a mean, and it halves the distance
        (Mahalanobis,): 120 * TheirMahalanobis(None).fit_features(known, labels).predict_features(features),
        (RelativeMahalanobis,): 60 * RMD(None).fit_features(known, labels).predict_features(features),
        (MaxLogit,): TheirMaxLogit.score(logits),
        (Gen, ("gamma", 0.1), ("most_classes", 3)): 3 * GEN.score(logits, 0.1, 3),  # they take the mean
        (Fdbd,): fDBD(None, layer).fit_features(known).predict_features(features),
        (Nci, ("alpha", 0.01)): NCI(None, layer, 0.01).fit_features(known).predict_features(features),
    }
    if percentile < 90:  # else theirs divide by sums of no activations, and here no sample of some class is right
        theirs[She,] = SHE(None, layer).fit_features(known, labels).predict_features(features)
        scale = SCALE(None, lambda maps: head.logits(maps.flatten(1)), percentile / 100)
        theirs[Scale, ("percentile", percentile)] = scale.predict_feature_maps(features[:, :, None, None])
    for (kind, *numbers), expected in theirs.items():
        found = score_of(kind, head, features, known, labels, **dict(numbers))
        torch.testing.assert_close(found, expected.double(), rtol=1e-3, atol=1e-3, msg=kind.name)
