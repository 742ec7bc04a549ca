"""Files are whole or not there; what is truncated, foreign or made with something else is refused with a cure."""

from __future__ import annotations

import json
import pickle
import re
import resource
import shlex
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
import torch
from conftest import OOD, REPOSITORY, SEED
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from test_bad_input import NEEDS, ONE, refused
from test_cli import files, here, salcli, write_params

from salcli.artifacts import layout
from salcli.artifacts.atomic import atomic_path, write_text
from salcli.artifacts.candidates import read_candidates, write_candidates
from salcli.artifacts.checkpoint import read_header, read_network, write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.detector import read_detector, write_detector
from salcli.artifacts.gradients import GradientFile
from salcli.artifacts.hdf5 import creating, write_arrays
from salcli.artifacts.images import read_image_set, write_image_set
from salcli.artifacts.layout import Found, Workspace
from salcli.artifacts.splits import read_id_split, read_ood_test, read_wild_source, read_wild_truth, write_id_split
from salcli.errors import BadArtifactError, StorageError
from salcli.models.network import Classifier, OodClassifier
from salcli.reporting.file_view import file_view
from salcli.reporting.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["here"]  # a fixture
MAKE_IT = "salcli make-it --seed 3"

# every reader of every format, with a file that it reads
READERS: dict[str, tuple[str, Callable[[Found], Any]]] = {
    "image set": ("data/prepared/digits-0-7.h5", read_image_set),
    "image set with a part for tests": ("data/prepared/photo-patches.h5", read_image_set),
    "split": (f"data/splits/{SEED}/id.h5", read_id_split),
    "wild": (f"data/splits/{SEED}/{OOD}/wild.h5", read_wild_source),
    "OOD test": (f"data/splits/{SEED}/{OOD}/wild.h5", read_ood_test),
    "truth": (f"data/splits/{SEED}/{OOD}/truth.h5", read_wild_truth),
    "classifier": (f"runs/{SEED}/networks/classifier.safetensors", lambda found: read_network(found, Classifier)),
    "OOD classifier": (
        f"runs/{SEED}/{OOD}/networks/sal.safetensors",
        lambda found: read_network(found, OodClassifier),
    ),
    "gradients": (f"runs/{SEED}/gradients-id-train.h5", lambda found: list(GradientFile.open(found).chunks())),
    "candidates": (f"runs/{SEED}/{OOD}/candidates.h5", read_candidates),
    "detector": (f"runs/{SEED}/{OOD}/detector.safetensors", read_detector),
}  # fmt: skip
BY_FORMAT = pytest.mark.parametrize("reader", READERS)


def read(reader: str, path: Path) -> Any:
    return READERS[reader][1](Found(path, MAKE_IT))


def check_refused(reader: str, path: Path) -> str:
    with pytest.raises(BadArtifactError) as caught:
        read(reader, path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.endswith(f"; make it again: {MAKE_IT}")
    return message


# --- whole or not at all


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "file.txt"
    with atomic_path(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
        assert partial.parent == path.parent  # or the rename could not be atomic
        assert partial.name.startswith(".")
    assert files(tmp_path) == {"deep/down/file.txt": b"whole"}


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "file.h5"
    write_arrays(path, "kind", {"a": np.arange(5)}, {})
    before = files(tmp_path)

    def fail() -> None:
        with creating(path, "kind", {}) as file:
            file.create_dataset("a", data=np.zeros(100_000))
            raise failure

    with pytest.raises(failure):
        fail()
    assert files(tmp_path) == before


def test_what_a_killed_run_left_behind_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".file.txt.partial").write_text("left behind by a killed process, and longer than the new text")
    write_text(tmp_path / "file.txt", "new")
    assert files(tmp_path) == {"file.txt": b"new"}


@contextmanager
def small_files_only(size: int) -> Iterator[None]:
    """The system refuses to write beyond `size` bytes, as a full disk does, but for one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "text": lambda path, _: write_text(path, "x" * 20_000),
    "curve": lambda path, _: write_curve(path, [{"epoch": i, "loss": i / 7} for i in range(3000)]),
    "network": lambda path, built: write_network(path, read("classifier", built / READERS["classifier"][0]), {}),
    "detector": lambda path, built: write_detector(path, read("detector", built / READERS["detector"][0])),
    "one large array": lambda path, _: write_arrays(path, "kind", {"a": np.arange(10_000)}, {}),
    # the HDF5 library would keep each of these back, and swallow the error when it closes
    "many small arrays": lambda path, _: write_arrays(path, "kind", {f"a{i}": np.arange(100) for i in range(50)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_cannot_be_written_as_a_whole_is_not_written(built: Path, tmp_path: Path, writer: str) -> None:
    folder = tmp_path / "out"
    path = folder / "file"
    write_text(path, "from before")
    with (
        small_files_only(8192),
        pytest.raises(StorageError, match=r"file cannot be written: File too large; mend that"),
    ):
        WRITERS[writer](path, built)
    assert files(folder) == {"file": b"from before"}
    WRITERS[writer](path, built)
    assert path.stat().st_size > 8192


def test_the_same_content_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """Also a second later, and however the metadata are ordered."""

    def write(folder: Path, order: int) -> dict[str, bytes]:
        made_with = dict(list({"b": 1, "a": {"y": [1.5], "x": 2}}.items())[::order])
        write_network(folder / "network", read("classifier", built / READERS["classifier"][0]), made_with)
        write_image_set(folder / "images", read("image set", built / READERS["image set"][0]), "name")
        write_id_split(folder / "split", read("split", built / READERS["split"][0]), made_with)
        write_candidates(folder / "candidates", read("candidates", built / READERS["candidates"][0]), made_with)
        write_detector(folder / "detector", read("detector", built / READERS["detector"][0]))
        write_curve(folder / "curve", [{"x": 0.1, "y": "z"}])
        return files(folder)

    first = write(tmp_path / "first", 1)
    time.sleep(1.1)  # HDF5 counts its timestamps in seconds
    assert write(tmp_path / "second", -1) == first


@BY_FORMAT
def test_every_reader_reads_its_own_file(built: Path, reader: str) -> None:
    assert read(reader, built / READERS[reader][0]) is not None


# --- truncated


@BY_FORMAT
@given(data=st.data())
def test_a_file_that_is_cut_short_anywhere_is_refused(
    built: Path, tmp_path_factory: pytest.TempPathFactory, reader: str, data: st.DataObject
) -> None:
    whole = (built / READERS[reader][0]).read_bytes()
    length = data.draw(st.integers(0, 3000) | st.integers(0, len(whole) - 1) | st.just(len(whole) - 1))
    path = tmp_path_factory.getbasetemp() / READERS[reader][0].rpartition("/")[2]
    path.write_bytes(whole[:length])
    if length < len(whole):
        check_refused(reader, path)
        with pytest.raises(BadArtifactError):
            file_view(path, top=3)


@pytest.mark.parametrize("name", ["metrics.json", "filter.json"])
@given(share=st.floats(0, 0.999))
def test_figures_that_are_cut_short_are_refused(
    built: Path, tmp_path_factory: pytest.TempPathFactory, name: str, share: float
) -> None:
    folder = tmp_path_factory.getbasetemp() / "runs"
    shutil.copytree(built / "runs" / str(SEED) / OOD, folder / "3" / OOD, dirs_exist_ok=True)
    path = folder / "3" / OOD / name
    text = path.read_text().rstrip()
    path.write_text(text[: int(share * len(text))])
    command = {"metrics.json": "evaluate", "filter.json": "filter"}[name]
    with pytest.raises(
        BadArtifactError, match=rf"{name} is damaged .*; make it again: salcli {command} --ood {OOD} --seed 3"
    ):
        Results.from_folder(folder)


STAGES = {**NEEDS, f"filter --ood {OOD}": [*NEEDS[f"filter --ood {OOD}"], layout.wild_truth(OOD, SEED)]}


@pytest.mark.parametrize("command", STAGES)
def test_every_stage_refuses_every_damaged_input_and_writes_nothing(here: Path, command: str) -> None:
    for artifact in STAGES[command]:
        path = here / artifact.name
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], b"", b"not what it should be"):
            path.write_bytes(content)
            message = refused(*command.split(), "--seed", str(SEED), root=here)
            assert message.startswith(f"error: {artifact.name} is damaged or no"), message
            assert message.endswith(f"; make it again: {artifact.made_by}\n")
        path.write_bytes(whole)


# --- foreign


@BY_FORMAT
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_other_file_is_refused(tmp_path_factory: pytest.TempPathFactory, reader: str, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / READERS[reader][0].rpartition("/")[2]
    path.write_bytes(content)
    check_refused(reader, path)


@BY_FORMAT
def test_a_file_of_another_kind_is_refused(built: Path, reader: str) -> None:
    own, _ = READERS[reader]
    for other, _ in READERS.values():
        kinds = [salcli("inspect", str(built / name)).stdout.split("kind")[1].split()[0] for name in (own, other)]
        if kinds[0] != kinds[1]:
            check_refused(reader, built / other)


HDF5_READERS = [name for name, (path, _) in READERS.items() if path.endswith(".h5")]


@pytest.mark.parametrize("reader", HDF5_READERS)
def test_a_foreign_hdf5_file_is_refused(built: Path, tmp_path: Path, reader: str) -> None:
    path = tmp_path / "file.h5"

    def change(edit: Callable[[h5py.File], object]) -> str:
        shutil.copy(built / READERS[reader][0], path)
        with h5py.File(path, "r+") as file:
            edit(file)
        return check_refused(reader, path)

    assert "holds something foreign, not" in change(lambda file: file.attrs.clear())
    assert "has schema 2, this salcli reads 1" in change(lambda file: file.attrs.modify("schema", 2))
    change(lambda file: file.attrs.create("kind", np.arange(3)))
    change(lambda file: [file.__delitem__(name) for name in list(file)])
    if reader in ("candidates", "gradients", "image set"):
        change(lambda file: file.attrs.modify("about", "no JSON"))
        change(lambda file: file.attrs.modify("about", "{}"))
        change(lambda file: file.attrs.modify("about", "[]"))


def test_a_foreign_checkpoint_is_refused(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "network.safetensors"
    with safe_open(built / READERS["classifier"][0], framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["salcli"])

    def change(weights: dict[str, torch.Tensor], header: object) -> str:
        save_file(weights, path, metadata={"salcli": json.dumps(header)})
        return check_refused("classifier", path)

    save_file(weights, path)
    assert "no salcli checkpoint" in check_refused("classifier", path)
    assert "no salcli checkpoint" in change(weights, {"format": "pt"})
    assert "no salcli checkpoint" in change(weights, [])
    assert "has schema 7, this salcli reads 1" in change(weights, {**header, "schema": 7})
    assert "kind ood-classifier, not classifier" in change(weights, {**header, "kind": "ood-classifier"})
    spec = header["spec"]
    for wrong in ({}, {**spec, "n_classes": 9}, {**spec, "n_classes": "eight"}, {**spec, "mean": 3}):
        assert "does not fit its own description" in change(weights, {**header, "spec": wrong})
    assert "does not fit its own description" in change({"head.weight": weights["head.weight"]}, header)
    assert "does not fit its own description" in change({**weights, "extra": torch.zeros(1)}, header)


def test_a_network_of_another_program_version_is_refused_with_the_names_it_could_have(
    built: Path, tmp_path: Path
) -> None:
    path = tmp_path / "network.safetensors"
    with safe_open(built / READERS["classifier"][0], framework="pt") as file:
        header = json.loads(file.metadata()["salcli"])
    header["spec"]["backbone"] = "small-cn"
    save_file({}, path, metadata={"salcli": json.dumps(header)})
    message = check_refused("classifier", path)
    assert "no backbone is called small-cn (did you mean small-cnn?); known: mlp, resnet18, " in message


class Malicious:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


@BY_FORMAT
def test_nothing_is_unpickled(tmp_path: Path, reader: str) -> None:
    path, trace = tmp_path / READERS[reader][0].rpartition("/")[2], tmp_path / "trace"
    torch.save({"state": Malicious(trace)}, path)
    check_refused(reader, path)
    path.write_bytes(pickle.dumps(Malicious(trace)))
    check_refused(reader, path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the trap works


# CIFAR is published as pickles: see test_data_sets.py for what becomes of code in them
ARRAYS_ONLY = REPOSITORY / "salcli" / "data" / "cifar.py"


@pytest.mark.parametrize(
    "path", sorted({*(REPOSITORY / "salcli").rglob("*.py")} - {ARRAYS_ONLY}), ids=lambda path: path.name
)
def test_the_source_loads_nothing_that_could_run_code(path: Path) -> None:
    unsafe = r"\bpickle\b|torch\.load\b(?!\(.*\bweights_only=True\))|allow_pickle|joblib|(?<!\.)\b(eval|exec)\("
    assert not re.search(unsafe, path.read_text())


# --- made with something else


@pytest.fixture(scope="module")
def other(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another classifier, on the same data, and all that came of it."""
    root = tmp_path_factory.mktemp("other")
    shutil.copytree(built / "data", root / "data")
    write_params(root, {"seeds": [SEED], "data.ood": [OOD], "train_id.epochs": 1, "train_ood.epochs": 1})
    for command in ("train-id", "extract-grads", "filter", "train-ood"):
        assert salcli(command, "--params", str(root / "params.yaml")).exit_code == 0
    return root


def follow_the_cure(message: str) -> list[str]:
    """Run what the message says, in its order."""
    found = re.search(r"make (?:it|them|all gradients) again: (.+)\n", message)
    assert found
    ran = []
    for command in found[1].split(", then "):
        result = salcli(*shlex.split(command)[1:])
        assert result.exit_code == 0, result.stderr
        ran.append(shlex.split(command)[1])
    return ran


# which file of another classifier, who meets it, and what mends it
STRANGERS = {
    "filter, ID gradients": (layout.id_gradients("train", SEED), "filter", ["extract-grads"]),
    "filter, calibration gradients": (layout.id_gradients("calibration", SEED), "filter", ["extract-grads"]),
    "filter, wild gradients": (layout.wild_gradients(OOD, SEED), "filter", ["extract-grads"]),
    "train-ood, candidates": (layout.candidates(OOD, SEED), "train-ood", ["extract-grads", "filter"]),
    "evaluate, OOD classifier": (layout.trained_network("sal", OOD, SEED), "evaluate", ["train-ood"]),
    "detector, OOD classifier": (layout.trained_network("sal", OOD, SEED), "detector", ["train-ood"]),
    "evaluate, gradients": (layout.id_gradients("train", SEED), "evaluate", ["extract-grads"]),
}


def test_files_of_another_network_are_refused_and_the_cure_mends_them(here: Path, other: Path) -> None:
    for who, (artifact, command, cure) in STRANGERS.items():
        own = (here / artifact.name).read_bytes()
        shutil.copy(other / artifact.name, here / artifact.name)
        message = refused(command, *ONE, root=here)
        assert artifact.name in message, who
        assert re.search("was made with (another classifier.safetensors|network)", message), who
        assert follow_the_cure(message) == cure, who
        assert salcli(command, *ONE).exit_code == 0, who
        assert (here / artifact.name).read_bytes() == own, who


def test_a_new_classifier_makes_all_that_came_of_the_old_one_invalid(here: Path, other: Path) -> None:
    shutil.copy(other / layout.classifier(SEED).name, here / layout.classifier(SEED).name)
    for command in ("evaluate", "train-ood"):
        message = refused(command, *ONE, root=here)
        assert "was made with another classifier.safetensors" in message
    assert follow_the_cure(message) == ["extract-grads", "filter"]
    for command in ("train-ood", "evaluate"):
        assert salcli(command, *ONE).exit_code == 0


def test_a_new_wild_mixture_makes_all_that_came_of_the_old_one_invalid(here: Path) -> None:
    write_params(here, {"seeds": [SEED], "data.pi": 0.2, "train_ood.epochs": 1})
    assert salcli("prepare", "wild", *ONE).exit_code == 0
    message = refused("filter", *ONE, root=here)
    assert re.search(r"truth.h5 knows \d+ wild samples, but there are gradients of 642; make them again: ", message)
    message = refused("evaluate", *ONE, root=here)
    assert "gradients-wild.h5 was made with another wild.h5" in message
    message = refused("evaluate", "--method", "sal", *ONE, root=here)
    assert "sal.safetensors was made with another wild.h5" in message
    message = refused("train-ood", *ONE, root=here)
    assert "candidates.h5 was made with another wild.h5" in message
    assert follow_the_cure(message) == ["extract-grads", "filter"]
    for command in ("train-ood", "evaluate"):
        assert salcli(command, *ONE).exit_code == 0


def test_id_gradients_in_place_of_wild_ones_are_refused(here: Path) -> None:
    shutil.copy(here / layout.id_gradients("train", SEED).name, here / layout.wild_gradients(OOD, SEED).name)
    assert "gradients-wild.h5 holds no gradients of wild data; make it again" in refused("filter", *ONE, root=here)


def test_a_classifier_in_place_of_the_ood_classifier_is_refused(here: Path) -> None:
    shutil.copy(here / layout.classifier(SEED).name, here / layout.trained_network("sal", OOD, SEED).name)
    assert "holds a network of kind classifier, not ood-classifier" in refused("evaluate", *ONE, root=here)


def test_a_bad_scratch_file_is_made_again_in_scratch(here: Path) -> None:
    """Not in its place outside, where it would not be looked for."""
    salcli("filter", *ONE, "--threshold-quantile", "0.9")
    (here / "scratch" / layout.candidates(OOD, SEED).name).write_bytes(b"")
    message = refused("train-ood", *ONE, "--scratch", root=here)
    assert message.endswith(f"; make it again: salcli filter {' '.join(ONE)} --scratch\n")
    assert follow_the_cure(message) == ["filter"]
    assert salcli("train-ood", *ONE, "--scratch").exit_code == 0


def test_a_checkpoint_says_what_it_was_made_with(built: Path) -> None:
    found = Workspace(built).find(layout.trained_network("sal", OOD, SEED))
    about = read_header(found).about
    assert about["ood"] == OOD
    assert about["train_ood"]["epochs"] == 3
