"""Every data set in its published format: small files of the same kind, read by the real code."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from fake_data import WRITERS, dump, lay_out, write_batch, write_idx
from preparing import Malicious, data_params, prepared, random_images, refused
from scipy.io import savemat
from test_cli import files, process, salcli, write_params

from salcli.artifacts.images import read_image_set
from salcli.artifacts.layout import Workspace, prepared_set
from salcli.data import points
from salcli.data.catalogue import DATA_SETS
from salcli.data.image_set import Source
from salcli.data.loading import load_source
from salcli.data.places import LIST, places365_names
from salcli.errors import DataError, ParamsError
from salcli.stages import prepare

OFFICIAL = {"cifar10", "cifar100", "cifar100-first50", "cifar100-last50", "svhn", "fashion-mnist", "mnist"}


# --- every format


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    lay_out(root, DATA_SETS, n_per_class=4)
    return root


@pytest.mark.parametrize("name", WRITERS)
def test_a_set_in_its_published_format_can_be_prepared(laid_out: Path, tmp_path: Path, name: str) -> None:
    params = data_params(laid_out, id_name="digits-0-7", ood=[name])
    image_set = prepared(tmp_path, params, name)
    assert image_set.images.shape[1:] == (3, 32, 32)
    assert image_set.images.dtype == np.uint8
    assert (image_set.is_test is not None) == (name in OFFICIAL)
    assert (image_set.labels is not None) == DATA_SETS[name].labeled
    n_classes = {"cifar100": 100, "cifar100-first50": 50, "cifar100-last50": 50}.get(name, 10)
    assert len(image_set) == (n_classes * 5 if name in OFFICIAL else 40)
    if image_set.labels is not None:
        assert len(image_set.class_names) == n_classes
        assert np.bincount(image_set.labels).tolist() == [5] * n_classes
    if image_set.is_test is not None:
        assert image_set.is_test.sum() == n_classes
    assert len(np.unique(image_set.images, axis=0)) == len(image_set)


def test_every_set_of_the_catalogue_is_laid_out_or_comes_with_salcli() -> None:
    assert set(DATA_SETS) - set(WRITERS) == {name for name, entry in DATA_SETS.items() if not entry.files}


def write_cifar10(folder: Path, images: np.ndarray, labels: list[int]) -> None:
    """Five batches of training images, then the test batch, in equal parts."""
    folder.mkdir(parents=True)
    for i, part in enumerate(np.array_split(np.arange(len(images)), 6)):
        name = "test_batch" if i == 5 else f"data_batch_{i + 1}"
        write_batch(folder / name, images[part], {"labels": [labels[j] for j in part]})
    dump(folder / "batches.meta", {"label_names": list("abcdefghij")})


def test_cifar_batches_give_their_pixels_labels_and_official_split(tmp_path: Path) -> None:
    images, labels = random_images(24), [i % 10 for i in range(24)]
    write_cifar10(tmp_path / "cifar-10-batches-py", images, labels)
    found = prepared(tmp_path, data_params(tmp_path), "cifar10")
    np.testing.assert_array_equal(found.images, images.transpose(0, 3, 1, 2))
    assert found.labels is not None
    assert found.is_test is not None
    assert found.labels.tolist() == labels
    assert found.is_test.tolist() == [False] * 20 + [True] * 4
    assert found.class_names == tuple("abcdefghij")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_cifar_batches_may_be_of_any_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py", random_images(12), [0, 1] * 6)
    images = random_images(3, seed=1)
    rows = images.transpose(0, 3, 1, 2).reshape(3, -1).copy()
    dump(tmp_path / "cifar-10-batches-py" / "data_batch_1", {"data": rows, "labels": [7, 8, 9]}, protocol)
    source = load_source("cifar10", tmp_path)
    np.testing.assert_array_equal(source.pictures[:3], images.transpose(0, 3, 1, 2))


def test_what_python_2_wrote_is_read(tmp_path: Path) -> None:
    """As in the published files: byte strings as keys, and numpy's old module name."""
    write_cifar10(tmp_path / "cifar-10-batches-py", random_images(12), [0, 1] * 6)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    pixels = bytes(range(256)) * 12
    path.write_bytes(
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff"
        b"\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + pixels + b"tbU\x06labelsq\x08]q\x09K\x05au."
    )
    source = load_source("cifar10", tmp_path)
    assert np.asarray(source.pictures[0]).tobytes() == pixels
    assert source.labels is not None
    assert source.labels[0] == 5


def test_code_in_a_cifar_batch_is_refused_and_not_run(tmp_path: Path) -> None:
    root, trace = tmp_path / "root", tmp_path / "trace"
    write_cifar10(root / "cifar-10-batches-py", random_images(12), [0, 1] * 6)
    path = root / "cifar-10-batches-py" / "data_batch_3"
    for content in (Malicious(trace), {"data": Malicious(trace)}, {"labels": [np.random.default_rng]}):
        dump(path, content)
        message = refused(tmp_path, data_params(root), "cifar10")
        assert message.startswith(f"{path} is damaged or not ours (it asks for ")
        assert "which is not data" in message
    assert not trace.exists()
    dump(path, Malicious(trace))
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the trap works


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 2], "it is no batch"),
        ({"labels": [1]}, "its data are not rows of 3,072 bytes"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "it has 2 images, but not as many labels"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "a label is not from 0 to 9"),
        ({"data": np.zeros((1, 3072), np.float32), "labels": [1]}, "it holds an array of f4"),
        ({"data": np.array([[None] * 3072]), "labels": [1]}, "it holds an array of O8"),
    ],
)
def test_a_wrong_cifar_batch_is_refused(tmp_path: Path, content: object, reason: str) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py", random_images(12), [0, 1] * 6)
    dump(tmp_path / "cifar-10-batches-py" / "test_batch", content)
    assert f"test_batch is damaged or not ours ({reason})" in refused(tmp_path, data_params(tmp_path), "cifar10")


def test_a_cut_off_or_missing_batch_is_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py", random_images(12), [0, 1] * 6)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:3000])
    assert "data_batch_2 is damaged" in refused(tmp_path, data_params(tmp_path), "cifar10")
    path.unlink()
    assert "data_batch_2 is damaged or not ours ([Errno 2]" in refused(tmp_path, data_params(tmp_path), "cifar10")


def test_the_halves_of_cifar100_have_its_classes_and_no_image_in_common(laid_out: Path) -> None:
    whole, first, last = (load_source(f"cifar100{part}", laid_out) for part in ("", "-first50", "-last50"))
    assert whole.labels is not None
    assert first.labels is not None
    assert isinstance(whole.pictures, np.ndarray)
    np.testing.assert_array_equal(first.pictures, whole.pictures[whole.labels < 50])
    np.testing.assert_array_equal(last.pictures, whole.pictures[whole.labels >= 50])
    np.testing.assert_array_equal(first.labels, whole.labels[whole.labels < 50])
    assert first.class_names == whole.class_names[:50]
    assert last.labels is None
    assert last.is_test is not None
    assert 0 < last.is_test.sum() < len(last)


def test_the_halves_of_cifar100_are_also_found_in_ones_own_cifar100(tmp_path: Path) -> None:
    images, labels = random_images(200), np.arange(200) % 100
    np.savez(tmp_path / "cifar100.npz", images=images, labels=labels)
    half = load_source("cifar100-last50", tmp_path)
    np.testing.assert_array_equal(half.pictures, images[labels >= 50].transpose(0, 3, 1, 2))
    np.savez(tmp_path / "cifar100.npz", images=images, labels=labels % 60)
    with pytest.raises(DataError, match="is classes 50 to 99 of cifar100, but what stands for that has 60 classes"):
        load_source("cifar100-last50", tmp_path)


def test_svhn_calls_zero_ten_and_puts_the_sample_last(tmp_path: Path) -> None:
    images, digits = random_images(5), np.array([10, 1, 9, 10, 5], np.uint8)
    for part, chosen in (("train", slice(0, 3)), ("test", slice(3, 5))):
        stored = {"X": images[chosen].transpose(1, 2, 3, 0), "y": digits[chosen, None]}
        savemat(tmp_path / f"{part}_32x32.mat", stored, do_compression=True)
    source = load_source("svhn", tmp_path)
    np.testing.assert_array_equal(source.pictures, images.transpose(0, 3, 1, 2))
    assert source.labels is not None
    assert source.is_test is not None
    assert source.labels.tolist() == [0, 1, 9, 0, 5]
    assert source.is_test.tolist() == [False, False, False, True, True]


def test_a_bad_svhn_file_is_named(tmp_path: Path) -> None:
    lay_out(tmp_path, ["svhn"], 2)
    path, params = tmp_path / "test_32x32.mat", data_params(tmp_path, ood=["svhn"])
    good = path.read_bytes()
    for content in (b"", b"no mat", good[:5000], good[:200]):
        path.write_bytes(content)
        message = refused(tmp_path, params, "svhn")
        assert message.startswith(f"{path} is damaged or not SVHN (")
        assert message.endswith("then: salcli data fetch svhn")
    for content in ({"y": [1]}, {"X": np.zeros((2, 2)), "y": [1]}, {"X": np.zeros((2, 2, 3, 1), np.uint8), "y": [11]}):
        savemat(path, content)
        assert "is damaged or not SVHN" in refused(tmp_path, params, "svhn")


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_packed_or_not(tmp_path: Path, packed: bool) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = random_images(6, 28)[..., 0]
    for prefix, chosen in (("train", slice(0, 4)), ("t10k", slice(4, 6))):
        write_idx(raw / f"{prefix}-images-idx3-ubyte", images[chosen], packed=packed)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", np.arange(6)[chosen], packed=packed)
    found = prepared(tmp_path, data_params(tmp_path, "mnist", image_size=28, channels=1), "mnist")
    np.testing.assert_array_equal(found.images, images[:, None])
    assert found.labels is not None
    assert found.is_test is not None
    assert found.labels.tolist() == list(range(6))
    assert found.is_test.tolist() == [False] * 4 + [True] * 2


def test_a_bad_idx_file_is_named(tmp_path: Path) -> None:
    lay_out(tmp_path, ["mnist"], 2)
    path, params = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte", data_params(tmp_path, "mnist")
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert "it promises 15,680 bytes of data, but has 15,679" in refused(tmp_path, params, "mnist")
    path.write_bytes(b"\0\0\x0d" + good[3:])
    assert "it does not hold bytes along 3 axes" in refused(tmp_path, params, "mnist")
    path.write_bytes(good[:5])
    assert f"{path} is damaged or no idx file" in refused(tmp_path, params, "mnist")
    path.unlink()
    path.with_name(f"{path.name}.gz").write_bytes(b"no gzip")
    assert f"{path} is damaged or no idx file" in refused(tmp_path, params, "mnist")
    path.write_bytes(good)
    write_idx(path.with_name("train-labels-idx1-ubyte"), np.zeros(3))
    assert "train has 20 images, but 3 labels" in refused(tmp_path, params, "mnist")


def test_random_images_are_mapped_not_read(tmp_path: Path) -> None:
    images = random_images(7)
    np.save(tmp_path / "300K_random_images.npy", images)
    pictures = load_source("300k-random", tmp_path).pictures
    assert isinstance(pictures, np.memmap)
    np.testing.assert_array_equal(pictures, images.transpose(0, 3, 1, 2))
    np.save(tmp_path / "300K_random_images.npy", images.astype(float))
    params = data_params(tmp_path, ood=["300k-random"])
    assert "got 7 × 32 × 32 × 3 of float64" in refused(tmp_path, params, "300k-random")
    (tmp_path / "300K_random_images.npy").write_bytes(b"\x93NUMPY")
    assert "300K_random_images.npy is damaged" in refused(tmp_path, params, "300k-random")


# --- places365


def test_the_list_of_places365_can_be_drawn_again() -> None:
    first = (REPOSITORY / "salcli" / "data" / LIST).read_text().splitlines()[0]
    assert first.endswith("sorted(numpy.random.default_rng(365).choice(36_500, 10_000, replace=False) + 1)")
    drawn = sorted(np.random.default_rng(365).choice(36_500, 10_000, replace=False) + 1)
    assert places365_names() == [f"Places365_val_{number:08}.jpg" for number in drawn]


def test_of_places365_only_the_list_is_used_and_what_is_missing_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path / "other", ["places365"], 1)
    some = sorted((tmp_path / "other").rglob("*.jpg"))
    folder, names = tmp_path / "val_256", places365_names()[:8]
    folder.mkdir()
    for path, name in zip(some, [*names, "Places365_val_00099999.jpg"], strict=False):
        path.rename(folder / name)
    params = data_params(tmp_path, ood=["places365"])
    message = refused(tmp_path, params, "places365")
    assert f"{folder} lacks 9,992 of the 10,000 images of places365 ({places365_names()[8]}, …)" in message
    monkeypatch.setattr("salcli.data.places.places365_names", lambda: names)
    assert len(prepared(tmp_path, params, "places365")) == 8


# --- the plane


def test_the_points_are_those_of_the_paper(tmp_path: Path) -> None:
    params = data_params(
        tmp_path, "gaussians-2d", ["ring-2d", "cluster-2d"], image_size=1, channels=2, pi=0.1,
        id_shares={"train": 0.2, "calibration": 0.2, "wild": 0.6, "test": "official"},
    )  # fmt: skip
    workspace = Workspace(tmp_path)
    for name in (params.id, *params.ood):
        prepare.prepare_set(workspace, params, name)
    assert prepare.prepare_split(workspace, params, 0).counts == {
        "train": 3_000, "calibration": 3_000, "wild": 9_000, "test": 3_000,
    }  # fmt: skip
    for ood in params.ood:
        counts = prepare.prepare_wild(workspace, params, ood, 0).counts
        assert counts == {"wild": 10_000, "of it OOD": 1_000, "OOD test": 1_000}
    classes = read_image_set(workspace.find(prepared_set("gaussians-2d")))
    assert classes.images.dtype == np.float32
    assert classes.labels is not None
    for k, mean in enumerate([(-2, 0), (2, 0), (0, 2 * 3**0.5)]):
        own = classes.images[classes.labels == k, :, 0, 0]
        np.testing.assert_allclose(own.mean(0), mean, atol=0.03)
        np.testing.assert_allclose(np.cov(own.T), 0.25 * np.eye(2), atol=0.02)
    cluster = read_image_set(workspace.find(prepared_set("cluster-2d"))).images[..., 0, 0]
    np.testing.assert_allclose(cluster.mean(0), [10, 2 / 3**0.5], atol=0.05)
    ring = read_image_set(workspace.find(prepared_set("ring-2d"))).images[..., 0, 0]
    # a share of 1% lies farther out than √(2 · 7 · ln 100) in a Gaussian of variance 7
    distance = np.linalg.norm(ring - points.CENTRE, axis=1)
    assert distance.min() == pytest.approx((2 * 7 * np.log(100)) ** 0.5, rel=0.02)


def test_points_and_images_do_not_mix(tmp_path: Path) -> None:
    message = refused(tmp_path, data_params(tmp_path, "gaussians-2d"), "gaussians-2d")
    assert message == "gaussians-2d holds points in the plane; set data.image_size to 1 and data.channels to 2"
    message = refused(tmp_path, data_params(tmp_path, "digits-0-7", channels=2), "digits-0-7")
    assert "digits-0-7 holds images, but data.channels is 2" in message


# --- where sets are looked for


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_set_that_is_not_there_is_refused_with_both_cures(tmp_path: Path, name: str) -> None:
    params = data_params(tmp_path / "nowhere", id_name="digits-0-7", ood=[name])
    message = refused(tmp_path, params, name)
    whole = DATA_SETS[name].part_of or name
    assert message.startswith(f"{whole} is not there: looked for {DATA_SETS[name].files[0]}, ")
    assert f"{whole}/ and {whole}.npz in {tmp_path / 'nowhere'}" in message
    assert f"salcli data fetch {whole}, or put a folder or .npz file of your own there" in message


def test_the_environment_variable_wins_over_the_root(
    laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = data_params(tmp_path)
    refused(tmp_path, params, "svhn")
    monkeypatch.setenv("SALCLI_DATA", str(laid_out))
    assert len(prepared(tmp_path, params, "svhn")) == 50


def test_the_root_is_seen_from_the_workspace_and_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path / "workspace" / "pile", ["svhn"], 2)
    assert len(prepared(tmp_path, data_params(Path("pile")), "svhn")) == 30
    monkeypatch.setenv("HOME", str(tmp_path / "workspace"))
    assert len(prepared(tmp_path, data_params(Path("~/pile")), "svhn")) == 30


# --- through the command line


def test_the_command_line_prepares_a_real_format_and_shows_the_counts(
    laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"train": 0.25, "calibration": 0.25, "wild": 0.5, "test": "official"}
    settings = {"data.image_size": 32, "data.channels": 3, "data.id_shares": shares, "seeds": [0]}
    sets = {"data.root": str(laid_out), "data.id": "cifar10", "data.ood": ["svhn", "textures"]}
    write_params(tmp_path, settings | sets)
    monkeypatch.chdir(tmp_path)
    result = salcli("prepare")
    assert result.exit_code == 0, result.output
    assert "images 50  classes 10" in result.output
    assert "test 10" in result.output


def test_a_missing_set_is_refused_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params(tmp_path, {"data.id": "cifar10", "data.image_size": 32, "data.channels": 3})
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    result = salcli("prepare")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cifar10 is not there: looked for cifar-10-batches-py, cifar10/ and ")
    assert files(tmp_path) == before


def test_the_params_import_no_decoder() -> None:
    heavy = {"PIL", "torch", "torchvision", "pytorch_ood", "sklearn", "scipy"}
    code = f"import sys, salcli.params; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    done = process(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_id_and_ood_must_differ() -> None:
    with pytest.raises(ParamsError, match=r"data.ood  must not name the ID set, got cifar10"):
        data_params(Path(), "cifar10", ["svhn", "cifar10"])
    assert data_params(Path(), "cifar10", ["fashion-mnist"]).ood == ("fashion-mnist",)


def test_a_part_of_a_source_keeps_what_belongs_together(tmp_path: Path) -> None:
    paths = tuple(tmp_path / f"{i}.png" for i in range(4))
    whole = Source(paths, np.arange(4), tuple("abcd"), np.array([False, True, False, True]))
    part = whole.take(np.array([3, 0]))
    assert part.pictures == (paths[3], paths[0])
    assert part.labels is not None
    assert part.is_test is not None
    assert (part.labels.tolist(), part.is_test.tolist()) == ([3, 0], [True, False])
