"""Archives from the web: unpacked as a whole or not at all, and never outside their folder."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from helpers.compute import Watched

from salcli.data import archives
from salcli.data.archives import unpack
from salcli.errors import DataError
from salcli.progress import Silent

FILES = {"set/a.txt": b"first", "set/deep/b.bin": bytes(range(256)) * 400, "list.txt": b"names"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where to unpack to, inside a folder where anything that climbs out would be seen."""
    (tmp_path / "outer" / "root").mkdir(parents=True)
    return tmp_path / "outer" / "root"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tar(path: Path, *members: tarfile.TarInfo, mode: str = "w", files: dict[str, bytes] | None = None) -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in (files or {}).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = 1 if kind == tarfile.REGTYPE else 0
    return info


def archive_of(path: Path, files: dict[str, bytes]) -> Path:
    """In the format of the name; a gzipped file holds the first one only."""
    kind = path.name.rpartition(".")[2]
    if kind == "gz" and ".tar" not in path.name:
        path.write_bytes(gzip.compress(next(iter(files.values()))))
    else:
        tar(path, mode="w" if kind == "tar" else f"w:{kind.replace('tgz', 'gz')}", files=files)
    return path


# --- what goes well


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.bz2", "a.tar.xz"])
def test_an_archive_comes_out_as_it_went_in_and_every_byte_is_counted(folder: Path, name: str) -> None:
    archive, counter = archive_of(folder.parent / name, FILES), Watched()
    assert unpack(archive, folder, counter) == [folder / "list.txt", folder / "set"]
    assert tree(folder) == FILES
    assert counter.seen == archive.stat().st_size
    assert unpack(archive_of(folder / "train-images.gz", FILES), folder, Silent()) == [folder / "train-images"]
    assert (folder / "train-images").read_bytes() == FILES["set/a.txt"]


def test_what_was_there_before_is_replaced_as_a_whole(folder: Path) -> None:
    stage = folder / ".a.tar.unpacking"  # the rest of a killed process
    for name in ("set/stale.txt", "other.txt", f"{stage.name}/set/half"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of an older version")
    unpack(tar(folder.parent / "a.tar", files=FILES), folder, Silent())
    assert tree(folder) == {**FILES, "other.txt": b"of an older version"}


# --- what does not


def assert_refused(archive: Path, folder: Path, words: str) -> None:
    """An error that says why; and not a byte is left, neither in the folder nor around it."""
    before = {path: path.lstat().st_mtime_ns for path in folder.parent.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match=words) as caught:
        unpack(archive, folder, Silent())
    assert str(archive) in str(caught.value)
    assert {path: path.lstat().st_mtime_ns for path in folder.parent.rglob("*") if not path.is_dir()} == before
    assert list(folder.iterdir()) == []


TRICKS = {
    "parent": (member("set/../../evil"),),
    "symlink to absolute": (member("set", tarfile.SYMTYPE, "/etc/passwd"),),
    "file through a symlink": (member("set", tarfile.SYMTYPE, "."), member("set/evil")),
    "hard link to parent": (member("set", tarfile.LNKTYPE, "../evil"),),
    "device": (member("set", tarfile.CHRTYPE),),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_tar_archive_cannot_climb_out_and_holds_no_links(folder: Path, trick: str) -> None:
    archive = tar(folder.parent / "a.tar.gz", member("innocent"), *TRICKS[trick], mode="w:gz")
    assert_refused(archive, folder, "is not safe: .*(outside the destination|is a link, a device or a pipe)")


def test_an_absolute_path_is_taken_from_the_folder(folder: Path) -> None:
    unpack(tar(folder.parent / "a.tar", member("/tmp/salcli-evil")), folder, Silent())
    assert tree(folder) == {"tmp/salcli-evil": b"x"}


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar.bz2", "a.tar.xz", "a.gz"])
def test_a_broken_archive_leaves_nothing_behind(folder: Path, name: str) -> None:
    archive = archive_of(folder.parent / name, {"set/noise": os.urandom(200_000), "set/more": os.urandom(200_000)})
    good = archive.read_bytes()
    middle = len(good) // 2
    damaged = good[:middle] + bytes(255 - byte for byte in good[middle : middle + 64]) + good[middle + 64 :]
    for content in (good[: len(good) * 2 // 3], damaged, b"<html>not found</html>" * 100):
        archive.write_bytes(content)
        assert_refused(archive, folder, "damaged or truncated.*remove it and run the same command again")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.gz", "a.tar.bz2", "a.tar.xz"])
def test_a_bomb_does_not_go_off(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "SMALL", 1_000_000)
    assert_refused(archive_of(folder.parent / name, {"zeros": bytes(20_000_000)}), folder, "unpacks to more than")
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 60
    (folder.parent / "a.tar").write_bytes(huge.tobuf() + bytes(10_240))
    assert_refused(folder.parent / "a.tar", folder, "unpacks to more than")


def test_no_archive_has_more_members_than_memory_and_inodes_allow(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 20)
    assert_refused(
        archive_of(folder.parent / "a.tar.gz", {f"{i}": b"" for i in range(30)}), folder, "more than 20 members"
    )
