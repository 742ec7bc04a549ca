"""The last word of a custom project: what was found, in which list it is, the detector, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from salcli.store.files import read_header, reading_json
from salcli.store.layout import UNKNOWN, Experiment, Workspace


def last_word(workspace: Workspace, raw: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """A few lines about the first run of params.yaml (its raw content); none where salcli mixed the wild data.

    `labels` are those of methods. What does not exist yet is left out.
    """
    data, seeds, variants = raw["data"], raw["seeds"], [*raw.get("filters", ()), *raw.get("variants", ())]
    if [*data["pi"]] != [UNKNOWN] or not variants:
        return []
    experiment = Experiment(seeds[0], data["ood"][0], UNKNOWN, variants[0])
    lines, n_runs, n_flagged = [], len(seeds) * len(data["ood"]), 0
    if workspace.has(experiment.filter_metrics):
        with reading_json(workspace.find(experiment.filter_metrics)) as found:
            n_flagged = found["n_candidates"] + found["n_held_out_flagged"]
            flagged = f"{found['n_candidates']:,} of {found['n_wild']:,}"
            if found["n_held_out"]:
                flagged += f", and {found['n_held_out_flagged']:,} of {found['n_held_out']:,} held out"
            of = f", seed {experiment.seed}, the first of {n_runs} runs" if n_runs > 1 else ""
            lines = [
                f"{experiment.ood}{of}: {found['verdict']}",
                f"list: {experiment.wild_list.path} (every wild sample; flagged: {flagged})",
                *([f"note: {found['label_shift']}"] if found["label_shift"] else []),
            ]
    if workspace.has(experiment.detector):
        method = read_header(workspace.find(experiment.detector)).about["method"]
        why = str(method.get("reason", "")).partition(";")[0].partition(". ")[0]
        lines.append(f"detector: {labels.get(method['row'], method['row'])}{f' ({why})' if why else ''}")
    select = "salcli select --out outliers, " if n_flagged else ""
    return [*lines, f"next: salcli report, {select}salcli predict PATH"]
