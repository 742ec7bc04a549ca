"""How images reach the network, and how it runs: against slow, obvious ways to do the same."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import SEED
from hypothesis import given
from hypothesis import strategies as st
from test_resume import Watched, params_with

from salcli.artifacts import layout
from salcli.artifacts.images import read_image_set
from salcli.compute import image_rows
from salcli.compute.augmentation import SHIFT, Augmentation, mirror_and_shift
from salcli.compute.image_rows import DeviceImages, ImageRows
from salcli.compute.numerics import Compute, computing
from salcli.compute.processes import Processes
from salcli.errors import DeviceError, ParamsError
from salcli.inference import accuracy, in_batches
from salcli.models.network import Classifier, NetworkSpec
from salcli.params import NumericsParams
from salcli.progress import Silent
from salcli.stages import extract_grads, network_spec, train_id

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Workspace

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def compute_with(precision: str = "float32", device: torch.device = CPU, **options: bool) -> Compute:
    numerics = {"precision": precision, "deterministic": False, "compile": False} | options
    return Compute(device, NumericsParams.model_validate(numerics), Processes())


def some_images(n: int, shape: tuple[int, ...] = (3, 6, 6), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


@pytest.fixture
def network() -> Classifier:
    torch.manual_seed(0)
    return Classifier(NetworkSpec("small-cnn", 4, (0.5,) * 3, (0.25,) * 3)).eval()


# rows of several sets


@given(st.lists(st.integers(0, 8), max_size=30))
def test_rows_count_through_one_set_and_then_through_the_next(source: list[int]) -> None:
    first, second = some_images(5), some_images(4, seed=1)
    rows = ImageRows((first, second), np.array(source, dtype=np.int64))
    expected = np.concatenate([first, second])[source] if source else np.empty((0, 3, 6, 6), np.uint8)
    np.testing.assert_array_equal(rows.read(slice(None)).numpy(), expected)
    assert len(rows) == len(source)
    assert rows.n_bytes == expected.nbytes


def test_other_processes_get_the_place_of_a_mapped_file_not_its_content(tmp_path: Path) -> None:
    images = some_images(500)
    path = tmp_path / "images.bin"
    path.write_bytes(b"head" + images.tobytes())
    mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=4, shape=images.shape)
    rows = ImageRows((mapped,), np.array([3, 1, 499]))
    sent = pickle.dumps(rows)
    assert len(sent) < 2_000 < images.nbytes
    np.testing.assert_array_equal(pickle.loads(sent).read(slice(None)), images[[3, 1, 499]])


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("way", ["resident", "read here", "read by workers"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_every_way_to_the_device_gives_the_same_batches(
    way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "read by workers":
        monkeypatch.setattr(image_rows, "RESIDENT_BYTES", 0)
        monkeypatch.setattr(image_rows, "N_WORKERS", 2)
    images = some_images(40)
    rows = ImageRows((images[:25], images[25:]), np.arange(40)[::-1].copy())
    order = [torch.tensor([5, 39]), torch.tensor([0, 0, 7]), torch.tensor([12])]
    state = torch.get_rng_state()
    batches = list(DeviceImages(rows, device, resident=way == "resident").batches(order))
    assert torch.equal(torch.get_rng_state(), state), "loading must not disturb the stream that dropout draws from"
    for positions, batch in zip(order, batches, strict=True):
        assert batch.device.type == device.type
        np.testing.assert_array_equal(batch.cpu(), images[::-1][positions.numpy()])


def test_training_is_the_same_whether_images_are_resident_or_read_by_workers(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_with(workspace, train_id__epochs=1, train_id__augment="flip-crop")
    train_id.run(workspace, params, SEED)
    resident = (workspace.root / layout.classifier(SEED).name).read_bytes()
    monkeypatch.setattr(image_rows, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(image_rows, "N_WORKERS", 1)
    train_id.run(workspace, params, SEED)
    assert (workspace.root / layout.classifier(SEED).name).read_bytes() == resident


def test_prepared_images_are_mapped_not_read(workspace: Workspace) -> None:
    images = read_image_set(workspace.find(layout.prepared_set("digits-0-7"))).images
    assert isinstance(images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        images[0] = 0


# augmentation


def slowly_mirrored_and_shifted(image: np.ndarray, mirrored: bool, down: int, right: int) -> np.ndarray:
    _, height, width = image.shape
    image = image[:, :, ::-1] if mirrored else image
    result = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            from_y, from_x = y + down - SHIFT, x + right - SHIFT
            if 0 <= from_y < height and 0 <= from_x < width:
                result[:, y, x] = image[:, from_y, from_x]
    return result


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_batch_is_mirrored_and_shifted_as_each_image_would_be(device: torch.device) -> None:
    images = some_images(60, (3, 7, 9))
    rng = np.random.default_rng(1)
    mirrored, shift = rng.random(60) < 0.5, rng.integers(0, 2 * SHIFT + 1, (60, 2))
    batch = mirror_and_shift(
        torch.from_numpy(images).to(device), torch.from_numpy(mirrored).to(device), torch.from_numpy(shift).to(device)
    )
    for image, flip, (down, right), changed in zip(images, mirrored, shift, batch.cpu().numpy(), strict=True):
        np.testing.assert_array_equal(changed, slowly_mirrored_and_shifted(image, bool(flip), down, right))


def test_augmentation_draws_every_shift_and_both_sides_evenly() -> None:
    dot = torch.zeros(20_000, 1, 11, 11, dtype=torch.uint8)
    dot[:, :, 5, 4] = 255  # one pixel, left of the middle, that no shift can push out
    place = Augmentation("flip-crop", torch.Generator().manual_seed(0))(dot).flatten(1).argmax(1)
    rows, columns = place // 11, place % 11
    shares = torch.bincount(rows, minlength=11) / 20_000
    assert (shares[1:10] - 1 / 9).abs().max() < 0.01  # 4.5 standard deviations
    assert shares[0] == shares[10] == 0
    # columns 0 to 8 as it was, 2 to 10 mirrored
    expected = torch.tensor([1, 1, 2, 2, 2, 2, 2, 2, 2, 1, 1]) / 18
    assert (torch.bincount(columns, minlength=11) / 20_000 - expected).abs().max() < 0.01


def test_no_augmentation_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    state, images = generator.get_state(), torch.from_numpy(some_images(4))
    assert Augmentation("none", generator)(images) is images
    assert torch.equal(generator.get_state(), state)


def test_of_several_processes_each_changes_its_part_as_one_would() -> None:
    images = torch.from_numpy(some_images(10))
    whole = Augmentation("flip-crop", torch.Generator().manual_seed(3))(images)
    parts = [
        Augmentation("flip-crop", torch.Generator().manual_seed(3))(images[part], 10, part)
        for part in (Processes(rank, 3).part(10) for rank in range(3))
    ]
    assert torch.equal(torch.cat(parts), whole)


# passes


class FullAbove:
    """A device whose memory holds so many images, no more."""

    def __init__(self, network: Classifier, n_fit: int) -> None:
        self.network, self.n_fit, self.sizes = network, n_fit, []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.n_fit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(len(images))
        return self.network(images)


def test_batches_are_halved_until_they_fit_and_that_is_said(network: Classifier) -> None:
    images, watched = some_images(50), Watched()
    small = FullAbove(network, 6)
    parts = list(in_batches(network, small, ImageRows((images,), np.arange(50)), 16, compute_with(), watched))
    assert max(small.sizes) == 4
    assert watched.notes == [
        "out of memory on cpu: goes on with batches of 8",
        "out of memory on cpu: goes on with batches of 4",
    ]
    assert sum(small.sizes) == watched.seen == 50
    with torch.inference_mode():
        torch.testing.assert_close(torch.cat([part for (part,) in parts]), network(torch.from_numpy(images)))


def test_where_not_even_one_image_fits_it_is_an_error(network: Classifier) -> None:
    with pytest.raises(DeviceError, match="not even one image fits"):
        list(
            in_batches(
                network, FullAbove(network, 0), ImageRows((some_images(3),), np.arange(3)), 2, compute_with(), Silent()
            )
        )


def test_accuracy_is_the_share_of_right_predictions(network: Classifier) -> None:
    images = some_images(37)
    with torch.inference_mode():
        predicted = network(torch.from_numpy(images)).argmax(1)
    labels = torch.where(torch.arange(37) < 10, predicted, (predicted + 1) % 4)
    found = accuracy(network, ImageRows((images,), np.arange(37)), labels, 8, compute_with(), Silent())
    assert found == 10 / 37


# numerics


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_is_near_and_comes_back_as_float32(network: Classifier, precision: str) -> None:
    rows = ImageRows((some_images(20),), np.arange(20))
    exact, rough = (
        torch.cat(
            [logits for _, logits in in_batches(network, network.features_and_logits, rows, 8, compute, Silent())]
        )
        for compute in (compute_with(), compute_with(precision))
    )
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_network_learns_in_lower_precision_too(workspace: Workspace, precision: str) -> None:
    params = params_with(workspace, train_id__epochs=2, numerics__precision=precision)
    assert train_id.run(workspace, params, SEED).test_accuracy > 0.5
    assert all(row.n_samples for row in extract_grads.run_id(workspace, params, SEED))


def test_deterministic_kernels_are_asked_for_inside_only(workspace: Workspace) -> None:
    params = params_with(workspace, numerics__deterministic=True)
    with computing(params):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_training_on_the_cpu_gives_the_same_weights(workspace: Workspace) -> None:
    weights = []
    for deterministic in (False, True):
        params = params_with(workspace, train_id__epochs=1, numerics__deterministic=deterministic)
        train_id.run(workspace, params, SEED)
        from salcli.artifacts.checkpoint import read_network

        weights.append(read_network(workspace.find(layout.classifier(SEED)), Classifier).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_a_compiled_network_gives_the_same_logits(network: Classifier, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    rows = ImageRows((some_images(8),), np.arange(8))
    (plain,) = (
        logits for _, logits in in_batches(network, network.features_and_logits, rows, 8, compute_with(), Silent())
    )
    names = list(network.state_dict())
    (fast,) = (
        logits
        for _, logits in in_batches(network, network.features_and_logits, rows, 8, compute_with(compile=True), Silent())
    )
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert list(network.state_dict()) == names, "checkpoints must not change"


# normalisation and given weights


def test_given_mean_and_std_take_the_place_of_the_images_own(workspace: Workspace) -> None:
    from salcli.artifacts.checkpoint import read_header

    params = params_with(workspace, train_id__epochs=1, model__mean=[0.25], model__std=[0.5])
    train_id.run(workspace, params, SEED)
    spec = read_header(workspace.find(layout.classifier(SEED))).spec
    assert (spec["mean"], spec["std"]) == ([0.25], [0.5])


def test_automatic_mean_and_std_are_those_of_the_training_images(workspace: Workspace, monkeypatch: Any) -> None:
    from salcli.artifacts.checkpoint import read_header
    from salcli.artifacts.splits import read_id_split

    monkeypatch.setattr(network_spec, "IMAGES_FOR_STATISTICS", 100)  # several blocks
    train_id.run(workspace, params_with(workspace, train_id__epochs=1), SEED)
    spec = read_header(workspace.find(layout.classifier(SEED))).spec
    images = read_image_set(workspace.find(layout.prepared_set("digits-0-7"))).images
    pixels = images[read_id_split(workspace.find(layout.id_split(SEED))).train] / 255
    np.testing.assert_allclose(spec["mean"], [pixels.mean()], rtol=1e-12)
    np.testing.assert_allclose(spec["std"], [pixels.std(ddof=1)], rtol=1e-12)


def test_a_mean_for_another_number_of_channels_is_an_error(workspace: Workspace) -> None:
    with pytest.raises(ParamsError, match=r"model\.mean has 3 values, but the images have 1 channels"):
        train_id.run(workspace, params_with(workspace, model__mean=[0.1, 0.2, 0.3]), SEED)


def test_given_weights_replace_training(workspace: Workspace) -> None:
    trained = workspace.root / layout.classifier(SEED).name
    given = workspace.root / "given.safetensors"
    trained.rename(given)
    before = train_id_metrics(workspace)
    params = params_with(workspace, train_id__epochs=0, train_id__weights="given.safetensors")
    result = train_id.run(workspace, params, SEED)
    assert result.last_epoch is None
    assert (result.train_accuracy, result.test_accuracy) == before
    assert (workspace.root / layout.train_id_curve(SEED).name).read_text() == "epoch,loss,accuracy\n"


def train_id_metrics(workspace: Workspace) -> tuple[float, float]:
    import json

    content = json.loads((workspace.root / layout.train_id_metrics(SEED).name).read_text())
    return content["train_accuracy"], content["test_accuracy"]


def test_given_weights_are_where_training_starts(workspace: Workspace) -> None:
    trained = workspace.root / layout.classifier(SEED).name
    trained.rename(workspace.root / "given.safetensors")
    losses = [
        train_id.run(workspace, params_with(workspace, train_id__epochs=1, train_id__weights=weights), SEED)
        for weights in (None, "given.safetensors")
    ]
    assert losses[1].last_epoch.loss < losses[0].last_epoch.loss / 5
