"""Full fits of linear heads, against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from salcli.engine import linear
from salcli.engine.batches import Rows, joined
from salcli.engine.linear import PENALTIES, Examples, FullFit
from salcli.errors import TrainingError
from salcli.progress import Silent

CPU = torch.device("cpu")


def vectors(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def fitted(examples: Examples, n_outputs: int, penalty: float | str) -> tuple[nn.Linear, float]:
    head = nn.Linear(examples.rows.sample_shape[0], n_outputs)
    _, used = FullFit(head, lambda x: x, examples, penalty, 0, CPU).run(Silent())
    return head, used


@pytest.mark.parametrize("penalty", [1.0, 0.01])
def test_a_class_head_is_scikit_learns(penalty: float) -> None:
    x = vectors(300, 12)
    y = x[:, :4].argmax(axis=1)
    head, _ = fitted(Examples.of_classes(Rows((x,), np.arange(300)), torch.from_numpy(y)), 4, penalty)
    reference = LogisticRegression(C=1 / (300 * penalty), tol=1e-8, max_iter=2000).fit(x, y)
    logits = head(torch.from_numpy(x)).softmax(1).detach().numpy()
    np.testing.assert_allclose(logits, reference.predict_proba(x), atol=2e-3)


def test_the_two_sides_of_an_ood_head_count_the_same() -> None:
    x = np.concatenate([vectors(400, 6), vectors(40, 6, seed=1) + 1])
    is_id = np.arange(440) < 400
    head, _ = fitted(Examples.of_two_sides(Rows((x,), np.arange(440)), is_id), 1, 0.1)
    weights = np.where(is_id, 440 / 800, 440 / 80)
    reference = LogisticRegression(C=1 / (440 * 0.1), tol=1e-8).fit(x, is_id, sample_weight=weights)
    np.testing.assert_allclose(head.weight.detach().numpy(), reference.coef_, atol=1e-3)


def test_noise_gets_a_larger_penalty_than_signal() -> None:
    x = vectors(100, 8)
    index, noise = np.arange(100), torch.from_numpy(np.random.default_rng(3).integers(2, size=100))
    signal = torch.from_numpy((x[:, 0] > 0).astype(np.int64))
    used = [fitted(Examples.of_classes(Rows((x,), index), labels), 2, "auto")[1] for labels in (noise, signal)]
    assert used[0] > used[1]
    assert set(used) <= set(PENALTIES)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = vectors(100, 5)
    examples = Examples.of_classes(Rows((x,), np.arange(100)), torch.from_numpy(x[:, :3].argmax(axis=1)))
    whole, _ = fitted(examples, 3, 0.1)
    monkeypatch.setattr(linear, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(linear, "RESIDENT_BYTES", 0)
    in_chunks, _ = fitted(examples, 3, 0.1)
    torch.testing.assert_close(in_chunks.weight, whole.weight, atol=1e-4, rtol=1e-3)


def test_an_infinite_loss_is_an_error() -> None:
    x = np.full((10, 2), np.nan, np.float32)
    with pytest.raises(TrainingError, match="NaN or infinite"):
        fitted(Examples.of_classes(Rows((x,), np.arange(10)), torch.arange(10) % 2), 2, 0.1)


def test_joined_rows_are_the_concatenation() -> None:
    a, b, c = vectors(5, 2), vectors(4, 2, 1), vectors(3, 2, 2)
    parts = [Rows((a, b), np.array([6, 0, 8])), Rows((c,), np.array([2, 1]))]
    both = torch.cat([part.read(slice(None)) for part in parts])
    assert torch.equal(joined(parts).read(slice(None)), both)
