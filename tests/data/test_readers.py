"""Every data set in its published format: small files of the same kind, read by the real code."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_data import (
    WRITERS,
    Malicious,
    decoded,
    dump,
    lay_out,
    random_images,
    refusal,
    write_batch,
)  # fmt: skip
from scipy.io import savemat

from salcli.data import readers
from salcli.data.catalogue import DATA_SETS, load_source
from salcli.data.readers import places365_names

OFFICIAL = {
    "cifar10", "cifar100", "cifar100-first50", "cifar100-last50", "svhn", "fashion-mnist", "mnist", "imagenet200",
    "imagenet1k",
}  # fmt: skip


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    lay_out(root, DATA_SETS, n_per_class=4)
    return root


@pytest.mark.parametrize("name", WRITERS)
def test_a_set_in_its_published_format_can_be_read_and_decoded(laid_out: Path, name: str) -> None:
    source = load_source(name, laid_out)
    images = decoded(source)
    assert (images.shape[1:], images.dtype) == ((3, 32, 32), np.uint8)
    assert source.fit == ("crop" if name in ("lsun-c", "tin-crop") else "resize")
    assert (source.is_test is not None) == (name in OFFICIAL)
    assert (source.labels is not None) == DATA_SETS[name].labeled
    n_classes = {"cifar100": 100, "cifar100-first50": 50, "cifar100-last50": 50}.get(name, 10)
    assert len(images) == len(source) == (n_classes * 5 if name in OFFICIAL else 40)
    if source.labels is not None:
        assert len(source.class_names) == n_classes
        assert np.bincount(source.labels).tolist() == [5] * n_classes
    if source.is_test is not None:
        assert source.is_test.sum() == n_classes
    assert len(np.unique(images, axis=0)) == len(images)


# --- CIFAR


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """The folder of twelve images, two in each batch; the data root is its parent."""
    folder, images = tmp_path / "cifar-10-batches-py", random_images(12)
    folder.mkdir()
    for i, name in enumerate([*readers.CIFAR10_BATCHES, "test_batch"]):
        write_batch(folder / name, images[2 * i : 2 * i + 2], {"labels": [0, 1]})
    dump(folder / "batches.meta", {"label_names": list("abcdefghij")})
    return folder


def test_cifar_batches_give_their_pixels_labels_and_official_split(cifar10: Path) -> None:
    images = random_images(12)
    found = load_source("cifar10", cifar10.parent)
    np.testing.assert_array_equal(found.array, images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(found.labels, [0, 1] * 6)
    np.testing.assert_array_equal(found.is_test, [False] * 10 + [True] * 2)
    assert found.class_names == tuple("abcdefghij")


def test_cifar_batches_written_by_python_2_are_read(cifar10: Path) -> None:
    """As in the published files: byte strings as keys, and numpy's old module name."""
    pixels = bytes(range(256)) * 12
    (cifar10 / "data_batch_1").write_bytes(
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff"
        b"\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + pixels + b"tbU\x06labelsq\x08]q\x09K\x05au."
    )
    source = load_source("cifar10", cifar10.parent)
    assert (np.asarray(source.array)[0].tobytes(), np.asarray(source.labels)[0]) == (pixels, 5)


def test_code_and_objects_in_a_cifar_batch_are_refused_and_not_run(cifar10: Path, tmp_path: Path) -> None:
    path, trace = cifar10 / "data_batch_3", tmp_path / "trace"
    for content in (Malicious(trace), {"data": Malicious(trace)}, {"labels": [np.random.default_rng]}):
        dump(path, content)
        message = refusal("cifar10", tmp_path)
        assert message.startswith(f"{path} is damaged or not a file of CIFAR (it asks for ")
        assert "which is not data" in message
    dump(path, {"data": np.zeros((1, 3072), np.uint8), "labels": [10]})
    assert "is damaged or not a file of CIFAR (a label is not from 0 to 9); remove it" in refusal("cifar10", tmp_path)
    assert not trace.exists()
    dump(path, Malicious(trace))
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the trap works


def test_the_halves_of_cifar100_have_its_classes_and_no_image_in_common(laid_out: Path) -> None:
    whole, first, last = (load_source(f"cifar100{part}", laid_out) for part in ("", "-first50", "-last50"))
    images, labels = np.asarray(whole.array), np.asarray(whole.labels)
    np.testing.assert_array_equal(first.array, images[labels < 50])
    np.testing.assert_array_equal(last.array, images[labels >= 50])
    np.testing.assert_array_equal(first.labels, labels[labels < 50])
    assert first.class_names == whole.class_names[:50]
    assert last.labels is None
    assert 0 < np.sum(last.is_test) < len(last)


# --- SVHN, idx, .npy


def test_svhn_stores_zero_as_ten_and_the_sample_axis_last(tmp_path: Path) -> None:
    images, digits = random_images(5), np.array([10, 1, 9, 10, 5], np.uint8)
    for part, chosen in (("train", slice(0, 3)), ("test", slice(3, 5))):
        stored = {"X": images[chosen].transpose(1, 2, 3, 0), "y": digits[chosen, None]}
        savemat(tmp_path / f"{part}_32x32.mat", stored, do_compression=True)
    source = load_source("svhn", tmp_path)
    np.testing.assert_array_equal(source.array, images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(source.labels, [0, 1, 9, 0, 5])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "cifar-10-batches-py/test_batch"),
        ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte"),
        ("fashion-mnist", "FashionMNIST/raw/train-images-idx3-ubyte.gz"),
        ("300k-random", "300K_random_images.npy"),
    ],
)
def test_a_damaged_file_is_named_with_the_command_that_gets_it_again(tmp_path: Path, name: str, file: str) -> None:
    lay_out(tmp_path, [name], 2)
    good = (tmp_path / file).read_bytes()
    for content in (b"", b"another file", good[:7], good[: len(good) // 2]):
        (tmp_path / file).write_bytes(content)
        message = refusal(name, tmp_path)
        assert message.startswith(f"{tmp_path / file}".removesuffix(".gz") + " is damaged or not ")
        assert message.endswith(f"then run: salcli data fetch {name}")


# --- Places365


def test_of_places365_only_the_list_is_used_and_missing_images_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = tmp_path / "val_256", places365_names()
    drawn = sorted(np.random.default_rng(365).choice(36_500, 10_000, replace=False) + 1)  # as the list itself says
    assert names == [f"Places365_val_{number:08}.jpg" for number in drawn]
    folder.mkdir()
    for name in (*names[:8], "Places365_val_00099999.jpg"):
        (folder / name).touch()
    assert f"{folder} lacks 9,992 of the 10,000 images of places365 ({names[8]}" in refusal("places365", tmp_path)
    monkeypatch.setattr(readers, "places365_names", lambda: names[:8])
    assert load_source("places365", tmp_path).files == tuple(folder / name for name in names[:8])


# --- OpenOOD's lists


def test_of_openoods_sets_only_the_images_on_the_lists_are_read(laid_out: Path) -> None:
    source = load_source("imagenet200", laid_out)
    top, k = laid_out / "images_largescale/imagenet_1k", np.asarray(source.labels)[-1]
    assert source.files[-1] == top / f"val/imagenet200_{k}_0.JPEG"
    folders = {path.relative_to(top).parent for path in source.files}
    assert folders == {Path("val"), *(Path("train", name) for name in source.class_names)}
    assert not any("not-listed" in path.name for path in source.files)


@pytest.mark.parametrize(
    ("part", "line", "message"),
    [
        ("train", "a.jpg", "line 1: it should be a relative path and the number of a class, got 'a.jpg'"),
        ("train", "/etc/a.jpg 0", "line 1: it should be a relative path"),
        ("train", "", "lists no images"),
        ("train", "x/a.jpg 1", "must number the same classes, from 0"),
        ("train", "x/a.jpg -1", "must number the same classes, from 0"),
        ("test", "val/a.jpg 10", "must number the same classes, from 0"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(tmp_path: Path, part: str, line: str, message: str) -> None:
    lay_out(tmp_path, ["imagenet200"], 2)
    (tmp_path / f"benchmark_imglist/imagenet200/{part}_imagenet200.txt").write_text(f"{line}\n" if line else "")
    assert message in refusal("imagenet200", tmp_path)


# --- points and patches


def test_the_points_are_those_of_the_paper() -> None:
    classes = readers.gaussians_2d()
    labels, is_test = np.asarray(classes.labels), np.asarray(classes.is_test)
    assert classes.array.dtype == np.float32
    for k, mean in enumerate([(-2, 0), (2, 0), (0, 2 * 3**0.5)]):
        points = classes.array[labels == k]
        assert (len(points), is_test[labels == k].sum()) == (6_000, 1_000)
        np.testing.assert_allclose(points.mean(0), mean, atol=0.03)
        np.testing.assert_allclose(np.cov(points.T), 0.25 * np.eye(2), atol=0.02)
    np.testing.assert_allclose(readers.cluster_2d().array.mean(0), [10, 2 / 3**0.5], atol=0.05)
    ring = readers.ring_2d().array
    # a share of 1% is farther out than √(2 · 7 · ln 100) in a Gaussian of variance 7
    distance = np.linalg.norm(ring - readers.CENTRE, axis=1)
    assert distance.min() == pytest.approx((2 * 7 * np.log(100)) ** 0.5, rel=0.02)


def test_patches_for_wild_and_test_share_no_pixel() -> None:
    """Paint each part of the photographs in its own gray: no patch may show the other's."""
    left, right = 40, 200
    image = np.full((427, 640), right, dtype=float)
    image[:, : int(640 * readers.WILD_PART)] = left
    rng = np.random.default_rng(0)
    assert all((readers._patch(image, rng, left=True) == left).all() for _ in range(300))
    assert all((readers._patch(image, rng, left=False) == right).all() for _ in range(300))
