"""SAL on arrays: labeled vectors and unlabeled wild ones in; candidate outliers, and a detector of new ones, out.

    from salcli import SAL

    sal = SAL().fit(X, y, wild=W)
    print(sal)
    sal.candidates_

An estimator by scikit-learn's conventions, and the same code as `salcli init` and `dvc repro` on the same vectors.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Number, Real
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from salcli import __version__
from salcli.conformal.evidence import false_discovery_cutoff, p_values
from salcli.data.sets import LARGEST_VALUE, some_of
from salcli.data.splits import split_id
from salcli.data.vectors import ANY, Columns
from salcli.detector.detector import Detector, Scores, score_samples
from salcli.detector.vectors import VectorFormat
from salcli.engine.batches import LabeledRows, Rows
from salcli.engine.device import computing
from salcli.engine.inference import outputs_of
from salcli.engine.linear_heads import ROUNDS, Examples, FullFit
from salcli.engine.training import reproducible
from salcli.errors import did_you_mean
from salcli.methods import LEAST_CALIBRATION
from salcli.methods.base import InputScore, Known, built_in
from salcli.methods.sal import SAL_PLUS, TAU, Tau
from salcli.methods.separation import Separation, filter_scores, sentence, separate
from salcli.models.backbones import LINEAR
from salcli.models.network import Classifier
from salcli.params.presets import default_params
from salcli.params.reading import with_overrides
from salcli.params.schema import Params, separators
from salcli.pipeline.network_spec import network_spec
from salcli.progress import Silent, Task
from salcli.sal.gradients import Representation

LEAST_WILD = 4  # samples
NO_LABELS = "no_validation"  # what scikit-learn calls it
Vectors = NDArray[np.float32]


class SAL(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Find the outliers in unlabeled data, and score new samples.

    X, W and Z are vectors: embeddings, or columns of a table. They are standardized here, and a linear classifier is
    fitted to them. `predict` gives the class, `predict_ood` whether a sample is an outlier. Scores are outlier scores:
    higher = more OOD.

    Parameters
    ----------
    calibration: share of the labeled samples of each class to hold out, or other labeled samples as a pair (Xc, yc).
    method: what separates wild data and scores new samples: "sal-plus", "sal" (τ of the paper), "committee", or a
        post-hoc score such as "knn". `salcli methods` lists them.
    random_state: the seed of all that is random; None: another one each time.
    verbose: print the steps and what they note.

    Attributes
    ----------
    candidates_: a DataFrame of the wild samples that are probably outliers, the most probable first, with the index of
        `wild`: `position` in `wild`, outlier `score`, `probability` of being an outlier (of sal-plus, else NaN),
        `p_value`, predicted `class`, and `certified`: at least so many of the samples down to here are outliers (95%).
    separation_: scores, p-values and threshold of all wild samples, and the verdict with π̂ and drift.
    accuracy_: of the classifier on the calibration samples.
    detector_: the salcli.Detector that `save` writes.
    notes_: what the fit had to say, such as scores that do not work here.
    classes_, n_features_in_, feature_names_in_: as in scikit-learn.
    """

    candidates_: pd.DataFrame
    separation_: Separation
    accuracy_: float
    detector_: Detector
    notes_: list[str]
    classes_: NDArray[Any]
    n_features_in_: int

    def __init__(
        self,
        *,
        calibration: float | tuple[Any, Any] = 0.2,
        method: str = SAL_PLUS,
        random_state: int | np.random.RandomState | None = 0,
        verbose: bool = False,
    ) -> None:
        self.calibration = calibration
        self.method = method
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, wild: Any = None) -> Self:
        """Fit to labeled vectors X (n, d) with classes y, and to unlabeled vectors `wild` (m, d)."""
        if wild is None:
            raise ValueError("SAL looks for outliers in unlabeled data, but wild is None. Use fit(X, y, wild=W).")
        self._check_params()
        seed = self.random_state
        if not isinstance(seed, Integral):
            seed = int(check_random_state(seed).randint(2**31))
        vectors, labels = self._validated(X, y=_labels(y), reset=True)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"SAL needs samples of at least 2 classes in the data, but the data contains only one class: "
                f"{self.classes_[0]}"
            )
        training, calibration = self._split(vectors, numbers, int(seed))
        unlabeled = _rows(self._validated(wild, "wild", least=LEAST_WILD))
        self._fit(training, calibration, unlabeled, int(seed))
        self.candidates_ = self._candidates(wild)
        return self

    def _fit(self, training: LabeledRows, calibration: LabeledRows, wild: Rows, seed: int) -> None:
        """What the stages train-id, extract-grads, filter and detector do."""
        params, progress = self._params(len(training)), _Printed() if self.verbose else Silent()
        method, self.notes_ = params.filter_score(), list[str]()

        def note(text: str) -> None:
            self.notes_.append(text)
            progress.note(text)

        with computing(params.device, params.numerics) as compute, reproducible(seed, "train-id"):
            network, penalty = Classifier(network_spec(params.model, training)), params.train_id.penalty
            compute.place(network)
            examples = Examples.of_classes(training.rows, training.labels)
            with progress.task("classifier", ROUNDS, "rounds") as task:
                FullFit(network.head, network.features, examples, penalty, seed, compute.device).run(task)

            def represented(rows: Rows, labels: Tensor | None = None) -> Representation:
                outputs, size = network.features_and_logits, params.extract_grads.batch_size
                feature, logits = outputs_of(network, outputs, rows, size, compute)
                return Representation(feature, logits, logits.argmax(1) if labels is None else labels)

            id_train, held_out = (represented(one.rows, one.labels) for one in (training, calibration))
            of_wild = represented(wild)
            about = {"seed": seed, "device": compute.device, "note": note}
            with progress.task(f"filter by {method.label}", training.n_classes, "classes") as task:
                known = Known.of(network, id_train, wild=of_wild, calibration=held_out, task=task, **about)
                scores = filter_scores(method, known, params.filter)
                self.separation_ = separate(scores, params.filter)
            method = known.fitted(method)
            method.compact(seed)
            # by the code that scores new samples; a method that has learned from these, by models that left them out
            own = score_samples(network, method, calibration.rows.read(slice(None))).score
        self.accuracy_ = float((held_out.predicted == held_out.label).double().mean())
        self._n_labeled, self._predicted = len(training) + len(calibration), of_wild.predicted.numpy()
        names = tuple(getattr(self, "feature_names_in_", ()))
        self.detector_ = Detector(
            network,
            VectorFormat(self.n_features_in_, Columns(vector=names) if names else ANY),
            training.class_names,
            np.sort(own if method.is_exact else scores.calibration.float().numpy()),
            {"salcli": __version__, "made_by": "salcli.SAL", "seed": seed, "filter": params.filter.model_dump()},
            method=method,
            name=method.name,
            device=params.device,
        )

    def _candidates(self, wild: Any) -> pd.DataFrame:
        found = self.separation_
        score = found.scores.wild.numpy()
        at = np.argsort(-score, kind="stable")[: len(found.candidates)]
        return pd.DataFrame(
            {
                "position": at,
                "score": score[at],
                "probability": expit(score[at]) if self.method == SAL_PLUS else np.nan,
                "p_value": found.p_value[at],
                "class": self.classes_[self._predicted[at]],
                "certified": found.certified[: len(at)],
            },
            index=wild.index[at] if isinstance(wild, pd.DataFrame) else pd.Index(at),
        )

    # -- new samples

    def score_samples(self, X: Any) -> Any:
        """Outlier scores of samples (n): higher = more OOD. Of sal-plus, the log-odds of being an outlier."""
        return _like(X, self._scores(X).score, "score")

    def p_values(self, X: Any) -> Any:
        """Conformal p-values of samples (n): the probability that an ID sample scores as high."""
        score = self._scores(X).score
        return _like(X, p_values(self.detector_.calibration, score), "p_value")

    def predict(self, X: Any) -> Any:
        """The most probable class of each sample (n), be it an outlier or not."""
        label = self._scores(X).label
        return _like(X, self.classes_[label], "class")

    def predict_ood(self, X: Any, fdr: float = 0.1) -> Any:
        """Whether each sample is an outlier (n). On average, at most a share `fdr` of those that are flagged is ID.

        This is the procedure of Benjamini and Hochberg on the samples together, so the answers depend on all of them.
        """
        if not isinstance(fdr, Real) or not 0 < fdr < 1:
            raise ValueError(
                f"The 'fdr' parameter of predict_ood must be a float in the range (0.0, 1.0). Got {fdr!r} instead."
            )
        p = np.asarray(self.p_values(X))
        is_ood = p <= false_discovery_cutoff(p, float(fdr))
        if not is_ood.any() and (reason := self.detector_.too_few_for(float(fdr), len(p))):
            warnings.warn(reason, stacklevel=2)
        return _like(X, is_ood, "is_ood")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the detector to a file, which salcli.Detector.load and `salcli predict` read."""
        check_is_fitted(self)
        self.detector_.save(Path(path))

    def _scores(self, X: Any) -> Scores:
        check_is_fitted(self)
        own, vectors = self.detector_, torch.from_numpy(self._validated(X))
        return score_samples(own.network, own.method, vectors, own.batch_size)

    def __str__(self) -> str:
        """What was found; before the fit, the parameters."""
        if not hasattr(self, "candidates_"):
            return repr(self)
        found, n = self.separation_, len(self.detector_.calibration)
        n_wild = len(found.scores.wild)
        lines = [
            f"{self.detector_.label}: {self._n_labeled:,} labeled samples of {len(self.classes_):,} classes, {n:,} of "
            f"them for calibration; {n_wild:,} wild samples; {self.n_features_in_:,} dimensions",
            sentence(found),
        ]
        if (own := found.verdict) is not None:
            share = (
                f"{100 * own.share.value:.1f}% (90% interval {100 * own.share.low:.1f} to {100 * own.share.high:.1f}%)"
            )
            lines += [f"share of outliers π̂  {share}", f"drift              p = {own.drift:.2g}"]
        return "\n".join([*lines, f"accuracy           {100 * self.accuracy_:.1f}% of the calibration samples"])

    # -- parameters and data

    def _check_params(self) -> None:
        known = {name for name in (*separators(), Tau.name) if name not in built_in(InputScore)}
        if self.method not in known:
            guess = did_you_mean(str(self.method), known)
            raise ValueError(
                f"The 'method' parameter of SAL must be a str among {', '.join(sorted(known))}. "
                f"Got {self.method!r} instead{guess}."
            )
        given = self.calibration
        is_pair = isinstance(given, tuple | list) and len(given) == 2
        is_share = isinstance(given, Real) and not isinstance(given, bool) and 0 < given < 1
        if not (is_pair or is_share):
            raise ValueError(
                "The 'calibration' parameter of SAL must be a float in the range (0.0, 1.0) or a pair (Xc, yc). "
                f"Got {given!r:.80} instead."
            )

    def _params(self, n_train: int) -> Params:
        """The default params.yaml, with a linear head on vectors and this method in the filter."""
        values: dict[str, Any] = {"model.backbone": LINEAR, "methods.knn.k": max(1, min(50, n_train // 2))}
        if self.method in default_params()["variant"]:
            return Params.model_validate(with_overrides(default_params(), values)).for_variant(self.method)
        values["filter.score"] = TAU if self.method == Tau.name else self.method
        return Params.model_validate(with_overrides(default_params(), values))

    def _split(self, vectors: Vectors, numbers: NDArray[np.int64], seed: int) -> tuple[LabeledRows, LabeledRows]:
        """Training and calibration samples."""
        given = self.calibration
        if isinstance(given, tuple | list):
            held_out, labels = self._validated(given[0], "calibration", y=_labels(given[1]))
            if unseen := sorted({*labels.tolist()} - {*self.classes_.tolist()}, key=str):
                raise ValueError(f"calibration: y contains previously unseen labels: {some_of(unseen)}")
            sides = self._labeled(vectors, numbers), self._labeled(held_out, np.searchsorted(self.classes_, labels))
        else:
            counts, share = np.bincount(numbers), float(given)
            n_train = np.rint((1 - share) * counts)
            few = np.flatnonzero((n_train < 1) | (n_train == counts))
            if len(few):
                raise ValueError(
                    f"The least populated classes in y are too small for calibration={share:g}: "
                    f"{some_of([f'{self.classes_[k]} has {counts[k]}' for k in few])}. Give more samples, leave these "
                    "classes out, or give other samples as calibration=(Xc, yc)."
                )
            split = split_id(numbers, {"train": 1 - share, "calibration": share, "wild": 0, "test": 0}, seed)
            train, held = split.train, split.calibration
            sides = self._labeled(vectors[train], numbers[train]), self._labeled(vectors[held], numbers[held])
        if (n := len(sides[1])) < LEAST_CALIBRATION:
            raise ValueError(
                f"Found {n} calibration sample(s) while a minimum of {LEAST_CALIBRATION} is required by SAL. Give more "
                "labeled samples, a larger share of them for calibration, or other samples as calibration=(Xc, yc)."
            )
        return sides

    def _labeled(self, vectors: Vectors, numbers: NDArray[np.int64]) -> LabeledRows:
        names = tuple(map(str, self.classes_))
        return LabeledRows(_rows(vectors), torch.from_numpy(numbers), len(names), names)

    def _validated(self, X: Any, what: str = "", *, y: Any = NO_LABELS, reset: bool = False, least: int = 1) -> Any:
        """Vectors in float32; with y, a pair. `what` names an argument that is not X, for messages."""
        has_labels, given = y is not NO_LABELS, X
        if isinstance(X, Tensor):
            given = (X.float() if X.is_floating_point() else X).detach().cpu().numpy()  # numpy has no bfloat16
        try:
            if isinstance(X, pd.DataFrame):
                kinds = zip(X.columns, X.dtypes, strict=True)
                if texts := [name for name, kind in kinds if not pd.api.types.is_numeric_dtype(kind)]:
                    raise ValueError(
                        f"X has columns that are not numeric: {some_of(texts)}. Encode them or leave them out."
                    )
            with np.errstate(over="ignore"):  # these become infinite, and are refused
                found = validate_data(self, given, y, reset=reset, dtype=np.float32, ensure_min_samples=least)
            vectors, labels = found if has_labels else (found, None)
            if (largest := np.abs(vectors).max()) > LARGEST_VALUE:
                raise ValueError(
                    f"X has values up to {largest:.0e}; the largest that SAL takes is {LARGEST_VALUE:.0e}."
                )
        except ValueError as error:
            raise ValueError(f"{what}: {error}" if what else str(error)) from None
        vectors = np.require(np.asarray(vectors), requirements=["C", "W"])  # copies only what torch would warn about
        return (vectors, labels) if has_labels else vectors


def _labels(y: Any) -> Any:
    """Class labels as an array of one type."""
    if isinstance(y, Tensor):
        return y.detach().cpu().numpy()
    if y is None or (isinstance(y, np.ndarray) and y.dtype != object):
        return y
    labels = np.asarray(y, dtype=object)  # of a list with numbers and text, numpy would make text
    if labels.ndim != 1:
        return y
    kinds = {"number" if isinstance(one, Number) else type(one).__name__ for one in labels}
    if len(kinds) > 1:
        raise ValueError(
            f"y has labels of mixed types: {', '.join(sorted(kinds))}. Use one type, without missing values."
        )
    return np.array(labels.tolist())


def _rows(vectors: Vectors) -> Rows:
    return Rows((vectors,), np.arange(len(vectors)))


def _like(X: Any, values: NDArray[Any], name: str) -> Any:
    """One value for each sample: a Series with the index of a data frame, else an array."""
    return pd.Series(values, index=X.index, name=name) if isinstance(X, pd.DataFrame) else values


class _Printed(Silent):
    """Prints each step with its time, and notes."""

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Task]:
        start = time.perf_counter()
        yield self
        print(f"{name}: {time.perf_counter() - start:.1f} s")

    def note(self, text: str) -> None:
        print(text)
