"""Where every file of a project is, which command makes it, and which other files it belongs to.

The only module that knows paths: DVC's pipeline (dvc.yaml) names the same ones, and a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from salcli.errors import BadArtifactError, MissingArtifactError, check_regular
from salcli.progress import is_main_process
from salcli.store.files import Found, fingerprint, locked, read_header

SCRATCH = "scratch"
RUNS, SPLITS = "runs", "data/splits"
SAL, SAL_PLUS = "sal", "sal-plus"  # the variant without overrides
DETECTOR = "detector.safetensors"
TEST_SCORES = "test-scores"  # the kind of scores.h5
UNKNOWN = "unknown"  # π of wild data that come as they are


@dataclass(frozen=True)
class Artifact:
    """A file of a project.

    `roots` are the files that decide what it may be used with: the ID split, the wild set, the classifier. Their
    fingerprints are stored in it, and it is refused where one of them has changed since.
    """

    path: str
    made_by: str
    roots: tuple[Artifact, ...] = ()

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def unfinished(self) -> Artifact:
        """A folder for parts of it that are done already. DVC does not track it, so DVC does not delete it."""
        return Artifact(f".salcli/resume/{self.path}", self.made_by)


def prepared_set(name: str) -> Artifact:
    """Decoded samples of a data set."""
    return Artifact(f"data/prepared/{name}.h5", "salcli prepare")  # of the ID data or of OOD data


def unseen_set(name: str) -> Artifact:
    """Decoded samples of an OOD set that is only tested on. It may also be in the wild data of another experiment."""
    return Artifact(f"data/unseen/{name}.h5", f"salcli prepare unseen-set --unseen {name}")


FINGERPRINTS = Artifact(".salcli/fingerprints.json", "salcli fingerprints")
SUMMARY, METHODS_PLOT, ROC_PLOT = (
    Artifact(path, "salcli summary") for path in ("summary.json", "plots/methods.csv", "plots/roc.csv")
)


@dataclass(frozen=True, order=True)
class Experiment:
    """One seed, one OOD set in the wild data, one share π of it, one variant of SAL. Every path comes from it."""

    seed: int
    ood: str = ""
    pi: float | str = UNKNOWN
    variant: str = SAL

    def __str__(self) -> str:
        share = "" if self.pi == UNKNOWN else f"π {self._pi}"
        variant = "" if self.variant == SAL else self.variant
        return ", ".join(filter(None, (self.ood, share if self.ood else "", variant, f"seed {self.seed}")))

    def with_variant(self, name: str) -> Experiment:
        return replace(self, variant=name)

    def _of_seed(self, path: str, command: str, *roots: Artifact) -> Artifact:
        return Artifact(f"{RUNS}/{self.seed}/{path}", f"salcli {command} --seed {self.seed}", roots)

    def _of_wild(self, path: str, command: str, *roots: Artifact, folder: str = RUNS) -> Artifact:
        made_by = f"salcli {command} --ood {self.ood} --pi {self._pi} --seed {self.seed}"
        return Artifact(f"{folder}/{self.seed}/{self.ood}/pi-{self._pi}/{path}", made_by, roots)

    def _of_variant(self, path: str, command: str, *roots: Artifact) -> Artifact:
        return self._of_wild(f"{self.variant}/{path}", f"{command} --variant {self.variant}", *roots)

    # -- of a seed

    @property
    def split(self) -> Artifact:
        """Which ID samples are for training, calibration, the wild set and the test."""
        return Artifact(f"{SPLITS}/{self.seed}/id.h5", f"salcli prepare split --seed {self.seed}")

    @property
    def classifier(self) -> Artifact:
        """The ID classifier h_w."""
        return self._of_seed("networks/classifier.safetensors", "train-id", self.split)

    def train_id(self, suffix: str) -> Artifact:
        """Its training curve (csv), or its accuracy (json)."""
        return self._of_seed(f"train-id.{suffix}", "train-id")

    def encoder(self, name: str) -> Artifact:
        """A network that a rival trained from scratch on the ID data."""
        return self._of_seed(f"networks/{name}.safetensors", f"train-encoder --encoder {name}", self.split)

    def encoder_curve(self, name: str) -> Artifact:
        return self._of_seed(f"train-{name}.csv", f"train-encoder --encoder {name}")

    def id_representation(self, part: str) -> Artifact:
        """Features and logits of a part of the ID data: train, calibration or test."""
        return self._of_seed(f"representation/id-{part}.h5", "extract-grads id", self.split, self.classifier)

    # -- of a wild set

    @property
    def wild(self) -> Artifact:
        """The wild set, as indices."""
        return self._of_wild("wild.h5", "prepare wild", self.split, folder=SPLITS)

    @property
    def truth(self) -> Artifact:
        """Which wild samples are OOD. For diagnosis only: neither the filter nor any training may use it."""
        return self._of_wild("truth.h5", "prepare wild", self.split, self.wild, folder=SPLITS)

    @property
    def wild_holdout(self) -> Artifact:
        """Wild samples that neither the filter nor any training sees, as indices (data.wild_holdout)."""
        return self._of_wild("wild-holdout.h5", "prepare wild", self.split, self.wild, folder=SPLITS)

    @property
    def ood_test(self) -> Artifact:
        """What is left of the OOD set for the test, as indices."""
        return self._of_wild("ood-test.h5", "prepare wild", self.split, self.wild, folder=SPLITS)

    @property
    def wild_representation(self) -> Artifact:
        return self._of_wild("representation/wild.h5", "extract-grads wild", self.classifier, self.wild)

    @property
    def wild_holdout_representation(self) -> Artifact:
        path = "representation/wild-holdout.h5"
        return self._of_wild(path, "extract-grads wild", self.classifier, self.wild_holdout)

    def test_representation(self, unseen: str = "") -> Artifact:
        """Of OOD test data: the rest of the set that is in the wild data, or an unseen set, which is only tested on."""
        path, what = (f"unseen/{unseen}", f"unseen --unseen {unseen}") if unseen else ("ood-test", "wild")
        return self._of_wild(f"representation/{path}.h5", f"extract-grads {what}", self.classifier, self.wild)

    def network(self, method: str) -> Artifact:
        """A network that was trained with the wild data: of a variant of SAL, or of a rival."""
        roots = self.split, self.classifier, self.wild
        return self._of_wild(f"networks/{method}.safetensors", f"train-ood --method {method}", *roots)

    def curve(self, method: str) -> Artifact:
        return self._of_wild(f"train-{method}.csv", f"train-ood --method {method}")

    def evaluation(self, file: str, unseen: str = "") -> Artifact:
        """scores.h5, metrics.json, roc.csv, histogram.csv or estimates.json of all methods on one OOD test set."""
        folder, what = (f"/unseen/{unseen}", f"unseen --unseen {unseen}") if unseen else ("", "own")
        return self._of_wild(f"evaluation{folder}/{file}", f"evaluate {what}")

    @property
    def estimates(self) -> Artifact:
        """FPR95 and AUROC of all methods estimated on held-out wild data, and the method that seems best."""
        return self.evaluation("estimates.json")

    @property
    def detector(self) -> Artifact:
        """All that predictions need, in one file."""
        return self._of_wild(DETECTOR, "detector")

    # -- of a variant

    @property
    def candidates(self) -> Artifact:
        """Candidate outliers and all filtering scores."""
        return self._of_variant("candidates.h5", "filter", self.classifier, self.wild)

    @property
    def filter_metrics(self) -> Artifact:
        """Threshold, number of candidates, ERR_in and ERR_out."""
        return self._of_variant("filter.json", "filter")

    @property
    def wild_list(self) -> Artifact:
        """Every sample of the user's wild data, with what the filter says about it."""
        return self._of_variant("wild.csv", "filter")

    def theory(self, suffix: str) -> Artifact:
        """ζ, its condition, π̂ and the errors against T: json, png or svg."""
        return self._of_variant(f"theory.{suffix}", "theory")

    def resume_state(self, what: str) -> Artifact:
        """The state of an unfinished training. DVC does not track it, so DVC does not delete it."""
        share = "" if self.pi == UNKNOWN else f"pi-{self._pi}"
        name = "-".join(filter(None, (what, self.ood, share if self.ood else "", str(self.seed))))
        return Artifact(f".salcli/resume/{name}.pt", "the command that trains it")

    @property
    def _pi(self) -> str:
        """As params.yaml and dvc.yaml write it: 1, not 1.0."""
        return str(self.pi) if isinstance(self.pi, str) else f"{self.pi:g}"


class Workspace:
    """A project folder. A scratch run writes below scratch/ and reads from there first, so what DVC tracks stays."""

    def __init__(self, root: Path, *, scratch: bool = False) -> None:
        self.root, self.scratch = root, scratch
        self.read_from_scratch: dict[str, None] = {}  # paths, in the order they were read

    def find(self, artifact: Artifact) -> Found:
        """The artifact's file, or an error that says how to make it. One made with other roots is refused."""
        path, in_scratch = self._existing(artifact)
        found = Found(path, f"{artifact.made_by}{' --scratch' if in_scratch else ''}")
        try:
            path.open("rb").close()  # a file that may not be read looks damaged to some of its readers
        except FileNotFoundError:
            raise MissingArtifactError(
                f"{artifact.path} does not exist yet; run dvc repro, or make this file alone: {artifact.made_by}"
            ) from None
        if in_scratch:
            self.read_from_scratch[artifact.path] = None
        if artifact.roots:
            self._check_lineage(found, artifact)
        return found

    def target(self, artifact: Artifact) -> Path:
        """Where to write the artifact."""
        path = (self.root / SCRATCH if self.scratch else self.root) / artifact.path
        check_regular(path)
        return path

    @contextmanager
    def running(self, stage: str, experiment: Experiment) -> Iterator[None]:
        """One process at a time runs a stage of an experiment; a second one is refused."""
        if not is_main_process():  # of several that torchrun has started
            yield
            return
        name = re.sub(r"[^\w.-]+", "-", f"{stage} {experiment}".replace("π", "pi"))
        with locked(self.target(Artifact(f".salcli/locks/{name}.lock", "")), f"{stage} ({experiment})"):
            yield

    def has(self, artifact: Artifact) -> bool:
        return self._existing(artifact)[0].exists()

    def given(self, name: str) -> Path:
        """A file that the user names; a relative path counts from the project folder."""
        return self.root / Path(name).expanduser()

    def about(self, artifact: Artifact, **how: Any) -> dict[str, Any]:
        """What to store in a new artifact: how it was made, and the fingerprints of its roots."""
        return {**how, "made_from": {root.name: fingerprint(self.find(root).path) for root in artifact.roots}}

    def _existing(self, artifact: Artifact) -> tuple[Path, bool]:
        in_scratch = self.root / SCRATCH / artifact.path
        if self.scratch and in_scratch.exists():
            return in_scratch, True
        return self.root / artifact.path, False

    def _check_lineage(self, found: Found, artifact: Artifact) -> None:
        recorded = read_header(found).about.get("made_from", {})
        for root in artifact.roots:
            here = self.find(root)
            if recorded.get(root.name) != fingerprint(here.path):
                raise BadArtifactError(
                    f"{found.path} was made with another {here.path.name} ({recorded.get(root.name)}) than the one "
                    f"here ({fingerprint(here.path)}); run dvc repro, or {found.made_by}"
                )
