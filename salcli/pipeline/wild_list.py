"""wild.csv: every sample of the user's wild data in the user's order, also held-out ones and copies of labeled data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from salcli.methods import LEAST_CALIBRATION
from salcli.methods.sal import SAL_PLUS
from salcli.methods.separation import Separation
from salcli.params.schema import Params
from salcli.pipeline.loading import wild_holdout_samples, wild_samples
from salcli.store.formats import names_of, read_digests, read_samples
from salcli.store.layout import Experiment, Workspace, prepared_set
from salcli.store.review import as_cell

COLUMNS = ("file", "row", "id", "class", "p_outlier", "p_value", "flagged", "note")
HELD_OUT, COPY = "held out", "copy of labeled data"


def wild_list(
    workspace: Workspace,
    params: Params,
    experiment: Experiment,
    found: Separation,
    predicted: tuple[Int[np.ndarray, " m"], Int[np.ndarray, " h"]],  # classes of wild and of held-out samples
) -> Iterator[dict[str, Any]]:
    """The lines of wild.csv. None are written where salcli mixed the wild data: they would tell ID from OOD data."""
    id_found, wild_found = (workspace.find(prepared_set(name)) for name in (params.data.id, experiment.ood))
    id_set, digests = read_samples(id_found), read_digests(wild_found)
    assert id_set.labels is not None
    n, n_id = len(digests), len(id_set)
    label, score, p_value, note = np.full(n, -1), np.full(n, np.nan), np.full(n, np.nan), np.full(n, COPY, object)
    wild, held_out = (read(workspace, params, experiment).index - n_id for read in (wild_samples, wild_holdout_samples))
    label[wild], score[wild], p_value[wild], note[wild] = predicted[0], found.scores.wild, found.p_value, ""
    label[held_out], score[held_out], p_value[held_out] = predicted[1], found.scores.held_out, found.p_held_out
    note[held_out] = HELD_OUT
    if len(copies := np.flatnonzero(label < 0)):
        known = {digest.tobytes(): own for digest, own in zip(read_digests(id_found), id_set.labels, strict=True)}
        label[copies] = [known[digest.tobytes()] for digest in digests[copies]]
    is_log_odds = params.filter.score == SAL_PLUS and len(found.scores.calibration) >= LEAST_CALIBRATION
    p_outlier = torch.from_numpy(score).sigmoid().numpy() if is_log_odds else np.full(n, np.nan)
    for i, origin in enumerate(names_of(wild_found, np.arange(n))):
        yield {
            "file": as_cell(origin.file),
            "row": origin.row,
            "id": as_cell(origin.id),
            "class": as_cell(id_set.class_names[label[i]]),
            "p_outlier": "" if np.isnan(p_outlier[i]) else float(p_outlier[i]),
            "p_value": "" if np.isnan(p_value[i]) else float(p_value[i]),
            "flagged": int(score[i] > found.threshold),
            "note": note[i],
        }
