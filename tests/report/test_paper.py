"""`salcli table --paper`: ours and the paper's numbers side by side, and never an invented one."""

from __future__ import annotations

import math
import re
from contextlib import suppress

import pandas as pd
import pytest
from helpers.cli import shown

from salcli.errors import MissingArtifactError, ParamsError, SalError
from salcli.methods.sal import FilterParams
from salcli.params.presets import preset, presets, resolved
from salcli.params.schema import Params, validated
from salcli.report.console import Grid
from salcli.report.paper import beside_the_paper, matching_tables, our_rows, paper_names, paper_numbers, paper_sal_by_pi
from salcli.report.results import FILTER_ERRORS, METRICS, SHORT, Results

Compared = tuple[Grid, pd.DataFrame]
MAIN = "main-cifar100"
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
        | dict.fromkeys(FILTER_ERRORS, math.nan)
        | dict(zip(("fpr95", "auroc", "id_accuracy"), values, strict=True))
        for (ood, seed, method), values in runs.items()
    ]
    return Results(pd.DataFrame(lines), {})


def compared(results: Results, params: Params) -> tuple[str, pd.DataFrame]:
    """All that is said, and the rows."""
    grids, rows = beside_the_paper(results, params)
    return said(*grids), rows


def said(*grids: Grid) -> str:
    return " ".join(" ".join(shown(grid.rich()).split()) for grid in grids)


def row(rows: pd.DataFrame, test: str, method: str) -> pd.Series:
    [[_, found]] = rows[(rows["ood"] == test) & (rows["method"] == method)].iterrows()
    return found


@pytest.fixture(scope="module")
def main_table() -> Compared:
    """SAL and KNN on two of the five sets of the main table, two seeds, with numbers that are easily averaged."""
    values = {
        ("svhn", "sal"): [(0.10, 99.90, 74.0), (0.20, 99.80, 75.0)],
        ("svhn", "knn"): [(60.00, 84.00, 76.0), (62.00, 85.00, 77.0)],
        ("places365", "sal"): [(4.00, 99.00, 73.0), (5.00, 98.00, 74.0)],
        ("places365", "knn"): [(80.00, 70.00, 76.0), (81.00, 71.00, 77.0)],
    }
    runs = {(ood, seed, method): one for (ood, method), both in values.items() for seed, one in enumerate(both)}
    [grid], rows = beside_the_paper(results(runs), params_of("main-cifar100"))
    return grid, rows


# --- the paper's numbers


def test_every_number_of_a_table_is_there_once() -> None:
    numbers = paper_numbers()
    assert len(numbers) > 1000
    assert not numbers.drop(columns="value").duplicated().any()


# --- which table


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_preset_finds_its_own_table_or_one_with_the_same_numbers(name: str) -> None:
    params = params_of(name)
    tables = matching_tables(params)
    if name == "mixing-ratio":
        assert [float(one["pi"].iloc[0]) for one in tables] == [*params.data.pi]
    expected = {"paper-text": MAIN, "released": MAIN}
    assert tables[0]["table"].iloc[0] == expected.get(name, name)
    assert {*tables[0]["method"]} & set(paper_names(params.variants[0], params))


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
        ({"filter__threshold_quantile": 0.8}, []),
        ({"filter__gradient": "predicted-row"}, []),
        (
            {"filter__calibration": "train", "filter__directions": "wild"},
            ["SAL", "SAL (c=1)"],
        ),  # a protocol of the paper's: rows name it
    ],
)
def test_our_sal_has_the_papers_name(overrides: dict[str, object], names: list[str]) -> None:
    known, ours = {*paper_numbers()["method"]}, paper_names("sal", params_of("main-cifar100", **overrides))
    assert [name for name in ours if name in known] == names


@pytest.mark.parametrize("key", [*FilterParams.model_fields])
def test_a_sal_with_any_changed_parameter_of_the_filter_is_not_taken_for_the_papers(key: str) -> None:
    """Whatever parameters there will be: only whose threshold it is may differ, and that is in the row's name."""
    params = params_of(MAIN)
    for value in (0.5, 2, "gradnorm", "train", "class-agnostic", "global", "predicted-row", "random", "wild"):
        with suppress(ParamsError):
            directions = {"filter__directions": "wild"} if key == "calibration" else {}  # pool needs held-out data
            only = {"variants": ["sal"], "filters": [], "evaluate__methods": ["sal"], "detector__method": "sal"}
            changed = params_of("default", **only, **directions, **{f"filter__{key}": value})
            assert ("SAL" in paper_names("sal", changed)) == (key == "calibration")
            break
    else:
        pytest.fail(f"name a value that filter.{key} can be changed to")
    assert "SAL" in paper_names("sal-paper", params)
    assert "SAL" in paper_names("sal-released", params)


def test_no_match_says_which_presets_fit() -> None:
    with pytest.raises(SalError, match=r"π 0\.33(.|\n)*presets that fit cifar100: main-cifar100,"):
        matching_tables(params_of("main-cifar100", data__pi=[0.33], data__ood=["svhn"]))


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
    main_table: Compared,
    test: str,
    method: str,
    metric: str,
    ours: float,
    paper: float,
    difference: float,
) -> None:
    found = [row(main_table[1], test, method)[f"{metric}_{what}"] for what in ("ours", "paper", "difference")]
    assert found == pytest.approx([ours, paper, difference], nan_ok=True)


def test_only_an_average_over_all_of_the_papers_sets_is_compared(main_table: Compared) -> None:
    assert math.isnan(row(main_table[1], "average", "SAL: held out")["fpr95_ours"])
    runs = {(ood, seed, "sal"): (float(i + seed), 99.0, 70.0) for i, ood in enumerate(FIVE_SETS) for seed in (0, 1)}
    lacking = ("svhn", 2, "sal")  # a seed that lacks the other sets
    text, rows = compared(results({**runs, lacking: (90.0, 9.0, 7.0)}), params_of("main-cifar100"))
    average = row(rows, "average", "SAL: held out")
    numbers = [average[f"fpr95_{what}"] for what in ("ours", "paper", "difference")]
    assert numbers == pytest.approx([2.5, 1.88, 0.62])
    assert (average["n_seeds"], "not evaluated" in text) == (2, False)


def test_a_wild_set_tested_on_itself_is_not_taken_for_an_unseen_one() -> None:
    """TIN crop in the wild and TIN crop as test is not what the paper reports for TIN crop."""
    same = results({("tin-crop", 0, "sal"): (1.0, 99.0, 70.0)})
    with pytest.raises(MissingArtifactError, match=r"none of the paper's OOD sets is evaluated yet \(tin-resize"):
        beside_the_paper(same, params_of("unseen-tin"))
    unseen = results({("tin-crop", 0, "sal"): (40.0, 90.0, 70.0)}, unseen="tin-resize")
    _, rows = compared(unseen, params_of("unseen-tin"))
    assert row(rows, "tin-resize", "SAL: held out")["fpr95_difference"] == pytest.approx(-3.11)


# --- the formats


def test_the_table_shows_the_differences_and_what_is_compared_in_every_format(
    main_table: Compared,
) -> None:
    grid, frame = main_table
    text = said(grid)
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
    [line] = frame[(frame["ood"] == "svhn") & (frame["method"] == "SAL: held out")].to_dict("records")
    assert (line["table"], line["n_seeds"], line["fpr95_difference"]) == ("main-cifar100", 2, pytest.approx(0.08))
    short, _ = compared(
        results({("svhn", 0, "sal"): (1.0, 99.0, 70.0)}), params_of("main-cifar100", train_ood__epochs=3)
    )
    assert "Short schedule: train_ood.epochs 3 instead of 100" in short


# --- π and variants


def test_no_number_of_ours_stands_beside_the_papers_without_its_protocol() -> None:
    methods = ["sal", "sal-paper", "sal-released", "msp", "msp@all-id"]
    params = params_of("main-cifar100", evaluate__methods=methods)
    assert [*our_rows("SAL", {}, params)] == methods[:3]
    assert [*our_rows("MSP", {}, params)] == methods[3:]
    assert [*our_rows("SAL (c=2)", {}, params_of("singular-vectors"))] == ["sal-2"]
    runs = {("svhn", 0, name): (float(i), 99.0, 70.0) for i, name in enumerate(methods)}
    text, rows = compared(results(runs), params)
    names = ["SAL: held out", "SAL: paper's text", "SAL: released code", "MSP", "MSP, all ID"]
    own = rows[rows["table"] == MAIN]
    assert [row(own, "svhn", name)["fpr95_ours"] for name in names] == [0, 1, 2, 3, 4]
    assert "SAL" not in {*rows["method"]}
    assert "on our wild set (theirs: preset released)" in text


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_every_row_is_one_line_of_100_columns_and_names_its_protocol(name: str) -> None:
    params = params_of(name)
    tests = {*paper_numbers()["ood"][paper_numbers()["table"] == name]} if params.data.test_ood else {None}
    parts = [
        results(
            {(ood, 0, one): (99.0, 99.0, 99.0) for ood in params.data.ood for one in params.evaluate.methods},
            unseen=test,
        ).runs
        for test in tests
    ]
    grids, rows = beside_the_paper(Results(pd.concat(parts), {}), params)
    lines = [line for grid in grids for line in shown(grid.rich()).splitlines()]
    for method in rows["method"].unique():
        assert any(f" {method}  " in line and re.search(r"\d\.\d\d|–", line) for line in lines), method
        is_of_ours = (rows["method"] == method) & (rows["n_seeds"] > 0)
        assert not is_of_ours.any() or not method.startswith("SAL") or ": " in method or "(post-hoc)" in method


def test_the_schedules_of_rivals_are_named() -> None:
    runs = results({("svhn", 0, "woods"): (1.0, 99.0, 70.0)})
    own = validated(resolved(preset(MAIN, "own-schedules")), MAIN)
    mixed = params_of(MAIN, methods__woods__schedule="constant")
    for params, words in (
        (params_of(MAIN), "Rivals' schedules as in the captions (preset caption-schedules)"),
        (own, "Rivals' schedules as in their own papers (preset own-schedules)"),
        (mixed, "Rivals' schedules are neither those of caption-schedules nor of own-schedules"),
    ):
        assert words in compared(runs, params)[0]
    without, _ = compared(results({("svhn", 0, "sal-paper"): (1.0, 99.0, 70.0)}), params_of("paper-text"))
    assert "schedules" not in without


def test_the_errors_of_the_filter_are_compared_by_pi() -> None:
    """Table 6 is one table."""
    params = params_of("theory")
    assert matching_tables(params) == []
    shares = {"0.1": {"err_in": 4.0, "err_out": 50.0}, "1": {"err_in": math.nan, "err_out": 50.0}}
    parts = [
        results({("textures", 0, variant): (6.0, 0.0, 0.0) for variant in params.variants}, pi=pi).runs.assign(**errors)
        for pi, errors in shares.items()
    ]
    text, rows = compared(Results(pd.concat(parts), {}), params)
    assert list(rows["pi"][::3]) == [0.05, 0.1, 0.2, 0.5, 0.7, 0.9, 1]
    found = rows.set_index(["pi", "method"])
    at_a_tenth, at_one = found.loc[(0.1, "SAL: released code")], found.loc[(1.0, "SAL: held out")]
    differences = [at_a_tenth[f"{metric}_difference"] for metric in ("err_out", "err_in", "fpr95")]
    assert differences == pytest.approx([20, 0.3, 0.27])
    assert (at_one["err_in_ours"], at_one["err_in_paper"]) == pytest.approx((math.nan, 4.8), nan_ok=True)
    assert "0.1 SAL: held out 50.00 30.00 +20.00 4.00 3.70 +0.30 6.00 5.73 +0.27" in text
    with pytest.raises(MissingArtifactError, match="evaluated yet"):
        compared(results({("svhn", 0, "sal"): (6.0, 0.0, 0.0)}), params)


def test_the_papers_points_over_pi_are_of_the_same_data() -> None:
    params = params_of(MAIN)
    assert [*paper_sal_by_pi(params, "textures", "err_out")] == [37, 30, 22, 20, 23, 26, 29]
    found = paper_sal_by_pi(params, "svhn", "fpr95").to_dict()
    assert found == pytest.approx({0.05: 0.17, 0.1: 0.07, 0.2: 0.08, 0.5: 0.02, 0.9: 0.03})
    assert not len(paper_sal_by_pi(params_of("default"), "textures", "fpr95"))
