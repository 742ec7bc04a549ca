"""Tables: numbers are those of numpy, the best are bold, each π is a table, everything fits and is safe to print."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from helpers.cli import shown
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from salcli.errors import MissingArtifactError, ParamsError, as_text, printable
from salcli.methods.separation import FilterScores, separate
from salcli.params.presets import default_params
from salcli.params.schema import validated
from salcli.pipeline.filter import Filtered, IdFit
from salcli.progress import Silent
from salcli.report.figures import pi_chart
from salcli.report.intervals import has_scores, with_scores
from salcli.report.results import (
    LOWER_IS_BETTER,
    METRICS,
    Results,
    groups_of,
    results_frame,
    results_grids,
    results_view,
)
from salcli.report.stage_tables import filter_view, two_histograms
from salcli.sal.metrics import FPR95_CONVENTION, FPR95_OOD_POSITIVE, fpr_at_tpr, ood_metrics
from salcli.sal.tau import SeparationErrors
from salcli.store.files import Found, read_arrays, write_arrays, write_json
from salcli.store.layout import TEST_SCORES, Experiment

Values = NDArray[np.floating]  # set × seed × method × metric, between 0 and 1
COUNTS = ("n_id_train", "n_calibration", "n_wild", "n_candidates")
SETS, SEEDS, METHODS = ("far", "near_one"), (0, 3, 11), ("sal", "msp", "knn")
LABELS = {"sal": "SAL", "msp": "MSP", "knn": "KNN"}


def write_runs(
    root: Path, values: Values, sets: Sequence[str] = SETS, pi: str = "0.1", methods: Sequence[str] = METHODS
) -> Path:
    """metrics.json and filter.json files as `evaluate` and `filter` write them."""
    for i, ood in enumerate(sets):
        for j in range(values.shape[1]):
            rows = {
                name: {"label": LABELS.get(name, name), **dict(zip(METRICS, map(float, row), strict=True))}
                for name, row in zip(methods, values[i, j], strict=False)
            }
            folder = root / "runs" / str(SEEDS[j]) / ood / f"pi-{pi}"
            write_json(folder / "evaluation" / "metrics.json", rows | {"samples": {"id_test": 288, "ood_test": 106}})
            counts = {"n_id_train": 462, "n_calibration": 115, "n_wild": 1642, "n_candidates": 70 + j}
            write_json(folder / "sal" / "filter.json", counts | {"err_in": 0.05, "err_out": 0.4})
    return root / "runs"


@pytest.fixture
def values() -> Values:
    return np.random.default_rng(0).uniform(size=(len(SETS), len(SEEDS), len(METHODS), len(METRICS)))


def test_notes_that_differ_in_numbers_alone_are_one_with_ranges(tmp_path: Path, values: Values) -> None:
    folder = write_runs(tmp_path, values)
    for i, path in enumerate(sorted(folder.glob("*/*/*/evaluation/metrics.json"))):
        content = json.loads(path.read_text())
        content["knn"]["notes"] = [f"knn: {5 + i % 2} of 1,{640 + i % 2} at 0.05", f"knn: 0.{i % 2}"]
        write_json(path, content)
    notes = [note for note in markdown(folder).splitlines() if note.startswith("knn: ")]
    assert notes == ["knn: 5–6 of 1,640–1,641 at 0.05", "knn: 0.0", "knn: 0.1"]


def markdown(folder: Path) -> str:
    return "\n".join(grid.markdown() for grid in results_grids(Results.from_folder(folder)))


def test_means_and_deviations_are_those_of_numpy_and_the_best_average_comes_first(
    tmp_path: Path, values: Values
) -> None:
    results = Results.from_folder(write_runs(tmp_path, values))
    lines = results_frame(results).to_dict("records")
    assert len(lines) == (len(SETS) + 1) * len(METHODS)
    percent = 100 * values
    truth = {**dict(zip(SETS, percent, strict=True)), "average": percent.mean(axis=0)}
    for line in lines:
        own = truth[line["ood"]][:, METHODS.index(line["method"])]  # seed × metric
        assert (line["n_seeds"], line["pi"], line["label"]) == (len(SEEDS), "0.1", LABELS[line["method"]])
        for i, metric in enumerate(METRICS):
            assert line[f"{metric}_mean"] == pytest.approx(np.mean(own[:, i]))
            assert line[f"{metric}_std"] == pytest.approx(np.std(own[:, i], ddof=1))
    fpr95 = values[..., list(METRICS).index("fpr95")].mean(axis=(0, 1))
    assert list(results.rows()["method"]) == [METHODS[i] for i in np.argsort(fpr95)] * (len(SETS) + 1)


def test_values_at_different_pi_are_never_averaged(tmp_path: Path, values: Values) -> None:
    folder = write_runs(tmp_path, values, pi="0.5")
    write_runs(tmp_path, 1 - values, pi="0.05")
    results = Results.from_folder(folder)
    assert results.shares == ["0.05", "0.5"]
    low, high = results_grids(results)
    assert (low.title, high.title) == ("OOD detection, in %, π 0.05", "OOD detection, in %, π 0.5")
    assert FPR95_CONVENTION in high.notes
    assert low.notes == []
    frame = results_frame(results).set_index(["pi", "ood", "method"])
    assert frame.loc[("0.5", "average", "knn"), "auroc_mean"] == pytest.approx(100 * values[:, :, 2, 1].mean())
    assert frame.loc[("0.05", "average", "knn"), "auroc_mean"] == pytest.approx(100 * (1 - values[:, :, 2, 1].mean()))


def test_variants_and_short_schedules_are_said_and_a_method_may_be_missing_in_a_run(
    tmp_path: Path, values: Values
) -> None:
    folder = write_runs(tmp_path, values, methods=("sal", "sal-paper", "msp"))
    for path in folder.glob("*/*/*/evaluation/metrics.json"):
        content = json.loads(path.read_text())
        content["sal-paper"]["label"], content["msp"]["short_schedule"] = "SAL (paper)", True
        if "/0/far/" in str(path):
            del content["sal"]
        path.write_text(json.dumps(content))
        counts = {"n_id_train": 462, "n_calibration": 115, "n_wild": 1642, "n_candidates": 9}
        write_json(path.parents[1] / "sal-paper" / "filter.json", counts)
    text = markdown(folder)
    assert "| SAL (paper) |" in text
    assert "far candidates 70–72, far candidates of SAL (paper) 9" in text
    assert "MSP (short schedule)" in text
    row = Results.from_folder(folder).rows().set_index(["ood", "method"]).loc[("far", "sal")]
    assert row["n_seeds"] == 2
    assert row["auroc_mean"] == pytest.approx(100 * values[0, 1:, 0, 1].mean())


def test_a_group_is_the_mean_of_its_sets_and_sections_can_be_sorted_by_a_column(tmp_path: Path, values: Values) -> None:
    data = {"ood": ["far"], "test_ood": ["near_one"], "groups": {"both": ["far", "near_one"]}}
    folder = write_runs(tmp_path, values)
    results = replace(Results.from_folder(folder, groups=groups_of({"data": data})), sort="auroc")
    rows = results.rows()
    assert list(rows["ood"]) == [ood for ood in (*SETS, "both", "average") for _ in METHODS]
    for _, row in rows[rows["ood"] == "both"].iterrows():
        truth = 100 * values[:, :, METHODS.index(row["method"]), 1].mean(axis=0)
        assert (row["auroc_mean"], row["auroc_std"]) == pytest.approx((truth.mean(), truth.std(ddof=1)))
    for ood in (*SETS, "both"):
        own = list(rows["auroc_mean"][rows["ood"] == ood])
        assert own == sorted(own, reverse=True)
    text = shown(results_view(results))
    assert "both: over far, near_one); best in bold; each section sorted by AUROC." in " ".join(text.split())
    with pytest.raises(ParamsError, match=r"data.groups: no set .* is called near-one \(did you mean near_one\?\)"):
        groups_of({"data": {**data, "groups": {"near": ["near-one"]}}})


def write_scores(root: Path, shifts: dict[str, float], ood: str = "far", n: int = 300, seeds: int = 2) -> Path:
    """Normal scores, of which ID is higher by a shift, and their metrics."""
    for seed in range(seeds):
        rng = np.random.default_rng([len(shifts), n, seed, ord(ood[0])])
        scores = {name: (rng.normal(-shift, 1, n), rng.normal(0, 1, n)) for name, shift in shifts.items()}
        path = root / f"runs/{seed}/{ood}/pi-0.1/evaluation/metrics.json"
        rows = {
            name: {"label": name.upper(), **vars(ood_metrics(*own)), "id_accuracy": 1} for name, own in scores.items()
        }
        write_json(path, {**rows, "samples": {"id_test": n, "ood_test": n}})
        content = {f"{name}/{side}": own[i] for name, own in scores.items() for i, side in enumerate(("id", "ood"))}
        write_arrays(path.with_name("scores.h5"), TEST_SCORES, content, {})
    return root / "runs"


def test_intervals_hold_the_truth_in_95_of_100_cases(tmp_path: Path) -> None:
    """Each method is a case: the scores of 150 of them are drawn from the same distributions, mean over two seeds."""
    cases = {f"m{i}": 2.0 for i in range(150)}
    results = with_scores(Results.from_folder(write_scores(tmp_path, cases)), Silent())
    normal = NormalDist()
    truth = {"fpr95": 1 - normal.cdf(2 + normal.inv_cdf(0.05)), "auroc": normal.cdf(2 / 2**0.5)}
    rows = replace(results, intervals=True).rows()
    for metric, value in truth.items():
        low, mean, high = (rows[f"{metric}_{what}"] for what in ("low", "mean", "high"))
        assert ((low <= mean) & (mean <= high)).all()
        assert 0.91 <= np.mean((low <= 100 * value) & (100 * value <= high)) <= 0.98
    far = Results.from_folder(write_scores(tmp_path / "separated", {"sal": 20.0}, n=100))
    (row,) = replace(with_scores(far, Silent()), intervals=True).rows().to_dict("records")
    ends = [row[f"{metric}_{end}"] for metric in ("fpr95", "auroc") for end in ("low", "high")]
    assert ends == [0, 3, 97, 100], "nothing was missed, but 3 of 100 might be"


def test_a_sentence_says_which_method_is_significantly_better_than_sal(tmp_path: Path) -> None:
    equal = {"sal": 2.0} | {f"m{i}": 2.0 for i in range(40)}
    assert with_scores(Results.from_folder(write_scores(tmp_path / "a", equal)), Silent()).verdicts == {
        "0.1": "No method is significantly better than SAL."
    }
    folder = write_scores(tmp_path, {"sal": 2.0, "knn": 3.0, "msp": 2.0})
    write_scores(tmp_path, {"sal": 4.0, "knn": 2.0, "msp": 1.0}, "near")
    results = Results.from_folder(folder)
    (grid,) = results_grids(with_scores(results, Silent()))
    assert grid.notes[0] == (
        "KNN is significantly better than SAL on far; SAL is significantly better than every other method on near and "
        "average."
    )


def test_fpr95_with_ood_as_positive_comes_from_the_scores_and_is_named(tmp_path: Path) -> None:
    results = Results.from_folder(write_scores(tmp_path, {"sal": 2.0, "knn": 1.0}, seeds=1))
    other = with_scores(results, Silent(), "ood-positive")
    stored = read_arrays(Found(next(tmp_path.rglob("scores.h5"))), TEST_SCORES)
    truth = [100 * fpr_at_tpr(-stored[f"{name}/ood"], -stored[f"{name}/id"]) for name in ("sal", "knn")]
    assert list(other.rows()["fpr95_mean"]) == pytest.approx(truth)
    assert list(other.rows()["auroc_mean"]) == list(results.rows()["auroc_mean"])
    (grid,) = results_grids(replace(other, intervals=True))
    assert FPR95_OOD_POSITIVE in grid.notes
    assert FPR95_CONVENTION not in grid.notes
    assert grid.header[2:] == ["FPR95 ↓", "95% interval", "AUROC ↑", "95% interval"]
    assert set(results_frame(other)["fpr95_convention"]) == {"ood-positive"}
    frame = results_frame(replace(other, intervals=True))
    assert (frame["fpr95_low"] < frame["fpr95_mean"]).all()
    next(tmp_path.rglob("scores.h5")).unlink()
    assert not has_scores(results)
    with pytest.raises(MissingArtifactError, match=r"scores.h5 does not exist; get it with dvc pull, or"):
        with_scores(results, Silent())


# close to each other, and halfway between what one decimal can show: 34.95% may become 34.9 or 35.0
CLOSE = st.integers(0, 8).map(lambda step: (3490 + 5 * step) / 10_000) | st.floats(0, 1)


@settings(max_examples=25)
@given(st.lists(CLOSE, min_size=15, max_size=15))
def test_bold_is_what_no_other_number_on_the_page_beats(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[float]
) -> None:
    """As printed: two numbers that look the same are both bold, or neither."""
    root = tmp_path_factory.getbasetemp() / "bold"
    text = markdown(write_runs(root, np.array(drawn).reshape(1, 1, len(METHODS), len(METRICS)), SETS[:1]))
    lines = [line for line in text.splitlines() if line.startswith("| far ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][2:] for line in lines]
    assert len(cells) == len(METHODS)
    for i, metric in enumerate(METRICS):
        column = [float(row[i].strip("*")) for row in cells]
        best = min(column) if metric in LOWER_IS_BETTER else max(column)
        assert [row[i].startswith("**") for row in cells] == [value == best for value in column]


def test_the_table_for_people_fits_100_columns_and_a_narrow_one_has_the_means_uncut(
    tmp_path: Path, values: Values
) -> None:
    values[0, 0], values[0, 1:] = 1, 0  # the widest numbers that there are
    results = Results.from_folder(write_runs(tmp_path, values))
    text, narrow = shown(results_view(results)), shown(results_view(results, width=80), width=80)
    assert re.search(r"33\.3 ± 57\.7", text)
    assert " ".join(FPR95_CONVENTION.split()) in " ".join(text.split())
    assert all(f"{value:.1f}" in narrow for value in results.rows().filter(like="_mean").to_numpy().flat)


def test_wild_data_as_they_come_have_an_accuracy_alone(tmp_path: Path) -> None:
    row = {"label": "SAL", **dict.fromkeys(METRICS), "id_accuracy": 0.9}
    path = tmp_path / "runs/0/wild/pi-unknown/evaluation/metrics.json"
    write_json(path, {"sal": row, "samples": {"id_test": 288, "ood_test": 0}})
    text = markdown(tmp_path / "runs")
    assert "| wild | SAL | unknown | unknown | unknown | unknown | **90.0** |" in text
    assert "they need OOD samples to test on (data.test_ood)" in text
    assert FPR95_CONVENTION not in text
    tested = {"sal": row | dict.fromkeys(METRICS, 0.9), "samples": {"id_test": 288, "ood_test": 9}}
    write_json(path.parent / "unseen/odd/metrics.json", tested)
    assert "One seed; best in bold" in markdown(tmp_path / "runs")  # no average of a single set


def test_unseen_sets_are_named_with_the_wild_set_and_count_once(tmp_path: Path, values: Values) -> None:
    folder = write_runs(tmp_path, values)
    for wild, unseen in (("far", "near_one"), ("far", "far")):
        path = folder / f"0/{wild}/pi-0.1/evaluation"
        (path / "unseen" / unseen).mkdir(parents=True)
        shutil.copy(path / "metrics.json", path / "unseen" / unseen)
    results = Results.from_folder(folder)
    assert results.ood_sets == ["far", "near_one", "near_one (wild far)"]
    rows = results.rows()
    assert {*rows["n_seeds"][rows["ood"] == "far"]} == {len(SEEDS)}


def test_several_shares_are_drawn_and_at_one_there_is_no_wild_id_data(tmp_path: Path, values: Values) -> None:
    write_runs(tmp_path, values, pi="1")
    for path in tmp_path.glob("runs/*/*/pi-1/sal/filter.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "err_in": None}))
    folder, params = write_runs(tmp_path, values, pi="0.1"), validated(default_params(), "params.yaml")
    results = Results.from_folder(folder)
    runs = results.runs.set_index(["ood", "pi", "seed", "method"])
    assert list(runs.loc[("far", "0.1", 3, "sal"), ["err_in", "err_out"]]) == pytest.approx([5, 40])
    assert np.isnan(runs.loc[("far", "1", 3, "sal"), "err_in"])
    chart = pi_chart(results, params, "sal")
    assert chart
    drawn = chart.figure.axes[0].lines[0].get_xydata()
    fpr95 = 100 * values[0, :, 0, 0].mean()
    assert np.asarray(drawn) == pytest.approx(np.array([[0.1, fpr95], [1, fpr95]]))
    assert pi_chart(results.by_pi()[0], params, "sal") is None


ANY_SCORES = arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6) | st.floats(0, 1e-12) | st.just(0.0))


@settings(max_examples=40)
@given(ANY_SCORES, ANY_SCORES, st.floats(-1e6, 1e6) | st.just(0.0))
def test_a_histogram_shows_every_sample_once_and_fits(
    left: NDArray[np.floating], right: NDArray[np.floating], threshold: float
) -> None:
    lines = two_histograms(left, right, ("wild", "calibration (holdout)"), threshold).plain.rstrip("\n").splitlines()
    shares = np.array([[float(share) for share in re.findall(r"([\d.]+)%", line)] for line in lines[1:]])
    assert shares.shape[1] == 2
    assert shares.sum(axis=0) == pytest.approx([100, 100], abs=1)
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("T ") for line in lines) <= 1


def filtered(n_outliers: int, errors: SeparationErrors | None) -> Filtered:
    rng = np.random.default_rng(1)
    wild, calibration = torch.from_numpy(rng.exponential(1, 300)), torch.from_numpy(rng.exponential(1, 100))
    wild[:n_outliers] += 6
    params = validated(default_params(), "params.yaml").filter
    found = separate(FilterScores(calibration, wild, (calibration, wild)), params)
    fit = IdFit(train_risk=0.02, train_accuracy=0.99, calibration_accuracy=0.75)
    return Filtered(Experiment(0, "far", 0.1), found, "sal", errors, fit, 100, 462, "held out", [], "", [])


def test_the_filter_shows_its_errors_and_warns_where_it_finds_nothing() -> None:
    some = filtered(60, SeparationErrors(0.031, 0.42))
    said = " ".join(shown(filter_view([some])).split())
    assert {"3.1%", "42.0%"} <= set(said.split())
    assert re.search(r"at least (\d+) of them are outliers \(95%\)", said)
    assert "warning" not in said, "75% right is no reason: with many classes τ may separate well"
    said = " ".join(shown(filter_view([filtered(0, None)])).split())
    assert "Nothing found: at most" in said
    assert "unknown" not in said
    assert "ERR_out" not in said, "columns of what nobody knows are left out"
    assert "warning: far, π 0.1, seed 0: τ finds no more than ID data alone would give" in said
    assert "the classifier gets 99.0% of ID training and 75.0% of calibration data right" in said


@given(st.binary(min_size=1, max_size=20))
def test_any_file_name_is_safe_to_print(raw: bytes) -> None:
    name = os.fsdecode(raw)
    assert printable(name).isprintable()
    as_text(name).encode()
    assert printable("café, 猫") == as_text("café, 猫") == "café, 猫"
