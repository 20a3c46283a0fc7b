"""How fast the chains are, side by side with the loop they replace.

    python bench/chains.py                  # CPU: ratios to a plain NumPy loop, cost over depth and runs, memory
    python bench/chains.py --device cuda    # GPU: equality in law with the CPU, rates, measured limits, figure 3a

Every number is printed and, with --out FILE, written as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sounding import chain

GAMMAS = (0.01, 0.1, 1.0, math.inf)
WIDTHS = (8, 16, 32, 64, 128, 256)


def naive_chain(
    width: int, samples: int, depth: int, *, gamma: float, measure: bool, literal: bool = False
) -> list[int]:
    """The loop written plainly: a d × d matrix per layer, batch norm without centring, soft rank by singular values.

    `literal` writes batch norm as rank2020 eq. (2) does, diag(M)^(−1/2) H with M = HHᵀ/N.
    """
    rng = np.random.RandomState(0)
    hidden = rng.randn(width, samples)
    ranks = []
    for _ in range(depth):
        weight = rng.randn(width, width)
        hidden = weight @ hidden if math.isinf(gamma) else hidden + gamma * (weight @ hidden)
        if literal:
            moment = hidden @ hidden.T / samples
            hidden = np.diag(np.diag(moment) ** -0.5) @ hidden
        else:
            hidden = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True))
        if measure:
            singular = np.linalg.svd(hidden, compute_uv=False)
            ranks.append(int((singular**2 / samples >= 0.5).sum()))
    return ranks


def seconds_of(work: object, *, repeats: int = 3) -> float:
    """The best of some repeats."""
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        work()  # type: ignore[operator]
        best = min(best, time.perf_counter() - began)
    return best


def ours(repeats: int = 3, **settings: object) -> float:
    """The best rate of some repeats, in chain-layers per second."""
    rates = []
    for seed in range(repeats):
        generator = torch.Generator().manual_seed(seed)
        rates.append(chain.simulate(generator=generator, **settings).chain_layers_per_second)  # type: ignore[arg-type]
    return max(rates)


def compare_on_cpu() -> dict[str, float]:
    """Rates of both, and their ratios: chain-layers per second on all cores."""
    found: dict[str, float] = {}

    def naive(depth: int, **settings: Any) -> float:
        return depth / seconds_of(lambda: naive_chain(depth=depth, **settings))

    small: dict[str, Any] = {"width": 1000, "batch_size": 10, "center": False, "measures": ["orthogonality_gap"]}
    found["n10_d1000_naive"] = naive(30, width=1000, samples=10, gamma=math.inf, measure=False)
    found["n10_d1000"] = ours(depth=100, runs=192, every=100, **small)
    found["n10_d1000_measured_each_layer"] = ours(depth=100, runs=192, **small)
    found["n10_d1000_ratio"] = found["n10_d1000"] / found["n10_d1000_naive"]
    square: dict[str, Any] = {"width": 256, "samples": 256, "gamma": 0.1}
    found["n256_d256_naive"] = naive(100, measure=False, **square)
    found["n256_d256_naive_as_eq_2"] = naive(100, measure=False, literal=True, **square)
    found["n256_d256_naive_soft_rank_each_layer"] = naive(30, measure=True, **square)
    large: dict[str, Any] = {
        "width": 256,
        "batch_size": 256,
        "residual": 0.1,
        "center": False,
        "measures": ["soft_rank"],
    }
    found["n256_d256"] = ours(depth=100, runs=16, every=100, **large)
    found["n256_d256_soft_rank_each_layer"] = ours(depth=100, runs=16, **large)
    found["n256_d256_ratio"] = found["n256_d256"] / found["n256_d256_naive"]
    found["n256_d256_ratio_as_eq_2"] = found["n256_d256"] / found["n256_d256_naive_as_eq_2"]
    found["n256_d256_ratio_soft_rank_each_layer"] = (
        found["n256_d256_soft_rank_each_layer"] / found["n256_d256_naive_soft_rank_each_layer"]
    )
    return found


def scaling_on_cpu() -> dict[str, list[float]]:
    """Seconds over depth and over runs (linear), and peak memory over depth (flat)."""
    common = {"width": 256, "batch_size": 8, "center": False, "measures": ["orthogonality_gap"]}
    depths, runs = [200, 400, 800], [32, 64, 128]
    by_depth = [64 * depth / ours(runs=64, depth=depth, **common) for depth in depths]
    by_runs = [400 * count / ours(runs=count, depth=400, **common) for count in runs]
    memory = [peak_megabytes(depth) for depth in (100, 1000, 10_000)]
    return {
        "depths": [float(depth) for depth in depths],
        "seconds_by_depth": by_depth,
        "runs": [float(count) for count in runs],
        "seconds_by_runs": by_runs,
        "depths_for_memory": [100.0, 1000.0, 10_000.0],
        "peak_megabytes_by_depth": memory,
    }


def peak_megabytes(depth: int) -> float:
    """Peak memory of a fresh process that simulates so deep."""
    command = [sys.executable, __file__, "--only-depth", str(depth)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def report_peak(depth: int) -> None:
    generator = torch.Generator().manual_seed(0)
    chain.simulate(width=64, batch_size=4, depth=depth, runs=8, measures=["orthogonality_gap"], generator=generator)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-depth", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_depth:
        report_peak(arguments.only_depth)
        return
    if arguments.device == "cpu":
        parts = (lambda: {"cores": torch.get_num_threads()}, compare_on_cpu, scaling_on_cpu)
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        import chains_gpu

        parts = (lambda: chains_gpu.measure(out=arguments.out),)
    found: dict[str, Any] = {}
    for part in parts:
        new = part()
        for name, value in new.items():
            print(f"{name:<44}{value:,.4g}" if isinstance(value, float) else f"{name:<44}{value}", flush=True)
        found |= new
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
