"""Every data set by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from salcli.data.array_files import RANDOM_IMAGES, load_random_images
from salcli.data.cifar import CIFAR10, CIFAR100, load_cifar10, load_cifar100
from salcli.data.digits import load_digits_0_7, load_digits_8_9
from salcli.data.idx import load_fashion_mnist, load_mnist
from salcli.data.image_folder import image_files
from salcli.data.image_set import ImageSet, Source
from salcli.data.photo_patches import load_photo_patches
from salcli.data.places import FOLDER as PLACES
from salcli.data.places import load_places365
from salcli.data.points import load_cluster_2d, load_gaussians_2d, load_ring_2d
from salcli.data.svhn import FILES as SVHN
from salcli.data.svhn import load_svhn
from salcli.errors import DataError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Literal


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set before it is loaded. Any set can be OOD; ID data need labels.

    `files` are what `load` looks for below the root of all data; a set without any comes with salcli. A set that is
    `part_of` another one has the classes `classes` of it.
    """

    name: str
    labeled: bool
    load: Callable[[Path], Source]
    files: tuple[str, ...] = ()
    part_of: str = ""
    classes: range = range(0)


def _built_in(name: str, make: Callable[[], ImageSet], *, labeled: bool = False) -> DataSet:
    return DataSet(name, labeled, lambda root: Source.of(make()))


def _pictures(name: str, folder: str, fit: Literal["resize", "crop"] = "resize") -> DataSet:
    def load(root: Path) -> Source:
        found = image_files(root / folder)
        if not found:
            raise DataError(f"{root / folder} holds no images; get them again: salcli data fetch {name}")
        return Source(found, fit=fit)

    return DataSet(name, False, load, (folder,))


DATA_SETS = {
    entry.name: entry
    for entry in (
        DataSet("cifar10", True, load_cifar10, (CIFAR10,)),
        DataSet("cifar100", True, load_cifar100, (CIFAR100,)),
        DataSet("cifar100-first50", True, load_cifar100, (CIFAR100,), "cifar100", range(50)),
        DataSet("cifar100-last50", False, load_cifar100, (CIFAR100,), "cifar100", range(50, 100)),
        DataSet("fashion-mnist", True, load_fashion_mnist, ("FashionMNIST/raw",)),
        DataSet("mnist", True, load_mnist, ("MNIST/raw",)),
        DataSet("svhn", True, load_svhn, SVHN),
        _pictures("textures", "dtd/dtd/images"),
        DataSet("places365", False, load_places365, (PLACES,)),
        _pictures("lsun-c", "LSUN", "crop"),
        _pictures("lsun-r", "LSUN_resize"),
        _pictures("isun", "iSUN"),
        _pictures("tin-crop", "Imagenet", "crop"),
        _pictures("tin-resize", "Imagenet_resize"),
        DataSet("300k-random", False, load_random_images, (RANDOM_IMAGES,)),
        _built_in("digits-0-7", load_digits_0_7, labeled=True),
        _built_in("digits-8-9", load_digits_8_9),
        _built_in("photo-patches", load_photo_patches),
        _built_in("gaussians-2d", load_gaussians_2d, labeled=True),
        _built_in("ring-2d", load_ring_2d),
        _built_in("cluster-2d", load_cluster_2d),
    )
}


def data_set(name: str) -> DataSet:
    """Look a data set up."""
    if name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    return DATA_SETS[name]


def labeled_sets() -> list[str]:
    """The names of the sets that can be ID data."""
    return [name for name, entry in DATA_SETS.items() if entry.labeled]
