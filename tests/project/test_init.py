"""A project folder: everything is created, or nothing is; and the work that it will be, counted again by hand."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import files

from salcli.errors import ParamsError, SalError
from salcli.params.presets import preset, resolved, text
from salcli.params.reading import read_yaml
from salcli.project import cost
from salcli.project.cost import estimated_images
from salcli.project.init import create

PLAIN = {"params.yaml", "dvc.yaml", ".gitignore", "README.md"}
OF_DVC = {".dvcignore", ".dvc/config", *(f".dvc/plots/{name}.json" for name in ("roc", "scores", "training"))}
DEFAULT = preset("default")


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dvc(*arguments: str, cwd: Path) -> str:
    return run(sys.executable, "-m", "dvc", *arguments, cwd=cwd)


def created(root: Path) -> set[str]:
    """Files, without those of git and the temporary ones of DVC."""
    others = (".dvc/tmp/", ".dvc/cache/", ".dvc/.gitignore", ".git/")
    return {name for name in files(root) if not name.startswith(others)}


def refused(kind: type[SalError], folder: Path, **options: Any) -> str:
    with pytest.raises(kind) as error:
        create(folder, options.pop("preset", DEFAULT), **options)
    return str(error.value)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty git repository."""
    run("git", "init", "-q", cwd=tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("below", "no_scm"), [(None, True), ("", False), ("experiments/one", False)], ids=["no git", "git top", "below"]
)
def test_an_empty_folder_gets_everything_and_dvc_knows_whether_there_is_git(
    tmp_path: Path, below: str | None, no_scm: bool
) -> None:
    if below is not None:
        run("git", "init", "-q", cwd=tmp_path)
    folder = tmp_path / (below or "")
    project = create(folder, DEFAULT)
    assert created(folder) == PLAIN | OF_DVC
    assert (folder / "data").is_dir()
    assert (folder / "params.yaml").read_text() == text(DEFAULT)
    assert project.next_commands == ["dvc repro"]
    config = (folder / ".dvc" / "config").read_text()
    assert ("no_scm = true" in config) == no_scm == (not project.is_in_git)
    assert "analytics = false" in config
    assert "check_update = false" in config


@pytest.mark.slow
def test_dvc_understands_the_folder_and_force_keeps_its_files(repository: Path) -> None:
    create(repository, DEFAULT)
    stages = dvc("stage", "list", "--all", "--name-only", cwd=repository).split()
    assert any(stage.startswith("evaluate@digits-8-9") for stage in stages)
    (repository / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    autostage = true\n")
    before = files(repository)
    create(repository, DEFAULT, force=True)
    assert files(repository) == before, "with force, DVC's files stay"


def test_git_ignores_what_is_fetched_and_built(repository: Path) -> None:
    create(repository, DEFAULT, dvc=False)
    for name in ("data/raw/x", "runs/0/x", "scratch/x", ".salcli/fingerprints.json", ".salcli/resume/x", ".x.partial"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).touch()
    assert set(run("git", "ls-files", "--others", "--exclude-standard", cwd=repository).split()) == PLAIN


def test_a_preset_of_the_paper_says_which_data_it_needs(tmp_path: Path) -> None:
    (tmp_path / "data" / "raw" / "svhn" / "one").mkdir(parents=True)  # exists already
    project = create(tmp_path, preset("resnet18"), dvc=False)
    fetch = "salcli data fetch cifar100 places365 lsun-c lsun-r textures"
    assert project.next_commands == [fetch, "dvc init --no-scm", "dvc repro"]
    readme = (tmp_path / "README.md").read_text()
    assert "ResNet-18 as the network (Table 19, Appendix U of the paper)." in readme
    assert all(f"\n- `salcli {command}" in readme for command in ("table", "report", "predict PATH…"))
    assert f"```\n{fetch}\ndvc init --no-scm\ndvc repro\nsalcli table --paper\n" in readme
    assert (tmp_path / "params.yaml").read_text() == text(preset("resnet18"))


def test_a_workflow_is_written_at_the_top_of_a_repository_only(repository: Path) -> None:
    below = repository / "below"
    message = refused(SalError, below, ci="github", dvc=False)
    assert f"at the top of a repository, and {below} is below; run `salcli init . …` at the top, or leave" in message
    create(repository, DEFAULT, ci="github", dvc=False)
    assert created(repository) == PLAIN | {".github/workflows/salcli.yml"}
    assert "SALCLI: ${{ vars.SALCLI || 'salcli' }}" in (repository / ".github/workflows/salcli.yml").read_text()


def test_a_workflow_installs_what_the_params_need_and_data_elsewhere_are_noted(tmp_path: Path) -> None:
    custom = {"a": "data/a.parquet", "b": ["/b/1.npz", "../2.PQ"], "c": "data/../..c"}
    project = create(tmp_path, DEFAULT, {"data.custom": custom}, ci="github", dvc=False)
    workflow = tmp_path / ".github/workflows/salcli.yml"
    assert "|| 'salcli[parquet]' }}" in workflow.read_text()
    (note,) = project.notes
    assert note.startswith("a CI runner will not have /b/1.npz, ../2.PQ: absolute, or outside the project;")
    workflow.unlink()
    values = {"data.custom": {"a": "data/a"}, "model.backbone": "timm:test_resnet"}
    assert create(tmp_path, DEFAULT, values, ci="github", dvc=False, force=True).notes == []
    assert "|| 'salcli[timm]' }}" in workflow.read_text()


def test_existing_files_are_kept_and_force_overwrites_only_params_and_pipeline(tmp_path: Path) -> None:
    for name in ("params.yaml", "dvc.yaml", "README.md", ".gitignore"):
        (tmp_path / name).write_text("mine")
    before = files(tmp_path)
    assert refused(SalError, tmp_path) == (
        f"{tmp_path} already holds params.yaml and dvc.yaml; overwrite with --force, or name another folder"
    )
    refused(ParamsError, tmp_path, force=True, values={"seedz": [2]})
    assert files(tmp_path) == before
    assert create(tmp_path, DEFAULT, force=True, dvc=False).kept == [".gitignore", "README.md"]
    assert (tmp_path / "params.yaml").read_text() == text(DEFAULT)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_what_dvc_refuses_is_reported_and_undone(repository: Path) -> None:
    (repository / ".gitignore").write_text(".dvc\n")
    message = refused(SalError, repository)
    assert "dvc init failed" in message
    assert "ignored by your SCM tool" in message
    assert "--no-dvc" in message
    assert created(repository) == {".gitignore"}
    assert not (repository / "data").exists()


def params_of(name: str, **values: Any) -> dict[str, Any]:
    return resolved(preset(name), {key.replace("__", "."): value for key, value in values.items()})


def test_work_is_counted_as_by_hand() -> None:
    """near-cifar100: 22,500 training images; the wild set is limited by its 25,000 ID images; SAL and WOODS."""
    train_id, train_ood = 22_500 * 100, 2 * (2 * 22_500 * 100)
    passes = 22_500 + 2_500 + round(25_000 / 0.9) + 3 * (10_000 + 10_000)
    one = estimated_images(params_of("near-cifar100", variants=["sal"]))
    assert one == train_id + train_ood + passes
    two = estimated_images(params_of("near-cifar100", variants=["sal", "sal-2"]))
    assert two - one == 2 * 22_500 * 100 + 20_000, "one more training, and one pass over the test images"
    shares = [0.05, 0.1, 0.5]
    apart = [estimated_images(params_of("near-cifar100", data__pi=[pi])) for pi in shares]
    saved = sum(apart) - estimated_images(params_of("near-cifar100", data__pi=shares))
    assert saved == pytest.approx(2 * (22_500 * 100 + 25_000), abs=2), "the ID classifier is trained once"


def test_stages_are_counted_as_dvc_does(tmp_path: Path) -> None:
    create(tmp_path, preset("default"), {"seeds": [0, 1, 2], "data.test_ood": ["textures"], "rivals": ["oe"]})
    listed = dvc("stage", "list", "--name-only", cwd=tmp_path).split()
    assert cost.n_processes(read_yaml(tmp_path / "params.yaml")) == len(listed)
