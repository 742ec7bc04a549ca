"""Which backbones can be asked for. Free of torch, so that params.yaml is checked before anything heavy loads."""

from __future__ import annotations

import re

from salcli.errors import ModelError, UnknownNameError, unknown_name

TORCHVISION = "torchvision:"
TIMM = "timm:"
IMPORT_PATH = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
FIXED_NAMES = ("mlp", "resnet18", "resnet34", "small-cnn")
# the paper's own first: the nearest of these is what an error suggests
EXAMPLES = ("wrn-40-2", "wrn-28-10", "wrn-16-4", "torchvision:resnet50")


def check_backbone_name(name: str) -> str:
    """The name itself, where it can be built. Which models torchvision has is only known once they are built."""
    known = name in FIXED_NAMES or wide_resnet_size(name) is not None or torchvision_name(name) is not None
    if not known and not is_hooked(name):
        error = unknown_name("backbone", name, [*FIXED_NAMES, *EXAMPLES])
        raise UnknownNameError(f"{error}, any other wrn-DEPTH-WIDTH, torchvision:NAME, timm:NAME, MODULE:NAME")
    return name


def is_hooked(name: str) -> bool:
    """Whether it is a network that somebody else wrote, whose features are taken with a hook."""
    return timm_name(name) is not None or import_path(name) is not None


def import_path(name: str) -> tuple[str, str] | None:
    """MODULE and NAME of MODULE:NAME, a network of the user's own, or None where the name has another form."""
    matched = IMPORT_PATH.fullmatch(name)
    if not matched or name.startswith((TORCHVISION, TIMM)):
        return None
    return matched["module"], matched["name"]


def timm_name(name: str) -> str | None:
    """NAME of timm:NAME, or None where the name has another form."""
    return _after(TIMM, name, "timm:resnet18")


def wide_resnet_size(name: str) -> tuple[int, int] | None:
    """Depth and width of wrn-DEPTH-WIDTH, or None where the name has another form."""
    matched = re.fullmatch(r"wrn-([0-9]{1,6})-([0-9]{1,6})", name)
    if not matched:
        return None
    depth, width = int(matched[1]), int(matched[2])
    check_wide_resnet_size(depth, width)
    return depth, width


def check_wide_resnet_size(depth: int, width: int) -> None:
    """Three groups of n blocks with two convolutions each, and four layers around them: 6n + 4."""
    if depth < 10 or depth % 6 != 4:
        raise ModelError(
            f"a wide ResNet's depth must be 6n + 4 with n of at least 1, got {depth}; "
            f"use wrn-{_nearest_depth(depth)}-{max(width, 1)}"
        )
    if width < 1:
        raise ModelError(f"a wide ResNet's width must be at least 1, got {width}; use wrn-{depth}-1 or a wider one")


def _nearest_depth(depth: int) -> int:
    return 6 * max(1, round((depth - 4) / 6)) + 4


def torchvision_name(name: str) -> str | None:
    """NAME of torchvision:NAME, or None where the name has another form."""
    return _after(TORCHVISION, name, "torchvision:resnet50")


def _after(prefix: str, name: str, example: str) -> str | None:
    if not name.startswith(prefix):
        return None
    model = name.removeprefix(prefix)
    if not model:
        raise ModelError(f"{prefix} must be followed by a model's name, for example {example}")
    return model
