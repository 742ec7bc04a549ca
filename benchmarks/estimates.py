"""Estimates without labels against the truth, and how good the method is that they choose.

    python benchmarks/estimates.py FOLDER [--part synthetic projects resnet20 drift] [--seeds 5 --first-seed 0] [--show]
        [--embeddings VECTORS] [--real DATA --weights resnet20-cifar10.safetensors]

The scores of each run are one file FOLDER/PART/RUN.npz; what is there is not computed again, so a run that was stopped
goes on. `--show` prints the tables of what is there.

synthetic: normal scores of five methods, 40 deals of 600 calibration and 600 held-out wild samples at π 0.1, and as
many at 0.3; draws FOLDER/estimates.png.
projects: salcli's own stages up to the detector, with detector.method: auto. The embedded sets with params.yaml,
data.wild_holdout 0.2 and SAL (auto) first; and VECTORS, cifar-CLASS.npy and FashionMNIST.npy, as `salcli init` plans
it: two classes, other ones for each seed, are near OOD, Fashion-MNIST is far.
resnet20: as in benchmarks/separators.py, with a fifth of the wild data held out. SAL is fine-tuned in 100 steps.
drift: the same without SAL, all wild images changed; knn is what stays.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from scipy.stats import norm, spearmanr
from separators import DRIFTS, PARAMS, Bank, arguments, extract_features, fine_tuned

from salcli import Detector
from salcli.detector import stage
from salcli.detector.monitor import ALPHA, judge_batch, looks_like
from salcli.methods.base import Known, PostHoc, built_in
from salcli.methods.combined import blend, members, outlier_scores, tau_name, temperatures
from salcli.methods.sal import TAU, labeled_gradients, tau, unlabeled_gradients
from salcli.params.schema import load_params
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.sal.estimates import Estimates, estimated
from salcli.sal.gradients import Representation
from salcli.sal.metrics import ID_QUANTILE, ood_metrics, threshold_that_keeps
from salcli.sal.seeding import generator
from salcli.sal.separation import score_threshold
from salcli.store.files import read_arrays
from salcli.store.layout import TEST_SCORES, Workspace

mpl.use("Agg")
import matplotlib.pyplot as plt

DISTANCES = np.array([0.3, 1.0, 1.5, 2.0, 3.0])
TRUE = {"fpr95": 1 - norm.cdf(norm.ppf(0.05) + DISTANCES), "auroc": norm.cdf(DISTANCES / np.sqrt(2))}
NAMES = {"fpr95": "FPR95", "auroc": "AUROC"}
N_DEALS, N = 40, 600
PARTS = ("synthetic", "projects", "resnet20", "drift")
HOLDOUT, CLOSE = 0.2, 3.0  # share of the wild data; points of FPR95
TESTED = ("id", "ood", "calibration", "held")  # what SAL scores, of the parts of the ResNet-20
HEADS = {"sal": "random", "sal-auto": "fitted"}  # as in params.yaml
SIDES = ("id", "ood", "calibration", "wild")
SHARES = {"train": 0.25, "calibration": 0.1, "wild": 0.45, "test": 0.2}
CHANGED = (*DRIFTS, "none")
Scores = dict[str, np.ndarray]  # of every method on every side, as METHOD/SIDE


# -- synthetic scores


def deal(rng: np.random.Generator, pi: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    n_ood = rng.binomial(N, pi)
    known, wild = (np.sqrt(0.5) * (rng.standard_normal(N) + rng.standard_normal((len(DISTANCES), N))) for _ in range(2))
    wild[:, :n_ood] -= DISTANCES[:, None]
    return {str(i): (known[i], wild[i]) for i in range(len(DISTANCES))}


def synthetic(path: Path) -> None:
    rng = np.random.default_rng(0)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for pi, colour, shift in ((0.1, "C1", -0.008), (0.3, "C0", 0.008)):
        found = [estimated(deal(rng, pi), rng, "0") for _ in range(N_DEALS)]
        told = [one for one in found if one.methods]
        best = np.mean([one.chosen == str(len(DISTANCES) - 1) for one in found])
        ranks = [spearmanr([one.methods[str(i)]["auroc"].value for i in range(5)], DISTANCES)[0] for one in told]
        print(
            f"π {pi}: {len(told)} of {N_DEALS} told; best chosen {best:.0%}; rank correlation {np.nanmean(ranks):.2f}"
        )
        for axis, (metric, truth) in zip(axes, TRUE.items(), strict=True):
            own = np.array(
                [
                    [vars(one.methods[str(i)][metric])[key] for i in range(5) for key in ("value", "low", "high")]
                    for one in told
                ]
            )
            own = 100 * own.reshape(len(told), 5, 3)
            covered = np.mean((own[..., 1] <= 100 * truth) & (100 * truth <= own[..., 2]))
            error = own[..., 0] - 100 * truth
            print(f"  {metric}: error {error.mean():.1f} ± {error.std():.1f} points; 90% intervals cover {covered:.0%}")
            x = 100 * (truth + shift)
            axis.plot(np.tile(x, len(told)), own[..., 0].ravel(), ".", color=colour, alpha=0.25, markersize=4)
            middle = np.median(own, axis=0)
            bars = np.maximum([middle[:, 0] - middle[:, 1], middle[:, 2] - middle[:, 0]], 0)
            axis.errorbar(
                x, middle[:, 0], bars, fmt="o", color=colour, capsize=3, label=f"π = {pi}, median and interval"
            )
    for axis, name in zip(axes, NAMES.values(), strict=True):
        axis.plot([0, 100], [0, 100], color="0.6", linewidth=1, zorder=0)
        axis.set(xlabel=f"true {name}, %", ylabel="estimated without labels, %", title=name, ylim=(-3, 103))
        axis.set_xlim((0, 100) if name == "FPR95" else (50, 100))
    axes[0].legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=110)


# -- whole projects


def project(folder: Path, ood: str, seed: int, embeddings: Path | None) -> Scores:
    """All stages of one experiment; the detector that auto made must be of the chosen method."""
    folder.mkdir(parents=True, exist_ok=True)
    changes: dict[str, Any] = {"seeds": [seed], "data.ood": [ood], "data.wild_holdout": HOLDOUT}
    if ood in ("near", "far"):
        assert embeddings is not None
        path, files = folder / "project/params.yaml", _vectors(folder, seed, embeddings)
        if not path.exists():
            arguments = ["--id", files["id"], "--wild", files[ood]]
            subprocess.run([sys.executable, "-m", "salcli", "init", path.parent, *arguments], check=True)
        shares = {f"data.id_shares.{name}": share for name, share in SHARES.items()}
        changes |= {"data.custom": files, "data.pi": [0.1], **shares}
    else:
        (folder / "project").mkdir(exist_ok=True)
        path = folder / "project/params.yaml"
        path.write_text(PARAMS.read_text())
        changes |= {"variants": ["sal-auto", "sal"], "detector.method": "auto"}  # as `salcli init` plans them
    params, workspace = load_params(path, changes)[0], Workspace(path.parent)
    (experiment, *_) = experiments = params.experiments()
    for name in (params.data.id, ood):
        prepare.prepare_set(workspace, params, name)
    prepare.prepare_split(workspace, params.data, experiment)
    train_id.run(workspace, params, experiment)
    extract.run_id(workspace, params, experiment)
    prepare.prepare_wild(workspace, params.data, experiment)
    extract.run_wild(workspace, params, experiment)
    for one in experiments:
        filter_stage.run(workspace, params, one)
        train_ood.run(workspace, params, one)
    for rival in params.rivals:
        train_ood.run(workspace, params, experiment, rival=rival)
    found = evaluate.run(workspace, params, experiment)
    made = stage.run(workspace, params, experiment)
    name = Detector.load(made.written[0]).name
    print(f"{ood}, seed {seed}: {name}: {made.reason}", flush=True)
    arrays = read_arrays(workspace.find(experiment.evaluation("scores.h5")), TEST_SCORES)
    assert found.estimates is not None
    return {**arrays, "detector": np.array(name), "incumbent": np.array(params.incumbent)}


def _vectors(folder: Path, seed: int, embeddings: Path) -> dict[str, str]:
    """Eight classes are ID, two are near OOD."""
    files = sorted(embeddings.glob("cifar-*.npy"))
    order = [files[i] for i in np.random.default_rng([seed, 21]).permutation(len(files))]
    near, known = order[:2], order[2:]
    load = [np.load(file).astype(np.float32) for file in known]
    labels = np.repeat([file.stem.removeprefix("cifar-") for file in known], [len(one) for one in load])
    np.savez(folder / "id.npz", vectors=np.concatenate(load), labels=labels)
    np.savez(folder / "near.npz", vectors=np.concatenate([np.load(file).astype(np.float32) for file in near]))
    np.savez(folder / "far.npz", vectors=np.load(embeddings / "FashionMNIST.npy").astype(np.float32))
    return {name: str(folder / f"{name}.npz") for name in ("id", "near", "far")}


# -- the ResNet-20


def resnet20(bank: Bank, weights: Path | None, ood: str, seed: int, drift: str = "", pi: float = 0.1) -> Scores:
    """Post-hoc rows, and with `weights` SAL by the candidates of τ and of the blend."""
    parts, params = bank.parts(ood, seed, 2000, pi, drift), bank.params
    held = [(name, index[: round(HOLDOUT * len(index))]) for name, index in parts["wild"]]
    parts["wild"] = [(name, index[len(one) :]) for (name, index), (_, one) in zip(parts["wild"], held, strict=True)]
    parts = {"id": parts["id_test"], "ood": parts["ood_test"], **parts, "held": held}
    sources = {name: _joined(bank, own) for name, own in parts.items()}
    sides = [sources[name] for name in ("id", "ood", "calibration", "held")]
    wild, calibration, train = sources["wild"], sources["calibration"], bank.representation("cifar10-train")
    known = Known(bank.head, train, wild, seed, calibration=calibration)
    found = {}
    for name in built_in(PostHoc):
        method = params.method(name)
        method.fit(known)
        found |= {f"{name}/{side}": method.scores(source).numpy() for side, source in zip(SIDES, sides, strict=True)}
    if weights is None:
        return found
    scores = {}
    for temperature in temperatures(params.filter):
        own = params.filter.softened(temperature)
        both = [unlabeled_gradients(source, own, seed, "") for source in (wild, calibration)]
        one, other = tau(both[0], both, labeled_gradients(train, own), wild.n_classes, own)
        scores[tau_name(temperature)] = one, other
    for name, member in members(params).items():
        one, other = outlier_scores(member, known, [wild, calibration])
        scores[name] = one, other
    separated = {"sal": scores[TAU], "sal-auto": blend(wild, calibration, scores, seed)}
    for name, (of_wild, of_calibration) in separated.items():
        is_candidate = of_wild > score_threshold(of_calibration[~of_calibration.isnan()], 0.95)
        own = fine_tuned(bank, weights, seed, parts, is_candidate.numpy(), *TESTED, head=HEADS[name])
        found |= {f"{name}/{side}": values for side, values in zip(SIDES, own, strict=True)}
    return found


def _joined(bank: Bank, parts: list[tuple[str, np.ndarray]]) -> Representation:
    rows = [(bank.representation(name), index) for name, index in parts]
    feature, logits = (np.concatenate([getattr(x, key)[i] for x, i in rows]) for key in ("feature", "logits"))
    return Representation(torch.from_numpy(feature), torch.from_numpy(logits), torch.from_numpy(logits.argmax(1)))


# -- tables


def estimates_of(scores: Scores, names: list[str], incumbent: str, ood: str, seed: int) -> Estimates:
    """As `evaluate` estimates."""
    known = built_in(PostHoc)
    learned = {name for name, one in known.items() if one.needs_wild and one.needs_calibration} | {"sal-auto"}  # type: ignore[attr-defined]
    pairs = {
        name: (scores[f"{name}/{'id' if name in learned else 'calibration'}"], scores[f"{name}/wild"]) for name in names
    }
    return estimated(pairs, generator(seed, f"estimates/{ood}"), incumbent, baseline=TAU if TAU in names else None)


def _word(calibration: np.ndarray, batch: np.ndarray) -> str:
    found = judge_batch(calibration, batch, threshold_that_keeps(calibration, ID_QUANTILE))
    return looks_like(len(batch), found, ALPHA)


def table(part: str, files: list[Path]) -> str:
    """One line for each run, and how often the chosen method is close to the best one in hindsight."""
    rows, errors, reasons = [], [], []
    for file in files:
        scores, (ood, seed, *rest) = dict(np.load(file)), file.stem.split("_")
        names = list(dict.fromkeys(key.partition("/")[0] for key in scores if "/" in key))
        incumbent = str(scores.get("incumbent", TAU if TAU in names else "knn"))
        found = estimates_of(scores, names, incumbent, ood, int(seed))
        truth = {name: ood_metrics(scores[f"{name}/id"], scores[f"{name}/ood"]) for name in names}
        fpr = {name: 100 * one.fpr95 for name, one in truth.items()}
        best = min(fpr, key=lambda name: fpr[name])
        made, chosen = str(scores.get("detector", found.chosen)), found.chosen
        excess = [ood_metrics(scores[f"{name}/calibration"], scores[f"{name}/wild"]).auroc for name in names]
        rows.append(
            {
                "ood": "_".join([ood, *rest]),
                "seed": seed,
                "SAL": fpr.get("sal", np.nan),
                "SAL (auto)": fpr.get("sal-auto", np.nan),
                "chosen": chosen if made == chosen else f"{chosen} (then: {made})",
                "its FPR95": fpr[chosen],
                "best": best,
                "its FPR95 ": fpr[best],
                "gap": fpr[chosen] - fpr[best],
                "π̂": found.pi.value,
                "rank corr.": spearmanr(excess, [one.auroc for one in truth.values()])[0],
                "told": len(found.methods),
            }
        )
        reasons.append(f"{ood} {seed} {' '.join(rest)}: {found.reason}")
        if part == "drift":
            words = Counter(_word(scores[f"{name}/calibration"], scores[f"{name}/wild"]) for name in names)
            reasons.append(f"  monitor, by the scores of each method: {dict(words)}")
        for name, own in found.methods.items():
            for metric, one in own.items():
                true = getattr(truth[name], metric)
                assert one.value is not None and one.low is not None and one.high is not None  # noqa: PT018
                errors.append((metric, 100 * (one.value - true), one.low <= true <= one.high))
    shown = pd.DataFrame(rows)
    lines = [part, shown.round(2).to_string(index=False), *reasons]
    if part != "drift":
        lines.append(f"within {CLOSE:g} points of the best row: {(shown.gap <= CLOSE).sum()} of {len(shown)} runs")
    for metric, own in pd.DataFrame(errors, columns=["metric", "error", "covered"]).groupby("metric"):
        spread = f"{own.error.mean():.1f} ± {own.error.std():.1f}"
        lines.append(f"{metric}: error {spread} points, 90% intervals cover {own.covered.mean():.0%} of {len(own)}")
    return "\n".join(lines)


def runs(part: str, given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The name of each run, and what computes its scores."""
    params = load_params(PARAMS)[0]
    bank = Bank(given.folder / "features", params)
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        if part == "projects":
            for ood in ("digits-8-9", "photo-patches", *(("near", "far") if given.embeddings else ())):
                folder = given.folder / part / f"{ood}_{seed}"
                yield f"{ood}_{seed}", partial(project, folder, ood, seed, given.embeddings)
        for ood in given.ood if part == "resnet20" else ():
            yield f"{ood}_{seed}", partial(resnet20, bank, given.weights, ood, seed)
        for drift in CHANGED if part == "drift" else ():
            changed = "" if drift == "none" else drift
            for ood, pi in (("fashion-mnist", 0.1), ("fashion-mnist", 0.0)):
                yield f"{ood}_{seed}_{drift}_{pi}", partial(resnet20, bank, None, ood, seed, changed, pi)


def main() -> None:
    parser = arguments(__doc__, PARTS)
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if not given.show and {"resnet20", "drift"} & {*given.part}:
        with_images, with_drift = "resnet20" in given.part, "drift" in given.part
        extract_features(
            given.real, given.weights, given.folder / "features", with_images=with_images, with_drift=with_drift
        )
    for part in given.part:
        if part == "synthetic":
            synthetic(given.folder / "estimates.png")
            continue
        for name, scores in () if given.show else runs(part, given):
            path = given.folder / part / f"{name}.npz"
            if not path.exists():
                found = scores()
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_suffix(".part")
                with unfinished.open("wb") as file:
                    np.savez(file, **found)
                unfinished.rename(path)
                print(f"{part}: {name}", flush=True)
        if files := sorted((given.folder / part).glob("*.npz")):
            print(table(part, files))


if __name__ == "__main__":
    main()
