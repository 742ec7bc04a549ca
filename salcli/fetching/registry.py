"""Where every data set comes from: its files with their checksums, its licence, and where it lies below the data root.

What a set looks like below ROOT once it is there (torchvision's own classes read the first six with root=ROOT):

| set                        | below ROOT                                                                    |
| -------------------------- | ----------------------------------------------------------------------------- |
| cifar10                    | cifar-10-batches-py/                                                          |
| cifar100, -first50, -last50| cifar-100-python/                                                             |
| svhn                       | train_32x32.mat, test_32x32.mat                                               |
| fashion-mnist, mnist       | FashionMNIST/raw/, MNIST/raw/: four files each, without .gz                   |
| textures                   | dtd/dtd/images/CLASS/*.jpg (and dtd/dtd/labels/)                              |
| places365                  | val_256/*.jpg (and places365_val.txt, categories_places365.txt)               |
| lsun-c, lsun-r             | LSUN/, LSUN_resize/: images anywhere below                                    |
| isun                       | iSUN/: images anywhere below                                                  |
| tin-crop, tin-resize       | Imagenet/, Imagenet_resize/: images anywhere below                            |
| 300k-random                | 300K_random_images.npy (n, 32, 32, 3)                                         |
| any of them instead        | NAME/ (a folder of images) or NAME.npz                                        |

Archives stay where they were put, beside what they unpack to: they repair a damaged set without the web.
"""

from __future__ import annotations

from dataclasses import replace

from salcli.errors import unknown_name
from salcli.fetching.data_source import NOT_STATED, DataSource, RemoteFile, named_file
from salcli.fetching.odin_sets import ODIN_SETS

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def data_source(name: str) -> DataSource:
    """Look up where a data set comes from."""
    if name not in SOURCES:
        raise unknown_name("data set", name, SOURCES)
    return SOURCES[name]


def _idx_files(mirrors: tuple[str, ...], *facts: tuple[str, int]) -> tuple[RemoteFile, ...]:
    """The four files of MNIST and of what is published in its form; facts: md5 and size of each."""
    return tuple(
        named_file(mirrors[0], f"{name}.gz", md5, n_bytes, *mirrors[1:])
        for name, (md5, n_bytes) in zip(IDX_FILES, facts, strict=True)
    )


# Addresses and checksums are those of torchvision.datasets and, for 300k-random, pytorch_ood. They are written down
# so that `salcli data list` need not import torch; a test compares them with the installed packages.
CIFAR10 = DataSource(
    "cifar10",
    "CIFAR-10",
    "both",
    60_000,
    "32×32",
    NOT_STATED,
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    (
        named_file(
            "https://www.cs.toronto.edu/~kriz/",
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            170_498_071,
        ),
    ),
    provides=tuple(f"cifar-10-batches-py/{name}" for name in (*BATCHES, "batches.meta")),
    n_test=10_000,
)
CIFAR100 = DataSource(
    "cifar100",
    "CIFAR-100",
    "both",
    60_000,
    "32×32",
    NOT_STATED,
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    (
        named_file(
            "https://www.cs.toronto.edu/~kriz/",
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            169_001_437,
        ),
    ),
    provides=tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta")),
    n_test=10_000,
)
SVHN = DataSource(
    "svhn",
    "Street View House Numbers, cropped digits",
    "both",
    99_289,
    "32×32",
    "non-commercial",
    "http://ufldl.stanford.edu/housenumbers/",
    (
        named_file(
            "http://ufldl.stanford.edu/housenumbers/",
            "train_32x32.mat",
            "e26dedcc434d2e4c54c9b2d4a06d8373",
            182_040_794,
        ),
        named_file(
            "http://ufldl.stanford.edu/housenumbers/", "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 64_275_384
        ),
    ),
    provides=("train_32x32.mat", "test_32x32.mat"),
    n_test=26_032,
)
FASHION_MNIST = DataSource(
    "fashion-mnist",
    "Fashion-MNIST",
    "both",
    70_000,
    "28×28 gray",
    "MIT",
    "https://github.com/zalandoresearch/fashion-mnist",
    _idx_files(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
        ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
    folder="FashionMNIST/raw",
    provides=tuple(f"FashionMNIST/raw/{name}" for name in IDX_FILES),
    n_test=10_000,
)
MNIST = DataSource(
    "mnist",
    "MNIST handwritten digits",
    "both",
    70_000,
    "28×28 gray",
    NOT_STATED,
    "http://yann.lecun.com/exdb/mnist/",
    _idx_files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
    folder="MNIST/raw",
    provides=tuple(f"MNIST/raw/{name}" for name in IDX_FILES),
    n_test=10_000,
)
TEXTURES = DataSource(
    "textures",
    "Describable Textures (DTD)",
    "ood",
    5_640,
    "300–640",
    "research only",
    "https://www.robots.ox.ac.uk/~vgg/data/dtd/",
    (
        named_file(
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/",
            "dtd-r1.0.1.tar.gz",
            "fff73e5086ae6bdbea199a49dfb8a4c1",
            625_239_812,
        ),
    ),
    folder="dtd",
    provides=("dtd/dtd/images",),
)
PLACES365 = DataSource(
    "places365",
    "Places365, 10,000 of its 36,500 validation images",
    "ood",
    10_000,
    "256×256",
    "research only",
    "http://places2.csail.mit.edu",
    (
        named_file(
            "http://data.csail.mit.edu/places/places365/",
            "filelist_places365-standard.tar",
            "35a0585fee1fa656440f3ab298f8479c",
            67_000_000,
        ),
        named_file(
            "http://data.csail.mit.edu/places/places365/",
            "val_256.tar",
            "e27b17d8d44f4af9a78502beb927f808",
            525_000_000,
        ),
    ),
    provides=("val_256",),  # the lists only name the classes, which no OOD set needs
)
RANDOM_300K = DataSource(
    "300k-random",
    "300K Random Images, of the 80 Million Tiny Images that their authors withdrew",
    "ood",
    300_000,
    "32×32",
    NOT_STATED,
    "https://github.com/hendrycks/outlier-exposure",
    (
        named_file(
            "https://people.eecs.berkeley.edu/~hendrycks/",
            "300K_random_images.npy",
            "64ca64357de98351f28454274a112dc3",
            921_600_128,
        ),
    ),
    provides=("300K_random_images.npy",),
)
DIGITS_HOME = "https://archive.ics.uci.edu/dataset/80"
MADE = "Apache-2.0"  # as salcli itself
PHOTOS_HOME = "https://scikit-learn.org"
HALF_OF_CIFAR100 = replace(CIFAR100, n_images=30_000, n_test=5_000)

SOURCES = {
    source.name: source
    for source in (
        DataSource("digits-0-7", "Handwritten digits 0 to 7", "id", 1_443, "8×8 gray", "CC BY 4.0", DIGITS_HOME),
        DataSource("digits-8-9", "Handwritten digits 8 and 9", "ood", 354, "8×8 gray", "CC BY 4.0", DIGITS_HOME),
        DataSource("photo-patches", "Patches of two photographs", "ood", 2_000, "8×8 gray", "CC BY 2.0", PHOTOS_HOME),
        DataSource("gaussians-2d", "Three Gaussians in the plane", "id", 18_000, "point", MADE, "", n_test=3_000),
        DataSource("ring-2d", "Outliers around them", "ood", 2_000, "point", MADE, "", n_test=1_000),
        DataSource("cluster-2d", "Outliers on one side of them", "ood", 2_000, "point", MADE, "", n_test=1_000),
        CIFAR10,
        CIFAR100,
        replace(HALF_OF_CIFAR100, name="cifar100-first50", title="CIFAR-100, classes 0 to 49", role="id"),
        replace(HALF_OF_CIFAR100, name="cifar100-last50", title="CIFAR-100, classes 50 to 99", role="ood"),
        FASHION_MNIST,
        MNIST,
        SVHN,
        TEXTURES,
        PLACES365,
        *ODIN_SETS,
        RANDOM_300K,
    )
}
