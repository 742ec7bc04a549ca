"""Plan a project for custom data: try the network, choose settings that fit data and machine, by simple rules."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salcli.data.samples import Source
from salcli.data.splits import OFFICIAL, split_id
from salcli.engine.device import resolve_device
from salcli.errors import DataError, ModelError, ParamsError, ProjectError
from salcli.models.backbones import check_backbone_name, import_path, is_hooked
from salcli.models.custom import describe_failure, find_head, folder_of, make_importable
from salcli.models.network import Classifier, NetworkSpec, check_custom_head
from salcli.models.weights import load_weights
from salcli.params.presets import Preset, resolved
from salcli.params.schema import validated
from salcli.progress import Progress
from salcli.project.estimate import SetSize, estimated_images
from salcli.project.looking import CustomData, look_at_data

SIZES = (8, 16, 28, 32, 64, 96, 128, 224)
SMALL, LARGE = 28, 64  # from SMALL on a deeper network pays, above LARGE one that begins with a stride
MANY = 1_000  # ID images, from which on a tenth is enough for calibration
FEW_FOR_A_THRESHOLD = 100  # calibration images: with fewer, ERR_in is often off by more than four points
GPU_EPOCHS = 100
# without a GPU: images through the network in all epochs, and the fewest and the most epochs
CPU_IMAGES = {"small": (600_000, 5, 50), "middle": (200_000, 3, 30), "large": (20_000, 2, 15)}


@dataclass(frozen=True)
class NetworkOptions:
    """The network that the user names, and what goes with it."""

    backbone: str
    head: str | None = None
    weights: Path | None = None
    mean: list[float] | None = None  # for each channel, or one for all
    std: list[float] | None = None


@dataclass(frozen=True)
class CustomNetwork:
    """A network that was tried and works, as params.yaml names it."""

    backbone: str
    head: str | None  # None: salcli knows where it is
    code: str
    weights: str | None
    is_trained: bool
    mean: list[float] | None
    std: list[float] | None


@dataclass(frozen=True)
class Choice:
    """One line of the plan."""

    what: str
    chosen: str
    why: str


@dataclass(frozen=True)
class Plan:
    """Values for params.yaml by dotted key, and what to tell the user about them."""

    data: CustomData
    values: dict[str, Any]
    choices: list[Choice]
    warnings: list[str]
    notes: list[str]
    n_images: int = 0  # through a network, in all stages together


def plan_project(
    folder: Path,
    preset: Preset,
    assigned: dict[str, Any],
    id_path: Path,
    wild_path: Path,
    test_paths: Sequence[Path],
    network: NetworkOptions | None,
    progress: Progress,
) -> Plan:
    """Look at the data, try the network, and plan. What the user has `assigned` overrides the plan. Writes nothing."""
    data = look_at_data(folder, id_path, wild_path, test_paths, progress)
    paths = {one.name: as_written(one.path, folder) for one in data.sets}
    size = _count(assigned, "data.image_size") or image_size(data.id.look.median_side)
    channels = _count(assigned, "data.channels") or (1 if all(one.look.is_gray for one in data.sets) else 3)
    if channels not in (1, 3):
        raise ParamsError(f"--set data.channels={channels}: images have 1 channel (gray) or 3 (color)")
    tried: CustomNetwork | None = None
    if network is not None:
        # gray images can also be given to a network as three equal channels
        possible = [1, 3] if channels == 1 and "data.channels" not in assigned else [channels]
        tried, channels = try_network(
            network, folder, len(data.id.source.class_names), size, possible,
            is_trained=assigned.get("train_id.epochs") == 0,  # custom code may return a trained network
        )  # fmt: skip
    has_gpu = resolve_device(str(assigned.get("device", "auto"))).type != "cpu"
    planned = plan(data, size, channels, assigned, has_gpu=has_gpu, network=tried)
    values = {"data.custom": paths, **planned.values, **assigned}
    params = resolved(preset, values)
    validated(params, "params.yaml with what you set", folder)
    sizes = {}
    for one in data.sets:
        used = data.without_copies(one)
        sizes[one.name] = SetSize(len(used), 0 if used.is_test is None else int(used.is_test.sum()))
    overruled = sorted(assigned.keys() & planned.values.keys())
    notes = [*_notes(data, tried, values), *(f"{key} is {assigned[key]}, as you set it" for key in overruled)]
    return replace(planned, values=values, notes=notes, n_images=estimated_images(params, sizes))


def as_written(path: Path, project: Path) -> str:
    """A path as params.yaml names it: relative inside the project, so that both can be moved; else absolute."""
    # not resolved: links may be there for a reason
    absolute, top = Path(os.path.abspath(path.expanduser())), Path(os.path.abspath(project))  # noqa: PTH100
    written = str(absolute.relative_to(top) if absolute.is_relative_to(top) else absolute)
    try:
        written.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(written).decode(errors="replace")
        raise ProjectError(
            f"the name of {shown} is not valid UTF-8, so params.yaml cannot hold it; rename it, or name a link to it "
            "(ln -s). The names of files inside it do not matter"
        ) from None
    return written


def channel_values(option: str, text: str | None) -> list[float] | None:
    """The value of --mean or --std: `0.5` or `0.485,0.456,0.406`."""
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ParamsError(f"{option} {text}: must be a number, or one per channel separated by commas") from None
    if max(values) > 1:
        on_scale = ",".join(f"{value / 255:.3g}" for value in values)
        raise ParamsError(f"{option} {text}: pixels go from 0 to 1 (did you mean {on_scale}?)")
    return values


# --- the network


def try_network(
    options: NetworkOptions,
    folder: Path,
    n_classes: int,
    size: int,
    channels: Sequence[int],
    *,
    is_trained: bool = False,
) -> tuple[CustomNetwork, int]:
    """Build the network, load its weights, run it. Also returns the first number of `channels` that it takes.

    `is_trained`: it is used without training, with or without weights from a file.
    """
    backbone, weights = check_backbone_name(options.backbone), options.weights
    code = "."
    if (parts := import_path(backbone)) is not None:
        code_folder = folder_of(parts[0], [folder, Path.cwd()]) or folder
        make_importable(code_folder)
        code = as_written(code_folder, folder)
    head, taken = _first_that_works(options, n_classes, size, channels)
    classifier = Classifier(NetworkSpec(backbone, n_classes, (0.0,) * taken, (1.0,) * taken, head=head))
    if weights:
        is_trained = load_weights(classifier, weights).head_was_loaded or is_trained
    elif is_trained:
        check_custom_head(classifier)
    try:
        with torch.inference_mode():
            classifier.eval()(torch.zeros(2, taken, size, size))
    except (ModelError, ParamsError):
        raise
    except Exception as error:  # custom code may raise anything
        raise ModelError(
            f"{backbone} does not run without its head {head}: {describe_failure(error)}; "
            "its forward should only call that layer"
        ) from error
    mean, std = (_per_channel(f"--{name}", getattr(options, name), taken) for name in ("mean", "std"))
    written = as_written(weights, folder) if weights else None
    return CustomNetwork(backbone, head, code, written, is_trained, mean, std), taken


def _first_that_works(
    options: NetworkOptions, n_classes: int, size: int, channels: Sequence[int]
) -> tuple[str | None, int]:
    first_error: ModelError | None = None
    for number in channels:
        try:
            return _head(options, n_classes, (number, size, size)), number
        except ModelError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _head(options: NetworkOptions, n_classes: int, shape: tuple[int, int, int]) -> str | None:
    if is_hooked(options.backbone):
        return find_head(options.backbone, options.head, n_classes, shape)
    if options.head is not None:
        raise ParamsError(f"--head is for custom networks and those of timm; {options.backbone} needs none")
    spec = NetworkSpec(options.backbone, n_classes, (0.0,) * shape[0], (1.0,) * shape[0])
    with torch.inference_mode():
        Classifier(spec).eval()(torch.zeros(2, *shape))
    return None


def _per_channel(option: str, values: list[float] | None, channels: int) -> list[float] | None:
    if values is None:
        return None
    if len(values) not in (1, channels):
        raise ParamsError(
            f"{option} has {len(values)} values, the images have {channels} channels; give as many, or one"
        )
    return values * channels if len(values) == 1 else values


# --- the plan


def image_size(median_side: int) -> int:
    """The largest usual size that most images have, so that few are enlarged."""
    return max((size for size in SIZES if size <= median_side), default=SIZES[0])


def plan(
    data: CustomData,
    size: int,
    channels: int,
    assigned: Mapping[str, Any],
    *,
    has_gpu: bool,
    network: CustomNetwork | None,
) -> Plan:
    """Choose values for params.yaml; the choices that are shown include what the user has `assigned`."""
    shares, n_train, n_calibration = _split(data.without_copies(data.id))
    kind = "small" if size < SMALL else "middle" if size <= LARGE else "large"
    batch = 32 if n_train < 2_000 else 128
    if has_gpu:
        epochs = GPU_EPOCHS
    else:
        n_images, fewest, most = CPU_IMAGES[kind]
        epochs = min(most, max(fewest, n_images // n_train))
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
        "data.pi": ["unknown"],
        **{f"data.id_shares.{part}": share for part, share in shares.items()},
        "train_id.epochs": epochs,
        "train_id.batch_size": batch,
        "train_id.augment": augment,
        "train_ood.epochs": max(2, round(epochs * 2 / 3)),
        "train_ood.batch_size": batch,
        "train_ood.augment": augment,
        "methods.knn.k": max(1, min(50, n_train // 2)),
    }
    if kind != "small":
        values["train_id.lr"] = 0.1 * batch / 128
    if kind == "large":
        values |= {"extract_grads.batch_size": 64, "evaluate.batch_size": 64}
    if network is None:
        names = {"small": "small-cnn", "middle": "resnet18" if has_gpu else "wrn-16-2", "large": "torchvision:resnet18"}
        values["model.backbone"] = names[kind]
        chosen = Choice("network", names[kind], f"by the size of the images{' and the GPU' if has_gpu else ''}")
    else:
        values |= _network_values(network)
        shown = f"{network.backbone}{f', head {network.head}' if network.head else ''}"
        how = "with" if network.is_trained else "starts from"
        chosen = Choice("network", shown, "yours" + (f", {how} {network.weights}" if network.weights else ""))
    told = {**values, **assigned}
    batches = {section: told[f"{section}.batch_size"] for section in ("train_id", "train_ood")}
    side = data.id.look.median_side
    choices = [
        Choice("split", _shown_shares(shares), _why_split(shares, n_train, n_calibration)),
        Choice(
            "images",
            f"{size} × {size}, {channels} channel{'s' * (channels > 1)}",
            f"median of the shorter sides: {side} pixels" if image_size(side) == size else "as you set it",
        ),
        chosen,
        Choice("train-id", "0 epochs", "the network is already trained")
        if told["train_id.epochs"] == 0
        else Choice(
            "train-id",
            f"{told['train_id.epochs']} epochs, batch {batches['train_id']}",
            f"{n_train:,} images, {'a GPU' if has_gpu else 'no GPU'}",
        ),
        Choice(
            "train-ood",
            f"{told['train_ood.epochs']} epochs, batch {batches['train_ood']} + {batches['train_ood']}",
            f"augmentation: {told['train_ood.augment']}",
        ),
    ]
    warnings = []
    if n_calibration < FEW_FOR_A_THRESHOLD:
        warnings.append(
            f"only {n_calibration} calibration images set the filter's threshold, so the share of ID images that it "
            "takes for outliers is uncertain; more labeled images help most"
        )
    return Plan(data, values, choices, warnings, notes=[])


def _network_values(network: CustomNetwork) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model.backbone": network.backbone,
        "model.head": network.head,
        "model.code": network.code,
        "train_id.weights": network.weights,
    }
    if network.is_trained:
        values |= {"train_id.epochs": 0, "train_ood.lr": 0.001}  # small steps keep what it has learned
    elif network.weights:
        values["train_id.lr"] = 0.01  # with the default, the first steps would destroy what it has learned
    given = {"model.mean": network.mean, "model.std": network.std}
    return values | {key: value for key, value in given.items() if value is not None}


def _split(source: Source) -> tuple[dict[str, float | str], int, int]:
    """Shares of the ID data, and how many images they give to training and calibration."""
    assert source.labels is not None
    is_official = source.is_test is not None and bool(source.is_test.any())
    dealt = source.labels[~source.is_test] if source.is_test is not None and is_official else source.labels
    calibration = 0.1 if len(dealt) >= MANY else 0.2
    test: float | str = OFFICIAL if is_official else 0.2
    train = round(1 - calibration - (0 if is_official else 0.2), 2)
    shares = {"train": train, "calibration": calibration, "wild": 0, "test": test}
    check_enough(source.class_names, dealt, shares)
    split = split_id(source.labels, shares, 0, source.is_test, class_names=source.class_names)
    return shares, len(split.train), len(split.calibration)


def check_enough(names: tuple[str, ...], labels: np.ndarray, shares: dict[str, float | str]) -> None:
    """Every class must have an image for each part. Names all classes that are too small at once."""
    cuts = np.cumsum([float(share) for share in shares.values() if share not in (0, OFFICIAL)])[:-1]
    counts = Counter(labels.tolist())

    def is_enough(n: int) -> bool:
        return bool((np.diff([0, *np.rint(cuts * n), n]) >= 1).all())

    needed = next(n for n in range(1, 1000) if all(is_enough(more) for more in range(n, n + 20)))
    short = [f"{name} has {counts[k]}" for k, name in enumerate(names) if not is_enough(counts[k])]
    if short:
        more = f" and {len(short) - 5} more" if len(short) > 5 else ""
        raise DataError(
            f"every class needs at least {needed} readable images, some each for training, calibration and test; "
            f"{', '.join(short[:5])}{more}; add images, or leave the class out"
        )


def _shown_shares(shares: dict[str, float | str]) -> str:
    test = shares["test"]
    rest = "test as given" if test == OFFICIAL else f"test {float(test):.0%}"
    return f"train {float(shares['train']):.0%}, calibration {float(shares['calibration']):.0%}, {rest}"


def _why_split(shares: dict[str, float | str], n_train: int, n_calibration: int) -> str:
    return f"{n_train:,} and {n_calibration:,} images{'' if shares['test'] == OFFICIAL else '; the test is held out'}"


def _notes(data: CustomData, network: CustomNetwork | None, values: Mapping[str, Any]) -> list[str]:
    notes = []
    if not all(one.look.was_decoded and one.look.n_looked_at >= len(one.source) for one in data.sets):
        notes.append("not every file was read to its end; `prepare` names and leaves out any further bad ones")
    if network is not None and network.is_trained and "model.mean" not in values:
        notes.append(
            "the network's input is normalised with mean and std of your training images, which is a guess: give what "
            "it was trained with (--mean, --std), or --mean 0 --std 1 if it normalises by itself"
        )
    return notes


def _count(assigned: Mapping[str, Any], key: str) -> int | None:
    value = assigned.get(key)
    if value is not None and not (isinstance(value, int) and value > 0):
        raise ParamsError(f"--set {key}={value}: must be a whole number of at least 1")
    return value
