"""Scores that compare features with those of the ID training data.

KNN, Mahalanobis, RMDS, Mahalanobis++, ViM, SHE, fDBD, NCI; and Spectral, which compares them with the wild data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import PlainValidator
from torch import Tensor

from salcli.errors import ParamsError
from salcli.methods.base import Count, Head, Known, NotNegative, PostHoc, Section, check_count, method
from salcli.methods.logits import energy
from salcli.models.network import AsGiven
from salcli.sal.gradients import Representation
from salcli.sal.seeding import generator

PRODUCTS_AT_ONCE = 2**23  # of queries and known neighbours: 34 MB in float32
ROWS_AT_ONCE = 4096
MOST_KNOWN = 50_000  # neighbours in a detector's file: 102 MB of 512 features
# Variances this far below the largest are rounding errors of features that are stored in float32.
ROUNDING = 1e-12
# ViM divides by the spread that its principal space leaves over, so that has to be well above rounding.
LEAST_LEFT_OVER = 1e-6


@method("knn", label="KNN", paper="Sun et al., 2022")
class Knn(PostHoc):
    """Distance to the k-th nearest ID training feature, all features L2-normalised.

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
        unit = [_on_the_sphere(self.as_given(chunk)) for (chunk,) in _chunks(known.features)]
        self.nearest = Neighbours(torch.cat(unit), self.params.k)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.nearest.distance(self.as_given(x.feature))

    def score_training_samples(self, x: Representation) -> Float[Tensor, " n"]:
        """The nearest neighbour of a training sample is itself, so the k-th other one comes one later."""
        check_count("methods.knn.k", self.params.k, len(self.nearest.known) - 1, "other ID training samples")
        return replace(self.nearest, k=self.params.k + 1).distance(self.as_given(x.feature))

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

    def distance(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """To the k-th nearest. It is found in float32, block by block, but for a graph, which has no loops."""
        queries, known = _on_the_sphere(features), self.known.float()
        size = max(1, PRODUCTS_AT_ONCE // len(known))
        blocks = [queries] if torch.compiler.is_compiling() else queries.split(size)  # type: ignore[no-untyped-call]
        found = []
        for block in blocks:
            kth = (block.float() @ known.T).topk(self.k, dim=1).indices[:, -1]
            found.append((block.double() - self.known[kth].double()).norm(dim=1))
        return torch.cat(found)

    def thinned(self, seed: int) -> Neighbours:
        """At most MOST_KNOWN of them, drawn at random, and k reduced alike: all would make a detector's file huge."""
        if len(self.known) <= MOST_KNOWN:
            return self
        kept = generator(seed, "known neighbours").choice(len(self.known), MOST_KNOWN, replace=False)
        k = max(1, round(self.k * MOST_KNOWN / len(self.known)))
        return Neighbours(self.known[torch.from_numpy(np.sort(kept))], k)


def _on_the_sphere(features: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """At unit length; features that are all zero stay so."""
    length: Tensor = features.norm(dim=1, keepdim=True)
    return features / length.clamp(min=1e-12)


def _chunks(*columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of all columns, a few at a time: in float64 all together would take much memory."""
    return zip(*(column.split(ROWS_AT_ONCE) for column in columns), strict=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Scatter:
    """The sum of outer products of rows: as a matrix or, where they are fewer than its columns, as the rows."""

    content: Float[Tensor, "r d"]
    is_matrix: bool

    @classmethod
    def of(cls, n_rows: int, width: int, chunks: Iterable[Float[Tensor, "n d"]]) -> Scatter:
        if n_rows < width:
            return cls(torch.cat([*chunks]), False)
        matrix = torch.zeros(width, width, dtype=torch.float64)
        for chunk in chunks:  # by numpy, which computes half of a symmetric product only
            matrix += torch.from_numpy(chunk.numpy().T @ chunk.numpy())
        return cls(matrix, True)

    def plus(self, rows: Float[Tensor, "n d"]) -> Scatter:
        """With the products of these rows."""
        more = self.content + rows.T @ rows if self.is_matrix else torch.cat([self.content, rows])
        return Scatter(more, self.is_matrix)

    def directions(self, n: int) -> tuple[Float[Tensor, " w"], Float[Tensor, "d w"]]:
        """Eigenvalues of the matrix over n, the smallest first, and eigenvectors; of fewer rows only so many."""
        if self.is_matrix:
            values, vectors = torch.linalg.eigh(self.content / n)
            return values, vectors
        _, singular, right = torch.linalg.svd(self.content, full_matrices=False)
        return singular.square().flip(0) / n, right.flip(0).T


def _class_sums(
    features: Float[Tensor, "m d"], labels: Int[Tensor, " m"], n_classes: int, shape: Callable[[Tensor], Tensor]
) -> Float[Tensor, "c d"]:
    total = torch.zeros(n_classes, features.shape[1], dtype=torch.float64)
    for chunk, own in _chunks(features, labels):
        total.index_add_(0, own, shape(chunk))
    return total


@dataclass(frozen=True)
class ClassMoments:
    """Of the ID training features. Classes without a sample are left out."""

    count: Int[Tensor, " c"]
    mean: Float[Tensor, "c d"]
    within: Scatter  # around the own class's mean

    @classmethod
    def of(cls, known: Known, shape: Callable[[Tensor], Tensor]) -> ClassMoments:
        """After `shape`."""
        own = torch.unique(known.id_train.label, return_inverse=True)[1]
        count = own.bincount()
        mean = _class_sums(known.features, own, len(count), shape) / count[:, None]
        centred = (shape(chunk) - mean[labels] for chunk, labels in _chunks(known.features, own))
        return cls(count, mean, Scatter.of(len(own), known.features.shape[1], centred))

    @classmethod
    def shared(cls, known: Known) -> ClassMoments:
        """Of the features as they are, for all scores."""
        if cls not in known.cache:
            known.cache[cls] = cls.of(known, Tensor.double)
        found: ClassMoments = known.cache[cls]
        return found

    def around(self, origin: Float[Tensor, " d"]) -> Scatter:
        """Around another point."""
        return self.within.plus((self.mean - origin) * self.count.double().sqrt()[:, None])


@dataclass(frozen=True)
class TiedGaussians:
    """One Gaussian for each class, all with the same covariance.

    A singular covariance is inverted as the authors do it, by its pseudo-inverse: directions in which the ID training
    data do not spread (dead units, for example) do not count.
    """

    whitening: Float[Tensor, "d r"]  # makes the covariance the identity of its own rank r
    mean: Float[Tensor, "c r"]  # of each class, whitened

    @classmethod
    def fit(cls, label: str, known: Known, moments: ClassMoments) -> TiedGaussians:
        """Class means, and the covariance around them."""
        features = known.features
        spread, direction = moments.within.directions(len(features))
        kept = spread > ROUNDING * spread.max()
        whitening = direction[:, kept] / spread[kept].sqrt()
        if whitening.shape[1] < features.shape[1]:
            known.note(
                f"{label}: within classes the ID training features spread in {whitening.shape[1]} of "
                f"{features.shape[1]} directions; the others do not count (pseudo-inverse)"
            )
        return cls(whitening, moments.mean @ whitening)

    def whitened(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n r"]:
        return features.double() @ self.whitening

    def score(self, whitened: Float[Tensor, "n r"]) -> Float[Tensor, " n"]:
        """Squared distance to the nearest class mean."""
        nearest = (whitened @ self.mean.T - self.mean.square().sum(dim=1) / 2).argmax(dim=1)
        return (whitened - self.mean[nearest]).square().sum(dim=1)  # by the difference, because products cancel


@method("mahalanobis", label="Mahalanobis", paper="Lee et al., 2018")
class Mahalanobis(PostHoc):
    """Squared distance to the nearest class mean, with one covariance for all classes; no input noise."""

    gaussians: TiedGaussians

    def fit(self, known: Known) -> None:
        self.gaussians = TiedGaussians.fit(self.label, known, ClassMoments.shared(known))

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.gaussians.score(self.gaussians.whitened(x.feature))


@method("rmds", label="RMDS", paper="Ren et al., 2021")
class RelativeMahalanobis(PostHoc):
    """Mahalanobis relative to the distance in a single Gaussian of all classes.

    The covariance of all is that within classes plus that of the class means: in whitened features I + B Bᵀ. So its
    inverse is I − U Uᵀ, with as few columns as classes (Woodbury). The length of the whitened feature cancels, so only
    its products with class means and U are needed.
    """

    directions: Float[Tensor, "d w"]  # class means less the mean of all, and U, of features that are not whitened
    offset: Float[Tensor, " w"]  # the products of the mean of all with them
    squares: Float[Tensor, " c"]  # of the class means

    def fit(self, known: Known) -> None:
        gaussians = known.fitted(Mahalanobis()).gaussians
        share = torch.unique(known.id_train.label, return_counts=True)[1].double() / len(known.features)
        center = share @ gaussians.mean
        means = gaussians.mean - center
        direction, spread, _ = torch.linalg.svd((means * share.sqrt()[:, None]).T, full_matrices=False)  # of B
        between = direction * (spread.square() / (1 + spread.square())).sqrt()  # U
        directions = torch.cat([means.T, between], dim=1)
        self.directions, self.offset = gaussians.whitening @ directions, center @ directions
        self.squares = means.square().sum(dim=1)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        found = x.feature.double() @ self.directions - self.offset
        n_classes = len(self.squares)
        nearest: Tensor = (2 * found[:, :n_classes] - self.squares).amax(dim=1)
        return found[:, n_classes:].square().sum(dim=1) - nearest


@method("mahalanobis-plus", label="Mahalanobis++", paper="Müller and Hein, 2025")
class MahalanobisPlus(PostHoc):
    """Mahalanobis on L2-normalised features. Vectors are normalised as they were given, as those of KNN."""

    as_given: AsGiven
    gaussians: TiedGaussians

    def fit(self, known: Known) -> None:
        self.as_given = known.as_given
        self.gaussians = TiedGaussians.fit(self.label, known, ClassMoments.of(known, self._shaped))

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.gaussians.score(self.gaussians.whitened(self._shaped(x.feature)))

    def _shaped(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return _on_the_sphere(self.as_given(features)).double()


def _auto_or_count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"must be auto or an integer of at least 1, got {value!r}")


@method("vim", label="ViM", paper="Wang et al., 2022")
class Vim(PostHoc):
    """Energy plus a virtual logit: the scaled norm of what the principal space of ID features leaves over."""

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
        self.logits = VirtualLogits.fit(known, asked)
        if self.logits.dim < asked:
            known.note(
                f"{self.label}: the ID training features span {self.logits.rank} dimensions, so its principal space "
                f"has {self.logits.dim} instead of {asked}"
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
    """Energy plus a virtual logit.

    Where the ID training features span fewer dimensions than were asked for, nothing of them would be left over and
    the scale would be undefined: the principal space then has one dimension less than they span.
    """

    head: Head
    origin: Float[Tensor, " d"]  # where all logits vanish, or come nearest to it
    principal: Float[Tensor, "d p"]  # an orthonormal basis of the principal space
    scale: float
    rank: int

    @classmethod
    def fit(cls, known: Known, dim: int) -> VirtualLogits:
        """The principal space has the `dim` directions in which the training features are farthest from the origin."""
        head, id_features = known.head, known.features
        origin = -torch.linalg.pinv(head.weight) @ head.bias
        spread, direction = ClassMoments.shared(known).around(origin).directions(len(id_features))
        rank = int((spread > LEAST_LEFT_OVER * spread.max()).sum())
        own = cls(head, origin, direction[:, len(spread) - max(0, min(dim, rank - 1)) :], 0.0, rank)
        # a virtual logit is on average as large as the largest logit; without any spread the energy alone counts
        largest, left_over = (
            torch.cat(parts).mean()
            for parts in zip(
                *((head.logits(x).amax(dim=1), own.left_over(x)) for (x,) in _chunks(id_features)),
                strict=True,
            )
        )
        return replace(own, scale=float(largest / left_over)) if rank else own

    @property
    def dim(self) -> int:
        """Of the principal space."""
        return self.principal.shape[1]

    def left_over(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """The norm of what the principal space leaves over."""
        x = features.double() - self.origin
        norm: Tensor = (x - (x @ self.principal) @ self.principal.T).norm(dim=1)
        return norm

    def score(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Energy plus the virtual logit."""
        return energy(self.head.logits(features)) + self.scale * self.left_over(features)


# -- the wild data alone


@method("spectral", label="Spectral", paper="HaloScope: Du et al., 2024")
class Spectral(PostHoc):
    """Mean of σ ⟨f − f̄, v⟩² over the first singular vectors of the wild features: τ without a classifier.

    Vectors are taken as they were given. The authors choose the sign with labels; here far from f̄ is an outlier.
    """

    needs_wild = True
    is_exact = False  # the wild samples are nearer to their own mean than held-out ones

    class Params(Section):
        """n_vectors: how many singular vectors."""

        n_vectors: Count

    as_given: AsGiven
    mean: Float[Tensor, " d"]
    vector: Float[Tensor, "d v"]  # times √(σ / their number)

    def fit(self, known: Known) -> None:
        assert known.wild is not None
        n, width = self.params.n_vectors, known.head.weight.shape[1]
        check_count("methods.spectral.n_vectors", n, width, "features")
        self.as_given = known.as_given
        self.mean = torch.stack([self._given(x).sum(dim=0) for x in known.wild.chunks()]).sum(dim=0) / len(known.wild)
        centred = (self._given(x) - self.mean for x in known.wild.chunks())
        spread, direction = Scatter.of(len(known.wild), width, centred).directions(1)
        self.vector = direction[:, -n:] * (spread[-n:].clamp(min=0).sqrt() / n).sqrt()

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return ((self._given(x) - self.mean) @ self.vector).square().sum(dim=1)

    def _given(self, x: Representation) -> Float[Tensor, "n d"]:
        return self.as_given(x.feature).double()


# -- a few means


@method("she", label="SHE", paper="Zhang et al., 2023")
class She(PostHoc):
    """Minus the product with the mean of the predicted class's training features, of those that are predicted right.

    A class with none has no pattern that a sample could resemble: its samples get 0.
    """

    pattern: Float[Tensor, "k d"]

    def fit(self, known: Known) -> None:
        label, n_classes = known.id_train.label, known.id_train.n_classes
        is_right = known.id_train.predicted == label
        own = torch.where(is_right, label, n_classes)  # the others go to one more row
        total = _class_sums(known.features, own, n_classes + 1, Tensor.double)[:-1]
        self.pattern = total / own.bincount(minlength=n_classes)[:n_classes, None].clamp(min=1)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return -(x.feature.double() * self.pattern[x.predicted]).sum(dim=1)


@method("fdbd", label="fDBD", paper="Liu and Qin, 2024")
class Fdbd(PostHoc):
    """Minus the mean distance to the decision boundaries of other classes over that to the mean training feature."""

    mean: Float[Tensor, " d"]
    inverse: Float[Tensor, "k k"]  # 1 / ‖w − w′‖; 0 where they are equal: there is no boundary

    def fit(self, known: Known) -> None:
        weight = known.head.weight
        self.mean = known.features.mean(dim=0, dtype=torch.float64)
        apart = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
        self.inverse = torch.where(apart > 0, 1 / apart, 0.0)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        logits = x.logits.double()
        margin = (logits.amax(dim=1, keepdim=True) - logits) * self.inverse[x.predicted]
        length: Tensor = (x.feature.double() - self.mean).norm(dim=1)
        return -margin.sum(dim=1) / (logits.shape[1] - 1) / length.clamp(min=1e-12)


@method("nci", label="NCI", paper="Liu and Qin, 2025")
class Nci(PostHoc):
    """Minus the projection of the predicted class's weights on the centred feature, and a multiple of its L1 norm."""

    class Params(Section):
        """alpha: weight of the L1 norm."""

        alpha: NotNegative

    mean: Float[Tensor, " d"]  # of all ID training features
    logits: Float[Tensor, " k"]  # of that mean

    def fit(self, known: Known) -> None:
        self.mean = known.features.mean(dim=0, dtype=torch.float64)
        self.logits = known.head.logits(self.mean[None])[0]

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        # ⟨w, f − mean⟩ is a difference of two logits: the bias cancels
        along = x.logits.double().amax(dim=1) - self.logits[x.predicted]
        features = x.feature.double()
        length: Tensor = (features - self.mean).norm(dim=1)
        cosine: Tensor = along / length.clamp(min=1e-12)  # times ‖w‖
        return -cosine - features.abs().sum(dim=1) * float(self.params.alpha)
