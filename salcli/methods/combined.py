"""Scores that are made of others: the committee, and SAL+, which learns from calibration and wild data around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from salcli.errors import ParamsError, ThresholdError
from salcli.methods import LEAST_CALIBRATION, MEMBERS
from salcli.methods.base import Known, PostHoc, below, find_method, finite, method
from salcli.methods.mixture import (
    MOST_ROWS,
    Contrast,
    HeldOut,
    Mixture,
    NormalQuantiles,
    Samples,
    fit_mixture,
    held_out,
)
from salcli.sal.gradients import Representation, RepresentationSource

ENOUGH_TO_SPLIT = 200  # calibration samples: half of them certify more than the committee does by all of them
Pair = tuple[Tensor, Tensor]  # scores of calibration and of wild data


@dataclass(frozen=True)
class CombinedParams:
    """The scores that it is made of."""

    members: dict[str, Any]  # post-hoc scores


class Combined(PostHoc):
    """A score that is made of others, which it shares with all that are fitted to the same data."""

    needs_wild = True
    needs_calibration = True
    known: Known  # until it is compact
    members: dict[str, PostHoc]
    quantiles: NormalQuantiles

    @classmethod
    def from_params(cls, params: Any) -> Combined:
        return cls(CombinedParams({name: find_method(name, PostHoc).from_params(params) for name in MEMBERS}))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Combined:
        members = settings["members"] if settings else []
        return cls(CombinedParams({name: find_method(name, PostHoc).from_settings(own) for name, own in members}))

    def settings(self) -> dict[str, Any]:
        """A list, because the quantiles are of the members in their order."""
        return {"members": [[name, member.settings()] for name, member in self.members.items()]}

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

    def fit(self, known: Known) -> None:
        """The members that work here, and their quantiles on calibration and wild data together."""
        assert known.wild is not None
        assert known.calibration is not None
        self.known, self.members = known, {}
        for name, member in self.params.members.items():
            try:
                for source in (known.calibration, known.wild):
                    finite(name, known.scores(member, source)[0])
            except (ParamsError, ThresholdError) as error:
                known.note(f"{self.label} leaves out {name}: {error}")
            else:
                self.members[name] = known.fitted(member)
        self.quantiles = NormalQuantiles.fit(torch.cat([self._matrix(known.calibration), self._matrix(known.wild)]))

    def _matrix(self, source: RepresentationSource) -> Float[Tensor, "n s"]:
        """The members' scores of a source, one column each."""
        return torch.stack([self.known.scores(one, source)[0] for one in self.members.values()], dim=1)

    def exact_scores_of(self, new: RepresentationSource) -> tuple[Float[Tensor, " n"], Float[Tensor, " h"]]:
        """The committee's, with quantiles of calibration, wild and new data together."""
        assert self.known.calibration is not None
        assert self.known.wild is not None
        parts = [self._matrix(one) for one in (self.known.calibration, self.known.wild, new)]
        quantiles = NormalQuantiles.fit(torch.cat(parts))
        return quantiles.committee(parts[0]), quantiles.committee(parts[2])

    def _columns(self, x: Representation) -> Float[Tensor, "n s"]:
        return torch.stack([member.score(x).double() for member in self.members.values()], dim=1)


@method("committee", label="Committee", paper="salcli, 2026")
class Committee(Combined):
    """Mean of six post-hoc scores, each as a normal quantile on calibration and wild data."""

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.quantiles.committee(self._columns(x))

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        return self.quantiles.committee(self._matrix(source))


@method("sal-plus", label="SAL+", paper="salcli, 2026")
class SalPlus(Combined):
    """Log-odds of being an outlier: the wild data as a mixture of ID data and outliers, around the committee."""

    is_exact = False  # it tells calibration from wild samples
    mixture: Mixture

    def fit(self, known: Known) -> None:
        super().fit(known)
        assert known.calibration is not None
        if len(known.calibration) < LEAST_CALIBRATION:
            few = f"fewer than {LEAST_CALIBRATION} calibration samples to learn from"
            known.note(f"{self.label}: {few}, so it is the committee")
            training, *sides = self._sides
            feature, _, scores = (torch.cat(pair) for pair in zip(*sides, strict=True))
            contrast = Contrast.fit(feature, self.quantiles.committee(scores), training)
            weight = torch.zeros(sum(one.shape[1] for one in sides[0]), dtype=torch.float64)
            weight[-len(self.members) :] = 1 / len(self.members)
            none = torch.zeros((), dtype=torch.float64)
            self.mixture = Mixture(self.quantiles, contrast, none, weight, none, none[None])
        else:
            self.mixture = fit_mixture(*self._sides, is_frozen=known.is_frozen, seed=known.seed)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.mixture.h(Samples(x.feature, x.logits, self._columns(x)))

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        return self._h(self.mixture, source)

    def held_out_scores(self) -> HeldOut | None:
        """By models of five folds; samples beyond those that models are fitted to have been seen by none."""
        if len(self.known.calibration or ()) < LEAST_CALIBRATION:
            return None
        found = held_out(*self._sides, is_frozen=self.known.is_frozen, seed=self.known.seed)
        both = []
        for own, source in zip(found, self._pool, strict=True):
            values = self._h(self.mixture, source) if len(source) > MOST_ROWS else torch.empty_like(own)
            values[self._rows(source)] = own
            both.append(values)
        return HeldOut(*both)

    def exact_scores(self) -> tuple[Pair, Pair]:
        """Of SAL+ with half of the calibration data among the wild data, and of the committee.

        The first half tells ID data; the second and the wild samples are all the same to the model, so they can be
        compared. Of few calibration samples, half are too few: then the committee has to certify.
        """
        known, (calibration, wild) = self.known, self._pool
        committee = self.quantiles.committee(self._matrix(calibration)), self.quantiles.committee(self._matrix(wild))
        n, rng = len(calibration), np.random.default_rng([known.seed, 2])
        if n < ENOUGH_TO_SPLIT:
            return committee, committee
        first, second = (torch.from_numpy(np.sort(half)) for half in np.array_split(rng.permutation(n), 2))
        chosen = torch.from_numpy(np.sort(rng.permutation(len(second) + len(wild))[:MOST_ROWS]))
        is_wild = chosen >= len(second)
        parts = self._samples(calibration, second[chosen[~is_wild]]), self._samples(wild, chosen[is_wild] - len(second))
        mixed = Samples(*(torch.cat(sides) for sides in zip(*parts, strict=True)))
        model = fit_mixture(
            self._training, self._samples(calibration, first), mixed, is_frozen=known.is_frozen, seed=known.seed
        )
        return (self._h(model, calibration)[second], self._h(model, wild)), committee

    def _h(self, model: Mixture, source: RepresentationSource) -> Float[Tensor, " n"]:
        """Of all samples, chunk by chunk."""
        matrix, found, start = self._matrix(source), torch.empty(len(source), dtype=torch.float64), 0
        for chunk in source.chunks():
            rows = slice(start, start + len(chunk))
            found[rows] = model.h(Samples(chunk.feature, chunk.logits, matrix[rows]))
            start += len(chunk)
        return found

    @property
    def _pool(self) -> tuple[RepresentationSource, RepresentationSource]:
        assert self.known.calibration is not None
        assert self.known.wild is not None
        return self.known.calibration, self.known.wild

    @property
    def _sides(self) -> tuple[Tensor, Samples, Samples]:
        """What models are fitted to."""
        calibration, wild = (self._samples(one, self._rows(one)) for one in self._pool)
        return self._training, calibration, wild

    @property
    def _training(self) -> Float[Tensor, "l d"]:
        own = self.known.id_train
        return torch.cat([chunk.feature for chunk in own.take(self._rows(own)).chunks()])

    def _rows(self, source: RepresentationSource) -> Int[Tensor, " n"]:
        """At most so many as a model is fitted to, in rising order: more would only take memory."""
        order = np.random.default_rng([self.known.seed, 3]).permutation(len(source))
        return torch.from_numpy(np.sort(order[:MOST_ROWS]))

    def _samples(self, source: RepresentationSource, rows: Int[Tensor, " n"]) -> Samples:
        chunks = [*source.take(rows).chunks()]
        feature, logits = (torch.cat([getattr(one, name) for one in chunks]) for name in ("feature", "logits"))
        return Samples(feature, logits, self._matrix(source)[rows])
