"""Every path of a project, the command that makes it, what it belongs to, and scratch runs."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import typer
from helpers.cli import files

from salcli.cli.app import app
from salcli.errors import BadArtifactError
from salcli.store.files import write_arrays
from salcli.store.layout import Artifact, Experiment, Workspace, prepared_set, unseen_set

EXPERIMENT = Experiment(3, "digits-8-9", 0.1, "sal-2")
ARTIFACTS: dict[str, Artifact] = {
    "prepared set": prepared_set("digits-8-9"),
    "unseen set": unseen_set("textures"),
    "split": EXPERIMENT.split,
    "classifier": EXPERIMENT.classifier,
    "its curve": EXPERIMENT.train_id("csv"),
    "encoder": EXPERIMENT.encoder("csi"),
    "its training": EXPERIMENT.encoder_curve("csi"),
    **{f"ID {part}": EXPERIMENT.id_representation(part) for part in ("train", "calibration", "test")},
    "wild set": EXPERIMENT.wild,
    "truth": EXPERIMENT.truth,
    "wild representation": EXPERIMENT.wild_representation,
    "held-out wild data": EXPERIMENT.wild_holdout,
    "OOD test set": EXPERIMENT.ood_test,
    "their representation": EXPERIMENT.wild_holdout_representation,
    "test representation": EXPERIMENT.test_representation(),
    "unseen representation": EXPERIMENT.test_representation("textures"),
    "network": EXPERIMENT.network("woods"),
    "custom network": EXPERIMENT.network("my_code:Method"),
    "curve": EXPERIMENT.curve("woods"),
    "evaluation": EXPERIMENT.evaluation("metrics.json"),
    "unseen evaluation": EXPERIMENT.evaluation("metrics.json", "textures"),
    "candidates": EXPERIMENT.candidates,
    "filter metrics": EXPERIMENT.filter_metrics,
    "detector": EXPERIMENT.detector,
    "theory": EXPERIMENT.theory("json"),
}
WITH_ROOTS = {name: artifact for name, artifact in ARTIFACTS.items() if artifact.roots}
EDGES = [(name, root) for name, artifact in WITH_ROOTS.items() for root in artifact.roots]


def write(workspace: Workspace, artifact: Artifact, content: int = 0) -> None:
    """A file of the artifact, made from the roots as they are now."""
    arrays = {"x": np.array([content])}
    write_arrays(workspace.target(artifact), "kind", arrays, workspace.about(artifact, seed=3))


@pytest.fixture
def project(tmp_path: Path) -> Workspace:
    """Every artifact, each made after its roots."""
    workspace = Workspace(tmp_path / "project")
    for artifact in sorted(ARTIFACTS.values(), key=_depth):
        write(workspace, artifact)
    return workspace


def _depth(artifact: Artifact) -> int:
    return max((1 + _depth(root) for root in artifact.roots), default=0)


# --- paths and commands


def test_every_artifact_has_a_path_of_its_own() -> None:
    paths = [artifact.path for artifact in ARTIFACTS.values()]
    assert len(set(paths)) == len(paths)
    assert not any(Path(path).is_absolute() for path in paths)
    others = [Experiment(4, "digits-8-9", 0.1), Experiment(3, "svhn", 0.1), Experiment(3, "digits-8-9", 1)]
    assert len({one.network("sal").path for one in (EXPERIMENT, *others)}) == 4
    assert EXPERIMENT.with_variant("sal").candidates.path != EXPERIMENT.candidates.path
    assert Experiment(3, "svhn", 1.0).wild.path == Experiment(3, "svhn", 1).wild.path, "as dvc.yaml writes it"


@pytest.mark.parametrize("name", ARTIFACTS)
def test_the_command_that_makes_an_artifact_is_one_that_salcli_takes(name: str) -> None:
    program, command, *arguments = shlex.split(ARTIFACTS[name].made_by)
    assert program == "salcli"
    parser = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    parser.make_context(command, arguments)
    parser.make_context(command, [*arguments, "--scratch"])  # what Workspace.find adds


# --- lineage


@pytest.mark.parametrize(("name", "root"), EDGES, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_file_made_with_another_root_is_refused(project: Workspace, name: str, root: Artifact) -> None:
    artifact = ARTIFACTS[name]
    assert project.find(artifact).path == project.root / artifact.path
    write(project, root, content=1)
    reason = rf"{artifact.path} was made with another {Path(root.path).name} \(.*; run dvc repro, or {artifact.made_by}"
    with pytest.raises(BadArtifactError, match=reason):
        project.find(artifact)
    for one in sorted({*artifact.roots, artifact} - {root}, key=_depth):
        write(project, one)
    assert project.find(artifact).path == project.root / artifact.path


@pytest.mark.parametrize("name", [name for name in WITH_ROOTS if EXPERIMENT.split not in WITH_ROOTS[name].roots])
def test_a_root_that_is_out_of_date_itself_is_refused(project: Workspace, name: str) -> None:
    """After a new split, the classifier and the wild set are of the old one."""
    write(project, EXPERIMENT.split, content=1)
    with pytest.raises(BadArtifactError, match=r"classifier.safetensors was made with another id.h5"):
        project.find(ARTIFACTS[name])


# --- scratch


def test_a_scratch_run_writes_below_scratch_and_reads_from_there_first(project: Workspace) -> None:
    scratch, artifact = Workspace(project.root, scratch=True), ARTIFACTS["candidates"]
    assert scratch.find(artifact).path == project.root / artifact.path
    before = files(project.root)
    write(scratch, artifact, content=5)
    assert files(project.root).items() - before.items() == {
        (f"scratch/{artifact.path}", scratch.find(artifact).path.read_bytes())
    }
    assert scratch.find(artifact).made_by == f"{artifact.made_by} --scratch"
    assert list(scratch.read_from_scratch) == [artifact.path]
    assert project.find(artifact).path == project.root / artifact.path


def test_a_scratch_root_refuses_what_was_made_outside_with_another_one(project: Workspace) -> None:
    """A classifier of a scratch run does not fit representations of the real one."""
    scratch, wild = Workspace(project.root, scratch=True), ARTIFACTS["wild representation"]
    write(scratch, ARTIFACTS["classifier"], content=5)
    assert project.find(wild).path == project.root / wild.path
    with pytest.raises(BadArtifactError, match=r"was made with another classifier.safetensors"):
        scratch.find(wild)
    write(scratch, wild)
    assert scratch.find(wild).path == project.root / "scratch" / wild.path
