"""KNN+ and CSI in `evaluate` and in tables."""

from __future__ import annotations

import io
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import OOD, REPOSITORY, SEED
from rich.console import Console
from ruamel.yaml import YAML
from test_cli import salcli
from test_train_encoder import SHORT

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network, write_network
from salcli.artifacts.hdf5 import read_array
from salcli.artifacts.layout import Workspace
from salcli.errors import BadArtifactError, MissingArtifactError, ParamsError
from salcli.models.contrastive import ENCODERS, ContrastiveClassifier, RotationClassifier
from salcli.params import Params, load_params
from salcli.reporting.paper_comparison import compare
from salcli.reporting.paper_table import markdown as paper_markdown
from salcli.reporting.results import METRICS, Results
from salcli.reporting.results import SHORT as SHORT_SCHEDULE
from salcli.reporting.results_table import flat, markdown, rich_table
from salcli.stages import evaluate, train_encoder
from salcli.stages.encoder_schedules import AUTHORS_EPOCHS, is_short
from salcli.stages.inputs import id_images, ood_test_images

if TYPE_CHECKING:
    from pathlib import Path

METHODS = ["msp", *ENCODERS]


def params_of(workspace: Workspace, **changes: Any) -> Params:
    values = {f"train_encoder.{encoder}.{key}": value for encoder in ENCODERS for key, value in SHORT.items()}
    values |= {"encoders": list(ENCODERS), "evaluate.methods": METHODS, **changes}
    return load_params(workspace.root / "params.yaml", values)[0]


@pytest.fixture(scope="module")
def with_encoders(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoders") / "workspace"
    shutil.copytree(built, root)
    for encoder in ENCODERS:
        train_encoder.run(Workspace(root), params_of(Workspace(root)), encoder, SEED)
    return root


@pytest.fixture
def trained(with_encoders: Path, tmp_path: Path) -> Workspace:
    shutil.copytree(with_encoders, tmp_path / "trained")
    return Workspace(tmp_path / "trained")


def slow_scores(workspace: Workspace, images: torch.Tensor, encoder: str, k: int) -> list[float]:
    """One image at a time."""
    network = read_network(workspace.find(layout.encoder(encoder, SEED)), ENCODERS[encoder])
    known = id_images(workspace, "digits-0-7", "train", SEED).images.read(slice(None))
    scores = []
    with torch.inference_mode():
        known_features = network.features(known).double()
        known_features /= known_features.norm(dim=1, keepdim=True)
        for image in images:
            if isinstance(network, RotationClassifier):
                n_classes = network.spec.n_classes
                turned = [torch.rot90(image[None], turns, (2, 3)) for turns in range(4)]
                joint = [network.joint_head(network.features(one))[0] for one in turned]
                own = [logits[turns * n_classes :][:n_classes] for turns, logits in enumerate(joint)]
                scores.append(float(torch.stack(own).mean(dim=0).softmax(dim=0).max()))
            else:
                feature = network.features(image[None]).double()[0]
                distances = (known_features - feature / feature.norm()).norm(dim=1)
                scores.append(-float(distances.sort().values[k - 1]))
    return scores


def test_scores_metrics_and_tables(trained: Workspace) -> None:
    params = params_of(trained)
    done = evaluate.run(trained, params, OOD, SEED)
    assert list(done.metrics) == METHODS
    stored = trained.find(layout.evaluation_scores(OOD, SEED))
    id_test = id_images(trained, "digits-0-7", "test", SEED).images.read(slice(0, 30))
    ood_test = ood_test_images(trained, OOD, SEED).read(slice(0, 30))
    for encoder in ENCODERS:
        for side, images in (("id", id_test), ("ood", ood_test)):
            expected = slow_scores(trained, images, encoder, params.evaluate.knn_k)
            scores = read_array(stored, evaluate.SCORES_KIND, f"{encoder}/{side}")
            np.testing.assert_allclose(scores[:30], expected, atol=2e-4)
    content = json.loads(trained.find(layout.metrics(OOD, SEED)).path.read_text())
    assert [method for method in METHODS if content[method].get("short_schedule")] == ["knn-plus", "csi"]
    from_files = Results.from_folder(trained.root / "runs", only={(OOD, OOD, SEED)})
    for results in (Results.from_evaluations([done]), from_files):
        shown = markdown(results)
        assert "| KNN+ (short schedule) |" in shown
        assert "| CSI (short schedule) |" in shown
        assert "| MSP |" in shown
        table = flat(results).set_index("method")
        assert table["short_schedule"].to_dict() == {"msp": False, "knn-plus": True, "csi": True}


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_for_people_cuts_no_figure_for_a_long_label(width: int) -> None:
    line = {"test_set": "photo-patches", "ood": "photo-patches", **dict.fromkeys(METRICS, 100.0)}
    runs = [
        {**line, "seed": seed, "method": "knn-plus", SHORT_SCHEDULE: True, "fpr95": 100.0 * seed} for seed in (0, 1)
    ]
    console = Console(width=width, file=io.StringIO())
    console.print(rich_table(Results(pd.DataFrame(runs), {}), width))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "KNN+" in text
    assert ("(short schedule)" if width >= 100 else "(short ") in text
    figures = [line.split()[-5:] for line in text.splitlines() if "KNN+" in line]
    assert width >= 100 or figures == [["50.0", "100.0", "100.0", "100.0", "100.0"]]
    assert width < 100 or "50.0 ± 70.7  100.0 ± 0.0  100.0 ± 0.0" in text


def test_a_comparison_with_the_paper_says_it_too() -> None:
    line = {"test_set": "svhn", "ood": "svhn", "seed": 0, **dict.fromkeys(METRICS, 50.0), SHORT_SCHEDULE: False}
    runs = pd.DataFrame([{**line, "method": "knn-plus", SHORT_SCHEDULE: True}, {**line, "method": "knn"}])
    params = load_params(REPOSITORY / "salcli" / "presets" / "main-cifar100.yaml")[0]
    [compared] = compare(Results(runs, {}), params)
    shown = paper_markdown([compared])
    assert "| svhn | KNN+ (short schedule) | 50.00 | 32.21 |" in shown
    assert "| svhn | KNN | 50.00 | 66.38 |" in shown
    assert "| svhn | CSI | – | 64.70 |" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encoder", "knn+"], "no encoder is called knn+ (did you mean knn-plus?); known: csi, knn-plus"),
        ([], "there is nothing to train: encoders in params.yaml is empty; name knn-plus or csi there, or with"),
    ],
    ids=["unknown", "none"],
)
def test_commands_that_cannot_work(arguments: list[str], message: str, tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "params.yaml", tmp_path)
    done = salcli("train-encoder", "--params", str(tmp_path / "params.yaml"), *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_the_loss_compares_all_views_so_one_process_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(REPOSITORY / "params.yaml", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = salcli("train-encoder", "--params", str(tmp_path / "params.yaml"), "--encoder", "csi")
    assert done.exit_code == 2
    assert "this command runs in one process; start it without torchrun" in " ".join(done.output.split())


def test_the_command_trains_and_inspect_shows_what_it_made(with_encoders: Path, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(with_encoders, root)
    short = [f"--set=train_encoder.knn-plus.{key}={value}" for key, value in SHORT.items()]
    done = salcli("train-encoder", "--params", str(root / "params.yaml"), "--encoder", "knn-plus", *short)
    assert done.exit_code == 0, done.output
    assert "KNN+" in done.output
    made, before = ((root / folder / layout.encoder("knn-plus", SEED).name).read_bytes() for folder in ("scratch", ""))
    assert made == before
    shown = salcli("inspect", str(root / layout.encoder("csi", SEED).name))
    assert "rotation-classifier" in shown.output


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_authors_schedule_is_not_called_short(encoder: str) -> None:
    params = YAML(typ="safe").load(REPOSITORY / "params.yaml")["train_encoder"][encoder]
    assert (params["epochs"], params["head"]["epochs"]) == AUTHORS_EPOCHS[encoder]
    assert not is_short(encoder, params)
    assert is_short(encoder, params | {"epochs": params["epochs"] - 1})
    assert is_short(encoder, params | {"head": {"epochs": 99}})


def test_a_network_that_was_not_trained_yet(workspace: Workspace) -> None:
    with pytest.raises(MissingArtifactError, match="make it with: salcli train-encoder --encoder knn-plus --seed 0"):
        evaluate.run(workspace, params_of(workspace), OOD, SEED)


def test_a_network_of_another_split_may_have_seen_test_samples(trained: Workspace) -> None:
    found = trained.find(layout.encoder("knn-plus", SEED))
    network, about = read_network(found, ContrastiveClassifier), read_header(found).about
    write_network(found.path, network, about | {"split": "another"})
    with pytest.raises(BadArtifactError, match=r"knn-plus\.safetensors was made with another id\.h5"):
        evaluate.run(trained, params_of(trained), OOD, SEED)


def test_more_neighbours_than_training_samples(trained: Workspace) -> None:
    with pytest.raises(ParamsError, match=r"evaluate\.knn_k is 5000, but there are only 462 ID training samples"):
        evaluate.run(trained, params_of(trained, **{"evaluate.knn_k": 5000}), OOD, SEED)
