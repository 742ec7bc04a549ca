"""Where every artifact lies in a workspace, and which command makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from salcli.errors import MissingArtifactError

if TYPE_CHECKING:
    from pathlib import Path

SCRATCH = "scratch"
RUNS = "runs"


@dataclass(frozen=True)
class Artifact:
    """A file's place below the workspace and the command that makes it."""

    name: str
    made_by: str


@dataclass(frozen=True)
class Found:
    """An artifact that is there."""

    path: Path
    made_by: str = ""

    @property
    def cure(self) -> str:
        """What to do when it turns out to be bad."""
        return f"make it again: {self.made_by}" if self.made_by else "make it again with the stage it comes from"


@dataclass(frozen=True)
class Workspace:
    """A folder with params.yaml. A scratch run writes below scratch/, so what DVC tracks stays untouched."""

    root: Path
    write_to_scratch: bool = False
    read_from_scratch: bool = False
    inputs_from_scratch: list[str] = field(default_factory=list, compare=False)

    def find(self, artifact: Artifact) -> Found:
        """The artifact's file, or an error that says how to make it."""
        scratch = self.root / SCRATCH / artifact.name
        if self.read_from_scratch and scratch.exists():
            self.inputs_from_scratch.append(artifact.name)
            return Found(scratch, artifact.made_by)
        path = self.root / artifact.name
        if not path.exists():
            raise MissingArtifactError(f"{artifact.name} is not there yet; make it with: {artifact.made_by}")
        return Found(path, artifact.made_by)

    def has(self, artifact: Artifact) -> bool:
        """Whether the artifact is there."""
        in_scratch = self.read_from_scratch and (self.root / SCRATCH / artifact.name).exists()
        return in_scratch or (self.root / artifact.name).exists()

    def target(self, artifact: Artifact) -> Path:
        """Where to write the artifact."""
        return self.root / SCRATCH / artifact.name if self.write_to_scratch else self.root / artifact.name


def prepared_set(name: str) -> Artifact:
    """Decoded images of one data set."""
    return Artifact(f"data/prepared/{name}.h5", "salcli prepare")


def id_split(seed: int) -> Artifact:
    """Which ID samples are for training, calibration, the wild and the test."""
    return Artifact(f"data/splits/{seed}/id.h5", f"salcli prepare --seed {seed}")


def wild_mixture(ood: str, seed: int) -> Artifact:
    """The wild set and the OOD test set, as indices."""
    return Artifact(f"data/splits/{seed}/{ood}/wild.h5", f"salcli prepare --ood {ood} --seed {seed}")


def wild_truth(ood: str, seed: int) -> Artifact:
    """Which wild samples are OOD. For diagnosis only: neither the filter nor any training may use it."""
    return Artifact(f"data/splits/{seed}/{ood}/truth.h5", f"salcli prepare --ood {ood} --seed {seed}")


def classifier(seed: int) -> Artifact:
    """The ID classifier h_w."""
    return Artifact(f"runs/{seed}/classifier.safetensors", f"salcli train-id --seed {seed}")


def train_id_curve(seed: int) -> Artifact:
    """Loss and accuracy of the ID classifier, epoch by epoch."""
    return Artifact(f"runs/{seed}/train-id.csv", f"salcli train-id --seed {seed}")


def train_id_metrics(seed: int) -> Artifact:
    """Accuracy of the ID classifier."""
    return Artifact(f"runs/{seed}/train-id.json", f"salcli train-id --seed {seed}")


def id_gradients(part: str, seed: int) -> Artifact:
    """Gradients of labeled ID data: part is train or calibration."""
    return Artifact(f"runs/{seed}/gradients-id-{part}.h5", f"salcli extract-grads --seed {seed}")


def wild_gradients(ood: str, seed: int) -> Artifact:
    """Gradients of the wild data."""
    return Artifact(f"runs/{seed}/{ood}/gradients-wild.h5", f"salcli extract-grads --ood {ood} --seed {seed}")


def candidates(ood: str, seed: int) -> Artifact:
    """Candidate outliers and all filtering scores."""
    return Artifact(f"runs/{seed}/{ood}/candidates.h5", f"salcli filter --ood {ood} --seed {seed}")


def filter_metrics(ood: str, seed: int) -> Artifact:
    """Threshold, number of candidates, ERR_in and ERR_out."""
    return Artifact(f"runs/{seed}/{ood}/filter.json", f"salcli filter --ood {ood} --seed {seed}")


def ood_classifier(ood: str, seed: int) -> Artifact:
    """The OOD classifier g_θ."""
    return Artifact(f"runs/{seed}/{ood}/ood-classifier.safetensors", f"salcli train-ood --ood {ood} --seed {seed}")


def train_ood_curve(ood: str, seed: int) -> Artifact:
    """Loss and accuracy of the OOD classifier, epoch by epoch."""
    return Artifact(f"runs/{seed}/{ood}/train-ood.csv", f"salcli train-ood --ood {ood} --seed {seed}")


def test_scores(ood: str, seed: int) -> Artifact:
    """Every method's scores on the test sets."""
    return Artifact(f"runs/{seed}/{ood}/scores.h5", f"salcli evaluate --ood {ood} --seed {seed}")


def metrics(ood: str, seed: int) -> Artifact:
    """Every method's FPR95, AUROC, AUPR and accuracy."""
    return Artifact(f"runs/{seed}/{ood}/metrics.json", f"salcli evaluate --ood {ood} --seed {seed}")


def roc(ood: str, seed: int) -> Artifact:
    """Points of every method's ROC, for plots."""
    return Artifact(f"runs/{seed}/{ood}/roc.csv", f"salcli evaluate --ood {ood} --seed {seed}")


def score_histogram(ood: str, seed: int) -> Artifact:
    """Histograms of every method's scores, for plots."""
    return Artifact(f"runs/{seed}/{ood}/histogram.csv", f"salcli evaluate --ood {ood} --seed {seed}")
