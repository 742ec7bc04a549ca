"""`salcli table --paper`: ours and the paper's numbers side by side, and never an invented one."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.cli import shown

from salcli.errors import MissingArtifactError, PaperError
from salcli.params.presets import preset, presets, resolved
from salcli.params.schema import Params, validated
from salcli.report.paper import (
    Comparison,
    beside_the_paper,
    errors_beside_the_paper,
    matching_settings,
    our_methods,
    paper_curves,
    paper_frame,
    paper_grid,
    paper_names,
    paper_numbers,
    settings,
)
from salcli.report.results import METRICS, SHORT, EvaluationKey, Results
from salcli.store.files import write_json

MAIN = "main-cifar100"
COUNTS = ("n_id_train", "n_calibration", "n_wild", "n_candidates")
FIVE_SETS = ["svhn", "places365", "lsun-c", "lsun-r", "textures"]
WITHOUT_NUMBERS = {"global-reference", "toy", "predicted-labels", "unseen-tin", "theory"}
WITH_NUMBERS = sorted({name for name, one in presets().items() if one.paper} - WITHOUT_NUMBERS)


def params_of(name: str, **overrides: object) -> Params:
    """A preset's params; data__pi stands for data.pi."""
    return validated(resolved(preset(name), {key.replace("__", "."): value for key, value in overrides.items()}), name)


def results(
    runs: dict[tuple[str, int, str], tuple[float, float, float]], unseen: str | None = None, pi: str = "0.1"
) -> Results:
    """(wild OOD set, seed, method) → FPR95, AUROC, ID accuracy in percent."""
    labels = {"sal": "SAL", "gradnorm": "GradNorm", "vim": "ViM"}
    lines = [
        {"ood": ood, "test_set": unseen or ood, "pi": pi, "seed": seed, "method": method}
        | {"label": labels.get(method, method), **dict.fromkeys(METRICS, 0.0), SHORT: False}
        | dict(zip(("fpr95", "auroc", "id_accuracy"), values, strict=True))
        for (ood, seed, method), values in runs.items()
    ]
    return Results(pd.DataFrame(lines), {})


def row(comparison: Comparison, test: str, method: str) -> pd.Series:
    rows = comparison.rows
    [[_, found]] = rows[(rows["ood"] == test) & (rows["method"] == method)].iterrows()
    return found


def said(comparison: Comparison) -> str:
    return " ".join(shown(paper_grid(comparison).rich()).split())


@pytest.fixture(scope="module")
def main_table() -> Comparison:
    """SAL and KNN on two of the five sets of the main table, two seeds, with numbers that are easily averaged."""
    values = {
        ("svhn", "sal"): [(0.10, 99.90, 74.0), (0.20, 99.80, 75.0)],
        ("svhn", "knn"): [(60.00, 84.00, 76.0), (62.00, 85.00, 77.0)],
        ("places365", "sal"): [(4.00, 99.00, 73.0), (5.00, 98.00, 74.0)],
        ("places365", "knn"): [(80.00, 70.00, 76.0), (81.00, 71.00, 77.0)],
    }
    runs = {(ood, seed, method): one for (ood, method), both in values.items() for seed, one in enumerate(both)}
    [comparison] = beside_the_paper(results(runs), params_of("main-cifar100"))
    return comparison


# --- the paper's numbers


def test_every_number_of_a_table_is_there_once() -> None:
    seen = [(one.setting, one.method, one.test, one.metric) for one in paper_numbers()]
    assert len(seen) == len(set(seen)) == sum(map(len, settings().values())) > 1000


# --- which table


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_preset_finds_its_own_table_or_one_with_the_same_numbers(name: str) -> None:
    params = params_of(name)
    first, *others = matching_settings(params)
    if name == "mixing-ratio":
        assert [one.pi for one in (first, *others)] == [*params.data.pi]
    expected = {"paper-text": MAIN, "released": MAIN}
    assert first.table == expected.get(name, name)
    assert {one.method for one in settings()[first]} & set(paper_names(params.variants[0], params))


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({}, ["SAL", "SAL (c=1)"]),
        ({"filter__score": "gradnorm"}, ["SAL (gradnorm)"]),
        ({"train_ood__candidate_id": True}, ["SAL (candidate-id)"]),
        ({"filter__n_vectors": 4}, ["SAL (c=4)"]),
        ({"filter__labels": "random-wild"}, ["SAL (random-labels)"]),
        ({"filter__labels": "random"}, []),  # of held-out ID data, too: not theirs
        ({"filter__score": "gradnorm", "filter__labels": "random-wild"}, []),  # nor are two changes at once
    ],
)
def test_our_sal_has_the_papers_name(overrides: dict[str, object], names: list[str]) -> None:
    known = {one.method for one in paper_numbers()}
    ours = paper_names("sal", params_of("main-cifar100", **overrides))
    assert [name for name in ours if name in known] == names


def test_no_match_says_which_presets_fit() -> None:
    with pytest.raises(PaperError, match=r"π 0\.33(.|\n)*presets that fit cifar100: main-cifar100,"):
        matching_settings(params_of("main-cifar100", data__pi=[0.33], data__ood=["svhn"]))


# --- the comparison


@pytest.mark.parametrize(
    ("test", "method", "metric", "ours", "paper", "difference"),
    [
        ("svhn", "SAL: held out", "fpr95", 0.15, 0.07, 0.08),
        ("svhn", "KNN", "fpr95", 61.00, 66.38, -5.38),
        ("places365", "KNN", "auroc", 70.50, 71.91, -1.41),
        ("average", "SAL: held out", "id_accuracy", 74.00, 73.71, 0.29),
        ("svhn", "WOODS", "fpr95", math.nan, 0.12, math.nan),  # we have not run it; the paper's number stays
    ],
)
def test_differences_are_those_of_pencil_and_paper(
    main_table: Comparison, test: str, method: str, metric: str, ours: float, paper: float, difference: float
) -> None:
    found = [row(main_table, test, method)[f"{metric}_{what}"] for what in ("ours", "paper", "difference")]
    assert found == pytest.approx([ours, paper, difference], nan_ok=True)


def test_only_an_average_over_all_of_the_papers_sets_is_compared(main_table: Comparison) -> None:
    assert math.isnan(row(main_table, "average", "SAL: held out")["fpr95_ours"])
    runs = {(ood, seed, "sal"): (float(i + seed), 99.0, 70.0) for i, ood in enumerate(FIVE_SETS) for seed in (0, 1)}
    lacking = ("svhn", 2, "sal")  # a seed that lacks the other sets
    [comparison] = beside_the_paper(results({**runs, lacking: (90.0, 9.0, 7.0)}), params_of("main-cifar100"))
    average = row(comparison, "average", "SAL: held out")
    numbers = [average[f"fpr95_{what}"] for what in ("ours", "paper", "difference")]
    assert numbers == pytest.approx([2.5, 1.88, 0.62])
    assert (average["n_seeds"], "not evaluated" in said(comparison)) == (2, False)


def test_a_wild_set_tested_on_itself_is_not_taken_for_an_unseen_one() -> None:
    """TIN crop in the wild and TIN crop as test is not what the paper reports for TIN crop."""
    same = results({("tin-crop", 0, "sal"): (1.0, 99.0, 70.0)})
    with pytest.raises(MissingArtifactError, match=r"none of the paper's OOD sets is evaluated yet \(tin-resize"):
        beside_the_paper(same, params_of("unseen-tin"))
    [comparison] = beside_the_paper(
        results({("tin-crop", 0, "sal"): (40.0, 90.0, 70.0)}, unseen="tin-resize"), params_of("unseen-tin")
    )
    assert row(comparison, "tin-resize", "SAL: held out")["fpr95_difference"] == pytest.approx(-3.11)


# --- the formats


def test_the_table_shows_the_differences_and_what_is_compared_in_every_format(main_table: Comparison) -> None:
    grid, text = paper_grid(main_table), said(main_table)
    for part in (
        "SAL: held out 0.15 0.07 +0.08 99.85 99.95 −0.10",
        "ODIN – 84.66 – – 67.26 –",
        "Ours: mean of 2 seeds. The paper's: mean of 10 runs.",
        "not evaluated here: lsun-c, lsun-r, textures",
    ):
        assert part in text
    assert (
        "| svhn | SAL: held out | 0.15 | 0.07 | +0.08 | 99.85 | 99.95 | −0.10 |  |  |  |"
        in grid.markdown().splitlines()
    )
    assert r" & SAL: held out & 0.15 & 0.07 & +0.08 & 99.85 & 99.95 & $-$0.10 &  &  &  \\" in grid.latex()
    frame = paper_frame([main_table])
    [line] = frame[(frame["ood"] == "svhn") & (frame["method"] == "SAL: held out")].to_dict("records")
    assert (line["table"], line["n_seeds"], line["fpr95_difference"]) == ("main-cifar100", 2, pytest.approx(0.08))
    [short] = beside_the_paper(
        results({("svhn", 0, "sal"): (1.0, 99.0, 70.0)}), params_of("main-cifar100", train_ood__epochs=3)
    )
    assert "Short schedule: train_ood.epochs 3 instead of 100" in said(short)


# --- π and variants


def test_no_number_of_ours_stands_beside_the_papers_without_its_protocol() -> None:
    methods = ["sal", "sal-paper", "sal-released", "msp", "msp@all-id"]
    params = params_of("main-cifar100", evaluate__methods=methods)
    assert our_methods("SAL", params) == methods[:3]
    assert our_methods("MSP", params) == methods[3:]
    assert our_methods("SAL (c=2)", params_of("singular-vectors")) == ["sal-2"]
    runs = {("svhn", 0, name): (float(i), 99.0, 70.0) for i, name in enumerate(methods)}
    [comparison] = [one for one in beside_the_paper(results(runs), params) if "(main-cifar100)" in one.title]
    names = ["SAL: held out", "SAL: paper's text", "SAL: released code", "MSP", "MSP, all ID"]
    assert [row(comparison, "svhn", name)["fpr95_ours"] for name in names] == [0, 1, 2, 3, 4]
    assert "SAL" not in {*comparison.rows["method"]}
    assert "on our wild set (theirs: preset released)" in said(comparison)


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_every_row_is_one_line_of_100_columns_and_names_its_protocol(name: str) -> None:
    params = params_of(name)
    tests = {one.test for one in paper_numbers() if one.setting.table == name} if params.data.test_ood else {None}
    parts = [
        results(
            {(ood, 0, one): (99.0, 99.0, 99.0) for ood in params.data.ood for one in params.evaluate.methods},
            unseen=test,
        ).runs
        for test in tests
    ]
    for comparison in beside_the_paper(Results(pd.concat(parts), {}), params):
        lines = shown(paper_grid(comparison).rich()).splitlines()
        for method in comparison.rows["method"]:
            assert any(f" {method}  " in line and re.search(r"\d\.\d\d|–", line) for line in lines), method
            assert method.startswith("SAL (post-hoc)") or not method.startswith("SAL") or ": " in method


def test_the_schedules_of_rivals_are_named() -> None:
    runs = results({("svhn", 0, "woods"): (1.0, 99.0, 70.0)})
    own = validated(resolved(preset(MAIN, "own-schedules")), MAIN)
    mixed = params_of(MAIN, methods__woods__schedule="constant")
    for params, words in (
        (params_of(MAIN), "Rivals' schedules as in the captions (preset caption-schedules)"),
        (own, "Rivals' schedules as in their own papers (preset own-schedules)"),
        (mixed, "Rivals' schedules are neither those of caption-schedules nor of own-schedules"),
    ):
        [comparison] = beside_the_paper(runs, params)
        assert words in said(comparison)
    [without] = beside_the_paper(results({("svhn", 0, "sal-paper"): (1.0, 99.0, 70.0)}), params_of("paper-text"))
    assert "schedules" not in said(without)


def test_the_errors_of_the_filter_are_compared_by_pi(tmp_path: Path) -> None:
    """Table 6 is one table."""
    params = params_of("theory")
    assert matching_settings(params) == []
    for pi, err_in in ((0.1, 0.04), (1, None)):
        for variant in params.variants:
            folder = tmp_path / f"0/textures/pi-{pi}"
            write_json(folder / variant / "filter.json", {"err_in": err_in, "err_out": 0.5} | dict.fromkeys(COUNTS, 9))
        values = dict.fromkeys(METRICS, 0.06)
        write_json(
            folder / "evaluation/metrics.json",
            {**dict.fromkeys(params.variants, values), "samples": {"id_test": 9, "ood_test": 9}},
        )
    asked = {EvaluationKey(0, "textures", f"{pi:g}", "textures") for pi in params.data.pi}
    [comparison] = errors_beside_the_paper(tmp_path, asked, params)
    assert list(comparison.rows["pi"][::3]) == [0.05, 0.1, 0.2, 0.5, 0.7, 0.9, 1]
    found = comparison.rows.set_index(["pi", "method"])
    at_a_tenth, at_one = found.loc[(0.1, "SAL: released code")], found.loc[(1.0, "SAL: held out")]
    differences = [at_a_tenth[f"{metric}_difference"] for metric in ("err_out", "err_in", "fpr95")]
    assert differences == pytest.approx([20, 0.3, 0.27])
    assert (at_one["err_in_ours"], at_one["err_in_paper"]) == pytest.approx((math.nan, 4.8), nan_ok=True)
    assert "0.1 SAL: held out 50.00 30.00 +20.00 4.00 3.70 +0.30 6.00 5.73 +0.27" in said(comparison)


# --- the paper's points over π


def test_the_papers_own_data_get_the_papers_own_points_and_others_are_told_whose_they_are() -> None:
    found = paper_curves(params_of("main-cifar100"), ["svhn", "textures"])
    curves = {(one.metric, one.ood): one.by_pi for one in found}
    assert set(curves) == {("err_in", "textures"), ("err_out", "textures"), ("fpr95", "svhn"), ("fpr95", "textures")}
    assert list(curves["err_out", "textures"].values()) == [0.37, 0.30, 0.22, 0.20, 0.23, 0.26, 0.29]
    assert curves["fpr95", "svhn"] == pytest.approx({0.05: 0.0017, 0.1: 0.0007, 0.2: 0.0008, 0.5: 0.0002, 0.9: 0.0003})
    others = paper_curves(params_of("default"), params_of("default").data.ood)
    assert all(one.ood is None and "other data: CIFAR-100, WRN-40-2" in one.name for one in others)
