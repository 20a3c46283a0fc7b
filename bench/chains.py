"""How fast the chains are, side by side with the loop they replace.

    python bench/chains.py                  # CPU: ratios to plain NumPy loops, limits, cost over depth and runs, memory
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from sounding import chain
from sounding.chain.law import make_law
from sounding.chain.normals import NormalStream
from sounding.chain.step import Chains

WRITINGS = {
    "plain": "H + gamma * W @ H, M = H @ H.T / N, diag(M)^(-1/2) @ H: rank2020 eq. (1) and (2) as they stand",
    "row norms": "H + gamma * W @ H, H / sqrt(mean(H**2)): the same without the matrix M",
    "lean": "H + gamma * (W @ H), H / sqrt(mean(H**2)): and without a pass over W",
    "leanest": "the same with NumPy's newer and faster generator",
}


def naive_chain(
    width: int, samples: int, depth: int, *, gamma: float, writing: str = "plain", measure: bool = False
) -> list[int]:
    """The loop written plainly: one chain, float64, a d × d matrix per layer from NumPy's `randn`, columns as samples.

    With `measure`, the soft rank of each layer from the singular values.
    """
    rng = np.random.RandomState(0)
    draw = np.random.default_rng(0).standard_normal if writing == "leanest" else lambda shape: rng.randn(*shape)
    H = draw((width, samples))
    ranks = []
    for _ in range(depth):
        W = draw((width, width))
        if math.isinf(gamma):
            H = W @ H
        elif writing.startswith("lean"):
            H = H + gamma * (W @ H)
        else:
            H = H + gamma * W @ H
        if writing == "plain":
            M = H @ H.T / samples
            H = np.diag(np.diag(M) ** -0.5) @ H
        else:
            H = H / np.sqrt(np.mean(H**2, axis=1, keepdims=True))
        if measure:
            singular = np.linalg.svd(H, compute_uv=False)
            ranks.append(int((singular**2 / samples >= 0.5).sum()))
    return ranks


def seconds_of(
    work: Callable[[], object], *, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The best of some repeats."""
    best = math.inf
    for _ in range(repeats):
        began = clock()
        work()
        best = min(best, clock() - began)
    return best


def ours(repeats: int = 3, **settings: Any) -> float:
    """The best rate of some repeats, in chain-layers per second of the whole call, set-up and all."""
    chain_layers = settings["runs"] * settings["depth"]
    seeds = iter(range(repeats))
    call = lambda: chain.simulate(generator=torch.Generator().manual_seed(next(seeds)), **settings)  # noqa: E731
    return float(chain_layers / seconds_of(call, repeats=repeats))


def compare_on_cpu() -> dict[str, float]:
    """Rates of both, and their ratios: chain-layers per second, the loop in every writing, on all cores and on one."""
    small: dict[str, Any] = {"width": 1000, "samples": 10, "gamma": math.inf}
    square: dict[str, Any] = {"width": 256, "samples": 256, "gamma": 0.1}
    mine: dict[str, Any] = {"centring": False, "depth": 100}
    gap = {"width": 1000, "batch_size": 10, "runs": 192, "measures": ["orthogonality_gap"], **mine}
    rank = {"width": 256, "batch_size": 256, "runs": 16, "residual": 0.1, "measures": ["soft_rank"], **mine}
    found = {
        "n10_d1000": ours(every=100, **gap),
        "n10_d1000 measured each layer": ours(**gap),
        "n256_d256": ours(every=100, **rank),
        "n256_d256 soft rank each layer": ours(**rank),
    }
    cores = f"{torch.get_num_threads()} cores"
    for threads, where in ((None, cores), (1, "1 core")):
        for writing in WRITINGS:
            with threadpool_limits(threads):
                name = f"loop, {writing}, {where}"
                for case, settings, depth in (("n10_d1000", small, 20), ("n256_d256", square, 100)):
                    work = partial(naive_chain, depth=depth, writing=writing, **settings)
                    found[f"{case} {name}"] = rate = depth / seconds_of(work)
                    found[f"{case} over {name}"] = found[case] / rate
                work = partial(naive_chain, depth=20, writing=writing, measure=True, **square)
                case = "n256_d256 soft rank each layer"
                found[f"{case}, {name}"] = rate = 20 / seconds_of(work)
                found[f"{case}, over {name}"] = found[case] / rate
    return found


def one_core() -> dict[str, float]:
    """A layer of n = d = 256 in microseconds of one core's own time, which a busy machine disturbs little."""
    draw = NormalStream(0)
    rows, weight, out = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    law = make_law(width=256, batch_size=256, residual=0.1, centring=False)
    chains = Chains([law] * 4, torch.randn(4, 256, 256), route="explicit", generator=torch.Generator(), normals=draw)
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    parts: dict[str, tuple[Callable[[], object], int]] = {
        "ours": (chains.step, 4),
        "of these the float32 product": (lambda: torch.mm(rows, weight.T, out=out), 1),
        "of these the float32 normals": (lambda: draw((256, 256)), 1),
    }
    for writing in WRITINGS:
        loop = partial(naive_chain, 256, 256, 5, gamma=0.1, writing=writing)
        parts[f"loop, {writing}"] = (loop, 5)
    found = {}
    try:
        with threadpool_limits(1):
            for name, (work, layers) in parts.items():
                seconds = seconds_of(work, repeats=40, clock=time.process_time)
                found[f"n256_d256 microseconds, {name}"] = 1e6 * seconds / layers
    finally:
        torch.set_num_threads(cores)
    return found


def scaling_on_cpu() -> dict[str, list[float]]:
    """Seconds over depth and over runs (linear), and peak memory over depth (flat)."""
    common = {"width": 256, "batch_size": 8, "centring": False, "measures": ["orthogonality_gap"]}
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
        parts = (lambda: {"cores": torch.get_num_threads()}, compare_on_cpu, one_core, scaling_on_cpu)
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        import chains_gpu

        parts = (lambda: chains_gpu.measure(out=arguments.out),)
    found: dict[str, Any] = {}
    for part in parts:
        new = part()
        for name, value in new.items():
            print(f"{name:<66}{value:,.4g}" if isinstance(value, float) else f"{name:<66}{value}", flush=True)
        found |= new
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
