"""Tests that left the data tests because they are about params, the report or the command line: to be moved there."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fake_data import lay_out
from helpers.preparing import data_params, files
from PIL import Image
from test_cli import process, salcli, write_params
from test_params import complaints

from salcli.data.catalogue import DATA_SETS
from salcli.errors import ParamsError

SIZE = 8
SHARES = {"train": 0.6, "calibration": 0.2, "wild": 0, "test": 0.2}


# --- params


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"data.own": {"My photos": "x"}}, "data.own", "a set's name must be of a-z, 0-9, - and _"),
        ({"data.own": {"2023": "x"}}, "data.own", "and begin with a letter, got '2023'"),
        ({"data.own": {"svhn": "x"}}, "data.own", "svhn has a meaning of its own here; choose another name"),
        ({"data.own": {"networks": "x"}}, "data.own", "networks has a meaning of its own here"),
        ({"data.own": {"photos": "x"}, "data.id": "photo"}, "data.id", "did you mean photos?"),
        ({"data.own": {"photos": "x"}, "data.ood": ["phots"]}, "data.ood.0", "did you mean photos?"),
        ({"data.pi": "unknown"}, "data", "pi is unknown: the wild data come as they are, so id_shares.wild must be 0"),
        ({"data.id_shares": SHARES}, "data", "id_shares.wild is 0, which is for wild data that come as they are"),
        ({"data.pi": "unkown"}, "data.pi", "must be a valid number, got 'unkown'"),
    ],
)
def test_what_params_may_say_of_own_sets(changes: dict[str, Any], key: str, message: str) -> None:
    assert message in complaints(changes)[key]


def test_the_params_import_no_decoder() -> None:
    heavy = {"PIL", "torch", "torchvision", "pytorch_ood", "sklearn", "scipy"}
    code = f"import sys, salcli.params; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    done = process(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_id_and_ood_must_differ() -> None:
    with pytest.raises(ParamsError, match=r"data.ood  must not name the ID set, got cifar10"):
        data_params(Path(), "cifar10", ["svhn", "cifar10"])
    assert data_params(Path(), "cifar10", ["fashion-mnist"]).ood == ("fashion-mnist",)


# --- the report


def test_unknown_figures_are_null_in_json_and_unknown_in_tables(tmp_path: Path) -> None:
    from salcli.reporting.results import Results
    from salcli.reporting.results_table import flat, markdown

    nothing = {"fpr95": None, "auroc": None, "aupr_in": None, "aupr_out": None, "id_accuracy": 0.75}
    known = {"fpr95": 0.5, "auroc": 0.9, "aupr_in": 0.8, "aupr_out": 0.7, "id_accuracy": 0.75}
    place = tmp_path / "runs" / "0" / "unlabeled"
    place.mkdir(parents=True)
    samples = {"id_test": 8, "ood_test": 0}
    (place / "metrics.json").write_text(json.dumps({"sal": nothing, "msp": nothing, "samples": samples}))
    shown = markdown(Results.from_folder(tmp_path / "runs"))
    assert "| unlabeled | SAL | unknown | unknown | unknown | unknown | **75.0** |" in shown
    assert "nobody knows what of them is OOD" in shown
    rows = json.loads(flat(Results.from_folder(tmp_path / "runs")).to_json(orient="records"))
    assert rows[0]["fpr95_mean"] is None
    (place / "unseen" / "odd").mkdir(parents=True)
    content = {"sal": known, "msp": known, "samples": {"id_test": 8, "ood_test": 3}}
    (place / "unseen" / "odd" / "metrics.json").write_text(json.dumps(content))
    both = Results.from_folder(tmp_path / "runs")
    assert {row.ood for row in both.rows()} == {"odd"}  # and no average with what is unknown
    assert "unknown" not in markdown(both).split("\n\n")[0]


# --- the command line


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    lay_out(root, DATA_SETS, n_per_class=4)
    return root


def test_the_command_line_prepares_a_real_format_and_shows_the_counts(
    laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"train": 0.25, "calibration": 0.25, "wild": 0.5, "test": "official"}
    settings = {"data.image_size": 32, "data.channels": 3, "data.id_shares": shares, "seeds": [0]}
    sets = {"data.root": str(laid_out), "data.id": "cifar10", "data.ood": ["svhn", "textures"]}
    write_params(tmp_path, settings | sets)
    monkeypatch.chdir(tmp_path)
    result = salcli("prepare")
    assert result.exit_code == 0, result.output
    assert "images 50  classes 10" in result.output
    assert "test 10" in result.output


def test_a_missing_set_is_refused_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params(tmp_path, {"data.id": "cifar10", "data.image_size": 32, "data.channels": 3})
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    result = salcli("prepare")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cifar10 is not there: looked for cifar-10-batches-py, cifar10/ and ")
    assert files(tmp_path) == before


@pytest.fixture
def with_bad_images(tmp_path: Path) -> Path:
    """Class a has 5 images, three of them bad; class b has 2 good ones."""
    root = tmp_path / "root"
    for value, name in enumerate(("a/1.png", "a/2.png", "b/1.png", "b/2.png")):
        (root / "cifar10" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((SIZE, SIZE, 3), value, np.uint8)).save(root / "cifar10" / name)
    (root / "cifar10" / "a" / "empty.png").write_bytes(b"")
    (root / "cifar10" / "a" / "foreign.jpg").write_bytes(b"<html>not found</html>")
    short = root / "cifar10" / "a" / "short.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(short)
    short.write_bytes(short.read_bytes()[:150])
    return root


def test_the_table_shows_what_was_skipped(
    with_bad_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"data.image_size": SIZE, "data.channels": 3, "data.root": "root", "data.id": "cifar10"}
    write_params(tmp_path, shape)
    monkeypatch.chdir(tmp_path)
    result = salcli("prepare", "id-set")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: root/cifar10/a/empty.png cannot be decoded: it is empty; replace")
    write_params(tmp_path, {**shape, "data.on_bad_image": "skip"})
    result = salcli("prepare", "id-set")
    assert result.exit_code == 0, result.output
    assert "images 4  classes 2  skipped 3" in result.output
    assert "cifar10/a/empty.png (it is empty)" in " ".join(result.output.split())
