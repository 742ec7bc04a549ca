"""Fingerprints change with the code that a stage or method runs, its raw data and given files, and not otherwise."""

import ast
import json
import shutil
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import process
from helpers.quick import REPOSITORY

from salcli.params.reading import read_yaml, with_overrides
from salcli.pipeline import fingerprints
from salcli.store.layout import Workspace

FAMILIES = sorted({*fingerprints.method_families().values()})
PARAMS = {**read_yaml(REPOSITORY / "params.yaml"), "variants": ["sal"], "variant": {"sal": {}}}
STAGES = {f"code.{stage}" for stage in fingerprints.STAGES}
# They count in the fingerprint `embedder`, where a backbone is frozen.
LATE = {"salcli.pipeline.embed", "salcli.models.pretrained"}


class Copy:
    """A copy of the package that can be edited."""

    def __init__(self, root: Path) -> None:
        self.package = root / "salcli"
        shutil.copytree(REPOSITORY / "salcli", self.package, ignore=shutil.ignore_patterns("__pycache__", "templates"))

    @cached_property
    def unchanged(self) -> dict[str, str]:
        return self.fingerprints()

    def fingerprints(self, **overrides: Any) -> dict[str, str]:
        """By dotted key."""
        for cached in (fingerprints.closure, fingerprints._imports, fingerprints._compiled):
            cached.cache_clear()
        changes = {key.replace("__", "."): value for key, value in overrides.items()}
        found = fingerprints.fingerprints(Workspace(self.package.parent), with_overrides(PARAMS, changes))
        flat = {}
        for key, value in found.items():
            flat |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
        return flat

    def changed_by(self, *modules: str, edit: Callable[[str], str] = lambda text: f"{text}\n_EDITED = 1\n") -> set[str]:
        """The keys whose fingerprints another version of some modules changes. The modules stay as they were."""
        before, paths = self.unchanged, [self.package / f"{module}.py" for module in modules]
        texts = [path.read_text() for path in paths]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(edit(text))
        after = self.fingerprints()
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        assert before.keys() == after.keys()
        return {key for key in before if before[key] != after[key]}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


@pytest.fixture(autouse=True)
def of_the_copy(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "PACKAGE", copy.package)
    monkeypatch.setattr(fingerprints, "FAMILIES", copy.package / "methods")


# --- code


def with_other_words(text: str) -> str:
    """Other docstrings, more comments and more blank lines."""
    lines = text.splitlines()
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    for node in nodes:
        if ast.get_docstring(node) is not None:
            line = node.body[0].lineno - 1
            lines[line] = lines[line].replace('"""', '"""Edited. ', 1)
    return "\n".join(["# a comment", "", *(line for line in lines)]) + "\n\n\n# the end\n"


def test_docstrings_comments_and_blank_lines_change_nothing(copy: Copy) -> None:
    modules = [str(path.relative_to(copy.package).with_suffix("")) for path in copy.package.rglob("*.py")]
    assert len(modules) > 60
    assert copy.changed_by(*modules, edit=with_other_words) == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_another_code_of_a_method_changes_the_method_and_no_stage(copy: Copy, family: str) -> None:
    """But for SAL, which is a part of stages. Methods that use its code change, too."""
    changed = copy.changed_by(f"methods/{family}")
    names = {f"methods.{name}" for name, own in fingerprints.method_families().items() if own == family}
    assert names
    assert names | {"evaluated"} <= changed
    stages = {"sal": {"code.filter", "code.evaluate", "code.detector"}}
    assert changed & STAGES == stages.get(family, set())
    parts = {"combined": ["combined", "mixture", "features"]}  # SAL+ is in a module of its own, with neighbours
    texts = {
        one: "".join((copy.package / f"methods/{part}.py").read_text() for part in parts.get(one, [one]))
        for one in FAMILIES
    }
    users = {one for one, text in texts.items() if f"salcli.methods.{family} import" in text}
    others = {own for one in users for own, of in fingerprints.method_families().items() if of == one}
    indirect = {"methods.step"} if "contrastive" in users or family == "contrastive" else set()  # it contrasts, too
    sal = {"methods.sal"} if family == "sal" else set()
    assert changed - STAGES - {"evaluated"} == names | {f"methods.{name}" for name in others} | indirect | sal


@pytest.mark.parametrize("stage", fingerprints.STAGES)
def test_another_code_of_a_stage_changes_that_stage_alone(copy: Copy, stage: str) -> None:
    module = fingerprints.STAGES[stage].removeprefix("salcli.").replace(".", "/")
    assert copy.changed_by(module) == {f"code.{stage}"}


@pytest.mark.parametrize(
    ("modules", "changed"),
    [
        (["data/readers", "data/catalogue", "data/fetching", "data/decoding"], {"code.prepare", "code.detector"}),
        (["models/given_weights"], {"code.train_id", "code.train_ood", "code.detector"}),
        (["store/formats"], STAGES - {"code.summary"}),
        (["conformal/evidence"], {"code.filter", "code.evaluate", "code.detector", "code.summary"}),
        (["conformal/resampling"], {"code.evaluate", "code.summary"}),
        (["sal/theory", "pipeline/theory", "pipeline/toy", "pipeline/fingerprints", "detector/export"], set()),
        (["params/schema"], STAGES - {"code.summary"}),
        (["params/checks", "params/reading", "errors", "progress", "store/layout"], set()),
        (["cli/app", "cli/stages", "cli/session", "report/page", "project/planning"], set()),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_module_changes_the_stages_that_run_it(copy: Copy, modules: list[str], changed: set[str]) -> None:
    assert copy.changed_by(*modules) == changed


def test_a_changed_constant_or_expression_is_a_change(copy: Copy) -> None:
    for module, before, after, changed in (
        ("pipeline/evaluate", "N_BINS = 60", "N_BINS = 61", {"code.evaluate"}),
        ("methods/odin", ".sign()", ".sgn()", {"methods.odin", "evaluated"}),
        ("params/schema", "for section in self.variant[name]", "for section in ()", STAGES - {"code.summary"}),
        ("params/schema", "[*dict.fromkeys([*trained, *post_hoc])]", "[*trained]", STAGES - {"code.summary"}),
        ("params/schema", "Sal(self.for_variant(name)", "Sal(self", STAGES - {"code.summary"}),
    ):
        assert before in (copy.package / f"{module}.py").read_text()
        assert copy.changed_by(module, edit=lambda text, old=before, new=after: text.replace(old, new)) == changed


# In one new interpreter: third-party packages once, then a copy of the process for each stage. What the params schema
# imports to check names does not change a result, so nothing is behind it.
REALLY_IMPORTED = """
import json, os, sys, types
import h5py, jaxtyping, numpy, pydantic, safetensors.torch, scipy, torch, torchvision
for name in ("params", "params.schema", "params.checks", "params.reading"):
    sys.modules["salcli." + name] = stub = types.ModuleType("salcli." + name)
    stub.__path__, stub.__getattr__ = [], lambda name: type(name, (), {})
for module in sys.argv[1:]:
    if os.fork() == 0:
        __import__(module)
        files = {name for name, found in sys.modules.items() if not hasattr(found, "__path__")}
        print(json.dumps([module, [name for name in files if name.startswith("salcli.")]]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_the_code_of_a_stage_is_what_a_new_interpreter_imports_for_it() -> None:
    done = process(sys.executable, "-c", REALLY_IMPORTED, *fingerprints.STAGES.values(), cwd=REPOSITORY)
    really = dict(json.loads(line) for line in done.stdout.splitlines())
    assert really.keys() == {*fingerprints.STAGES.values()}, done.stderr
    for module, names in really.items():
        ours = {name for name in names if not name.startswith(fingerprints.WITHOUT_RESULT)}
        assert fingerprints.closure(module) - {fingerprints.SCHEMA} == ours, module


def test_no_module_that_a_stage_runs_imports_another_one_late(copy: Copy) -> None:
    """Or its code would not count."""
    modules = {*fingerprints.STAGES.values(), *(f"salcli.methods.{family}" for family in FAMILIES)}
    for name in {one for module in modules for one in fingerprints.closure(module)}:
        path = fingerprints._path_of(name)
        inner = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        late = {str(node.module) for node in inner if node.col_offset}
        assert {module for module in late if module.startswith("salcli")} <= LATE, name


# --- params, data, given files


def test_the_separator_of_a_variant_has_the_code_and_params_of_its_score(copy: Copy) -> None:
    variants = {
        "sal": {},
        "by-knn": {"filter": {"score": "knn"}},
        "both": {"filter": {"score": "committee"}},
        "plus": {"filter": {"score": "sal-plus"}},
    }
    before = copy.fingerprints(variant=variants)
    after = copy.fingerprints(variant=variants, methods__knn__k=9)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"separator.by-knn", "separator.both", "separator.plus"}


def test_given_files_and_custom_data_change_their_own_fingerprint(copy: Copy, tmp_path: Path) -> None:
    for path in ("mine/a/1.png", "new/a/1.png", "weights.pt", "review.csv"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"one")
    given = {
        "data__custom": {name: str(tmp_path / name) for name in ("mine", "new")},
        "data__ood": ["mine"],
        "data__calibration": "new",
        "model__weights": str(tmp_path / "weights.pt"),
        "train_ood__review": str(tmp_path / "review.csv"),
    }
    before = copy.fingerprints(**given)
    assert before["data.mine"]
    for path, key in {
        "mine/a/2.png": "data.mine",
        "new/a/2.png": "data.digits-0-7",  # the calibration set is a part of the ID data
        "weights.pt": "weights",
        "review.csv": "review",
    }.items():
        (tmp_path / path).write_bytes(b"other")
        after = copy.fingerprints(**given)
        assert {name for name in before if before[name] != after[name]} == {key}
        before = after


def test_raw_data_that_are_not_here_count_as_they_were(copy: Copy) -> None:
    given = {"data__id": "cifar10", "data__ood": ["svhn"]}
    assert copy.fingerprints(**given)["data.cifar10"] == ""
    lock = copy.package.parent / "dvc.lock"
    recorded = {"data.cifar10": "89ab89ab89ab89ab", "data.svhn": "0123012301230123"}
    stage = {"cmd": "salcli prepare", "params": {".salcli/fingerprints.json": recorded}}
    lock.write_text(json.dumps({"schema": "2.0", "stages": {"summary": {"cmd": ""}, "prepare-id-set": stage}}))
    found = copy.fingerprints(**given)
    lock.unlink()
    assert (found["data.cifar10"], found["data.svhn"]) == ("89ab89ab89ab89ab", "0123012301230123")


def test_custom_code_changes_the_network_and_the_methods_that_it_is(copy: Copy) -> None:
    code = copy.package.parent / "my_fingerprinted.py"
    code.write_text("import my_part\nclass Net: pass\nclass Score: pass\n")
    part = copy.package.parent / "my_part.py"
    part.write_text("A = 1\n")
    custom = {
        "model__backbone": "my_fingerprinted:Net",
        "evaluate__methods": ["sal", "my_fingerprinted:Score"],
        "encoders": ["my_fingerprinted:Encoder"],
    }
    before = copy.fingerprints(**custom)
    part.write_text("A = 2\n")
    after = copy.fingerprints(**custom)
    changed = {key for key in before if before[key] != after[key]}
    methods = {"methods.my_fingerprinted:Score", "methods.my_fingerprinted:Encoder"}
    assert changed == {"network", "evaluated", *methods}
