"""dvc.yaml says what is true: the files, params and source files that each stage really uses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from ruamel.yaml import YAML

from salcli import source
from salcli.artifacts import layout

PIPELINES = {"dvc.yaml": "pipeline.yaml", ".salcli/dvc.yaml": "fingerprints.yaml"}  # each with its template
STAGES: dict[str, dict[str, Any]] = {
    name: stage
    for pipeline in PIPELINES
    for name, stage in YAML(typ="safe").load(REPOSITORY / pipeline)["stages"].items()
}
PARAMS: dict[str, Any] = YAML(typ="safe").load(REPOSITORY / "params.yaml")
MODULE = {
    "prepare-id-set": "prepare", "prepare-ood-set": "prepare", "prepare-unseen-set": "prepare", "split": "prepare",
    "mix-wild": "prepare", "train-id": "train_id", "extract-id": "extract_grads", "extract-wild": "extract_grads",
    "filter": "filter", "train-ood": "train_ood", "train-rival": "train_ood", "train-encoder": "train_encoder",
    "evaluate": "evaluate", "evaluate-unseen": "evaluate", "detector": "detector",
}  # fmt: skip
FINGERPRINTS = ".salcli/fingerprints.json"

LIST_IMPORTS = """
import json, sys, salcli.stages.{module}
print(json.dumps([m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "salcli"]))
"""


def paths(stage: dict[str, Any], *kinds: str) -> set[str]:
    """The files a stage declares, with the matrix item filled in."""
    entries = [entry for kind in kinds for entry in stage.get(kind, [])]
    names = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
    return {
        name.replace("${item.ood}", "OOD")
        .replace("${item.unseen}", "UNSEEN")
        .replace("${item.rival}", "RIVAL")
        .replace("${item.encoder}", "ENCODER")
        .replace("${item.seed}", "7")
        .replace("${data.id}", PARAMS["data"]["id"])
        for name in names
    }


def test_every_stage_is_known_to_these_tests() -> None:
    assert set(STAGES) == {*MODULE, "fingerprints"}
    assert set(MODULE.values()) == set(source.STAGES)


@pytest.mark.parametrize("module", source.STAGES)
def test_fingerprinted_source_files_are_those_that_the_stage_imports(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST_IMPORTS.format(module=module)], capture_output=True, text=True, check=True
    )
    really = {Path(file) for file in json.loads(done.stdout) if not file.endswith("__init__.py")}
    without_result = {REPOSITORY / (name.replace(".", "/") + ".py") for name in source.WITHOUT_RESULT}
    assert set(source.stage_files(module)) == really - without_result


@pytest.mark.parametrize("name", MODULE)
def test_every_stage_depends_on_its_own_code(name: str) -> None:
    (keys,) = [entry[FINGERPRINTS] for entry in STAGES[name]["params"] if isinstance(entry, dict)]
    also = {
        "train-id": ["weights", "network"],
        "train-encoder": ["network"],
        "train-ood": ["review"],
        "prepare-id-set": ["data.${data.id}"],
        "prepare-ood-set": ["data.${item.ood}"],
        "prepare-unseen-set": ["data.${item.unseen}"],
    }
    assert keys == [f"code.{MODULE[name]}", *also.get(name, [])]


def test_a_changed_source_file_changes_the_stages_that_import_it(tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(REPOSITORY / "salcli", tmp_path / "salcli")
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "salcli")
    before = source.stage_fingerprints()
    with (tmp_path / "salcli" / "sal" / "objective.py").open("a") as file:
        file.write("# changed\n")
    after = source.stage_fingerprints()
    assert {stage for stage in source.STAGES if before[stage] != after[stage]} == {"train_ood"}


@pytest.mark.parametrize("name", PIPELINES)
def test_an_initialised_folder_has_the_same_pipeline(name: str) -> None:
    template = REPOSITORY / "salcli" / "templates" / PIPELINES[name]
    assert template.read_bytes() == (REPOSITORY / name).read_bytes()


def test_declared_outputs_are_all_the_artifacts_and_each_has_one_stage() -> None:
    by_seed = (layout.id_split, layout.classifier, layout.train_id_curve, layout.train_id_metrics)
    by_experiment = (
        layout.wild_mixture, layout.wild_truth, layout.wild_gradients, layout.candidates, layout.filter_metrics,
        layout.detector,
    )  # fmt: skip
    by_test_set = (layout.evaluation_scores, layout.metrics, layout.roc, layout.score_histogram)
    expected = [layout.prepared_set(PARAMS["data"]["id"]).name, layout.prepared_set("OOD").name]
    expected += [layout.unseen_set("UNSEEN").name, FINGERPRINTS]
    expected += [place(7).name for place in by_seed]
    expected += [layout.id_gradients(part, 7).name for part in ("train", "calibration")]
    expected += [place("OOD", 7).name for place in (*by_experiment, *by_test_set)]
    expected += [place("OOD", 7, "UNSEEN").name for place in by_test_set]
    of_method = (layout.trained_network, layout.training_curve)
    expected += [place(method, "OOD", 7).name for place in of_method for method in ("sal", "RIVAL")]
    expected += [place("ENCODER", 7).name for place in (layout.encoder, layout.encoder_curve)]
    declared = [name for stage in STAGES.values() for name in paths(stage, "outs", "metrics", "plots")]
    assert sorted(declared) == sorted(expected)


@pytest.mark.parametrize("name", STAGES)
def test_every_input_is_another_stages_output(name: str) -> None:
    outputs = {out for stage in STAGES.values() for out in paths(stage, "outs", "metrics", "plots")}
    folders = {str(parent) for out in outputs for parent in Path(out).parents}  # of networks, which there are more of
    assert paths(STAGES[name], "deps") <= outputs | folders


@pytest.mark.parametrize("name", STAGES)
def test_declared_params_exist_and_leave_out_what_only_spans_the_matrix(name: str) -> None:
    for key in (entry for entry in STAGES[name].get("params", []) if isinstance(entry, str)):
        value: Any = PARAMS
        for part in key.replace("${item.rival}", PARAMS["rivals"][0]).replace("${item.encoder}", "csi").split("."):
            value = value[part]
        if name != "evaluate-unseen":  # of a set that hides in other wild data it tests on what is kept out there
            assert key not in ("data", "data.ood", "seeds", "device", "launcher")


def test_the_truth_is_an_input_of_the_filters_diagnosis_alone() -> None:
    readers = {name for name, stage in STAGES.items() if any("truth" in dep for dep in paths(stage, "deps"))}
    assert readers == {"filter"}


@pytest.mark.parametrize("name", STAGES)
def test_commands_name_their_matrix_item(name: str) -> None:
    axes = set(STAGES[name].get("matrix", {}))
    command = STAGES[name]["cmd"].replace("--method ${item.rival}", "--rival ${item.rival}")
    assert set(re.findall(r"--(\w+) \$\{item\.\1\}", command)) == axes


@pytest.mark.parametrize("name", STAGES)
def test_plots_use_templates_that_are_there(name: str) -> None:
    for plot in STAGES[name].get("plots", []):
        (options,) = plot.values()
        template = REPOSITORY / ".dvc" / "plots" / f"{options['template']}.json"
        assert json.loads(template.read_text())["data"] == {"values": "<DVC_METRIC_DATA>"}
