"""How samples reach the network, and passes over them: against slow, obvious ways to do the same."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.compute import CPU, DEVICES, Numerics, Watched, compute_with, rows_of, some_images
from hypothesis import given
from hypothesis import strategies as st

from salcli.engine import batches as batches_module
from salcli.engine.augmentation import Augmentation
from salcli.engine.batches import Batches, DeviceRows, EndlessRows, LabeledRows, Rows, check_views_exist
from salcli.engine.device import Compute, Processes, computing
from salcli.engine.inference import in_batches
from salcli.errors import SalError
from salcli.models.network import Classifier, NetworkSpec
from salcli.progress import Silent


@given(st.lists(st.integers(0, 8), max_size=30), st.sampled_from([(3, 6, 6), (5,)]))
def test_rows_count_through_one_array_and_then_through_the_next(index: list[int], shape: tuple[int, ...]) -> None:
    first, second = some_images(5, shape), some_images(4, shape, seed=1)
    rows = Rows((first, second), np.array(index, dtype=np.int64))
    expected = np.concatenate([first, second])[np.array(index, dtype=np.int64)]
    np.testing.assert_array_equal(rows.read(slice(None)).numpy(), expected)
    assert len(rows) == len(index)
    assert rows.sample_shape == shape
    assert rows.n_bytes == expected.nbytes


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("way", ["resident", "read here", "read by workers"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_every_way_to_the_device_gives_the_same_batches(
    way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "read by workers":
        monkeypatch.setattr(batches_module, "RESIDENT_BYTES", 0)
        monkeypatch.setattr(batches_module, "N_WORKERS", 2)
    images = some_images(40)
    rows = Rows((images[:25], images[25:]), np.arange(40)[::-1].copy())
    order = [torch.tensor([5, 39]), torch.tensor([0, 0, 7]), torch.tensor([12])]
    state = torch.get_rng_state()
    batches = list(DeviceRows(rows, device, resident=way == "resident").batches(order))
    assert torch.equal(torch.get_rng_state(), state), "loading must not disturb the stream that dropout draws from"
    for positions, batch in zip(order, batches, strict=True):
        assert batch.device.type == device.type
        np.testing.assert_array_equal(batch.cpu(), images[::-1][positions.numpy()])


def endless(n: int, seed: int) -> EndlessRows:
    """Images of one pixel whose value is their number."""
    images = np.arange(n, dtype=np.uint8).reshape(-1, 1, 1, 1)
    return EndlessRows(rows_of(images), compute_with(), torch.Generator().manual_seed(seed))


@given(n=st.integers(1, 12), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_endless_rows_draw_every_sample_once_before_any_comes_again(n: int, sizes: list[int]) -> None:
    """Whatever the batch sizes, smaller or larger than the set, the stream is one permutation after another."""
    drawn = list(endless(n, seed=0).batches(sizes))
    assert [len(batch) for batch in drawn] == sizes
    stream = torch.cat(drawn).flatten()
    for start in range(0, len(stream), n):
        one_round = stream[start : start + n].tolist()
        assert len(set(one_round)) == len(one_round)
        assert set(one_round) <= set(range(n))
    first, again, other = (next(endless(50, seed).batches([100])).flatten().tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert first[:50] != first[50:]


def test_the_parts_of_three_processes_are_the_batch_of_one() -> None:
    """Samples, labels and those of another source, augmented."""
    images, others = some_images(30), some_images(8, seed=1)
    training = LabeledRows(rows_of(images), torch.arange(30), 30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).split(10)

    def batches_of(processes: Processes) -> list[tuple[torch.Tensor, ...]]:
        compute = Compute(CPU, Numerics(), processes)
        drawn = EndlessRows(rows_of(others), compute, torch.Generator().manual_seed(1))
        augment = Augmentation("flip-crop", torch.Generator().manual_seed(2))
        return list(Batches(training, compute, augment, {"others": drawn})(order))

    alone = batches_of(Processes())
    together = zip(*(batches_of(Processes(rank, 3)) for rank in range(3)), strict=True)
    for expected, parts in zip(alone, together, strict=True):
        for column, whole in zip(zip(*parts, strict=True), expected, strict=True):
            assert torch.equal(torch.cat(column), whole)
    assert torch.equal(torch.cat([labels for _, labels, _ in alone]).sort().values, torch.arange(30))


def test_vectors_have_no_views() -> None:
    with pytest.raises(SalError, match=r"csi .* shape 512; remove it from encoders"):
        check_views_exist("csi", "encoders", LabeledRows(rows_of(some_images(4, (512,))), torch.zeros(4), 1))


@pytest.fixture
def network() -> Classifier:
    torch.manual_seed(0)
    return Classifier(NetworkSpec("small-cnn", 4, (0.5,) * 3, (0.25,) * 3)).eval()


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
    with pytest.raises(SalError, match="not even one sample"):
        list(in_batches(network, FullAbove(network, 0), rows_of(images), 2, compute_with(), Silent()))


def test_a_compiled_network_gives_the_same_logits(network: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as always, but not turned into C++: that is torch's own work, and takes its compiler a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    rows, names = rows_of(some_images(8)), list(network.state_dict())
    ((plain,),), ((fast,),) = (
        [*in_batches(network, network, rows, 8, compute_with(compile=wanted), Silent())] for wanted in (False, True)
    )
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert list(network.state_dict()) == names, "checkpoints must not change"


def test_deterministic_algorithms_are_on_inside_only() -> None:
    with computing("cpu", Numerics(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
