"""Dependencies point one way: cli → report → project, detector → pipeline → params, store → methods → engine → …"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers.quick import REPOSITORY

PACKAGE = REPOSITORY / "salcli"
MODULES = sorted(PACKAGE.rglob("*.py"))
# A package imports from its own layer or from lower ones.
LAYERS = [
    {"cli"},
    {"report", "api"},
    {"project", "detector"},
    {"pipeline"},
    {"params", "store"},
    {"methods"},
    {"engine"},
    {"models", "data"},
    {"sal", "conformal"},
    {"errors", "progress"},
]
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}
EVERY_MODULE = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))


def imported(path: Path) -> set[str]:
    """The modules and names that a file imports, also inside functions and for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def packages_used(path: Path) -> set[str]:
    """The packages of salcli, and its modules at the top level, that a file imports from."""
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("salcli.")}
    return ours - {"__version__"}


@EVERY_MODULE
def test_a_module_imports_only_from_its_own_layer_or_below(path: Path) -> None:
    if package_of(path).startswith("__"):
        return
    upward = {name for name in packages_used(path) if DEPTH[name] < DEPTH[package_of(path)]}
    assert not upward


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    """Also not two of the same layer."""
    graph: dict[str, set[str]] = {name: set() for name in DEPTH}
    for path in MODULES:
        if package_of(path) in graph:
            graph[package_of(path)] |= packages_used(path) - {package_of(path)}
    assert [*TopologicalSorter(graph).static_order()]


def test_every_concept_has_a_package() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "api", "errors", "progress"}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == DEPTH.keys() - {"api", "errors", "progress"}
    assert len(MODULES) <= 120


MATH = [path for name in ("conformal", "sal", "methods") for path in PACKAGE.glob(f"{name}/*.py")]


@pytest.mark.parametrize("path", MATH, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_math_knows_no_files_no_params_and_prints_nothing(path: Path) -> None:
    names = imported(path)
    allowed = {"pathlib.Path"} if path.name == "base.py" else set()  # which lists the files of its own folder
    forbidden = {"pathlib", "os", "io", "h5py", "json", "rich", "typer", "safetensors", "shutil", "ruamel"}
    assert not {name for name in names - allowed if name.split(".")[0] in forbidden}
    assert not {name for name in names if name.startswith(("salcli.params", "salcli.store"))}
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    called = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in calls}
    assert not called & {"print", "open", "read_text", "read_bytes", "write_text", "write_bytes", "torch.load"}


def test_the_paper_is_readable_without_the_rest() -> None:
    """sal/ is the math of the paper; what it needs beside torch fits on one screen."""
    for path in PACKAGE.glob("sal/*.py"):
        assert packages_used(path) <= {"sal", "errors"}
    for path in PACKAGE.glob("conformal/*.py"):
        assert packages_used(path) <= {"conformal"}
        assert {name.split(".")[0] for name in imported(path)} & {"torch", "pandas", "sklearn"} == set()


def test_there_is_one_of_each_statistic() -> None:
    """Benjamini and Hochberg, a bootstrap, a quantile that is a threshold, and π̂ are in conformal alone."""
    words = ("false_discovery_control", "betabinom", "mannwhitneyu", "rng.integers(n, size=n)")
    users = {word: {package_of(path) for path in MODULES if word in path.read_text()} for word in words}
    assert all(found <= {"conformal"} for found in users.values()), users


def test_the_truth_about_the_wild_data_is_read_by_diagnosis_alone() -> None:
    """One function reads it; the filter asks it after the candidates are chosen, and so does the theory."""
    readers, askers = (
        {str(path.relative_to(PACKAGE)) for path in MODULES if name in path.read_text()}
        for name in ("read_wild_truth", "known_truth")
    )
    assert readers == {"store/formats.py", "pipeline/loading.py"}
    assert askers == {"pipeline/loading.py", "pipeline/filter.py", "pipeline/theory.py"}
