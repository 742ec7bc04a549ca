"""A training plan that fits the data and the machine: simple rules, each with its reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.data.splits import OFFICIAL, split_id
from salcli.errors import DataError
from salcli.planning.own_data import without

if TYPE_CHECKING:
    from collections.abc import Mapping

    from salcli.data.image_set import Source
    from salcli.planning.own_data import OwnData

SIZES = (8, 16, 28, 32, 64, 96, 128, 224)
SMALL, LARGE = 28, 64  # from SMALL on a deeper network pays, above LARGE one that begins with a stride
MANY = 1_000  # ID images, from which on a tenth of them is enough to calibrate with
FEW_FOR_A_THRESHOLD = 100  # calibration images: with fewer, ERR_in is off by more than four points, often
GPU_EPOCHS = 100
# without a GPU: images through the network in all epochs, and the fewest and the most epochs
CPU_IMAGES = {"small": (600_000, 5, 50), "middle": (200_000, 3, 30), "large": (20_000, 2, 15)}


@dataclass(frozen=True)
class Choice:
    """One line of the plan."""

    what: str
    chosen: str
    why: str


@dataclass(frozen=True)
class Plan:
    """Dotted keys of params.yaml with their values, and what to tell of them."""

    values: dict[str, Any]
    choices: list[Choice]
    warnings: list[str]


@dataclass(frozen=True)
class OwnNetwork:
    """A network of the user's own, as params.yaml names it."""

    backbone: str
    head: str | None  # None: one of salcli's
    code: str
    weights: str | None
    is_trained: bool
    mean: list[float] | None
    std: list[float] | None


def image_size(median_side: int) -> int:
    """The largest usual size that most images have, so that few are blown up."""
    return max((size for size in SIZES if size <= median_side), default=SIZES[0])


def n_channels(data: OwnData) -> int:
    """1 where all images are gray."""
    return 1 if all(one.look.is_gray for one in data.sets) else 3


def plan(
    data: OwnData,
    size: int,
    channels: int,
    assigned: Mapping[str, Any],
    *,
    has_gpu: bool,
    network: OwnNetwork | None,
) -> Plan:
    """Values for params.yaml. `size` and `channels` are given: a network of one's own may ask for others.

    What the user has `assigned` is told as part of the plan.
    """
    copies = {path for one in data.copies if one.own is data.id for path in one.paths}
    shares, n_train, n_calibration = _split(without(data.id.source, copies))
    kind = "small" if size < SMALL else "middle" if size <= LARGE else "large"
    batch = 32 if n_train < 2_000 else 128
    epochs = _epochs(kind, n_train, has_gpu=has_gpu)
    augment = "flip-crop" if size >= SMALL and channels == 3 else "none"
    values: dict[str, Any] = {
        "seeds": [0],
        "rivals": [],
        "data.id": data.id.name,
        "data.ood": [data.wild.name],
        "data.test_ood": [one.name for one in data.tests],
        "data.image_size": size,
        "data.channels": channels,
        "data.on_bad_image": "skip",
        "data.pi": "unknown",
        **{f"data.id_shares.{part}": share for part, share in shares.items()},
        "train_id.epochs": epochs,
        "train_id.batch_size": batch,
        "train_id.augment": augment,
        "train_ood.epochs": max(2, round(epochs * 2 / 3)),
        "train_ood.batch_size": batch,
        "train_ood.augment": augment,
        "evaluate.knn_k": max(1, min(50, n_train // 2)),
    }
    if kind != "small":
        values["train_id.lr"] = 0.1 * batch / 128
    if kind == "large":
        values |= {"extract_grads.batch_size": 64, "evaluate.batch_size": 64}
    machine = "a GPU" if has_gpu else "no GPU"
    network_choice = _network(values, kind, network, has_gpu=has_gpu)
    told = {**values, **assigned}
    is_given = told["train_id.epochs"] == 0
    batches = {section: told[f"{section}.batch_size"] for section in ("train_id", "train_ood")}
    choices = [
        Choice("split", _shown_shares(shares), _why_split(shares, n_train, n_calibration)),
        Choice("images", f"{size} × {size}, {channels} channel{'s' * (channels > 1)}", _why_size(data, size)),
        network_choice,
        Choice(
            "train-id",
            "0 epochs: as it is" if is_given else f"{told['train_id.epochs']} epochs, batch {batches['train_id']}",
            "the network is trained already" if is_given else f"{n_train:,} images, {machine}",
        ),
        Choice(
            "train-ood",
            f"{told['train_ood.epochs']} epochs, batch {batches['train_ood']} + {batches['train_ood']}",
            f"augmentation: {told['train_ood.augment']}",
        ),
    ]
    return Plan(values, choices, _warnings(n_calibration))


def _split(source: Source) -> tuple[dict[str, float | str], int, int]:
    """Shares of the ID data, and how many images they give to training and calibration."""
    assert source.labels is not None
    is_official = source.is_test is not None and bool(source.is_test.any())
    dealt = source.labels[~source.is_test] if source.is_test is not None and is_official else source.labels
    calibration = 0.1 if len(dealt) >= MANY else 0.2
    test: float | str = OFFICIAL if is_official else 0.2
    train = round(1 - calibration - (0 if is_official else 0.2), 2)
    shares = {"train": train, "calibration": calibration, "wild": 0, "test": test}
    _check_enough(source.class_names, dealt, shares)
    split = split_id(source.labels, shares, 0, source.is_test, class_names=source.class_names)
    return shares, len(split.train), len(split.calibration)


def _check_enough(names: tuple[str, ...], dealt: np.ndarray, shares: dict[str, float | str]) -> None:
    """Every class, all at once."""
    cuts = np.cumsum([float(share) for share in shares.values() if share not in (0, OFFICIAL)])[:-1]
    counts = Counter(dealt.tolist())

    def is_enough(n: int) -> bool:
        return bool((np.diff([0, *np.rint(cuts * n), n]) >= 1).all())

    needed = next(n for n in range(1, 1000) if all(is_enough(more) for more in range(n, n + 20)))
    short = [f"{name} has {counts[k]}" for k, name in enumerate(names) if not is_enough(counts[k])]
    if short:
        more = f" and {len(short) - 5} more" if len(short) > 5 else ""
        raise DataError(
            f"every class needs at least {needed} readable images, some for training, calibration and test each; "
            f"{', '.join(short[:5])}{more}; add images, or leave the class out"
        )


def _epochs(kind: str, n_train: int, *, has_gpu: bool) -> int:
    if has_gpu:
        return GPU_EPOCHS
    n_images, fewest, most = CPU_IMAGES[kind]
    return min(most, max(fewest, n_images // n_train))


def _network(values: dict[str, Any], kind: str, network: OwnNetwork | None, *, has_gpu: bool) -> Choice:
    """Also sets the keys of the model."""
    if network is None:
        names = {"small": "small-cnn", "middle": "resnet18" if has_gpu else "wrn-16-2", "large": "torchvision:resnet18"}
        values["model.backbone"] = names[kind]
        return Choice("network", names[kind], "by the size of the images" + (" and the GPU" if has_gpu else ""))
    values |= {"model.backbone": network.backbone, "model.head": network.head, "model.code": network.code}
    if network.is_trained:
        # a trained network is only to be nudged
        values |= {"train_id.epochs": 0, "train_ood.lr": 0.001}
    elif network.weights:
        values["train_id.lr"] = 0.01  # or what it has learnt would be lost in the first steps
    values["train_id.weights"] = network.weights
    for key, given in (("mean", network.mean), ("std", network.std)):
        if given is not None:
            values[f"model.{key}"] = given
    how = "with" if network.is_trained else "starts from"
    why = "yours" + (f", {how} {network.weights}" if network.weights else "")
    return Choice("network", f"{network.backbone}{f', head {network.head}' if network.head else ''}", why)


def _shown_shares(shares: dict[str, float | str]) -> str:
    test = shares["test"]
    rest = "test as given" if test == OFFICIAL else f"test {float(test):.0%}"
    return f"train {float(shares['train']):.0%}, calibration {float(shares['calibration']):.0%}, {rest}"


def _why_split(shares: dict[str, float | str], n_train: int, n_calibration: int) -> str:
    held_out = "" if shares["test"] == OFFICIAL else "; a test is held out"
    return f"{n_train:,} and {n_calibration:,} images{held_out}"


def _why_size(data: OwnData, size: int) -> str:
    side = data.id.look.median_side
    return f"the shorter side has {side} pixels in the median" if image_size(side) == size else "as you say"


def _warnings(n_calibration: int) -> list[str]:
    if n_calibration >= FEW_FOR_A_THRESHOLD:
        return []
    return [
        f"the filter's threshold is chosen on {n_calibration} calibration images, which is few: how many ID images it "
        "takes for outliers is uncertain then; more labeled images help most"
    ]
