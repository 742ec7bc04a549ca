"""Fetching files: resumed, verified, explained. Against a real server on this machine."""

import gzip
import hashlib
import io
import socket
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.web import Web, serving

from salcli.data import catalogue
from salcli.data.catalogue import DATA_SETS, DataSet, RemoteFile
from salcli.data.fetching import download, fetch, status
from salcli.data.sets import Samples
from salcli.errors import SalError, UnknownNameError
from salcli.progress import Silent

CONTENT = bytes(i * 7919 % 251 for i in range(1_000_000))
NAME = "data.bin"
AGAIN = "salcli data fetch it"


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web({NAME: CONTENT})) as running:
        yield running


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


def remote(web: Web, name: str = NAME, **changes: object) -> RemoteFile:
    file = RemoteFile(web.url(name), name, md5(web.files.get(name, b"")), len(web.files.get(name, b"")))
    return replace(file, **changes)


def get(file: RemoteFile, folder: Path, pauses: list[float] | None = None) -> None:
    download(file, folder, Silent(), again=AGAIN, sleep=([] if pauses is None else pauses).append)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# --- what goes well


@pytest.mark.parametrize(
    ("part", "ranges"),
    [
        pytest.param(CONTENT[:123_456], ["bytes=123456-"], id="resumed"),
        pytest.param(CONTENT, [f"bytes={len(CONTENT)}-"], id="complete, only verified"),
        pytest.param(b"x" * 5_000, ["bytes=5000-", None], id="another file"),
    ],
)
def test_a_part_is_resumed_where_it_stopped_and_that_of_another_file_replaced(
    web: Web, tmp_path: Path, part: bytes, ranges: list[str | None]
) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(part)
    get(remote(web), tmp_path)
    assert web.ranges == ranges
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert names(tmp_path) == [NAME]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_broken_connection_is_resumed_if_the_server_can(web: Web, tmp_path: Path, knows_ranges: bool) -> None:
    web.knows_ranges = knows_ranges
    web.cut_after = [300_000, 300_000] if knows_ranges else [300_000]
    pauses: list[float] = []
    get(remote(web), tmp_path, pauses)
    assert web.ranges == [None, "bytes=300000-", "bytes=600000-"][: len(pauses) + 1]
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert set(pauses) == {1.0}  # every attempt had brought something


def test_a_busy_server_is_asked_again_with_growing_pauses_and_then_its_mirror(web: Web, tmp_path: Path) -> None:
    web.answers, pauses = [503, 500, 429], []
    get(remote(web), tmp_path, pauses)
    assert pauses == [1.0, 2.0, 4.0]
    web.answers = [503] * 4
    assert "503" in failure(remote(web), tmp_path / "other")
    assert web.answers == []
    web.asked.clear()
    sha256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    file = remote(web, url=web.url("gone"), mirrors=(web.url(NAME),), checksum=sha256)
    get(file, tmp_path / "other")
    assert [name for name, _ in web.asked] == ["gone", NAME]


# --- what does not


def failure(file: RemoteFile, folder: Path) -> str:
    with pytest.raises(SalError) as caught:
        get(file, folder)
    assert AGAIN in str(caught.value)
    return str(caught.value)


def assert_way_out(message: str, file: RemoteFile, folder: Path) -> None:
    assert file.url in message
    assert f"put it at {folder / file.name} (md5 {file.checksum[4:]})" in message


def test_a_broken_connection_keeps_what_came_and_other_bytes_than_published_are_refused(
    web: Web, tmp_path: Path
) -> None:
    web.cut_after = [100_000, 0, 0, 0, 0, 0, 0]
    assert "broke after 100,000 of 1,000,000 bytes" in failure(remote(web), tmp_path)
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:100_000]
    file = remote(web, checksum=md5(b"published"))
    message = failure(file, tmp_path)
    assert f"expected {md5(b'published').replace(':', ' ')}, got {md5(CONTENT)[4:]}" in message
    assert_way_out(message, file, tmp_path)
    assert names(tmp_path) == []
    (tmp_path / NAME).write_bytes(b"damaged")  # by somebody else: left alone
    failure(remote(web), tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"damaged"


def test_a_refusal_is_final_and_a_web_page_is_no_data_set(web: Web, tmp_path: Path) -> None:
    web.answers = [404]
    message = failure(remote(web), tmp_path)
    assert "404 (Not Found)" in message
    assert_way_out(message, remote(web), tmp_path)
    assert len(web.asked) == 1
    web.files[NAME] = b"\n<!DOCTYPE html><title>Quota exceeded</title>"
    web.knows_ranges = False
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1000])
    assert "a web page instead of the file" in failure(remote(web), tmp_path)
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:1000], "what was fetched before is still good"


def test_no_network_is_said_in_plain_words(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        file = RemoteFile(f"http://127.0.0.1:{free.getsockname()[1]}/x", "x", md5(b"x"))
    message = failure(file, tmp_path)
    assert "no answer from 127.0.0.1 ([Errno 111] Connection refused): is there a network" in message
    assert_way_out(message, file, tmp_path)


# --- whole data sets


def tar_gz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def two_sets(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """One set in an archive, one of gzipped files in a folder."""
    web.files = {f"{name}.gz": gzip.compress(name.encode() * 1000) for name in "xy"}
    web.files["a.tar.gz"] = tar_gz(A__one=b"1", A__two=b"2")
    facts = ("ood", 2, "1×1", "MIT", "https://example.org", lambda root: Samples())
    first = DataSet("first", "First", *facts, (remote(web, "a.tar.gz"),), provides=("A/one", "A/two"))
    pair = (remote(web, "x.gz"), remote(web, "y.gz"))
    second = DataSet("second", "Second", *facts, pair, folder="S/raw", provides=("S/raw/x", "S/raw/y"))
    monkeypatch.setattr(
        catalogue, "DATA_SETS", {"first": first, "second": second, "digits-0-7": DATA_SETS["digits-0-7"]}
    )
    return web


def test_sets_are_fetched_unpacked_and_found(two_sets: Web, tmp_path: Path) -> None:
    assert [status(name, tmp_path) for name in ("first", "second", "digits-0-7")] == ["missing", "missing", "here"]
    done = list(fetch(["first", "second", "digits-0-7"], tmp_path))
    assert [(one.name, one.outcome) for one in done[:2]] == [("first", "fetched"), ("second", "fetched")]
    assert (done[2].outcome, done[0].paths, done[1].paths) == ("embedded", (tmp_path / "A",), (tmp_path / "S" / "raw",))
    assert (tmp_path / "A" / "two").read_bytes() == b"2"
    assert (tmp_path / "S" / "raw" / "y").read_bytes() == b"y" * 1000
    assert [status(name, tmp_path) for name in ("first", "second")] == ["here", "here"]

    two_sets.asked.clear()
    assert [one.outcome for one in fetch(["second", "first"], tmp_path)] == ["here already", "here already"]
    for name in ("y", "x.gz", "y.gz"):  # x is there without its archive: it need not come again
        (tmp_path / "S" / "raw" / name).unlink()
    assert status("second", tmp_path) == "partial"
    list(fetch(["second"], tmp_path))
    assert [name for name, _ in two_sets.asked] == ["y.gz"]


def test_what_was_there_before_is_replaced_as_a_whole(two_sets: Web, tmp_path: Path) -> None:
    for name in ("A/stale", "A/one", "other", ".a.tar.gz.unpacking/A/half"):  # the last is left by a killed process
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of an older version")
    list(fetch(["first"], tmp_path))
    assert names(tmp_path) == ["A", "a.tar.gz", "other"]
    assert names(tmp_path / "A") == ["one", "two"]


def test_one_set_that_cannot_be_had_does_not_stop_the_others(two_sets: Web, tmp_path: Path) -> None:
    archive = two_sets.files.pop("a.tar.gz")
    with pytest.raises(UnknownNameError, match="did you mean second"):
        list(fetch(["first", "secnd"], tmp_path))
    assert two_sets.asked == [], "wrong names are known before the first byte"
    with pytest.raises(SalError, match=r"first: a\.tar\.gz cannot be fetched") as caught:
        list(fetch(["first", "second"], tmp_path))
    assert status("second", tmp_path) == "here"
    assert f"put it at {tmp_path / 'a.tar.gz'}" in str(caught.value)
    assert f"salcli data fetch first --root {tmp_path}" in str(caught.value)
    (tmp_path / "a.tar.gz").write_bytes(archive)  # by hand, as the message says
    assert [one.outcome for one in fetch(["first"], tmp_path)] == ["fetched"]
