"""Estimated against true FPR95 and AUROC on mixtures of known truth: python benchmarks/estimates.py docs/estimates.png

Normal scores of five methods, 40 deals of 600 calibration and 600 held-out wild samples at π 0.1, and as many at 0.3.
"""

import sys

import matplotlib as mpl
import numpy as np
from scipy.stats import norm, spearmanr

from salcli.sal.estimates import estimated

mpl.use("Agg")
import matplotlib.pyplot as plt

DISTANCES = np.array([0.3, 1.0, 1.5, 2.0, 3.0])
TRUE = {"fpr95": 1 - norm.cdf(norm.ppf(0.05) + DISTANCES), "auroc": norm.cdf(DISTANCES / np.sqrt(2))}
NAMES = {"fpr95": "FPR95", "auroc": "AUROC"}
N_DEALS, N = 40, 600


def deal(rng: np.random.Generator, pi: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    n_ood = rng.binomial(N, pi)
    known, wild = (np.sqrt(0.5) * (rng.standard_normal(N) + rng.standard_normal((len(DISTANCES), N))) for _ in range(2))
    wild[:, :n_ood] -= DISTANCES[:, None]
    return {str(i): (known[i], wild[i]) for i in range(len(DISTANCES))}


def main(path: str) -> None:
    rng = np.random.default_rng(0)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for pi, colour, shift in ((0.1, "C1", -0.008), (0.3, "C0", 0.008)):
        found = [estimated(deal(rng, pi), rng, "0") for _ in range(N_DEALS)]
        told = [one for one in found if one.methods]
        best = np.mean([one.chosen == str(len(DISTANCES) - 1) for one in found])
        ranks = [spearmanr([one.methods[str(i)]["auroc"].value for i in range(5)], DISTANCES)[0] for one in told]
        print(
            f"π {pi}: {len(told)} of {N_DEALS} told; best chosen {best:.0%}; rank correlation {np.nanmean(ranks):.2f}"
        )
        for axis, (metric, truth) in zip(axes, TRUE.items(), strict=True):
            own = np.array(
                [
                    [vars(one.methods[str(i)][metric])[key] for i in range(5) for key in ("value", "low", "high")]
                    for one in told
                ]
            )
            own = 100 * own.reshape(len(told), 5, 3)
            covered = np.mean((own[..., 1] <= 100 * truth) & (100 * truth <= own[..., 2]))
            error = own[..., 0] - 100 * truth
            print(f"  {metric}: error {error.mean():.1f} ± {error.std():.1f} points; 90% intervals cover {covered:.0%}")
            x = 100 * (truth + shift)
            axis.plot(np.tile(x, len(told)), own[..., 0].ravel(), ".", color=colour, alpha=0.25, markersize=4)
            middle = np.median(own, axis=0)
            bars = np.maximum([middle[:, 0] - middle[:, 1], middle[:, 2] - middle[:, 0]], 0)
            axis.errorbar(
                x, middle[:, 0], bars, fmt="o", color=colour, capsize=3, label=f"π = {pi}, median and interval"
            )
    for axis, name in zip(axes, NAMES.values(), strict=True):
        axis.plot([0, 100], [0, 100], color="0.6", linewidth=1, zorder=0)
        axis.set(xlabel=f"true {name}, %", ylabel="estimated without labels, %", title=name, ylim=(-3, 103))
        axis.set_xlim((0, 100) if name == "FPR95" else (50, 100))
    axes[0].legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
