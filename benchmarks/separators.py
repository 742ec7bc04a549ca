"""Which separator finds the outliers in the wild data, and what does SAL learn from them?

    python benchmarks/separators.py FOLDER --real DATA --weights resnet20-cifar10.safetensors
        [--embeddings VECTORS] [--seeds 5] [--part main calibration pi drift frozen embedded sal]
        [--ood SET …] [--row ROW …] [--show] [--figure FILE]

Every cell (a part, an OOD set, a seed, …) is one file FOLDER/PART/CELL.json; what is there is not computed again, so a
run that was stopped goes on. `--show` prints the tables of what is there.

main, calibration (its size), pi, drift (all wild data changed): a ResNet-20 trained on CIFAR-10's training set
(akamaster's names). DATA has cifar10/{train,test}/CLASS/*.png, FashionMNIST/raw and MNIST/raw. Calibration, wild and
test ID samples are all of CIFAR-10's test set, which the network has not seen: 2,000 for calibration, 5,400 + 600
outliers wild, 2,600 for tests. OOD sets: Fashion-MNIST, MNIST, patches of scikit-learn's two photographs, training
images with their tiles shuffled (jigsaw), means of two training images (blends). Features are extracted once.
sal: the same network, fine-tuned in 100 steps (in bfloat16) with the candidates of τ, of auto, of auto from a random
OOD head, and with the true outliers; `--row` takes some of them.
frozen: VECTORS has cifar-CLASS.npy and others, one vector per row. Five classes (other ones for each seed) are ID, the
other five are near OOD, every other file is far OOD. Linear heads, fitted to the end.
embedded: digits 0–7 against 8–9 and photo-patches with salcli's own pipeline and its params.yaml.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageFilter
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from salcli.engine.batches import Rows
from salcli.engine.linear_heads import Examples, FullFit
from salcli.methods.base import Head, Known
from salcli.methods.combined import blend, committee_scores, learn, members, ranks_by_content, tau_name, temperatures
from salcli.methods.sal import (
    BLEND,
    COMMITTEE,
    LEARNED,
    PREFERRED,
    TAU,
    fit_head,
    labeled_gradients,
    tau,
    unlabeled_gradients,
)
from salcli.models.network import Classifier, NetworkSpec, OodClassifier
from salcli.params.schema import Params, load_params
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.progress import Silent
from salcli.sal.filter_verdict import verdict
from salcli.sal.gradients import Representation
from salcli.sal.metrics import ood_metrics
from salcli.sal.objective import sal_objective
from salcli.sal.outlier_share import best_bin, estimated_share
from salcli.sal.score_choice import choose_score, partial_excess
from salcli.sal.separation import score_threshold, separation_errors
from salcli.store.files import read_header
from salcli.store.formats import read_wild_truth, write_candidates
from salcli.store.layout import Workspace

OOD = ("fashion-mnist", "jigsaw", "mnist", "photo-patches", "blends")
N_TEST_ID, N_OOD = 2600, 6000
PARAMS = Path(__file__).parent.parent / "params.yaml"
CPU = torch.device("cpu")
TRUTH, AUTO, RANDOM_HEAD = "truth", "auto", "auto-random-head"
N_TUNED = 2  # seeds that the blend was tuned on
N_STEPS, N_BATCH = 100, 64  # of fine-tuning; ID samples and as many candidates in a step
FROZEN = ((400, 0.1), (100, 0.1), (400, 0.02))  # calibration samples, π
PARTS = ("main", "calibration", "pi", "drift", "frozen", "embedded", "sal")
NUMBERS = ("err_in", "err_out", "precision", "estimated_precision", "auroc", "fpr95", "sal_fpr95", "pi_hat")


# -- images and the network


class Block(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.pad = (n_out - n_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.pad:  # a shortcut without parameters: every second pixel, zero channels
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return functional.relu(y + x)


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, width = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), 16
        for i, n_out in enumerate((16, 32, 64), start=1):
            first = Block(width, n_out, 1 if n_out == width else 2)
            setattr(self, f"layer{i}", nn.Sequential(first, Block(n_out, n_out, 1), Block(n_out, n_out, 1)))
            width = n_out
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Features of uint8 images (n, H, W, 3)."""
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        x = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        return x.mean((2, 3))


def folder(path: Path) -> tuple[np.ndarray, np.ndarray]:
    files = sorted(path.glob("*/*.png"))
    classes = sorted({file.parent.name for file in files})
    labels = np.array([classes.index(file.parent.name) for file in files])
    return np.stack([np.asarray(Image.open(file)) for file in files]), labels


def gray(path: Path) -> np.ndarray:
    content = path.read_bytes()
    _, n, height, width = struct.unpack(">IIII", content[:16])
    images = np.frombuffer(content[16:], np.uint8).reshape(n, height, width)[:N_OOD]
    return each(lambda image: image.resize((32, 32), Image.Resampling.BILINEAR).convert("RGB"), images)


def each(change: Callable[[Image.Image], Image.Image], images: np.ndarray) -> np.ndarray:
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in images])


def photo_patches() -> np.ndarray:
    from sklearn.datasets import load_sample_images

    rng, photos, found = np.random.default_rng(0), load_sample_images().images, []
    for _ in range(N_OOD):
        photo, size = Image.fromarray(photos[rng.integers(2)]), int(rng.integers(32, 160))
        x, y = int(rng.integers(photo.width - size)), int(rng.integers(photo.height - size))
        patch = photo.crop((x, y, x + size, y + size)).resize((32, 32), Image.Resampling.BOX)
        found.append(np.asarray(patch))
    return np.stack(found)


def jigsaw(images: np.ndarray) -> np.ndarray:
    rng, found = np.random.default_rng(0), []
    for image in images:
        tiles = image.reshape(4, 8, 4, 8, 3).transpose(0, 2, 1, 3, 4).reshape(16, 8, 8, 3)[rng.permutation(16)]
        found.append(tiles.reshape(4, 4, 8, 8, 3).transpose(0, 2, 1, 3, 4).reshape(32, 32, 3))
    return np.stack(found)


def jpeg(quality: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(image: Image.Image) -> Image.Image:
        content = io.BytesIO()
        image.save(content, "JPEG", quality=quality)
        return Image.open(content)

    return lambda images: each(change, images)


DRIFTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "jpeg90": jpeg(90),
    "jpeg60": jpeg(60),
    "bright": lambda images: (images * 0.85).astype(np.uint8),
    "blur": lambda images: each(lambda image: image.filter(ImageFilter.GaussianBlur(0.6)), images),
    "noise": lambda images: np.clip(images + np.random.default_rng(0).normal(0, 8, images.shape), 0, 255).astype(
        np.uint8
    ),
}


def extract_features(real: Path, weights: Path, into: Path, *, with_images: bool, with_drift: bool) -> None:
    """Features, logits and labels of every set."""
    wanted = ["head", "cifar10-train", "cifar10-test", *OOD]
    drifts = DRIFTS if with_drift else {}
    wanted += [f"{name}.{drift}" for name in ("cifar10-test", *OOD[:2], "photo-patches") for drift in drifts]
    stored = ["cifar10-train", "cifar10-test", *OOD] if with_images else []
    if all((into / f"{name}.npz").exists() for name in wanted) and all(
        (into / f"images-{name}.npy").exists() for name in stored
    ):
        return
    into.mkdir(parents=True, exist_ok=True)
    network = ResNet20().eval()
    network.load_state_dict(load_file(weights))

    @torch.inference_mode()
    def save(name: str, images: np.ndarray, labels: np.ndarray | None = None) -> None:
        if name in stored:
            np.save(into / f"images-{name}.npy", images)
        if (into / f"{name}.npz").exists():
            return
        feature = torch.cat([network(torch.tensor(images[i : i + 250])) for i in range(0, len(images), 250)])
        logits = network.linear(feature)
        label = logits.argmax(1).numpy() if labels is None else labels
        np.savez(into / f"{name}.npz", feature=feature.numpy(), logits=logits.numpy(), label=label)
        print(f"{name}: {len(images):,} images", flush=True)

    np.savez(
        into / "head.npz", weight=network.linear.weight.detach().numpy(), bias=network.linear.bias.detach().numpy()
    )
    test, test_labels = folder(real / "cifar10/test")
    train, labels = folder(real / "cifar10/train")
    order = np.random.default_rng(0).permutation(len(train))
    a, b, known = order[6000:12000], order[12000:18000], order[20000:40000]
    b = np.where(labels[a] == labels[b], np.roll(b, 1), b)
    sets = {
        "fashion-mnist": gray(real / "FashionMNIST/raw/t10k-images-idx3-ubyte"),
        "mnist": gray(real / "MNIST/raw/t10k-images-idx3-ubyte"),
        "photo-patches": photo_patches(),
        "jigsaw": jigsaw(train[order[:N_OOD]]),
        "blends": ((train[a].astype(int) + train[b]) // 2).astype(np.uint8),
    }
    save("cifar10-test", test, test_labels)
    save("cifar10-train", train[known], labels[known])
    for name, images in sets.items():
        save(name, images)
    for drift, change in drifts.items():
        save(f"cifar10-test.{drift}", change(test), test_labels)
        for name in (*OOD[:2], "photo-patches"):
            save(f"{name}.{drift}", change(sets[name][:3000]))


# -- one deal: every separator, and what it is as a detector of test samples


@dataclass(frozen=True)
class Deal:
    """Samples that a filter sees, and those that it is tested on. `others` are their post-hoc outlier scores."""

    train: Representation
    calibration: Representation
    wild: Representation
    is_ood: Tensor
    id_test: Representation
    ood_test: Representation
    others: list[dict[str, Tensor]]  # of wild, calibration, id_test, ood_test
    fitted: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None  # SAL's scores of the test samples

    @property
    def sources(self) -> list[Representation]:
        return [self.wild, self.calibration, self.id_test, self.ood_test]


def scored(train: Representation, head: Head, sources: list[Representation], params: Params, **known: Any) -> list:
    """Outlier scores by every post-hoc score that works here."""
    found: list[dict[str, Tensor]] = [{} for _ in sources]
    for name, method in members(params).items():
        method.fit(Known(head, train, **known))
        for own, source in zip(found, sources, strict=True):
            own[name] = -method.scores(source)
    return found


def with_taus(deal: Deal, params: Params) -> list[dict[str, Tensor]]:
    """The outlier scores of all sources, by post-hoc scores and τ at its temperatures."""
    by_side = [dict(own) for own in deal.others]
    for temperature in temperatures(params.filter):
        own = params.filter.softened(temperature)
        wild, *rest = (unlabeled_gradients(x, own, 0, "") for x in deal.sources)
        found = tau(wild, [wild, *rest], labeled_gradients(deal.train, own), deal.wild.n_classes, own)
        for side, values in zip(by_side, found, strict=True):
            side[tau_name(temperature)] = values.nan_to_num(0.0)
    return by_side


def rows_of(deal: Deal, params: Params, seed: int) -> Iterator[dict[str, Any]]:
    by_side = with_taus(deal, params)
    scores = {name: (by_side[0][name], by_side[1][name]) for name in by_side[0]}
    learned = learn(deal.wild, deal.calibration, scores, seed)
    scores |= {
        COMMITTEE: committee_scores(scores),
        LEARNED: (learned.wild, learned.calibration),
        BLEND: blend(deal.wild, deal.calibration, scores, seed),
    }
    ranks = ranks_by_content(deal.wild, seed), ranks_by_content(deal.calibration, seed)
    chosen, trials = choose_score(scores, ranks, 0.95, PREFERRED, np.random.default_rng(seed))
    tests = [(deal.id_test, by_side[2]), (deal.ood_test, by_side[3])]
    for name, (in_the_wild, held_out) in {**scores, "auto": scores[chosen]}.items():
        threshold = score_threshold(held_out, 0.95)
        is_candidate = in_the_wild > threshold
        as_detector = []
        if name in by_side[2] or name in (COMMITTEE, LEARNED):
            for x, side in tests:
                own_scores = {
                    COMMITTEE: learned.transforms.committee,
                    LEARNED: lambda side, x=x: learned.score(x, side),
                }
                as_detector.append(own_scores.get(name, lambda side, name=name: side[name])(side))
        found = verdict(held_out, in_the_wild, threshold)
        yield {
            "score": name,
            "chosen": chosen if name == "auto" else "",
            **vars(separation_errors(is_candidate, deal.is_ood)),
            "auroc": _auroc(in_the_wild, deal.is_ood),
            "fpr95": ood_metrics(*(-one.numpy() for one in as_detector)).fpr95 if as_detector else math.nan,
            "sal_fpr95": _after_learning(deal, is_candidate) if name in (TAU, "auto") else math.nan,
            "excess": partial_excess(held_out, in_the_wild),
            "beyond": found.beyond,
            "margin": found.margin,
            "estimated_precision": found.precision,
            "pi_hat": best_bin(held_out, in_the_wild)[0],
            "moved": found.drift,
            "flagged": sum(trial.drift > 4 for trial in trials),
        }
    yield {"score": TRUTH, "sal_fpr95": _after_learning(deal, deal.is_ood)}
    former = estimated_share({name: (scores[name][1], scores[name][0]) for name in ("msp", "knn", "sal")})
    yield {"score": "former π̂", "pi_hat": former.pi}


def _auroc(scores: Tensor, is_ood: Tensor) -> float:
    return ood_metrics(-scores[~is_ood].numpy(), -scores[is_ood].numpy()).auroc if is_ood.any() else math.nan


def _after_learning(deal: Deal, is_candidate: Tensor) -> float:
    if deal.fitted is None or not is_candidate.any():
        return math.nan
    return ood_metrics(*deal.fitted(is_candidate.numpy())).fpr95


# -- the ResNet-20


class Bank:
    """All sets, with the post-hoc scores of all their samples, which depend on the training data alone."""

    def __init__(self, features: Path, params: Params) -> None:
        self.features, self.params = features, params

    @cached_property
    def head(self) -> Head:
        stored = np.load(self.features / "head.npz")
        return Head(*(torch.from_numpy(stored[name]).double() for name in ("weight", "bias")))

    @cached_property
    def methods(self) -> dict[str, Any]:
        found = members(self.params)
        for method in found.values():
            method.fit(Known(self.head, self.representation("cifar10-train")))
        return found

    @cache  # noqa: B019
    def representation(self, name: str) -> Representation:
        content = np.load(self.features / f"{name}.npz")
        return Representation(*(torch.from_numpy(content[key]) for key in ("feature", "logits", "label")))

    @cache  # noqa: B019
    def scores(self, name: str) -> dict[str, Tensor]:
        path = self.features / f"{name}.scores.npz"
        if not path.exists():
            x = self.representation(name)
            np.savez(path, **{key: -method.scores(x).numpy() for key, method in self.methods.items()})
        return {key: torch.from_numpy(values) for key, values in np.load(path).items()}

    def take(self, *parts: tuple[str, np.ndarray]) -> tuple[Representation, dict[str, Tensor]]:
        """Some samples of some sets; the labels are predicted ones."""
        rows = [(self.representation(name), self.scores(name), torch.from_numpy(index)) for name, index in parts]
        feature, logits = (torch.cat([getattr(x, key)[i] for x, _, i in rows]) for key in ("feature", "logits"))
        found = {key: torch.cat([scores[key][i] for _, scores, i in rows]) for key in members(self.params)}
        return Representation(feature, logits, logits.argmax(1)), found

    def parts(self, ood: str, seed: int, n_calibration: int, pi: float, drift: str) -> dict[str, list]:
        """Which samples of which sets are what."""
        changed = f".{drift}" if drift else ""
        order = np.random.default_rng([seed, 7]).permutation(10_000)
        n_ood = 600 if pi <= 0.1 else 1800
        n_id = min(5400, round(n_ood * (1 - pi) / pi)) if pi else 5400
        n_ood = round(n_id * pi / (1 - pi))
        others = np.random.default_rng([seed, 8]).permutation(3000 if drift else N_OOD)
        id_wild = order[2000 : 2000 + n_id]
        return {
            "wild": [(f"cifar10-test{changed}", id_wild), (f"{ood}{changed}", others[:n_ood])],
            "calibration": [("cifar10-test", order[:n_calibration])],
            "id_test": [("cifar10-test", order[-N_TEST_ID:])],
            "ood_test": [(f"{ood}{changed}", others[2000:])],
        }

    def deal(self, ood: str, seed: int, n_calibration: int = 2000, pi: float = 0.1, drift: str = "") -> Deal:
        parts = self.parts(ood, seed, n_calibration, pi, drift)
        taken = {name: self.take(*own) for name, own in parts.items()}
        n_id = len(parts["wild"][0][1])
        return Deal(
            train=self.representation("cifar10-train"),
            is_ood=torch.arange(len(taken["wild"][0])) >= n_id,
            others=[taken[name][1] for name in ("wild", "calibration", "id_test", "ood_test")],
            **{name: own[0] for name, own in taken.items()},
        )


def fine_tuned(
    bank: Bank,
    weights: Path,
    seed: int,
    parts: dict[str, list],
    is_candidate: np.ndarray,
    *sides: str,
    head: str = "fitted",
) -> list[np.ndarray]:
    """Scores of some parts by SAL's OOD classifier after 100 steps from the ResNet-20, as salcli trains it."""
    names = {"cifar10-train", *(name for own in parts.values() for name, _ in own)}
    images = {name: np.load(bank.features / f"images-{name}.npy", mmap_mode="r") for name in names}
    labels = bank.representation("cifar10-train").label
    wild = np.concatenate([images[name][index] for name, index in parts["wild"]])[is_candidate]
    torch.manual_seed(seed)
    network, ood_head = ResNet20().train(), nn.Linear(64, 1)
    network.load_state_dict(load_file(weights))
    if head == "fitted":
        outliers = bank.take(*parts["wild"])[0].feature[torch.from_numpy(is_candidate)]
        fit_head(ood_head, bank.representation("cifar10-train").feature, outliers, CPU)
    both = [*network.parameters(), *ood_head.parameters()]
    optimizer = torch.optim.SGD(both, lr=0.001, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N_STEPS)
    rng = np.random.default_rng([seed, 9])
    for _ in range(N_STEPS):
        known, outliers = rng.integers(len(labels), size=N_BATCH), rng.integers(len(wild), size=N_BATCH)
        batch = np.concatenate([images["cifar10-train"][np.sort(known)], wild[outliers]])
        with torch.autocast("cpu", torch.bfloat16):  # nearly twice as fast
            feature = network(torch.from_numpy(batch))
        feature = feature.float()
        logits, own = network.linear(feature[:N_BATCH]), ood_head(feature).squeeze(1)
        loss = sal_objective(logits, labels[np.sort(known)], own[:N_BATCH], own[N_BATCH:], loss_weight=10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()
    scores = []
    for name in sides:
        chosen = np.concatenate([images[source][index] for source, index in parts[name]])[:N_TEST_ID]
        with torch.inference_mode():
            own = [ood_head(network(torch.from_numpy(chosen[i : i + 250]))) for i in range(0, len(chosen), 250)]
        scores.append(torch.cat(own).squeeze(1).double().numpy())
    return scores


def sal_row(bank: Bank, weights: Path, ood: str, seed: int, row: str) -> dict[str, Any]:
    """SAL with the candidates of τ (and a random head, as in the paper), of auto, or with the true outliers."""
    parts, deal = bank.parts(ood, seed, 2000, 0.1, ""), bank.deal(ood, seed)
    is_candidate, head = deal.is_ood, "random" if row in (TAU, RANDOM_HEAD) else "fitted"
    if row != TRUTH:
        by_side = with_taus(deal, bank.params)
        scores = {name: (by_side[0][name], by_side[1][name]) for name in by_side[0]}
        of_wild, held_out = scores[TAU] if row == TAU else blend(deal.wild, deal.calibration, scores, seed)
        is_candidate = of_wild > score_threshold(held_out, 0.95)
    own = fine_tuned(bank, weights, seed, parts, is_candidate.numpy(), "id_test", "ood_test", head=head)
    return {"score": row, "sal_fpr95": ood_metrics(*own).fpr95}


# -- frozen features


def frozen_deal(folder: Path, ood: str, seed: int, n_calibration: int, pi: float, params: Params) -> Deal:
    """Five classes are ID, which ones depends on the seed; `near` are the other five."""
    rng, files = np.random.default_rng([seed, 11]), sorted(folder.glob("cifar-*.npy"))
    order = rng.permutation(len(files))
    classes = [np.load(files[i]).astype(np.float32) for i in order]
    vectors, labels = np.concatenate(classes[:5]), np.repeat(np.arange(5), [len(one) for one in classes[:5]])
    shuffled = rng.permutation(len(vectors))
    vectors, labels = vectors[shuffled], torch.from_numpy(labels[shuffled])
    others = np.concatenate(classes[5:]) if ood == "near" else np.load(folder / f"{ood}.npy").astype(np.float32)
    others = others[rng.permutation(len(others))]
    train, calibration, wild_id, id_test = np.split(vectors, [800, 1200, 2700])
    n_ood = round(len(wild_id) * pi / (1 - pi))
    wild, ood_test = np.concatenate([wild_id, others[:n_ood]]), others[170:]
    mean, std = train.mean(axis=0), train.std(axis=0)
    std[std == 0] = 1
    network = Classifier(NetworkSpec("linear", 5, tuple(map(float, mean)), tuple(map(float, std))))
    examples = Examples.of_classes(Rows((train,), np.arange(len(train))), labels[: len(train)])
    FullFit(network.head, network.features, examples, "auto", seed, CPU).run(Silent())

    @torch.no_grad()
    def representation(x: np.ndarray, label: Tensor | None = None) -> Representation:
        feature, logits = network.features_and_logits(torch.from_numpy(x))
        return Representation(feature, logits, logits.argmax(1) if label is None else label)

    def fitted(is_candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The OOD head, fitted to the end."""
        both = np.concatenate([train, wild[is_candidate]])
        is_id = np.arange(len(both)) < len(train)
        own = OodClassifier.on_top_of(network)
        sides = Examples.of_two_sides(Rows((both,), np.arange(len(both))), is_id)
        FullFit(own.ood_head, own.features, sides, "auto", seed, CPU).run(Silent())
        with torch.no_grad():
            return tuple(own(torch.from_numpy(x))[1].double().numpy() for x in (id_test, ood_test))  # type: ignore[return-value]

    known = representation(train, labels[: len(train)])
    sources = [representation(x) for x in (wild, calibration[:n_calibration], id_test, ood_test)]
    is_ood = torch.arange(len(wild)) >= len(wild_id)
    head = Head.of(network.head)
    return Deal(
        known,
        sources[1],
        sources[0],
        is_ood,
        sources[2],
        sources[3],
        scored(known, head, sources, params, as_given=network.as_given),
        fitted,
    )


# -- the embedded sets


def embedded_rows(folder: Path, ood: str, seed: int) -> Iterator[dict[str, Any]]:
    """salcli's own pipeline: the rows of its table, and the candidates of τ, auto and the truth."""
    (folder / "project").mkdir(parents=True, exist_ok=True)
    workspace = Workspace(folder / "project")
    names = ["sal", "sal-auto", "sal-truth"]
    changes = {
        "seeds": [seed],
        "data.ood": [ood],
        "rivals": [],
        "variants": names,
        "variant": {
            "sal": {},
            "sal-auto": {"filter": {"score": "auto"}, "train_ood": {"head": "fitted"}},
            "sal-truth": {"train_ood": {"head": "fitted"}},
        },
    }
    (folder / "project/params.yaml").write_text(PARAMS.read_text())
    params = load_params(folder / "project/params.yaml", changes)[0]
    (experiment, *_) = params.experiments()
    for name in (params.data.id, ood):
        prepare.prepare_set(workspace, params, name)
    prepare.prepare_split(workspace, params.data, experiment)
    train_id.run(workspace, params, experiment)
    extract.run_id(workspace, params, experiment)
    prepare.prepare_wild(workspace, params.data, experiment)
    extract.run_wild(workspace, params, experiment)
    for name in names:
        own = experiment.with_variant(name)
        found = filter_stage.run(workspace, params, own)
        if name == "sal-truth":
            index = np.flatnonzero(read_wild_truth(workspace.find(experiment.truth)))
            write_candidates(
                found.written[0],
                replace(found.candidates, index=index),
                read_header(workspace.find(own.candidates)).about,
            )
        elif found.trials:
            for trial in found.trials:
                errors = vars(trial.errors) if trial.errors else {}
                yield {"score": trial.score, **errors, "auroc": trial.auroc, "excess": trial.excess}
        train_ood.run(workspace, params, own)
        if name != "sal-truth" and found.errors:
            yield {
                "score": {"sal-auto": "auto"}.get(name, "sal (variant)"),
                "chosen": found.candidates.score_name,
                **vars(found.errors),
                "estimated_precision": found.verdict.precision,
            }
    for name, metrics in evaluate.run(workspace, params, experiment).metrics.items():
        if metrics:
            kind = "sal_fpr95" if name in names else "fpr95"
            yield {"score": {"sal": TAU, "sal-auto": "auto", "sal-truth": TRUTH}.get(name, name), kind: metrics.fpr95}


# -- parts


def cases(
    part: str, n_seeds: int, embeddings: Path | None, sets: list[str], rows: list[str]
) -> Iterator[dict[str, Any]]:
    far = (
        sorted(one.stem for one in embeddings.glob("*.npy") if not one.stem.startswith("cifar-")) if embeddings else []
    )
    for seed in range(n_seeds):
        if part == "frozen":
            for ood in ("near", *far) if embeddings else ():
                yield from ({"ood": ood, "seed": seed, "n_calibration": n, "pi": pi} for n, pi in FROZEN)
        if part == "embedded":
            yield from ({"ood": ood, "seed": seed} for ood in ("digits-8-9", "photo-patches"))
        for ood in sets:
            usual = {"ood": ood, "seed": seed}
            if part == "main":
                yield usual
            if part == "sal":
                yield from ({**usual, "row": row} for row in rows)
            if part == "calibration":
                yield from ({**usual, "n_calibration": n} for n in (100, 300, 1000))
                yield from ({**usual, "n_calibration": n, "pi": 0.0} for n in (100, 300) if ood == OOD[0])
            if part == "pi":
                yield from ({**usual, "pi": pi} for pi in (0.01, 0.05, 0.3, 0.5))
            if part == "drift" and ood in (*OOD[:2], "photo-patches"):
                yield from ({**usual, "drift": drift} for drift in DRIFTS)


def arguments(doc: str | None, parts: tuple[str, ...]) -> argparse.ArgumentParser:
    """Of a benchmark whose cells are files; benchmarks/estimates.py takes the same."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path, help="the folder of the data sets")
    parser.add_argument("--weights", type=Path, help="of the ResNet-20")
    parser.add_argument("--embeddings", type=Path, help="the folder of the frozen features")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ood", nargs="+", default=list(OOD), choices=OOD, help="of the parts with the ResNet-20")
    parser.add_argument("--part", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--show", action="store_true", help="print the tables of what is there")
    return parser


def main() -> None:
    parser = arguments(__doc__, PARTS)
    parser.add_argument("--row", nargs="+", default=[AUTO, TAU, RANDOM_HEAD, TRUTH], help="of the part sal")
    parser.add_argument("--figure", type=Path, help="draw the main part, without the seeds that were tuned on")
    given = parser.parse_args()
    params, features = load_params(PARAMS)[0], given.folder / "features"
    if not given.show and {*given.part} - {"frozen", "embedded"}:
        extract_features(
            given.real, given.weights, features, with_images="sal" in given.part, with_drift="drift" in given.part
        )
    bank = Bank(features, params)
    for part in given.part:
        for case in [] if given.show else cases(part, given.seeds, given.embeddings, given.ood, given.row):
            path = given.folder / part / ("_".join(map(str, case.values())) + ".json")
            if path.exists():
                continue
            ood, seed = case["ood"], case["seed"]
            if part == "frozen":
                rows = rows_of(frozen_deal(given.embeddings, **case, params=params), params, seed)
            elif part == "embedded":
                rows = embedded_rows(given.folder / part, ood, seed)
            elif part == "sal":
                rows = iter([sal_row(bank, given.weights, **case)])
            else:
                rows = rows_of(bank.deal(**case), params, seed)
            content = [{**case, **row} for row in rows]
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(content, default=float))
            unfinished.rename(path)
            print(f"{part}: {case}", flush=True)
        found = [row for path in sorted((given.folder / part).glob("*.json")) for row in json.loads(path.read_text())]
        if found:
            print(tables(part, pd.DataFrame(found)))
        if found and part == "main" and given.figure:
            draw(pd.DataFrame(found), given.figure)


def draw(found: pd.DataFrame, path: Path) -> None:
    """Outliers missed on each OOD set by τ, the best single score in hindsight, and the separators."""
    from matplotlib.figure import Figure

    missed = 100 * found[found["seed"] >= N_TUNED].groupby(["score", "ood"])["err_out"].mean().unstack()[list(OOD)]
    missed.loc["best"] = missed.drop(index=[COMMITTEE, LEARNED, AUTO, BLEND], errors="ignore").min()
    rows = {TAU: "τ", "best": "best single score in hindsight", COMMITTEE: COMMITTEE, LEARNED: LEARNED, AUTO: AUTO}
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes, colors = figure.subplots(), ("C7", "C1", "C9", "C2", "C0")
    for i, (row, label) in enumerate(rows.items()):
        axes.bar(np.arange(len(OOD)) + (i - 2) * 0.16, missed.loc[row], 0.15, label=label, color=colors[i])
    axes.set_xticks(range(len(OOD)), OOD)
    axes.set_ylabel("outliers missed, %")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def tables(part: str, found: pd.DataFrame) -> str:
    """In percent, mean over seeds, and the number of seeds of each cell."""
    axis = [name for name in ("n_calibration", "pi", "drift") if name in found and part not in ("main", "sal")]
    found = found.fillna({"n_calibration": 2000, "pi": 0.1})
    numbers = [name for name in NUMBERS if name in found]
    groups = found.groupby([*axis, "score", "ood"], sort=False, dropna=False)[numbers]
    shown = [f"{part}: seeds in each cell\n{found.groupby([*axis, 'ood'], dropna=False)['seed'].nunique().to_string()}"]
    for name in numbers:
        mean = (groups.mean()[name] * 100).unstack("ood").dropna(how="all")
        shown.append(f"{part}, {name}\n{mean.round(1).to_string()}")
    return "\n\n".join(shown)


if __name__ == "__main__":
    main()
