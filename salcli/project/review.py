"""The lists of `salcli review`: candidate outliers for a person to correct, as CSV or for Label Studio and back."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from salcli.errors import SalError, check_regular
from salcli.params.schema import Params
from salcli.pipeline.loading import class_names, wild_origins
from salcli.store.files import write_csv, write_text
from salcli.store.formats import Candidates, Origin, read_candidates
from salcli.store.layout import Experiment, Workspace
from salcli.store.review import ADD, DROP, KEEP, NOT_TEXT, as_cell, filter_mark


@dataclass(frozen=True)
class ReviewRow:
    """One wild sample as a person sees it."""

    ood: str
    seed: int
    filter: str  # the run of the filter that it is about
    index: int  # in the wild set
    file: str  # the image, or the file that the row is in; empty where salcli mixed the wild data
    row: int | None  # there, or in the list of the image, counted from 0
    id: str
    score: float
    certified: int  # of the samples with at least this score, so many are outliers (95%)
    predicted: str
    decision: str

    @property
    def origin(self) -> Origin:
        return Origin(self.file, self.row, self.id)


COLUMNS = tuple(one.name for one in fields(ReviewRow))


def rows_for_review(workspace: Workspace, params: Params, experiment: Experiment, n_below: int) -> list[ReviewRow]:
    """Every candidate, highest score first, then the `n_below` samples just below the threshold."""
    candidates = read_candidates(workspace.find(experiment.candidates))
    index = np.concatenate([ranked_candidates(candidates), just_below(candidates, n_below)])
    return _rows_of(workspace, params, experiment, index)


def _rows_of(workspace: Workspace, params: Params, experiment: Experiment, index: np.ndarray) -> list[ReviewRow]:
    """As the filter decided."""
    found = workspace.find(experiment.candidates)
    candidates = read_candidates(found)
    classes = class_names(workspace, params.data)
    mark, is_candidate = filter_mark(found, experiment), candidates.is_candidate
    rank = np.argsort(np.argsort(-candidates.wild_score, kind="stable"))
    return [
        ReviewRow(
            ood=experiment.ood,
            seed=experiment.seed,
            filter=mark,
            index=int(i),
            **origin._asdict(),
            score=float(candidates.wild_score[i]),
            certified=int(candidates.certified[rank[i]]),
            predicted=classes[candidates.predicted[i]],
            decision=KEEP if is_candidate[i] else "",
        )
        for i, origin in zip(index, wild_origins(workspace, params, experiment, index), strict=True)
    ]


def ranked_candidates(candidates: Candidates) -> np.ndarray:
    """Wild samples above the threshold, highest outlier score first."""
    return candidates.index[np.argsort(-candidates.score, kind="stable")]


def just_below(candidates: Candidates, n: int) -> np.ndarray:
    """The n wild samples at or below the threshold with the highest outlier score."""
    rest = np.flatnonzero(~candidates.is_candidate)
    return rest[np.argsort(-candidates.wild_score[rest], kind="stable")][:n]


def confidences(rows: Sequence[ReviewRow]) -> list[float]:
    """How many samples lie between each one and the threshold T, as a share: what is near 0 teaches most."""
    rank = np.argsort(np.argsort([-row.score for row in rows], kind="stable"))
    distance = np.abs(rank + 0.5 - sum(bool(row.decision) for row in rows))
    return list((distance / distance.max()).tolist())


def nearest_first(rows: Sequence[ReviewRow]) -> list[ReviewRow]:
    """Those next to the threshold first, from both sides of it."""
    order = np.argsort(confidences(rows), kind="stable")
    return [rows[i] for i in order]


def write_review(path: Path, rows: Iterable[ReviewRow]) -> None:
    names = "ood", "file", "id", "predicted"
    write_csv(path, [asdict(row) | {name: as_cell(getattr(row, name)) for name in names} for row in rows], COLUMNS)


# --- Label Studio

OOD, ID = "OOD", "ID"
LABELING_CONFIG = """<View>
  <Text name="about" value="$about"/>
  <Choices name="decision" toName="sample" choice="single" showInline="true" required="true">
    <Choice value="OOD" hotkey="1"/>
    <Choice value="ID" hotkey="2"/>
  </Choices>
  <{shown}/>
</View>
"""  # the choices come first: a high image would push them off the screen
IMAGE, TEXT = 'Image name="sample" value="$image"', 'Text name="sample" value="$text"'


def label_studio_tasks(
    rows: Sequence[ReviewRow], pictures: Sequence[str], columns: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Tasks with the filter's decisions as predictions, in the order of the rows; `pictures` are addresses of images.

    The score of a prediction is a confidence, so that Label Studio's own order by uncertainty is ours.
    """
    tasks = []
    for row, confidence, picture, cells in zip(rows, confidences(rows), pictures, columns, strict=True):
        about = f"predicted as {row.predicted}, outlier score {row.score:.4g}"
        name = str(row.origin) or f"sample {row.index}"
        text = "\n".join([name, *(f"{name}: {cell}" for name, cell in cells.items())])
        shown = {"image": picture} if any(pictures) else {"text": text}
        label = OOD if row.decision == KEEP else ID
        control = {"id": f"{row.filter}-{row.index}", "from_name": "decision", "to_name": "sample", "type": "choices"}
        result = {**control, "value": {"choices": [label]}}  # every result needs an id of its own
        tasks.append(
            {
                "data": {key: _plain(value) for key, value in {**shown, "about": about, **asdict(row)}.items()},
                "predictions": [{"model_version": row.filter, "score": confidence, "result": [result]}],
            }
        )
    return tasks


def _plain(value: Any) -> Any:
    """Names may hold bytes that are not text."""
    return NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value


def write_label_studio(path: Path, tasks: Sequence[dict[str, Any]]) -> list[Path]:
    """The tasks, and beside them the labeling config that they need."""
    config = path.with_suffix(".xml")
    has_images = any("image" in task["data"] for task in tasks)
    write_text(path, json.dumps(tasks, indent=1) + "\n")
    write_text(config, LABELING_CONFIG.format(shown=IMAGE if has_images else TEXT))
    return [path, config]


def read_label_studio(
    path: Path, workspace: Workspace, params: Params, experiments: Iterable[Experiment]
) -> list[ReviewRow]:
    """The decisions in a JSON export, for every task in it; what nobody labeled stays as the filter decided."""
    by_mark = {filter_mark(workspace.find(one.candidates), one): one for one in experiments}
    n_wild = {m: len(read_candidates(workspace.find(one.candidates)).wild_score) for m, one in by_mark.items()}
    labels: dict[str, dict[int, set[str]]] = {mark: {} for mark in by_mark}
    for number, task in enumerate(_exported(path), start=1):
        name, data = f"{path}, task {task.get('id', number)}", task.get("data")
        if not isinstance(data, dict) or not isinstance(data.get("filter"), str):
            hint = "; export JSON, not JSON-MIN" if "filter" in task else ""
            raise SalError(f"{name} was not written by `salcli review --to label-studio`{hint}")
        mark, index = data["filter"], data.get("index")
        if mark not in by_mark:
            raise SalError(
                f"{name} is about another project or another run of the filter ({mark}) than what is here "
                f"({', '.join(by_mark)}); write the tasks again: salcli review --to label-studio"
            )
        if type(index) is not int or not 0 <= index < n_wild[mark]:
            raise SalError(f"{name} is about wild sample {index}, which does not exist; there are {n_wild[mark]}")
        own = labels[mark].setdefault(index, set())
        own.update(_labels_of(name, task))
        if len(own) > 1:
            raise SalError(f"{name}: wild sample {index} is labeled both OOD and ID; keep one of the annotations")
    return [
        replace(row, decision=_decided(row.decision, labels[mark][row.index]))
        for mark, experiment in by_mark.items()
        for row in _rows_of(workspace, params, experiment, np.array([*labels[mark]], dtype=np.int64))
    ]


def _exported(path: Path) -> list[dict[str, Any]]:
    check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SalError(f"{path} does not exist; export JSON from Label Studio") from None
    except (ValueError, RecursionError) as error:
        raise SalError(f"{path} is not JSON ({error}); export JSON from Label Studio") from None
    if not isinstance(content, list) or not content or not all(isinstance(task, dict) for task in content):
        raise SalError(f"{path} is not a list of tasks; export JSON from Label Studio")
    return content


def _labels_of(name: str, task: Mapping[str, Any]) -> list[str]:
    """What people chose; a skipped task has no label."""
    if not isinstance(task.get("annotations"), list):
        raise SalError(f"{name} has no annotations: these are tasks, not an export; export JSON from Label Studio")
    try:
        chosen = [
            choice
            for annotation in task["annotations"]
            if not annotation.get("was_cancelled")
            for result in annotation["result"]
            if result.get("from_name") == "decision"  # relations have none
            for choice in result["value"]["choices"]
        ]
    except (KeyError, TypeError, AttributeError):
        raise SalError(f"{name} has annotations in another form than Label Studio's JSON") from None
    for choice in chosen:
        if choice not in (OOD, ID):
            raise SalError(f"{name} is labeled {choice}, and must be OOD or ID as in the labeling config")
    return chosen


def _decided(decision: str, labels: set[str]) -> str:
    """As a word of the list. `decision` is the filter's: keep for a candidate, else empty."""
    if not labels:
        return decision
    if OOD in labels:
        return KEEP if decision else ADD
    return DROP if decision else ""
