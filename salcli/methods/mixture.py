"""SAL+: the wild data are a mixture of ID data and outliers, and one linear model says which sample is what.

Held-out ID samples C (n) are compared with *all* wild samples W (m). Because a wild sample is ID or an outlier, the
ratio of their densities is bounded below, and the model knows that:

    p(W|x) / p(C|x) = (m/n) · (1 + e^h(x)),   h(x) = a + 3 u(x) + b g(x) + ⟨w, z(x)⟩

    u   the committee, the mean of post-hoc scores as normal quantiles on C ∪ W, and 0.3 d, at unit variance
    d   is larger for samples that are more alike to those with the most outlying committee scores than to training data
    g   a linear direction of W against all ID samples at hand, by ridge regression; b ≥ 0
    z   features, logits and score quantiles; each of these blocks has the total variance v
    a, b, w have normal priors, so the fit minimises −log-likelihood + ½ (a + 5)² / 25 + ½ b² / 3 + ½ ‖w‖²

e^h / (1 + e^h) is the probability that a wild sample is an outlier, and h scores any sample. ID samples in the bulk
have no gradient. Without outliers a falls, w and b go to 0, and the ranking is the committee's. How far w may go, v, is
not known: h is averaged over some v, weighted by their evidence (Laplace's approximation).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from salcli.methods.features import Neighbours

SLOPE = 3.0  # of u; it is not learned, because without outliers any slope fits
CONTRAST = 0.3  # d in u, where the committee counts 1
OUTLYING = 0.05  # share of C ∪ W that d compares with
N_NEIGHBOURS = 5
ITSELF = 1e-3  # the least distance of another sample
TOTAL_VARIANCES = (0.3, 1.0, 3.0, 10.0)  # v
DIRECTION_VARIANCE = 3.0  # of b
OFFSET, OFFSET_VARIANCE = -5.0, 25.0
NEGLIGIBLE = 15.0  # a log evidence so far below another one weighs nothing
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # times the mean variance of a feature
MOST_COMPONENTS = 400  # principal components of the features in z
MOST_ROWS = 10_000  # of a side that are fitted to
MOST_KNOTS = 1_000  # of a table of quantiles
N_FOLDS = 5
Matrix = NDArray[np.float64]


class Samples(NamedTuple):
    """What the model sees of n samples. Scores are outlier scores of the committee's members, one per column."""

    feature: Float[Tensor, "n d"]
    logits: Float[Tensor, "n k"]
    scores: Float[Tensor, "n s"]

    def take(self, rows: NDArray[np.int64]) -> Samples:
        index = torch.from_numpy(rows)
        return Samples(*(one[index] for one in self))


@dataclass(frozen=True)
class NormalQuantiles:
    """Maps each score to the standard normal quantile of its rank among the samples it was fitted to.

    Equal scores have the middle of their ranks, scores in between are interpolated, and scores beyond the largest or
    smallest go on as the logarithm of their distance, in units of the spread.
    """

    value: Float[Tensor, "s u"]
    quantile: Float[Tensor, "s u"]
    spread: Float[Tensor, " s"]

    @classmethod
    def fit(cls, scores: Float[Tensor, "n s"]) -> NormalQuantiles:
        columns = [torch.unique(column, return_counts=True) for column in scores.double().T]
        n_knots = min(MOST_KNOTS, max(len(value) for value, _ in columns))
        level = torch.special.ndtr(torch.linspace(-5, 5, n_knots, dtype=torch.float64))
        values, quantiles = [], []
        for value, count in columns:
            middle = (count.cumsum(0) - count.double() / 2) / len(scores)
            at = torch.searchsorted(middle, level).clamp(max=len(value) - 1)
            if len(value) <= n_knots:  # all of them, the last one repeated
                at = torch.arange(n_knots).clamp(max=len(value) - 1)
            values.append(value[at])
            quantiles.append(torch.special.ndtri(middle[at]))
        low, high = torch.from_numpy(np.quantile(scores.double().numpy(), [0.25, 0.75], axis=0))
        spread = torch.where(high > low, (high - low) / 1.349, scores.double().std(0, correction=0))
        return cls(torch.stack(values), torch.stack(quantiles), torch.where(spread > 0, spread, 1.0))

    def __call__(self, scores: Float[Tensor, "n s"]) -> Float[Tensor, "n s"]:
        columns = [_interpolated(*each) for each in zip(scores.double().T, self.value, self.quantile, strict=True)]
        above = (scores - self.value[:, -1]).clamp(min=0) / self.spread
        below = (self.value[:, 0] - scores).clamp(min=0) / self.spread
        return torch.stack(columns, dim=1) + above.log1p() - below.log1p()

    def committee(self, scores: Float[Tensor, "n s"]) -> Float[Tensor, " n"]:
        """The mean of the quantiles. Fitted to C ∪ W it treats both alike, so its p-values are exact."""
        return self(scores).mean(dim=1)


def _interpolated(x: Float[Tensor, " n"], at: Float[Tensor, " u"], value: Float[Tensor, " u"]) -> Float[Tensor, " n"]:
    """Linearly between the points, constant beyond them. A graph for other programs cannot call numpy."""
    if not torch.compiler.is_compiling():
        return torch.from_numpy(np.interp(x.numpy(), at.numpy(), value.numpy()))
    left = ((at <= x[:, None]).sum(dim=1) - 1).clamp(0, len(at) - 2)
    step = (at[left + 1] - at[left]).clamp(min=1e-30)  # programs that run the graph store the limit in float32
    share = ((x - at[left]) / step).clamp(0, 1)
    return value[left] + share * (value[left + 1] - value[left])


@dataclass(frozen=True)
class Contrast:
    """d: the cosine to the k-th nearest of the most outlying samples of C ∪ W, less that of ID training samples.

    Features are standardized on C ∪ W. A sample is not its own neighbour, so d too treats C and W alike.
    """

    mean: Float[Tensor, " d"]
    inverse_std: Float[Tensor, " d"]
    outlying: Neighbours
    training: Neighbours

    @classmethod
    def fit(cls, pool: Float[Tensor, "n d"], score: Float[Tensor, " n"], training: Float[Tensor, "l d"]) -> Contrast:
        mean, inverse_std = pool.double().mean(0), torch.from_numpy(_inverse(pool.double().numpy().std(0)))
        n_outlying = min(max(N_NEIGHBOURS + 2, round(OUTLYING * len(pool))), len(pool))
        is_outlying = score >= score.topk(n_outlying).values[-1]
        sides = [((one.double() - mean) * inverse_std).float() for one in (pool[is_outlying], training)]
        return cls(mean, inverse_std, *(Neighbours.of(one, min(N_NEIGHBOURS, len(one) - 1)) for one in sides))

    def __call__(self, feature: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        x, k = (feature.double() - self.mean) * self.inverse_std, self.outlying.k
        first, kth, next_one = (replace(self.outlying, k=i).distance(x) for i in (1, k, k + 1))
        return (self.training.distance(x) ** 2 - torch.where(first < ITSELF, next_one, kth) ** 2) / 2


@dataclass(frozen=True)
class Mixture:
    """The fitted model: h is linear in features, logits, score quantiles and d."""

    quantiles: NormalQuantiles
    contrast: Contrast
    contrast_weight: Float[Tensor, ""]
    weight: Float[Tensor, " c"]
    offset: Float[Tensor, ""]
    evidence: Float[Tensor, " v"]  # the weight of each total variance

    def h(self, x: Samples) -> Float[Tensor, " n"]:
        """Outlier scores of any samples; sigmoid(h) is P(outlier) of a wild one."""
        columns = [x.feature.double(), x.logits.double(), self.quantiles(x.scores)]
        return torch.cat(columns, dim=1) @ self.weight + self.contrast_weight * self.contrast(x.feature) + self.offset


class HeldOut(NamedTuple):
    """h of samples by models of folds that left them out."""

    calibration: Float[Tensor, " n"]
    wild: Float[Tensor, " m"]


def fit_mixture(
    training: Float[Tensor, "l d"], calibration: Samples, wild: Samples, *, is_frozen: bool = False, seed: int = 0
) -> Mixture:
    """Fit C against W. `training` are features of the ID training data; g learns from them too where the features have
    not been trained on them (a frozen backbone). The seed draws the rows of sides with more than MOST_ROWS."""
    rng = np.random.default_rng(seed)
    few = [one.take(np.sort(rng.permutation(len(one.logits))[:MOST_ROWS])) for one in (calibration, wild)]
    training = training[torch.from_numpy(np.sort(rng.permutation(len(training))[:MOST_ROWS]))]
    pool = Samples(*(torch.cat(parts).double() for parts in zip(*few, strict=True)))
    is_wild = np.arange(len(pool.logits)) >= len(few[0].logits)
    quantiles = NormalQuantiles.fit(pool.scores)

    # every block is an affine map of [features, logits, quantiles], and so is h
    rotation, direction, left_out = _directions(pool.feature.numpy(), is_wild, training if is_frozen else None)
    inputs = [one.numpy() for one in (pool.feature, pool.logits, quantiles(pool.scores))]
    n_inputs = [one.shape[1] for one in inputs]
    maps = [rotation, np.diag(_inverse(inputs[1].std(0))), np.diag(_inverse(inputs[2].std(0)))]
    blocks = []
    for i, (own, block) in enumerate(zip(inputs, maps, strict=True)):
        projected = (own - own.mean(0)) @ block
        scale = 1 / np.sqrt(max(projected.var(0).sum(), 1e-300))
        blocks.append(scale * projected)
        block *= scale
        maps[i] = np.concatenate([block if i == j else np.zeros((n, block.shape[1])) for j, n in enumerate(n_inputs)])
    mean_quantile = inputs[2].mean(1)
    contrast = Contrast.fit(pool.feature, torch.from_numpy(mean_quantile), training)
    d = contrast(pool.feature).numpy()
    scales = np.array([_inverse(mean_quantile.std()), CONTRAST * _inverse(d.std())])
    u = np.column_stack([mean_quantile - mean_quantile.mean(), d - d.mean()])
    scales *= SLOPE * _inverse((u @ scales).std())
    u = u @ scales
    g_scale = _inverse(left_out.std())
    g = g_scale * (left_out - left_out.mean())

    z, log_ratio = np.concatenate(blocks, axis=1), np.log(is_wild.sum() / (~is_wild).sum())
    start, fits = np.r_[OFFSET, 0.0, np.zeros(z.shape[1])], []
    for v in TOTAL_VARIANCES:
        prior = np.r_[1 / OFFSET_VARIANCE, 1 / DIRECTION_VARIANCE, np.full(z.shape[1], 1 / v)]
        found, log_evidence = _fitted(np.column_stack([np.ones(len(u)), g, z]), u, is_wild, log_ratio, prior, start)
        fits.append((log_evidence, found))
        start = found
        if (
            log_evidence < fits[0][0] - NEGLIGIBLE and log_evidence < fits[-2][0]
        ):  # larger v have less, and take longest
            break
    evidence = np.array([one for one, _ in fits])
    evidence = np.exp(evidence - evidence.max())
    evidence /= evidence.sum()
    a, b, *w = evidence @ np.stack([found for _, found in fits])

    weight = np.concatenate(maps, axis=1) @ np.array(w)
    weight[: n_inputs[0]] += b * g_scale * direction
    weight[-n_inputs[2] :] += scales[0] / n_inputs[2]
    offset = a - np.concatenate([one.mean(0) for one in inputs]) @ weight - scales[1] * d.mean()
    numbers = (torch.from_numpy(np.asarray(one)) for one in (scales[1], weight, offset, evidence))
    return Mixture(quantiles, contrast, *numbers)


def _fitted(
    x: Matrix, u: Matrix, is_wild: NDArray[np.bool_], log_ratio: float, prior: Matrix, start: Matrix
) -> tuple[Matrix, float]:
    """The most probable coefficients of x, and the logarithm of the evidence but for a constant."""
    from scipy.optimize import minimize

    at = np.r_[OFFSET, np.zeros(len(prior) - 1)]

    def objective(coefficients: Matrix) -> tuple[float, Matrix]:
        h = u + x @ coefficients
        logit = log_ratio + np.logaddexp(0, h)
        shift = coefficients - at
        slope = (_sigmoid(logit) - is_wild) * _sigmoid(h)
        loss = np.logaddexp(0, np.where(is_wild, -logit, logit)).sum() + 0.5 * (prior * shift**2).sum()
        return loss, slope @ x + prior * shift

    bounds = [(None, None), (0.0, None), *[(None, None)] * (len(prior) - 2)]
    options = {"maxiter": 500, "maxfun": 1000, "ftol": 1e-7, "gtol": 1e-3}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    h = u + x @ found.x
    p = _sigmoid(log_ratio + np.logaddexp(0, h))
    curvature = p * (1 - p) * _sigmoid(h) ** 2  # Fisher's information
    hessian = (x * curvature[:, None]).T @ x + np.diag(prior)
    return found.x, -found.fun - 0.5 * np.linalg.slogdet(hessian)[1] + 0.5 * np.log(prior).sum()


def _directions(
    feature: Matrix, is_wild: NDArray[np.bool_], known: Float[Tensor, "l d"] | None
) -> tuple[Matrix, Matrix, Matrix]:
    """Principal directions (d, c), the direction of W against ID (d), and its product with each sample (n + m).

    Ridge regression on standardized features, both sides with the same weight. The products leave each sample out
    (exactly, by its leverage), and the ridge is the one with the least error on left-out samples.
    """
    rows = feature if known is None else np.concatenate([feature, known.double().numpy()])
    y = np.where(np.r_[is_wild, np.zeros(len(rows) - len(feature), bool)], 1.0, -1.0)
    share = np.where(y > 0, 0.5 / (y > 0).sum(), 0.5 / (y < 0).sum())
    std = _inverse(feature.std(0))
    mean = share @ rows
    x = ((rows - mean) * std).astype(np.float32)  # twice as fast
    variance, vectors = np.linalg.eigh(((x * share[:, None].astype(np.float32)).T @ x).astype(np.float64))
    variance, vectors = variance[::-1].clip(min=0), vectors[:, ::-1]
    x = x @ vectors.astype(np.float32)
    moment, squares = (share * y) @ x, x**2  # y has mean 0
    best = np.inf, np.zeros(0), np.zeros(0)
    for ridge in RIDGES:
        inverse = 1 / (variance + ridge * variance.mean() + 1e-12)
        coefficients = inverse * moment
        leverage = share * (1 + squares @ inverse.astype(np.float32))
        left_out = (x @ coefficients.astype(np.float32) - leverage * y) / (1 - leverage)
        error = float(share @ (left_out - y) ** 2)
        if error < best[0]:
            best = error, coefficients, left_out[: len(feature)]
    return (std[:, None] * vectors)[:, :MOST_COMPONENTS], std * (vectors @ best[1]), best[2]


def held_out(
    training: Float[Tensor, "l d"], calibration: Samples, wild: Samples, *, is_frozen: bool = False, seed: int = 0
) -> HeldOut:
    """h of every calibration and wild sample by a model that was fitted to the other folds of both."""
    rng = np.random.default_rng([seed, 1])
    folds = [rng.permutation(len(one.logits)) % N_FOLDS for one in (calibration, wild)]
    found = HeldOut(*(torch.empty(len(fold), dtype=torch.float64) for fold in folds))
    for k in range(N_FOLDS):
        sides = [(one, fold == k) for one, fold in zip((calibration, wild), folds, strict=True)]
        others = (one.take(np.flatnonzero(~left)) for one, left in sides)
        model = fit_mixture(training, *others, is_frozen=is_frozen, seed=seed)
        for values, (one, left) in zip(found, sides, strict=True):
            values[torch.from_numpy(left)] = model.h(one.take(np.flatnonzero(left)))
    return found


def _sigmoid(x: Matrix) -> Matrix:
    return np.exp(-np.logaddexp(0, -x))


def _inverse(std: Matrix | np.float64) -> Matrix:
    """1 / std, and 0 where nothing varies."""
    return np.where(std > 1e-12, 1 / np.maximum(std, 1e-12), 0.0)
