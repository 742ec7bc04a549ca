"""Scores that compare features with those of the ID training data: KNN, Mahalanobis, ViM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import PlainValidator
from torch import Tensor

from salcli.errors import ParamsError
from salcli.methods.base import Count, Head, Known, PostHoc, Section, check_count, method
from salcli.methods.logits import energy
from salcli.models.network import AsGiven
from salcli.sal.gradients import Representation
from salcli.sal.seeding import generator

# Products of this many samples with this many known ones are in memory at a time: 26 MB in float32.
QUERIES_AT_ONCE, KNOWN_AT_ONCE = 512, 12_800
ROWS_AT_ONCE = 4096
PAIRS_AT_ONCE = 2048  # of float64 features: 21 MB of 1,280
SPARE = 14  # neighbours beyond the k-th that float32 keeps
MOST_KNOWN = 50_000  # neighbours in a detector's file: 102 MB of 512 features
# Variances this far below the largest are rounding errors of features that are stored in float32.
ROUNDING = 1e-12
# ViM divides by the spread that its principal space leaves over, so that has to be well above rounding.
LEAST_LEFT_OVER = 1e-6


@method("knn", label="KNN", paper="Sun et al., 2022")
class Knn(PostHoc):
    """Minus the distance to the k-th nearest ID training feature, all features L2-normalised.

    Vectors are compared as they were given: standardized, they separate worse (docs/embeddings.md).
    """

    class Params(Section):
        """k: how many neighbours."""

        k: Count

    as_given: AsGiven
    nearest: Neighbours

    def fit(self, known: Known) -> None:
        check_count("methods.knn.k", self.params.k, len(known.features), "ID training samples")
        self.as_given = known.as_given
        self.nearest = Neighbours.of(known.as_given(known.features), self.params.k)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.nearest.score(self.as_given(x.feature))

    def score_training_samples(self, x: Representation) -> Float[Tensor, " n"]:
        """The nearest neighbour of a training sample is itself, so the k-th other one comes one later."""
        check_count("methods.knn.k", self.params.k, len(self.nearest.known) - 1, "other ID training samples")
        return replace(self.nearest, k=self.params.k + 1).score(self.as_given(x.feature))

    def compact(self, seed: int) -> None:
        self.nearest = self.nearest.thinned(seed)


@dataclass(frozen=True)
class Neighbours:
    """Known features at unit length, and which neighbour counts."""

    known: Float[Tensor, "m d"]
    k: int

    @classmethod
    def of(cls, features: Float[Tensor, "m d"], k: int) -> Neighbours:
        return cls(_on_the_sphere(features), k)

    def score(
        self,
        features: Float[Tensor, "n d"],
        queries_at_once: int = QUERIES_AT_ONCE,
        known_at_once: int = KNOWN_AT_ONCE,
    ) -> Float[Tensor, " n"]:
        """Minus the distance to the k-th nearest. Exact, and in bounded memory: block by block, but for a graph."""
        queries = _on_the_sphere(features)
        if torch.compiler.is_compiling():
            return -self._in_a_graph(queries.double())
        blocks = queries.split(queries_at_once)  # type: ignore[no-untyped-call]
        return -torch.cat([self._from_float32(block, known_at_once) for block in blocks])

    def _in_a_graph(self, queries: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """All known ones at once: a graph takes batches of any size, but has no loop over them."""
        known = self.known.double()
        index = (queries @ known.T - known.square().sum(dim=1) / 2).topk(self.k, dim=1).indices[:, -1]
        distance: Tensor = (queries - known[index]).norm(dim=1)
        return distance

    def thinned(self, seed: int) -> Neighbours:
        """At most MOST_KNOWN of them, drawn at random, and k reduced alike: all would make a detector's file huge."""
        if len(self.known) <= MOST_KNOWN:
            return self
        kept = generator(seed, "known neighbours").choice(len(self.known), MOST_KNOWN, replace=False)
        k = max(1, round(self.k * MOST_KNOWN / len(self.known)))
        return Neighbours(self.known[torch.from_numpy(np.sort(kept))], k)

    def _distance_to_the_kth(self, queries: Float[Tensor, "n d"], known_at_once: int) -> Float[Tensor, " n"]:
        """In float64 throughout."""
        index = self._nearest(queries.double(), self.k, known_at_once)[1][:, -1]
        distance: Tensor = (queries.double() - self.known[index].double()).norm(dim=1)
        return distance

    def _from_float32(self, queries: Float[Tensor, "n d"], known_at_once: int) -> Float[Tensor, " n"]:
        """The same in less time. float32 leaves a few neighbours that may be the k-th; float64 decides between them.

        Where more than SPARE could be (equal neighbours, for example), all neighbours are compared in float64.
        """
        closeness, index = self._nearest(queries.float(), self.k + SPARE, known_at_once)
        # A product of two unit vectors of d numbers is wrong by at most d roundings, and by more than 8 √d of them with
        # a probability below 1e-10 (Higham and Mary, 2019). Some more for all else.
        width = queries.shape[1]
        error = (min(width, 8 * width**0.5) + 8) * torch.finfo(torch.float32).eps / 2
        kth = closeness[:, self.k - 1, None]
        may_be_kth = (closeness - kth).abs() <= 2 * error
        distance = torch.where(closeness > kth, -torch.inf, torch.inf).double()
        # by the difference, because lengths and products would cancel where a neighbour is very close
        distance[may_be_kth] = torch.cat(
            [
                (queries[i].double() - self.known[j].double()).norm(dim=1)
                for i, j in zip(
                    may_be_kth.nonzero()[:, 0].split(PAIRS_AT_ONCE),
                    index[may_be_kth].split(PAIRS_AT_ONCE),  # type: ignore[no-untyped-call]
                    strict=True,
                )
            ]
        )
        result: Tensor = distance.kthvalue(self.k, dim=1).values
        is_unsure = may_be_kth[:, -1]
        if closeness.shape[1] < len(self.known) and is_unsure.any():
            result[is_unsure] = self._distance_to_the_kth(queries[is_unsure], known_at_once)
        return result

    def _nearest(
        self, queries: Float[Tensor, "n d"], k: int, known_at_once: int
    ) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"]]:
        """The k nearest, from the nearest on: the product with the query less half the squared length; and the index.

        In the precision of the queries. The nearest so far are kept while one block after the other is compared.
        """
        closeness, index = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        is_exact = queries.dtype == torch.float64
        for start in range(0, len(self.known), known_at_once):
            rows = slice(start, start + known_at_once)
            block = self.known[rows].to(queries.dtype)
            here = (queries @ block.T).sub_(block.square().sum(dim=1) / 2 if is_exact else self._half[rows])
            found, column = here.topk(min(k, len(block)), sorted=False)
            closeness, index = torch.cat([closeness, found], dim=1), torch.cat([index, column + start], dim=1)
            closeness, kept = closeness.topk(min(k, closeness.shape[1]))
            index = index.gather(1, kept)
        return closeness, index

    @cached_property
    def _half(self) -> Float[Tensor, " m"]:
        """Half the squared lengths, which are 1 but for rounding and for features that are all zero."""
        blocks = self.known.split(PAIRS_AT_ONCE)  # type: ignore[no-untyped-call]
        return torch.cat([block.double().square().sum(dim=1).float() / 2 for block in blocks])


def _on_the_sphere(features: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """At unit length; features that are all zero stay so."""
    length: Tensor = features.norm(dim=1, keepdim=True)
    return features / length.clamp(min=1e-12)


def _chunks(*columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of all columns, a few at a time: in float64 all together would take much memory."""
    return zip(*(column.split(ROWS_AT_ONCE) for column in columns), strict=True)  # type: ignore[no-untyped-call]


def _scatter(chunks: Iterable[Float[Tensor, "n d"]]) -> Float[Tensor, "d d"]:
    """Sum of outer products. By numpy, which computes half of a symmetric product only."""
    total: Tensor | None = None
    for chunk in chunks:
        product = torch.from_numpy(chunk.numpy().T @ chunk.numpy())
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


@dataclass(frozen=True)
class TiedGaussians:
    """One Gaussian for each class, all with the same covariance.

    A singular covariance is inverted as the authors do it, by its pseudo-inverse: directions in which the ID training
    data do not spread (dead units, for example) do not count.
    """

    whitening: Float[Tensor, "d r"]  # makes the covariance the identity of its own rank r
    mean: Float[Tensor, "c r"]  # of each class, whitened

    @classmethod
    def fit(cls, id_features: Float[Tensor, "m d"], id_labels: Int[Tensor, " m"]) -> TiedGaussians:
        """Class means, and the covariance around them. Classes without a sample are left out."""
        own = torch.unique(id_labels, return_inverse=True)[1]
        count, total = own.bincount(), torch.zeros(len(own.bincount()), id_features.shape[1], dtype=torch.float64)
        for chunk, labels in _chunks(id_features, own):
            total.index_add_(0, labels, chunk.double())
        mean = total / count[:, None]
        scatter = _scatter(chunk.double() - mean[labels] for chunk, labels in _chunks(id_features, own))
        spread, direction = torch.linalg.eigh(scatter / len(id_features))
        kept = spread > ROUNDING * spread.max()
        whitening = direction[:, kept] / spread[kept].sqrt()
        return cls(whitening, mean @ whitening)

    @property
    def rank(self) -> int:
        """In how many directions the training data spread."""
        return self.whitening.shape[1]

    def score(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Minus the squared distance to the nearest class mean."""
        whitened = features.double() @ self.whitening
        nearest = (whitened @ self.mean.T - self.mean.square().sum(dim=1) / 2).argmax(dim=1)
        return -(whitened - self.mean[nearest]).square().sum(dim=1)  # by the difference, because products cancel


@method("mahalanobis", label="Mahalanobis", paper="Lee et al., 2018")
class Mahalanobis(PostHoc):
    """Minus the distance to the nearest class mean, with one covariance for all classes; no input noise."""

    gaussians: TiedGaussians

    def fit(self, known: Known) -> None:
        self.gaussians = TiedGaussians.fit(known.features, known.id_train.label)
        width = known.features.shape[1]
        if self.gaussians.rank < width:
            known.note(
                f"mahalanobis: within classes the ID training features spread in {self.gaussians.rank} of {width} "
                "directions; the others do not count (pseudo-inverse)"
            )

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.gaussians.score(x.feature)


def _auto_or_count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"must be auto or an integer of at least 1, got {value!r}")


@method("vim", label="ViM", paper="Wang et al., 2022")
class Vim(PostHoc):
    """Energy less a virtual logit: the scaled norm of what the principal space of ID features leaves over."""

    class Params(Section):
        """dim: of the principal space; auto is its authors' rule."""

        dim: Annotated[int | Literal["auto"], PlainValidator(_auto_or_count)]

    logits: VirtualLogits

    def fit(self, known: Known) -> None:
        width = known.features.shape[1]
        asked = vim_rule(width) if self.params.dim == "auto" else self.params.dim
        if asked >= width:
            raise ParamsError(
                f"methods.vim.dim is {asked}, but must be less than the {width} features of the network; "
                f"auto would be {vim_rule(width)}"
            )
        self.logits = VirtualLogits.fit(known.head, known.features, asked)
        if self.logits.dim < asked:
            known.note(
                f"vim: the ID training features span {self.logits.rank} dimensions, so its principal space has "
                f"{self.logits.dim} instead of {asked}"
            )

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.logits.score(x.feature)


def vim_rule(n_features: int) -> int:
    """The dimension of the principal space that ViM's authors recommend; always below the feature width."""
    if n_features >= 2048:
        return 1000
    return 512 if n_features >= 768 else n_features // 2


@dataclass(frozen=True)
class VirtualLogits:
    """Energy less a virtual logit.

    Where the ID training features span fewer dimensions than were asked for, nothing of them would be left over and
    the scale would be undefined: the principal space then has one dimension less than they span.
    """

    head: Head
    origin: Float[Tensor, " d"]  # where all logits vanish, or come nearest to it
    left_over: Float[Tensor, "d l"]  # an orthonormal basis of what the principal space leaves over
    scale: float
    rank: int

    @classmethod
    def fit(cls, head: Head, id_features: Float[Tensor, "m d"], dim: int) -> VirtualLogits:
        """The principal space has the `dim` directions in which the training features are farthest from the origin."""
        origin = -torch.linalg.pinv(head.weight) @ head.bias
        scatter = _scatter(chunk.double() - origin for (chunk,) in _chunks(id_features))
        spread, direction = torch.linalg.eigh(scatter / len(id_features))  # from the smallest upwards
        rank = int((spread > LEAST_LEFT_OVER * spread.max()).sum())
        dim = max(0, min(dim, rank - 1))
        left_over = direction[:, : len(spread) - dim]
        # a virtual logit is on average as large as the largest logit; without any spread the energy alone counts
        largest, virtual = (
            torch.cat(parts).mean()
            for parts in zip(
                *(
                    (head.logits(chunk).amax(dim=1), ((chunk.double() - origin) @ left_over).norm(dim=1))
                    for (chunk,) in _chunks(id_features)
                ),
                strict=True,
            )
        )
        scale = largest / virtual
        return cls(head, origin, left_over, float(scale) if rank else 0.0, rank)

    @property
    def dim(self) -> int:
        """Of the principal space."""
        return self.left_over.shape[0] - self.left_over.shape[1]

    def score(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Energy less the virtual logit."""
        virtual: Tensor = self.scale * ((features.double() - self.origin) @ self.left_over).norm(dim=1)
        return energy(self.head.logits(features)) - virtual
