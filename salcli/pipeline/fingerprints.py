"""fingerprints: what DVC cannot see, written down so that it notices a change: code, raw data, given files.

The code of a stage is its own module and every module of salcli that it imports. Docstrings, comments and formatting do
not count. The code of a method counts only where the method is used. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import ast
import hashlib
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

from salcli.data.catalogue import custom_paths, data_root, read_from
from salcli.data.folders import files_below, read_from_custom
from salcli.methods import MEMBERS
from salcli.params.reading import lookup, read_yaml
from salcli.store.files import fingerprint, write_json
from salcli.store.layout import FINGERPRINTS, Workspace

PACKAGE = Path(__file__).parent.parent
STAGES = {
    "prepare": "salcli.pipeline.prepare",
    "train_id": "salcli.pipeline.train_id",
    "extract": "salcli.pipeline.extract",
    "filter": "salcli.pipeline.filter",
    "train_ood": "salcli.pipeline.train_ood",
    "evaluate": "salcli.pipeline.evaluate",
    "detector": "salcli.detector.stage",
    "summary": "salcli.report.summary",
}
# They cannot change a result: DVC sees the values of params.yaml and the paths of files as they are.
WITHOUT_RESULT = (
    "salcli.errors", "salcli.progress", "salcli.params.checks", "salcli.params.reading", "salcli.store.layout",
)  # fmt: skip
# Its own code decides what a variant and a method are. It imports all that it checks names against, which decides
# nothing: a stage imports itself what it runs.
SCHEMA = "salcli.params.schema"
DECLARATION = re.compile(r'^@method\("([^"]+)"', re.MULTILINE)
FAMILIES = PACKAGE / "methods"
TAU, MADE_OF_OTHERS = "sal", ("committee", "sal-plus")
LIBRARIES = ("torchvision", "timm")


def run(params_file: Path) -> Path:
    """Write the fingerprints of a project."""
    workspace, params = Workspace(params_file.parent), read_yaml(params_file)
    try:
        content = fingerprints(workspace, params)
    except (AttributeError, KeyError, TypeError):  # params.yaml is not valid: the schema says how
        from salcli.params.schema import load_params

        load_params(params_file)
        raise
    path = workspace.target(FINGERPRINTS)
    write_json(path, content)
    return path


def fingerprints(workspace: Workspace, params: dict[str, Any]) -> dict[str, Any]:
    data, code_folder = params["data"], workspace.given(params["model"]["code"])
    root = data_root(params_root=data["root"], workspace=workspace.root)

    def of_set(name: str) -> str:
        if name in data["custom"]:
            return _listing(read_from_custom(custom_paths(data["custom"][name], workspace.root)))
        return _listing(read_from(name, root)) or _locked(workspace, name)

    sets = {name: of_set(name) for name in (*data["ood"], *data["test_ood"], data["id"])}
    if data["calibration"] is not None:  # stored in the file of the ID set
        sets[data["id"]] = _joined([sets[data["id"]], of_set(data["calibration"])])
    families, evaluated, review = method_families(), params["evaluate"]["methods"], lookup(params, "train_ood.review")
    named = [*(evaluated if isinstance(evaluated, list) else []), str(params["detector"]["method"])]
    named += [_score(params, variant) for variant in params["variant"]]
    custom = {*params["rivals"], *params["encoders"], *named} - families.keys()
    methods = {name: code_of(f"salcli.methods.{family}") for name, family in families.items()}
    methods |= {name: _custom_code(name, code_folder) for name in custom if ":" in name}
    return {
        "code": {stage: code_of(module) for stage, module in STAGES.items()},
        "methods": methods | {"sal": code_of("salcli.methods.sal")},
        "evaluated": _joined(f"{name} {methods[name]}" for name in sorted(methods)),
        "separator": {variant: _separator(params, variant, methods) for variant in params["variant"]},
        "data": sets,
        "weights": _weights(workspace, params["model"]),
        "embedder": _embedder(workspace, params, code_folder),
        "review": fingerprint(workspace.given(review)) if review else "",
        "network": _custom_code(params["model"]["backbone"], code_folder),
    }


# -- code


def code_of(module: str) -> str:
    """The fingerprint of a module of salcli and of all modules of salcli that it imports."""
    digest = hashlib.sha256()
    for name in sorted(closure(module)):
        digest.update(f"{name}\0{_compiled(_path_of(name))}\0".encode())
    return digest.hexdigest()[:16]


@cache
def closure(module: str) -> frozenset[str]:
    """The modules of salcli that a module imports at its top level, directly or not, and itself."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or name.startswith(WITHOUT_RESULT) or not _path_of(name).is_file():
            continue
        found.add(name)
        waiting += _imports(_path_of(name)) if name != SCHEMA else ()
    return frozenset(found)


def method_families() -> dict[str, str]:
    """The module of each built-in method, found by its declaration."""
    files = sorted(FAMILIES.glob("*.py"))
    return {name: path.stem for path in files for name in DECLARATION.findall(path.read_text(encoding="utf-8"))}


def _path_of(module: str) -> Path:
    return PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Modules of salcli that a file imports at its top level, and names in them.

    What is imported inside a function does not change the result of a stage.
    """
    top = ast.parse(path.read_bytes()).body
    found = [node for node in top if isinstance(node, ast.ImportFrom) and str(node.module).startswith("salcli")]
    names = [f"{node.module}.{alias.name}" for node in found for alias in node.names]
    return (*(str(node.module) for node in found), *names)


@cache
def _compiled(path: Path) -> str:
    """What the interpreter runs, without docstrings, comments and line numbers."""
    return _described(compile(path.read_bytes(), path.name, "exec", dont_inherit=True, optimize=2))


def _described(value: object) -> str:
    if isinstance(value, frozenset):  # it has no order
        return repr(sorted(map(repr, value)))
    if not isinstance(value, CodeType):
        return repr(value)
    names = value.co_name, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
    constants = [_described(constant) for constant in value.co_consts]
    return repr((names, value.co_flags, value.co_argcount, value.co_kwonlyargcount, value.co_code, constants))


def _custom_code(name: str, folder: Path) -> str:
    """Of MODULE:NAME; empty for networks and methods that come with a library."""
    if ":" not in name or name.startswith(("torchvision:", "timm:")):
        return ""
    from salcli.models.custom import code_fingerprint  # imports torch: only projects with custom code pay for it

    return code_fingerprint(name, folder)


def _weights(workspace: Workspace, model: dict[str, Any]) -> str:
    """Of a file of weights; those that a library publishes are known by its version."""
    if model["weights"] is None:
        return ""
    if model["weights"] == "pretrained":
        library = str(model["backbone"]).partition(":")[0]
        return f"{library} {version(library)}" if library in LIBRARIES else ""
    return fingerprint(workspace.given(model["weights"]))


def _embedder(workspace: Workspace, params: dict[str, Any], code_folder: Path) -> str:
    """All that decides what a frozen backbone makes of an image; empty where no backbone is frozen."""
    model = params["model"]
    if not model["frozen"]:
        return ""
    settings = [str(model[key]) for key in ("backbone", "head", "mean", "std")]
    own = _weights(workspace, model), _custom_code(model["backbone"], code_folder), code_of("salcli.pipeline.embed")
    return _joined([*settings, *own])


# -- which methods a stage uses


def _score(params: dict[str, Any], variant: str) -> str:
    return str(lookup(params, f"variant.{variant}.filter.score") or params["filter"]["score"])


def _separator(params: dict[str, Any], variant: str, methods: dict[str, str]) -> str:
    """Code and hyper-parameters of the score that a variant's filter uses, and of its members.

    τ is part of the stage.
    """
    score = _score(params, variant)
    used = [score, *MEMBERS] if score in MADE_OF_OTHERS else [] if score == TAU else [score]
    return _joined(f"{methods.get(name)} {params['methods'].get(name)}" for name in used)


def _joined(parts: Any) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# -- data


def _listing(paths: list[Path]) -> str:
    """Tells whether files and folders have changed by names, sizes and times, without reading them."""
    lines = []
    for top in paths:
        for path in files_below(top) if top.is_dir() else [top]:
            with suppress(OSError):  # a list may name what no file can be called
                facts = path.stat()
                lines.append(f"{path.relative_to(top.parent)}\0{facts.st_size}\0{facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16] if lines else ""


def _locked(workspace: Workspace, name: str) -> str:
    """Of a published set that is not here, as in a clone, what dvc.lock has: it is the same set.

    Not of custom sets: a wrong path would go unnoticed.
    """
    lock = workspace.root / "dvc.lock"
    stages = read_yaml(lock).get("stages", {}).values() if lock.is_file() else ()
    recorded = (stage.get("params", {}).get(FINGERPRINTS.path, {}).get(f"data.{name}") for stage in stages)
    return next(filter(None, recorded), "")
