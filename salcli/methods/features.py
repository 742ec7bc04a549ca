"""Scores that compare features with those of the ID training data: KNN, Mahalanobis, ViM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import PlainValidator
from torch import Tensor

from salcli.errors import ParamsError
from salcli.methods.base import Count, Head, Known, PostHoc, Section, check_count, method
from salcli.methods.logits import energy
from salcli.sal.gradients import Representation

# Products of this many samples with this many known ones are in memory at a time: 64 MB.
QUERIES_AT_ONCE, KNOWN_AT_ONCE = 1024, 8192
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

    def fit(self, known: Known) -> None:
        check_count("methods.knn.k", self.params.k, len(known.features), "ID training samples")
        self.as_given, self.known = known.as_given, known.as_given(known.features)
        self.nearest = fitted_knn(self.known, self.params.k)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.nearest(self.as_given(x.feature))

    def score_training_samples(self, x: Representation) -> Float[Tensor, " n"]:
        """The nearest neighbour of a training sample is itself, so the k-th other one comes one later."""
        check_count("methods.knn.k", self.params.k, len(self.known) - 1, "other ID training samples")
        return fitted_knn(self.known, self.params.k + 1)(self.as_given(x.feature))


def fitted_knn(
    id_features: Float[Tensor, "m d"],
    k: int,
    queries_at_once: int = QUERIES_AT_ONCE,
    known_at_once: int = KNOWN_AT_ONCE,
) -> Callable[[Tensor], Tensor]:
    """Exact, and in bounded memory: all pairs are compared, block by block."""
    known = _on_the_sphere(id_features)

    def score(features: Tensor) -> Tensor:
        blocks = _on_the_sphere(features).split(queries_at_once)  # type: ignore[no-untyped-call]
        distances = [_distance_to_the_kth(block.double(), known, k, known_at_once) for block in blocks]
        return -torch.cat(distances)

    return score


def _on_the_sphere(features: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """At unit length; features that are all zero stay so."""
    length: Tensor = features.norm(dim=1, keepdim=True)
    return features / length.clamp(min=1e-12)


def _distance_to_the_kth(
    queries: Float[Tensor, "n d"], known: Float[Tensor, "m d"], k: int, known_at_once: int
) -> Float[Tensor, " n"]:
    """The nearest so far are kept while the blocks of known samples are compared one after the other."""
    nearness, index = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
    for start in range(0, len(known), known_at_once):
        block = known[start : start + known_at_once].double()
        # half the squared distances, less half the squared length of the query: what decides between its neighbours
        here = torch.addmm(block.square().sum(dim=1) / 2, queries, block.T, alpha=-1)
        found, column = here.topk(min(k, len(block)), largest=False)
        nearness, index = torch.cat([nearness, found], dim=1), torch.cat([index, column + start], dim=1)
        nearness, kept = nearness.topk(min(k, nearness.shape[1]), largest=False)
        index = index.gather(1, kept)
    # by the difference, because lengths and products would cancel where a neighbour is very close
    distance: Tensor = (queries - known[index[:, -1]].double()).norm(dim=1)
    return distance


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
        exact, (_, own) = id_features.double(), torch.unique(id_labels, return_inverse=True)
        count = own.bincount()
        mean = exact.new_zeros(len(count), exact.shape[1]).index_add(0, own, exact) / count[:, None]
        centred = exact - mean[own]
        spread, direction = torch.linalg.eigh(centred.T @ centred / len(exact))
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
        nearest = torch.full((len(features),), torch.inf, dtype=torch.float64)
        for mean in self.mean:  # one class at a time: n·D numbers, not n·K·D
            nearest = nearest.minimum((whitened - mean).square().sum(dim=1))
        return -nearest


@method("mahalanobis", label="Mahalanobis", paper="Lee et al., 2018")
class Mahalanobis(PostHoc):
    """Minus the distance to the nearest class mean, with one covariance for all classes; no input noise."""

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
        exact, origin = id_features.double(), -torch.linalg.pinv(head.weight) @ head.bias
        shifted = exact - origin
        spread, direction = torch.linalg.eigh(shifted.T @ shifted / len(shifted))  # from the smallest upwards
        rank = int((spread > LEAST_LEFT_OVER * spread.max()).sum())
        dim = max(0, min(dim, rank - 1))
        left_over = direction[:, : len(spread) - dim]
        # a virtual logit is on average as large as the largest logit; without any spread the energy alone counts
        scale = head.logits(exact).amax(dim=1).mean() / (shifted @ left_over).norm(dim=1).mean()
        return cls(head, origin, left_over, float(scale) if rank else 0.0, rank)

    @property
    def dim(self) -> int:
        """Of the principal space."""
        return self.left_over.shape[0] - self.left_over.shape[1]

    def score(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Energy less the virtual logit."""
        virtual: Tensor = self.scale * ((features.double() - self.origin) @ self.left_over).norm(dim=1)
        return energy(self.head.logits(features)) - virtual
