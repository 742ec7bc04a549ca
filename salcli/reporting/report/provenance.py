"""Where the figures of a report come from: code, versions, machine, files. No names of people, hosts or homes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from salcli import __version__
from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from salcli.artifacts.layout import Artifact, Workspace

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "h5py", "pytorch-ood", "matplotlib", "dvc")
SECONDS = 10


def provenance(workspace: Workspace, ood: str, seed: int) -> list[tuple[str, str]]:
    """Facts by name."""
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    facts = [
        ("report made", _time(datetime.now().timestamp())),
        ("salcli", f"{__version__}"),
        ("commit of the workspace", _commit(workspace.root)),
        ("Python", platform.python_version()),
        ("packages", packages),
        ("machine of the report", _machine()),
    ]
    place = layout.trained_network("sal", ood, seed)
    if workspace.has(place):
        about = read_header(workspace.find(place)).about
        review = about.get("review")
        corrected = f", after a review: {review['dropped']} dropped, {review['added']} added" if review else ""
        facts.append(("SAL was trained with", f"{about.get('n_outliers', 'unknown')} candidate outliers{corrected}"))
    return facts


def files(workspace: Workspace, ood: str, seed: int) -> list[tuple[str, str, str]]:
    """What the report was read from: place, size, and when it was written here."""
    places: Sequence[Artifact] = (
        layout.id_split(seed),
        layout.wild_mixture(ood, seed),
        layout.classifier(seed),
        layout.wild_gradients(ood, seed),
        layout.candidates(ood, seed),
        layout.trained_network("sal", ood, seed),
        layout.evaluation_scores(ood, seed),
        layout.metrics(ood, seed),
        layout.theory_metrics(ood, seed),
    )
    rows = []
    for place in places:
        if workspace.has(place):
            path = workspace.find(place).path
            facts = path.stat()
            shown = path.relative_to(workspace.root).as_posix()
            rows.append((shown, f"{facts.st_size / 1000:,.1f} kB", _time(facts.st_mtime)))
    return rows


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _commit(root: Path) -> str:
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "not under git"
    return f"{commit}, with changes that are not committed" if _git(root, "status", "--porcelain") else commit


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _machine() -> str:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return ", ".join([system, f"{_processor()} ({os.cpu_count()} threads)", *(gpus or ["no GPU"])])


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or "processor unknown"
