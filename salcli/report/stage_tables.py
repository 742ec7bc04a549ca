"""One small table for each stage, and what `filter`, `theory` and `toy` show of their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from salcli.errors import SalError, printable
from salcli.report.console import first_few, plain_table, records_table
from salcli.report.paper import paper_err_in_of_toy, paper_zeta
from salcli.report.results import pi_text
from salcli.store.layout import SAL, UNKNOWN, Experiment

if TYPE_CHECKING:  # stages load torch, which a table does not need
    from salcli.detector.stage import MadeDetector
    from salcli.pipeline.extract import Extracted
    from salcli.pipeline.filter import Filtered
    from salcli.pipeline.prepare import Prepared
    from salcli.pipeline.theory import TheoryCheck
    from salcli.pipeline.toy import ToyRun
    from salcli.pipeline.train_id import TrainedClassifier
    from salcli.pipeline.train_ood import TrainedNetwork

N_BINS = 14
BAR_WIDTH = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"
SHOWN_CLASSES = 10
CALIBRATIONS = {"train": "the paper's text", "holdout": "our default", "id-svd": "the authors' code"}
REORDER = "rename the folders so that they sort like the network's classes, or give a CSV with their numbers as labels"


def method_label(name: str) -> str:
    """What tables call a method; a variant of SAL goes by its own name."""
    from salcli.methods.base import find_method

    try:
        return find_method(name).label
    except SalError:
        return name


def score_label(name: str) -> str:
    """τ, or the label of another method."""
    return "τ" if name == SAL else method_label(name)


def share_text(value: float | None) -> str:
    """In percent; unknown where there is no truth, – where it is not defined."""
    return UNKNOWN if value is None else "–" if math.isnan(value) else f"{value:.1%}"


def _number(value: float | None, digits: int = 3) -> str:
    return UNKNOWN if value is None else "–" if math.isnan(value) else f"{value:.{digits}g}"


def _naming(
    experiments: Iterable[Experiment], *, with_pi: bool = True
) -> Callable[[Experiment], dict[str, str | Text]]:
    """Cells that tell experiments apart: the wild data where there are any, π and the variant where they vary."""
    experiments = list(experiments)
    has_wild, has_variants = any(one.ood for one in experiments), any(one.variant != SAL for one in experiments)
    several_pi = with_pi and len({one.pi for one in experiments}) > 1
    return lambda one: {
        **({"wild OOD": one.ood} if has_wild else {}),
        **({"π": pi_text(one.pi)} if several_pi else {}),
        **({"variant": one.variant} if has_variants else {}),
        "seed": str(one.seed),
    }


# --- prepare, train-id, extract-grads, train-ood, train-encoder, detector


def prepared_table(done: Sequence[Prepared]) -> Table:
    return records_table("Prepared data", [{"what": one.what, "samples": counts_text(one)} for one in done])


def counts_text(prepared: Prepared) -> str:
    return "  ".join(f"{name} {count:,}" for name, count in prepared.counts.items() if count)


def train_id_table(done: Sequence[TrainedClassifier]) -> Table:
    rows = [
        {
            "seed": str(result.seed),
            "epochs": str(result.last_epoch.epoch) if result.last_epoch else "0",
            "last loss": f"{result.last_epoch.loss:.4f}" if result.last_epoch else "–",
            "train accuracy": f"{result.train_accuracy:.2%}",
            "test accuracy": f"{result.test_accuracy:.2%}",
        }
        for result in done
    ]
    return records_table("ID classifier", rows)


def class_notes(done: Sequence[TrainedClassifier]) -> Iterator[tuple[str, str]]:
    """Lines with their style: whether a network that was trained elsewhere has the same classes."""
    for result in done:
        check = result.class_check
        if check is None:
            continue
        right = f"{check.accuracy:.1%} of {check.n_samples:,} calibration images right"
        yield f"seed {result.seed}: used as given, not trained; {right}", ""
        yield "T, is_ood and p-values are valid only if the network has never seen these images", "dim"
        assumed = _order(check.class_names)
        if check.has_other_order:
            yield (
                f"warning: its classes seem to be in another order than yours. Assumed: {assumed}; "
                f"as {_order(check.best_order)} it would have {check.best_accuracy:.1%} right. To fix that, {REORDER}.",
                "bold yellow",
            )
        elif check.is_near_chance:
            yield (
                f"warning: that is no better than a guess. Assumed: classes in the order {assumed}, and input that is "
                f"normalized with model.mean and model.std. If the order is wrong, {REORDER}.",
                "bold yellow",
            )


def _order(names: tuple[str, ...]) -> str:
    return first_few([f"{k} {printable(name)}" for k, name in enumerate(names)], SHOWN_CLASSES)


def extracted_table(done: Sequence[Extracted]) -> Table:
    """Size of each file, compared with the dense gradient matrix that it stands for."""
    rows = [
        {
            "data": result.what,
            "seed": str(result.experiment.seed),
            "samples": f"{result.n_samples:,}",
            "classes × features": f"{result.n_classes} × {result.n_features}",
            "of the dense size": f"{1 / result.n_classes + 1 / result.n_features:.1%}",
        }
        for result in done
    ]
    return records_table("Gradients", rows)


def trained_table(done: Sequence[TrainedNetwork]) -> Table:
    """Networks of train-ood or train-encoder, with the last epoch of each phase of their training."""
    with_wild, naming = any(result.experiment.ood for result in done), _naming(result.experiment for result in done)
    rows = []
    for result in done:
        last, outliers = list(result.last_epochs.values()), result.n_outliers
        train_accuracy = last[-1].accuracy if result.train_accuracy is None else result.train_accuracy
        row = {
            **naming(result.experiment),
            "method": result.label,
            **({"as outliers": "–" if outliers is None else f"{outliers:,}"} if with_wild else {}),
            "epochs": " + ".join(str(epoch.epoch) for epoch in last),
            "last loss": ", ".join(f"{epoch.loss:.4f}" for epoch in last),
            "train acc.": "–" if math.isnan(train_accuracy) else f"{train_accuracy:.2%}",
            "test acc.": "–" if result.test_accuracy is None else f"{result.test_accuracy:.2%}",
        }
        rows.append(row)
    note = "As outliers: candidates of the filter for SAL, all wild samples for its rivals."
    title = "Trained with wild data" if with_wild else "Trained on ID data"
    return records_table(title, rows, caption=[note] if with_wild else [])


def detector_view(done: Sequence[MadeDetector]) -> Group:
    """Their numbers, then why `auto` chose their methods."""
    naming = _naming(result.experiment for result in done)
    rows = [
        {
            **naming(result.experiment),
            "method": result.method,
            "classes": f"{result.n_classes:,}",
            "calibration samples": f"{result.n_calibration:,}",
            "threshold (keeps 95%)": f"{result.threshold:.4g}",
        }
        for result in done
    ]
    reasons = [Text(f"{one.experiment}: {one.method}. {one.reason}") for one in done if one.reason]
    return Group(records_table("Detectors", rows), *reasons)


# --- filter


def filter_view(done: Sequence[Filtered]) -> Group:
    """Histograms of the scores, then the numbers, then what was found."""
    parts: list[RenderableType] = []
    for result in done:
        found = result.separation
        parts.append(Text(f"{score_label(result.score)}, {result.experiment}", style="bold"))
        pair = found.scores.wild.numpy(), found.scores.calibration.numpy()
        parts.append(two_histograms(*pair, ("wild", f"ID ({result.protocol})"), found.threshold))
    parts.append(_filter_table(done))
    parts += [Text(f"{result.experiment}: {result.sentence}", style="bold") for result in done]
    for result in done:
        verdict = result.separation.verdict
        if result.score == SAL and verdict and verdict.kind == "nothing found":
            warning = nothing_found(result.fit.train_accuracy, result.fit.calibration_accuracy)
            parts.append(Text(f"warning: {result.experiment}: {warning}", style="bold yellow"))
    return Group(*parts)


def _filter_table(done: Sequence[Filtered]) -> Table:
    naming = _naming(result.experiment for result in done)
    has_truth = any(result.errors for result in done)
    of_truth = ["precision", "ERR_in", "ERR_out"] if has_truth else []  # else all of them are unknown
    notes = ["certified: at least so many of the candidates are outliers (95%)."]
    if has_truth:
        notes.append(
            "ERR_in: wild ID taken for outliers; ERR_out: wild OOD missed (compared with the truth afterwards)."
        )
    table = plain_table(
        "Candidate outliers: wild samples with a score above T",
        *naming(done[0].experiment), "T", "candidates", "of wild", "certified", *of_truth, "ID acc.",
        caption=[*notes, "ID acc.: on calibration data."],
    )  # fmt: skip
    for result in done:
        errors, found = result.errors, result.separation
        known = [errors.precision, errors.err_in, errors.err_out] if errors else [None] * len(of_truth)
        table.add_row(
            *naming(result.experiment).values(),
            f"{found.threshold:.4g}",
            f"{len(found.candidates):,}",
            f"{len(found.scores.wild):,}",
            f"{found.verdict.certified:,}" if found.verdict else "–",
            *map(share_text, known),
            share_text(result.fit.calibration_accuracy),
        )
    return table


def nothing_found(train_accuracy: float, calibration_accuracy: float | None) -> str:
    """A low accuracy alone is no reason to warn: with many classes τ may separate well."""
    known = calibration_accuracy is not None and not math.isnan(calibration_accuracy)
    held_out = f" and {calibration_accuracy:.1%} of calibration data" if known else ""
    return (
        "τ finds no more than ID data alone would give. It separates well only where the ID risk is small: the "
        f"classifier gets {train_accuracy:.1%} of ID training{held_out} right. Improve it (more labeled data, longer "
        "training, another network), or do not rely on the candidates."
    )


def two_histograms(
    left: NDArray[np.floating], right: NDArray[np.floating], names: tuple[str, str], threshold: float
) -> Text:
    """Shares of two samples in common bins, as bars of characters; what is above the threshold T is yellow."""
    edges = _bin_edges(np.concatenate([left, right]))
    if edges[0] < threshold < edges[-1]:  # a bin is above or below the threshold, never across it
        edges[1:-1][np.abs(edges[1:-1] - threshold).argmin()] = threshold
    shares = [np.histogram(np.clip(sample, edges[0], edges[-1]), edges)[0] / len(sample) for sample in (left, right)]
    largest = max(share.max() for share in shares)
    text = Text(f"{'':>12}  {names[0]:<{BAR_WIDTH + 7}}{names[1]}\n", style="bold")
    for i, edge in enumerate(edges[:-1]):
        bars = [f"{share[i]:>5.1%} {_bar(share[i] / largest):<{BAR_WIDTH}}" for share in shares]
        marker = "T" if edge == threshold else " "
        style = "yellow" if edge >= threshold else ""
        text.append(f"{marker} {edge:>10.2g}  {bars[0]} {bars[1].rstrip()}\n", style=style)
    return text


def _bin_edges(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scores ≥ 0 range over many powers of ten, so their bins do too; otherwise bins of equal width."""
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    if low >= 0 and len(positive) and high > 100 * np.median(positive):
        floor = max(float(np.quantile(positive, 0.02)), high * 1e-12)
        return np.concatenate([[0.0], np.geomspace(floor, high, N_BINS)])
    return np.linspace(low, high if high > low else low + 1, N_BINS + 1)


def _bar(share: float) -> str:
    full, rest = divmod(max(round(share * BAR_WIDTH * 8), int(share > 0)), 8)
    return "█" * full + EIGHTHS[rest].strip()


# --- theory and toy


def theory_view(done: Sequence[TheoryCheck]) -> Group:
    """The condition on ζ, τ and what bounds its ERR_out, and the errors of each variant's filter."""
    gradients = list({(one.experiment.with_variant(SAL)): one for one in reversed(done)}.values())[::-1]
    naming, paper = _naming((one.experiment.with_variant(SAL) for one in gradients), with_pi=False), paper_zeta()
    discrepancies, scores = [], []
    for result in gradients:
        truth, tau, bounds, near = result.truth, result.tau, result.err_out_bounds, round(result.pi, 2)
        which = naming(result.experiment.with_variant(SAL))
        which["π"] = f"{result.pi:.3g}" if truth else f"≈ {result.pi:.2g}"
        row = {
            **which,
            "ζ": _number(result.held_out.zeta),
            "debiased": _number(result.held_out.without_noise),
            "1.011 √π": _number(result.required),
            "holds": "yes" if result.condition_holds else "no",
            "pairwise": _number(result.pairwise),
            "at π = 0": _number(result.pairwise_id),
            "Table 5": f"{paper[near]:.2f}" if near in paper and truth else "",
        }
        discrepancies.append(row)
        row = {
            **which,
            "τ ID": _number(truth.mean_tau_id, 2) if truth else f"≈ {_number(tau.mean_held_out, 2)}",
            "τ OOD": _number(truth.mean_tau_ood, 2) if truth else f"≈ {_number(result.mean_tau_ood, 2)}",
            "≥": _number(result.least_mean, 2),
            "max τ": _number(tau.largest, 2),
            "θ": f"{result.outliers.means.angle[0]:.0f}°" if result.outliers else "–",
            "T": _number(tau.threshold, 2),
            "ERR_out": share_text(truth.err_out if truth else None),
            "≤ mean": share_text(bounds["by_mean"]),
            "≤ ζ": share_text(bounds["by_zeta"]),
            "δ(T)": share_text(bounds["printed"]),
        }
        scores.append(row)
    naming = _naming(result.experiment for result in done)
    errors = plain_table(
        "Errors of the filter (Theorem 1)",
        *naming(done[0].experiment), "π̂", "ERR_in", "est.", "ERR_out", "est.", "contam.", "est.",
        caption=[
            "Of the filter's own scores and T; contam.: ID data among the candidates.",
            "est.: from held-out ID data and π̂ (by the committee), without the truth.",
        ],
    )  # fmt: skip
    for result in done:
        true, estimated = (result.errors_at_threshold(estimated=one) for one in (False, True))
        cells = [share_text(one[side] if one else None) for side in range(3) for one in (true, estimated)]
        errors.add_row(*naming(result.experiment).values(), _number(result.share.value), *cells)
    about_zeta = [
        "ζ: Definition 2, calibration against wild data; ≈: estimated without the truth.",
        "debiased: less what two samples of one distribution show; has to reach 1.011 √π (Theorem 2).",
        "pairwise: ζ as the authors' code prints it, the mean distance of ID and wild gradients;",
        "at π = 0: of held-out ID data instead. Table 5: the paper's, CIFAR-100 and Textures.",
    ]
    about_tau = [
        "τ ID, τ OOD: means, with one v for all classes; ≥: 0.98 ζ²/π, for τ OOD (Theorem 4).",
        "θ: angle of v and the mean gradient of OOD data (else τ > T); T: quantile of held-out τ.",
        "≤: ERR_out is at most (max − mean) / (max − T), with the mean τ OOD or with its bound by ζ.",
        "δ(T): Theorem 1 as printed, a bound only where max τ ≤ 1 (docs/theory.md).",
    ]
    bounds_title = "τ (Eq. 4–7) of wild data, and bounds on the outliers that it misses"
    return Group(
        records_table("Discrepancy ζ of ID and wild gradients", discrepancies, caption=about_zeta),
        records_table(bounds_title, scores, caption=about_tau),
        errors,
    )


def toy_table(done: Sequence[ToyRun]) -> Table:
    """One row for each scenario and each way to calibrate the threshold, beside the paper's errors."""
    n_seeds, paper = len({result.seed for result in done}), paper_err_in_of_toy()
    rows = []
    for scenario in dict.fromkeys(result.scenario for result in done):
        for calibration in done[0].thresholds:
            errors = [result.errors(calibration) for result in done if result.scenario == scenario]
            err_in, err_out = ([getattr(one, name) for one in errors] for name in ("err_in", "err_out"))
            contaminated = [1 - one.precision for one in errors]
            row = {
                "outliers": scenario,
                "T calibrated on": f"{calibration} ({CALIBRATIONS[calibration]})",
                "ERR_in": _mean_and_std(err_in),
                "range": f"{100 * min(err_in):.0f}–{max(err_in):.0%}",
                "ERR_out": _mean_and_std(err_out),
                "contam.": f"{np.mean(contaminated):.1%}",
                "its range": f"{100 * min(contaminated):.0f}–{max(contaminated):.0%}",
                "paper": f"{paper[scenario]:.1%}" if calibration == "train" else "",
            }
            rows.append(row)
    table = records_table(
        f"The paper's example in the plane, {n_seeds} seed{'s' if n_seeds > 1 else ''}",
        rows,
        caption=[
            "ERR_in: wild ID taken for outliers; ERR_out: wild OOD missed; contam.: ID data among S_T.",
            'paper: one run\'s "error rate of S_T containing ID data", which may be ERR_in or contamination.',
        ],
    )
    table.columns[6].header = "range"
    return table


def _mean_and_std(values: Sequence[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.1%}" if len(values) > 1 else ""
    return f"{np.mean(values):.1%}{spread}"
