"""The data sets that salcli knows, one record each, and how they are found and read by name.

To add a data set, add a record to DATA_SETS (and a reader to readers.py for a new format): `salcli data list`, `salcli
data fetch`, the checks of params.yaml and `salcli prepare` all use this table. For any set, users can put a folder of
images NAME/ or an array file NAME.npz below the data root instead of the published files.

torchvision's own classes find CIFAR, SVHN, MNIST, Fashion-MNIST, DTD and Places365 at the same paths (root=ROOT).
Archives stay beside what they unpack to, so a damaged set can be repaired without the web.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from salcli.data import readers
from salcli.data.folders import image_files, read_folder
from salcli.data.sets import Fit, Samples
from salcli.data.vectors import read_vectors
from salcli.errors import SalError, unknown_name

Role = Literal["id", "ood", "both"]
NOT_STATED = "not stated"  # by the authors, which does not mean free
ROOT_VARIABLE = "SALCLI_DATA"
DEFAULT_ROOT = Path("data", "raw")


@dataclass(frozen=True)
class RemoteFile:
    """A file on the web. `mirrors` hold the same bytes; `n_bytes` is for the progress bar and may be approximate."""

    url: str
    name: str
    checksum: str  # algorithm:hexadecimal digits
    n_bytes: int | None = None
    mirrors: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """All that is known about a data set before it is read. Any set can be OOD; ID data needs labels.

    A set that is fetched has `files`; `by_hand` says how users get one that is not. Without either, it comes
    with an installed package, or is made by salcli. A set that is `part_of` another one has the `classes` of it,
    numbered from 0.
    """

    name: str
    title: str
    role: Role
    n_images: int  # or vectors
    size: str  # of an image, in pixels
    licence: str
    home: str
    read: Callable[[Path], Samples]  # from the data root
    files: tuple[RemoteFile, ...] = ()
    folder: str = ""  # below the data root: `files` are put and unpacked there
    provides: tuple[str, ...] = ()  # below the data root: the set is complete when these exist; a folder ends with /
    n_test: int = 0  # how many images were published for testing
    part_of: str = ""
    classes: range = range(0)
    by_hand: str = ""

    @property
    def labeled(self) -> bool:
        return self.role != "ood"

    @property
    def n_for_training(self) -> int:
        return self.n_images - self.n_test

    @property
    def is_embedded(self) -> bool:
        """Nothing has to be fetched."""
        return not self.files and not self.by_hand

    @property
    def how_to_get(self) -> str:
        return "`salcli data list` says how to get it" if self.by_hand else f"get it: salcli data fetch {self.name}"

    @property
    def n_bytes(self) -> int | None:
        """To download, as far as known."""
        return sum(file.n_bytes for file in self.files if file.n_bytes) or None

    @property
    def paths(self) -> tuple[str, ...]:
        """What the set is read from, below the data root: a folder, not each file in it."""
        return tuple(dict.fromkeys(path.rpartition("/")[0] or path for path in self.provides))

    def facts(self) -> dict[str, Any]:
        """The record as plain values, for JSON."""
        fields = {key: value for key, value in asdict(self).items() if key not in ("read", "classes")}
        return fields | {"n_bytes": self.n_bytes, "embedded": self.is_embedded}


# --- the records
#
# Addresses and checksums are those of torchvision.datasets and, for 300k-random and ODIN's sets, of pytorch_ood; a test
# compares them with the installed packages. They are repeated here so that `salcli data list` need not import torch.


def _remote(base: str, name: str, md5: str, n_bytes: int | None = None, *mirrors: str) -> RemoteFile:
    return RemoteFile(base + name, name, f"md5:{md5}", n_bytes, tuple(mirror + name for mirror in mirrors))


def _built_in(
    name: str, title: str, role: Role, size: str, licence: str, home: str, n_images: int, n_test: int,
    make: Callable[[], Samples],
) -> DataSet:  # fmt: skip
    return DataSet(name, title, role, n_images, size, licence, home, lambda root: make(), n_test=n_test)


def _cifar(
    name: str, title: str, archive: str, md5: str, n_bytes: int, read: Callable[[Path], Samples], *provides: str
) -> DataSet:
    home = "https://www.cs.toronto.edu/~kriz/"
    return DataSet(
        name, title, "both", 60_000, "32×32", NOT_STATED, f"{home}cifar.html", read,
        files=(_remote(home, archive, md5, n_bytes),), provides=provides, n_test=10_000,
    )  # fmt: skip


def _mnist(
    name: str, title: str, licence: str, home: str, read: Callable[[Path], Samples], folder: str,
    addresses: tuple[str, ...], *facts: tuple[str, int],
) -> DataSet:  # fmt: skip
    """MNIST or a relative, which has the same four files; `facts` are the md5 and the size of each."""
    files = tuple(
        _remote(addresses[0], f"{file}.gz", md5, n_bytes, *addresses[1:])
        for file, (md5, n_bytes) in zip(readers.IDX_FILES, facts, strict=True)
    )
    return DataSet(
        name, title, "both", 70_000, "28×28 gray", licence, home, read, files, folder,
        provides=tuple(f"{folder}/{file}" for file in readers.IDX_FILES), n_test=10_000,
    )  # fmt: skip


def _pictures(folder: Path, name: str, fit: Fit = "resize") -> Samples:
    """All images below a folder."""
    found = image_files(folder)
    if not found:
        raise SalError(f"{folder} holds no images; get them again: salcli data fetch {name}")
    return Samples(files=found, fit=fit)


def _odin(name: str, title: str, n_images: int, folder: str, share: str, md5: str, fit: Fit = "resize") -> DataSet:
    """A set that the authors of ODIN cropped or resized and share on Dropbox, which is its only home.

    pytorch_ood lacks iSUN: its address is from the authors' README, and its checksum from other public code whose
    checksum of LSUN_resize.tar.gz agrees with pytorch_ood's.
    """
    return DataSet(
        name, title, "ood", n_images, "32×32", NOT_STATED, "https://github.com/facebookresearch/odin",
        lambda root: _pictures(root / folder, name, fit),
        files=(_remote(f"https://www.dropbox.com/s/raw/{share}/", f"{folder}.tar.gz", md5),),
        provides=(f"{folder}/",),
    )  # fmt: skip


OPENOOD_BY_HAND = """\
get https://github.com/Jingkang50/OpenOOD, and run there, with the folder above as ROOT:
  python scripts/download/download.py --contents datasets --dataset_mode dataset --save_dir ROOT \\
    --datasets imagenet_1k ssb_hard ninco inaturalist texture openimage_o
  Lists go to ROOT/benchmark_imglist/, images to ROOT/images_largescale/ and ROOT/images_classic/.
  Put https://image-net.org's training images into ROOT/images_largescale/imagenet_1k/train/CLASS/"""


def _openood(
    name: str, title: str, role: Role, n_images: int, licence: str, home: str, folders: tuple[str, ...],
    *lists: str, n_test: int = 0,
) -> DataSet:  # fmt: skip
    """A set of OpenOOD v1.5: the images on its lists. Images of ID data are in two folders."""
    files = tuple(f"{readers.OPENOOD_LISTS}/{one}" for one in lists)
    return DataSet(
        name, title, role, n_images, "photos", licence, home,
        lambda root: readers.openood(root / folders[0].partition("/")[0], [root / file for file in files]),
        provides=(*files, *(f"{folder}/" for folder in folders)), n_test=n_test, by_hand=OPENOOD_BY_HAND,
    )  # fmt: skip


DTD = "https://www.robots.ox.ac.uk/~vgg/data/dtd/"
HOUSE_NUMBERS = "http://ufldl.stanford.edu/housenumbers/"
PLACES = "http://data.csail.mit.edu/places/places365/"
IMAGENET = ("research only", "https://image-net.org")
IMAGENET_FOLDERS = ("images_largescale/imagenet_1k/train", "images_largescale/imagenet_1k/val")
DIGITS = ("8×8 gray", "CC BY 4.0", "https://archive.ics.uci.edu/dataset/80")
PHOTOS = ("8×8 gray", "CC BY 2.0", "https://scikit-learn.org")
MADE = ("2-D vector", "Apache-2.0", "")  # licensed as salcli itself

CIFAR10 = _cifar(
    "cifar10", "CIFAR-10", "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071, readers.cifar10,
    *(f"{readers.CIFAR10}/{name}" for name in (*readers.CIFAR10_BATCHES, "test_batch", "batches.meta")),
)  # fmt: skip
CIFAR100 = _cifar(
    "cifar100", "CIFAR-100", "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437,
    readers.cifar100, *(f"{readers.CIFAR100}/{name}" for name in ("train", "test", "meta")),
)  # fmt: skip
HALF_OF_CIFAR100 = replace(CIFAR100, n_images=30_000, n_test=5_000, part_of="cifar100")

DATA_SETS = {
    record.name: record
    for record in (
        _built_in("digits-0-7", "Handwritten digits 0 to 7", "id", *DIGITS, 1_443, 0, readers.digits_0_7),
        _built_in("digits-8-9", "Handwritten digits 8 and 9", "ood", *DIGITS, 354, 0, readers.digits_8_9),
        _built_in("photo-patches", "Patches of two photographs", "ood", *PHOTOS, 2_000, 0, readers.photo_patches),
        _built_in("gaussians-2d", "Three Gaussians in the plane", "id", *MADE, 18_000, 3_000, readers.gaussians_2d),
        _built_in("ring-2d", "Outliers around them", "ood", *MADE, 2_000, 1_000, readers.ring_2d),
        _built_in("cluster-2d", "Outliers on one side of them", "ood", *MADE, 2_000, 1_000, readers.cluster_2d),
        CIFAR10,
        CIFAR100,
        replace(
            HALF_OF_CIFAR100, name="cifar100-first50", title="CIFAR-100, classes 0 to 49", role="id", classes=range(50)
        ),
        replace(
            HALF_OF_CIFAR100,
            name="cifar100-last50", title="CIFAR-100, classes 50 to 99", role="ood", classes=range(50, 100),
        ),
        _mnist(
            "fashion-mnist", "Fashion-MNIST", "MIT", "https://github.com/zalandoresearch/fashion-mnist",
            readers.fashion_mnist, "FashionMNIST/raw",
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
            ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
        _mnist(
            "mnist", "MNIST handwritten digits", NOT_STATED, "http://yann.lecun.com/exdb/mnist/",
            readers.mnist, "MNIST/raw",
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
        DataSet(
            "svhn", "Street View House Numbers, cropped digits", "both", 99_289, "32×32", "non-commercial",
            HOUSE_NUMBERS, readers.svhn,
            files=(
                _remote(HOUSE_NUMBERS, readers.SVHN[0], "e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
                _remote(HOUSE_NUMBERS, readers.SVHN[1], "eb5a983be6a315427106f1b164d9cef3", 64_275_384),
            ),
            provides=readers.SVHN, n_test=26_032,
        ),
        DataSet(
            "textures", "Describable Textures (DTD)", "ood", 5_640, "300–640", "research only",
            DTD, lambda root: _pictures(root / "dtd/dtd/images", "textures"),
            files=(_remote(f"{DTD}download/", "dtd-r1.0.1.tar.gz", "fff73e5086ae6bdbea199a49dfb8a4c1", 625_239_812),),
            folder="dtd", provides=("dtd/dtd/images/",),
        ),
        DataSet(
            "places365", "Places365, 10,000 of its 36,500 validation images", "ood", 10_000, "256×256", "research only",
            "http://places2.csail.mit.edu", readers.places365,
            files=(
                _remote(PLACES, "filelist_places365-standard.tar", "35a0585fee1fa656440f3ab298f8479c", 67_000_000),
                _remote(PLACES, "val_256.tar", "e27b17d8d44f4af9a78502beb927f808", 525_000_000),
            ),
            provides=(f"{readers.PLACES}/",),  # the lists only name the classes, which an OOD set does not need
        ),
        _odin("lsun-c", "LSUN, cropped", 10_000, "LSUN",
              "fhtsw1m3qxlwj6h", "458a0a0ab8e5f1cb4516d7400568e460", "crop"),
        _odin("lsun-r", "LSUN, resized", 10_000, "LSUN_resize",
              "moqh2wh8696c3yl", "278b7b31c8cb7e804a1465a8ce03a2dc"),
        _odin("isun", "iSUN", 8_925, "iSUN",
              "ssz7qxfqae0cca5", "be77b0f2c26fda898afac5f99645ee70"),
        _odin("tin-crop", "Tiny ImageNet, cropped", 10_000, "Imagenet",
              "avgm2u562itwpkl", "7c0827e4246c3718a5ee076e999e52e5", "crop"),
        _odin("tin-resize", "Tiny ImageNet, resized", 10_000, "Imagenet_resize",
              "kp3my3412u5k9rl", "0f9ff11d45babf2eff5fe12281d1ac31"),
        DataSet(
            "300k-random", "300K Random Images, of the 80 Million Tiny Images that their authors withdrew",
            "ood", 300_000, "32×32", NOT_STATED, "https://github.com/hendrycks/outlier-exposure", readers.random_images,
            files=(
                _remote("https://people.eecs.berkeley.edu/~hendrycks/", readers.RANDOM_IMAGES,
                        "64ca64357de98351f28454274a112dc3", 921_600_128),
            ),
            provides=(readers.RANDOM_IMAGES,),
        ),
        _openood(  # the length of its training list is what pytorch_ood says: about 259,000
            "imagenet200", "ImageNet-200, the classes of ImageNet-R", "id", 268_000, *IMAGENET, IMAGENET_FOLDERS,
            "imagenet200/train_imagenet200.txt", "imagenet200/test_imagenet200.txt", n_test=9_000,
        ),
        _openood(
            "imagenet1k", "ImageNet-1K", "id", 1_326_167, *IMAGENET, IMAGENET_FOLDERS,
            "imagenet/train_imagenet.txt", "imagenet/test_imagenet.txt", n_test=45_000,
        ),
        _openood(
            "ssb-hard", "Semantic Shift Benchmark, hard classes of ImageNet-21K", "ood", 49_000, "research only",
            "https://github.com/sgvaze/SSB", ("images_largescale/ssb_hard",), "imagenet/test_ssb_hard.txt",
        ),
        _openood(
            "ninco", "NINCO, no ImageNet class objects", "ood", 5_879, "CC BY 4.0",
            "https://zenodo.org/record/8013288", ("images_largescale/ninco",), "imagenet/test_ninco.txt",
        ),
        _openood(
            "inaturalist", "iNaturalist, plants that ImageNet lacks", "ood", 10_000, "non-commercial",
            "https://github.com/deeplearning-wisc/large_scale_ood", ("images_largescale/inaturalist",),
            "imagenet/test_inaturalist.txt",
        ),
        _openood(
            "textures-openood", "DTD without four classes that ImageNet has", "ood", 5_160, "research only",
            DTD, ("images_classic/texture",), "imagenet/test_textures.txt",
        ),
        _openood(
            "openimage-o", "OpenImage-O, photos of no ImageNet class", "ood", 15_869, "CC BY 2.0",
            "https://github.com/haoqiwang/vim", ("images_largescale/openimage_o",), "imagenet/test_openimage_o.txt",
        ),
    )
}  # fmt: skip


def data_set(name: str) -> DataSet:
    """Look up a record."""
    if name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    return DATA_SETS[name]


def labeled_sets() -> list[str]:
    """The names of the sets that can be ID data."""
    return [name for name, record in DATA_SETS.items() if record.labeled]


# --- where sets are, and reading them by name


def data_root(option: Path | None = None, params_root: str | None = None, workspace: Path = Path()) -> Path:
    """The first of: --root, the environment variable SALCLI_DATA, data.root of params.yaml, data/raw.

    The last two are relative to the workspace, the folder of params.yaml; `~` is the home folder everywhere.
    """
    from_environment = os.environ.get(ROOT_VARIABLE)
    if option is not None:
        return option.expanduser()
    if from_environment:
        return Path(from_environment).expanduser()
    return workspace / (Path(params_root).expanduser() if params_root else DEFAULT_ROOT)


def custom_paths(value: str | Sequence[str], workspace: Path) -> list[Path]:
    """The path or paths of a set of data.custom; relative to the workspace."""
    return [workspace / Path(path).expanduser() for path in ([value] if isinstance(value, str) else value)]


def stand_ins(name: str, root: Path) -> list[Path]:
    """NAME and NAME.npz below the data root, which users put there in place of a data set.

    Names must match exactly, also on file systems that take iSUN/ for isun/.
    """
    present = {path.name for path in root.iterdir()} if root.is_dir() else set()
    return [root / candidate for candidate in (name, f"{name}.npz") if candidate in present]


def load_source(name: str, root: Path) -> Samples:
    """A set by name, not decoded yet: what stands in for it, else the files as published."""
    record = data_set(name)
    try:
        source = _load(record, root)
    except OSError as error:
        where = error.filename or root
        raise SalError(f"{name}: {where} cannot be read ({error.strerror}); fix that, or move it away") from None
    return source if record.labeled else source.unlabeled()


def read_from(name: str, root: Path) -> list[Path]:
    """The files and folders that a set is read from; none where it comes with salcli."""
    record = data_set(name)
    replacement = _stand_in(name, root)
    if replacement:
        return [replacement]
    return read_from(record.part_of, root) if record.part_of else [root / path for path in record.paths]


def _load(record: DataSet, root: Path) -> Samples:
    replacement = _stand_in(record.name, root)
    if replacement:
        if replacement.suffix == ".npz":
            return read_vectors(replacement, labeled=record.labeled).from_file(replacement)
        return read_folder(replacement, labeled=record.labeled)
    if record.part_of:
        return _some_classes(load_source(record.part_of, root), record)
    missing = [path for path in record.paths if not (root / path).exists()]
    if missing:
        raise SalError(
            f"{record.name} is not there: looked for {', '.join(missing)}, {record.name}/ and {record.name}.npz in "
            f"{root}; {record.how_to_get}, or put a folder of images or an .npz file there"
        )
    source = record.read(root)
    return source if source.files else source.from_file(root / record.name)  # in the official order


def _stand_in(name: str, root: Path) -> Path | None:
    found = stand_ins(name, root)
    if len(found) > 1:
        raise SalError(f"both {found[0]} and {found[1]} stand for {name}; keep one of them")
    return found[0] if found else None


def _some_classes(whole: Samples, record: DataSet) -> Samples:
    first, last = record.classes[0], record.classes[-1]
    if whole.labels is None or last >= len(whole.class_names):
        raise SalError(
            f"{record.name} is classes {first} to {last} of {record.part_of}, "
            f"but what stands for that has {len(whole.class_names)} classes"
        )
    index = np.flatnonzero((whole.labels >= first) & (whole.labels <= last))
    names = whole.class_names[first : last + 1]
    return replace(whole.take(index), labels=whole.labels[index] - first, class_names=names)
