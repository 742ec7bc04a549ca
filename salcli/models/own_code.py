"""Code of the user's own: imported where params.yaml names it, and fingerprinted, so that DVC notices a change."""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from salcli.errors import ModelError
from salcli.models.backbone_names import import_path

PACKAGE = Path(__file__).parent.parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def make_importable(folder: Path) -> None:
    """Let modules be imported that lie in a folder."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)


def import_object(backbone: str) -> Any:
    """What MODULE:NAME names. This runs the module's code."""
    parts = import_path(backbone)
    assert parts is not None
    module_name, name = parts
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # it is the user's code: anything may happen in it
        raise ModelError(f"{backbone} cannot be imported: {described(error)}; {_cure(module_name, error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = ", ".join(own for own in vars(found) if not own.startswith("_"))
            raise ModelError(f"{backbone}: {module_name} has no {name}; it has {names or 'nothing'}")
        found = getattr(found, part)
    return found


def described(error: Exception | SystemExit) -> str:
    """An error of the user's code, with the last line of that code that led to it."""
    text = f"{type(error).__name__}: {error}"
    own = [frame for frame in extract_tb(error.__traceback__) if _is_own(Path(frame.filename))]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text


def _is_own(file: Path) -> bool:
    not_own = PACKAGE, Path(ast.__file__).parent
    return file.is_file() and "site-packages" not in file.parts and not any(map(file.is_relative_to, not_own))


def _cure(module: str, error: Exception | SystemExit) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]:
        return f"start in the folder that {error.name} lies in, set model.code to it, or install it"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return "is that its name?"
    return "mend that first"


def code_fingerprint(backbone: str, folder: Path) -> str:
    """Of the source of MODULE:NAME and of all modules beside it that it imports; empty for other networks.

    The code is read, not run. Modules are looked for in `folder` first, then where they are installed.
    """
    parts = import_path(backbone)
    if parts is None:
        return ""
    digest = hashlib.sha256()
    for name, path in sorted(_sources(parts[0], folder).items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def folder_of(module: str, folders: Sequence[Path]) -> Path | None:
    """The first of the folders that a module lies in."""
    return next((folder for folder in folders if _has(folder, module.split(".")[0])), None)


def _sources(module: str, folder: Path) -> dict[str, Path]:
    base = folder if _has(folder, module.split(".")[0]) else _installed_in(module.split(".")[0])
    found: dict[str, Path] = {}
    waiting = [module]
    while base and waiting:
        name = waiting.pop()
        path = _path(base, name)
        if path and name not in found:
            found[name] = path
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting += [name.rpartition(".")[0], *_imports(path, package)]
    return found


def _installed_in(top: str) -> Path | None:
    """The folder that an installed module lies in; what is built in has none. A top-level name runs no code."""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    origin = Path(spec.origin)
    return origin.parent.parent if origin.name == "__init__.py" else origin.parent


def _has(folder: Path, top: str) -> bool:
    """Whether a module or a package lies there. A package needs no __init__.py."""
    return _path(folder, top) is not None or (folder / top).is_dir()


def _path(base: Path, module: str) -> Path | None:
    *packages, last = module.split(".")
    place = base.joinpath(*packages)
    choices = (place / f"{last}.py", place / last / "__init__.py")
    return next((path for path in choices if last and path.is_file()), None)


def _imports(path: Path, package: str) -> Iterator[str]:
    """Names that a file imports, anywhere in it; some of them are no modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # whoever imports it will hear of it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
