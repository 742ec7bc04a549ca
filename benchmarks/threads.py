"""How long OpenMP's threads should wait in a busy loop: a training step, quiet and beside other processes.

    python -m benchmarks.threads [--busy N]

Each setting is a new process, because OpenMP reads its environment once. Settings take turns, and the
fastest round counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

SETTINGS = {
    "default": {},
    "GOMP_SPINCOUNT=2000 (salcli)": {"GOMP_SPINCOUNT": "2000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
ROUNDS, SECONDS, PATIENCE = 3, 2.0, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, help="processes that do nothing but compute")
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(*(1000 * seconds_per_step(*case) for case in cases()))
        return
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        for name, found in measured().items():
            small, large = (f"{best:.1f}" for best in found)
            print(f"{name:30} small-cnn {small:>8} ms   wrn-16-2 {large:>8} ms a step")
    finally:
        for other in others:
            other.kill()


def measured() -> dict[str, list[float]]:
    best = {name: [float("inf")] * 2 for name in SETTINGS}
    for _ in range(ROUNDS):
        for name, values in SETTINGS.items():
            clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
            command = [sys.executable, "-m", "benchmarks.threads", "--step"]
            try:
                done = subprocess.run(command, env=clean | values, capture_output=True, text=True, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                continue
            best[name] = [min(pair) for pair in zip(best[name], map(float, done.stdout.split()), strict=True)]
    return best


def cases() -> list[tuple[str, tuple[int, ...]]]:
    return [("small-cnn", (32, 1, 8, 8)), ("wrn-16-2", (32, 3, 32, 32))]


def seconds_per_step(backbone: str, shape: tuple[int, ...]) -> float:
    import torch

    from salcli.models.network import Classifier, NetworkSpec

    torch.manual_seed(0)
    network = Classifier(NetworkSpec(backbone, 8, (0.5,) * shape[1], (0.25,) * shape[1]))
    images, labels = torch.randint(0, 256, shape, dtype=torch.uint8), torch.arange(shape[0]) % 8
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    step()
    n_steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        step()
        n_steps += 1
    return (time.perf_counter() - start) / n_steps


if __name__ == "__main__":
    main()
