"""A network of the user's own, tried before anything is written: is it there, does it take the images and weights?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from salcli.errors import ModelError, ParamsError
from salcli.models.backbone_names import check_backbone_name, import_path, is_hooked
from salcli.models.head_search import head_of
from salcli.models.network import Classifier, NetworkSpec, check_own_head
from salcli.models.own_code import described, folder_of, make_importable
from salcli.models.weights import load_weights
from salcli.planning.places import as_written
from salcli.planning.training_plan import OwnNetwork

if TYPE_CHECKING:
    from collections.abc import Sequence


def examine(
    backbone: str,
    folder: Path,
    n_classes: int,
    size: int,
    channels: Sequence[int],
    *,
    head: str | None = None,
    weights: Path | None = None,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    is_trained: bool = False,
) -> tuple[OwnNetwork, int]:
    """What params.yaml has to say of the network, and the first number of `channels` that it takes.

    `is_trained`: the network is to be used as it is, with or without weights from a file.
    """
    check_backbone_name(backbone)
    code = "."
    if (parts := import_path(backbone)) is not None:
        place = folder_of(parts[0], [folder, Path.cwd()]) or folder
        make_importable(place)
        code = as_written(place, folder)
    found, taken = _first_that_works(backbone, head, n_classes, size, channels)
    classifier = Classifier(NetworkSpec(backbone, n_classes, (0.0,) * taken, (1.0,) * taken, head=found))
    if weights:
        is_trained = load_weights(classifier, weights).head_was_loaded or is_trained
    elif is_trained:
        check_own_head(classifier)
    _try(classifier, (taken, size, size))
    return (
        OwnNetwork(
            backbone,
            found,
            code,
            as_written(weights, folder) if weights else None,
            is_trained,
            _of_each_channel("--mean", mean, taken),
            _of_each_channel("--std", std, taken),
        ),
        taken,
    )


def _try(classifier: Classifier, shape: tuple[int, int, int]) -> None:
    """Once as it will be used: with the head apart, on a batch."""
    try:
        with torch.inference_mode():
            classifier.eval()(torch.zeros(2, *shape))
    except (ModelError, ParamsError):
        raise
    except Exception as error:  # it is the user's code: anything may happen in it
        raise ModelError(
            f"{classifier.spec.backbone} does not run without its head {classifier.spec.head}: {described(error)}; "
            "its forward should use that layer as a function alone"
        ) from error


def _first_that_works(
    backbone: str, head: str | None, n_classes: int, size: int, channels: Sequence[int]
) -> tuple[str | None, int]:
    first_error: ModelError | None = None
    for number in channels:
        try:
            return _head(backbone, head, n_classes, (number, size, size)), number
        except ModelError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _head(backbone: str, head: str | None, n_classes: int, shape: tuple[int, int, int]) -> str | None:
    if is_hooked(backbone):
        return head_of(backbone, head, n_classes, shape)
    if head is not None:
        raise ParamsError(f"--head is for networks of your own and of timm; {backbone} needs none")
    classifier = Classifier(NetworkSpec(backbone, n_classes, (0.0,) * shape[0], (1.0,) * shape[0])).eval()
    with torch.inference_mode():
        classifier(torch.zeros(2, *shape))
    return None


def _of_each_channel(option: str, values: list[float] | None, channels: int) -> list[float] | None:
    if values is None:
        return None
    if len(values) not in (1, channels):
        raise ParamsError(
            f"{option} has {len(values)} values, the images have {channels} channels; give as many, or one"
        )
    return values * channels if len(values) == 1 else values
