"""`salcli init` on the command line: what it prints, which options belong together, and its exit codes."""

import os
from pathlib import Path

import pytest
from helpers.cli import files, refused, salcli
from helpers.custom_images import lay_out, options

from salcli.params.presets import preset, text
from salcli.params.schema import load_params


def init(folder: Path, *arguments: str) -> str:
    result = salcli("init", str(folder), *arguments)
    assert result.exit_code == 0, result.stderr
    tables = [
        line for line in result.stdout.splitlines() if not line.startswith(("created", "next", "note", "warning"))
    ]
    assert all(len(line) <= 100 for line in tables)
    return str(result.stdout)


def test_it_says_what_it_created_and_what_comes_next(tmp_path: Path) -> None:
    shown = init(tmp_path / "b c")
    assert f"created in {tmp_path}/b c: params.yaml, dvc.yaml, " in shown
    assert "no git repository: fine for dvc repro; for dvc exp, git init && dvc config core.no_scm false\n" in shown
    assert shown.endswith(f"next: cd '{tmp_path}/b c' && dvc repro\n")
    assert "data to fetch" not in shown


def test_without_a_name_it_is_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = salcli("init", "--no-dvc")
    assert result.stdout.endswith("next: dvc init --no-scm && dvc repro\n")
    assert (tmp_path / "params.yaml").read_text() == text(preset("default"))
    assert not (tmp_path / ".dvc").exists()


def test_a_preset_of_the_paper_names_the_data_to_fetch(tmp_path: Path) -> None:
    shown = init(tmp_path, "--preset", "singular-vectors", "--no-dvc", "--set", "seeds=[5]")
    assert "data to fetch: cifar100, textures\n" in shown
    assert "&& salcli data fetch cifar100 textures && dvc init --no-scm && dvc repro\n" in shown
    assert load_params(tmp_path / "params.yaml")[0].seeds == (5,)


def test_a_folder_in_use_is_left_alone_and_force_overwrites(tmp_path: Path) -> None:
    for name in ("params.yaml", "README.md"):
        (tmp_path / name).write_text("mine")
    assert "already holds params.yaml; overwrite with --force" in refused("init", str(tmp_path), root=tmp_path)
    photos = lay_out(tmp_path / "elsewhere")
    assert "already holds params.yaml" in refused("init", str(tmp_path), *options(photos), root=tmp_path)
    assert "left as it was: README.md\n" in init(tmp_path, "--force", "--no-dvc")
    assert (tmp_path / "params.yaml").read_text() == text(preset("default"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--preset", "toyy"], "no preset is called toyy (did you mean toy?)"),
        (["--set", "seedz=1"], "seedz  no such key (did you mean seeds?)"),
        (["--set", "data.pi"], "must be KEY=VALUE"),
        (["--id", "x"], "--id needs --wild as well"),
        (["--model", "resnet18"], "--model needs --id and --wild as well"),
        (["--test-ood", "x"], "--test-ood needs --id and --wild as well"),
        (["--id", "x", "--wild", "y", "--preset", "cifar10"], "--preset cifar10 is for published data"),
        (["--id", "x", "--wild", "y", "--weights", "net.pt"], "--weights is about a network; name that with --model"),
        (["--id", "x", "--wild", "y", "--model", "m:n", "--mean", "a"], "--mean a: must be a number"),
        (["--id", "nowhere", "--wild", "nowhere"], "nowhere does not exist"),
    ],
)
def test_a_mistake_leaves_no_folder_behind(tmp_path: Path, arguments: list[str], reason: str) -> None:
    message = refused("init", str(tmp_path / "a" / "b"), *arguments, root=tmp_path)
    assert message.startswith("error: ")
    assert reason in message
    assert list(tmp_path.iterdir()) == []


# --- custom images


def test_the_plan_for_custom_images_is_shown(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    (photos / "labeled" / "b" / "empty.png").write_bytes(b"")
    shown = init(tmp_path / "d", *options(photos), "--test-ood", str(photos / "known-odd"), "--set", "seeds=[3]")
    said = " ".join(shown.split())
    for words in (
        "labeled: 40 images", "a, b 20 images each", "unlabeled: 24 images", "known-odd: 8 images", "small-cnn",
        "1 files of labeled, left out b/empty.png (it is empty)", "warning: only 8 calibration images",
        f"next: cd {tmp_path}/d && dvc init --no-scm && dvc repro",
    ):  # fmt: skip
        assert words in said
    assert load_params(tmp_path / "d" / "params.yaml")[0].seeds == (3,)


NAMES = ["with space", "quo\"te's", "ünï ☃", "new\nline", "$(touch x)", "[red]", os.fsdecode(b"no\xfftext")]


def test_names_are_only_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is run, read as markup, or breaks the output."""
    monkeypatch.chdir(tmp_path)
    photos = lay_out(tmp_path)
    for kind, name in zip("ab", NAMES[-2:], strict=True):
        (photos / "labeled" / kind).rename(photos / "labeled" / name)
    for i, name in enumerate(NAMES):
        (photos / "unlabeled" / "day 0").joinpath(f"{3 * i}.png").rename(photos / "unlabeled" / f"{name}.png")
        (photos / "unlabeled" / f"bad {name}.png").write_bytes(b"")
    (photos / "unlabeled").rename(photos / NAMES[1])
    shown = init(tmp_path / "d", *options(photos)[:2], "--wild", str(photos / NAMES[1]), "--no-dvc")
    assert "[red]" in shown
    assert load_params(tmp_path / "d" / "params.yaml")[0].data.custom["quo-te-s"] == str(photos / NAMES[1])
    done = salcli("prepare", "--params", str(tmp_path / "d" / "params.yaml"))
    assert done.exit_code == 0, done.stderr
    assert "classes 2" in done.stdout
    assert "x" not in {Path(name).name for name in files(tmp_path)}
