"""How many new ID samples have a p-value of at most 5% and 1%, and how often a stream of them raises an alarm.

    python -m benchmarks.future_p_values [--project FOLDER] [--deals 200]

All ID samples of a project's first seed that its classifier was not trained on are dealt again: to calibration data, to
wild data (with a share π of OOD data) and to new samples, of each as many as in the project. SAL+ and the committee are
fitted to each deal, as the stage `detector` fits them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from salcli.conformal.evidence import p_values
from salcli.conformal.stream import log_wealth, online_p_values
from salcli.methods.base import Known
from salcli.params.schema import load_params
from salcli.pipeline.loading import classifier, known_truth
from salcli.sal.gradients import Representation
from salcli.store.formats import RepresentationFile
from salcli.store.layout import Workspace

METHODS, LEVELS = ("knn", "sal-posthoc", "committee", "sal-plus"), (0.05, 0.01)


def part_of(x: Representation, rows: np.ndarray | torch.Tensor) -> Representation:
    index = torch.as_tensor(rows)
    return Representation(x.feature[index], x.logits[index], x.label[index])


def joined(parts: Sequence[Representation]) -> Representation:
    columns = zip(*(vars(one).values() for one in parts), strict=True)
    return Representation(*(torch.cat(column) for column in columns))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--project", type=Path, default=Path())
parser.add_argument("--deals", type=int, default=200)
parser.add_argument("--pi", type=float, nargs="+", default=[0.0, 0.1])
options = parser.parse_args()
torch.set_num_threads(1)
workspace = Workspace(options.project)
params = load_params(options.project / "params.yaml")[0]
experiment = params.experiments()[0]
network = classifier(workspace, experiment)
train, calibration, test, wild = (
    RepresentationFile.open(workspace.find(one)).whole()
    for one in (
        *(experiment.id_representation(part) for part in ("train", "calibration", "test")),
        experiment.wild_representation,
    )
)
is_ood = known_truth(workspace, len(wild), experiment)
assert is_ood is not None
ids, odd = joined([calibration, test, part_of(wild, ~is_ood)]), part_of(wild, is_ood)
n, m = len(calibration), len(wild)
for pi in options.pi:
    seen: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for deal in range(options.deals):
        rng = np.random.default_rng(deal)
        order, n_odd = rng.permutation(len(ids)), min(len(odd), round(pi * m))
        mixed = joined([part_of(ids, order[n : n + m - n_odd]), part_of(odd, rng.permutation(len(odd))[:n_odd])])
        own, new = part_of(ids, order[:n]), part_of(ids, order[n + m - n_odd :])
        known = Known.of(network, train, wild=mixed, calibration=own, seed=deal)
        for name in METHODS:
            method = known.fitted(params.method(name))
            left_out = method.held_out_scores()
            scores = [one.numpy() for one in known.scores(method, own, new)]
            reference = scores[0] if left_out is None else left_out.calibration.numpy()
            p = p_values(reference, scores[1])
            wealth = log_wealth(online_p_values(reference, scores[1], rng))  # as `salcli monitor` watches them
            seen[name].append([*(float((p <= level).mean()) for level in LEVELS), float(wealth.max() >= 2)])
    for name, own_rates in seen.items():
        rates = 100 * np.array(own_rates)
        error = rates.std(axis=0) / np.sqrt(len(rates))
        cells = " | ".join(f"{mean:.2f} ± {e:.2f}" for mean, e in zip(rates.mean(axis=0), error, strict=True))
        print(f"π {pi:g} | {name} | {cells} | n {n}, m {m}, new {len(ids) - n - m}", flush=True)
