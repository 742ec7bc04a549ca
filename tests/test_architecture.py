"""Dependencies point one way: cli → reporting → stages → training, compute, artifacts → data, models → sal, rivals."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import REPOSITORY

PACKAGE = REPOSITORY / "salcli"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Lower layers know nothing of higher ones. A module's layer is that of its folder or file.
LAYERS = [
    {"errors", "seeding", "progress", "metrics_convention", "method_names", "params_file", "ranks", "source"},
    {"sal", "rivals", "metrics", "calibration"},
    {"data", "models"},
    {
        "fetching",
        "compute",
        "artifacts",
        "detector",
        "training",
        "inference",
        "params",
        "params_checks",
        "params_errors",
        "params_rivals",
        "params_section",
        "presets",
        "paper",
    },
    {"stages", "project", "planning"},
    {"reporting"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {name: place for place, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[tuple[str, bool, bool]]:
    """What a module imports: name, whether only type checkers see it, whether it is inside a function."""
    found = set()

    def visit(node: ast.AST, type_checking: bool, in_function: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            type_checking = True
        if isinstance(node, ast.FunctionDef):
            in_function = True
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found.update((name, type_checking, in_function) for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child, type_checking, in_function)

    visit(ast.parse(path.read_text()), False, False)
    return found


def layer(parts: tuple[str, ...]) -> int:
    return LAYER_OF[parts[0].removesuffix(".py")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_layer_or_below(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts
    if own == ("__init__.py",):
        return
    for name, type_checking, _ in imported(path):
        if name.startswith("salcli.") and name != "salcli.__version__" and not type_checking:
            assert layer(tuple(name.split(".")[1:])) <= layer(own), name


@pytest.mark.parametrize("path", sorted((PACKAGE / "sal").glob("*.py")), ids=lambda path: path.name)
def test_the_paper_knows_no_files_no_configuration_and_prints_nothing(path: Path) -> None:
    roots = {name.split(".")[0] for name, _, _ in imported(path)}
    assert not roots & {"pathlib", "os", "io", "h5py", "pydantic", "rich", "typer", "json"}
    assert "print(" not in path.read_text()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_commands_import_our_own_modules_late(path: Path) -> None:
    """So that what a stage imports when it is loaded is all that it imports (see test_dvc_yaml.py)."""
    if path.relative_to(PACKAGE).parts[0] in ("cli", "reporting", "__init__.py"):
        return
    assert not [name for name, _, in_function in imported(path) if in_function and name.startswith("salcli")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_but_diagnosis_reads_the_truth(path: Path) -> None:
    """One module reads the file; two ask it, both after the candidates are chosen."""
    own, text = path.relative_to(PACKAGE).parts, path.read_text()
    if own not in {("stages", "diagnosis.py"), ("artifacts", "splits.py")}:
        assert "read_wild_truth" not in text
    if own not in {("stages", "diagnosis.py"), ("stages", "filter.py"), ("stages", "theory.py")}:
        assert "known_truth" not in text
