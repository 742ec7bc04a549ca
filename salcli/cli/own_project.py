"""`salcli init` with images of one's own: look, plan, and say both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salcli.errors import ParamsError

if TYPE_CHECKING:
    from salcli.planning.training_plan import OwnNetwork
    from salcli.presets import Preset

TITLE = "a detector for outliers among images of one's own"
MADE_BY = "salcli init --id … --wild …"


def own_values(
    folder: Path,
    preset: Preset,
    assigned: dict[str, Any],
    id_place: Path,
    wild_place: Path,
    test_places: list[Path],
    network: dict[str, Any],
) -> dict[str, Any]:
    """Values for params.yaml; prints what was found and planned. `assigned` are the user's own, which count."""
    from salcli.compute.devices import resolve_device
    from salcli.params import validated
    from salcli.params_file import with_overrides
    from salcli.planning.own_data import look_at_data
    from salcli.planning.own_network import examine
    from salcli.planning.places import as_written
    from salcli.planning.training_plan import image_size, n_channels, plan
    from salcli.presets.estimate import SetSize, estimated_images
    from salcli.reporting.console import console
    from salcli.reporting.plan_table import plan_notes, plan_table
    from salcli.reporting.progress import ConsoleProgress

    data = look_at_data(folder, id_place, wild_place, test_places, ConsoleProgress())
    places = {own.name: as_written(own.place, folder) for own in data.sets}
    size = _count(assigned, "data.image_size") or image_size(data.id.look.median_side)
    channels = _count(assigned, "data.channels") or n_channels(data)
    if channels not in (1, 3):
        raise ParamsError(f"--set data.channels={channels}: images have 1 channel (gray) or 3 (colour)")
    own_network: OwnNetwork | None = None
    if network["backbone"]:
        # what takes gray images in three channels is no worse for it
        tried = [1, 3] if channels == 1 and "data.channels" not in assigned else [channels]
        own_network, channels = examine(
            folder=folder,
            n_classes=len(data.id.source.class_names),
            size=size,
            channels=tried,
            # a function may return a network that is trained already
            is_trained=assigned.get("train_id.epochs") == 0,
            **network,
        )
    has_gpu = resolve_device(str(assigned.get("device", "auto"))).type != "cpu"
    planned = plan(data, size, channels, assigned, has_gpu=has_gpu, network=own_network)
    values = {"data.own": places, **planned.values, **assigned}
    params = with_overrides(preset.params, values)
    validated(params, "params.yaml with what you set")
    sizes = {own.name: SetSize(data.n_used(own), _n_test(own.source.is_test)) for own in data.sets}
    n_images = estimated_images(params, sizes)
    console.print(plan_table(data, planned, n_images))
    is_trained, normalised = own_network is not None and own_network.is_trained, "model.mean" in values
    for note in plan_notes(data, planned, is_trained=is_trained, normalised=normalised):
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    for key in sorted(assigned.keys() & planned.values.keys()):
        console.print(f"note: {key} is {assigned[key]}, as you set it", style="dim", highlight=False, markup=False)
    for warning in planned.warnings:
        console.print(f"warning: {warning}", style="bold yellow", highlight=False, markup=False)
    return values


def own_preset(preset: Preset) -> Preset:
    """The same params, under the title of what they are for here."""
    return replace(preset, title=TITLE)


def _count(assigned: dict[str, Any], key: str) -> int | None:
    value = assigned.get(key)
    if value is not None and not (isinstance(value, int) and value > 0):
        raise ParamsError(f"--set {key}={value}: must be a whole number of at least 1")
    return value


def _n_test(is_test: Any) -> int:
    return 0 if is_test is None else int(is_test.sum())


def numbers(option: str, text: str | None) -> list[float] | None:
    """Of `0.5` or `0.485,0.456,0.406`."""
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ParamsError(f"{option} {text}: must be a number, or one for each channel with commas between") from None
    if max(values) > 1:
        on_scale = ",".join(f"{value / 255:.3g}" for value in values)
        raise ParamsError(f"{option} {text}: pixels go from 0 to 1 (did you mean {on_scale}?)")
    return values
