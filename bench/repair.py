"""What orthogonalizing costs: against two training epochs, and in memory as depth grows.

    python bench/repair.py

Time: `orthogonalize_` of a depth-50 width-800 MLP against two epochs of SGD on 50 000 samples in batches of 500, of
which `--batches` are timed and scaled up. Memory: the largest resident growth while orthogonalizing networks of depth
10, 50 and 100, each in a process of its own, less the weights themselves.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from sounding.models import Mlp
from sounding.repair import orthogonalize_

WIDTH, DEPTH, FEATURES = 800, 50, 784
SAMPLES, BATCH, EPOCHS = 50_000, 500, 2


def time_orthogonalize(model: nn.Module, inputs: torch.Tensor) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    orthogonalize_(model, inputs)
    return time.perf_counter() - begin


def time_step(model: nn.Module, batches: int) -> float:
    """Seconds of one SGD step, the median of some."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs, targets = torch.randn(BATCH, FEATURES), torch.randint(10, (BATCH,))
    seconds = []
    for _ in range(batches + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds[1:])[batches // 2]


def measure_memory(depth: int) -> float:
    """MiB that the process grew by while orthogonalizing, beyond one copy of the weights (the way back)."""
    model = Mlp(FEATURES, 10, depth=depth, width=WIDTH)
    inputs = torch.randn(1000, FEATURES)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    orthogonalize_(model, inputs)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 - weights / 2**20


def _measure_apart(depth: int) -> float:
    """`measure_memory` in a process of its own."""
    command = [sys.executable, __file__, "--memory", str(depth)]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--memory", type=int, metavar="DEPTH", help="only measure memory at this depth")
    options = parser.parse_args()
    if options.memory is not None:
        print(measure_memory(options.memory))
        return
    model = Mlp(FEATURES, 10, depth=DEPTH, width=WIDTH)
    cure = time_orthogonalize(model, torch.randn(1000, FEATURES))
    epochs = time_step(model, options.batches) * EPOCHS * SAMPLES / BATCH
    memory = {
        depth: float(
            subprocess.run([sys.executable, __file__, "--memory", str(depth)], capture_output=True, check=True).stdout
        )
        for depth in (10, 50, 100)
    }
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "orthogonalize_seconds": round(cure, 2),
                "two_epochs_seconds": round(epochs, 2),
                "ratio": round(cure / epochs, 4),
                "memory_mib_by_depth": {depth: round(value, 1) for depth, value in memory.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
