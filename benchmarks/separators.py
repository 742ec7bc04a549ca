"""Which separator finds the outliers in the wild data, when the classifier has not seen the wild ID data?

    python benchmarks/separators.py FOLDER --real DATA --weights resnet20-cifar10.safetensors [--seeds 5] [--part …]

DATA has cifar10/{train,test}/CLASS/*.png, FashionMNIST/raw and MNIST/raw; the weights are those of a ResNet-20 trained
on CIFAR-10's training set (akamaster's names). Calibration, wild and test ID samples are all of CIFAR-10's test set,
which it has not seen: 2,000 for calibration, 5,400 + 600 outliers wild, 2,600 for tests. OOD sets: Fashion-MNIST,
MNIST, patches of scikit-learn's two photographs, training images with their tiles shuffled (jigsaw), means of two
training images (blends). Features are extracted once into FOLDER/features, results are appended to FOLDER/PART.csv, and
what is there is not computed again. Parts: main; pi, calibration (their size); drift (all wild data changed).
"""

from __future__ import annotations

import argparse
import io
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageFilter
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from salcli.methods.base import Head, Known
from salcli.methods.sal import COMMITTEE, LEARNED, labeled, tau, unlabeled
from salcli.methods.separators import Learned, Transforms, learn, members, ranks_by_content, tau_name, temperatures
from salcli.params.schema import Params, load_params
from salcli.pipeline.filter import compare
from salcli.sal.filter import separation_errors
from salcli.sal.gradients import Representation
from salcli.sal.metrics import ood_metrics
from salcli.sal.unlabeled import best_bin, estimated_share, partial_excess, verdict
from salcli.store.layout import Experiment

OOD = ("fashion-mnist", "jigsaw", "mnist", "photo-patches", "blends")  # looked at while tuning: the first two
N_TEST_ID, N_OOD = 2600, 6000
PARAMS = Path(__file__).parent.parent / "params.yaml"


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


def extract(real: Path, weights: Path, into: Path) -> None:
    """Features, logits and labels of every set."""
    wanted = ["head", "cifar10-train", "cifar10-test", *OOD]
    wanted += [f"{name}.{drift}" for name in ("cifar10-test", *OOD[:2], "photo-patches") for drift in DRIFTS]
    if all((into / f"{name}.npz").exists() for name in wanted):
        return
    into.mkdir(parents=True, exist_ok=True)
    network = ResNet20().eval()
    network.load_state_dict(load_file(weights))

    @torch.inference_mode()
    def save(name: str, images: np.ndarray, labels: np.ndarray | None = None) -> None:
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
    for drift, change in DRIFTS.items():
        save(f"cifar10-test.{drift}", change(test), test_labels)
        for name in (*OOD[:2], "photo-patches"):
            save(f"{name}.{drift}", change(sets[name][:3000]))


# -- scores


class Bank:
    """All sets, with the post-hoc scores of all their samples, which depend on the training data alone."""

    def __init__(self, features: Path, params: Params) -> None:
        self.features, self.params = features, params
        head = np.load(features / "head.npz")
        self.head = Head(*(torch.from_numpy(head[name]).double() for name in ("weight", "bias")))
        self.train = self.representation("cifar10-train")
        self.methods = members(params)
        for method in self.methods.values():
            method.fit(Known(self.head, self.train))

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
        found = {key: torch.cat([scores[key][i] for _, scores, i in rows]) for key in self.methods}
        return Representation(feature, logits, logits.argmax(1)), found

    def taus(self, wild: Representation, sources: list[Representation]) -> dict[str, list[Tensor]]:
        found = {}
        for temperature in temperatures(self.params.filter):
            own = self.params.filter.softened(temperature)
            gradients = [unlabeled(x, own, 0, "") for x in sources]
            found[tau_name(temperature)] = tau(
                unlabeled(wild, own, 0, ""), gradients, labeled(self.train, own), wild.n_classes, own
            )
        return found


def run(bank: Bank, ood: str, seed: int, *, n_calibration: int, pi: float, drift: str = "") -> Iterator[dict[str, Any]]:
    """One deal: every separator, and what it is as a detector of test samples."""
    changed = f".{drift}" if drift else ""
    order = np.random.default_rng([seed, 7]).permutation(10_000)
    n_ood = 600 if pi <= 0.1 else 1800
    n_id = min(5400, round(n_ood * (1 - pi) / pi))
    n_ood = round(n_id * pi / (1 - pi))
    others = np.random.default_rng([seed, 8]).permutation(3000 if drift else N_OOD)
    calibration, own = bank.take(("cifar10-test", order[:n_calibration]))
    wild, in_wild = bank.take(
        (f"cifar10-test{changed}", order[2000 : 2000 + n_id]), (f"{ood}{changed}", others[:n_ood])
    )
    id_test, of_id = bank.take(("cifar10-test", order[-N_TEST_ID:]))
    ood_test, of_ood = bank.take((f"{ood}{changed}", others[2000:]))
    is_ood = torch.arange(len(wild)) >= n_id
    taus = bank.taus(wild, [wild, calibration, id_test, ood_test])
    by_side = [
        {**{name: values[i] for name, values in taus.items()}, **side}
        for i, side in enumerate((in_wild, own, of_id, of_ood))
    ]
    by_side = [{name: values.nan_to_num(0.0) for name, values in side.items()} for side in by_side]
    scores = {name: (by_side[0][name], by_side[1][name]) for name in by_side[0]}
    transforms = Transforms.fit(by_side[1])
    learned = learn(wild, calibration, scores, seed)
    scores |= {
        COMMITTEE: (transforms.committee(by_side[0]), transforms.committee(by_side[1])),
        LEARNED: (learned.wild, learned.calibration),
    }
    ranks = ranks_by_content(wild, seed), ranks_by_content(calibration, seed)
    chosen, trials = compare(scores, ranks, 0.95, Experiment(seed, ood, pi))
    tests = [(id_test, by_side[2]), (ood_test, by_side[3])]
    for name, (in_the_wild, held_out) in {**scores, "auto": scores[chosen]}.items():
        found = verdict(held_out, in_the_wild, float(held_out.sort().values[int(np.ceil(0.95 * len(held_out))) - 1]))
        is_candidate = in_the_wild > held_out.sort().values[int(np.ceil(0.95 * len(held_out))) - 1]
        as_detector = [_on_test(name, transforms, learned, x, side) for x, side in tests] if name != "auto" else []
        yield {
            "score": name,
            "chosen": chosen if name == "auto" else "",
            **vars(separation_errors(is_candidate, is_ood)),
            "auroc": ood_metrics(-in_the_wild[~is_ood].numpy(), -in_the_wild[is_ood].numpy()).auroc,
            "fpr95": ood_metrics(*(-one.numpy() for one in as_detector)).fpr95 if as_detector else np.nan,
            "excess": partial_excess(held_out, in_the_wild),
            "beyond": found.beyond,
            "margin": found.margin,
            "estimated_precision": found.precision,
            "pi_hat": best_bin(held_out, in_the_wild)[0],
            "moved": found.drift,
            "flagged": sum(trial.drift > 4 for trial in trials),
        }
    former = estimated_share({name: (scores[name][1], scores[name][0]) for name in ("msp", "knn", "sal")})
    yield {"score": "former π̂", "pi_hat": former.pi}


def _on_test(
    name: str, transforms: Transforms, learned: Learned, x: Representation, scores: dict[str, Tensor]
) -> Tensor:
    if name == LEARNED:
        return learned.score(x, scores)
    return transforms.committee(scores) if name == COMMITTEE else scores[name]


# -- parts


def cases(part: str, n_seeds: int) -> Iterator[dict[str, Any]]:
    usual = {"n_calibration": 2000, "pi": 0.1, "drift": ""}
    for seed in range(n_seeds):
        for ood in OOD:
            if part == "main":
                yield {"ood": ood, "seed": seed, **usual}
            if part == "calibration":
                yield from ({"ood": ood, "seed": seed, **usual, "n_calibration": n} for n in (100, 300, 1000))
            if part == "pi":
                yield from ({"ood": ood, "seed": seed, **usual, "pi": pi} for pi in (0.01, 0.05, 0.3, 0.5))
            if part == "drift" and ood in (*OOD[:2], "photo-patches"):
                yield from ({"ood": ood, "seed": seed, **usual, "drift": drift} for drift in DRIFTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--weights", type=Path, required=True, help="of the ResNet-20")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--part", nargs="+", default=["main", "calibration", "pi", "drift"])
    parser.add_argument("--show", action="store_true", help="print the tables of what is there")
    given = parser.parse_args()
    if not given.show:
        extract(given.real, given.weights, given.folder / "features")
        bank = Bank(given.folder / "features", load_params(PARAMS)[0])
    for part in given.part:
        path = given.folder / f"{part}.csv"
        for case in [] if given.show else cases(part, given.seeds):
            if (
                path.exists()
                and (pd.read_csv(path, keep_default_na=False)[list(case)] == pd.Series(case)).all(axis=1).any()
            ):
                continue
            ood, seed, own = case["ood"], case["seed"], {k: v for k, v in case.items() if k not in ("ood", "seed")}
            rows = pd.DataFrame([{**case, **row} for row in run(bank, ood, seed, **own)])
            rows.to_csv(path, mode="a", header=not path.exists(), index=False)
            print(f"{part}: {case}", flush=True)
        if path.exists():
            print(_tables(part, pd.read_csv(path)))


def _tables(part: str, found: pd.DataFrame) -> str:
    """In percent, mean over seeds; the best single score in hindsight is that of the lowest mean ERR_out."""
    axis = {"main": [], "calibration": ["n_calibration"], "pi": ["pi"], "drift": ["drift"]}[part]
    found = found.fillna({"drift": ""}) if part != "drift" else found
    rows = found[found["score"] != "former π̂"]
    numbers = ["err_in", "err_out", "precision", "estimated_precision", "auroc", "fpr95", "pi_hat"]
    mean = rows.groupby([*axis, "ood", "score"], sort=False)[numbers].mean() * 100
    return "\n\n".join(f"{part}, {name}\n{mean[name].unstack('ood').round(1).to_string()}" for name in numbers)


if __name__ == "__main__":
    main()
