"""The paper's numbers (paper.csv), which of its tables fit a params.yaml, and ours beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from salcli.errors import MissingArtifactError, SalError
from salcli.params.presets import additions, presets, resolved
from salcli.params.reading import AVERAGE
from salcli.report.console import Cell, Grid
from salcli.report.results import LOWER_IS_BETTER, METRICS, NOTHING, SHORT, SHORT_SCHEDULE, Results, pi_text
from salcli.sal.metrics import FPR95_CONVENTION
from salcli.store.layout import SAL

if TYPE_CHECKING:  # slow to load
    import pandas as pd

    from salcli.params.schema import Params

PAPER = "Du et al., ICLR 2024"
MAIN, THEORY, OF_THE_FILTER = "main-cifar100", "theory", ("theory", "predicted-labels")  # tables
OF_ALL_SETS = "-"  # instead of an OOD set: a number of no single set, like ID accuracy
ALL_ID = ", all ID"  # a row whose network was trained on all ID data but the test's
ALSO = {"energy-vos": "energy-oe"}  # "Energy (w/ OE)" is this loss in WOODS' published sweeps
COLUMNS = {metric: METRICS[metric] for metric in ("fpr95", "auroc", "id_accuracy")}
ERRORS = {"err_out": "ERR_out ↓", "err_in": "ERR_in ↓", "fpr95": METRICS["fpr95"]}
# what the paper calls a change of SAL; another one is named by its key and value
PAPERS_WORDS = {"svd": {"class-agnostic": "class-agnostic"}, "labels": {"random-wild": "random-labels"}}
OF_THE_THRESHOLD = ("score", "threshold_quantile", "fdr", "calibration")  # keys of `filter` that τ does not depend on
PROTOCOLS = {
    "held out": "held out: T on held-out ID data, with predicted labels (ours)",
    "paper's text": "paper's text: T on ID training data, with true labels on the wild v; the text fixes neither",
    "released code": "released code: the filter, T and fine-tuning of the authors' main.py",
}
AT_ONE = {
    "disjoint": "At π = 1 the authors' code has one ID image to 120 OOD images; ours has none, so there is no ERR_in.",
    "recycle": "At π = 1 there is one ID image to 120 OOD images, as in the authors' code; ERR_in is of those.",
}
STRICTER = (
    "Our splits are stricter: the classifier has not seen the wild half of the ID data, no image is both wild and test."
)
SEEN_ALL = "all ID: the network has seen the wild ID half, too, as those of the paper's ID-only baselines have."


@cache
def paper_numbers() -> pd.DataFrame:
    """Every number of the paper's tables, one in a line; in percent where it is a share, π as text, "" if unknown."""
    import pandas as pd

    numbers = pd.read_csv(str(files("salcli.report") / "paper.csv"))
    return numbers.assign(pi=["" if math.isnan(pi) else pi_text(pi) for pi in numbers["pi"]])


@cache
def _preset_params(table: str) -> dict[str, Any]:
    return resolved(presets()[table])


# --- which of the paper's tables fit


def matching_tables(params: Params) -> list[pd.DataFrame]:
    """Tables to compare with, each with one π, in the order of data.pi, the nearest first.

    A table that adds nothing is left out. There are none if the params are those of Table 6, which is about the filter.
    """
    fitting, errors = _fitting(params), _errors_of_the_filter(params)
    if {*errors["pi"][errors["table"] == THEORY]} == {*paper_numbers()["pi"][paper_numbers()["table"] == THEORY]}:
        return []
    is_compared = ~fitting["table"].isin(OF_THE_FILTER) & fitting["metric"].isin(COLUMNS)
    tables = [own for _, own in fitting[is_compared].groupby(["table", "pi"], sort=False)]
    asked = {(wild, test) for wild in params.data.ood for test in (wild, *params.data.test_ood)}
    names = {name: paper_names(name, params) for name in params.evaluate.methods}

    def distance(numbers: pd.DataFrame) -> tuple[int, bool]:
        """How many of our rows the table lacks, and whether it has other OOD sets."""
        own = _of_single_sets(numbers)
        n_lacking = sum({*own["method"]}.isdisjoint(theirs) for theirs in names.values())
        return n_lacking, {*zip(own["wild"], own["ood"], strict=True)} != asked

    chosen: list[pd.DataFrame] = []
    covered: set[Any] = set()
    for numbers in sorted(tables, key=distance):  # stable: otherwise in the paper's order
        cells = {
            (name, row.wild, row.ood, row.metric, row.our_pi)
            for row in _of_single_sets(numbers).itertuples()
            for name, theirs in names.items()
            if row.method in theirs and (row.wild, row.ood) in asked
        }
        if cells - covered:
            chosen.append(numbers)
            covered |= cells
    if not chosen and not len(errors):
        raise SalError(_nothing_found(params))
    shares = [*map(pi_text, params.data.pi)]
    return sorted(chosen, key=lambda numbers: shares.index(numbers["our_pi"].iloc[0]))


def _fitting(params: Params) -> pd.DataFrame:
    """Numbers for our ID data, network and π, with the OOD set of the wild data, and the π of ours to compare with."""
    shares, numbers = [*map(pi_text, params.data.pi)], paper_numbers()
    is_same = (numbers["id"] == params.data.id) & (numbers["backbone"] == params.model.backbone)
    own = numbers[is_same & numbers["pi"].isin(["", *shares])]
    wild = []
    for table, test in zip(own["table"], own["ood"], strict=True):
        data = _preset_params(table)["data"]
        wild.append(test if test not in data["test_ood"] else next(name for name in data["ood"] if name != test))
    return own.assign(wild=wild, our_pi=own["pi"].where(own["pi"] != "", shares[0]))


def _of_single_sets(numbers: pd.DataFrame) -> pd.DataFrame:
    return numbers[~numbers["ood"].isin([OF_ALL_SETS, AVERAGE])]


def _errors_of_the_filter(params: Params) -> pd.DataFrame:
    """On an OOD set of ours, by π; those of Table 6 where there are others, too."""
    own = _fitting(params)
    own = own[own["table"].isin(OF_THE_FILTER) & own["metric"].isin(ERRORS) & own["ood"].isin(params.data.ood)]
    return own.drop_duplicates(["pi", "metric"]).sort_values("pi", key=lambda pi: pi.astype(float), kind="stable")


def _nothing_found(params: Params) -> str:
    data = params.data
    names = ", ".join(dict.fromkeys(paper_names(method, params)[0] for method in params.evaluate.methods))
    near = [name for name, one in presets().items() if one.paper and _preset_params(name)["data"]["id"] == data.id]
    lines = [
        "the paper reports no FPR95 or AUROC for these params",
        f"looked for: {data.id}, {params.model.backbone}, π {', '.join(map(pi_text, data.pi))}, "
        f"OOD {', '.join(data.ood)}; {names}",
        f"presets that fit {data.id}: {', '.join(near)}" if near else "presets that fit: salcli presets",
    ]
    return "\n  ".join(lines)


# --- what the paper calls our methods


def paper_names(method: str, params: Params) -> list[str]:
    """What the paper calls a method, or a variant of SAL, with these params."""
    if method in params.variants:
        changes = _changes(params.for_variant(method))
        return [f"SAL ({', '.join(changes)})"] if changes else ["SAL", "SAL (c=1)"]
    if method == "sal-posthoc":
        return [f"SAL ({', '.join(['post-hoc', *_changes(params, is_posthoc=True)])})"]
    name = ALSO.get(method, method).partition("@")[0]  # knn@all-id: KNN of another network
    spelled = {one.lower().replace("+", "-plus"): str(one) for one in paper_numbers()["method"].unique()}
    return [spelled.get(name, name)]


def _changes(params: Params, *, is_posthoc: bool = False) -> list[str]:
    """How `filter`, and what the OOD head learns, differ from the paper's SAL in any way.

    Which data set T is named by the row's protocol instead; what belongs to it is as in the main preset.
    """
    main = _preset_params(MAIN)
    filters = [main["filter"] | (main["variant"].get(name) or {}).get("filter", {}) for name in main["variants"]]
    by_calibration = {one["calibration"]: one for one in reversed(filters) if one["score"] == SAL}
    own = params.filter.model_dump()
    reference = by_calibration[own["calibration"]]
    skipped = OF_THE_THRESHOLD if is_posthoc else ("calibration",)
    changed = {
        key: value
        for key, value in own.items()
        if key not in skipped and value not in (reference[key], main["filter"][key])
    }
    if not is_posthoc:
        learned = params.train_ood.model_dump(include={"head", "candidate_id"})
        changed |= {key: value for key, value in learned.items() if value != main["train_ood"][key]}
    texts = {"score": "{}", "n_vectors": "c={}", "candidate_id": "candidate-id"}
    return [
        PAPERS_WORDS.get(key, {}).get(str(value)) or texts.get(key, f"{key} {{}}").format(value)
        for key, value in changed.items()
    ]


def our_rows(paper_method: str, labels: Mapping[str, str], params: Params) -> dict[str, str]:
    """Our methods that the paper calls so, with the name of their row: the paper's, and whose protocol they follow."""
    from salcli.methods.sal import protocol  # the params have loaded it

    names = {}
    for ours in params.evaluate.methods:
        if paper_method not in paper_names(ours, params):
            continue
        if ours in params.variants:
            names[ours] = f"{paper_method}: {protocol(params.for_variant(ours).filter)}"
        elif "@" in ours or getattr(params.methods.of(ours), "images", "train") == "all":
            names[ours] = paper_method + ALL_ID
        else:
            names[ours] = f"{paper_method}: {labels.get(ours, ours)}" if ours in ALSO else paper_method
    rows = list(names.values())
    return {ours: f"{row}, {labels.get(ours, ours)}" if rows.count(row) > 1 else row for ours, row in names.items()}


# --- ours beside the paper's


def beside_the_paper(results: Results, params: Params) -> tuple[list[Grid], pd.DataFrame]:
    """Our results beside each table of the paper that fits params, as tables and for programs.

    The frame has a line for each table, OOD set and method, with METRIC_ours, _ours_std, _paper and _difference in
    percent, NaN where there is none. n_seeds: of ours, 0 where we have not run it.
    """
    import pandas as pd

    tables = matching_tables(params)
    compared = [one for numbers in tables if (one := _compare(results, numbers, params))]
    errors = _compare_errors(results, params)
    if (tables or not errors) and not compared:
        missing = ", ".join(dict.fromkeys(test for numbers in tables for test in _of_single_sets(numbers)["ood"]))
        raise MissingArtifactError(
            f"none of the paper's OOD sets is evaluated yet ({missing or params.data.ood[0]}); do it with: dvc repro"
        )
    grids, frames = zip(*compared, *([errors] if errors else []), strict=True)
    for i, grid in enumerate(grids):  # what several tables have to say alike stands under the last
        later = {note for other in grids[i + 1 :] for note in other.notes}
        grid.notes[:] = [note for note in grid.notes if note not in later]
    return [*grids], pd.concat(frames, ignore_index=True)


def _compare(results: Results, numbers: pd.DataFrame, params: Params) -> tuple[Grid, pd.DataFrame] | None:
    """One table of the paper; None where we have run nothing of it."""
    import pandas as pd

    table, runs = numbers.iloc[0], results.runs[results.runs["pi"] == numbers["our_pi"].iloc[0]]
    labels = dict(zip(runs["method"], runs["label"], strict=True))
    sets = _of_single_sets(numbers).drop_duplicates("ood")
    groups = {
        str(test): runs[(runs["ood"] == wild) & (runs["test_set"] == test)]
        for test, wild in zip(sets["ood"], sets["wild"], strict=True)
    }
    not_evaluated = [test for test, own in groups.items() if not len(own)]
    groups = {test: own for test, own in groups.items() if len(own)}
    if len(groups) > 1 and len(sets) < numbers["ood"].nunique():
        groups[AVERAGE] = _averages(runs, groups, is_complete=not not_evaluated)
    methods = {method: our_rows(method, labels, params) for method in numbers["method"].unique()}
    lines = []
    for test, own in groups.items():
        is_sum = test == AVERAGE or len(groups) == 1  # where a number of no single set stands
        theirs = numbers[numbers["ood"].isin([test, *([OF_ALL_SETS] if is_sum else [])])]
        if not is_sum and "id_accuracy" not in {*theirs["metric"]}:
            own = own.assign(id_accuracy=math.nan)
        for method, names in methods.items():
            paper = theirs[theirs["method"] == method]
            for ours, name in (names or {"": method}).items():
                lines.append(_line(paper, table, test, name, own[own["method"] == ours], COLUMNS))
    if not any(line["n_seeds"] for line in lines):
        return None
    rows, known = pd.DataFrame(lines), {ours for names in methods.values() for ours in names}
    others = [name for name in params.evaluate.methods if name not in known]
    only_ours = [paper_names(one, params)[0] if one in params.variants else labels.get(one, one) for one in others]
    pi = f", π {table['pi']}" if table["pi"] else ""
    title = f"{table['id']}, {table['backbone']}{pi} ({table['table']})"
    notes = _notes(table["table"], rows, params, int(runs["seed"].nunique()), not_evaluated, only_ours)
    return _grid(title, COLUMNS, rows, notes), rows


def _averages(runs: pd.DataFrame, groups: Mapping[str, pd.DataFrame], *, is_complete: bool) -> pd.DataFrame:
    """One line for each method and seed that was run on every set, so that only like is compared with like.

    Without all of the paper's sets there is no average over OOD sets that it reports; ID accuracy still is.
    """
    import pandas as pd

    grouped = pd.concat([*groups.values()]).groupby(["method", "seed"], sort=False)[list(COLUMNS)]
    averages = grouped.mean()[grouped.size() == len(groups)].reset_index()
    averages[SHORT] = averages["method"].isin(runs["method"][runs[SHORT]])
    if not is_complete:
        averages[["fpr95", "auroc"]] = math.nan
    return averages


def _compare_errors(results: Results, params: Params) -> tuple[Grid, pd.DataFrame] | None:
    """Errors of the filter and FPR95 by π, of every variant that the paper calls SAL (Table 6); None without runs."""
    import pandas as pd

    numbers, runs = _errors_of_the_filter(params), results.runs
    runs = runs[runs["err_out"].notna() & (runs["ood"] == runs["test_set"])]
    lines = [
        _line(paper, paper.iloc[0], str(test), name, runs[is_own & (runs["method"] == ours)], ERRORS)
        for (pi, test), paper in numbers.groupby(["pi", "ood"], sort=False)
        for is_own in [(runs["pi"] == pi) & (runs["ood"] == test)]
        for ours, name in our_rows("SAL", {}, params).items()
    ]
    if not any(line["n_seeds"] for line in lines):
        return None
    rows, table = pd.DataFrame(lines), numbers.iloc[0]
    notes = [
        _source(table["table"]),
        *_protocols(rows["method"], params),
        *([AT_ONE[params.data.mixing]] if (rows["pi"] == 1).any() else []),
        STRICTER,
    ]
    title = f"errors of the filter, {table['id']}, {table['backbone']}, {table['ood']} ({table['table']})"
    return _grid(title, ERRORS, rows, notes), rows


def _line(
    paper: pd.DataFrame, table: pd.Series[Any], test: str, name: str, ours: pd.DataFrame, columns: Mapping[str, str]
) -> dict[str, Any]:
    """Our runs of one method on one set, and the paper's numbers."""
    line = {
        "table": table["table"],
        "pi": float(table["pi"] or math.nan),
        "ood": test,
        "method": name,
        "n_seeds": len(ours),
        "short_schedule": bool(ours[SHORT].any()),  # ours was trained for fewer epochs than its authors train
    }
    theirs = dict(zip(paper["metric"], paper["value"], strict=True))
    for metric in columns:
        own, value = float(ours[metric].mean()), theirs.get(metric, math.nan)
        numbers = {"ours": own, "ours_std": float(ours[metric].std()), "paper": value, "difference": own - value}
        line |= {f"{metric}_{what}": number for what, number in numbers.items()}
    return line


def _grid(title: str, every: Mapping[str, str], rows: pd.DataFrame, notes: list[str]) -> Grid:
    """Ours, the paper's and the difference, green where ours is better; in sections by OOD set, or errors by π."""
    by_pi = every is ERRORS
    columns = {metric: name for metric, name in every.items() if rows[f"{metric}_paper"].notna().any()}
    header, short_header = [], []
    for name in columns.values():
        words, arrow = name.rsplit(" ", 1)
        first, _, second = words.partition(" ")
        header += [f"{name} {who}" for who in ("ours", "paper", "Δ")]
        short_header += [f"{first}\nours", f"{second} {arrow}".strip() + "\npaper", "\nΔ"]
    groups = rows.groupby("pi" if by_pi else "ood", sort=False)
    sections = []
    for about, own in groups:
        section = []
        for row in own.to_dict("records"):
            name = row["method"] + (SHORT_SCHEDULE if row["short_schedule"] else "")
            cells = [Cell(f"{about:g}" if by_pi else str(about)), Cell(name)]
            for metric in columns:
                ours, paper = row[f"{metric}_ours"], row[f"{metric}_paper"]
                if metric == "id_accuracy" and math.isnan(paper) and about != AVERAGE and len(groups) > 1:
                    cells += [Cell("")] * 3  # it is of all sets
                    continue
                numbers = [NOTHING if math.isnan(value) else f"{value:.2f}" for value in (ours, paper)]
                difference = NOTHING if math.isnan(ours - paper) else f"{ours - paper:+.2f}".replace("-", "−")
                is_better = difference.startswith("−") == (metric in LOWER_IS_BETTER or metric in ERRORS)
                colour = "green" if is_better else "red"
                # no colour for what looks equal
                cells += [*map(Cell, numbers), Cell(difference, colour=colour if difference.strip("+−0.–") else "")]
            section.append(cells)
        sections.append(section)
    return Grid(
        title=f"Ours and the paper's, in %: {title}",
        header=["π" if by_pi else "OOD test set", "method", *header],
        sections=sections,
        notes=notes,
        short_header=["π" if by_pi else "", "method" if by_pi else "OOD test set,\nmethod", *short_header],
        has_headings=not by_pi,
    )


# --- what stands below a table


def _notes(
    table: str, rows: pd.DataFrame, params: Params, n_seeds: int, not_evaluated: list[str], only_ours: list[str]
) -> list[str]:
    preset, unknown = _preset_params(table), presets()[table].not_stated
    n_runs = len(preset["seeds"])  # one where the paper does not say
    epochs = {"train_id": params.train_id.epochs, "train_ood": params.train_ood.epochs}
    shorter = [
        f"{section}.epochs {own} instead of {preset[section]['epochs']}"
        for section, own in epochs.items()
        if own < preset[section]["epochs"]
    ]
    notes = [
        _source(table),
        f"Ours: {f'mean of {n_seeds} seeds' if n_seeds > 1 else 'one seed'}. "
        f"The paper's: {f'mean of {n_runs} runs' if n_runs > 1 else 'it does not say of how many runs'}.",
        *_protocols(rows["method"], params),
        STRICTER,
        FPR95_CONVENTION,
        shorter and f"Short schedule: {', '.join(shorter)} in the paper's preset.",
        _schedules(params),
        unknown and f"The paper does not state {unknown} of this table; ours are those of its other tables.",
        (rows["n_seeds"] == 0).any() and f"{NOTHING}: not reported, or a method that was not run here.",
        rows["method"].str.endswith(ALL_ID).any() and SEEN_ALL,
        not_evaluated and f"In the paper's table, but not evaluated here: {', '.join(not_evaluated)}.",
        only_ours and f"Evaluated here, but not in the paper's table: {', '.join(only_ours)}.",
    ]
    return [str(note) for note in notes if note]


def _source(table: str) -> str:
    return f"Paper: {PAPER}, {presets()[table].paper}. Δ: ours less the paper's."


def _protocols(methods: pd.Series[str], params: Params) -> list[str]:
    """What the names of these rows mean."""
    found = {name: text for name, text in PROTOCOLS.items() if methods.str.endswith(f": {name}").any()}
    if "released code" in found:
        is_theirs = params.data.mixing == "recycle"
        found["released code"] += ", on its wild set" if is_theirs else ", on our wild set (theirs: preset released)"
    return [f"{text}." for text in found.values()]


def _schedules(params: Params) -> str:
    """Which of the named schedules the rivals have; empty without rivals that have one."""
    trained = {*params.rivals, *params.encoders}
    for name, one in additions().items():
        keys = {(*key.split(".")[1:],): value for key, value in one.values.items()}  # methods.NAME.KEY
        own = {(method, key): value for (method, key), value in keys.items() if method in trained}
        if not own:
            return ""
        if all(getattr(params.methods.of(method), key) == value for (method, key), value in own.items()):
            return f"{one.title[0].upper()}{one.title[1:]} (preset {name})."
    return f"Rivals' schedules are neither those of {' nor of '.join(additions())}."


# --- single numbers


def paper_sal_by_pi(params: Params, ood: str, metric: str) -> pd.Series[float]:
    """A metric of the paper's SAL on an OOD set, by π, for our ID data and network; in percent."""
    numbers = paper_numbers()
    is_same = (numbers["id"] == params.data.id) & (numbers["backbone"] == params.model.backbone) & (numbers["pi"] != "")
    is_sal = (numbers["method"] == "SAL") & (numbers["ood"] == ood) & (numbers["metric"] == metric)
    own = numbers[is_same & is_sal]
    unseen = [table for table in own["table"].unique() if ood in _preset_params(table)["data"]["test_ood"]]
    own = own[~own["table"].isin(unseen)]
    return own.groupby(own["pi"].astype(float))["value"].mean()


def paper_err_in_of_toy() -> dict[str, float]:
    """ERR_in of both scenarios of the example in the plane, as shares."""
    toy = paper_numbers()[paper_numbers()["table"] == "toy"]
    return dict(zip(toy["ood"], toy["value"] / 100, strict=True))


def paper_zeta() -> dict[float, float]:
    """Table 5, by π."""
    zeta = paper_numbers()[paper_numbers()["metric"] == "zeta"]
    return dict(zip(zeta["pi"].astype(float), zeta["value"], strict=True))
