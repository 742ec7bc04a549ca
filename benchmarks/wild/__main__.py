"""SAL+ against every post-hoc score and rivals on stored features: one table of FPR95 on sets of real data.

    python -m benchmarks.wild FOLDER [--real REAL --weights WEIGHTS] [--cells tuning report] [--case RESNET …] [--table]

FOLDER keeps features (see features.py; REAL and WEIGHTS are needed for that once) and a JSON file for each cell: a
case, a seed, π. What is there is not computed again; the table of all that is there is FOLDER/table.md. SAL+ was tuned
on the cells `tuning` and is judged on `report`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.wild.deals import CASES, Deal, Part
from benchmarks.wild.features import extract
from benchmarks.wild.rivals import RIVALS
from salcli.methods import MEMBERS
from salcli.methods.mixture import Samples, fit_mixture

PIS = (0.1, 0.02, 0.0)
TUNING = {
    **{f"resnet/{ood}": (0, 1) for ood in ("fashion-mnist", "jigsaw", "photo-patches")},
    "resnet-300/jigsaw": (0,),
    "resnet-300/fashion-mnist": (1,),
    **{f"digits/{case}": (0, 1, 2) for case in ("8-9", "photo-patches", "3-7")},
    "text/12": (0, 1),
    "text/far": (0,),
    "photos/five": (0, 1),
    "photos/dog": (0,),
    "photos/truck": (0,),
}
REPORT = {
    **{f"digits/{case}": (10, 11, 12) for case in ("8-9", "photo-patches", "1-4", "0-6")},
    **{f"resnet/{ood}": (10,) for ood in ("mnist", "blends", "halves", "negatives", "sideways", "clouds")},
    **{f"resnet-300/{ood}": (10,) for ood in ("blends", "halves", "clouds")},
    **{f"text/{case}": (10,) for case in ("12", "topic", "30")},
    "photos/five": (10, 11),
    "photos/two": (10,),
    **{f"photos/{ood}": (10,) for ood in ("photo-patches", "blends", "clouds")},
}


def fpr95(known: Any, other: Any) -> float:
    """Percentage of outliers at or below the lowest threshold with at least 95% of ID samples at or below it."""
    ordered = np.sort(np.asarray(known))
    threshold = ordered[int(np.ceil(0.95 * len(ordered))) - 1]
    return 100 * float((np.asarray(other) <= threshold).mean())


def samples(part: Part) -> Samples:
    return Samples(part.feature, part.logits, part.columns(MEMBERS))


def numbers(deal: Deal, pi: float) -> dict[str, Any]:
    """FPR95 of all methods, and what SAL+ says about the wild samples."""
    found = {name: fpr95(deal.id_test.scores[name], deal.ood_test.scores[name]) for name in deal.wild.scores}
    rivals = {name: fpr95(*rival(deal, pi)) for name, rival in RIVALS.items()}
    start = time.process_time()
    sides = samples(deal.calibration), samples(deal.wild)
    model = fit_mixture(deal.train.feature, *sides, is_frozen=deal.frozen)
    seconds = time.process_time() - start
    p = model.h(samples(deal.wild)).sigmoid().numpy()
    listed = p > 0.5
    return {
        "post-hoc": found,
        "rivals": {**rivals, "SAL+": fpr95(model.h(samples(deal.id_test)), model.h(samples(deal.ood_test)))},
        "pi_hat": float(p.mean()),
        "pi": float(deal.is_ood.mean()),
        "listed": int(listed.sum()),
        "right": int(deal.is_ood[listed].sum()),
        "err_in": 100 * float(listed[~deal.is_ood].mean()),
        "evidence": model.evidence.tolist(),
        "seconds": seconds,
    }


def run(folder: Path, wanted: dict[str, tuple[int, ...]], name: str) -> None:
    for case, seeds in wanted.items():
        for seed in seeds:
            paths = {pi: folder / "cells" / name / f"{case.replace('/', '_')}-{seed}-{pi:g}.json" for pi in PIS}
            if all(path.exists() for path in paths.values()):
                continue
            try:
                deal = CASES[case](folder, seed)
            except FileNotFoundError as error:
                print(f"{case}: left out, {error.filename} is missing", flush=True)
                continue
            for pi, path in paths.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"case": case, "seed": seed, "at": pi, **numbers(deal(pi), pi)}))
            print(f"{case} {seed}", flush=True)


def tables(folder: Path) -> Iterator[str]:
    for name in ("report", "tuning"):
        cells = [json.loads(path.read_text()) for path in sorted((folder / "cells" / name).glob("*.json"))]
        for pi in PIS:
            own = [cell for cell in cells if cell["at"] == pi]
            if own:
                yield f"\n**{name}, π {pi:g}** (FPR95; mean of seeds)\n"
                yield from table(own)


def table(cells: list[dict[str, Any]]) -> Iterator[str]:
    columns = ["SAL+", *(name for name in cells[0]["rivals"] if name != "SAL+")]
    single = [*cells[0]["post-hoc"]]
    yield "| case | best single | SAL+ | " + " | ".join(columns[1:]) + " | π̂ | P > ½: precision | ERR_in |"
    yield "| --- | ---: |" + " ---: |" * (len(columns) + 3)
    lines = []
    for case in dict.fromkeys(cell["case"] for cell in cells):
        own = [cell for cell in cells if cell["case"] == case]
        best = [min(cell["post-hoc"], key=cell["post-hoc"].get) for cell in own]
        values = [np.mean([cell["post-hoc"][name] for cell, name in zip(own, best, strict=True)])]
        values += [np.mean([cell["rivals"][name] for cell in own]) for name in columns]
        lines.append(values)
        listed, right = (sum(cell[key] for cell in own) for key in ("listed", "right"))
        extra = np.mean([cell["pi_hat"] for cell in own]), np.mean([cell["err_in"] for cell in own])
        precision = f"{100 * right / listed:.0f}%" if listed else "–"
        numbers = " | ".join(f"{value:.1f}" for value in values)
        name = f"{case} ({', '.join(dict.fromkeys(best))})"
        yield f"| {name} | {numbers} | {extra[0]:.3f} | {precision} | {extra[1]:.1f} |"
    yield "| **mean** | " + " | ".join(f"{value:.1f}" for value in np.mean(lines, axis=0)) + " | | | |"
    by_case = [
        [cell for cell in cells if cell["case"] == case] for case in dict.fromkeys(cell["case"] for cell in cells)
    ]
    means = {name: np.mean([np.mean([x["post-hoc"][name] for x in own]) for own in by_case]) for name in single}
    ordered = sorted(means.items(), key=lambda item: item[1])
    yield "\nMean over cases: " + ", ".join(f"{name} {value:.1f}" for name, value in ordered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--cells", nargs="*", default=["report", "tuning"], choices=["report", "tuning"])
    parser.add_argument("--case", nargs="*", help="these cases only")
    parser.add_argument("--table", action="store_true", help="compute nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.real and asked.weights:
        extract(asked.real, asked.weights, asked.folder)
    for name in [] if asked.table else asked.cells:
        wanted = {"tuning": TUNING, "report": REPORT}[name]
        run(asked.folder, {case: seeds for case, seeds in wanted.items() if not asked.case or case in asked.case}, name)
    text = "\n".join(tables(asked.folder))
    (asked.folder / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
