"""salcli.SAL: the same numbers as a project, on arrays of every kind, by scikit-learn's conventions."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn
import torch
from helpers.cli import init
from helpers.quick import REPOSITORY
from helpers.stages import params_of, prepare_sets
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from salcli import SAL, Detector
from salcli.detector import stage as detector
from salcli.pipeline import extract, prepare, train_id
from salcli.pipeline import filter as filter_stage
from salcli.store.formats import read_candidates, read_id_split
from salcli.store.layout import Experiment

NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X and y of 0 to 7; W and whether it is an 8 or 9; new samples of both kinds, 40 each."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype(np.float32), y[order]
    known, hidden = np.flatnonzero(y < 8), np.flatnonzero(y >= 8)
    wild = np.random.default_rng(1).permutation(np.r_[known[900:1350], hidden[:90]])
    return x[known[:900]], y[known[:900]], x[wild], y[wild] >= 8, x[np.r_[known[-40:], hidden[-40:]]]


X, Y, W, IS_OOD, Z = digits()


@pytest.fixture(scope="module")
def sal() -> SAL:
    return SAL().fit(X, Y, wild=W)


# -- what is found


def test_it_finds_the_hidden_digits_and_says_so(sal: SAL) -> None:
    found = sal.candidates_
    assert list(found.columns) == ["position", "score", "probability", "p_value", "class", "certified"]
    assert IS_OOD[found["position"]].mean() > 0.8
    assert IS_OOD[found["position"]].sum() > 0.6 * IS_OOD.sum()
    assert (found["probability"] > 0.5).all()
    assert found["score"].is_monotonic_decreasing
    assert found["certified"].is_monotonic_increasing
    certified = int(found["certified"].iloc[-1])
    assert 0 < certified <= IS_OOD[found["position"]].sum()
    assert sal.separation_.verdict is not None
    shown = str(sal).splitlines()
    assert (
        shown[0]
        == "SAL+: 900 labeled samples of 8 classes, 179 of them for calibration; 540 wild samples; 64 dimensions"
    )
    assert shown[1].startswith(f"{len(found)} candidates; at least {certified} of them are outliers (95%).")
    assert [line.split()[0] for line in shown[2:]] == ["share", "drift", "accuracy"]
    assert sal.separation_.verdict.share.low <= IS_OOD.mean() <= sal.separation_.verdict.share.high
    assert f"accuracy           {100 * sal.accuracy_:.1f}%" in shown[4]
    assert sal.accuracy_ > 0.95


def test_new_samples_are_scored_classified_and_flagged(sal: SAL) -> None:
    scores, p = sal.score_samples(Z), sal.p_values(Z)
    assert np.median(scores[40:]) > np.median(scores[:40]) + 3
    assert (p[np.argsort(scores)] == np.sort(p)[::-1]).all()
    assert p.min() >= 1 / 180
    assert set(sal.predict(Z)) <= set(range(8))
    flagged = sal.predict_ood(Z, fdr=0.2)
    assert flagged[40:].mean() > 0.7
    assert flagged[:40].sum() <= 0.4 * flagged.sum()
    assert sal.predict_ood(Z, fdr=0.1).sum() <= flagged.sum()


def test_where_there_are_no_outliers_none_are_found() -> None:
    own = SAL().fit(X, Y, wild=W[~IS_OOD])
    assert own.separation_.verdict is not None
    assert own.separation_.verdict.kind != "found"
    assert "Nothing found" in str(own) or "Cannot tell" in str(own)


def test_a_batch_in_which_no_outlier_can_be_flagged_gives_a_warning(sal: SAL) -> None:
    with pytest.warns(UserWarning, match=r"fewer than \d+ outliers among 40 samples cannot be flagged") as heard:
        assert not sal.predict_ood(Z[:40], fdr=0.01).any()
    assert heard[0].filename == __file__


@pytest.mark.parametrize("method", ["sal", "sal-posthoc", "committee", "knn", "msp"])
def test_other_methods_take_what_is_above_the_quantile_of_calibration_scores(method: str) -> None:
    own = SAL(method=method).fit(X, Y, wild=W)
    assert own.candidates_["probability"].isna().all()
    assert own.candidates_["score"].min() > own.separation_.threshold
    assert 0.02 < len(own.candidates_) / len(W) < 0.4
    assert (own.candidates_["p_value"] <= 0.05 + 1e-9).all()
    np.testing.assert_allclose(own.score_samples(W), own.separation_.scores.wild.numpy(), rtol=1e-4, atol=1e-5)
    assert (pickle.loads(pickle.dumps(own)).score_samples(Z) == own.score_samples(Z)).all()


# -- the same as in a project


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sal-plus", "sal", "knn"])
def test_a_project_on_the_same_vectors_finds_the_same(tmp_path: Path, method: str) -> None:
    np.savez(tmp_path / "labeled.npz", x=X, y=Y)
    np.savez(tmp_path / "wild.npz", x=W)
    workspace, experiment = project(tmp_path, method)
    split, candidates = (
        read_id_split(workspace.find(experiment.split)),
        read_candidates(workspace.find(experiment.candidates)),
    )
    calibration = X[split.calibration], Y[split.calibration]
    own = SAL(method=method, calibration=calibration).fit(X[split.train], Y[split.train], wild=W)
    np.testing.assert_array_equal(np.sort(own.candidates_["position"]), candidates.index)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(own.separation_.scores.wild, candidates.wild_score, **close)
    np.testing.assert_allclose(own.separation_.scores.calibration, candidates.calibration_score, **close)
    np.testing.assert_allclose(own.separation_.p_value, candidates.p_value)
    assert own.separation_.threshold == pytest.approx(candidates.threshold, rel=1e-5)
    theirs = Detector.load(workspace.find(experiment.with_variant("sal").detector).path)
    np.testing.assert_allclose(own.detector_.calibration, theirs.calibration, **close)
    np.testing.assert_allclose(own.score_samples(Z), theirs(Z).scores, **close)
    np.testing.assert_array_equal(own.predict(Z).astype(str), theirs(Z).classes)


def project(root: Path, method: str) -> tuple[Any, Experiment]:
    """What `salcli init` plans and `dvc repro` runs, up to the detector of this method."""
    from salcli.store.layout import Workspace

    score = {} if method == "sal-plus" else {"filter.score": method}
    row = "sal-posthoc" if method == "sal" else method
    init(
        root / "d", "--no-dvc", "--id", str(root / "labeled.npz"), "--wild", str(root / "wild.npz"),
        "--set", "data.wild_holdout=0", "--set", f"detector.method={row}",
        *(word for key, value in score.items() for word in ("--set", f"{key}={value}")),
    )  # fmt: skip
    workspace = Workspace(root / "d")
    params = params_of(workspace)
    wild = Experiment(0, "wild", params.data.pi[0])
    experiment = wild.with_variant("sal-plus" if method == "sal-plus" else "sal")
    prepare_sets(workspace, params)
    prepare.prepare_wild(workspace, params.data, wild)
    train_id.run(workspace, params, Experiment(0))
    extract.run_id(workspace, params, Experiment(0))
    extract.run_wild(workspace, params, wild)
    filter_stage.run(workspace, params, experiment)
    detector.run(workspace, params, wild)
    return workspace, experiment


def test_the_saved_detector_gives_the_same_and_remembers_the_columns(sal: SAL, tmp_path: Path) -> None:
    sal.save(tmp_path / "a.safetensors")
    loaded = Detector.load(tmp_path / "a.safetensors")
    found = loaded(Z)
    np.testing.assert_array_equal(found.scores, sal.score_samples(Z))
    np.testing.assert_array_equal(found.p_values, sal.p_values(Z))
    assert loaded.label == "SAL+"
    assert loaded.provenance["made_by"] == "salcli.SAL"
    frame = pd.DataFrame(X, columns=[f"c{k}" for k in range(64)])
    SAL(method="msp").fit(frame, Y, wild=frame).save(str(tmp_path / "b.safetensors"))
    assert Detector.load(tmp_path / "b.safetensors").takes.columns.vector == tuple(frame.columns)  # type: ignore[union-attr]


def test_a_seed_gives_the_same_each_time_and_another_seed_another_calibration(sal: SAL) -> None:
    same, other = SAL(method="msp", random_state=3), SAL(method="msp", random_state=4)
    one, two, three = (own.fit(X, Y, wild=W).separation_.scores.calibration for own in (same, clone(same), other))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    drawn = [SAL(method="msp", random_state=np.random.RandomState(5)).fit(X, Y, wild=W).score_samples(Z) for _ in "ab"]
    np.testing.assert_array_equal(*drawn)


def test_nothing_is_written_and_only_verbose_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    constant = np.concatenate([X, np.ones((len(X), 1), np.float32)], axis=1)
    wild = np.concatenate([W, np.ones((len(W), 1), np.float32)], axis=1)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    quiet = SAL().fit(constant, Y, wild=wild)
    assert torch.equal(state[0], torch.get_rng_state()), "others may draw from it"
    assert (state[1] == np.random.get_state()[1]).all()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    SAL(verbose=True).fit(constant, Y, wild=wild)
    printed = capfd.readouterr().out
    assert "classifier: " in printed
    assert "filter by SAL+: " in printed
    assert quiet.notes_
    assert all(note in printed for note in quiet.notes_)


# -- arrays of every kind


@pytest.mark.parametrize(
    "kind", ["float64", "float16", "torch", "bfloat16", "requires grad", "lists", "read-only map", "frame"]
)
def test_arrays_of_every_kind_give_the_same(kind: str, tmp_path: Path) -> None:
    """Pixels from 0 to 16 are exact in all of them."""
    np.save(tmp_path / "a.npy", np.concatenate([X[:7], X]))

    def other(array: np.ndarray) -> Any:
        match kind:
            case "float64" | "float16":
                return array.astype(kind)
            case "torch" | "bfloat16":
                return torch.from_numpy(array).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
            case "requires grad":
                return torch.from_numpy(array.copy()).requires_grad_()
            case "lists":
                return array.tolist()
            case "frame":
                return pd.DataFrame(array)
        return np.load(tmp_path / "a.npy", mmap_mode="r")[7:] if array is X else array

    labels = torch.from_numpy(Y) if kind in ("torch", "bfloat16") else pd.Series(Y) if kind == "frame" else Y
    own, expected = (SAL(method="knn").fit(x, y, wild=wild) for x, y, wild in ((other(X), labels, other(W)), (X, Y, W)))
    np.testing.assert_array_equal(own.candidates_["position"], expected.candidates_["position"])
    np.testing.assert_array_equal(own.score_samples(other(Z)), expected.score_samples(Z))


def test_data_frames_give_back_their_index_and_duplicates_in_it_keep_their_positions() -> None:
    columns, index = [f"c{k}" for k in range(64)], [f"w{i // 2}" for i in range(len(W))]
    frame = pd.DataFrame(W, columns=columns, index=index)
    names = pd.Series(NAMES[Y], dtype="category")
    own = SAL().fit(pd.DataFrame(X, columns=columns), names, wild=frame)
    found = own.candidates_
    assert found.index.tolist() == [index[i] for i in found["position"]]
    assert found["position"].is_unique
    assert set(found["class"]) <= set(NAMES[:8])
    assert own.classes_.tolist() == sorted(NAMES[:8])
    new = pd.DataFrame(Z, columns=columns, index=pd.date_range("2026-01-01", periods=len(Z)))
    for series in (own.score_samples(new), own.p_values(new), own.predict(new), own.predict_ood(new)):
        assert series.name in ("score", "p_value", "class", "is_ood")
        assert series.index.equals(new.index)
    with pytest.raises(ValueError, match="feature names should match"):
        own.predict(new.rename(columns={"c0": "d0"}))


def test_calibration_data_can_be_given_and_are_kept_apart() -> None:
    own = SAL(method="msp", calibration=(X[700:], Y[700:])).fit(X[:700], Y[:700], wild=W)
    assert len(own.detector_.calibration) == 200
    assert "900 labeled samples of 8 classes, 200 of them for calibration" in str(own)


# -- scikit-learn


def test_params_clone_and_what_is_not_fitted() -> None:
    own = SAL(calibration=0.3, method="knn", random_state=None, verbose=True)
    expected = {"calibration": 0.3, "method": "knn", "random_state": None, "verbose": True}
    assert clone(own).get_params() == own.get_params() == expected
    assert own.set_params(method="sal").method == "sal"
    assert str(own) == repr(own)
    for act in (own.predict, own.predict_ood, own.score_samples, own.p_values):
        with pytest.raises(NotFittedError, match="This SAL instance is not fitted yet"):
            act(Z)
    with pytest.raises(NotFittedError):
        own.save("nowhere.safetensors")


def test_it_is_the_last_step_of_a_pipeline_that_transforms_the_wild_data_too() -> None:
    with sklearn.config_context(enable_metadata_routing=True):
        steps = [("scale", StandardScaler()), ("sal", SAL(method="msp").set_fit_request(wild=True))]
        pipeline = Pipeline(steps, transform_input=["wild"]).fit(X, Y, wild=W)
    scaler = StandardScaler().fit(X)
    by_hand = SAL(method="msp").fit(scaler.transform(X), Y, wild=scaler.transform(W))
    pd.testing.assert_frame_equal(pipeline["sal"].candidates_, by_hand.candidates_)
    np.testing.assert_array_equal(pipeline.score_samples(Z), by_hand.score_samples(scaler.transform(Z)))
    assert pipeline.score(X, Y) > 0.95


class OnItsOwn(SAL):
    """With X as wild data, and calibrated on X, again and again: the checks have few samples, and no wild data."""

    def fit(self, X: Any, y: Any, wild: Any = None) -> Any:  # noqa: N803
        return super().fit(X, y, wild=X if wild is None else wild)

    def _split(self, vectors: Any, numbers: Any, seed: int) -> Any:
        return self._labeled(vectors, numbers), self._labeled(
            *(np.concatenate([one] * 20) for one in (vectors, numbers))
        )


CANNOT_APPLY: dict[str, str] = {}


def test_the_checks_of_scikit_learn() -> None:
    checks = check_estimator(OnItsOwn(), expected_failed_checks=CANNOT_APPLY, on_fail=None, on_skip=None)
    failed = {one["check_name"]: one["exception"] for one in checks if one["status"] == "failed"}
    assert not failed
    assert len(checks) > 45
    assert {one["check_name"] for one in checks if one["status"] == "xfail"} == CANNOT_APPLY.keys()


def test_it_is_loaded_only_when_it_is_asked_for() -> None:
    code = "import salcli, sys; print([m for m in ('torch', 'sklearn', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- bad input


def with_nan(array: np.ndarray) -> np.ndarray:
    return np.where(np.arange(array.size).reshape(array.shape) == 5, np.nan, array)


TEXT = pd.DataFrame(W).assign(city="Bern", name="x")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no wild data": (
        {"wild": None},
        r"^SAL looks for outliers in unlabeled data, but wild is None. Use fit\(X, y, wild=W\)",
    ),
    "empty wild data": (
        {"wild": W[:0]},
        r"^wild: Found array with 0 sample\(s\) .* while a minimum of 4 is required by SAL",
    ),
    "three wild samples": ({"wild": W[:3]}, r"^wild: Found array with 3 sample\(s\)"),
    "other dimensions": ({"wild": W[:, :3]}, "^wild: X has 3 features, but SAL is expecting 64 features as input"),
    "one vector": ({"wild": W[0]}, "^wild: Expected 2D array, got 1D array instead"),
    "images": ({"wild": W.reshape(-1, 1, 8, 8)}, "^wild: Found array with dim 4"),
    "NaN in X": ({"X": with_nan(X)}, "^Input X contains NaN"),
    "NaN in the wild data": ({"wild": with_nan(W)}, "^wild: Input X contains NaN"),
    "infinite in float32": ({"wild": W.astype(float) * 1e300}, "^wild: Input X contains infinity or a value too large"),
    "infinite in float16": ({"X": np.where(X > 15, np.inf, X).astype(np.float16)}, "^Input X contains infinity"),
    "too large": ({"X": X * np.float32(1e20)}, r"^X has values up to 2e\+21; the largest that SAL takes is 1e\+15"),
    "one class": ({"y": np.full(900, 3)}, "at least 2 classes in the data, but the data contains only one class: 3"),
    "mixed labels": ({"y": [*map(int, Y[:-1]), "a"]}, "^y has labels of mixed types: number, str"),
    "missing labels": (
        {"y": pd.Series([*NAMES[Y[:-1]], None])},
        "^y has labels of mixed types: .*str. Use one type, without missing values",
    ),
    "labels with NaN": ({"y": np.where(Y == 3, np.nan, Y)}, "^Input y contains NaN"),
    "a regression": ({"y": X[:, 20] + 0.5 * X[:, 21] + 0.1}, "^Unknown label type: continuous"),
    "no labels": ({"y": None}, "requires y to be passed, but the target y is None"),
    "too few labels": ({"y": Y[:-1]}, "inconsistent numbers of samples: .900, 899."),
    "columns of text": ({"wild": TEXT}, "^wild: X has columns that are not numeric: city, name"),
    "text": ({"X": np.full((900, 64), "a")}, "could not convert string to float"),
    "sparse": ({"X": scipy.sparse.csr_array(X)}, "Sparse data was passed for X, but dense data is required"),
    "complex": ({"X": X + 1j}, "Complex data not supported"),
    "few samples": (
        {"X": X[:80], "y": np.arange(80) % 8},
        r"^Found 16 calibration sample\(s\) while a minimum of 20 is",
    ),
    "rare classes": (
        {"y": np.where(np.arange(900) == 3, 8, Y)},
        "^The least populated classes .* calibration=0.2: 8 has 1",
    ),
    "all for calibration": ({"calibration": 1.0}, r"^The 'calibration' parameter of SAL must be a float in the range"),
    "calibration as text": ({"calibration": "auto"}, "Got 'auto' instead"),
    "unknown classes": ({"calibration": (X, Y + 1)}, "^calibration: y contains previously unseen labels: 8"),
    "calibration of other dimensions": ({"calibration": (X[:, 1:], Y)}, "^calibration: X has 63 features"),
    "an unknown method": (
        {"method": "kmn"},
        r"^The 'method' parameter of SAL must be a str among .*'kmn' instead.*mean knn",
    ),
    "a method that is trained": ({"method": "oe"}, "Got 'oe' instead"),
    "a method that needs gradients": ({"method": "odin"}, "Got 'odin' instead"),
    "no seed": ({"random_state": "x"}, "cannot be used to seed"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_message(given: dict[str, Any], message: str) -> None:
    data = {"X": X, "y": Y, "wild": W} | {key: value for key, value in given.items() if key in ("X", "y", "wild")}
    params = {key: value for key, value in given.items() if key not in data}
    with pytest.raises((ValueError, TypeError), match=message):  # a TypeError: sparse, as in scikit-learn
        SAL(**params).fit(**data)


def test_bad_new_samples_are_one_clear_message(sal: SAL) -> None:
    with pytest.raises(ValueError, match="X has 63 features, but SAL is expecting 64 features as input"):
        sal.predict(Z[:, 1:])
    with pytest.raises(ValueError, match="Found array with 0 sample"):
        sal.p_values(Z[:0])
    for fdr in (0, 1, "0.1"):
        with pytest.raises(ValueError, match=r"The 'fdr' parameter of predict_ood must be a float in the range"):
            sal.predict_ood(Z, fdr=fdr)  # type: ignore[arg-type]


# -- the notebook


@pytest.mark.slow
def test_the_notebook_runs_and_finds_the_hidden_digits(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(REPOSITORY / "docs" / "notebook.ipynb", as_version=4)
    assert len(notebook.cells) <= 14
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "of them are outliers (95%)" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
