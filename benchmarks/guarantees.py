"""What is promised, and what many deals show: ERR_in, "found", certificates, false discoveries, π̂, drift, p.

    python -m benchmarks.guarantees FOLDER [--deals 500] [--sal-plus 40]

FOLDER is that of `python -m benchmarks.wild`, which makes its features: the embedded digits, CIFAR-10 on a ResNet-20
and banking77 as sentence vectors. The network or linear head of a set is fixed. In each deal its held-out ID samples
are dealt again into calibration, wild and new samples, and with π > 0 outliers join the wild ones. SAL+ learns from
calibration and wild data; its numbers are of fewer deals, and of models of left-out folds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.wild.deals import CASES, Part
from salcli.conformal import evidence
from salcli.methods import MEMBERS
from salcli.methods.base import Head, Known
from salcli.methods.mixture import NormalQuantiles, Samples, fit_mixture, held_out
from salcli.methods.sal import Tau
from salcli.sal.gradients import Representation

SETS = {  # case, its seed, calibration and wild ID samples
    "digits": ("digits/8-9", 10, 115, 577),
    "ResNet-20": ("resnet/mnist", 10, 300, 2000),
    "banking77": ("text/12", 10, 1000, 2000),
}
PIS = (0.02, 0.1, 0.3)
SHIFT = 0.2  # of all wild scores, in standard deviations: what drift should notice
EXACT, LEARNED = ("KNN", "committee", "τ of the pool", "τ of wild"), "SAL+, left-out folds"
TAU = {"svd": "class-conditional", "reference": "class-conditional", "n_vectors": 1, "gradient": "full"}


@dataclass(frozen=True)
class Pile:
    """All held-out ID samples of a set, and its outliers."""

    train: Part
    ids: Part
    oods: Part
    frozen: bool


def pile(folder: Path, case: str, seed: int) -> Pile:
    deal = CASES[case](folder, seed)(0.0)
    ids = deal.calibration.with_others(deal.wild).with_others(deal.id_test)
    return Pile(deal.train, ids, deal.ood_test, deal.frozen)


def joined(one: Part, other: Part | None) -> Part:
    return one if other is None else one.with_others(other)


def scored(own: Pile, sides: list[Part], *, learned: bool) -> Iterator[tuple[str, list[NDArray[np.float64]]]]:
    """Scores of calibration, wild and new samples by each method."""
    yield "KNN", [side.scores["knn"].numpy() for side in sides]
    columns = [side.columns(MEMBERS) for side in sides]
    quantiles = NormalQuantiles.fit(torch.cat(columns[:2]))
    yield "committee", [quantiles.committee(one).numpy() for one in columns]
    representations = [Representation(one.feature, one.logits, one.logits.argmax(1)) for one in sides]
    train = Representation(own.train.feature, own.train.logits, own.train.label)
    head = Head(torch.zeros(own.train.logits.shape[1], own.train.feature.shape[1]).double(), torch.zeros(0).double())
    for name, directions in (("τ of the pool", "pool"), ("τ of wild", "wild")):
        params = SimpleNamespace(
            **TAU, directions=directions, labels="predicted", temperature=1.0, calibration="holdout", score="sal"
        )
        tau = Tau(params)
        tau.fit(Known(head, train, wild=representations[1], calibration=representations[0]))
        yield name, [one.numpy() for one in tau.scores_of(*representations)]
    if learned:
        calibration, wild, *new = [Samples(x.feature, x.logits, one) for x, one in zip(sides, columns, strict=True)]
        model = fit_mixture(own.train.feature, calibration, wild, is_frozen=own.frozen)
        left_out = held_out(own.train.feature, calibration, wild, is_frozen=own.frozen)
        yield LEARNED, [one.numpy() for one in (*left_out, *map(model.h, new))]


def without_outliers(
    own: Pile, sizes: tuple[int, int], deal: int, *, learned: bool
) -> Iterator[tuple[str, str, float]]:
    """(method, what, value) of one deal."""
    n, m = sizes
    order = np.random.default_rng([deal, 1]).permutation(len(own.ids.logits))
    sides = [own.ids.take(part) for part in np.split(order, [n, n + m])]
    for name, (c, w, *new) in scored(own, sides, learned=learned):
        T, rank = evidence.threshold(c, 0.05), evidence.threshold_rank(n, 0.05)
        above, limits = int((w > T).sum()), evidence.envelope(n, m)
        yield name, "ERR_in 5", 100 * above / m
        yield name, "found 2.5", 100.0 * (limits.p_value(evidence.counts_above(c, w, limits.ranks)) <= evidence.FOUND)
        yield name, "found above T 2.5", 100.0 * (evidence.excess_p_value(n, m, rank, above) <= evidence.FOUND)
        yield name, "certificate wrong 5, π 0", 100.0 * (evidence.certificate(c, w).max() > 0)
        yield name, "drift 1", 100.0 * (evidence.drift_p_value(c, w) <= evidence.DRIFT)
        yield (
            name,
            f"drift seen, shift {SHIFT:g} sd",
            100.0 * (evidence.drift_p_value(c, w + SHIFT * c.std()) <= evidence.DRIFT),
        )
        p = evidence.p_values(c, w)
        for fdr in (0.1, 0.2):
            yield name, f"false discoveries {100 * fdr:g}, π 0", 100.0 * (evidence.false_discovery_cutoff(p, fdr) > 0)
        for part in new:
            for level in (0.05, 0.01):
                yield name, f"new p ≤ {100 * level:g}", 100 * float((evidence.p_values(c, part) <= level).mean())


def with_other_shares(
    own: Pile, sizes: tuple[int, int], deal: int, *, learned: bool
) -> Iterator[tuple[str, str, float]]:
    """Label shift: wild ID samples of predicted classes in shares drawn from Dirichlet(1), no outliers."""
    n, m = sizes
    rng = np.random.default_rng([deal, 3])
    classes = own.ids.logits.argmax(1).numpy()
    order = rng.permutation(len(classes))
    shares, left = rng.dirichlet(np.ones(own.ids.logits.shape[1])), order[n:]
    chance = shares[classes[left]] / np.bincount(classes, minlength=len(shares))[classes[left]]
    n_wild = min(m, len(left) // 3)
    wild = rng.choice(left, n_wild, replace=False, p=chance / chance.sum())
    for name, (c, w) in scored(own, [own.ids.take(order[:n]), own.ids.take(wild)], learned=learned):
        yield name, "ERR_in 5, label shift", 100 * float((w > evidence.threshold(c, 0.05)).mean())


def with_outliers(
    own: Pile, sizes: tuple[int, int], pi: float, deal: int, *, learned: bool
) -> Iterator[tuple[str, str, float]]:
    n, m = sizes
    rng = np.random.default_rng([deal, 2])
    n_ood = min(round(m * pi), len(own.oods.logits))
    order, chosen = rng.permutation(len(own.ids.logits)), rng.permutation(len(own.oods.logits))[:n_ood]
    n_id = round(n_ood * (1 - pi) / pi)
    wild = own.ids.take(order[n : n + n_id]).with_others(own.oods.take(chosen))
    is_ood = np.arange(n_id + n_ood) >= n_id
    for name, (c, w) in scored(own, [own.ids.take(order[:n]), wild], learned=learned):
        ranked = np.argsort(-w, kind="stable")
        certified, T = evidence.certificate(c, w), evidence.threshold(c, 0.05)
        yield name, f"certificate wrong 5, π {pi:g}", 100.0 * (certified > np.cumsum(is_ood[ranked])).any()
        yield name, f"certified of outliers, π {pi:g}", 100 * certified[-1] / n_ood
        limits = evidence.envelope(n, len(w))
        yield (
            name,
            f"found, π {pi:g}",
            100.0 * (limits.p_value(evidence.counts_above(c, w, limits.ranks)) <= evidence.FOUND),
        )
        share = evidence.share_of_outliers(c, w)
        yield name, f"π̂ − π, π {pi:g}", 100 * (share.value - pi)
        yield name, f"π̂ covers 90, π {pi:g}", 100.0 * (share.low <= pi <= share.high)
        p = evidence.p_values(c, w)
        for fdr in (0.1, 0.2):
            flagged = p <= evidence.false_discovery_cutoff(p, fdr)
            yield (
                name,
                f"false discoveries {100 * fdr:g}, π {pi:g}",
                100 * float((~is_ood[flagged]).mean()) if flagged.any() else 0.0,
            )
        yield name, f"ERR_in 5, π {pi:g}", 100 * float((w[~is_ood] > T).mean())
        same = np.sort(w[~is_ood])[::-1][round(0.05 * n_id)]  # the same true ERR_in for all
        yield name, f"ERR_out at true ERR_in 5, π {pi:g}", 100 * float((w[is_ood] <= same).mean())


def run(folder: Path, name: str, n_deals: int, n_learned: int) -> dict[str, dict[str, list[float]]]:
    case, seed, *sizes = SETS[name]
    own, found = pile(folder, case, seed), defaultdict(lambda: defaultdict(list))
    n, m = sizes
    deals = partial(without_outliers, own, (n, m))
    for deal in range(n_deals):
        for method, what, value in deals(deal, learned=deal < n_learned):
            found[method][what].append(value)
    for deal in range(n_deals // 5):
        for method, what, value in with_other_shares(own, (n, m), deal, learned=deal < n_learned // 2):
            found[method][what].append(value)
    for pi in PIS:
        for deal in range(n_deals // 5):
            for method, what, value in with_outliers(own, (n, m), pi, deal, learned=deal < n_learned // 2):
                found[method][what].append(value)
        print(f"{name}, π {pi:g}", flush=True)
    return found


def table(results: dict[str, dict[str, dict[str, list[float]]]]) -> Iterator[str]:
    for name, methods in results.items():
        _, _, n, m = SETS[name]
        yield f"\n**{name}** ({n:,} calibration, {m:,} wild samples; mean, and its standard error)\n"
        yield "| in % | " + " | ".join(methods) + " |"
        yield "| --- |" + " ---: |" * len(methods)
        for what in next(iter(methods.values())):
            cells = [own.get(what, []) for own in methods.values()]
            shown = [f"{np.mean(one):.1f} ± {np.std(one) / len(one) ** 0.5:.1f}" if one else "–" for one in cells]
            yield f"| {what} | " + " | ".join(shown) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deals", type=int, default=500, help="without outliers; a fifth of it for each π")
    parser.add_argument("--sal-plus", type=int, default=40, help="deals of SAL+")
    parser.add_argument("--sets", nargs="*", default=[*SETS], choices=[*SETS])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: run(asked.folder, name, asked.deals, asked.sal_plus) for name in asked.sets}
    (asked.folder / "guarantees.json").write_text(json.dumps(results))
    text = "\n".join(table(results))
    (asked.folder / "guarantees.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
