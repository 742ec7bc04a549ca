"""False alarms and delays of the alarm of `salcli monitor`, on streams of normal scores."""

import argparse

import numpy as np

from salcli.conformal.stream import log_wealth, online_p_values

CHANGES = {
    "10% outliers": (0.1, 0.0),
    "50% outliers": (0.5, 0.0),
    "all scores higher by ½ σ": (0.0, 0.5),
    "all scores higher by 2 σ": (0.0, 2.0),
    "all scores lower by ½ σ": (0.0, -0.5),
}


def first_alarms(
    n_streams: int, n_reference: int, before: int, after: int, change: tuple[float, float], alpha: float
) -> np.ndarray:
    """The sample at which each stream raises an alarm; infinite if it does not."""
    rng, (pi, shift) = np.random.default_rng(11), change
    p = np.empty((n_streams, before + after))
    for own in p:
        scores = rng.normal(size=before + after)
        scores[before:] += shift
        is_outlier = np.append(np.zeros(before, bool), rng.random(after) < pi)
        scores[is_outlier] = rng.normal(4, 1, is_outlier.sum())
        own[:] = online_p_values(rng.normal(size=n_reference), scores, rng)
    crossed = log_wealth(p) >= -np.log10(alpha)
    return np.where(crossed.any(axis=1), crossed.argmax(axis=1) + 1.0, np.inf)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--streams", type=int, default=500)
parser.add_argument("--alpha", type=float, default=0.01)
parser.add_argument("--reference", type=int, default=500, help="calibration samples")
options = parser.parse_args()
fixed = options.streams, options.reference
none = first_alarms(*fixed, 2000, 0, (0.0, 0.0), options.alpha)
print(f"no change: {np.isfinite(none).mean():.1%} of {options.streams} streams of 2,000 samples have an alarm")
for name, change in CHANGES.items():
    for before in (0, 1000):
        delay = first_alarms(*fixed, before, 500, change, options.alpha) - before
        delay = delay[delay > 0]
        quantiles = np.quantile(delay, [0.5, 0.9], method="lower")
        print(f"{name}, after {before:,} samples: median delay {quantiles[0]:.0f}, 90% within {quantiles[1]:.0f}")
