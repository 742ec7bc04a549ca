"""Separators that are made of other scores: the committee, one that learns held-out ID against wild data, and a blend.

Every outlier score is first mapped through its distribution on held-out ID data to a normal quantile, so that scores of
any scale can be added up. The committee is the mean of the post-hoc scores. The learned separator is a regularized
logistic regression on features, logits and all scores. It is cross-fitted: every sample is scored by a model that has
not seen it, so held-out ID data and the ID part of the wild data are treated alike. The blend is a mean of all
scores and such a regression: the one is robust where outliers are few, the other sharp where they are many.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from salcli.errors import ParamsError, ThresholdError
from salcli.methods.base import Known, PostHoc, below, built_in, method, restored
from salcli.methods.sal import (
    SOFTENED,
    TAU,
    FilterParams,
    OutlierDirections,
    labeled_gradients,
    tau,
    unlabeled_gradients,
)
from salcli.sal.gradients import Representation, RepresentationSource
from salcli.sal.seeding import derived_seed, generator
from salcli.sal.unlabeled import N_RESAMPLES, NormalQuantiles, partial_excess, resampled_excess

N_FOLDS = 10
LEAST_CALIBRATION = 20  # samples; with fewer, most folds have one or none
# ½‖w‖² is weighed against this times the sum of the losses, in which each side counts as its smaller one has samples
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # from the strongest penalty on
SURE_OF_PENALTY = 0.8  # share of resamples in which a weaker penalty must find more
BLENDED = 0.4  # the weight of the regression in a blend; the mean of all scores has the rest
COMMITTEE_SCALE = 10.0  # a column this much larger is penalized by the square of it less
MOST_SAMPLES = 100_000  # of a side that a model is fitted to
MOST_NUMBERS = 40_000_000  # in the matrix of one side: 320 MB
Scores = Mapping[str, tuple[Tensor, Tensor]]  # outlier scores of wild and of held-out ID data, by name


# -- the scores that others are made of


def members(params: Any) -> dict[str, PostHoc]:
    """Every post-hoc score that needs nothing but the ID classifier and its training data, with its params."""
    found = {name: one for name, one in built_in(PostHoc).items() if not (one.needs_wild or one.needs_calibration)}  # type: ignore[attr-defined]
    return {name: one.from_params(params) for name, one in found.items()}  # type: ignore[misc]


def members_of(settings: Mapping[str, Any]) -> dict[str, PostHoc]:
    """The same from a detector's file."""
    known = built_in(PostHoc)
    return {name: known[name].from_settings(own) for name, own in settings.items()}  # type: ignore[misc]


def restored_members(members: Mapping[str, PostHoc], state: Mapping[str, Tensor]) -> dict[str, PostHoc]:
    """With what they were fitted to. One that fits nothing has no state."""
    stored = {name.partition("/")[0].partition(":")[2]: name.partition("/")[0] for name in below(state, "members")}
    for name, member in members.items():
        if name in stored:
            member.restore(below(state, f"members/{stored[name]}"))
    return dict(members)


def outlier_scores(
    name: str, score: PostHoc, known: Known, sources: Sequence[RepresentationSource]
) -> list[Float[Tensor, " n"]]:
    """Of every source by a post-hoc score that is fitted here; higher = outlier."""
    score.fit(known)
    found = [-score.scores(source) for source in sources]
    check_finite(name, *found)
    return found


def check_finite(name: str, *scores: Tensor) -> None:
    for values in scores:
        if n_undefined := int((~values.isfinite()).sum()):
            raise ThresholdError(
                f"{name} gives NaN or infinity for {n_undefined} of {len(values)} samples; use another score"
            )


def tau_name(temperature: float) -> str:
    """sal at the paper's temperature, else sal-T100."""
    return TAU if float(temperature) == 1 else f"{TAU}-T{float(temperature):g}"


def temperatures(params: FilterParams) -> list[float]:
    """Of the τ that `auto` and `learned` use: the paper's, a soft one, and the one that params.yaml names."""
    return sorted({1.0, SOFTENED, float(params.temperature)})


# -- the committee


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


@method("committee", label="Committee", paper="salcli, 2026")
class Committee(PostHoc):
    """Minus the mean of all post-hoc scores, each mapped to a normal quantile on held-out ID data."""

    needs_calibration = True
    members: dict[str, PostHoc]
    transforms: Transforms

    @classmethod
    def from_params(cls, params: Any) -> Committee:
        return cls(members(params))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Committee:
        return cls(members_of(settings))

    def settings(self) -> dict[str, Any]:
        return {name: member.settings() for name, member in self.members.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.members = restored_members(self.params, state)
        self.transforms = restored(Transforms, below(state, "transforms"))

    def compact(self, seed: int) -> None:
        for member in self.members.values():
            member.compact(seed)

    def fit(self, known: Known) -> None:
        assert known.calibration is not None
        self.members = {}
        calibration = {}
        for name, member in self.params.items():
            try:
                (calibration[name],) = outlier_scores(name, member, known, [known.calibration])
                self.members[name] = member
            except (ParamsError, ThresholdError) as error:
                known.note(f"committee leaves out {name}: {error}")
        self.transforms = Transforms.fit(calibration)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return -self.transforms.committee({name: -member.score(x).double() for name, member in self.members.items()})


# -- the learned separator


def ranks_by_content(source: RepresentationSource, seed: int) -> NDArray[np.int64]:
    """A random order of the samples that depends on their features and logits, not on their rows. Equal samples tie."""
    seed = derived_seed(seed, "order by content")
    parts = [np.zeros(0, np.uint64)]
    for chunk in source.chunks():
        bits = torch.cat([chunk.feature.float(), chunk.logits.float()], dim=1).numpy().view(np.uint32).astype(np.uint64)
        factor = np.random.default_rng(seed).integers(2**64 - 1, size=bits.shape[1], dtype=np.uint64) | np.uint64(1)
        mixed = (bits * factor).sum(axis=1, dtype=np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)  # the low bits must depend on all
        parts.append(mixed ^ (mixed >> np.uint64(32)))
    return np.unique(np.concatenate(parts), return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Side:
    """Wild or held-out ID samples, dealt into folds by their own numbers, so that the order of rows does not matter."""

    source: RepresentationSource
    scores: Mapping[str, Float[Tensor, " n"]]
    rank: NDArray[np.int64]  # by content

    @property
    def fold(self) -> NDArray[np.int64]:
        """Equal samples are in the same one."""
        return self.rank % N_FOLDS

    @property
    def order(self) -> NDArray[np.int64]:
        """The rows by content: sums and draws would depend on the order of rows otherwise."""
        return np.argsort(self.rank, kind="stable")

    def matrices(self, transforms: Transforms, rows: Tensor | None = None) -> Iterable[Float[np.ndarray, "n c"]]:
        """The inputs, chunk by chunk; of some rows only, in rising order."""
        source = self.source if rows is None else self.source.take(rows)
        scores = dict(self.scores) if rows is None else {name: values[rows] for name, values in self.scores.items()}
        start = 0
        for chunk in source.chunks():
            own = {name: values[start : start + len(chunk)] for name, values in scores.items()}
            yield inputs(chunk, own, transforms).numpy()
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


def learn(
    wild: RepresentationSource,
    calibration: RepresentationSource,
    scores: Scores,
    seed: int,
    strengths: Sequence[float] = STRENGTHS,
) -> Learned:
    """Fit held-out ID against wild data, fold by fold, and choose the penalty without the truth."""
    sides, transforms = _two_sides(wild, calibration, scores, seed)
    models = _fitted(sides, transforms, strengths)
    found = [_out_of_fold(side, transforms, models) for side in sides]  # s, m and s, n
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
        transforms=transforms,
        wild=picked[0],
        calibration=picked[1],
        strength=strengths[overall],
        weight=torch.from_numpy(weight[:-1]),
        offset=float(weight[-1]),
        held_out=found[1][overall],
    )


def blend(
    wild: RepresentationSource, calibration: RepresentationSource, scores: Scores, seed: int
) -> tuple[Float[Tensor, " m"], Float[Tensor, " n"]]:
    """The mean of all scores, τ too, and the regression: of wild and of held-out ID data.

    Nothing is chosen on the calibration data, which set T. One over the number of columns as the strength: features
    that say nothing cannot drown the others.
    """
    sides, transforms = _two_sides(wild, calibration, scores, seed)
    n_columns = next(iter(sides[1].matrices(transforms, torch.arange(1)))).shape[1]
    models = _fitted(sides, transforms, [1 / n_columns])
    mean = _comparable([transforms(side.scores).mean(dim=1) for side in sides])
    learned = _comparable([_out_of_fold(side, transforms, models)[0] for side in sides])
    of_wild, of_calibration = ((1 - BLENDED) * a + BLENDED * b for a, b in zip(mean, learned, strict=True))
    return of_wild, of_calibration


def _comparable(sides: Sequence[Tensor]) -> list[Tensor]:
    """The scores of wild and held-out ID data as normal quantiles."""
    transform = NormalQuantiles.fit(sides[1])
    return [transform(side) for side in sides]


def _two_sides(
    wild: RepresentationSource, calibration: RepresentationSource, scores: Scores, seed: int
) -> tuple[tuple[Side, Side], Transforms]:
    if len(calibration) < LEAST_CALIBRATION:
        raise ThresholdError(
            f"score learned needs at least {LEAST_CALIBRATION} calibration samples, got {len(calibration)}; "
            "use more calibration data (data.id_shares.calibration), or score committee"
        )
    known = {name: pair[1].nan_to_num(0.0) for name, pair in scores.items()}  # τ of a class that no wild sample has: 0
    sides = (
        Side(wild, {name: pair[0] for name, pair in scores.items()}, ranks_by_content(wild, seed)),
        Side(calibration, known, ranks_by_content(calibration, seed)),
    )
    return sides, Transforms.fit(known)


def _strongest_penalty(found: Sequence[Tensor], sides: Sequence[Side], without_fold: int | None, seed: int) -> int:
    """The first strength that the best one does not surely beat: what weights on features gain must be seen."""
    rows = [side.order[side.fold[side.order] != without_fold] for side in sides]
    wild, calibration = (own[:, kept] for own, kept in zip(found, rows, strict=True))
    best = int(np.argmax([partial_excess(*pair) for pair in zip(calibration, wild, strict=True)]))
    rng = generator(seed, "penalty of the learned separator")
    resampled = resampled_excess(calibration, wild, rng, N_RESAMPLES // 4)
    beaten = (resampled[:, best, None] > resampled).double().mean(dim=0)
    return int(torch.nonzero(beaten < SURE_OF_PENALTY)[0])


def _fitted(
    sides: tuple[Side, Side], transforms: Transforms, strengths: Sequence[float]
) -> list[Float[np.ndarray, "s c"]]:
    """For each fold, the models of all strengths that have not seen it: weights and, last, the offset."""
    matrices, folds = [], []
    for side in sides:
        first = next(iter(side.matrices(transforms, torch.arange(1))))
        most = min(MOST_SAMPLES, max(1000, MOST_NUMBERS // first.shape[1]))
        rows = np.sort(np.argsort(side.rank, kind="stable")[:most])
        matrix = np.concatenate([*side.matrices(transforms, torch.from_numpy(rows))])
        order = np.argsort(side.rank[rows], kind="stable")  # sums depend on the order: by content
        matrices.append(matrix[order])
        folds.append(side.fold[rows][order])
    matrix, fold = np.concatenate(matrices), np.concatenate(folds)
    is_wild = np.repeat([1, 0], [len(one) for one in matrices])
    return [_models(matrix[fold != k], is_wild[fold != k], strengths) for k in range(N_FOLDS)]


def _models(
    matrix: Float[np.ndarray, "n c"], is_wild: Int[np.ndarray, " n"], strengths: Sequence[float]
) -> Float[np.ndarray, "s c1"]:
    """Logistic regressions on standardized columns; their outputs have mean 0 and std 1 on the held-out ID data."""
    from sklearn.exceptions import ConvergenceWarning  # slow to load, and most scores do without it
    from sklearn.linear_model import LogisticRegression

    mean, spread = matrix.mean(axis=0), matrix.std(axis=0)
    spread[spread <= 1e-12 * np.abs(mean).clip(min=1)] = 1.0  # a constant column says nothing
    spread[-1] /= COMMITTEE_SCALE
    standardized = (matrix - mean) / spread
    n_wild, n_smaller = int(is_wild.sum()), int(min(is_wild.sum(), (1 - is_wild).sum()))
    weights = n_smaller / np.where(is_wild == 1, n_wild, len(is_wild) - n_wild)
    model = LogisticRegression(solver="lbfgs", max_iter=300, warm_start=True)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # nearly converged is good enough for a score
        for strength in strengths:
            model.set_params(C=strength).fit(standardized, is_wild, sample_weight=weights)
            output = standardized[is_wild == 0] @ model.coef_[0]
            scale = float(output.std()) or 1.0
            weight = model.coef_[0] / scale / spread
            found.append([*weight, -float(output.mean()) / scale - float(weight @ mean)])
    return np.array(found)


def _out_of_fold(
    side: Side, transforms: Transforms, models: Sequence[Float[np.ndarray, "s c"]]
) -> Float[Tensor, "s n"]:
    found, start = np.empty((len(models[0]), len(side.rank))), 0
    for matrix in side.matrices(transforms):
        fold = side.fold[start : start + len(matrix)]
        for k in np.unique(fold):
            rows = np.flatnonzero(fold == k)
            found[:, start + rows] = models[k][:, :-1] @ matrix[rows].T + models[k][:, -1:]
        start += len(matrix)
    return torch.from_numpy(found)


# -- the learned separator as a detector


@dataclass(frozen=True)
class SeparatorParams:
    """The scores that it is made of, and how τ is computed."""

    members: dict[str, PostHoc]
    filter: FilterParams | None = None  # not needed by a compact one


@method("separator", label="Separator", paper="salcli, 2026")
class Separator(PostHoc):
    """Minus the learned separator, the models of all folds averaged: it tells wild from held-out ID data."""

    needs_wild = True
    needs_calibration = True
    members: dict[str, PostHoc]
    learned: Learned
    directions: dict[str, OutlierDirections]  # of a compact one, by the name of τ

    @classmethod
    def from_params(cls, params: Any) -> Separator:
        return cls(SeparatorParams(members(params), params.filter))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Separator:
        return cls(SeparatorParams(members_of(settings)))

    def settings(self) -> dict[str, Any]:
        return {name: member.settings() for name, member in self.members.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.members = restored_members(self.params.members, state)
        super().restore({name: tensor for name, tensor in state.items() if not name.startswith("members/")})

    def compact(self, seed: int) -> None:
        self.directions = {
            tau_name(one): OutlierDirections.fit(self.known, self.params.filter.softened(one))
            for one in temperatures(self.params.filter)
        }
        for member in self.members.values():
            member.compact(seed)
        none = torch.zeros(0, dtype=torch.float64)
        self.learned = replace(self.learned, wild=none, calibration=none, held_out=none)
        del self.known

    def fit(self, known: Known) -> None:
        assert known.wild is not None
        assert known.calibration is not None
        self.known, self.members, self.directions = known, {}, {}
        both, scores = [known.wild, known.calibration], {}
        for name, found in self._taus(both).items():
            scores[name] = found[0], found[1]
        for name, member in self.params.members.items():
            try:
                wild, calibration = outlier_scores(name, member, known, both)
            except (ParamsError, ThresholdError) as error:
                known.note(f"separator leaves out {name}: {error}")
                continue
            scores[name], self.members[name] = (wild, calibration), member
        self.learned = learn(known.wild, known.calibration, scores, known.seed)

    def _taus(self, sources: Sequence[RepresentationSource]) -> dict[str, list[Float[Tensor, " n"]]]:
        """τ of classes that no wild sample is predicted as is 0."""
        known, found = self.known, {}
        assert known.wild is not None
        for temperature in temperatures(self.params.filter):
            own = self.params.filter.softened(temperature)
            wild, id_train = (
                unlabeled_gradients(known.wild, own, known.seed, "wild"),
                labeled_gradients(known.id_train, own),
            )
            others = [
                wild if x is known.wild else unlabeled_gradients(x, own, known.seed, "calibration") for x in sources
            ]
            scores = tau(wild, others, id_train, known.wild.n_classes, own, known.device)
            found[tau_name(temperature)] = [values.nan_to_num(0.0) for values in scores]
        return found

    def held_out_scores(self) -> Float[Tensor, " n"]:
        return -self.learned.held_out

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        if not self.directions:
            return self.scores(x)
        return self._score(x, {name: own.tau(x) for name, own in self.directions.items()})

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        """τ is computed for all samples at once, because its singular vectors are."""
        taus = {name: values for name, (values,) in self._taus([source]).items()}
        parts, start = [torch.zeros(0, dtype=torch.float64)], 0
        for chunk in source.chunks():
            parts.append(self._score(chunk, {name: one[start : start + len(chunk)] for name, one in taus.items()}))
            start += len(chunk)
        return torch.cat(parts)

    def _score(self, x: Representation, taus: Mapping[str, Tensor]) -> Float[Tensor, " n"]:
        others = {name: -member.score(x).double() for name, member in self.members.items()}
        return -self.learned.score(x, {**taus, **others})
