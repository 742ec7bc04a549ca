"""Any method can be the detector: it scores as in the evaluation, from the file and from an exported graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cli import refused, salcli
from helpers.detectors import EXPERIMENT, id_images, random_detector
from helpers.stages import params_of

from salcli import Detector
from salcli.detector import stage
from salcli.detector.detector import network_class
from salcli.detector.export import FORMATS, export
from salcli.detector.images import ImageFormat
from salcli.errors import MissingArtifactError, ModelError, ParamsError
from salcli.methods import features
from salcli.methods.base import InputScore, PostHoc, Trained, built_in, find_method
from salcli.methods.features import Neighbours
from salcli.methods.sal import Sal
from salcli.models.network import NetworkSpec
from salcli.store.files import read_arrays, write_json
from salcli.store.layout import Workspace

POST_HOC = [*built_in(PostHoc), *built_in(InputScore)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def made(workspace: Workspace, method: str, out: Path | None = None, **values: Any) -> Detector:
    params = params_of(workspace, {"detector.method": method, **values})
    return Detector.load(stage.run(workspace, params, EXPERIMENT, out=out).written[0], device="cpu")


@pytest.mark.parametrize("name", ["sal", *POST_HOC])
def test_a_detector_scores_as_the_evaluation_does(built: Path, tmp_path: Path, name: str) -> None:
    detector = made(Workspace(built), name, tmp_path / "detector.safetensors")
    stored = read_arrays(Workspace(built).find(EXPERIMENT.evaluation("scores.h5")), "test-scores")
    found = detector(id_images(built, "test"))
    np.testing.assert_allclose(found.scores, stored[f"{name}/id"], **CLOSE)
    assert (detector.name, detector.method.name) == (name, name)
    assert found.is_ood.mean() <= 0.12  # 5% are asked for, with 115 calibration samples
    if name in ("sal", "knn", "committee", "sal-plus"):
        assert stored[f"{name}/ood"].mean() > found.scores.mean()
    seen = np.sort(detector(id_images(built, "calibration")).scores)
    if name == "sal-plus":  # by models that have not seen the sample: others would find it more ID-like
        assert detector.calibration.mean() > seen.mean()
    else:
        np.testing.assert_allclose(seen, detector.calibration, **CLOSE)


@pytest.mark.parametrize("name", list(built_in(Trained)))
def test_a_network_that_a_rival_trained_can_be_stored(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    method = built_in(Trained)[name]({} if name != "knn-plus" else None)
    network = network_class(type(method))(NetworkSpec("small-cnn", 3, (0.4,), (0.3,)))
    images = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8)
    with torch.inference_mode():
        method.fit(network.eval(), lambda outputs: outputs(images))  # type: ignore[attr-defined]
    method.compact(0)
    calibration = np.linspace(-1, 1, 9, dtype=np.float32)
    detector = Detector(network, ImageFormat(1, 8), ("a", "b", "c"), calibration, {}, method=method, name=name)
    detector.save(tmp_path / "detector.safetensors")
    again = Detector.load(tmp_path / "detector.safetensors")
    np.testing.assert_array_equal(again(images).scores, detector(images).scores)
    assert (again.label, len(set(again(images).scores.tolist())) > 10) == (method.label, True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["onnx knn", "onnx sal-posthoc", "torch-export committee"])
def test_a_graph_has_the_method_in_it(built: Path, tmp_path: Path, what: str) -> None:
    """SAL+, the default, is exported in test_export."""
    to, name = what.split()
    detector = made(Workspace(built), name, tmp_path / "detector.safetensors")
    export(detector, tmp_path / "graph", to)
    images = id_images(built, "test")[:40]
    score = FORMATS[to][1](tmp_path / "graph")(torch.from_numpy(images))[1]
    tolerance = 1e-2 if name == "committee" else 1e-4
    np.testing.assert_allclose(score, detector(images).scores, rtol=tolerance, atol=tolerance)


def test_gradients_of_the_input_are_no_part_of_a_graph(built: Path, tmp_path: Path) -> None:
    detector = made(Workspace(built), "odin", tmp_path / "detector.safetensors")
    with pytest.raises(ModelError, match=r"ODIN takes gradients of its input.*can be exported: sal and.*, knn, "):
        export(detector, tmp_path / "detector.onnx", "onnx")


def test_auto_takes_what_the_estimates_chose_and_says_why(workspace: Workspace) -> None:
    known = {name: {"auroc": {"value": value}} for name, value in {"oe": 0.9, "vim": 0.8, "sal": 0.7}.items()}
    path = workspace.root / EXPERIMENT.estimates.path

    def detector_of(chosen: str, reason: str, low: float, methods: Any = known) -> Detector:
        write_json(path, {"methods": methods, "chosen": chosen, "reason": reason, "pi": {"low": low}})
        return made(workspace, "auto")

    detector = detector_of("vim", "ViM finds more", 0.05)
    assert (detector.name, detector.label, detector.reason) == ("vim", "ViM", "ViM finds more")
    assert not detector.is_exact  # it was chosen by calibration and wild data
    assert "ViM finds more" in salcli("inspect", str(workspace.root / EXPERIMENT.detector.path)).stdout
    detector = detector_of("oe", "OE is best.", 0.05)
    assert detector.name == "vim"  # the next: OE was not trained here
    assert detector.reason.startswith("OE is best. OE cannot be the detector here (runs/0/")
    with pytest.raises(MissingArtifactError, match="make this file alone: salcli train-ood --method oe"):
        detector_of("oe", "", 0.05, {})
    assert detector_of("sal", "SAL stays", 0.05).name == "sal"
    detector = detector_of("sal", "SAL stays", 0.0)
    assert detector.name == "sal-plus"
    assert "No outliers are certified" in detector.reason
    assert detector_of("vim", "ViM finds more", 0.0).name == "vim"  # it was not trained on candidates


def test_p_values_are_exact_where_nothing_was_learned_from_calibration_or_wild_data(built: Path) -> None:
    exact = {"msp", "knn", "vim", "odin", "knn-plus"}
    for name in (*exact, "sal", "oe", "committee", "sal-plus", "sal-posthoc"):
        method = Sal() if name == "sal" else find_method(name)()
        assert random_detector("small-cnn", method=method).is_exact == (name in exact), name


def test_what_cannot_be_a_detector_is_one_message(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.root)
    for arguments, message in {
        "--method knnn": "detector.method  no method is called knnn (did you mean knn?)",
        "--method woods": "detector.method  names woods, which has to be trained; name it in rivals, too",
        "--method knn --out x": "--out is for one detector, but these are 2",
    }.items():
        assert message in refused("detector", *arguments.split(), root=workspace.root), arguments
    done = salcli("detector", "--method", "knn", "--ood", EXPERIMENT.ood, "--out", "knn.safetensors")
    assert (done.exit_code, "KNN" in done.stdout, "scratch" in done.stdout) == (0, True, False)
    with pytest.raises(ParamsError, match=r"filter\.labels is random, so τ of a new sample would be random"):
        made(workspace, "sal-posthoc", **{"filter.labels": "random"})
    (workspace.root / "own_scores.py").write_text(OWN)
    monkeypatch.syspath_prepend(workspace.root)
    with pytest.raises(ParamsError, match=r"own_scores:Stateful cannot be a detector.*helper is neither a tensor"):
        made(workspace, "own_scores:Stateful")
    params = params_of(workspace, {"detector.method": "own_scores:Mine"})
    (path,) = stage.run(workspace, params, EXPERIMENT).written
    with pytest.raises(ModelError, match=r"own_scores:Mine would be imported, .*--allow-import"):
        Detector.load(path)
    assert Detector.load(path, allow_import=True).label == "Mine"


OWN = """
from salcli.methods.base import PostHoc

class Mine(PostHoc):
    def fit(self, known):
        self.mean = known.features.mean(0)
    def score(self, x):
        return -(x.feature - self.mean).norm(dim=1)

class Stateful(Mine):
    def fit(self, known):
        self.helper = object()
"""


def test_a_bounded_number_of_neighbours_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MOST_KNOWN", 300)
    points = torch.randn(1000, 8)
    whole = Neighbours.of(points, 20)
    few = whole.thinned(seed=1)
    assert (few.known.shape, few.k) == ((300, 8), 6)
    assert torch.equal(few.known, whole.thinned(seed=1).known)
    assert float((few.distance(points) - whole.distance(points)).abs().mean()) < 0.1
