"""`salcli prepare` on published formats, as a user sees it."""

from pathlib import Path

import numpy as np
import pytest
from helpers.cli import refused, salcli
from helpers.fake_data import lay_out
from helpers.quick import REPOSITORY
from PIL import Image

from salcli.params.reading import edited

SIZE = 8


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_params(folder: Path, **data: object) -> None:
    """CIFAR-10 as ID data, with other keys of data changed."""
    values = {"seeds": [0], "data.id": "cifar10", "data.ood": ["svhn"], "data.channels": 3}
    values |= {f"data.{key}": value for key, value in data.items()}
    (folder / "params.yaml").write_text(edited((REPOSITORY / "params.yaml").read_text(), values))


def test_a_published_format_is_prepared_and_its_counts_are_shown(here: Path) -> None:
    lay_out(here / "root", ["cifar10", "svhn", "textures"], n_per_class=4)
    shares = {"train": 0.25, "calibration": 0.25, "wild": 0.5, "test": "official"}
    write_params(here, root="root", ood=["svhn", "textures"], image_size=32, id_shares=shares)
    result = salcli("prepare")
    assert result.exit_code == 0, result.output
    assert "images 50  classes 10" in result.output
    assert "test 10" in result.output
    assert "next: salcli train-id" in result.output


def test_a_missing_set_is_refused_with_what_was_looked_for(here: Path) -> None:
    write_params(here, image_size=32)
    message = refused("prepare", root=here)
    assert message.startswith("error: cifar10 is not there: looked for cifar-10-batches-py, cifar10/ and ")


def test_bad_images_are_refused_or_skipped_and_listed(here: Path) -> None:
    folder = here / "root" / "cifar10"
    for value, name in enumerate(("a/1.png", "a/2.png", "b/1.png", "b/2.png")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((SIZE, SIZE, 3), value, np.uint8)).save(folder / name)
    (folder / "a" / "empty.png").write_bytes(b"")
    (folder / "a" / "foreign.jpg").write_bytes(b"<html>not found</html>")
    write_params(here, root="root", image_size=SIZE)
    message = refused("prepare", "id-set", root=here)
    assert message.startswith("error: root/cifar10/a/empty.png cannot be decoded: it is empty; replace")
    write_params(here, root="root", image_size=SIZE, on_bad_image="skip")
    result = salcli("prepare", "id-set")
    assert result.exit_code == 0, result.output
    assert "images 4  classes 2  skipped 2" in result.output
    assert "cifar10/a/empty.png (it is empty)" in " ".join(result.output.split())
