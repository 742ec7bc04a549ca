"""Plan a project for custom data: settings that fit data, network and machine, by simple rules."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from salcli.data.sets import some_of
from salcli.data.splits import OFFICIAL, split_id
from salcli.data.vectors import ANY, Columns
from salcli.errors import SalError
from salcli.methods.base import LBFGS, SGD, InputScore, PostHoc, Trained, built_in
from salcli.models.backbones import takes_vectors
from salcli.params.presets import Preset, resolved
from salcli.params.schema import validated
from salcli.progress import Progress
from salcli.project.cost import shown_time
from salcli.project.custom_data import CustomData, look_at_data
from salcli.project.network_choice import SMALL, Bench, Network, NetworkOptions, as_written, image_size

MANY = 1_000  # ID images, from which on a tenth is enough for calibration
ENOUGH_FOR_A_THRESHOLD = 500  # calibration samples, where linear heads need few samples for training
FEWEST_WILD, ENOUGH_TO_HOLD_OUT = 4, 20  # samples
FEW_FOR_A_THRESHOLD = 100  # calibration samples: with fewer, ERR_in is often off by more than four points
GPU_EPOCHS = 100
# without a GPU: images through the network in all epochs, and the fewest and the most epochs
CPU_IMAGES = {"small": (600_000, 5, 50), "middle": (200_000, 3, 30), "large": (20_000, 2, 15)}
FINE_TUNING_EPOCHS = {True: 15, False: 4}  # with a GPU, without; more where an epoch has few steps
FEWEST_STEPS = 100
# Heads are fitted in full; rivals, if any, take small steps from there.
LINEAR_VALUES = {
    "train_id.solver": LBFGS,
    "train_ood.solver": LBFGS,
    "train_id.augment": "none",
    "train_ood.augment": "none",
    "train_ood.epochs": 10,
    "train_ood.lr": 0.001,
}


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


def plan_project(
    folder: Path,
    preset: Preset,
    assigned: dict[str, Any],
    id_path: Path,
    wild_paths: Sequence[Path],
    test_paths: Sequence[Path],
    calibration_path: Path | None,
    columns: Columns,
    options: NetworkOptions,
    progress: Progress,
) -> Plan:
    """Look at the data, try the network, and plan. What the user has `assigned` overrides the plan. Writes nothing."""
    data = look_at_data(folder, id_path, wild_paths, test_paths, calibration_path, columns, progress)
    if columns != ANY and not data.is_vectors:
        raise SalError(f"--vector, --label, --row-id and --show name columns of vectors; {data.id.where} holds images")
    paths = {one.name: _as_written(one.paths, folder) for one in data.sets}
    bench = Bench(data, folder, assigned, options)
    network, has_gpu = bench.network(), bench.has_gpu
    shares, n_train, n_calibration = _split(data, is_linear=network.is_linear)
    planned = _values(data, network, shares, n_train, has_gpu=has_gpu)
    values = {"data.custom": paths, **_column_values(columns), **planned, **assigned}
    params = resolved(preset, values)
    validated(params, "params.yaml with what you set", folder)
    seconds, measured = bench.seconds(params, network)
    choices = [
        _split_choice(data, shares, n_train, n_calibration),
        *_input_choices(data, network),
        *_training_choices(values, network, n_train, data.kind, has_gpu=has_gpu),
        Choice("time", shown_time(seconds), f"all stages together; measured here: {measured}"),
    ]
    overruled = sorted(assigned.keys() & planned.keys())
    notes = [*_notes(data, network, values), *(f"{key} is {assigned[key]}, as you set it" for key in overruled)]
    return Plan(data, values, choices, _warnings(data, n_calibration), notes)


def _as_written(paths: Sequence[Path], project: Path) -> str | list[str]:
    written = [as_written(path, project) for path in paths]
    return written[0] if len(written) == 1 else written


def _column_values(columns: Columns) -> dict[str, Any]:
    vector = list(columns.vector) if isinstance(columns.vector, tuple) else columns.vector
    given = {"vector": vector, "label": columns.label, "id": columns.row_id, "show": list(columns.show)}
    return {f"data.columns.{key}": value for key, value in given.items() if value}


# --- values


def _split(data: CustomData, *, is_linear: bool) -> tuple[dict[str, float | str], int, int]:
    """Shares of the ID data, and how many samples there are for training and calibration.

    A calibration set leaves the ID data to training and test.
    """
    source = data.without_copies(data.id)
    assert source.labels is not None
    dealt = source.labels if source.is_test is None else source.labels[~source.is_test]
    is_official = len(dealt) < len(source)
    if data.calibration is not None:
        calibration = 0.0
    elif is_linear:  # a linear head needs few samples, and a good threshold needs many
        calibration = round(min(0.3, max(0.1, ENOUGH_FOR_A_THRESHOLD / len(dealt))), 2)
    else:
        calibration = 0.1 if len(dealt) >= MANY else 0.2
    test: float | str = OFFICIAL if is_official else 0.2
    train = round(1 - calibration - (0 if is_official else 0.2), 2)
    shares = {"train": train, "calibration": calibration, "wild": 0, "test": test}
    _check_enough(source.class_names, dealt, shares, source.kind)
    split = split_id(source.labels, shares, 0, source.is_test, class_names=source.class_names)
    n_calibration = len(data.without_copies(data.calibration)) if data.calibration else len(split.calibration)
    return shares, len(split.train), n_calibration


def _check_enough(names: Sequence[str], labels: np.ndarray, shares: Mapping[str, float | str], kind: str) -> None:
    """Every class must have a sample for each part. Names all classes that are too small at once."""
    cuts = np.cumsum([float(share) for share in shares.values() if share not in (0, OFFICIAL)])[:-1]
    counts = Counter(labels.tolist())

    def is_enough(n: int) -> bool:
        return bool((np.diff([0, *np.rint(cuts * n), n]) >= 1).all())

    needed = next(n for n in range(1, 1000) if all(is_enough(more) for more in range(n, n + 20)))
    short = [f"{name} has {counts[k]}" for k, name in enumerate(names) if not is_enough(counts[k])]
    if short:
        more = f" and {len(short) - 5} more" if len(short) > 5 else ""
        readable = f"readable {kind}" if kind == "images" else kind
        raise SalError(
            f"every class needs at least {needed} {readable}, some each for training, calibration and test; "
            f"{', '.join(short[:5])}{more}; add {kind} (equal ones count once), or leave the class out"
        )


def _values(
    data: CustomData, network: Network, shares: Mapping[str, float | str], n_train: int, *, has_gpu: bool
) -> dict[str, Any]:
    """Of params.yaml, by dotted key."""
    batch, n_wild = 32 if n_train < 2_000 else 128, len(data.without_copies(data.wild))
    if n_wild < FEWEST_WILD:
        raise SalError(
            f"{data.wild.name} has {n_wild} {data.kind} that are not labeled data; wild data are a mixture of at least "
            f"{FEWEST_WILD}, better of hundreds"
        )
    of_network = {key: getattr(network, key) for key in ("head", "weights", "mean", "std")}
    of_network |= {"code": None if network.code == "." else network.code, "frozen": True if network.embedder else None}
    return {
        "seeds": [0],
        "variants": ["sal"],
        "rivals": [],
        "data.id": data.id.name,
        "data.ood": [data.wild.name],
        "data.test_ood": [one.name for one in data.tests],
        **({} if data.calibration is None else {"data.calibration": data.calibration.name}),
        "data.image_size": network.image_size,
        "data.channels": network.channels,
        **({} if data.is_vectors else {"data.on_bad_image": "skip"}),
        "data.pi": ["unknown"],
        "data.wild_holdout": 0.2 if n_wild >= ENOUGH_TO_HOLD_OUT else 0,
        "detector.method": "auto",
        **{f"data.id_shares.{part}": share for part, share in shares.items()},
        "model.backbone": network.backbone,
        **{f"model.{key}": value for key, value in of_network.items() if value is not None},
        "train_id.batch_size": batch,
        "train_ood.batch_size": batch,
        "methods.knn.k": max(1, min(50, n_train // 2)),
        **(LINEAR_VALUES if network.is_linear else _training_values(network, n_train, batch, has_gpu=has_gpu)),
    }


def _training_values(network: Network, n_train: int, batch: int, *, has_gpu: bool) -> dict[str, Any]:
    n_images, fewest, most = CPU_IMAGES[network.kind]
    usual = GPU_EPOCHS if has_gpu else min(most, max(fewest, n_images // n_train))
    is_fine_tuned = network.starts_trained and not network.is_trained
    few = max(FINE_TUNING_EPOCHS[has_gpu], math.ceil(FEWEST_STEPS / max(1, n_train // batch)))
    epochs = min(usual, few) if is_fine_tuned else usual
    augment = "flip-crop" if (network.image_size or 0) >= SMALL and network.channels == 3 else "none"
    values: dict[str, Any] = {
        "train_id.solver": SGD,
        "train_ood.solver": SGD,
        "train_id.epochs": 0 if network.is_trained else epochs,
        "train_id.augment": augment,
        "train_ood.epochs": max(2, round(epochs * 2 / 3)),
        "train_ood.augment": augment,
    }
    if network.starts_trained:
        values |= {"train_id.lr": 0.01, "train_ood.lr": 0.001}  # small steps keep what it has learned
    elif takes_vectors(network.backbone) or network.kind != "small":
        values["train_id.lr"] = 0.1 * batch / 128
    if network.kind == "large":
        values |= {"extract_grads.batch_size": 64, "evaluate.batch_size": 64}
    return values


# --- what the user is told


def _split_choice(data: CustomData, shares: Mapping[str, float | str], n_train: int, n_calibration: int) -> Choice:
    calibration = data.calibration.name if data.calibration else f"{float(shares['calibration']):.0%}"
    why = f"{n_train:,} and {n_calibration:,} {data.kind}"
    if shares["test"] == OFFICIAL:
        test = "as given"
    else:
        test, why = f"{float(shares['test']):.0%}", f"{why}; the test is held out"
    return Choice("split", f"train {float(shares['train']):.0%}, calibration {calibration}, test {test}", why)


def _input_choices(data: CustomData, network: Network) -> list[Choice]:
    """What the samples are, which columns of their files hold what, and the network that takes them."""
    if data.is_vectors:
        what, shown = "vectors", f"{data.id.n_dimensions:,} dimensions"
        why = "standardized with the ID training data's mean and std"
    elif network.embedder is not None:
        expected = network.embedder.spec.preprocessing
        what, shown = "images", f"shorter side to {expected.resize}, then {expected.crop} × {expected.crop}"
        why = f"{'as you set it' if network.image_size else 'what its weights were trained with'}; embedded once"
    else:
        assert data.id.look is not None
        size, channels, side = network.image_size or 0, network.channels or 0, data.id.look.median_side
        what, shown = "images", f"{size} × {size}, {channels} channel{'s' * (channels > 1)}"
        if network.expected and size == network.expected.crop:
            why = f"what {'its weights were trained with' if network.starts_trained else 'it says that it takes'}"
        elif size == image_size(side):
            why = f"median of the shorter sides: {side} pixels"
        else:
            why = "as you set it"
    labeled, wild = data.id.source.columns, data.wild.source.columns
    columns = [Choice("columns", labeled, f"{data.wild.name}: {wild}" if wild else "")] if labeled else []
    named = f"{network.backbone}{', frozen' if network.embedder else ''}"
    head = f", head {network.head}" if network.head else ""
    return [Choice(what, shown, why), *columns, Choice("network", f"{named}{head}", network.why)]


def _training_choices(
    told: Mapping[str, Any], network: Network, n_train: int, kind: str, *, has_gpu: bool
) -> list[Choice]:
    lines = []
    for section, extra in (("train_id", ""), ("train_ood", " + {}")):
        stage = section.replace("_", "-")
        batch = told[f"{section}.batch_size"]
        if told[f"{section}.solver"] == LBFGS:
            why = f"{n_train:,} {kind}; the penalty is chosen on held-out ones" if not extra else "the same"
            lines.append(Choice(stage, "a linear head, fitted in full", why))
        elif told[f"{section}.epochs"] == 0:
            lines.append(Choice(stage, "0 epochs", "the network is already trained"))
        else:
            chosen = f"{told[f'{section}.epochs']} epochs, batch {batch}{extra.format(batch)}"
            why = f"{n_train:,} {kind}, {'a GPU' if has_gpu else 'no GPU'}"
            lines.append(Choice(stage, chosen, f"augmentation: {told[f'{section}.augment']}" if extra else why))
    if network.is_linear or takes_vectors(network.backbone):
        of_images = [name for name, found in built_in(Trained).items() if getattr(found, "needs_images", False)]
        n_scores = len(built_in(PostHoc)) + len(built_in(InputScore))
        shown = f"SAL, {n_scores} post-hoc scores"
        lines.append(Choice("methods", shown, f"left out, because they train on images: {', '.join(of_images)}"))
    return lines


def _warnings(data: CustomData, n_calibration: int) -> list[str]:
    warnings = []
    if n_calibration < FEW_FOR_A_THRESHOLD:
        warnings.append(
            f"only {n_calibration} calibration {data.kind} set the filter's threshold, so the share of ID {data.kind} "
            f"that it takes for outliers is uncertain; more labeled {data.kind} help most"
        )
    if data.calibration is not None:
        there = data.calibration.source.class_names
        missing = [name for name in data.id.source.class_names if name not in there]
        if missing:
            warnings.append(
                f"{data.calibration.name} has no {data.kind} of {some_of(missing)}: ID {data.kind} of these classes "
                "may be taken for outliers"
            )
    return warnings


def _notes(data: CustomData, network: Network, values: Mapping[str, Any]) -> list[str]:
    notes = [*network.notes]
    looked_at = [(one.look, len(one.source)) for one in data.sets if one.look is not None]
    if any(not seen.was_decoded or seen.n_looked_at < n for seen, n in looked_at):
        notes.append("not every file was read to its end; `prepare` names and leaves out any further bad ones")
    is_told = {"model.mean", "model.std"} <= values.keys()
    if network.starts_trained and network.expected is None and not network.embedder and not is_told:
        notes.append(
            "it is not known what its weights were trained with, so the input is a guess: images of "
            f"{network.image_size} pixels, normalized with mean and std of your training images; give what they expect "
            "(--image-size, --mean, --std; --mean 0 --std 1 if the network normalizes by itself)"
        )
    if data.is_vectors:
        array = data.id.source.array
        assert array is not None
        n_constant = int((array.max(axis=0) == array.min(axis=0)).sum())
        if n_constant:
            notes.append(
                f"{n_constant:,} of {array.shape[1]:,} dimensions are constant in the ID data, and tell nothing"
            )
    return notes
