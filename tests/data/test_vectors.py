"""Vectors that users bring: every format gives the same samples, and what cannot be used is named."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from salcli.data.folders import read_custom, read_from_custom
from salcli.data.sets import Samples
from salcli.data.vectors import Columns
from salcli.errors import SalError
from salcli.pipeline.prepare import check_classes

N, D = 9, 3
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = np.array(["dog", "cat", "ant"] * 3)
IDS = [f"row {i}" for i in range(N)]
PART = ["train", "test", "train"] * 3


def lists(vectors: Any = X, kind: Any = None) -> pa.Array:
    return pa.array(list(vectors), type=kind)


def save_npz(path: Path) -> Path:
    np.savez(path / "v.npz", x=X, y=Y, id=IDS, split=PART)
    return path / "v.npz"


def save_npy(path: Path) -> Path:
    np.save(path / "v.npy", np.asfortranarray(X, np.float64))
    np.save(path / "v.labels.npy", Y)
    np.save(path / "v.ids.npy", IDS)
    return path / "v.npy"


def table(**columns: Any) -> Callable[[Path], Path]:
    def save(path: Path) -> Path:
        pq.write_table(pa.table(columns), path / "v.parquet", row_group_size=4)
        return path / "v.parquet"

    return save


TABLE: dict[str, Any] = {"Id": IDS, "Class": Y, "split": PART}
WITH_SPLIT = {
    "npz": save_npz,
    "lists": table(**TABLE, embedding=lists()),
    "large lists": table(**TABLE, embedding=lists(X, pa.large_list(pa.float64()))),
    "fixed-size lists": table(**TABLE, embedding=lists(X, pa.list_(pa.float32(), D))),
    "numeric columns": table(**TABLE, **{f"f{i}": X[:, i] for i in range(D)}),
    "categories": table(**{**TABLE, "Class": pa.array(Y).dictionary_encode()}, embedding=lists()),
}


@pytest.mark.parametrize("save", [*WITH_SPLIT.values(), save_npy], ids=[*WITH_SPLIT, "npy"])
def test_every_format_gives_the_same_samples(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    source = read_custom("mine", [save(tmp_path)], labeled=True)
    assert source.is_vectors
    np.testing.assert_array_equal(source.array, X, strict=True)
    np.testing.assert_array_equal(source.labels, [2, 1, 0] * 3)
    assert (source.class_names, source.row_ids) == (("ant", "cat", "dog"), tuple(IDS))
    assert save is save_npy or (source.is_test is not None and source.is_test.tolist() == [False, True, False] * 3)
    wild = read_custom("mine", [save(tmp_path)], labeled=False)
    assert (wild.labels, wild.class_names, wild.row_ids) == (None, (), tuple(IDS))


def test_an_array_file_may_hold_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (N, 4, 4, 3), dtype=np.uint8)
    np.save(tmp_path / "i.npy", images)
    np.save(tmp_path / "i.labels.npy", np.arange(N) % 2)
    source = read_custom("mine", [tmp_path / "i.npy"], labeled=True)
    assert not source.is_vectors
    np.testing.assert_array_equal(source.array, images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(source.labels, np.arange(N) % 2)
    assert read_from_custom([tmp_path / "i.npy"]) == [tmp_path / "i.npy", tmp_path / "i.labels.npy"]


def test_named_columns_win_over_those_found_by_name(tmp_path: Path) -> None:
    topic, text = pa.array([1, 10, 9] * 3), ["<b>", "", None] * 3
    save = table(id=IDS, label=Y, a=lists(), b=lists(X + 1), topic=topic, text=text, n=range(N))
    named = Columns("b", "topic", "n", ("text", "id"))
    source = read_custom("mine", [save(tmp_path)], labeled=True, columns=named)
    np.testing.assert_array_equal(source.array, X + 1)
    assert source.class_names == ("1", "9", "10")  # numbers by their value
    assert source.row_ids == tuple(map(str, range(N)))
    assert source.shown == {"text": ("<b>", "", "") * 3, "id": tuple(IDS)}
    part = source.take(np.array([4, 0]))
    assert (part.row_ids, part.shown) == (("4", "0"), {"text": ("", "<b>"), "id": ("row 4", "row 0")})
    wild = read_custom("mine", [save(tmp_path)], labeled=False, columns=Columns(("n", "topic"), "not there"))
    np.testing.assert_array_equal(wild.array, np.stack([np.arange(N), topic], 1))
    for columns, reason in (
        (Columns(vector="a", show=("texts",)), "has no column texts (did you mean text?)"),
        (Columns(vector="text"), "column text must hold lists of numbers, got string"),
    ):
        with pytest.raises(SalError, match=re.escape(reason)):
            read_custom("mine", [save(tmp_path)], labeled=True, columns=columns)


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"Intent": Y}, ("ant", "cat", "dog")),
        ({"category_name": Y, "source": ["web"] * N}, ("ant", "cat", "dog")),
        ({"group": Y, "text": IDS}, ("ant", "cat", "dog")),
        ({"group": Y, "source": ["web", "app", "web"] * 3}, ()),  # which one?
        ({"text": IDS}, ()),
    ],
)
def test_classes_are_found_by_name_and_as_the_only_text_that_recurs(
    tmp_path: Path, columns: dict[str, Any], names: tuple[str, ...]
) -> None:
    np.savez(tmp_path / "v.npz", v=X, **columns)
    for path in (table(v=lists(), **columns)(tmp_path), tmp_path / "v.npz"):
        assert read_custom("mine", [path], labeled=True).class_names == names
        assert read_custom("mine", [path], labeled=False).labels is None


# --- several files


def test_several_files_are_one_set_with_the_classes_of_all(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": lists(), "label": Y, "id": IDS}), tmp_path / "a.parquet")
    np.savez(tmp_path / "b.npz", x=X + 1, y=["bee", "cat", "bee"] * 3)
    source = read_custom("mine", [tmp_path / "a.parquet", tmp_path / "b.npz"], labeled=True)
    np.testing.assert_array_equal(source.array, np.concatenate([X, X + 1]))
    assert source.class_names == ("ant", "bee", "cat", "dog")
    assert [source.class_names[k] for k in np.asarray(source.labels)] == [*Y, *["bee", "cat", "bee"] * 3]
    assert source.row_ids[N - 1 : N + 2] == ("row 8", "b.npz:0", "b.npz:1")
    for other, reason in (
        ({"x": X + 1, "y": Y, "id": IDS}, "9 row ids occur more than once (row 0, row 1, row 2, …)"),
        ({"x": X[:, :2], "y": Y}, "cannot be one set: they hold vectors of 3 and 2 dimensions"),
        ({"x": X}, "only one of them has labels"),
    ):
        np.savez(tmp_path / "c.npz", **other)
        with pytest.raises(SalError, match=re.escape(reason)):
            read_custom("mine", [tmp_path / "a.parquet", tmp_path / "c.npz"], labeled=True)


# --- bad input


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": X[:, :1]}, "vectors must have from 2 to 16,384 dimensions, got 1"),
    ({"a": X, "b": X}, "which array holds the vectors, a or b?"),
    ({"x": np.insert(X, [2, 4], np.nan, axis=0)}, "NaN, infinite or above 1e+15 (rows 2, 5); fix or remove them"),
    ({"x": np.ones((4, 3))}, "all 4 vectors are equal"),
    ({"x": X, "id": [*IDS[:7], "row 0", "row 1"]}, "2 row ids occur more than once (row 0, row 1); make them unique"),
    ({"x": X, "y": Y[:4]}, "there are 9 vectors, but `y` is 4 of <U3; store one value for each vector"),
    ({"x": X, "y": [0.0, np.nan, 1.0] * 3, "id": IDS}, "3 of 9 rows have no label (rows row 1, row 4, row 7)"),
    ({"x": X, "y": np.arange(9) / 2}, "labels must be integers or text, got 0.5; name the column of the classes"),
    ({"x": X, "y": np.arange(9) - 1}, "labels must not be negative, got -1; leave unlabeled vectors out"),
    ({"x": X, "split": ["train", "test", "dev"] * 3}, "the column split must hold train or test, got 'dev'"),
    ({"x": np.zeros((N, 4, 4), np.uint8), "y": Y}, "`y` must be 9 integers, got 9 of <U3"),
    ({"x": X, "y": np.array([1, "a", None] * 3)}, "the array `y` has values of mixed types (or Python objects"),
]  # fmt: skip
BAD_TABLES: list[tuple[dict[str, Any], str]] = [
    (
        {"v": [[1.0, 2], [3.0, 4, 5], [6.0]]},
        "but 2 of 3 do not have 2, as the first has (row 1: 3, row 2: 1, counted from 0); embed all rows with the same",
    ),
    (
        {"v": [[1.0, 2]] * 1500 + [[3.0]], "id": [f"d{i}" for i in range(1501)]},
        "1 of 1,501 do not have 2, as the first has (row d1500: 1)",
    ),
    ({"v": lists(), "w": lists()}, "which column holds the vectors, v or w? Name it with --vector"),
]


@pytest.mark.parametrize(
    ("suffix", "content", "reason"), [*(("npz", *case) for case in BAD), *(("parquet", *case) for case in BAD_TABLES)]
)
def test_vectors_that_cannot_be_used_are_refused_with_rows_and_reason(
    tmp_path: Path, suffix: str, content: dict[str, Any], reason: str
) -> None:
    path = tmp_path / f"v.{suffix}"
    np.savez(path, **content) if suffix == "npz" else table(**content)(tmp_path)
    with pytest.raises(SalError) as caught:
        read_custom("mine", [path], labeled=True)
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_or_damaged_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(v=lists())(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(SalError, match=r"cannot be read as Parquet .*; write it again"):
        read_custom("mine", [path], labeled=False)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SalError, match=r"needs pyarrow, which is not installed; pip install 'salcli\[parquet\]'"):
        read_custom("mine", [path], labeled=False)


@pytest.mark.parametrize(("suffix", "fix"), [("npz", "np.savez"), ("npy", "np.save")])
def test_other_files_with_the_suffix_of_arrays_are_named_as_such(tmp_path: Path, suffix: str, fix: str) -> None:
    path = tmp_path / f"v.{suffix}"
    path.write_text("hello")
    with pytest.raises(SalError, match=rf"is not an? \.{suffix} file.*; write it with {fix};") as caught:
        read_custom("mine", [path], labeled=False)
    assert "pickle" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("v.npz", "an array `y`, or name theirs with --label"),
        ("v.npy", "beside it as v.labels.npy"),
        ("v.parquet", "--label (data.columns.label in params.yaml); its columns: subject, embedding"),
    ],
)
def test_missing_labels_are_asked_for_in_terms_of_the_format(name: str, fix: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"subject": ["a"], "embedding": [[1.0, 2.0]]}), tmp_path / "v.parquet")
    with pytest.raises(SalError, match=re.escape(fix)):
        check_classes("mine", Samples(array=X), [tmp_path / name])
