"""prepare: what is read, counted, refused and written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.cli import files
from helpers.compute import Watched
from helpers.custom_images import SIZE, lay_out, save
from helpers.quick import REPOSITORY
from helpers.stages import prepare_sets
from torch import nn

from salcli.data.decoding import Shape, read_picture
from salcli.data.duplicates import sample_digests
from salcli.errors import SalError
from salcli.models.pretrained import EmbedderSpec, Preprocessing
from salcli.params.schema import Params, load_params
from salcli.pipeline import embed, prepare
from salcli.pipeline.loading import known_truth, ood_test_samples, wild_holdout_samples, wild_origins, wild_samples
from salcli.store.files import read_header
from salcli.store.formats import (
    OOD_TEST,
    WILD_SET,
    Origin,
    names_of,
    read_digests,
    read_file_names,
    read_id_split,
    read_index,
    read_samples,
    read_shown,
)
from salcli.store.layout import Experiment, Workspace, prepared_set

CUSTOM = {
    "data.id": "labeled", "data.ood": ["unlabeled"], "data.test_ood": ["known-odd"], "data.pi": ["unknown"],
    "data.id_shares": {"train": 0.6, "calibration": 0.2, "wild": 0, "test": 0.2}, "data.on_bad_image": "skip",
}  # fmt: skip
SHARES = {"train": 0.4, "calibration": 0.2, "wild": 0.2, "test": 0.2}
WILD = Experiment(0, "unlabeled")
MIXED = Experiment(0, "known-odd", 0.5)


def custom_params(photos: Path, **changes: Any) -> Params:
    paths = {name: str(photos / name) for name in ("labeled", "unlabeled", "known-odd")}
    more = {f"data.{key}": value for key, value in changes.items()}
    return load_params(REPOSITORY / "params.yaml", {**CUSTOM, "data.custom": paths, **more})[0]


def test_bad_images_can_be_left_out_and_are_counted_but_not_a_whole_class(tmp_path: Path) -> None:
    workspace, folder = Workspace(tmp_path), tmp_path / "photos" / "labeled"
    odd_name = os.fsdecode(b'caf\xe9 "1"\n.png')
    for value, name in enumerate(("a/1.png", f"a/{odd_name}", "b/1.png", "b/2.png")):
        save(folder / name, np.full((SIZE, SIZE, 3), value, np.uint8))
    (folder / "a" / "empty.png").write_bytes(b"")
    (folder / "a" / "foreign.jpg").write_bytes(b"<html>not found</html>")
    params = custom_params(tmp_path / "photos")
    done = prepare.prepare_set(workspace, params, "labeled")
    assert done.counts == {"images": 4, "classes": 2, "skipped": 2}
    assert done.note.startswith("labeled without a/empty.png (it is empty), a/foreign.jpg (it is not ")
    found = workspace.find(prepared_set("labeled"))
    samples = read_samples(found)
    assert samples.array[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert np.asarray(samples.labels).tolist() == [0, 0, 1, 1]
    assert read_file_names(found)[:2] == ("a/1.png", f"a/{odd_name}")
    for name in ("1.png", odd_name):
        (folder / "a" / name).unlink()
    with pytest.raises(SalError, match="labeled: no image of class a could be decoded; labeled without a/emp"):
        prepare.prepare_set(workspace, params, "labeled")


def test_no_picture_is_in_two_parts_whatever_is_copied_where(tmp_path: Path) -> None:
    """The slow truth: the pixels themselves, of every part."""
    photos = lay_out(tmp_path)
    first = (photos / "labeled" / "a" / "0.png").read_bytes()
    for copy in ("labeled/a/copy.png", "labeled/b/copy.png", "unlabeled/copy.png", "known-odd/copy.png"):
        (photos / copy).write_bytes(first)
    (photos / "known-odd" / "wild.png").write_bytes((photos / "unlabeled" / "day 0" / "3.png").read_bytes())
    params = custom_params(photos)
    workspace = prepare_sets(Workspace(tmp_path / "w"), params)
    mixed = prepare.prepare_wild(workspace, params.data, WILD)
    assert mixed.counts == {"wild": 24, "held out": 0, "OOD test": 0}
    assert mixed.note == "unlabeled: 1 samples are also in labeled, exactly equal, and are left out"

    id_images = read_samples(workspace.find(prepared_set("labeled"))).array
    wild_images = read_samples(workspace.find(prepared_set("unlabeled"))).array
    split, wild = read_id_split(workspace.find(WILD.split)), read_index(workspace.find(WILD.wild), WILD_SET)
    unseen = ood_test_samples(workspace, params, WILD, "known-odd")
    parts = {part: {id_images[i].tobytes() for i in index} for part, index in vars(split).items()}
    assert parts.pop("wild") == set()
    parts["wild"] = {wild_images[i - len(id_images)].tobytes() for i in wild}
    parts["OOD test"] = {image.numpy().tobytes() for image in unseen.read(slice(None))}
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 24, "calibration": 8, "test": 8, "wild": 24, "OOD test": 8,
    }  # fmt: skip
    assert len(set.union(*parts.values())) == sum(len(part) for part in parts.values())
    assert len(read_index(workspace.find(WILD.ood_test), OOD_TEST)) == 0
    assert known_truth(workspace, 24, WILD) is None


def test_a_test_set_that_was_seen_is_refused(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    paths = {"labeled": "labeled", "unlabeled": "unlabeled", "known-odd": "unlabeled/day 1"}
    params = custom_params(photos, custom={name: str(photos / path) for name, path in paths.items()})
    workspace = prepare_sets(Workspace(tmp_path / "w"), params)
    prepare.prepare_wild(workspace, params.data, WILD)
    with pytest.raises(SalError, match="all 8 samples of known-odd are also in the ID data or in the wild data"):
        ood_test_samples(workspace, params, WILD, "known-odd")


def test_copies_in_a_custom_set_are_never_wild_and_test_at_once(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    for path in sorted((photos / "known-odd").glob("*.png")):
        (photos / "known-odd" / f"copy of {path.name}").write_bytes(path.read_bytes())
    params = custom_params(photos, pi=[0.5], id_shares=SHARES, ood=["known-odd"], test_ood=["known-odd"])
    workspace = prepare_sets(Workspace(tmp_path / "w"), params)
    mixed = prepare.prepare_wild(workspace, params.data, MIXED)
    assert mixed.counts == {"wild": 12, "of it OOD": 6, "held out": 0, "OOD test": 2}
    truth = known_truth(workspace, 12, MIXED)
    assert truth is not None
    assert int(truth.sum()) == 6
    wild = {image.numpy().tobytes() for image in wild_samples(workspace, params, MIXED).read(slice(None))}
    for unseen in ("", "known-odd"):  # of its own experiment, and as the unseen set of another one
        test = ood_test_samples(workspace, params, MIXED, unseen)
        assert not wild & {image.numpy().tobytes() for image in test.read(slice(None))}


def vector_params(root: Path, **changes: Any) -> Params:
    """Labeled vectors, wild ones in two files, and a test set; with ids and a column to show."""
    rng = np.random.default_rng(0)
    vectors = {"labeled": (40, 0), "wild-1": (15, 0), "wild-2": (10, 3), "odd": (8, 3)}
    root.mkdir(exist_ok=True)
    for name, (n, shift) in vectors.items():
        rows = {"key": [f"{name}-{i}" for i in range(n)], "text": [f"<{i}>\n\0é" for i in range(n)]}
        np.savez(root / f"{name}.npz", x=rng.normal(shift, 1, (n, 4)), y=np.arange(n) % 2, **rows)
    custom = {"labeled": "labeled.npz", "unlabeled": ["wild-1.npz", "wild-2.npz"], "known-odd": "odd.npz"}
    columns = {"vector": None, "label": None, "id": "key", "show": ["text"]}
    fixed = {"custom": custom, "columns": columns, "image_size": None, "channels": None} | changes
    more = {f"data.{key}": value for key, value in fixed.items()}
    return load_params(REPOSITORY / "params.yaml", {**CUSTOM, "model.backbone": "linear", **more})[0]


def test_vectors_are_stored_with_their_ids_and_columns(tmp_path: Path) -> None:
    """tests/project/test_calibration.py leaves out copies of vectors."""
    params = vector_params(tmp_path)
    workspace = prepare_sets(Workspace(tmp_path), params)
    found = workspace.find(prepared_set("unlabeled"))
    samples = read_samples(found)
    expected = np.concatenate([np.load(tmp_path / f"wild-{i}.npz")["x"] for i in (1, 2)]).astype(np.float32)
    np.testing.assert_array_equal(samples.array, expected, strict=True)
    assert isinstance(samples.array, np.memmap)
    assert read_file_names(found)[14:16] == ("wild-1-14", "wild-2-0")
    assert read_shown(found)["text"][14:16] == ("<14>\n\0é", "<0>\n\0é")
    assert prepare.prepare_set(workspace, params, "labeled").counts == {"vectors": 40, "classes": 2, "skipped": 0}


# --- the user's own rows

WILD_VECTORS = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)
WILD_VECTORS[3] = WILD_VECTORS[17]
IN_THE_ID_DATA = 5


def wild_npz(root: Path) -> list[str]:
    np.savez(root / "wild.npz", x=WILD_VECTORS)
    return ["wild.npz"]


def wild_npy(root: Path) -> list[str]:
    np.save(root / "wild.npy", WILD_VECTORS)
    return ["wild.npy"]


def wild_table(root: Path) -> list[str]:
    columns = {"v": pa.array(list(WILD_VECTORS)), "id": [f"r{i}" for i in range(30)]}
    pq.write_table(pa.table(columns), root / "wild.parquet")
    return ["wild.parquet"]


def two_wild_files(root: Path) -> list[str]:
    np.save(root / "one.npy", WILD_VECTORS[:20])
    np.savez(root / "two.npz", x=WILD_VECTORS[20:])
    return ["one.npy", "two.npz"]


def own_row(root: Path, origin: Origin) -> np.ndarray:
    path = root / origin.file
    if path.suffix == ".parquet":
        row = pq.read_table(path).slice(origin.row, 1).to_pylist()[0]
        assert (row["id"], str(origin)) == (origin.id, origin.id)
        return np.array(row["v"])
    assert str(origin) == f"{origin.file}:{origin.row}"
    loaded = np.load(path)
    return (loaded if path.suffix == ".npy" else loaded["x"])[origin.row]


@pytest.mark.parametrize("write", [wild_npz, wild_npy, wild_table, two_wild_files])
def test_every_wild_vector_leads_back_to_the_users_own_row(tmp_path: Path, write: Callable[[Path], list[str]]) -> None:
    """After copies of ID data were left out, and some were held out."""
    labeled = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    labeled[7] = WILD_VECTORS[IN_THE_ID_DATA]
    np.savez(tmp_path / "labeled.npz", x=labeled, y=np.arange(40) % 2)
    custom = {"labeled": str(tmp_path / "labeled.npz"), "unlabeled": [str(tmp_path / one) for one in write(tmp_path)]}
    given = {"custom": custom, "test_ood": [], "wild_holdout": 0.2, "image_size": None, "channels": None}
    more = {f"data.{key}": value for key, value in given.items()}
    params = load_params(REPOSITORY / "params.yaml", {**CUSTOM, "model.backbone": "linear", **more})[0]
    workspace = prepare_sets(Workspace(tmp_path / "w"), params)
    prepare.prepare_wild(workspace, params.data, WILD)
    seen = []
    for samples, held_out in ((wild_samples, False), (wild_holdout_samples, True)):
        rows = samples(workspace, params, WILD)
        origins = wild_origins(workspace, params, WILD, np.arange(len(rows)), held_out=held_out)
        for vector, origin in zip(rows.read(slice(None)).numpy(), origins, strict=True):
            np.testing.assert_array_equal(own_row(tmp_path, origin), vector)
        seen += [str(origin) for origin in origins]
        assert len(origins) > 4
    assert len(set(seen)) == len(seen) == 29
    (origin,) = names_of(workspace.find(prepared_set("labeled")), np.array([7]))
    assert origin == Origin("labeled.npz", 7)


@pytest.mark.parametrize("in_a_list", [True, False])
def test_every_image_leads_back_to_its_file_and_its_row_in_a_list(tmp_path: Path, in_a_list: bool) -> None:
    photos, given = lay_out(tmp_path), "unlabeled"
    (photos / "unlabeled" / "day 0" / "bad.png").write_bytes(b"bad")
    listed = [str(path.relative_to(photos)) for path in sorted((photos / "unlabeled").rglob("*.png"), reverse=True)]
    if in_a_list:
        (photos / "list.csv").write_text("\n".join(["label,path", *(f"?,{path}" for path in listed)]))
        given = "list.csv"
    params = custom_params(
        photos, custom={"labeled": str(photos / "labeled"), "unlabeled": str(photos / given)}, test_ood=[]
    )
    workspace = prepare_sets(Workspace(tmp_path / "w"), params)
    prepare.prepare_wild(workspace, params.data, WILD)
    wild = wild_samples(workspace, params, WILD)
    origins = wild_origins(workspace, params, WILD, np.arange(len(wild)))
    for image, origin in zip(wild.read(slice(None)).numpy(), origins, strict=True):
        path = photos / origin.file if in_a_list else photos / "unlabeled" / origin.file
        np.testing.assert_array_equal(read_picture(path, Shape(1, 8)), image)
        assert str(origin) == origin.file
        assert origin.row == (listed.index(origin.file) if in_a_list else None)
    assert len(origins) == 24


def test_wild_data_that_salcli_mixed_hide_their_origin(tmp_path: Path) -> None:
    params = vector_params(tmp_path, pi=[0.5], id_shares=SHARES, ood=["known-odd"], test_ood=[])
    workspace = prepare_sets(Workspace(tmp_path), params)
    prepare.prepare_wild(workspace, params.data, MIXED)
    assert wild_origins(workspace, params, MIXED, np.arange(3)) == [Origin("")] * 3


class Tiny(nn.Module):
    """Stands for a frozen backbone: takes 3 × 12 × 12 images, and rounds as networks do."""

    spec = EmbedderSpec("tiny", None, Preprocessing(12, 10, "bicubic", (0.5,) * 3, (0.2,) * 3))
    n_features = 7

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.LazyLinear(7))
        self.seen: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(images))
        assert not self.training
        return self.layers(images[..., 1:11, 1:11].float() / 255)


def embedded(root: Path, photos: Path, name: str = "unlabeled") -> tuple[Workspace, Tiny]:
    params, tiny = custom_params(photos), Tiny()
    prepare.prepare_set(Workspace(root), params, name, embedder=tiny)  # type: ignore[arg-type]
    return Workspace(root), tiny


def test_an_embedded_set_holds_the_features_of_its_decoded_images_and_the_digests_of_their_pixels(
    tmp_path: Path,
) -> None:
    photos = lay_out(tmp_path)
    (photos / "unlabeled" / "bad.png").write_bytes(b"bad")
    workspace, tiny = embedded(tmp_path / "w", photos)
    found = workspace.find(prepared_set("unlabeled"))
    samples, names = read_samples(found), read_file_names(found)
    assert (samples.array.shape, samples.array.dtype) == ((24, 7), np.float32)
    pixels = np.stack([read_picture(photos / "unlabeled" / name, Shape(3, 12, "bicubic")) for name in names])
    with torch.inference_mode():
        np.testing.assert_allclose(samples.array, tiny(torch.from_numpy(pixels)), atol=1e-5)
    np.testing.assert_array_equal(read_digests(found), sample_digests(pixels))
    about = read_header(found).about
    assert (about["embedder"]["backbone"], about["n_skipped"]) == ("tiny", 1)
    assert set(tiny.seen[:-1]) == {embed.ON_A_CPU}, "always as many at once"


def test_an_embedded_set_repeats_to_the_byte_and_an_image_to_the_bit_whatever_surrounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = lay_out(tmp_path, n_wild=70)
    one, _ = embedded(tmp_path / "one", photos)
    monkeypatch.setattr("salcli.data.decoding.MOST_IN_BLOCK", 5)
    embedded(tmp_path / "other", photos)
    assert files(tmp_path / "one") == files(tmp_path / "other")
    for path in sorted((photos / "unlabeled").rglob("*.png"))[::3]:
        path.unlink()
    fewer, _ = embedded(tmp_path / "fewer", photos)
    rows = []
    for workspace in (one, fewer):
        found = workspace.find(prepared_set("unlabeled"))
        rows.append(dict(zip(read_file_names(found), read_samples(found).array, strict=True)))
    assert 0 < len(rows[1]) < len(rows[0])
    assert all(rows[0][name].tobytes() == row.tobytes() for name, row in rows[1].items())


@pytest.mark.parametrize("backbone", ["the same", "another"])
def test_interrupted_embedding_resumes_to_the_same_bytes_with_the_same_backbone_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: str
) -> None:
    photos, resumed = lay_out(tmp_path, n_wild=70), Workspace(tmp_path / "resumed")
    monkeypatch.setattr("salcli.data.decoding.MOST_IN_BLOCK", 5)
    embedded(tmp_path / "whole", photos)
    before, watched = Tiny(), Watched()
    if backbone == "another":
        before.layers[0].bias = nn.Parameter(torch.ones(16))
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare_set(resumed, custom_params(photos), "unlabeled", Watched(stop_after=42), embedder=before)  # type: ignore[arg-type]
    kept = resumed.target(prepared_set("unlabeled").unfinished)
    assert len([*kept.iterdir()]) == 7  # blocks of 5, but for the first, which tells backbones apart
    prepare.prepare_set(resumed, custom_params(photos), "unlabeled", watched, embedder=Tiny())  # type: ignore[arg-type]
    assert watched.skipped == (35 if backbone == "the same" else 0)
    prepared = prepared_set("unlabeled").path
    assert files(resumed.root)[prepared] == files(tmp_path / "whole")[prepared]
    assert not kept.exists()
