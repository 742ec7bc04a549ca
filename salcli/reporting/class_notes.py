"""What `train-id` says of a network that was trained elsewhere: does it mean the same classes?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from salcli.reporting.plan_table import printable_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from salcli.stages.train_id import TrainedClassifier

SHOWN = 10
CURE = "rename the folders so that they sort like the network's classes, or give a CSV whose labels are their numbers"


def class_notes(done: Sequence[TrainedClassifier]) -> Iterator[tuple[str, str]]:
    """Lines, each with its style."""
    for result in done:
        check = result.class_check
        if check is None:
            continue
        figures = f"{check.accuracy:.1%} of {check.n_samples:,} calibration images right"
        yield f"seed {result.seed}: used as given, not trained; {figures}", ""
        yield "T, is_ood and p-values promise what they do as far as these images are new to the network", "dim"
        assumed = _order(check.class_names)
        if check.has_other_order:
            yield (
                f"warning: its classes seem to stand in another order than yours. Assumed: {assumed}; "
                f"as {_order(check.best_order)} it would have {check.best_accuracy:.1%} right. To mend that, {CURE}.",
                "bold yellow",
            )
        elif check.is_near_chance:
            yield (
                f"warning: that is no better than a guess. Assumed: classes in the order {assumed}, and input that is "
                f"normalised with model.mean and model.std. If the order is wrong, {CURE}.",
                "bold yellow",
            )


def _order(names: tuple[str, ...]) -> str:
    more = ", …" if len(names) > SHOWN else ""
    return ", ".join(f"{k} {printable_name(name)}" for k, name in enumerate(names[:SHOWN])) + more
