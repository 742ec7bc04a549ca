"""The filter on scores: which wild samples are candidates, and what the list is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from salcli.conformal.evidence import (
    LABEL_SHIFT,
    Verdict,
    certificate,
    false_discovery_cutoff,
    label_shift_p_value,
    longest_certified,
    p_values,
    threshold,
    verdict,
)
from salcli.errors import ThresholdError
from salcli.methods.base import Known, PostHoc, finite
from salcli.methods.sal import FilterParams
from salcli.sal.gradients import RepresentationSource
from salcli.sal.metrics import threshold_that_keeps
from salcli.sal.tau import released_threshold

NONE = torch.empty(0, dtype=torch.float64)
ALPHA = 0.05  # of the T that a verdict counts by, where the list has no quantile of its own


@dataclass(frozen=True)
class FilterScores:
    """Outlier scores of the ID samples that T is chosen on, and of the wild samples."""

    calibration: Float[Tensor, " n"]
    wild: Float[Tensor, " m"]
    # of calibration and wild samples, by a score that treats them in the same way; None: there is none
    exact: tuple[Tensor, Tensor] | None
    # the same, by a score that has not learned to tell them; None: the exact one has not
    plain: tuple[Tensor, Tensor] | None = None
    held_out: Float[Tensor, " h"] = NONE  # of wild data that are held out
    exact_held_out: tuple[Tensor, Tensor] | None = None


def filter_scores(
    method: PostHoc, known: Known, params: FilterParams, held_out: RepresentationSource | None = None
) -> FilterScores:
    """By any score of features and logits. Wild data that are held out are scored, too; nothing learns from them."""
    assert known.wild is not None
    new = [held_out] if held_out is not None and len(held_out) else []
    if params.calibration != "holdout":
        wild, *rest = known.scores(method, known.wild, *new)
        calibration = known.fitted(method).scores(known.id_train, fitted_on=True)
        calibration = calibration[~calibration.isnan()]  # τ of classes that no wild sample is predicted as
        pair = finite(method.name, calibration), finite(method.name, wild)
        return FilterScores(*pair, None, held_out=torch.cat([NONE, *rest]))
    assert known.calibration is not None
    calibration, wild, *rest = known.scores(method, known.calibration, known.wild, *new)
    own, exact_new = known.fitted(method), None
    if new:
        learns = own.needs_wild or own.needs_calibration
        exact_new = own.exact_scores_of(new[0]) if learns else (calibration, rest[0])
    if (left_out := own.held_out_scores()) is not None:
        calibration, wild = left_out
    pair = finite(method.name, calibration), finite(method.name, wild)
    exact, plain = (pair, None) if own.is_exact else own.exact_scores() or (None, None)
    return FilterScores(*pair, exact, plain, torch.cat([NONE, *rest]), exact_new)


@dataclass(frozen=True)
class Separation:
    """Candidate outliers, and the evidence for them."""

    scores: FilterScores
    threshold: float  # candidates have a higher score
    candidates: Int[np.ndarray, " c"]  # their indices among the wild samples, rising
    p_value: Float[np.ndarray, " m"]  # exact, of every wild sample; NaN where there is none
    p_held_out: Float[np.ndarray, " h"]  # the same of held-out wild samples
    certified: Int[np.ndarray, " m"]  # of the first k wild samples by falling score, at least so many are outliers
    verdict: Verdict | None
    why_none: str = ""  # why there is no verdict


def separate(scores: FilterScores, params: FilterParams) -> Separation:
    """Choose T and take what is above it."""
    wild, n, m = scores.wild.numpy(), len(scores.calibration), len(scores.wild)
    order = np.argsort(-wild, kind="stable")
    p, certified = np.full(m, math.nan), np.zeros(m, np.int64)
    if scores.exact is not None:
        exact_calibration, exact_wild = (one.numpy() for one in scores.exact)
        p, certified = p_values(exact_calibration, exact_wild), certificate(exact_calibration, exact_wild, order)
    p_held_out = np.full(len(scores.held_out), math.nan)
    if scores.exact_held_out is not None:
        p_held_out = p_values(*(one.numpy() for one in scores.exact_held_out))
    T = _threshold(scores, params, certified, wild[order])
    candidates = np.flatnonzero(wild > T)
    found, why = None, ""
    if scores.exact is not None and n:
        alpha = 1 - params.threshold_quantile if params.threshold_quantile else ALPHA
        plain = None if scores.plain is None else (scores.plain[0].numpy(), scores.plain[1].numpy())
        found = verdict(exact_calibration, exact_wild, candidates, alpha, plain)
    elif params.calibration != "holdout":
        why = "T is of training data, so how many ID data alone would give is not known"
    else:
        why = "v is fitted to the wild data alone, so held-out ID data do not say how many of them are ID"
    return Separation(scores, T, candidates, p, p_held_out, certified, found, why)


def _threshold(
    scores: FilterScores,
    params: FilterParams,
    certified: Int[np.ndarray, " m"],
    ranked: Float[np.ndarray, " m"],  # wild scores, falling
) -> float:
    calibration, n, m = scores.calibration, len(scores.calibration), len(ranked)
    if n == 0:
        raise ThresholdError("there are no ID samples to choose T on; use a larger calibration set")
    if scores.exact is None and (params.fdr is not None or params.certified is not None):
        raise ThresholdError(f"score {params.score} has no p-values; use filter.threshold_quantile, or another score")
    if params.fdr is not None:
        # of the score that ranks the list: what another one flags may be anywhere in it
        p = p_values(calibration.numpy(), scores.wild.numpy())
        flagged = scores.wild.numpy()[p <= false_discovery_cutoff(p, params.fdr)]
        return math.nextafter(float(flagged.min()), -math.inf) if len(flagged) else math.inf
    if params.certified is not None:
        length = longest_certified(certified, params.certified)
        while 0 < length < m and ranked[length - 1] == ranked[length]:  # equal scores are in or out together
            length -= 1
        return math.nextafter(float(ranked[length - 1]), -math.inf) if length else math.inf
    quantile = params.threshold_quantile
    if quantile is None:
        return 0.0  # the log-odds of P(outlier) = ½
    if params.calibration == "id-svd":
        return released_threshold(calibration, quantile)
    if params.calibration == "train":
        return threshold_that_keeps(calibration.numpy(), quantile)
    T = threshold(calibration.numpy(), 1 - quantile)
    if math.isinf(T):
        needed = math.ceil(1 / (1 - quantile) - 1 - 1e-9)
        raise ThresholdError(
            f"filter.threshold_quantile {quantile:g} needs at least {needed:,} calibration samples, got {n:,}; use a "
            "smaller quantile, or more calibration data (data.id_shares.calibration)"
        )
    return T


def label_shift(
    found: Separation,
    predicted: tuple[Int[Tensor, " n"], Int[Tensor, " m"]],  # classes of calibration and wild samples
    class_names: Sequence[str],
) -> str:
    """What to say where the classes of the two differ; empty where they do not.

    Samples above T are left out on both sides, or classes with many of them would seem to differ.
    """
    sides = zip(predicted, (found.scores.calibration, found.scores.wild), strict=True)
    counts = [own[scores <= found.threshold].bincount(minlength=len(class_names)).numpy() for own, scores in sides]
    if (p := label_shift_p_value(*counts)) > LABEL_SHIFT:
        return ""
    known, wild = (count / count.sum() for count in counts)
    largest = np.argsort(-np.abs(wild - known), kind="stable")[:3]
    named = ", ".join(f"{class_names[k]} {wild[k]:.0%} (labeled {known[k]:.0%})" for k in largest)
    return (
        f"The wild data have other shares of classes than the labeled data (p = {p:.1g}): {named}. Certificate and "
        "p-values stay (measured at a level of 5%: 4.8%, at worst 7%), but P(outlier) is too high in frequent classes."
    )


def sentence(found: Separation) -> str:
    """What was found, for a person."""
    count = len(found.candidates)
    own = found.verdict
    if own is None:
        return f"{count:,} candidates; {found.why_none}."
    match own.kind:
        case "found":
            certified = f"at least {own.certified:,} of them are outliers (95%)"
            if not own.certified:
                certified = f"the wild data have at least {own.certified_of_all:,} outliers (95%), none of them certain"
            share = f"{100 * own.share.value:.1f} ({100 * own.share.low:.1f}–{100 * own.share.high:.1f})%"
            return f"{count:,} candidates; {certified}. An estimated {share} of the wild data are outliers."
        case "cannot tell":
            return (
                f"Cannot tell: {own.above:,} samples above T, where {own.expected:.0f} ± {own.margin:.0f} would come "
                f"from ID data alone; about {own.needed:,} calibration samples would tell."
            )
        case "nothing found":
            return f"Nothing found: at most {own.at_most:,} of {own.n_wild:,} wild samples are outliers above T (95%)."
        case "drift":
            return (
                "No verdict: the wild data differ from the labeled data as a whole, not only in outliers (another "
                "camera, other writers?); calibrate on labeled samples from the source of the wild data."
            )
