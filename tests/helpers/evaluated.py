"""A small workspace with one evaluated experiment, written directly: no stage has to run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from salcli.data.samples import Samples
from salcli.data.splits import IdSplit
from salcli.params.presets import default_text
from salcli.params.reading import edited
from salcli.pipeline.evaluate import SCORES
from salcli.sal.gradients import Representation
from salcli.sal.metrics import ood_metrics
from salcli.store.files import Header, write_arrays, write_csv, write_json, write_tensors
from salcli.store.formats import (
    Candidates,
    WildSet,
    write_candidates,
    write_id_split,
    write_samples,
    write_wild_set,
    writing_representation,
)
from salcli.store.layout import Experiment, Workspace, prepared_set

EXPERIMENT = Experiment(0, "digits-8-9", 0.1)
N_ID, N_OOD, N_WILD, N_TEST, N_CLASSES = 700, 300, 500, 106, 8
LABELS = {"sal": "SAL", "msp": "MSP", "knn": "KNN"}


def write_evaluated(root: Path) -> None:
    rng, workspace = np.random.default_rng(0), Workspace(root)
    values = {"seeds": [0], "rivals": [], "evaluate.methods": [*LABELS]}
    (root / "params.yaml").write_text(edited(default_text(), values))
    _write_data(workspace, rng)
    _write_filter(workspace, rng)
    _write_evaluation(workspace, rng)


def _write_data(workspace: Workspace, rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, (N_ID + N_OOD, 1, 8, 8), dtype=np.uint8)
    names = tuple(str(k) for k in range(N_CLASSES))
    id_set = Samples(images[:N_ID], rng.integers(0, N_CLASSES, N_ID), names)
    write_samples(workspace.target(prepared_set("digits-0-7")), id_set, "digits-0-7")
    write_samples(workspace.target(prepared_set(EXPERIMENT.ood)), Samples(images[N_ID:]), EXPERIMENT.ood)
    parts = np.split(rng.permutation(N_ID), [100, 150, 600])
    write_id_split(workspace.target(EXPERIMENT.split), IdSplit(*parts), {})
    source = rng.permutation(np.concatenate([parts[2], np.arange(N_ID, N_ID + N_WILD - len(parts[2]))]))
    wild = WildSet(source, np.arange(N_OOD - N_TEST, N_OOD))
    write_wild_set(workspace.target(EXPERIMENT.wild), wild, workspace.about(EXPERIMENT.wild))
    for artifact in (EXPERIMENT.classifier, EXPERIMENT.network("sal")):
        about = workspace.about(artifact, n_outliers=150)
        write_tensors(workspace.target(artifact), Header("classifier", about), {"weight": torch.zeros(2)})
    artifact = EXPERIMENT.test_representation()
    with writing_representation(workspace.target(artifact), N_TEST, N_CLASSES, 4, workspace.about(artifact)) as writer:
        logits = torch.from_numpy(rng.normal(size=(N_TEST, N_CLASSES)).astype(np.float32))
        writer.append(Representation(torch.zeros(N_TEST, 4), logits, logits.argmax(1)))


def _write_filter(workspace: Workspace, rng: np.random.Generator) -> None:
    scores, predicted = rng.exponential(1, N_WILD), rng.integers(0, N_CLASSES, N_WILD)
    threshold = float(np.quantile(scores, 0.7))
    index = np.flatnonzero(scores > threshold)
    candidates = Candidates(index, scores, predicted, rng.exponential(0.5, 50), threshold, "sal")
    about = workspace.about(EXPERIMENT.candidates)
    write_candidates(workspace.target(EXPERIMENT.candidates), candidates, about)
    counts = {"n_id_train": 100, "n_calibration": 50, "n_wild": N_WILD, "n_candidates": len(index)}
    errors = {"err_in": 0.05, "err_out": 0.4, "train_accuracy": 0.99, "calibration_accuracy": 0.95}
    write_json(workspace.target(EXPERIMENT.filter_metrics), {**counts, **errors})
    curve = {"threshold": [0.1, threshold, 3.0], "err_in": [0.9, 0.1, 0.0], "err_out": [0.1, 0.4, 1.0]}
    theory = {
        "zeta": 1.2, "zeta_without_noise": 1.1, "required": 0.32, "condition_holds": True, "pi": 0.1,
        "pi_estimate": {"pi": 0.08, "score": "KNN"}, "threshold": threshold, "errors": curve, "errors_estimated": curve,
    }  # fmt: skip
    write_json(workspace.target(EXPERIMENT.theory("json")), theory)
    epochs = [{"epoch": i + 1, "loss": 1 / (i + 1), "accuracy": 0.5 + i / 10} for i in range(5)]
    for artifact in (EXPERIMENT.train_id("csv"), EXPERIMENT.curve("sal")):
        write_csv(workspace.target(artifact), epochs)


def _write_evaluation(workspace: Workspace, rng: np.random.Generator) -> None:
    scores = {name: (rng.normal(3 - i, 1, 100), rng.normal(0, 1, N_TEST)) for i, name in enumerate(LABELS)}
    arrays = {
        f"{name}/{side}": values
        for name, own in scores.items()
        for side, values in zip(("id", "ood"), own, strict=True)
    }
    rows = {
        name: {"label": LABELS[name], **asdict(ood_metrics(*own)), "id_accuracy": 0.9} for name, own in scores.items()
    }
    write_arrays(workspace.target(EXPERIMENT.evaluation("scores.h5")), SCORES, arrays, {})
    samples = {"id_test": 100, "ood_test": N_TEST}
    write_json(workspace.target(EXPERIMENT.evaluation("metrics.json")), {**rows, "samples": samples})
