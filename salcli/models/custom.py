"""Networks that salcli did not write: custom code named as MODULE:NAME, and timm's.

Custom code is imported only if params.yaml names it or the user allows it, and fingerprinted without running it, so
that DVC notices a change. A network's features are taken as the input of its last linear layer, found by a trial run.
"""

import ast
import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from salcli.errors import ModelError, did_you_mean
from salcli.models.backbones import Backbone, Features, Images, import_path, timm_name

PACKAGE = Path(__file__).parent.parent
STANDARD_LIBRARY = Path(ast.__file__).parent
ANY_CLASSES = 1000  # of a head that is not used

# --- importing custom code


def check_may_import(path: str, where: str, *, allowed: bool) -> None:
    """Refuse to run code that a file merely names. What is not MODULE:NAME is never imported, and passes."""
    if import_path(path) and not allowed:
        raise ModelError(
            f"{where} uses custom code: to load it, {path} would be imported, which runs its code; "
            "allow that with --allow-import (in Python: allow_import=True) if you trust it"
        )


def make_importable(folder: Path) -> None:
    """Put a folder at the front of sys.path."""
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)


def import_object(path: str, what: str) -> Any:
    """The object that MODULE:NAME names. This runs the module. `what` ("network") names the object in messages."""
    parts = import_path(path)
    if parts is None:
        raise ModelError(f"the custom {what} {path} must be written as MODULE:NAME, for example my_code.parts:make")
    module, name = parts
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # custom code may raise anything
        raise ModelError(
            f"the custom {what} {path} cannot be imported: {describe_failure(error)}; {_fix(module, error)}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = ", ".join(public for public in vars(found) if not public.startswith("_"))
            raise ModelError(f"the custom {what} {path}: {module} has no {name}; it has {names or 'nothing'}")
        found = getattr(found, part)
    return found


def describe_failure(error: BaseException) -> str:
    """An error from custom code, with the last line of that code that led to it."""
    text = f"{type(error).__name__}: {error}"
    for frame in reversed(extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        is_library = "site-packages" in file.parts or any(map(file.is_relative_to, (PACKAGE, STANDARD_LIBRARY)))
        if file.is_file() and not is_library:
            return f"{text} ({file.name}, line {frame.lineno})"
    return text


def _fix(module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]:
        meant = did_you_mean(module, ("torchvision", "timm"))
        where = f"start salcli in the folder of {error.name}, set model.code to that folder"
        return f"{where}, or install {error.name}{meant}"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return "check the module's name"
    return "fix that first"


# --- fingerprints of custom code


def code_fingerprint(path: str, folder: Path) -> str:
    """Hash of the source of MODULE:NAME, of the packages around it and of all modules beside it that it imports.

    "" for what is not MODULE:NAME.

    The code is read, not run. Modules are looked up in `folder` first, then where they are installed.
    """
    parts = import_path(path)
    if parts is None:
        return ""
    top = parts[0].split(".")[0]
    base = folder if _holds(folder, top) else _installed_in(top)
    found: dict[str, Path] = {}
    waiting = [parts[0]]
    while base and waiting:
        name = waiting.pop()
        file = _source(base, name)
        if file and name not in found:
            found[name] = file
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += [name.rpartition(".")[0], *_imports(file, package)]
    digest = hashlib.sha256()
    for name, file in sorted(found.items()):
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def folder_of(module: str, folders: Sequence[Path]) -> Path | None:
    """The first of the folders that holds a module."""
    return next((folder for folder in folders if _holds(folder, module.split(".")[0])), None)


def _holds(folder: Path, top: str) -> bool:
    return _source(folder, top) is not None or (folder / top).is_dir()  # a package needs no __init__.py


def _source(base: Path, module: str) -> Path | None:
    *packages, last = module.split(".")
    parent = base.joinpath(*packages)
    choices = (parent / f"{last}.py", parent / last / "__init__.py")
    return next((file for file in choices if last and file.is_file()), None)


def _installed_in(top: str) -> Path | None:
    """The folder of an installed module; built-in modules have none. Finding a top-level name runs no code."""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    origin = Path(spec.origin)
    return origin.parent.parent if origin.name == "__init__.py" else origin.parent


def _imports(file: Path, package: str) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it; some of them are not modules."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # importing it will say so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


# --- networks as backbones


class HookedBackbone(Backbone):
    """A network MODULE:NAME or timm:NAME whose head is replaced by a layer that records its input: the features."""

    weights_prefix = "body."
    memory_format = torch.contiguous_format  # custom code may rely on it, in a view() for example

    def __init__(
        self, name: str, in_channels: int, n_classes: int | None, head_name: str | None, body: nn.Module | None = None
    ) -> None:
        """`body`: the whole network, if it is built already. It is changed."""
        super().__init__()
        if head_name is None:
            raise ModelError(f"it is not known which layer of {name} is its head; set model.head")
        self.name = name
        self.body = build_network(name, in_channels, n_classes) if body is None else body
        head = _linear_named(name, self.body, head_name)
        self.given_head = [head]  # in a list, so that it is no part of this module
        self.n_features, self.n_given_classes = head.in_features, head.out_features
        self.head_names, self.head_has_bias = (head_name, *Backbone.head_names), head.bias is not None
        self.body.set_submodule(head_name, _Recorder(head.out_features))

    def new_head(self, n_classes: int) -> nn.Linear:
        """A copy of the network's own head if that has as many classes, since it may be trained."""
        head, given = super().new_head(n_classes), self.given_head.pop()
        if given.out_features == n_classes:
            with torch.no_grad():
                head.weight.copy_(given.weight)
                head.bias.copy_(torch.zeros(n_classes) if given.bias is None else given.bias)
        return head

    def forward(self, images: Images) -> Features:
        # asked for each time: torch.export leaves copies of lists behind, so a shared one would not stay shared
        recorder: Any = self.body.get_submodule(self.head_names[0])
        recorder.seen.clear()
        self.body(images.contiguous(memory_format=self.memory_format))
        if len(recorder.seen) != 1 or recorder.seen[0].ndim != 2:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in recorder.seen) or "nothing"
            raise ModelError(
                f"{self.head_names[0]}, the head of {self.name}, was given {shapes} for {len(images)} images, "
                f"not one vector of {self.n_features} for each; name another layer in model.head"
            )
        features: Tensor = recorder.seen.pop()
        return features


class _Recorder(nn.Module):
    """Records its input and returns zeros of the head's shape to whatever comes after it."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.n_outputs = n_outputs

    def forward(self, features: Tensor) -> Tensor:
        self.seen.append(features)
        return features.new_zeros(*features.shape[:-1], self.n_outputs)


def build_network(name: str, in_channels: int, n_classes: int | None) -> nn.Module:
    """The whole network MODULE:NAME or timm:NAME, with its head; without `n_classes`, the head is for any number."""
    if (model := timm_name(name)) is not None:
        options = {"in_chans": in_channels, "num_classes": n_classes or ANY_CLASSES}
        built: nn.Module = timm_with(model).create_model(model, pretrained=False, **options)
        return built
    make = import_object(name, "network")
    if isinstance(make, nn.Module) or not callable(make):
        raise ModelError(f"{name} is of type {type(make).__name__}; name a class, or a function that returns a network")
    try:
        taken = inspect.signature(make).parameters.get("num_classes")
    except (TypeError, ValueError):
        taken = None
    # a default may be what the network's own weights need: only a given number replaces it
    is_asked = taken is not None and (n_classes is not None or taken.default is taken.empty)
    options = {"num_classes": n_classes or ANY_CLASSES} if is_asked else {}
    try:
        network = make(**options)
    except (Exception, SystemExit) as error:  # custom code may raise anything
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ModelError(
            f"{name}({shown}) fails: {describe_failure(error)}; it is called with num_classes if it takes that, "
            "else without arguments"
        ) from error
    if not isinstance(network, nn.Module):
        raise ModelError(f"{name} returns an object of type {type(network).__name__}, not a torch.nn.Module")
    if any(isinstance(value, nn.UninitializedParameter) for value in network.parameters()):
        raise ModelError(f"{name} has lazy layers, whose sizes are not known before they see data; give them sizes")
    return network


def timm_with(model: str) -> ModuleType:
    """The package timm, if it is installed and has that model."""
    try:
        import timm  # optional, and slow to import
    except ImportError as error:
        raise ModelError(
            f"timm:{model} needs the package timm ({error}); install it: pip install 'salcli[timm]'"
        ) from None
    if not timm.is_model(model):
        nearest = did_you_mean(model, timm.list_models())
        raise ModelError(f"timm has no model {model}{nearest}; all of them: timm.list_models()")
    name, _, tag = model.partition(".")  # resnet18.a1_in1k
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{name}.*")]
    if tag and tag not in tags:
        raise ModelError(f"timm:{name} has no weights {tag}; it has {', '.join(tags) or 'none'}")
    found: ModuleType = timm
    return found


# --- finding the head

N_IMAGES = 2  # of the trial run


def find_head(
    name: str, head: str | None, n_classes: int | None, shape: tuple[int, int, int], network: nn.Module | None = None
) -> str:
    """The name of the linear layer whose output is the network's, found by a trial run on random images (C, H, W).

    Of a head that is given, only the name is checked. `network`: if it is built already.
    """
    network = (build_network(name, shape[0], n_classes) if network is None else network).eval()
    if head is not None:
        _linear_named(name, network, head)
    linears = _linears(network)
    paths: dict[nn.Module, str] = {layer: path for path, layer in linears.items()}
    calls: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}  # of each linear layer: shape of the input, output

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        if layer in paths:
            calls.setdefault(paths[layer], []).append((tuple(inputs[0].shape), output.clone()))

    images = torch.randn(N_IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    try:
        with register_module_forward_hook(record), torch.inference_mode():
            output = _first_tensor(network(images))
    except (Exception, SystemExit) as error:  # custom code may raise anything
        raise ModelError(
            f"{name} cannot take images of {shape[0]} × {shape[1]} × {shape[2]} (channels, height, width): "
            f"{describe_failure(error)}; set data.image_size and data.channels to what it takes"
        ) from error
    if head is not None:
        return head
    # a head is called once, with one vector for each image
    once = {path: seen[0] for path, seen in calls.items() if len(seen) == 1}
    usable = {path: logits for path, (size, logits) in once.items() if len(size) == 2 and size[0] == N_IMAGES}
    # the same values, else the same shape: a softmax may follow the head
    as_wide = [path for path, logits in usable.items() if output is not None and logits.shape == output.shape]
    same = [path for path in as_wide if output is not None and torch.equal(usable[path], output)]
    for found in (same, as_wide):
        if len(found) == 1:
            if not found[0]:
                raise ModelError(f"{name} is a single linear layer; wrap it in a module")
            return found[0]
    if not linears:
        raise ModelError(f"{name} has no linear head: {_listed(linears)}")
    raise ModelError(
        f"{name}: {'several layers could be' if as_wide else 'no layer is clearly'} its head, the last linear "
        f"layer; name it with --head or in model.head; {_listed(linears)}"
    )


def _first_tensor(output: Any) -> Tensor | None:
    """Networks return a tensor, a tuple that begins with it, or a mapping with `logits`."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output:
        return _first_tensor(output.get("logits", next(iter(output.values()))))
    if isinstance(output, list | tuple) and output:
        return _first_tensor(output[0])
    return None


def _linears(network: nn.Module) -> dict[str, nn.Linear]:
    return {path: layer for path, layer in network.named_modules() if isinstance(layer, nn.Linear)}


def _linear_named(name: str, network: nn.Module, head_name: str) -> nn.Linear:
    linears = _linears(network)
    if head_name not in linears:
        reason = "is not a linear layer of" if head_name in dict(network.named_modules()) else "is not in"
        raise ModelError(f"{head_name} {reason} {name}; {_listed(linears)}")
    return linears[head_name]


def _listed(linears: dict[str, nn.Linear]) -> str:
    """For messages: the linear layers of a network, the last first."""
    if not linears:
        return "it has no nn.Linear at all, whose gradients SAL needs"
    shown = [f"{path or '(itself)'} ({one.in_features} → {one.out_features})" for path, one in linears.items()][::-1]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"its linear layers are: {', '.join(shown[:8])}{more}"
