"""Where every artifact lies in a workspace, and which command makes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from salcli.errors import MissingArtifactError

SCRATCH = "scratch"
RUNS = "runs"
NETWORKS = "networks"
UNSEEN = "unseen"
SWEEP = "sweep"
DETECTOR = "detector.safetensors"


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
    """A folder with params.yaml, and folders laid over it, so that what DVC tracks stays untouched.

    A scratch run writes below scratch/. A run `within` a folder of its own (below scratch/ if it is a scratch run, too)
    writes there and looks there first; what is not in it is that of the workspace below.
    """

    root: Path
    write_to_scratch: bool = False
    read_from_scratch: bool = False
    folder: Artifact | None = None  # that the run is within, and the command that makes all that is in it
    inputs_from_scratch: list[str] = field(default_factory=list, compare=False)
    _targets: set[str] = field(default_factory=set, compare=False)  # names that this run writes to scratch/

    def within(self, folder: Artifact) -> Workspace:
        """The same workspace for a run that has a folder of its own."""
        return replace(self, folder=folder, _targets=set())

    def find(self, artifact: Artifact) -> Found:
        """The artifact's file, or an error that says how to make it."""
        if self._is_own(artifact):
            found = Found(self._written_to / artifact.name, self.how_to_make(artifact))
        elif self.is_in_scratch(artifact):
            self.inputs_from_scratch.append(artifact.name)
            found = Found(self.root / SCRATCH / artifact.name, f"{artifact.made_by} --scratch")
        else:
            found = Found(self.root / artifact.name, artifact.made_by)
        try:
            found.path.open("rb").close()  # a file that may not be read looks damaged to some of its readers
        except FileNotFoundError:
            raise MissingArtifactError(f"{artifact.name} is not there yet; make it with: {artifact.made_by}") from None
        return found

    def given(self, name: str) -> Path:
        """A file that the user names; a relative one counts from the workspace."""
        return self.root / Path(name).expanduser()

    def how_to_make(self, artifact: Artifact) -> str:
        """The command that makes the artifact for this run: in scratch/, where the run is a scratch run."""
        made_by = self.folder.made_by if self.folder else artifact.made_by
        return f"{made_by} --scratch" if self.write_to_scratch else made_by

    def has(self, artifact: Artifact) -> bool:
        """Whether the artifact is there."""
        folders = (self.root, self.root / SCRATCH) if self.read_from_scratch else (self.root,)
        return self._is_own(artifact) or any((folder / artifact.name).exists() for folder in folders)

    def is_in_scratch(self, artifact: Artifact) -> bool:
        """Whether this run goes on from a scratch run that made the artifact."""
        return self.read_from_scratch and (self.root / SCRATCH / artifact.name).exists()

    def target(self, artifact: Artifact) -> Path:
        """Where to write the artifact."""
        if self.write_to_scratch:
            self._targets.add(artifact.name)
        return self._written_to / artifact.name

    def _is_own(self, artifact: Artifact) -> bool:
        """Also without --scratch a run goes on from what it has written itself: a split, then its wild mixture."""
        may_read = self.folder is not None or artifact.name in self._targets
        return may_read and (self._written_to / artifact.name).exists()

    @property
    def _written_to(self) -> Path:
        base = self.root / SCRATCH if self.write_to_scratch else self.root
        return base / self.folder.name if self.folder else base


def prepared_set(name: str) -> Artifact:
    """Decoded images of one data set."""
    return Artifact(f"data/prepared/{name}.h5", "salcli prepare")


def prepared_ood_set(name: str) -> Artifact:
    """Decoded images of an OOD set."""
    return Artifact(prepared_set(name).name, f"salcli prepare --ood {name}")


def unseen_set(name: str) -> Artifact:
    """Decoded images of an OOD set that is only tested on. In a place of its own: it may be in other wild data."""
    return Artifact(f"data/unseen/{name}.h5", f"salcli prepare --unseen {name}")


def outside_fingerprints() -> Artifact:
    """Fingerprints of what DVC cannot see: the code of each stage, raw data, given weights."""
    return Artifact(".salcli/fingerprints.json", "salcli fingerprints")


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
    """The ID classifier h_w. In a folder of networks that know no wild data, which `evaluate` depends on as a whole."""
    return Artifact(f"runs/{seed}/{NETWORKS}/classifier.safetensors", f"salcli train-id --seed {seed}")


def train_id_curve(seed: int) -> Artifact:
    """Loss and accuracy of the ID classifier, epoch by epoch."""
    return Artifact(f"runs/{seed}/train-id.csv", f"salcli train-id --seed {seed}")


def train_id_metrics(seed: int) -> Artifact:
    """Accuracy of the ID classifier."""
    return Artifact(f"runs/{seed}/train-id.json", f"salcli train-id --seed {seed}")


def encoder(name: str, seed: int) -> Artifact:
    """A network that was trained from scratch on the ID data in a rival's way."""
    return Artifact(f"runs/{seed}/{NETWORKS}/{name}.safetensors", _train_encoder(name, seed))


def encoder_curve(name: str, seed: int) -> Artifact:
    """Its loss and accuracy, epoch by epoch."""
    return Artifact(f"runs/{seed}/train-{name}.csv", _train_encoder(name, seed))


def _train_encoder(name: str, seed: int) -> str:
    return f"salcli train-encoder --encoder {name} --seed {seed}"


def resume_state(what: str, seed: int, ood: str = "") -> Artifact:
    """The state of an unfinished training run. DVC does not know of it, so it does not delete it."""
    name = "-".join(filter(None, (what, ood, str(seed))))
    return Artifact(f".salcli/resume/{name}.pt", "the command that trains it")


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


def theory_metrics(ood: str, seed: int) -> Artifact:
    """The discrepancy ζ, its condition, the estimate of π and the errors against T."""
    return Artifact(f"runs/{seed}/{ood}/theory.json", f"salcli theory --ood {ood} --seed {seed}")


def theory_figure(ood: str, seed: int, suffix: str) -> Artifact:
    """The same as a figure: suffix is png or svg."""
    return Artifact(f"runs/{seed}/{ood}/theory.{suffix}", f"salcli theory --ood {ood} --seed {seed}")


def trained_network(method: str, ood: str, seed: int) -> Artifact:
    """A network that was trained with the wild data: SAL's OOD classifier g_θ, or a rival's."""
    return Artifact(f"runs/{seed}/{ood}/{NETWORKS}/{method}.safetensors", _train_ood(method, ood, seed))


def training_curve(method: str, ood: str, seed: int) -> Artifact:
    """Its loss and accuracy, epoch by epoch."""
    return Artifact(f"runs/{seed}/{ood}/train-{method}.csv", _train_ood(method, ood, seed))


def _train_ood(method: str, ood: str, seed: int) -> str:
    return f"salcli train-ood --method {method} --ood {ood} --seed {seed}"


def detector(ood: str, seed: int) -> Artifact:
    """All that predictions need, in one file."""
    return Artifact(f"runs/{seed}/{ood}/{DETECTOR}", f"salcli detector --ood {ood} --seed {seed}")


def _evaluation(file: str, ood: str, seed: int, unseen: str | None) -> Artifact:
    """Figures on the OOD set of the wild data lie with the experiment; those on an unseen set in a folder below."""
    if unseen is None:
        return Artifact(f"runs/{seed}/{ood}/{file}", f"salcli evaluate --ood {ood} --seed {seed}")
    command = f"salcli evaluate --ood {ood} --seed {seed} --unseen {unseen}"
    return Artifact(f"runs/{seed}/{ood}/{UNSEEN}/{unseen}/{file}", command)


def evaluation_scores(ood: str, seed: int, unseen: str | None = None) -> Artifact:
    """Every method's scores on the test sets."""
    return _evaluation("scores.h5", ood, seed, unseen)


def metrics(ood: str, seed: int, unseen: str | None = None) -> Artifact:
    """Every method's FPR95, AUROC, AUPR and accuracy."""
    return _evaluation("metrics.json", ood, seed, unseen)


def roc(ood: str, seed: int, unseen: str | None = None) -> Artifact:
    """Points of every method's ROC, for plots."""
    return _evaluation("roc.csv", ood, seed, unseen)


def score_histogram(ood: str, seed: int, unseen: str | None = None) -> Artifact:
    """Histograms of every method's scores, for plots."""
    return _evaluation("histogram.csv", ood, seed, unseen)


def pi_sweep_folder(pi: float) -> Artifact:
    """Where all that depends on π lies for one value of it: a folder with the places of a workspace."""
    return Artifact(f"{SWEEP}/pi-{pi}", "salcli sweep-pi")


def pi_sweep_point(ood: str, seed: int) -> Artifact:
    """The figures of one experiment of the sweep, and what they were made with."""
    return Artifact(f"runs/{seed}/{ood}/sweep.json", "salcli sweep-pi")


def pi_sweep_summary(suffix: str) -> Artifact:
    """All figures of the sweep, as csv, png or svg."""
    return Artifact(f"{SWEEP}/pi.{suffix}", "salcli sweep-pi")
