"""Deals: ID and OOD samples of a case, dealt into what a method may see and what it is tested on. Plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from salcli.methods.base import Head, Known, PostHoc, built_in
from salcli.params.schema import load_params
from salcli.sal.gradients import Representation

PARAMS = Path(__file__).parent.parent.parent / "params.yaml"


@dataclass(frozen=True)
class Part:
    """Some samples: features, logits of the ID classifier, labels (of training data) and outlier scores by name."""

    feature: Tensor
    logits: Tensor
    label: Tensor
    scores: dict[str, Tensor]

    def take(self, rows: NDArray[np.int64]) -> Part:
        index = torch.from_numpy(rows)
        scores = {name: values[index] for name, values in self.scores.items()}
        return Part(self.feature[index], self.logits[index], self.label[index], scores)

    def with_others(self, other: Part) -> Part:
        scores = {name: torch.cat([values, other.scores[name]]) for name, values in self.scores.items()}
        both = ((getattr(self, name), getattr(other, name)) for name in ("feature", "logits", "label"))
        return Part(*(torch.cat(pair) for pair in both), scores)

    def columns(self, names: tuple[str, ...]) -> Tensor:
        return torch.stack([self.scores[name] for name in names], dim=1)


@dataclass(frozen=True)
class Deal:
    frozen: bool  # whether the features have not been trained on the ID training data
    train: Part
    calibration: Part
    wild: Part
    is_ood: NDArray[np.bool_]  # of the wild samples; for diagnosis alone
    id_test: Part
    ood_test: Part


def post_hoc_scores(head: Head, train: Representation, sides: list[Representation]) -> list[dict[str, Tensor]]:
    """Outlier scores by salcli's post-hoc methods. The only function that knows their interface."""
    found: list[dict[str, Tensor]] = [{} for _ in sides]
    params, known = load_params(PARAMS)[0], Known(head, train)
    for name in (name for name, own in built_in(PostHoc).items() if not own.needs_wild):
        method = params.method(name)
        method.fit(known)
        for own, side in zip(found, sides, strict=True):
            own[name] = method.scores(side).double()
    return found


def logistic_head(feature: NDArray, label: NDArray, strength: float = 0.01) -> tuple[Head, NDArray, NDArray]:
    """A multinomial logistic regression on standardized vectors, and their mean and std."""
    from sklearn.linear_model import LogisticRegression

    mean, std = feature.mean(0), feature.std(0) + 1e-6
    model = LogisticRegression(C=strength, max_iter=200).fit((feature - mean) / std, label)
    weight, bias = model.coef_, model.intercept_
    if len(weight) == 1:
        weight, bias = np.concatenate([-weight / 2, weight / 2]), np.r_[-bias / 2, bias / 2]
    return Head(torch.from_numpy(weight).double(), torch.from_numpy(bias).double()), mean, std


def scored(head: Head, train: tuple[NDArray, NDArray], *features: NDArray) -> list[Part]:
    """The training data and some other sets, with their logits and, but for the training data, outlier scores."""

    def representation(feature: NDArray) -> Representation:
        own = torch.from_numpy(feature).float()
        logits = head.logits(own).float()
        return Representation(own, logits, logits.argmax(1))

    known = replace(representation(train[0]), label=torch.from_numpy(train[1]))
    sides = [representation(feature) for feature in features]
    scores = [{}, *post_hoc_scores(head, known, sides)]
    return [Part(x.feature, x.logits, x.label, own) for x, own in zip([known, *sides], scores, strict=True)]


def dealt(
    train: Part, known: Part, other: Part, sizes: tuple[int, int, int], n_other_wild: int, frozen: bool, pi: float
) -> Deal:
    """Calibration, wild and test ID samples are the first, second and last of `known`, outliers are of `other`."""
    n_calibration, n_wild, n_test = sizes
    n_ood = round(n_wild * pi / (1 - pi))
    if n_ood > n_other_wild:  # fewer ID samples then
        n_ood, n_wild = n_other_wild, round(n_other_wild * (1 - pi) / pi)
    order = np.random.default_rng(0).permutation(n_wild + n_ood)
    wild = known.take(np.arange(n_calibration, n_calibration + n_wild)).with_others(other.take(np.arange(n_ood)))
    n, n_other = len(known.logits), len(other.logits)
    return Deal(
        frozen=frozen,
        train=train,
        calibration=known.take(np.arange(n_calibration)),
        wild=wild.take(order),
        is_ood=order >= n_wild,
        id_test=known.take(np.arange(n - n_test, n)),
        ood_test=other.take(np.arange(n_other_wild, n_other)),
    )


# -- cases

Case = Callable[[Path, int], Callable[[float], Deal]]  # (cache, seed) → (π → a deal)


def stored(path: Path) -> tuple[NDArray, NDArray]:
    content = np.load(path)
    return content["feature"], content["label"]


def resnet(ood: str, n_calibration: int = 2000) -> Case:
    """CIFAR-10 and its public ResNet-20: calibration, wild and test ID samples are all of the official test set."""

    def deal(cache: Path, seed: int) -> Callable[[float], Deal]:
        train, known, other = (resnet_part(cache, name) for name in ("train", "test", ood))
        rng = np.random.default_rng([seed, 7])
        known, other = (one.take(rng.permutation(len(one.logits))) for one in (known, other))
        return partial(dealt, train, known, other, (n_calibration, 5400, 2600), 1200, False)

    return deal


def resnet_part(cache: Path, name: str) -> Part:
    """A set with its scores, which are computed once because the training data are always the same."""
    path = cache / f"resnet-{name}.scores.npz"
    if not path.exists():
        content = np.load(cache / "resnet-head.npz")
        head = Head(*(torch.from_numpy(content[key]).double() for key in ("weight", "bias")))
        train, part = scored(head, stored(cache / "resnet-train.npz"), stored(cache / f"resnet-{name}.npz")[0])
        part = train if name == "train" else part
        np.savez(path, feature=part.feature, logits=part.logits, label=part.label, **part.scores)
    content = {key: torch.from_numpy(values) for key, values in np.load(path).items()}
    return Part(*(content.pop(key) for key in ("feature", "logits", "label")), content)


def vectors(
    name: str, ood: str, hidden: Callable[[list[str], np.random.Generator], list[int]], sizes: tuple[float, ...]
) -> Case:
    """Frozen vectors with some hidden classes: these are OOD, or another set is. Sizes are shares of the ID vectors."""

    def deal(cache: Path, seed: int) -> Callable[[float], Deal]:
        feature, label = stored(cache / f"{name}.npz")
        names = np.load(cache / f"{name}.npz").get("names", np.array([str(i) for i in range(label.max() + 1)]))
        rng = np.random.default_rng([seed, 11])
        out = hidden([*names], rng)
        is_id = ~np.isin(label, out)
        order = rng.permutation(np.flatnonzero(is_id))
        others = feature[~is_id] if ood == "near" else stored(cache / f"{ood}.npz")[0]
        others = others[rng.permutation(len(others))]
        n_train, n_calibration, n_wild, n_test = (round(share * len(order)) for share in sizes)
        used = np.unique(label[order[:n_train]], return_inverse=True)[1]
        head, mean, std = logistic_head(feature[order[:n_train]], used)
        train = ((feature[order[:n_train]] - mean) / std, used)
        parts = scored(head, train, (feature[order[n_train:]] - mean) / std, (others - mean) / std)
        return partial(dealt, *parts, (n_calibration, n_wild, n_test), len(others) // 2, True)

    return deal


def digits(out: tuple[int, int], ood: str, n_calibration: int = 115) -> Case:
    """scikit-learn's 8×8 digits and a small network, as in salcli's demo: 459 training, 115 calibration samples."""

    def deal(cache: Path, seed: int) -> Callable[[float], Deal]:
        feature, label, weight, bias, patches, order = _digit_features(cache, out, seed)
        head = Head(torch.from_numpy(weight).double(), torch.from_numpy(bias).double())
        is_id = ~np.isin(label, out)
        classes = np.unique(label[is_id], return_inverse=True)[1]
        rows, n = np.flatnonzero(is_id), int(is_id.sum())
        n_train, sizes = round(0.32 * n), (n_calibration, round(0.4 * n), round(0.2 * n))
        train = feature[rows[order[:n_train]]], classes[order[:n_train]]
        rng = np.random.default_rng([seed, 13])
        others = feature[~is_id] if ood == "near" else patches  # the last 30% are of other parts of the photographs
        n_wild_ood = round(0.7 * len(others))
        if ood == "near":
            others = rng.permutation(others)
        parts = scored(head, train, feature[rows[order[n_train:]]], others)
        return partial(dealt, *parts, sizes, n_wild_ood, False)

    return deal


def _digit_features(cache: Path, out: tuple[int, int], seed: int) -> tuple[NDArray, ...]:
    """Features of all digits and photo-patches by a network trained on a third of the ID digits."""
    from sklearn.datasets import load_digits

    from salcli.data.readers import photo_patches
    from salcli.models.backbones import SmallCnn

    path = cache / f"digits-{out[0]}{out[1]}-{seed}.npz"
    keys = ("feature", "label", "weight", "bias", "patches", "order")
    if not path.exists():
        content = load_digits()
        images = torch.from_numpy(content.images).float()[:, None] / 16
        patches = torch.from_numpy(photo_patches().array).float() / 255
        is_id = ~np.isin(content.target, out)
        order = np.random.default_rng([seed, 12]).permutation(int(is_id.sum()))
        rows = np.flatnonzero(is_id)[order[: round(0.32 * is_id.sum())]]
        labels = torch.from_numpy(np.unique(content.target[is_id], return_inverse=True)[1])[order[: len(rows)]]
        mean, std = images[rows].mean(), images[rows].std()
        torch.manual_seed(seed)
        backbone = SmallCnn(1)
        linear = nn.Linear(64, 8)
        network = nn.Sequential(backbone, linear).train()
        optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        n_steps = 30 * (len(rows) // 32)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
        samples = (images[rows] - mean) / std
        for _ in range(30):
            for batch in torch.randperm(len(rows))[: len(rows) // 32 * 32].split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(samples[batch]), labels[batch]).backward()
                optimizer.step()
                schedule.step()
        with torch.inference_mode():
            backbone.eval()
            feature, far = (backbone((one - mean) / std).numpy() for one in (images, patches))
        weight, bias = linear.weight.detach().numpy(), linear.bias.detach().numpy()
        np.savez(path, **dict(zip(keys, (feature, content.target, weight, bias, far, order), strict=True)))
    content = np.load(path)
    return tuple(content[key] for key in keys)


def some(n: int) -> Callable[[list[str], np.random.Generator], list[int]]:
    """Hide n random classes."""
    return lambda names, rng: [int(i) for i in rng.permutation(len(names))[:n]]


def topic(names: list[str], rng: np.random.Generator) -> list[int]:
    """Hide the intents with one of these words; which one depends on the seed."""
    word = ("top_up", "transfer", "exchange", "pin", "cash", "refund", "verify")[int(rng.integers(7))]
    return [i for i, name in enumerate(names) if word in name]


def none(names: list[str], rng: np.random.Generator) -> list[int]:
    return []


def these(*classes: int) -> Callable[[list[str], np.random.Generator], list[int]]:
    return lambda names, rng: [*classes]


PHOTO_SIZES, TEXT_SIZES = (0.3, 0.12, 0.33, 0.25), (0.55, 0.1, 0.2, 0.15)
# airplane automobile bird cat deer dog frog horse ship truck
CASES = {
    **{f"resnet/{ood}": resnet(ood) for ood in ("fashion-mnist", "jigsaw", "photo-patches", "mnist", "blends")},
    **{f"resnet/{ood}": resnet(ood) for ood in ("halves", "negatives", "sideways", "clouds")},
    **{f"resnet-300/{ood}": resnet(ood, 300) for ood in ("fashion-mnist", "jigsaw", "blends", "halves", "clouds")},
    "photos/five": vectors("photos-test", "near", some(5), PHOTO_SIZES),
    "photos/two": vectors("photos-test", "near", some(2), PHOTO_SIZES),
    "photos/dog": vectors("photos-test", "near", these(5), PHOTO_SIZES),
    "photos/truck": vectors("photos-test", "near", these(9), PHOTO_SIZES),
    **{
        f"photos/{ood}": vectors("photos-test", f"photos-{ood}", some(5), PHOTO_SIZES)
        for ood in ("photo-patches", "blends", "clouds")
    },
    "text/12": vectors("text-banking77", "near", some(12), TEXT_SIZES),
    "text/topic": vectors("text-banking77", "near", topic, TEXT_SIZES),
    "text/30": vectors("text-banking77", "near", some(30), TEXT_SIZES),
    "text/far": vectors("text-banking77", "text-far", none, TEXT_SIZES),
    "digits/8-9": digits((8, 9), "near"),
    "digits/photo-patches": digits((8, 9), "photo-patches"),
    "digits/3-7": digits((3, 7), "near"),
    "digits/1-4": digits((1, 4), "near"),
    "digits/0-6": digits((0, 6), "near"),
}
