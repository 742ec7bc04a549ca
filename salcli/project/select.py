"""The flagged samples of wild.csv in a folder of their own: copies of image files or links to them, or rows."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import numpy as np

from salcli.data.catalogue import custom_paths, data_root
from salcli.data.folders import top_folder
from salcli.errors import MissingArtifactError, SalError
from salcli.params.schema import Params
from salcli.store.files import atomic_path, write_csv
from salcli.store.formats import names_of
from salcli.store.layout import UNKNOWN, Experiment, Workspace, prepared_set


def select(workspace: Workspace, params: Params, experiment: Experiment, out: Path, *, link: bool) -> list[Path]:
    """Put the image files of flagged samples into `out`, or their rows of wild.csv where samples are no image files.

    Subfolders stay, so files of the same name do not collide. Line i of wild.csv is sample i of the prepared set.
    """
    if experiment.pi != UNKNOWN:
        raise SalError("salcli mixed these wild data itself, so no file of yours is flagged")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise SalError(f"--out {out} exists already; name a new or an empty folder")
    found = workspace.find(experiment.wild_list)
    with found.path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    index = np.array([i for i, row in enumerate(rows) if row["flagged"] == "1"], np.int64)
    origins = names_of(workspace.find(prepared_set(experiment.ood)), index)
    if not all(origin.is_image_file for origin in origins):
        write_csv(out / "wild.csv", [rows[i] for i in index], [*rows[0]])
        return [out / "wild.csv"]
    data, top = params.data, data_root(params_root=params.data.root, workspace=workspace.root)
    if experiment.ood in data.custom:
        top = top_folder(custom_paths(data.custom[experiment.ood], workspace.root))
    written, top = [], Path(os.path.normpath(top.absolute()))
    for name in dict.fromkeys(origin.file for origin in origins):
        source, plain = top / name, Path(os.path.normpath(top / name))
        if not source.is_file():
            raise MissingArtifactError(f"{source} does not exist any more; put it back, or run dvc repro without it")
        # a list may name ../1.png, or a file elsewhere
        target = out / plain.relative_to(top if plain.is_relative_to(top) else plain.anchor)
        target.parent.mkdir(parents=True, exist_ok=True)
        if link:
            target.symlink_to(source)
        else:
            with atomic_path(target) as partial:
                shutil.copyfile(source, partial)
        written.append(target)
    return written
