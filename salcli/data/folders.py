"""Sets that users bring: folders of images, CSV lists of paths, .npz files, and vectors (vectors.py)."""

import csv
import os
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from salcli.data.sets import Samples, concatenated, joined, numbered
from salcli.data.vectors import ANY, ARRAYS, PARTS, TABLES, Columns, beside_npy, for_testing, read_vectors
from salcli.errors import SalError

SUFFIXES = {
    ".apng", ".avif", ".bmp", ".dib", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx",
    ".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".psd", ".qoi", ".sgi", ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip
EXAMPLES = ".jpeg, .jpg, .png, .tiff, .webp"
SPLIT_NAMES = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}
# Names become parts of commands, of file names and of keys in dvc.yaml
NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
RESERVED = {"average", "encoders", "networks", "representation"}  # a row of the table; folders in runs/


def read_custom(name: str, paths: Sequence[Path], *, labeled: bool, columns: Columns = ANY) -> Samples:
    """A set of data.custom from one path or several, images not decoded yet: with its classes, or all below a path."""
    return concatenated(name, [_read_one(name, path, labeled=labeled, columns=columns) for path in paths], paths)


def _read_one(name: str, path: Path, *, labeled: bool, columns: Columns) -> Samples:
    try:
        if not path.exists():
            raise SalError(f"{path} does not exist; put images or vectors there, or give another path for {name}")
        if path.is_file():
            suffix = path.suffix.lower()
            if suffix in (*ARRAYS, *TABLES):
                return read_vectors(path, labeled=labeled, columns=columns).from_file(path)
            if suffix != ".csv":
                raise SalError(
                    f"{name}: {path} is a file; give a folder of images, a .csv with their paths, or vectors in a "
                    ".npz, .npy or .parquet file"
                )
            return read_list(path, labeled=labeled).from_file(path)
        source = read_folder(path, labeled=True) if labeled else _read_part(path, path, labeled=False)
    except (OSError, ValueError) as error:
        where = getattr(error, "filename", None) or path
        raise SalError(f"{name}: {where} cannot be read ({getattr(error, 'strerror', error)}); fix that") from None
    if len(source.class_names) > 1 and SPLIT_NAMES.issuperset(source.class_names):
        raise SalError(
            f"{name}: {path} has the folders {', '.join(source.class_names)}, which look like parts of a split, not "
            f"like classes; give one of them ({path / source.class_names[0]}), or keep only train/ and test/"
        )
    return source


def read_from_custom(paths: Sequence[Path]) -> list[Path]:
    """The files and folders that a set of data.custom is read from: if one changes, the data changed."""
    found: list[Path] = []
    for path in paths:
        found.append(path)
        if path.suffix.lower() == ".csv" and path.is_file():
            found += read_list(path, labeled=False).files
        elif path.suffix.lower() == ".npy":
            found += beside_npy(path).values()
    return found


def top_folder(paths: Sequence[Path]) -> Path:
    """The folder that the names of a custom set's files count from."""
    return Path(os.path.commonpath([path if path.is_dir() else path.parent for path in paths]))


def name_for(path: Path, taken: Collection[str], fallback: str) -> str:
    """A name for data.custom made from the file name, different from those taken."""
    plain = unicodedata.normalize("NFKD", path.stem if path.is_file() else path.name).encode("ascii", "ignore")
    name = re.sub(r"[^a-z0-9]+", "-", plain.decode().lower()).strip("-")[:48]
    name = name if NAME.fullmatch(name) else f"{fallback}-{name}".rstrip("-")
    count, unique = 1, name
    while unique in taken or unique in RESERVED:
        count += 1
        unique = f"{name}-{count}"
    return unique


# --- folders


def read_folder(folder: Path, *, labeled: bool) -> Samples:
    """`{train,test}/CLASS/…`, `CLASS/…`, or images anywhere below the folder, which then have no labels."""
    parts = [part for part in PARTS if (folder / part).is_dir()]
    if parts in ([], ["test"]) or set(_folders(folder)) != set(parts):
        return _read_part(folder, folder, labeled=labeled)
    if parts == ["train"]:
        if not labeled or not _folders(folder / "train"):
            return _read_part(folder, folder, labeled=False)
        raise SalError(f"{folder} has train/, but no test/; add it, or put the classes directly into {folder}")
    training, test = (_read_part(folder / part, folder, labeled=labeled) for part in PARTS)
    if training.class_names != test.class_names:
        odd = sorted(set(training.class_names) ^ set(test.class_names))
        raise SalError(f"{folder}: train/ and test/ must have the same classes, but only one has {', '.join(odd)}")
    return joined(training, test)


def image_files(folder: Path, *, top: Path | None = None) -> tuple[Path, ...]:
    """All image files below a folder, in a fixed order. Links are followed, but never in circles.

    `top` is the folder of the whole set: a link back to it would add images that already belong elsewhere.
    """
    return tuple(path for path in files_below(folder, top=top) if path.suffix.lower() in SUFFIXES)


def files_below(folder: Path, *, top: Path | None = None) -> list[Path]:
    """All files, images or not, as `image_files` finds them."""
    seen = {_identity(path) for path in (top or folder, folder)}
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in sorted(folders) if _is_visible(name) and _is_new(Path(parent, name), seen)]
        found += [Path(parent, name) for name in names if _is_visible(name)]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _read_part(folder: Path, top: Path, *, labeled: bool) -> Samples:
    classes = _folders(folder) if labeled else []
    if not classes:
        files = image_files(folder, top=top)
        if not files:
            raise SalError(f"{folder} holds no images; put some there, in formats such as {EXAMPLES}")
        return Samples(files=files)
    by_class = [image_files(folder / name, top=top) for name in classes]
    empty = [name for name, files in zip(classes, by_class, strict=True) if not files]
    if len(empty) == len(classes):
        raise SalError(f"{folder} holds no images, neither in {', '.join(classes[:5])} nor in another folder")
    if empty:
        raise SalError(f"{folder}: class {', '.join(empty)} has no images; add some, or remove its folder")
    stray = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES and path.is_file()]
    if stray:
        raise SalError(f"{folder} has {len(stray)} images beside its classes ({stray[0]}); move them into a class")
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in by_class])
    files = tuple(path for one in by_class for path in one)
    return Samples(files=files, labels=labels, class_names=tuple(classes))


def _raise(error: OSError) -> None:
    raise error  # os.walk skips unreadable folders by default


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _is_visible(path.name) and path.is_dir())


def _is_visible(name: str) -> bool:
    """Hidden files, and what macOS adds to archives, are not data."""
    return not name.startswith(".") and name != "__MACOSX"


def _is_new(folder: Path, seen: set[tuple[int, int]]) -> bool:
    identity = _identity(folder)
    is_new = identity not in seen
    seen.add(identity)
    return is_new


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


# --- CSV lists

PATH, LABEL, SPLIT = "path", "label", "split"
CSV_LAYOUT = (
    "one line for each image: its path, a comma, its label; or more columns below a header that names path and label"
)


def read_list(file: Path, *, labeled: bool) -> Samples:
    """The images of a CSV. Relative paths count from its folder. The first line is a header if a cell says `path`."""
    rows = list(_rows(file, [PATH, LABEL] if labeled else [PATH]))
    if not rows:
        raise SalError(f"{file} lists no images; it should have {CSV_LAYOUT}")
    files = tuple(file.parent / row[PATH] for row in rows)
    if not labeled:
        return Samples(files=files)
    labels, names = numbered([row[LABEL] for row in rows])
    is_test = for_testing(file, [row[SPLIT] for row in rows]) if SPLIT in rows[0] else None
    return Samples(files=files, labels=labels, class_names=names, is_test=is_test)


def _rows(file: Path, wanted: list[str]) -> Iterator[dict[str, str]]:
    column: dict[str, int] | None = None  # name → index
    # file names need not be text
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if column is None:
                    header = [cell.strip().lower() for cell in row]
                    has_header = PATH in header
                    column = {name: i for i, name in enumerate(header if has_header else wanted)}
                    missing = [name for name in wanted if name not in column]
                    if missing:
                        raise SalError(f"{file} has no column {', '.join(missing)}; it should have {CSV_LAYOUT}")
                    if has_header:
                        continue
                cells = {name: row[i] if i < len(row) else "" for name, i in column.items()}
                cells |= {name: cells[name].strip() for name in (LABEL, SPLIT) if name in cells}
                empty = [name for name in wanted if not cells[name]]
                if empty:
                    reason = f"there is no {' and no '.join(empty)}"
                    raise SalError(f"{file}, line {reader.line_num}: {reason}; it should have {CSV_LAYOUT}")
                yield cells
        except csv.Error as error:
            raise SalError(f"{file}, line {reader.line_num}: {error}; it should have {CSV_LAYOUT}") from None
