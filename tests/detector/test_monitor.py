"""False alarms under control: flagging a batch at a false discovery rate, and watching a stream for ever."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import refused, salcli
from helpers.detectors import EXPERIMENT, id_images, random_detector, write_pngs
from helpers.stages import params_of

from salcli import Detector
from salcli.conformal.evidence import certificate
from salcli.detector import stage
from salcli.detector.monitor import CANNOT_TELL, FOUND_SOME, HIGHER, MOVED, NOTHING, judge, verdicts_of
from salcli.methods.base import find_method
from salcli.models.network import Classifier
from salcli.store.layout import Workspace

DAYS = [f"new/{day}" for day in (1, 2, 3, 4, 5)]


def batch(rng: np.random.Generator, n: int, pi: float = 0.0, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and which of them are outliers."""
    is_outlier = rng.random(n) < pi
    return np.where(is_outlier, rng.normal(4, 1, n), rng.normal(shift, 1, n)), is_outlier


@pytest.fixture
def stream(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A detector and five days: two as usual, a single image, strange images, none."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(built / EXPERIMENT.detector.path, "detector.safetensors")
    images, rng = id_images(built, "test"), np.random.default_rng(0)
    parts = [images[:60], images[60:120], images[120:121], rng.integers(0, 255, (40, 1, 8, 8), dtype=np.uint8), []]
    for day, part in enumerate(parts, start=1):
        for path in write_pngs(tmp_path / f"new/{day}", np.array(part)):
            os.utime(path, (86400 * day - 43200,) * 2)
    return tmp_path


# --- false discoveries


def test_a_detector_selects_what_predict_flags(stream: Path) -> None:
    paths = [*sorted(Path("new/1").iterdir())[:20], *sorted(Path("new/4").iterdir())[:20]]
    detector, names = Detector.load("detector.safetensors", batch_size=16), [*map(str, paths)]
    found = detector.select(paths, fdr=0.2)
    assert 10 < found.is_ood.sum() < 30
    result = salcli("predict", *names, "--fdr", "0.2", "--batch-size", "16")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["is_ood"] == "true" for row in rows] == found.is_ood.tolist()
    assert [float(row["p_value"]) for row in rows] == found.p_values.tolist()
    assert f"{found.is_ood.sum()} OOD" in result.stderr
    shown = salcli("predict", *names, "--fdr", "0.2", "--format", "table").stdout
    assert shown.count(" OOD ") == found.is_ood.sum() + 1  # and the header
    assert "at least" not in result.stderr  # SAL+ has learned from calibration data, so nothing is certified
    with pytest.warns(UserWarning, match="fewer than 18 outliers among 20 samples cannot be flagged"):
        assert not detector.select(paths[:20], fdr=0.01).is_ood.any()
    for options, message in (["--fdr", "0.2", "--id-quantile", "0.9"], "both decide what is OOD"), (
        ["--fdr", "1.5"], "got 1.5"), (["--fdr", "0.001"], "needs at least 999"):  # fmt: skip
        assert message in refused("predict", "new", *options, "--out", "a.csv", root=stream)


def test_a_method_that_learned_from_labeled_data_alone_certifies_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    detector = random_detector("linear", channels=5, method=find_method("energy")())
    detector.network = Classifier(detector.network.spec).eval()
    rng = np.random.default_rng(0)
    id_vectors = rng.normal(3 * detector.network.head.weight.detach().numpy()[0], 0.1, (600, 5)).astype(np.float32)
    detector.calibration = np.sort(detector(id_vectors[:500]).scores)
    detector.save(Path("detector.safetensors"))
    batch_of_vectors = np.concatenate([id_vectors[500:], -id_vectors[:60]])
    np.savez("new.npz", x=batch_of_vectors)
    found = Detector.load("detector.safetensors").select(batch_of_vectors, fdr=0.1)
    least = certificate(detector.calibration, found.scores)[found.is_ood.sum() - 1]
    assert 0 < least <= 60
    said = salcli("predict", "new.npz", "--fdr", "0.1").stderr
    assert f"at least {least} of the {found.is_ood.sum()} flagged are outliers (95%)" in " ".join(said.split())


# --- a batch


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, {NOTHING}),
        ({"pi": 0.1}, {FOUND_SOME}),
        ({"shift": 0.7}, {MOVED, CANNOT_TELL}),
        ({"shift": -0.7}, {HIGHER, NOTHING}),
    ],
)
def test_outliers_are_told_from_drift_and_their_share_lies_in_its_interval(
    change: dict[str, float], words: set[str]
) -> None:
    rng, said, covered = np.random.default_rng(5), [], []
    for _ in range(40):
        reference, (scores, is_outlier) = rng.normal(size=1000), batch(rng, 1000, **change)
        found = judge(reference, scores)
        said.append(verdicts_of([found])[0] in words)
        covered.append(found["pi_low"] <= is_outlier.mean() <= found["pi_high"])
    assert np.mean(said) >= 0.85
    assert np.mean(covered) >= 0.85 or "shift" in change


def test_many_batches_without_outliers_have_hardly_a_false_find() -> None:
    rng = np.random.default_rng(6)
    found = [judge(rng.normal(size=300), rng.normal(size=100)) for _ in range(100)]
    words = verdicts_of(found)
    assert not {FOUND_SOME, MOVED} & {*words}
    assert words.count(NOTHING) >= 70


@pytest.mark.parametrize("method", ["knn", "sal-plus"])
def test_changed_id_images_are_not_outliers_and_strange_ones_are(built: Path, tmp_path: Path, method: str) -> None:
    params = params_of(Workspace(built), {"detector.method": method})
    detector = Detector.load(stage.run(Workspace(built), params, EXPERIMENT, out=tmp_path / "file").written[0])
    images, reference = id_images(built, "test"), detector.calibration.astype(np.float64)
    strange = np.random.default_rng(0).integers(0, 255, (80, 1, 8, 8), dtype=np.uint8)
    noisy = np.clip(images + np.random.default_rng(0).normal(0, 60, images.shape), 0, 255).astype(np.uint8)
    for words, batch_of_images in (
        ({NOTHING}, images),
        ({MOVED, CANNOT_TELL}, noisy),
        ({MOVED, CANNOT_TELL}, (0.7 * images).astype(np.uint8)),
        ({FOUND_SOME}, np.concatenate([images, strange])),
    ):
        found = judge(reference, detector(batch_of_images).scores.astype(np.float64))
        assert verdicts_of([found])[0] in words


# --- the command


def test_every_batch_is_compared_and_an_alarm_has_exit_code_3(stream: Path) -> None:
    result = salcli("monitor", *DAYS, "--out", "m.json", "--figure", "m.png", "--fail-on-alarm")
    assert result.exit_code == 3, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "ALARM at sample" in result.stdout
    found = json.loads(Path("m.json").read_text())
    assert [(one["batch"], one["n"]) for one in found["batches"]] == [*zip(DAYS, [60, 60, 1, 40, 0], strict=True)]
    assert [one["verdict"] for one in found["batches"]][2:] == ["too few", "drift", "empty"]
    assert [one["pi"] for one in found["batches"]] == [None] * 5
    assert [one["alarm"] for one in found["batches"]] == [False, False, False, True, True]
    assert found["alarm"]["batch"] == "new/4"
    assert Path("m.png").stat().st_size > 10_000
    for usual in (DAYS[:3], ["new/1", "new/2", "--baseline", "1"]):
        assert salcli("monitor", *usual, "--fail-on-alarm").exit_code == 0


def test_predictions_and_days_give_what_the_images_give(stream: Path) -> None:
    lines = [""]
    for day in (1, 2, 3, 4):
        salcli("predict", f"new/{day}", "--out", f"scores/{day}.csv")
        lines[0], *rows = Path(f"scores/{day}.csv").read_text().splitlines()
        lines += [f"{row},1970-01-0{day} 10:00" for row in rows]
    Path("all.csv").write_text("\n".join([f"{lines[0]},taken", *lines[1:]]))
    files, tables = " ".join(f"scores/{day}.csv" for day in (1, 2, 3, 4)), []
    for arguments in (" ".join(DAYS[:4]), files, "all.csv --by day --date taken", "new --by day"):
        salcli("monitor", *arguments.split(), "--out", "m.jsonl")
        tables.append([json.loads(line) for line in Path("m.jsonl").read_text().splitlines()])
    assert [row["batch"] for row in tables[3]] == [f"1970-01-0{day}" for day in (1, 2, 3, 4)]
    for row in [row for table in tables for row in table]:
        del row["batch"]
    assert tables[0] == tables[1] == tables[2] == tables[3]


def test_vectors_are_grouped_by_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random_detector("linear", channels=5).save(Path("detector.safetensors"))
    x = np.random.default_rng(0).random((90, 5), np.float32)
    x[3] = np.nan
    np.savez("new.npz", x=x, camera=np.repeat(["b", "a"], 45))
    result = salcli("monitor", "new.npz", "--by", "camera", "--out", "m.jsonl")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]
    assert [(row["batch"], row["n"], row["unreadable"]) for row in rows] == [("b", 44, 1), ("a", 45, 0)]
    assert "no column camra (did you mean camera?)" in refused("monitor", "new.npz", "--by", "camra", root=tmp_path)


def test_what_cannot_be_monitored_is_refused(stream: Path) -> None:
    Path("other.csv").write_text("path,score,p_value,error\na.png,0.5,0.123,\n")
    n = len(Detector.load("detector.safetensors").calibration)
    Path("dates.csv").write_text(f"path,score,p_value\na.png,1e9,{1 / (n + 1)}\n")
    for arguments, message in {
        "new/5": "there is nothing to monitor: no images in new/5",
        "new/1 --by camera": "images have no column camera",
        "new/1 --alpha 0": "--alpha must be greater than 0",
        "other.csv": "holds scores of another detector than detector.safetensors: to a score of 0.5 belongs",
        "dates.csv --by day --date path": "dates.csv, row 0: path is a.png, which is no date",
    }.items():
        assert message in refused("monitor", *arguments.split(), root=stream)
