"""Images per second of `predict`, against a bare forward pass with the same loader.

    python benchmarks/predict.py [--images FOLDER] [--n 2048] [--backbone small-cnn wrn-16-2] [--repeats 15]

Without a folder, PNG files of noise are made. Both sides read the same files with the same threads, decode one batch
ahead and run the same network in batches of the same size. The bare pass throws its outputs away; `predict` turns them
into classes, probabilities, scores, decisions and p-values, and writes a CSV file. They take turns, and the order
changes with every round. The ratio is the median over the rounds, of wall time and of the CPU time of all threads,
because the speed of a shared machine changes from round to round. Loading Python and torch is not included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

from salcli.data.decoding import one_ahead
from salcli.data.folders import image_files
from salcli.detector.detector import Detector
from salcli.detector.images import ImageFormat
from salcli.detector.predict import Tally, row_writer
from salcli.models.network import NetworkSpec, OodClassifier

N_CLASSES, N_CALIBRATION = 10, 5_000
FORMATS = {"small-cnn": ImageFormat(channels=1, size=8)}  # as in the demo; all others as for CIFAR
CIFAR = ImageFormat(channels=3, size=32)


def main() -> None:
    """Print one line for each backbone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--backbone", nargs="+", default=["small-cnn", "wrn-16-2"])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(f"{'backbone':12}{'images':>8}{'bare/s':>11}{'predict/s':>11}{'ratio':>13}{'of CPU time':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for backbone in options.backbone:
            wanted = FORMATS.get(backbone, CIFAR)
            files = image_files(options.images)[: options.n] if options.images else noise(folder, options.n, wanted)
            bare, predicted = measure(untrained_detector(backbone, wanted), files, Path(folder), options.repeats)
            rates = "".join(f"{len(files) / median(wall):11,.0f}" for wall, _ in (bare, predicted))
            ratios = (median(np.divide(one, other)) for one, other in zip(bare, predicted, strict=True))
            print(f"{backbone:12}{len(files):8,}{rates}" + "".join(f"{ratio:13.1%}" for ratio in ratios))


def measure(detector: Detector, files: tuple[Path, ...], folder: Path, repeats: int) -> list[list[list[float]]]:
    """Seconds and CPU seconds of each round, of the bare pass and of predict, after one round to warm up."""
    seconds: list[list[list[float]]] = [[[], []], [[], []]]
    for n in range(repeats + 1):
        pairs = list(zip((bare_pass, predict), seconds, strict=True))
        for run, (wall, cpu) in pairs[:: 1 if n % 2 else -1]:
            start, cpu_start = time.perf_counter(), time.process_time()
            run(detector, files, folder)
            if n:
                wall.append(time.perf_counter() - start)
                cpu.append(time.process_time() - cpu_start)
    return seconds


def bare_pass(detector: Detector, files: tuple[Path, ...], folder: Path) -> None:
    """Only reading and the network."""
    decoded = detector.takes.read(files, detector.batch_size)
    with closing(one_ahead(decoded)) as parts, torch.inference_mode():
        for part in parts:
            detector.network(torch.from_numpy(part.array))


def predict(detector: Detector, files: tuple[Path, ...], folder: Path) -> None:
    """What the command does after loading."""
    tally = Tally(detector.threshold, detector.id_quantile)
    with (folder / "scores.csv").open("w", encoding="utf-8", newline="") as file:
        write = row_writer(file, "csv")
        for part in detector.scan(files):
            write(part)
            tally.add(part)
    assert tally.n_samples == len(files)


def untrained_detector(backbone: str, wanted: ImageFormat) -> Detector:
    """With random weights, which take as long as trained ones."""
    torch.manual_seed(0)
    spec = NetworkSpec(backbone, N_CLASSES, (0.5,) * wanted.channels, (0.25,) * wanted.channels)
    calibration = np.sort(np.random.default_rng(0).standard_normal(N_CALIBRATION)).astype(np.float32)
    return Detector(OodClassifier(spec), wanted, tuple(map(str, range(N_CLASSES))), calibration, {}, device="cpu")


def noise(folder: str, n: int, wanted: ImageFormat) -> tuple[Path, ...]:
    """PNG files of the size that the network takes."""
    path, rng = Path(folder) / f"{wanted.size}-{wanted.channels}", np.random.default_rng(0)
    path.mkdir(exist_ok=True)
    shape = (wanted.size, wanted.size) if wanted.channels == 1 else (wanted.size, wanted.size, wanted.channels)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path / f"{i:06}.png")
    return image_files(path)


if __name__ == "__main__":
    main()
