"""What is known of a data set before it is there: its files, its licence, its place below the data root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["id", "ood", "both"]
NOT_STATED = "not stated"  # by the authors, which is not the same as free


@dataclass(frozen=True)
class RemoteFile:
    """A file on the web. `mirrors` hold the same bytes; `n_bytes` is for the progress bar and may be a guess."""

    url: str
    name: str
    checksum: str | None  # algorithm:hexadecimal digits
    n_bytes: int | None = None
    mirrors: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSource:
    """What is known of a data set's files. Sets without files come with an installed package, or are made by salcli."""

    name: str
    title: str
    role: Role
    n_images: int
    size: str  # of an image, in pixels
    licence: str
    home: str
    files: tuple[RemoteFile, ...] = ()
    folder: str = ""  # below the data root: files are put and unpacked there
    provides: tuple[str, ...] = ()  # below the data root: the set is here when all of these are
    n_test: int = 0  # of the images, how many were published for testing

    @property
    def n_for_training(self) -> int:
        """The images that were not published for testing."""
        return self.n_images - self.n_test

    @property
    def is_embedded(self) -> bool:
        """Nothing has to be fetched."""
        return not self.files

    @property
    def n_bytes(self) -> int | None:
        """To download, as far as it is known."""
        known = [file.n_bytes for file in self.files if file.n_bytes]
        return sum(known) or None


def named_file(folder: str, name: str, md5: str, n_bytes: int | None = None, *mirrors: str) -> RemoteFile:
    """A file that keeps its name."""
    return RemoteFile(f"{folder}{name}", name, f"md5:{md5}", n_bytes, tuple(f"{mirror}{name}" for mirror in mirrors))
