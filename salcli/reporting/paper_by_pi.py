"""What the paper reports of SAL for several values of π."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from salcli.paper import figures
from salcli.reporting.results import AVERAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from salcli.paper import Figure
    from salcli.params import Params

THEORY, MAIN, MIXING_RATIO = "theory", "main-cifar100", "mixing-ratio"
AS_SHARE = {"err_in": 1, "err_out": 1, "fpr95": 100}  # what the paper's figures are divided by
REFERENCE = "CIFAR-100, WRN-40-2"  # data and network of the tables that have more than one π


@dataclass(frozen=True)
class PaperCurve:
    """One metric of SAL by π, as shares. `ood` is None where it is of other data or another network than ours."""

    metric: str
    ood: str | None
    name: str
    by_pi: dict[float, float]


def shares_of_the_paper() -> list[float]:
    """The values of π in its table of filter errors, which has the most."""
    return sorted({one.setting.pi for one in figures() if one.setting.table == THEORY and one.setting.pi})


def paper_curves(params: Params, ood_sets: Sequence[str]) -> list[PaperCurve]:
    """Of our own data and network, where the paper has them; of those that it has where not."""
    found = []
    for metric in AS_SHARE:
        own = [PaperCurve(metric, ood, f"paper: {ood}", _of_our_data(metric, params, ood)) for ood in ood_sets]
        found += [curve for curve in own if curve.by_pi] or _of_other_data(metric)
    return found


def _of_our_data(metric: str, params: Params, ood: str) -> dict[float, float]:
    """Where the same set hides in the wild and is tested on."""
    network = params.data.id, params.model.backbone

    def is_wanted(one: Figure) -> bool:
        return (one.setting.id, one.setting.backbone) == network and one.wild == one.test == ood

    return _by_pi(metric, is_wanted)


def _of_other_data(metric: str) -> list[PaperCurve]:
    (ood,) = {one.test for one in figures() if one.setting.table == THEORY}
    of_errors = _by_pi(metric, lambda one: one.setting.table == THEORY)
    of_all = _by_pi(metric, lambda one: one.setting.table in (MAIN, MIXING_RATIO) and one.test != AVERAGE)
    curves = [
        PaperCurve(metric, None, f"paper, other data: {REFERENCE}, {ood}", of_errors),
        PaperCurve(metric, None, f"paper, other data: {REFERENCE}, mean of five OOD sets", of_all),
    ]
    return [curve for curve in curves if curve.by_pi]


def _by_pi(metric: str, is_wanted: Callable[[Figure], bool]) -> dict[float, float]:
    """SAL's figures as shares: one for each π, the mean where there are several."""
    values: dict[float, list[float]] = {}
    for one in figures():
        if one.method == "SAL" and one.metric == metric and one.setting.pi and is_wanted(one):
            values.setdefault(one.setting.pi, []).append(one.value / AS_SHARE[metric])
    return {pi: mean(own) for pi, own in sorted(values.items())}
