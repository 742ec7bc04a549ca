"""dvc.yaml says what is true: the files and params that each stage really uses, and commands that salcli takes."""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from helpers.quick import EXPERIMENT, OOD, REPOSITORY, SEED
from ruamel.yaml import YAML

from salcli.cli.app import app
from salcli.detector import stage as detector
from salcli.methods.base import Section
from salcli.params.schema import Params, load_params
from salcli.pipeline import evaluate, extract, fingerprints, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.store.layout import FINGERPRINTS, SAL_PLUS, Artifact, Workspace, unseen_set

PIPELINE: dict[str, dict[str, Any]] = YAML(typ="safe").load(REPOSITORY / "dvc.yaml")["stages"]
PARAMS: dict[str, Any] = YAML(typ="safe").load(REPOSITORY / "params.yaml")
ID, RIVAL, ENCODER, UNSEEN = PARAMS["data"]["id"], "oe", "knn-plus", "mine"
AXES = {"ood": OOD, "pi": 0.1, "seed": SEED, "variant": "sal", "method": "sal", "encoder": ENCODER, "unseen": UNSEEN}
CODE = {
    "prepare-id-set": "prepare", "prepare-ood-set": "prepare", "prepare-unseen-set": "prepare", "split": "prepare",
    "mix-wild": "prepare", "train-id": "train_id", "train-encoder": "train_ood", "extract-id": "extract",
    "extract-wild": "extract", "extract-unseen": "extract", "filter": "filter",
    "filter-only": "filter", "train-ood": "train_ood",
    "train-rival": "train_ood", "evaluate": "evaluate", "evaluate-unseen": "evaluate", "detector": "detector",
    "summary": "summary",
}  # fmt: skip
EVERY_STAGE = pytest.mark.parametrize("name", PIPELINE)


def axes(name: str) -> dict[str, Any]:
    """The values of one experiment on the axes of a stage."""
    own = AXES | {"train-rival": {"method": RIVAL}, "filter-only": {"variant": SAL_PLUS}}.get(name, {})
    return {axis: own[axis] for axis in PIPELINE[name].get("matrix", {})}


def filled(text: str, name: str) -> str:
    return re.sub(r"\$\{item\.(\w+)\}", lambda match: str(axes(name)[match[1]]), text.replace("${data.id}", ID))


def paths(name: str, *kinds: str) -> set[str]:
    """The files that a stage declares."""
    entries = [entry for kind in kinds for entry in PIPELINE[name].get(kind, [])]
    return {filled(entry if isinstance(entry, str) else next(iter(entry)), name) for entry in entries}


def outputs(name: str) -> set[str]:
    return paths(name, "outs", "metrics", "plots")


def declared_params(name: str) -> set[str]:
    return {filled(entry, name) for entry in PIPELINE[name].get("params", []) if isinstance(entry, str)}


# --- what is declared


def test_a_new_project_has_the_same_pipeline() -> None:
    assert (REPOSITORY / "dvc.yaml").read_bytes() == (REPOSITORY / "salcli/project/pipeline.yaml").read_bytes()
    assert PIPELINE.keys() == {*CODE, "fingerprints"}
    assert {*CODE.values()} == fingerprints.STAGES.keys()


@EVERY_STAGE
def test_every_input_is_another_stages_output(name: str) -> None:
    made = {path for stage in PIPELINE for path in outputs(stage)}
    folders = {str(parent) for path in made for parent in Path(path).parents}  # of networks
    assert paths(name, "deps") <= made | folders


@EVERY_STAGE
def test_declared_params_exist_and_leave_out_what_only_spans_the_matrix(name: str) -> None:
    for key in declared_params(name):
        value: Any = PARAMS
        for part in key.split("."):
            value = value[part]
        # a set that is in other wild data is tested on what is left there
        if "unseen" not in name and name != "summary":
            assert key not in ("data", "data.ood", "data.pi", "seeds", "device", "launcher", "timeout")


@pytest.mark.parametrize("name", CODE)
def test_every_stage_depends_on_its_own_code(name: str) -> None:
    (keys,) = [entry[FINGERPRINTS.path] for entry in PIPELINE[name]["params"] if isinstance(entry, dict)]
    also = {
        "train-id": ["weights", "network"],
        "train-encoder": [f"methods.{ENCODER}", "network"],
        "filter": ["separator.sal"],
        "filter-only": ["separator.sal-plus"],
        "train-ood": ["methods.sal", "review"],
        "train-rival": [f"methods.{RIVAL}"],
        "evaluate": ["evaluated"],
        "evaluate-unseen": ["evaluated"],
        "prepare-id-set": ["embedder", f"data.{ID}"],
        "prepare-ood-set": ["embedder", f"data.{OOD}"],
        "prepare-unseen-set": ["embedder", f"data.{UNSEEN}"],
        "detector": ["evaluated", "embedder"],
    }
    assert [filled(key, name) for key in keys] == [f"code.{CODE[name]}", *also.get(name, [])]


def test_the_truth_is_an_input_of_the_filters_diagnosis_alone() -> None:
    assert {name for name in PIPELINE if any("truth" in path for path in paths(name, "deps"))} == {
        "filter",
        "filter-only",
    }


@EVERY_STAGE
def test_its_command_is_one_that_salcli_takes_and_its_item_is_quoted_by_dvc(name: str) -> None:
    stage = PIPELINE[name]
    (line,) = stage["cmd"] if "matrix" in stage else [stage["cmd"]]  # of a list, DVC does not cut lines in values
    text, item, rest = line.partition(" ${item}")
    assert "$" not in text + rest
    assert bool(item) == ("matrix" in stage)
    for axis in stage.get("matrix", {}):  # DVC refuses a value that is no plain one there; its keys would not be quoted
        assert f"${{item.{axis}}}" in str(stage["outs"])
    options = [word for axis, value in axes(name).items() for word in (f"--{axis}", str(value))]
    program, command, *arguments = [*shlex.split(text), *options]
    assert program == "salcli"  # python -m would look for it in the project's folder first
    typer.main.get_command(app).commands[command].make_context(command, arguments)  # type: ignore[attr-defined]


# --- what is used

# They do not change a result, or only say whether a name means a custom set or a variant.
NOT_A_RESULT = {"device", "launcher", "timeout", "data.custom", "variants"}
LOOKED_AT_ONLY = {
    "prepare-ood-set": {"data.id"},  # an OOD set is another one
    "prepare-unseen-set": {"data.id"},
    "train-encoder": {"methods.knn.k"},  # of its score
    "filter": {"methods.odin"},  # in separator.VARIANT of the fingerprints
    "filter-only": {"methods.odin", "methods.knn.k", "methods.vim.dim"},
    "train-ood": {"extract_grads.batch_size"},  # of passes that rivals need
    "detector": {"evaluate.methods"},  # whose notes are made already
}
# An unseen set may be in other wild data, and may be a custom one: then more is read.
QUICK = {
    "variants": ["sal"], "rivals": [RIVAL], "encoders": [ENCODER], "data.ood": [OOD, UNSEEN], "data.test_ood": [UNSEEN],
    "train_id.epochs": 1, "train_ood.epochs": 1, "methods.knn-plus.epochs": 1, "methods.knn-plus.warmup_epochs": 0,
    "methods.knn-plus.head.epochs": 1, "data.wild_holdout": 0.4,
}  # fmt: skip
Stage = Callable[[Workspace, Params], object]
STAGES: dict[str, Stage] = {
    "prepare-id-set": lambda project, params: prepare.prepare_set(project, params, ID),
    "prepare-ood-set": lambda project, params: prepare.prepare_set(project, params, OOD),
    "prepare-unseen-set": lambda project, params: prepare.prepare_set(
        project, params, UNSEEN, artifact=unseen_set(UNSEEN)
    ),
    "split": lambda project, params: prepare.prepare_split(project, params.data, EXPERIMENT),
    "mix-wild": lambda project, params: prepare.prepare_wild(project, params.data, EXPERIMENT),
    "train-id": lambda project, params: train_id.run(project, params, EXPERIMENT),
    "train-encoder": lambda project, params: train_ood.run_encoder(project, params, EXPERIMENT, ENCODER),
    "extract-id": lambda project, params: extract.run_id(project, params, EXPERIMENT),
    "extract-wild": lambda project, params: extract.run_wild(project, params, EXPERIMENT),
    "extract-unseen": lambda project, params: extract.run_unseen(project, params, EXPERIMENT, UNSEEN),
    "filter": lambda project, params: filter_stage.run(project, params, EXPERIMENT),
    "filter-only": lambda project, params: filter_stage.run(project, params, EXPERIMENT.with_variant(SAL_PLUS)),
    "train-ood": lambda project, params: train_ood.run(project, params, EXPERIMENT),
    "train-rival": lambda project, params: train_ood.run(project, params, EXPERIMENT, rival=RIVAL),
    "evaluate": lambda project, params: evaluate.run(project, params, EXPERIMENT),
    "evaluate-unseen": lambda project, params: evaluate.run(project, params, EXPERIMENT, unseen=UNSEEN),
    "detector": lambda project, params: detector.run(project, params, EXPERIMENT),
}


@dataclass
class Used:
    """What a stage asked for while it ran."""

    read: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)  # files that only the lineage of others was compared with
    written: set[str] = field(default_factory=set)
    params: set[str] = field(default_factory=set)


@contextmanager
def recording(used: Used) -> Iterator[None]:
    """Watch `Workspace.find`, `Workspace.target` and every key of params that is looked at."""
    find, target, getattribute = Workspace.find, Workspace.target, Section.__getattribute__
    sections: dict[int, tuple[str, Section]] = {}  # the section is kept, so that its id stays its own
    depth = 0

    def watched_find(self: Workspace, artifact: Artifact) -> Any:
        nonlocal depth
        (used.checked if depth else used.read).add(artifact.path)
        depth += 1
        try:
            return find(self, artifact)
        finally:
            depth -= 1

    def watched_target(self: Workspace, artifact: Artifact) -> Path:
        used.written.add(artifact.path)
        return target(self, artifact)

    def watched_get(self: Section, name: str) -> Any:
        value, fields = getattribute(self, name), type(self).model_fields
        prefix = "" if type(self) is Params else sections.get(id(self), (None, self))[0]
        if prefix is None:
            return value
        if name in fields:
            key = prefix + (fields[name].alias or name)
            if issubclass(type(value), Section):  # isinstance would ask the instance itself
                sections[id(value)] = f"{key}.", value
            else:
                used.params.add(key)
        if name == "model_dump":  # all keys at once

            def dump(**options: Any) -> Any:
                chosen = options.get("include", fields.keys() - options.get("exclude", set()))
                used.params.update(prefix + key for key in chosen)
                return value(**options)

            return dump
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "find", watched_find)
        patch.setattr(Workspace, "target", watched_target)
        patch.setattr(Section, "__getattribute__", watched_get)
        yield


@pytest.fixture(scope="module")
def used_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Used]:
    """What every stage uses, in a project where each runs once; some of them also with other values."""
    project, found = Workspace(tmp_path_factory.mktemp("recorded")), {name: Used() for name in STAGES}
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    np.savez(project.root / "mine.npz", images=images)
    quick = {**QUICK, "data.custom": {UNSEEN: str(project.root / "mine.npz")}}
    params, _ = load_params(REPOSITORY / "params.yaml", quick)
    also = {"filter": {"filter.score": ["odin"]}, "detector": {"detector.method": ["sal-posthoc", "auto"]}}
    also["filter-only"] = {"variant.sal-plus": [{"filter": {"score": "odin"}}]}
    for name, run in STAGES.items():
        others = [{key: value} for key, values in also.get(name, {}).items() for value in values]
        every = [load_params(REPOSITORY / "params.yaml", {**quick, **other})[0] for other in others]
        with recording(found[name]):
            for one in (*every, params):
                run(project, one)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_the_files_that_a_stage_reads_and_writes_are_declared(used_by: dict[str, Used], name: str) -> None:
    used, deps = used_by[name], paths(name, "deps")

    def is_declared(path: str) -> bool:
        return path in deps or any(str(parent) in deps for parent in Path(path).parents)

    assert {path for path in used.read if not is_declared(path)} - outputs(name) == set()
    every = used.read | used.checked
    unread = {dep for dep in deps if not any(path == dep or path.startswith(f"{dep}/") for path in every)}
    # held-out samples are on the list of wild.csv, which only custom wild data have
    assert {dep for dep in unread if "holdout" not in dep or "filter" not in name} == set()
    assert {path for path in used.written if not path.startswith(".salcli/resume/")} == outputs(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_the_params_that_a_stage_looks_at_are_declared(used_by: dict[str, Used], name: str) -> None:
    declared, used = declared_params(name), used_by[name].params
    known = declared | NOT_A_RESULT | LOOKED_AT_ONLY.get(name, set())
    known |= {"variant"} if any(key.startswith("variant") for key in declared) else set()
    assert {key for key in used if not any(f"{key}.".startswith(f"{one}.") for one in known)} == set()
    not_always = {"data.root", "data.columns", "extract_grads.batch_size", "rivals", "encoders"}
    sure = {key for key in declared if not key.startswith("variant.")} - not_always
    assert {key for key in sure if not any(f"{one}.".startswith(f"{key}.") for one in used)} == set(), (
        "declared in vain"
    )
