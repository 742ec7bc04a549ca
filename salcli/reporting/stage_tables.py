"""One small table for each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from salcli.reporting.results_table import LABELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from salcli.stages.detector import MadeDetector
    from salcli.stages.extract_grads import ExtractedGradients
    from salcli.stages.prepare import Prepared
    from salcli.stages.train_encoder import TrainedEncoder
    from salcli.stages.train_id import TrainedClassifier
    from salcli.stages.train_ood import TrainedWithWild


def plain_table(title: str, *columns: str) -> Table:
    """The house style: first column to the left, figures to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def prepared_table(done: Sequence[Prepared]) -> Table:
    """How many samples there are of what."""
    table = plain_table("Prepared data", "what", "samples")
    for result in done:
        table.add_row(result.what, "  ".join(f"{name} {count:,}" for name, count in result.counts.items() if count))
    return table


def train_id_table(done: Sequence[TrainedClassifier]) -> Table:
    """Accuracy of each classifier."""
    table = plain_table("ID classifier", "seed", "epochs", "last loss", "train accuracy", "test accuracy")
    for result in done:
        table.add_row(
            str(result.seed),
            str(result.last_epoch.epoch) if result.last_epoch else "0",
            f"{result.last_epoch.loss:.4f}" if result.last_epoch else "–",
            f"{result.train_accuracy:.2%}",
            f"{result.test_accuracy:.2%}",
        )
    return table


def gradients_table(done: Sequence[ExtractedGradients]) -> Table:
    """Size of each gradient file, and of the dense matrix it stands for."""
    table = plain_table("Gradients", "data", "seed", "samples", "classes × features", "of the dense size")
    for result in done:
        stored, dense = result.n_classes + result.n_features, result.n_classes * result.n_features
        table.add_row(
            result.what,
            str(result.seed),
            f"{result.n_samples:,}",
            f"{result.n_classes} × {result.n_features}",
            f"{stored / dense:.1%}",
        )
    return table


def train_ood_table(done: Sequence[TrainedWithWild]) -> Table:
    """The last epoch of each network."""
    table = plain_table(
        "Trained with wild data", "wild OOD", "seed", "method", "as outliers", "epochs", "last loss", "ID acc. (train)"
    )
    for result in done:
        table.add_row(
            result.ood,
            str(result.seed),
            LABELS[result.method],
            "–" if result.n_outliers is None else f"{result.n_outliers:,}",
            str(result.last_epoch.epoch),
            f"{result.last_epoch.loss:.4f}",
            f"{result.last_epoch.accuracy:.2%}",
        )
    table.caption = "As outliers: candidates of the filter for SAL, all wild samples for its rivals, none for STEP."
    table.caption_justify = "left"
    return table


def train_encoder_table(done: Sequence[TrainedEncoder]) -> Table:
    """The last epochs of each encoder."""
    table = plain_table(
        "Trained by contrast", "seed", "method", "epochs", "last loss", "head epochs", "last loss", "test accuracy"
    )
    for result in done:
        table.add_row(
            str(result.seed),
            LABELS[result.encoder],
            str(result.last_epoch.epoch),
            f"{result.last_epoch.loss:.4f}",
            str(result.last_head_epoch.epoch),
            f"{result.last_head_epoch.loss:.4f}",
            f"{result.test_accuracy:.2%}",
        )
    return table


def detector_table(done: Sequence[MadeDetector]) -> Table:
    """What each detector was calibrated with."""
    table = plain_table("Detectors", "OOD set", "seed", "classes", "calibration images", "threshold (keeps 95%)")
    for result in done:
        figures = str(result.seed), f"{result.n_classes:,}", f"{result.n_calibration:,}", f"{result.threshold:.4g}"
        table.add_row(result.ood, *figures)
    return table
