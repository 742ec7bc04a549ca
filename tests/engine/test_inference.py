"""Passes over samples, and the precision in which they run."""

from functools import partial

import pytest
import torch
from helpers.compute import Numerics, Watched, compute_with, rows_of, some_images

from salcli.engine.batches import Rows
from salcli.engine.device import Compute, computing
from salcli.engine.inference import in_batches
from salcli.errors import DeviceError
from salcli.models.network import Classifier, NetworkSpec
from salcli.progress import Silent


@pytest.fixture
def network() -> Classifier:
    torch.manual_seed(0)
    return Classifier(NetworkSpec("small-cnn", 4, (0.5,) * 3, (0.25,) * 3)).eval()


def logits_of(network: Classifier, rows: Rows, compute: Compute) -> torch.Tensor:
    passes = in_batches(network, network.features_and_logits, rows, 8, compute, Silent())
    return torch.cat([logits for _, logits in passes])


class FullAbove:
    """A device whose memory holds `n_fit` images at most."""

    def __init__(self, network: Classifier, n_fit: int) -> None:
        self.network, self.n_fit, self.sizes = network, n_fit, []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.n_fit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(len(images))
        return self.network(images)


def test_batches_are_halved_until_they_fit_and_the_user_is_told(network: Classifier) -> None:
    images, watched = some_images(50), Watched()
    small = FullAbove(network, 6)
    parts = list(in_batches(network, small, rows_of(images), 16, compute_with(), watched))
    assert max(small.sizes) == 4
    assert watched.notes == [f"out of memory on cpu: continuing with batches of {n}" for n in (8, 4)]
    assert sum(small.sizes) == watched.seen == 50
    with torch.inference_mode():
        torch.testing.assert_close(torch.cat([part for (part,) in parts]), network(torch.from_numpy(images)))
    with pytest.raises(DeviceError, match="not even one sample fits in the memory of cpu"):
        list(in_batches(network, FullAbove(network, 0), rows_of(images), 2, compute_with(), Silent()))


def test_a_compiled_network_gives_the_same_logits(network: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as always, but not turned into C++: that is torch's own work, and takes its compiler a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    rows, names = rows_of(some_images(8)), list(network.state_dict())
    plain, fast = (logits_of(network, rows, compute_with(compile=wanted)) for wanted in (False, True))
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert list(network.state_dict()) == names, "checkpoints must not change"


def test_deterministic_algorithms_are_on_inside_only() -> None:
    with computing("cpu", Numerics(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
