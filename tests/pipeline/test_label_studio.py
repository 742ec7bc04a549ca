"""Labels from Label Studio: tasks go out, an export comes back as the list that train-ood reads."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import refused, salcli
from helpers.detectors import EXPERIMENT

from salcli.store.formats import read_candidates
from salcli.store.layout import Workspace
from salcli.store.review import read_review, reviewed

ONE = ["--ood", EXPERIMENT.ood, "--seed", str(EXPERIMENT.seed)]


@pytest.fixture
def tasks(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """As written, in the project's folder."""
    monkeypatch.chdir(workspace.root)
    assert salcli("review", *ONE, "--to", "label-studio", "--below", "30").exit_code == 0
    return json.loads(Path("label-studio.json").read_text())


def exported(tasks: list[dict[str, Any]], *labels: str) -> str:
    """As Label Studio 1.23.2 exported JSON from a project of such tasks; "OOD OOD" are two annotations of a task."""
    content, when = [], {"created_at": "2026-11-18T12:59:51.147448Z", "updated_at": "2026-11-18T12:59:51.147475Z"}
    for i, task in enumerate(tasks):
        annotations = []
        for number, one in enumerate(labels[i].split() if i < len(labels) else []):
            (predicted,) = task["predictions"][0]["result"] if "predictions" in task else ({},)  # it keeps their ids
            result = [{**predicted, "origin": "prediction-changed", "value": {"choices": [one]}}]
            relation = {"from_id": "a", "to_id": "b", "type": "relation", "direction": "right"}
            annotation = {
                "id": 1001 + number,
                "completed_by": 10,
                "result": [] if one == "skip" else [*result, relation],
            }
            state = {"was_cancelled": one == "skip", "ground_truth": False, "lead_time": 4.288, "result_count": 1}
            shown = {"prediction": {"id": 600 + i, "score": 0.5}, "last_action": None, "task": 500 + i, "project": 83}
            annotations.append({**annotation, **state, **when, **shown})
        own = {"predictions": [600 + i], "annotations": annotations, "drafts": [], "meta": {}, "project": 83, **when}
        content.append({**task, "id": 500 + i, "file_upload": "fe097ae2-tasks.json", "inner_id": i + 1, **own})
    Path("export.json").write_text(json.dumps(content))
    return "export.json"


def test_tasks_say_what_the_filter_said_with_the_most_uncertain_first(
    tasks: list[dict[str, Any]], workspace: Workspace
) -> None:
    candidates = read_candidates(workspace.find(EXPERIMENT.candidates))
    assert len(tasks) == len(candidates.index) + 30
    for task in tasks:
        label = "OOD" if candidates.is_candidate[task["data"]["index"]] else "ID"
        (result,) = task["predictions"][0]["result"]
        assert (result["type"], result["value"]) == ("choices", {"choices": [label]})
        assert task["data"]["image"].startswith("data:image/png;base64,")
    ids = [result["id"] for task in tasks for result in task["predictions"][0]["result"]]
    assert len({*ids}) == len(tasks)  # Label Studio wants one for every result
    config = Path("label-studio.xml").read_text()
    assert {result["from_name"], result["to_name"]} <= {*re.findall(r'name="(\w+)"', config)}
    assert {*re.findall(r'value="\$(\w+)"', config)} <= tasks[0]["data"].keys()
    scores = [task["data"]["score"] for task in tasks]
    near = np.sort(np.abs(np.searchsorted(np.sort(scores), scores) + 0.5 - 30))  # T lies above the lowest 30
    assert [task["predictions"][0]["score"] for task in tasks] == pytest.approx(near / near.max())
    salcli("review", *ONE, "--to", "label-studio", "by-score.json", "--by", "score")
    by_score = [task["data"]["score"] for task in json.loads(Path("by-score.json").read_text())]
    assert by_score == sorted(by_score, reverse=True)


def test_labels_become_the_decisions_that_train_ood_reads(tasks: list[dict[str, Any]], workspace: Workspace) -> None:
    """Tasks 0, 2, 4 are candidates, 1, 3, 5 are just below T."""
    export = exported(tasks, "ID ID", "OOD", "OOD", "ID", "skip")
    result = salcli("review", *ONE, "--from", "label-studio", export)
    assert "1 candidates dropped, 1 samples added" in result.stdout
    assert f"next: salcli train-ood --review review.csv --ood {EXPERIMENT.ood}" in result.stdout
    words = [decision.word for decision in read_review(Path("review.csv"))]
    assert words[:6] == ["drop", "add", "keep", "", "keep", ""]
    found = workspace.find(EXPERIMENT.candidates)
    outcome = reviewed(Path("review.csv"), read_candidates(found), found, EXPERIMENT)
    assert outcome
    assert (outcome.n_dropped, outcome.n_added, outcome.n_unseen) == (1, 1, 0)


def test_other_files_are_refused(tasks: list[dict[str, Any]], workspace: Workspace) -> None:
    def with_data(**data: Any) -> list[dict[str, Any]]:
        return [{**tasks[0], "data": {**tasks[0]["data"], **data}}]

    command, root = ["review", *ONE, "--from", "label-studio"], workspace.root
    for given, labels, message in [
        ([{"data": {"image": "a.png"}}], "", "task 500 was not written by `salcli review --to label-studio`"),
        ([{"filter": "x", "decision": "OOD"}], "", "export JSON, not JSON-MIN"),
        (with_data(filter="filter-sal-pi-0.1-0123456789abcdef"), "", "is about another project or another run of the"),
        (with_data(index=10**6), "OOD", "is about wild sample 1000000, which does not exist; there are"),
        (tasks[:1], "OOD ID", "is labeled both OOD and ID; keep one of the annotations"),
        (tasks[:1], "maybe", "is labeled maybe, and must be OOD or ID as in the labeling config"),
    ]:
        assert message in refused(*command, exported(given, labels), root=root)
    assert "these are tasks, not an export" in refused(*command, "label-studio.json", root=root)
    assert "label-studio.json exists already" in refused("review", *ONE, "--to", "label-studio", root=root)
