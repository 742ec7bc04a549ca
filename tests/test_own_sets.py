"""Sets of one's own in params.yaml: folders, lists, wild data as they come."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from own_images import lay_out, picture, save
from test_params import complaints

from salcli.artifacts import layout
from salcli.artifacts.fingerprint import fingerprint_of_listing
from salcli.artifacts.images import read_file_names, read_image_set
from salcli.artifacts.layout import Workspace
from salcli.artifacts.splits import read_id_split, read_ood_test, read_wild_source
from salcli.data.duplicates import first_of_each, pixel_digests
from salcli.data.own_sets import NAME, TAKEN, name_for, read_from_own, read_own
from salcli.data.splits import split_id
from salcli.errors import DataError
from salcli.params import DataParams, load_params
from salcli.stages import prepare
from salcli.stages.diagnosis import known_truth
from salcli.stages.inputs import ood_test_images, unseen_ood_images, wild_images

SHARES = {"train": 0.6, "calibration": 0.2, "wild": 0, "test": 0.2}
OWN = {
    "data.id": "labeled", "data.ood": ["unlabeled"], "data.test_ood": ["known-odd"], "data.pi": "unknown",
    "data.id_shares": SHARES, "data.on_bad_image": "skip",
}  # fmt: skip


def own_params(photos: Path, **changes: Any) -> DataParams:
    places = {name: str(photos / name) for name in ("labeled", "unlabeled", "known-odd")}
    more = {f"data.{key}": value for key, value in changes.items()}
    return load_params(REPOSITORY / "params.yaml", {**OWN, "data.own": places, **more})[0].data


def prepared(root: Path, params: DataParams, seed: int = 0) -> Workspace:
    workspace = Workspace(root)
    for name in (params.id, *params.ood):
        prepare.prepare_set(workspace, params, name)
    for name in params.test_ood:
        prepare.prepare_unseen_set(workspace, params, name)
    prepare.prepare_split(workspace, params, seed)
    return workspace


# --- names and places


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


@given(st.text(max_size=20).filter(lambda name: "/" not in name and "\0" not in name), st.lists(st.text(max_size=3)))
def test_any_folder_gets_a_name_that_params_take(name: str, taken: list[str]) -> None:
    found = name_for(Path("somewhere") / name, taken, "wild")
    assert NAME.fullmatch(found)
    assert found not in {*taken, *TAKEN}


def test_the_names_of_files_are_kept_with_their_images(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    odd_name = os.fsdecode(b'caf\xe9 "1"\n.png')
    save(photos / "labeled" / "b" / odd_name, picture("b", np.random.default_rng(9)))
    workspace = prepared(tmp_path / "w", own_params(photos))
    names = read_file_names(workspace.find(layout.prepared_set("labeled")))
    assert len(names) == len(read_image_set(workspace.find(layout.prepared_set("labeled")))) == 41
    assert names[0] == "a/0.png"
    assert f"b/{odd_name}" in names


# --- lists


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def test_a_list_needs_no_header_and_counts_from_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "list.csv", 'x/1.png,cat\n"x/with, comma\nand line.png", dog \n\n/elsewhere/2.png,cat\n')
    source = read_own("mine", file, labeled=True)
    assert source.pictures == (
        tmp_path / "x/1.png", tmp_path / "x/with, comma\nand line.png", Path("/elsewhere/2.png")
    )  # fmt: skip
    assert source.class_names == ("cat", "dog")
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1, 0]
    assert source.is_test is None


def test_a_list_with_a_header_has_its_columns_in_any_order_and_may_have_a_split(tmp_path: Path) -> None:
    text = "\ufeffLabel,note,PATH,split\n10,x,a.png,train\n9,,b.png,test\n"
    source = read_own("mine", write(tmp_path / "list.csv", text), labeled=True)
    assert source.class_names == ("9", "10")  # numbers by their value
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0]
    assert source.is_test is not None
    assert source.is_test.tolist() == [False, True]


def test_a_list_of_wild_images_needs_no_labels(tmp_path: Path) -> None:
    file = write(tmp_path / "list.csv", os.fsdecode(b"a.png\n\xff.png,what\n"))
    source = read_own("mine", file, labeled=False)
    assert source.labels is None
    assert source.pictures == (tmp_path / "a.png", tmp_path / os.fsdecode(b"\xff.png"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "lists no images"),
        ("path,label\n", "lists no images"),
        ("path,name\na.png,b\n", "has no column label"),
        ("a.png,b\nc.png\n", "line 2: there is no label"),
        ("a.png,b\n,c\n", "line 2: there is no path"),
        ('a.png,b\n"c.png,d\n', "line 2: unexpected end of data"),
        ("path,label,split\na.png,b,dev\n", "the column split must hold train or test, got 'dev'"),
    ],
)
def test_a_list_that_cannot_be_read_says_where(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        read_own("mine", write(tmp_path / "list.csv", text), labeled=True)
    assert reason in str(caught.value)


def test_a_changed_list_or_file_or_linked_folder_changes_the_fingerprint(tmp_path: Path) -> None:
    photos = lay_out(tmp_path, 5, 4, 2)
    listed = write(tmp_path / "list.csv", "photos/labeled/a/0.png,a\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "c").symlink_to(photos / "labeled" / "a")
    for place in (listed, tmp_path / "linked"):
        before = fingerprint_of_listing(read_from_own("mine", place))
        os.utime(photos / "labeled" / "a" / "0.png", (1, 1))
        assert fingerprint_of_listing(read_from_own("mine", place)) != before
        os.utime(photos / "labeled" / "a" / "0.png")
    before = fingerprint_of_listing(read_from_own("mine", listed))
    listed.write_text("photos/labeled/a/0.png,b\n")
    assert fingerprint_of_listing(read_from_own("mine", listed)) != before


# --- splits


@pytest.mark.parametrize("seed", [0, 1])
def test_no_picture_is_in_two_parts_whatever_is_copied_where(tmp_path: Path, seed: int) -> None:
    """The slow truth: the pixels themselves, of every part."""
    photos = lay_out(tmp_path)
    first = (photos / "labeled" / "a" / "0.png").read_bytes()
    for copy in ("labeled/a/copy.png", "labeled/b/copy.png", "unlabeled/copy.png", "known-odd/copy.png"):
        (photos / copy).write_bytes(first)
    (photos / "known-odd" / "wild.png").write_bytes((photos / "unlabeled" / "day 0" / "3.png").read_bytes())
    params = own_params(photos)
    workspace = prepared(tmp_path / "w", params, seed)
    mixed = prepare.prepare_wild(workspace, params, "unlabeled", seed)
    assert mixed.counts == {"wild": 24, "OOD test": 0}
    assert mixed.note == "unlabeled: 1 images are in labeled as well, pixel by pixel, and are left out"

    id_images = read_image_set(workspace.find(layout.prepared_set("labeled"))).images
    wild_images = read_image_set(workspace.find(layout.prepared_set("unlabeled"))).images
    split = read_id_split(workspace.find(layout.id_split(seed)))
    found = workspace.find(layout.wild_mixture("unlabeled", seed))
    unseen = unseen_ood_images(workspace, params, "known-odd", seed, "unlabeled")
    parts = {part: {id_images[i].tobytes() for i in index} for part, index in vars(split).items()}
    assert parts.pop("wild") == set()
    parts["wild"] = {wild_images[i - len(id_images)].tobytes() for i in read_wild_source(found)}
    parts["test OOD"] = {image.numpy().tobytes() for image in unseen.read(slice(None))}
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 24, "calibration": 8, "test": 8, "wild": 24, "test OOD": 8,
    }  # fmt: skip
    assert len(set.union(*parts.values())) == sum(len(part) for part in parts.values())
    assert len(read_ood_test(found)) == 0
    assert known_truth(workspace, 24, "unlabeled", seed) is None


def test_wild_data_that_are_all_id_data_are_refused(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    params = own_params(photos, own={"labeled": str(photos / "labeled"), "unlabeled": str(photos / "labeled" / "a"),
                                     "known-odd": str(photos / "known-odd")})  # fmt: skip
    workspace = prepared(tmp_path / "w", params)
    with pytest.raises(DataError, match="all wild images are ID images, too"):
        prepare.prepare_wild(workspace, params, "unlabeled", 0)


def test_a_test_set_that_was_seen_is_refused(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    own = {name: str(photos / name) for name in ("labeled", "unlabeled")}
    params = own_params(photos, own={**own, "known-odd": str(photos / "unlabeled" / "day 1")})
    workspace = prepared(tmp_path / "w", params)
    prepare.prepare_wild(workspace, params, "unlabeled", 0)
    with pytest.raises(DataError, match="all 8 images of known-odd are in the ID data or in the wild data"):
        unseen_ood_images(workspace, params, "known-odd", 0, "unlabeled")


def test_an_own_set_can_be_mixed_with_a_known_share(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    shares = {"train": 0.4, "calibration": 0.2, "wild": 0.2, "test": 0.2}
    params = own_params(photos, pi=0.5, id_shares=shares, ood=["known-odd"], test_ood=[])
    workspace = prepared(tmp_path / "w", params)
    mixed = prepare.prepare_wild(workspace, params, "known-odd", 0)
    assert mixed.counts == {"wild": 12, "of it OOD": 6, "OOD test": 2}
    truth = known_truth(workspace, 12, "known-odd", 0)
    assert truth is not None
    assert int(truth.sum()) == 6


def test_copies_in_an_own_set_are_never_wild_and_test_at_once(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    for path in sorted((photos / "known-odd").glob("*.png")):
        (photos / "known-odd" / f"copy of {path.name}").write_bytes(path.read_bytes())
    shares = {"train": 0.4, "calibration": 0.2, "wild": 0.2, "test": 0.2}
    params = own_params(photos, pi=0.5, id_shares=shares, ood=["known-odd"], test_ood=["known-odd"])
    workspace = prepared(tmp_path / "w", params)
    assert prepare.prepare_wild(workspace, params, "known-odd", 0).counts["OOD test"] == 2
    wild = {image.numpy().tobytes() for image in wild_images(workspace, "labeled", "known-odd", 0).read(slice(None))}
    for test in (
        ood_test_images(workspace, "known-odd", 0),
        unseen_ood_images(workspace, params, "known-odd", 0),  # as the unseen set of another experiment
    ):
        assert not wild & {image.numpy().tobytes() for image in test.read(slice(None))}


def test_a_class_with_too_few_images_is_named(tmp_path: Path) -> None:
    labels = np.array([0] * 20 + [1] * 2)
    with pytest.raises(DataError, match="class cats & co has 2 images, too few to give some to test"):
        split_id(labels, SHARES, 0, class_names=("a", "cats & co"))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_copies_are_found_as_a_slow_search_finds_them(values: list[int]) -> None:
    images = np.array(values, np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 1, 2, 2), np.uint8)
    slow = [i for i, value in enumerate(values) if value not in values[:i]]
    assert first_of_each(pixel_digests(images)).tolist() == slow


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
