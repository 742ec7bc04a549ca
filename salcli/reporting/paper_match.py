"""Which of the paper's tables a params.yaml can be compared with, and what the paper calls our methods."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from salcli.errors import PaperError
from salcli.paper.figures import OF_ALL_SETS, settings
from salcli.presets import presets
from salcli.reporting.results import AVERAGE
from salcli.reporting.results_table import LABELS

if TYPE_CHECKING:
    from salcli.paper import Figure, Setting
    from salcli.params import Params

METRICS = {"fpr95": "fpr95", "auroc": "auroc", "id_acc": "id_accuracy"}  # the paper's names → ours
NO_SINGLE_SET = {OF_ALL_SETS, AVERAGE}


def matching_settings(params: Params) -> list[Setting]:
    """The tables to compare with, the nearest first. One that adds nothing to those before it is left out."""
    fitting = [setting for setting in settings() if _fits(setting, params)]
    if not fitting:
        raise PaperError(_nothing_found(params))
    asked, sal = _experiments(params), set(sal_names(params))

    def distance(setting: Setting) -> tuple[bool, bool]:
        own = _comparable(setting)
        return not any(figure.method in sal for figure in own), {(one.wild, one.test) for one in own} != asked

    chosen: list[Setting] = []
    covered: set[tuple[str, str, str, str]] = set()
    for setting in sorted(fitting, key=distance):  # stable: else in the paper's order
        own = {
            (name, figure.wild, figure.test, figure.metric)
            for figure in _comparable(setting)
            if (name := our_method(figure.method, params)) and (figure.wild, figure.test) in asked
        }
        if own - covered:
            chosen.append(setting)
            covered |= own
    if not chosen:
        raise PaperError(_nothing_found(params))
    return chosen


def our_method(paper_method: str, params: Params) -> str | None:
    """Our name of a method of the paper, None where it is not among the evaluated ones."""
    for method in params.evaluate.methods:
        if paper_method in paper_names(method, params):
            return method
    return None


def sal_names(params: Params) -> list[str]:
    """What the paper calls SAL with these params; a mixture of its variants has a name that it does not know."""
    variants = {
        f"{params.filter.score} filter": params.filter.score != "sal",
        "candidate-id": params.train_ood.candidate_id,
    }
    differences = [*(name for name, differs in variants.items() if differs), *_variants_of_tau(params)]
    return [f"SAL ({', '.join(differences)})"] if differences else ["SAL", "SAL (c=1)"]


def paper_names(method: str, params: Params) -> list[str]:
    """What the paper calls one of our methods with these params."""
    if method == "sal":
        return sal_names(params)
    if method == "sal-posthoc":  # τ itself: what is done with it afterwards makes no difference
        return [f"SAL ({', '.join(['post-hoc', *_variants_of_tau(params)])})"]
    return [LABELS.get(method, method)]


def _variants_of_tau(params: Params) -> list[str]:
    chosen = params.filter
    variants = {
        "class-agnostic": chosen.svd == "class-agnostic",
        "random-labels": chosen.labels == "random",
        "global reference": chosen.reference == "global",
        f"c={chosen.n_vectors}": chosen.n_vectors > 1,
    }
    return [name for name, differs in variants.items() if differs]


def _fits(setting: Setting, params: Params) -> bool:
    pi = params.data.pi
    same_pi = setting.pi is None or (pi != "unknown" and math.isclose(setting.pi, pi))
    return (setting.id, setting.backbone) == (params.data.id, params.model.backbone) and same_pi


def _comparable(setting: Setting) -> list[Figure]:
    """Figures of single OOD sets in metrics that we have, too."""
    return [one for one in settings()[setting] if one.metric in METRICS and one.test not in NO_SINGLE_SET]


def _experiments(params: Params) -> set[tuple[str, str]]:
    """Pairs of a wild and a tested OOD set."""
    data = params.data
    return {(wild, test) for wild in data.ood for test in (wild, *data.test_ood)}


def _nothing_found(params: Params) -> str:
    data = params.data
    rivals = ", ".join(paper_names(method, params)[0] for method in params.evaluate.methods if method != "sal")
    lines = [
        "the paper reports no FPR95 or AUROC for these params",
        f"looked for: {data.id}, {params.model.backbone}, π {data.pi}, OOD {', '.join(data.ood)}; "
        f"{', '.join(filter(None, [sal_names(params)[0], rivals]))}",
    ]
    only_errors = [setting.table for setting in settings() if _fits(setting, params) and not _comparable(setting)]
    if only_errors:
        lines.append(f"of {', '.join(only_errors)} it reports the filter's errors alone; yours: dvc metrics show")
    near = [name for name, preset in presets().items() if preset.paper and preset.params["data"]["id"] == data.id]
    lines.append(f"presets that fit {data.id}: {', '.join(near)}" if near else "presets that fit: salcli presets")
    return "\n  ".join(lines)
