"""The figure of `salcli theory`: scores, errors against the threshold, and the condition on ζ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from salcli.reporting.figure_file import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    densities,
    house_style,
    legend_below,
    log_floor,
    write_figure,
)
from salcli.reporting.score_names import score_label
from salcli.sal.theory import required_discrepancy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from salcli.stages.theory import TheoryCheck

N_BINS = 40


def write_theory_figure(result: TheoryCheck, paths: Sequence[Path]) -> None:
    """Three panels, as PNG and SVG."""
    with house_style():
        figure = Figure(figsize=(13, 4.4), layout="constrained")
        scores, errors, condition = figure.subplots(1, 3)
        _scores(scores, result)
        _errors(errors, result)
        _condition(condition, result)
        figure.suptitle(f"{result.ood}, seed {result.seed}", x=0.01, ha="left", weight="bold")
        write_figure(figure, paths)


def _scores(axes: Axes, result: TheoryCheck) -> None:
    candidates = result.candidates
    samples = [(candidates.calibration_score, "calibration", BLUE)]
    if result.truth:
        is_ood = result.truth.is_ood.numpy()
        samples = [
            (candidates.wild_score[~is_ood], "wild ID", ORANGE),
            (candidates.wild_score[is_ood], "wild OOD", PURPLE),
        ]
    else:
        samples.append((candidates.wild_score, "wild", GREY))
    samples = [sample for sample in samples if len(sample[0])]
    densities(axes, samples, _score_axis(axes, result))
    _mark_threshold(axes, result)
    axes.set(title="(a) Filtering score", ylabel="share of samples")
    legend_below(axes)


def _errors(axes: Axes, result: TheoryCheck) -> None:
    for curve, style, name in (
        (result.truth.errors if result.truth else None, "-", ""),
        (result.estimated, "--", ", estimated"),
    ):
        if curve is not None:
            threshold = curve.threshold.numpy()
            axes.plot(threshold, curve.err_in, style, color=ORANGE, linewidth=2, label=f"ERR_in{name}")
            axes.plot(threshold, curve.err_out, style, color=PURPLE, linewidth=2, label=f"ERR_out{name}")
    _score_axis(axes, result)
    _mark_threshold(axes, result)
    axes.set(title="(b) Errors against the threshold", ylabel="share", ylim=(-0.02, 1.02))
    if result.truth or result.estimated:
        legend_below(axes)


def _condition(axes: Axes, result: TheoryCheck) -> None:
    pi = np.linspace(0, 1, 200)
    axes.plot(pi, [required_discrepancy(one) for one in pi], color=GREY, label="1.011 √π (Theorem 2)")
    zeta = result.held_out
    # the bar reaches from ζ as the samples show it down to ζ without the part that is noise
    bar = np.array([[zeta.zeta - zeta.without_noise], [0.0]])
    places = [(result.mixture.pi, "D", BLUE, f"at π̂ = {result.mixture.pi:.3f} (by {result.mixture.score})")]
    if result.truth:
        places.insert(0, (result.truth.pi, "o", PURPLE, f"at the true π = {result.truth.pi:.3f}"))
    for place, marker, colour, name in places:
        axes.errorbar(place, zeta.zeta, bar, fmt=marker, color=colour, capsize=4, label=f"ζ {name}")
    axes.set(title="(c) Condition on the discrepancy", xlabel="π", ylabel="ζ", xlim=(-0.02, 1.02))
    axes.set_ylim(bottom=0)
    legend_below(axes)


def _score_axis(axes: Axes, result: TheoryCheck) -> np.ndarray:
    """Logarithmic for τ, which ranges over many powers of ten; other scores may be negative. Returns bins."""
    scores = (result.candidates.wild_score, result.candidates.calibration_score)
    low, high = min(part.min() for part in scores), max(part.max() for part in scores)
    if result.candidates.score_name == "sal" and high > 0:
        axes.set_xscale("log")
        bins = np.geomspace(log_floor(scores), high, N_BINS + 1)
    else:
        bins = np.linspace(low, high if high > low else low + 1, N_BINS + 1)
    axes.set_xlim(bins[0], bins[-1])
    axes.set_xlabel(f"filter's score ({score_label(result.candidates.score_name)})")
    return bins


def _mark_threshold(axes: Axes, result: TheoryCheck) -> None:
    axes.axvline(result.candidates.threshold, color=GREY, linestyle=":", linewidth=1.5)
    axes.annotate(
        " T", (result.candidates.threshold, 1), xycoords=("data", "axes fraction"), va="top", color=GREY, weight="bold"
    )
