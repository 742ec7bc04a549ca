"""What certifies SAL+'s list? Lower bounds (95%) of the outliers among {P > ½}, by exact scores beside SAL+.

    python -m benchmarks.wild.certificates FOLDER [--null 200] [--deals 6]

SAL+ has learned from C against W, so its own scores certify nothing. Exact: the committee with quantiles on C ∪ W; or
SAL+ fitted with a part C1 of the calibration samples against C2 ∪ W (AdaDetect's trick), which treats C2 and W alike.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import betabinom

from benchmarks.wild.__main__ import samples
from benchmarks.wild.deals import Deal, dealt, resnet_part
from benchmarks.wild.features import N_OOD
from salcli.methods.mixture import Samples, fit_mixture

N_DRAWS = 4000


@cache
def most_id(n: int, m: int, level: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Some ranks r, and K_r: with this probability, at most K_r of m ID samples exceed the r-th largest calibration
    score, for all these r at once."""
    r = np.unique(np.geomspace(1, max(1, n // 2), 40).astype(int))
    rng = np.random.default_rng(0)
    gaps = rng.dirichlet(np.ones(n + 1), N_DRAWS)
    above = np.stack([rng.multinomial(m, gap) for gap in gaps]).cumsum(1)[:, r - 1]  # draws, ranks
    mass = np.stack([betabinom.pmf(np.arange(m + 1), m, own, n + 1 - own) for own in r])
    tail = mass[:, ::-1].cumsum(1)[:, ::-1]  # ranks, k: P(at least k)
    least = tail[np.arange(len(r)), above].min(1)
    gamma = np.quantile(least, 1 - level, method="lower")
    return r, np.array([np.flatnonzero(own >= gamma)[-1] for own in tail])


def certified(calibration: NDArray, wild: NDArray, listed: NDArray[np.bool_], level: float) -> int:
    """At least this many of the listed wild samples are outliers. The list may depend on anything."""
    r, most = most_id(len(calibration), len(wild), level)
    thresholds = np.sort(calibration)[::-1][r - 1]
    found = (wild[listed][:, None] > thresholds).sum(0) - most
    return max(0, int(found.max()))


def bounds(deal: Deal, seed: int) -> dict[str, int]:
    calibration, wild = samples(deal.calibration), samples(deal.wild)
    model = fit_mixture(deal.train.feature, calibration, wild)
    listed = (model.h(wild) > 0).numpy()
    committee = [model.quantiles.committee(one.scores).numpy() for one in (calibration, wild)]
    found = {"list": int(listed.sum()), "outliers": int(deal.is_ood[listed].sum())}
    order = np.random.default_rng([seed, 5]).permutation(len(calibration.logits))
    splits = {}
    for name, share in (("half", 1 / 2), ("third", 1 / 3)):
        first, second = (calibration.take(rows) for rows in np.split(order, [round(share * len(order))]))
        rest = Samples(*(torch.cat(pair) for pair in zip(second, wild, strict=True)))
        own = fit_mixture(deal.train.feature, first, rest)
        splits[name] = own.h(second).numpy(), own.h(wild).numpy()
    found["committee"] = certified(*committee, listed, 0.95)
    for name, sides in splits.items():
        found[f"SAL+, C1 a {name}"] = certified(*sides, listed, 0.95)
    for name, sides in splits.items():
        both = (certified(*one, listed, 0.975) for one in (committee, sides))
        found[f"both, C1 a {name}"] = max(both)
    return found


def deal(folder: Path, ood: str, n: int, m: int, pi: float, seed: int) -> Deal:
    rng = np.random.default_rng([seed, 17])
    known, other = resnet_part(folder, "test"), resnet_part(folder, ood)
    rows, n_ood = rng.permutation(len(known.logits))[: n + m + 10], round(m * pi)
    parts = known.take(rows), other.take(rng.permutation(N_OOD)[:m])
    return dealt(resnet_part(folder, "train"), *parts, (n, m - n_ood, 10), m // 2, False, pi)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--null", type=int, default=200, help="deals without outliers")
    parser.add_argument("--deals", type=int, default=6, help="of each OOD set with outliers")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cells = [(n, 1000, 0.0, "jigsaw", 1000 + seed) for seed in range(asked.null // 2) for n in (135, 300)]
    for pi in (0.02, 0.05, 0.1):
        for n, m in ((135, 1000), (300, 1000), (2000, 3000)):
            cells += [(n, m, pi, ood, seed) for seed in range(asked.deals) for ood in ("jigsaw", "fashion-mnist")]
    path = asked.folder / "certificates.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {tuple(line["cell"]) for line in lines}
    with path.open("a") as file:
        for cell in sorted(cells, key=lambda cell: (cell[4] % 1000, -cell[2])):
            if cell in done:
                continue
            n, m, pi, ood, seed = cell
            lines.append({"cell": cell, **bounds(deal(asked.folder, ood, n, m, pi, seed), seed)})
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
    names = [name for name in lines[0] if name not in ("cell", "list", "outliers")]
    print("| π | n | OOD | deals | listed | outliers in it | " + " | ".join(names) + " |")
    print("| ---: | ---: | --- | ---: |" + " ---: |" * (len(names) + 2))
    for pi, n, ood in sorted({(line["cell"][2], line["cell"][0], line["cell"][3]) for line in lines}):
        own = [line for line in lines if tuple(line["cell"][i] for i in (2, 0, 3)) == (pi, n, ood)]
        means = " | ".join(f"{np.mean([line[key] for line in own]):.1f}" for key in ("list", "outliers"))
        said = [
            f"{np.mean([line[key] for line in own]):.1f} ({np.mean([line[key] > 0 for line in own]):.0%} found,"
            f" {sum(line[key] > line['outliers'] for line in own)} wrong)"
            for key in names
        ]
        print(f"| {pi:g} | {n} | {ood} | {len(own)} | {means} | " + " | ".join(said) + " |")


if __name__ == "__main__":
    main()
