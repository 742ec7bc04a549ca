"""KNN+ and CSI: trained by contrast from labeled ID data alone, resumable, and the same bytes each time."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import REPOSITORY, SEED
from ruamel.yaml import YAML
from test_resume import Watched

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.layout import Workspace
from salcli.compute.distortions import Distortions
from salcli.errors import BadArtifactError, DataError, ParamsError
from salcli.models.contrastive import ENCODERS, ContrastiveClassifier, RotationClassifier
from salcli.models.network import NetworkSpec
from salcli.params import Params, load_params
from salcli.params_file import read_yaml, with_overrides
from salcli.stages import prepare, train_encoder
from salcli.stages.encoder_methods import Csi, KnnPlus
from salcli.stages.inputs import id_images

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# a short schedule, as one would --set it: three steps in an epoch
N_TRAIN, BATCH = 115, 38
PER_EPOCH = 3 * BATCH
SHORT = {
    "epochs": 2, "batch_size": BATCH, "warmup_epochs": 1, "smallest_crop": 0.6, "projection": 16,
    "head.epochs": 2, "head.batch_size": BATCH,
}  # fmt: skip
FEW_IMAGES = {"data.id_shares.train": 0.08, "data.id_shares.wild": 0.64}


def short(**changes: Any) -> dict[str, Any]:
    """For both encoders; a__b stands for a.b."""
    values = SHORT | {name.replace("__", "."): value for name, value in changes.items()}
    return {f"train_encoder.{encoder}.{key}": value for encoder in ENCODERS for key, value in values.items()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    with (root / "params.yaml").open("w") as file:
        YAML().dump(with_overrides(read_yaml(REPOSITORY / "params.yaml"), short() | FEW_IMAGES), file)
    params = load_params(root / "params.yaml")[0]
    prepare.prepare_set(Workspace(root), params.data, params.data.id)
    prepare.prepare_split(Workspace(root), params.data, SEED)
    return root


@pytest.fixture
def own(prepared: Path, tmp_path: Path) -> Workspace:
    shutil.copytree(prepared, tmp_path / "own")
    return Workspace(tmp_path / "own")


def params_of(workspace: Workspace, **changes: Any) -> Params:
    return load_params(workspace.root / "params.yaml", short(**changes))[0]


def written(workspace: Workspace, encoder: str) -> list[bytes]:
    places = layout.encoder(encoder, SEED), layout.encoder_curve(encoder, SEED)
    return [workspace.find(place).path.read_bytes() for place in places]


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("epochs_before", [1.5, 2.5, 3.5], ids=["contrast", "heads", "second epoch"])
def test_an_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(
    own: Workspace, encoder: str, epochs_before: float
) -> None:
    params = params_of(own)
    train_encoder.run(own, params, encoder, SEED)
    undisturbed = written(own, encoder)
    with pytest.raises(KeyboardInterrupt):
        train_encoder.run(own, params, encoder, SEED, Watched(stop_after=int(epochs_before * PER_EPOCH)))
    watched = Watched()
    train_encoder.run(own, params, encoder, SEED, watched)
    assert "goes on after epoch" in watched.notes[0]
    assert watched.skipped == PER_EPOCH * int(epochs_before)
    assert written(own, encoder) == undisturbed
    assert not list((own.root / ".salcli").rglob("*.pt"))


def test_other_heads_keep_the_features_that_an_unfinished_run_has_learnt(own: Workspace) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_encoder.run(own, params_of(own), "knn-plus", SEED, Watched(stop_after=int(2.5 * PER_EPOCH)))
    watched = Watched()
    train_encoder.run(own, params_of(own, head__lr=0.1), "knn-plus", SEED, watched)
    assert watched.notes == ["goes on after epoch 2 of 2, where an earlier run was stopped"]
    with pytest.raises(KeyboardInterrupt):
        train_encoder.run(own, params_of(own), "knn-plus", SEED, Watched(stop_after=int(1.5 * PER_EPOCH)))
    watched = Watched()
    train_encoder.run(own, params_of(own, temperature=0.2), "knn-plus", SEED, watched)
    assert watched.notes == ["starts anew: params or inputs have changed since the earlier run that was stopped"]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_heads_leave_the_features_as_they_are(own: Workspace, encoder: str) -> None:
    networks = []
    for head_epochs in (1, 3):
        train_encoder.run(own, params_of(own, head__epochs=head_epochs), encoder, SEED)
        networks.append(read_network(own.find(layout.encoder(encoder, SEED)), ENCODERS[encoder]).state_dict())
    names = [name for name, tensor in networks[0].items() if not torch.equal(tensor, networks[1][name])]
    heads = {"knn-plus": ["head"], "csi": ["head", "joint_head", "rotation_head"]}[encoder]
    assert sorted(names) == [f"{head}.{part}" for head in heads for part in ("bias", "weight")]


# small batches of a tiny set: other rates than the authors have
RATES = {"knn-plus": {"lr": 0.1, "head__lr": 0.5}, "csi": {"lr": 20.0, "warmup_lr": 2.0}}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_it_learns(own: Workspace, encoder: str) -> None:
    params = params_of(own, epochs=14, batch_size=23, head__epochs=6, head__batch_size=23, **RATES[encoder])
    done = train_encoder.run(own, params, encoder, SEED)
    curve = own.find(layout.encoder_curve(encoder, SEED)).path.read_text().splitlines()
    assert curve[0] == "phase,epoch,loss,accuracy"
    rows = [line.split(",") for line in curve[1:]]
    assert [row[0] for row in rows] == ["contrast"] * 14 + ["heads"] * 6
    assert [int(row[1]) for row in rows] == list(range(1, 21))
    assert float(rows[13][2]) < 0.9 * float(rows[0][2])
    assert done.test_accuracy > {"knn-plus": 0.6, "csi": 0.2}[encoder]  # chance is 1/8


def test_the_file_says_what_it_is(own: Workspace) -> None:
    train_encoder.run(own, params_of(own), "csi", SEED)
    found = own.find(layout.encoder("csi", SEED))
    about = read_header(found).about
    assert about["encoder"] == "csi"
    assert about["train_encoder"]["epochs"] == 2
    with pytest.raises(BadArtifactError, match="of kind rotation-classifier, not contrastive-classifier"):
        read_network(found, ContrastiveClassifier)


SPEC = NetworkSpec("small-cnn", 3, mean=(0.5,), std=(0.5,))


def test_csi_averages_the_joint_logits_of_the_true_rotations() -> None:
    network = RotationClassifier(SPEC).eval()
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    with torch.inference_mode():
        slow = torch.zeros(5, 3)
        for turns in range(4):
            joint = network.joint_head(network.features(torch.rot90(images, turns, (2, 3))))
            slow += joint[:, 3 * turns : 3 * (turns + 1)] / 4
        torch.testing.assert_close(network(images), slow)


class Undistorted(Distortions):
    """Mirrors every second image and leaves the rest to the eye."""

    def __init__(self) -> None:
        super().__init__(1.0, torch.Generator())

    def mirrored(self, images: Tensor) -> Tensor:
        return torch.where(torch.arange(len(images))[:, None, None, None] % 2 == 1, images.flip(3), images)

    def cropped(self, images: Tensor) -> Tensor:
        return images

    def recoloured(self, images: Tensor) -> Tensor:
        return images


def test_what_is_compared(own: Workspace) -> None:
    images, labels = torch.arange(3 * 16).reshape(3, 1, 4, 4), torch.tensor([2, 0, 1])
    one, other = images.clone(), images.clone()
    one[1], other[0], other[2] = images[1].flip(2), images[0].flip(2), images[2].flip(2)
    params = params_of(own).train_encoder.csi
    views, label = KnnPlus(params, Undistorted(), ContrastiveClassifier(SPEC)).views(images, labels)
    assert torch.equal(views, torch.cat([one, other]))
    assert label.tolist() == [2, 0, 1] * 2
    views, label = Csi(params, Undistorted(), RotationClassifier(SPEC)).views(images, labels)
    blocks = [torch.rot90(side, turns, (2, 3)) for side in (one, other) for turns in range(4)]
    assert torch.equal(views, torch.cat(blocks))  # mirrored first: a mirrored rotation would be another rotation
    assert label.tolist() == [2, 0, 1, 5, 3, 4, 8, 6, 7, 11, 9, 10] * 2


def test_there_are_as_many_images_as_these_tests_say(own: Workspace) -> None:
    assert len(id_images(own, "digits-0-7", "train", SEED)) == N_TRAIN


def test_points_have_no_views(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    values = {"data.id": "gaussians-2d", "data.ood": ["ring-2d"], "data.image_size": 1, "data.channels": 2}
    params = load_params(REPOSITORY / "params.yaml", {**values, "model.backbone": "mlp"})[0]
    prepare.prepare_set(workspace, params.data, "gaussians-2d")
    prepare.prepare_split(workspace, params.data, SEED)
    with pytest.raises(DataError, match="views of images, but these are points of 2 × 1 × 1 values; leave it out"):
        train_encoder.run(workspace, params, "csi", SEED)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"encoders": ["knn+"]}, r"encoders.0 .*got 'knn\+' \(did you mean knn-plus\?\)"),
        ({"encoders": ["csi", "csi"]}, "encoders .*csi"),
        ({"train_encoder.csi.epochs": 10}, "train_encoder.csi .*warmup_epochs is 10, but must be less than epochs, 10"),
        ({"train_encoder.csi.batch_size": 1}, "train_encoder.csi.batch_size .*greater than or equal to 2"),
        ({"train_encoder.knn-plus.head.epochs": 0}, "train_encoder.knn-plus.head.epochs .*greater than or equal to 1"),
        ({"train_encoder.knn-plus.smallest_crop": 20}, "train_encoder.knn-plus.smallest_crop .*did you mean 0.2"),
        ({"train_encoder.knn-plus.temperture": 1}, "temperture"),
        ({"train_encoder.csi.temperature": 0}, "train_encoder.csi.temperature .*greater than 0"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_params_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        load_params(REPOSITORY / "params.yaml", values)
