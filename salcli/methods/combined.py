"""Separators that are made of other scores: the committee, one that learns held-out ID against wild data, and a blend.

Every outlier score is first mapped through its distribution on held-out ID data to a normal quantile, so that scores of
any scale can be added up. The committee is the mean of the post-hoc scores. The learned separator is a regularized
logistic regression on features, logits and all scores. It is cross-fitted: every sample is scored by a model that has
not seen it, so held-out ID data and the ID part of the wild data are treated alike. The blend is a mean of all
scores and such a regression: the one is robust where outliers are few, the other sharp where they are many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from salcli.errors import ParamsError, ThresholdError
from salcli.methods.base import Known, PostHoc, below, built_in, method
from salcli.methods.sal import SOFTENED, TAU, FilterParams, OutlierDirections, known_tau
from salcli.sal.gradients import Representation, RepresentationSource, of_each_sample
from salcli.sal.score_choice import N_RESAMPLES, partial_excess, resampled_excess
from salcli.sal.seeding import derived_seed, generator

N_FOLDS = 10
LEAST_CALIBRATION = 20  # samples; with fewer, most folds have one or none
# ½‖w‖² is weighed against this times the sum of the losses, in which each side counts as its smaller one has samples
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # from the strongest penalty on
SURE_OF_PENALTY = 0.8  # share of resamples in which a weaker penalty must find more
BLENDED = 0.4  # the weight of the regression in a blend; the mean of all scores has the rest
COMMITTEE_SCALE = 10.0  # a column this much larger is penalized by the square of it less
# of L-BFGS: the accuracy of scikit-learn's LogisticRegression
ACCURACY = {"maxiter": 300, "maxls": 50, "gtol": 1e-4, "ftol": 64 * np.finfo(float).eps}
MOST_SAMPLES = 100_000  # of a side that a model is fitted to
MOST_NUMBERS = 40_000_000  # in the matrix of one side: 320 MB
Scores = Mapping[str, tuple[Tensor, Tensor]]  # outlier scores of wild and of held-out ID data, by name


# -- the scores that others are made of


def members(params: Any) -> dict[str, PostHoc]:
    """Every post-hoc score that needs nothing but the ID classifier and its training data, with its params."""
    found = {name: one for name, one in built_in(PostHoc).items() if not (one.needs_wild or one.needs_calibration)}  # type: ignore[attr-defined]
    return {name: one.from_params(params) for name, one in found.items()}  # type: ignore[misc]


def outlier_scores(
    score: PostHoc, known: Known, sources: Sequence[RepresentationSource]
) -> tuple[Float[Tensor, " n"], ...]:
    """Of every source; higher = outlier."""
    return tuple(finite(score.name, -known.scores(score, source)) for source in sources)


def working_scores(
    what: str, asked: Mapping[str, PostHoc], known: Known, sources: Sequence[RepresentationSource]
) -> Iterator[tuple[str, tuple[Float[Tensor, " n"], ...]]]:
    """The outlier scores by every method that works here; `what` leaves out the others, with a note."""
    for name, score in asked.items():
        try:
            found = outlier_scores(score, known, sources)
        except (ParamsError, ThresholdError) as error:
            known.note(f"{what} leaves out {name}: {error}")
            continue
        yield name, found


def finite(name: str, scores: Tensor) -> Tensor:
    if n_undefined := int((~scores.isfinite()).sum()):
        raise ThresholdError(
            f"{name} gives NaN or infinity for {n_undefined} of {len(scores)} samples; use another score"
        )
    return scores


def tau_name(temperature: float) -> str:
    """sal at the paper's temperature, else sal-T100."""
    return TAU if float(temperature) == 1 else f"{TAU}-T{float(temperature):g}"


def temperatures(params: FilterParams) -> list[float]:
    """Of the τ that `auto` and `learned` use: the paper's, a soft one, and the one that params.yaml names."""
    return sorted({1.0, SOFTENED, float(params.temperature)})


# -- the committee


@dataclass(frozen=True)
class NormalQuantiles:
    """Maps a score to the standard normal quantile of its rank among calibration scores.

    Equal scores have the middle of their ranks, scores in between are interpolated, and scores beyond the largest or
    smallest go on as the logarithm of their distance from it, in units of the spread.
    """

    value: Float[Tensor, " u"]
    quantile: Float[Tensor, " u"]
    spread: float

    @classmethod
    def fit(cls, calibration: Float[Tensor, " n"]) -> NormalQuantiles:
        exact = calibration.double()
        value, count = torch.unique(exact, return_counts=True)
        middle = (count.cumsum(0) - count.double() / 2) / len(exact)
        low, high = np.quantile(exact.numpy(), [0.25, 0.75])
        spread = float(high - low) / 1.349 or float(exact.std(correction=0)) or 1.0  # 1.349: of a normal distribution
        return cls(value, torch.special.ndtri(middle), spread)

    def __call__(self, scores: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        exact = scores.double()
        inside = _interpolated(exact, self.value, self.quantile)
        above, below = ((exact - self.value[-1]).clamp(min=0), (self.value[0] - exact).clamp(min=0))
        return inside + (above / self.spread).log1p() - (below / self.spread).log1p()


def _interpolated(x: Float[Tensor, " m"], at: Float[Tensor, " u"], value: Float[Tensor, " u"]) -> Float[Tensor, " m"]:
    """Linearly between the points, constant beyond them. A graph for other programs cannot call numpy."""
    if not torch.compiler.is_compiling():
        return torch.from_numpy(np.interp(x.numpy(), at.numpy(), value.numpy()))
    if len(at) == 1:
        return torch.zeros_like(x) + value
    left = ((at <= x[:, None]).sum(dim=1) - 1).clamp(0, len(at) - 2)
    share = ((x - at[left]) / (at[left + 1] - at[left])).clamp(0, 1)
    return value[left] + share * (value[left + 1] - value[left])


@dataclass(frozen=True)
class Transforms:
    """The normal quantiles of some scores, by name."""

    by_name: dict[str, NormalQuantiles]

    @classmethod
    def fit(cls, calibration: Mapping[str, Float[Tensor, " n"]]) -> Transforms:
        return cls({name: NormalQuantiles.fit(scores) for name, scores in calibration.items()})

    def __call__(self, scores: Mapping[str, Float[Tensor, " n"]]) -> Float[Tensor, "n s"]:
        return torch.stack([transform(scores[name]) for name, transform in self.by_name.items()], dim=1)

    def committee(self, scores: Mapping[str, Float[Tensor, " n"]]) -> Float[Tensor, " n"]:
        """The mean of the post-hoc scores; τ is not one of them."""
        own = {name: one for name, one in self.by_name.items() if not is_tau(name)}
        return Transforms(own)(scores).mean(dim=1)


def is_tau(name: str) -> bool:
    return name == TAU or name.startswith(f"{TAU}-T")


def committee_scores(scores: Scores) -> tuple[Float[Tensor, " m"], Float[Tensor, " n"]]:
    """Of wild and of held-out ID data."""
    wild, calibration = ({name: pair[side] for name, pair in scores.items() if not is_tau(name)} for side in (0, 1))
    transforms = Transforms.fit(calibration)
    return transforms.committee(wild), transforms.committee(calibration)


@dataclass(frozen=True)
class CombinedParams:
    """The scores that it is made of, and how τ is computed."""

    members: dict[str, PostHoc]
    filter: FilterParams | None = None  # not needed by a compact one


class Combined(PostHoc):
    """A score that is made of others, which it shares with all that are fitted to the same data."""

    needs_calibration = True
    known: Known  # until it is compact
    members: dict[str, PostHoc]

    @classmethod
    def from_params(cls, params: Any) -> Combined:
        return cls(CombinedParams(members(params), params.filter))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Combined:
        known = built_in(PostHoc)
        return cls(CombinedParams({name: known[name].from_settings(own) for name, own in settings.items()}))  # type: ignore[misc]

    def settings(self) -> dict[str, Any]:
        return {name: member.settings() for name, member in self.members.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """A member that fits nothing has no state."""
        self.members = self.params.members
        stored = {name.partition("/")[0].partition(":")[2]: name.partition("/")[0] for name in below(state, "members")}
        for name, entry in stored.items():
            self.members[name].restore(below(state, f"members/{entry}"))
        super().restore({name: tensor for name, tensor in state.items() if not name.startswith("members/")})

    def compact(self, seed: int) -> None:
        for member in self.members.values():
            member.compact(seed)
        del self.known

    def fit_members(self, known: Known, *sources: RepresentationSource) -> None:
        """Those that can score the sources."""
        found = dict(working_scores(self.name, self.params.members, known, sources))
        self.known, self.members = known, {name: known.fitted(self.params.members[name]) for name in found}

    def of_members(self, source: RepresentationSource) -> dict[str, Float[Tensor, " n"]]:
        """Their outlier scores."""
        return {name: -self.known.scores(member, source) for name, member in self.members.items()}


@method("committee", label="Committee", paper="salcli, 2026")
class Committee(Combined):
    """Minus the mean of all post-hoc scores, each mapped to a normal quantile on held-out ID data."""

    transforms: Transforms

    def fit(self, known: Known) -> None:
        assert known.calibration is not None
        self.fit_members(known, known.calibration)
        self.transforms = Transforms.fit(self.of_members(known.calibration))

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return -self.transforms.committee({name: -member.score(x).double() for name, member in self.members.items()})

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        return -self.transforms.committee(self.of_members(source))


# -- the learned separator


def ranks_by_content(source: RepresentationSource, seed: int) -> NDArray[np.int64]:
    """A random order of the samples that depends on their features and logits, not on their rows. Equal samples tie."""
    seed = derived_seed(seed, "order by content")

    def mixed(chunk: Representation) -> Tensor:
        bits = torch.cat([chunk.feature.float(), chunk.logits.float()], dim=1).numpy().view(np.uint32).astype(np.uint64)
        factor = np.random.default_rng(seed).integers(2**64 - 1, size=bits.shape[1], dtype=np.uint64) | np.uint64(1)
        found = (bits * factor).sum(axis=1, dtype=np.uint64)
        found = (found ^ (found >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)  # the low bits must depend on all
        return torch.from_numpy((found ^ (found >> np.uint64(32))).view(np.int64))

    content = of_each_sample(source, mixed, torch.int64).numpy().view(np.uint64)
    return np.unique(content, return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Side:
    """Wild or held-out ID samples, dealt into folds by their own numbers, so that the order of rows does not matter."""

    source: RepresentationSource
    scores: Mapping[str, Float[Tensor, " n"]]
    rank: NDArray[np.int64]  # by content
    transforms: Transforms  # one for both sides

    @cached_property
    def fold(self) -> NDArray[np.int64]:
        """Equal samples are in the same one."""
        return self.rank % N_FOLDS

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The rows by content: sums and draws would depend on the order of rows otherwise."""
        return np.argsort(self.rank, kind="stable")

    def matrices(self, rows: Tensor | None = None) -> Iterator[Float[np.ndarray, "n c"]]:
        """The inputs, chunk by chunk; of some rows only, in rising order."""
        source = self.source if rows is None else self.source.take(rows)
        scores = self.scores if rows is None else {name: values[rows] for name, values in self.scores.items()}
        for chunk, own in chunks_with_scores(source, scores):
            yield inputs(chunk, own, self.transforms).numpy()

    @cached_property
    def n_columns(self) -> int:
        return int(next(self.matrices(torch.arange(1))).shape[1])


def chunks_with_scores(
    source: RepresentationSource, scores: Mapping[str, Tensor]
) -> Iterator[tuple[Representation, dict[str, Tensor]]]:
    start = 0
    for chunk in source.chunks():
        yield chunk, {name: values[start : start + len(chunk)] for name, values in scores.items()}
        start += len(chunk)


def inputs(x: Representation, scores: Mapping[str, Tensor], transforms: Transforms) -> Float[Tensor, "n c"]:
    """Features, logits, transformed scores and, last, the committee."""
    committee = transforms.committee(scores)[:, None]
    return torch.cat([x.feature.double(), x.logits.double(), transforms(scores), committee], dim=1)


@dataclass(frozen=True)
class Learned:
    """The learned separator: its cross-fitted scores, and one linear function of the inputs for new samples."""

    transforms: Transforms
    wild: Float[Tensor, " m"]
    calibration: Float[Tensor, " n"]
    strength: float
    weight: Float[Tensor, " c"]  # of the models of all folds, averaged
    offset: float
    held_out: Float[Tensor, " n"]  # the calibration samples as each fold's model scores those that it has not seen

    def score(self, x: Representation, scores: Mapping[str, Tensor]) -> Float[Tensor, " n"]:
        """Outlier scores of new samples."""
        return inputs(x, scores, self.transforms) @ self.weight + self.offset


def learn(wild: RepresentationSource, calibration: RepresentationSource, scores: Scores, seed: int) -> Learned:
    """Fit held-out ID against wild data, fold by fold, and choose the penalty without the truth."""
    sides = _two_sides(wild, calibration, scores, seed)
    models = _fitted(sides, STRENGTHS)
    found = [_out_of_fold(side, models) for side in sides]  # s, m and s, n
    overall = _strongest_penalty(found, sides, None, seed)
    picked = [torch.empty_like(own[0]) for own in found]
    for fold in range(N_FOLDS):
        # chosen on its own scores, it would be a penalty whose T happens to be low, with too many ID samples above
        chosen = _strongest_penalty(found, sides, fold, seed)
        transform = NormalQuantiles.fit(found[1][chosen])  # so that folds with different penalties can be compared
        for own, side, values in zip(found, sides, picked, strict=True):
            rows = torch.from_numpy(side.fold == fold)
            values[rows] = transform(own[chosen, rows])
    weight = np.mean([fold[overall] for fold in models], axis=0)
    return Learned(
        transforms=sides[0].transforms,
        wild=picked[0],
        calibration=picked[1],
        strength=STRENGTHS[overall],
        weight=torch.from_numpy(weight[:-1]),
        offset=float(weight[-1]),
        held_out=found[1][overall],
    )


def _committee_alone(wild: RepresentationSource, scores: Scores) -> Learned:
    """Nothing learned: the committee, as a function of the same inputs."""
    transforms = Transforms.fit({name: calibration for name, (_, calibration) in scores.items()})
    of_wild, of_calibration = committee_scores(scores)
    first = next(iter(wild.chunks()))
    weight = torch.zeros(first.feature.shape[1] + first.logits.shape[1] + len(scores) + 1, dtype=torch.float64)
    weight[-1] = 1
    return Learned(transforms, of_wild, of_calibration, 0.0, weight, 0.0, of_calibration)


def blend(
    wild: RepresentationSource, calibration: RepresentationSource, scores: Scores, seed: int
) -> tuple[Float[Tensor, " m"], Float[Tensor, " n"]]:
    """The mean of all scores, τ too, and the regression: of wild and of held-out ID data.

    Nothing is chosen on the calibration data, which set T. One over the number of columns as the strength: features
    that say nothing cannot drown the others.
    """
    sides = _two_sides(wild, calibration, scores, seed)
    models = _fitted(sides, [1 / sides[1].n_columns])
    mean = _comparable([side.transforms(side.scores).mean(dim=1) for side in sides])
    learned = _comparable([_out_of_fold(side, models)[0] for side in sides])
    of_wild, of_calibration = ((1 - BLENDED) * a + BLENDED * b for a, b in zip(mean, learned, strict=True))
    return of_wild, of_calibration


def _comparable(sides: Sequence[Tensor]) -> list[Tensor]:
    """The scores of wild and held-out ID data as normal quantiles."""
    transform = NormalQuantiles.fit(sides[1])
    return [transform(side) for side in sides]


def _two_sides(
    wild: RepresentationSource, calibration: RepresentationSource, scores: Scores, seed: int
) -> tuple[Side, Side]:
    if len(calibration) < LEAST_CALIBRATION:
        raise ThresholdError(
            f"score learned needs at least {LEAST_CALIBRATION} calibration samples, got {len(calibration)}; "
            "use more calibration data (data.id_shares.calibration), or score committee"
        )
    known = {name: pair[1].nan_to_num(0.0) for name, pair in scores.items()}  # τ of a class that no wild sample has: 0
    transforms = Transforms.fit(known)
    return (
        Side(wild, {name: pair[0] for name, pair in scores.items()}, ranks_by_content(wild, seed), transforms),
        Side(calibration, known, ranks_by_content(calibration, seed), transforms),
    )


def _strongest_penalty(found: Sequence[Tensor], sides: Sequence[Side], without_fold: int | None, seed: int) -> int:
    """The first strength that the best one does not surely beat: what weights on features gain must be seen."""
    rows = [side.order[side.fold[side.order] != without_fold] for side in sides]
    wild, calibration = (own[:, kept] for own, kept in zip(found, rows, strict=True))
    best = int(np.argmax([partial_excess(*pair) for pair in zip(calibration, wild, strict=True)]))
    rng = generator(seed, "penalty of the learned separator")
    resampled = resampled_excess(calibration, wild, rng, N_RESAMPLES // 4)
    beaten = (resampled[:, best, None] > resampled).double().mean(dim=0)
    return int(torch.nonzero(beaten < SURE_OF_PENALTY)[0])


def _fitted(sides: tuple[Side, Side], strengths: Sequence[float]) -> list[Float[np.ndarray, "s c"]]:
    """For each fold, the models of all strengths that have not seen it: weights and, last, the offset."""
    n_columns = sides[1].n_columns
    most = min(MOST_SAMPLES, max(1000, MOST_NUMBERS // n_columns))
    rows = [np.sort(side.order[:most]) for side in sides]
    matrix, fold = np.empty((sum(map(len, rows)), n_columns)), np.empty(sum(map(len, rows)), np.int64)
    start = 0
    for side, own in zip(sides, rows, strict=True):
        position = start + np.argsort(np.argsort(side.rank[own], kind="stable"))  # sums depend on the order: by content
        fold[position] = side.fold[own]
        for chunk in side.matrices(torch.from_numpy(own)):
            matrix[position[: len(chunk)]] = chunk
            position = position[len(chunk) :]
        start += len(own)
    return [*_models(matrix, len(rows[0]), fold != np.arange(N_FOLDS)[:, None], strengths)]


def _models(
    matrix: Float[np.ndarray, "n c"], n_wild: int, seen: Bool[np.ndarray, "f n"], strengths: Sequence[float]
) -> Float[np.ndarray, "f s c1"]:
    """Logistic regressions on standardized columns; their outputs have mean 0 and std 1 on the held-out ID data.

    Wild samples come first. Each model has seen some rows; all of them are fitted together, because one product with a
    matrix that does not fit in the caches costs hardly less than several. The matrix is centred in place.
    """
    from scipy.optimize import minimize  # slow to load, and most scores do without it

    is_wild = np.arange(len(matrix)) < n_wild
    centre = matrix.mean(axis=0)
    matrix -= centre
    count = seen.sum(axis=1)[:, None]
    left_out = [(own.sum(axis=0), np.einsum("nc,nc->c", own, own)) for own in (matrix[~one] for one in seen)]
    mean = (matrix.sum(axis=0) - [one for one, _ in left_out]) / count  # f, c
    square = (np.einsum("nc,nc->c", matrix, matrix) - [one for _, one in left_out]) / count
    spread = np.sqrt((square - mean**2).clip(min=0))
    spread[spread <= 1e-12 * np.abs(mean + centre).clip(min=1)] = 1.0  # a constant column says nothing
    spread[:, -1] /= COMMITTEE_SCALE
    n_of_side = np.where(is_wild, (seen & is_wild).sum(axis=1)[:, None], (seen & ~is_wild).sum(axis=1)[:, None])
    share = seen / n_of_side / 2  # f, n: of a mean loss in which both sides count the same
    n_counted = 2 * n_of_side.min(axis=1)[:, None]
    found, parameters = [], np.zeros((len(seen), matrix.shape[1] + 1))
    for strength in strengths:
        penalty = 1 / (strength * n_counted)

        def objective(flat: NDArray[np.float64], penalty: NDArray[np.float64] = penalty) -> Any:
            """The sum of all objectives, which share no parameter, and its gradient."""
            parameters = flat.reshape(len(seen), -1)
            weight = parameters[:, :-1] / spread
            logits = weight @ matrix.T + (parameters[:, -1:] - (weight * mean).sum(axis=1)[:, None])
            softplus = np.logaddexp(0, logits)
            loss = (share * (softplus - is_wild * logits)).sum()
            residual = share * (np.exp(logits - softplus) - is_wild)
            total = residual.sum(axis=1)[:, None]
            slope = (residual @ matrix - total * mean) / spread + penalty * parameters[:, :-1]
            loss += 0.5 * (penalty * parameters[:, :-1] ** 2).sum()
            return loss, np.concatenate([slope, total], axis=1).ravel()

        fitted = minimize(objective, parameters.ravel(), jac=True, method="L-BFGS-B", options=ACCURACY)
        parameters = fitted.x.reshape(parameters.shape)
        weight = parameters[:, :-1] / spread
        outputs = [own @ matrix[n_wild:][rows].T for own, rows in zip(weight, seen[:, n_wild:], strict=True)]
        scale = np.array([[float(output.std()) or 1.0] for output in outputs])
        offset = -np.array([[output.mean()] for output in outputs]) - weight @ centre[:, None]
        found.append(np.concatenate([weight, offset], axis=1) / scale)
    return np.stack(found, axis=1)


def _out_of_fold(side: Side, models: Sequence[Float[np.ndarray, "s c"]]) -> Float[Tensor, "s n"]:
    found, start = np.empty((len(models[0]), len(side.rank))), 0
    for matrix in side.matrices():
        fold = side.fold[start : start + len(matrix)]
        for k in np.unique(fold):
            rows = np.flatnonzero(fold == k)
            found[:, start + rows] = models[k][:, :-1] @ matrix[rows].T + models[k][:, -1:]
        start += len(matrix)
    return torch.from_numpy(found)


# -- the learned separator as a detector


@method("separator", label="Separator", paper="salcli, 2026")
class Separator(Combined):
    """Minus the learned separator, the models of all folds averaged: it tells wild from held-out ID data."""

    needs_wild = True
    learned: Learned
    directions: dict[str, OutlierDirections]  # of a compact one, by the name of τ

    def compact(self, seed: int) -> None:
        self.directions = {
            tau_name(one): OutlierDirections.fit(self.known, self.params.filter.softened(one))
            for one in temperatures(self.params.filter)
        }
        none = torch.zeros(0, dtype=torch.float64)
        self.learned = replace(self.learned, wild=none, calibration=none, held_out=none)
        super().compact(seed)

    def fit(self, known: Known) -> None:
        assert known.wild is not None
        assert known.calibration is not None
        self.fit_members(known, known.wild, known.calibration)
        self.directions = {}
        wild, calibration = (self._taus(one) | self.of_members(one) for one in (known.wild, known.calibration))
        scores = {name: (values, calibration[name]) for name, values in wild.items()}
        if len(known.calibration) < LEAST_CALIBRATION:
            few = f"fewer than {LEAST_CALIBRATION} calibration samples to learn from"
            known.note(f"{self.label}: {few}, so it is the committee")
            self.learned = _committee_alone(known.wild, scores)
        else:
            self.learned = learn(known.wild, known.calibration, scores, known.seed)

    def _taus(self, source: RepresentationSource) -> dict[str, Float[Tensor, " n"]]:
        """τ of classes that no wild sample is predicted as is 0."""
        own = self.params.filter
        return {
            tau_name(one): known_tau(self.known, own.softened(one), source).nan_to_num(0.0) for one in temperatures(own)
        }

    def held_out_scores(self) -> Float[Tensor, " n"]:
        return -self.learned.held_out

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        if not self.directions:
            return self.scores(x)
        taus = {name: own.tau(x) for name, own in self.directions.items()}
        others = {name: -member.score(x).double() for name, member in self.members.items()}
        return -self.learned.score(x, {**taus, **others})

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        """τ is computed for all samples at once, because its singular vectors are."""
        found = chunks_with_scores(source, self._taus(source) | self.of_members(source))
        parts = [-self.learned.score(chunk, own) for chunk, own in found]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
