"""A stream that is watched for ever: online p-values and the conformal test martingale."""

import math

import numpy as np
import pytest

from salcli.conformal.stream import JUMP, POWERS, SLOPES, log_wealth, online_p_values

ALPHA = 0.05


def stream(rng: np.random.Generator, n: int, pi: float = 0.0, shift: float = 0.0) -> np.ndarray:
    """Outlier scores, all moved by `shift`, a share π of them of outliers."""
    return np.where(rng.random(n) < pi, rng.normal(4, 1, n), rng.normal(shift, 1, n))


def test_p_values_and_capital_are_those_of_a_slow_loop() -> None:
    rng = np.random.default_rng(2)
    reference, scores = rng.integers(0, 9, 30), rng.integers(0, 9, 1500)
    chance, past, slow = 1 - np.random.default_rng(7).random(1500), [*reference], []
    for score, u in zip(scores, chance, strict=True):
        past.append(score)
        slow.append(((np.array(past) > score).sum() + u * (np.array(past) == score).sum()) / len(past))
    assert online_p_values(reference, scores, np.random.default_rng(7)) == pytest.approx(slow)

    p, stakes, capital = np.array(slow[:200]) ** 2, np.zeros(7), []
    reserve = [1 / (1 + math.log1p(t)) for t in range(201)]
    for t, x in enumerate(p):
        stakes = (1 - JUMP) * stakes + JUMP * stakes.mean() + (reserve[t] - reserve[t + 1]) / 7
        stakes = stakes * [*(k * x ** (k - 1) for k in POWERS), *(1 + e * (x - 0.5) for e in SLOPES)]
        capital.append(math.log10(stakes.sum() + reserve[t + 1]))
    assert log_wealth(p) == pytest.approx(capital)


def test_over_500_streams_without_a_change_there_are_few_alarms() -> None:
    rng, n_streams, n_reference, n = np.random.default_rng(3), 500, 60, 600
    online, fixed = np.empty((2, n_streams, n))
    for i in range(n_streams):
        reference, scores = rng.normal(size=n_reference), rng.normal(size=n)
        online[i] = online_p_values(reference, scores, rng)
        fixed[i] = (np.searchsorted(np.sort(reference), scores) + 1 - rng.random(n)) / (n_reference + 1)
    rates = [np.mean((log_wealth(p) >= -math.log10(ALPHA)).any(axis=1)) for p in (online, fixed)]
    assert rates[0] <= ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / n_streams)
    assert rates[1] > 4 * ALPHA  # p-values against a fixed sample share its accidents


@pytest.mark.parametrize("change", [{"pi": 0.3}, {"shift": -1.0}, {"shift": 1.0}])
def test_a_change_is_found_within_some_dozen_samples(change: dict[str, float]) -> None:
    rng, delays = np.random.default_rng(4), []
    for _ in range(30):
        scores = np.concatenate([stream(rng, 300), stream(rng, 200, **change)])
        crossed = log_wealth(online_p_values(rng.normal(size=300), scores, rng)) >= 2
        delays.append(int(crossed.argmax()) - 300 if crossed.any() else 200)
    assert np.median(delays) <= 80
