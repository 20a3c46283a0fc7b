"""What a check costs: time and peak memory against the plain forward and backward pass, at batch 128.

    python bench/probe.py                     all networks, every tier
    python bench/probe.py --only mlp --rounds 20
    python bench/probe.py --threads 1 --process-time     on a machine that others use meanwhile
    python bench/probe.py --device cuda       the networks of bench/probe_gpu.py, on a GPU
    python bench/probe.py --device cuda --compile        the same where the plain pass runs under torch.compile
    python bench/probe.py --device cuda --profiles FOLDER     where the time goes there, and what inner products cost

Plain, fast and full (a pass under `sounding.watch` of that tier), read (fast, and its profile asked for) and whole
checks (fast with its verdict, full with theory beside it and its verdict) take turns, so that a busy machine slows them
alike; the ratio is of the best rounds. On a machine that others use --process-time counts the time of the processor,
which is more than that of the clock where several threads work. Memory is the peak resident size of a fresh process
that does nothing else, and beside it the same less what the process held before its first pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import probe_gpu
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding

BATCH = 128
TIERS = ("plain", "fast", "read", "full", "check fast", "check full")
CHECKS = {"check fast": 2.0, "check full": 6.0}  # what whole checks are meant to cost
LIMITS = {
    "mlp": {"fast": 2.0, "full": 8.0, **CHECKS},
    "deep": CHECKS,
    "vgg19": {"fast": 2.0, "full": 2.0, **CHECKS},
    "transformer": {"fast": 2.0, **CHECKS},
}
MEMORY = 1.3


def mlp(depth: int = 64, width: int = 128) -> tuple[nn.Module, Tensor]:
    """64 layers of width 128, ReLU, He initialization."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
    return nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(BATCH, width)


def deep() -> tuple[nn.Module, Tensor]:
    """150 layers of width 100."""
    return mlp(150, 100)


def vgg19() -> tuple[nn.Module, Tensor]:
    """VGG-19 with batch norm for 32 × 32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)), torch.randn(BATCH, 3, 32, 32)


class Classifier(nn.Module):
    """A pre-norm transformer of 6 blocks, width 128, 4 heads, over sequences of 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def transformer() -> tuple[nn.Module, Tensor]:
    """The classifier above and its tokens."""
    return Classifier(), torch.randint(0, 1000, (BATCH, 32))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp,
    "deep": deep,
    "vgg19": vgg19,
    "transformer": transformer,
}


def passes(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
    """One pass of each kind."""

    def plain() -> None:
        model.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()

    def watched(tier: Literal["fast", "full"]) -> Callable[[], None]:
        def one() -> None:
            with sounding.watch(model, tier=tier):
                plain()

        return one

    def read() -> object:
        with sounding.watch(model) as kept:
            plain()
        return kept.profile

    return {
        "plain": plain,
        "fast": watched("fast"),
        "read": read,
        "full": watched("full"),
        "check fast": lambda: sounding.check(model, inputs, targets, tier="fast").verdict,
        "check full": lambda: sounding.check(model, inputs, targets).verdict,
    }


def measure_time(name: str, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The best of some rounds, in seconds, for each kind of pass."""
    model, inputs = NETWORKS[name]()
    ways = passes(model, inputs, torch.randint(0, 10, (BATCH,)))
    best = dict.fromkeys(TIERS, float("inf"))
    for turn in range(rounds + 1):
        for tier in TIERS:
            start = clock()
            ways[tier]()
            if turn:  # the first is for warming up
                best[tier] = min(best[tier], clock() - start)
    return best


def measure_memory(name: str, tier: str) -> tuple[float, float]:
    """Peak resident size of a fresh process, and before its first pass, in MiB."""
    command = [sys.executable, __file__, "--child", name, tier, "--threads", str(torch.get_num_threads())]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    peak, before = json.loads(answer.stdout)
    return peak, before


def child(name: str, tier: str) -> None:
    """Two passes of one kind, then the peak; modules that a check imports late are imported before the count."""
    sounding.check(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(4, 2))
    model, inputs = NETWORKS[name]()
    way = passes(model, inputs, torch.randint(0, 10, (BATCH,)))[tier]
    before = resident()
    for _ in range(2):
        way()
    print(json.dumps([resident("VmHWM"), before]))


def resident(entry: str = "VmRSS") -> float:
    """The resident size now, or at its peak ("VmHWM"), in MiB; ru_maxrss would count the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{entry}:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*NETWORKS, "gpt2", "gpt2-xl", "resnet50"], help="one network")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, help="rounds to take the best of (default 20, 5 and 2)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--process-time", action="store_true", help="count the time of the processor, not of the clock")
    parser.add_argument("--compile", action="store_true", help="the plain pass under torch.compile (cuda)")
    parser.add_argument("--profiles", type=Path, help="a folder for where the time goes, instead of the table (cuda)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":
        probe_gpu.run(options.only, options.rounds or 5, compiled=options.compile, profiles=options.profiles)
        return
    if options.child:
        child(*options.child)
        return
    told = "process time" if options.process_time else "time"
    print(f"torch {torch.__version__}, {options.threads} threads, batch {BATCH}, {told}")
    print(f"{'network':<12}{'tier':<12}{'time':>10}{'ratio':>8}{'limit':>7}{'peak':>11}{'ratio':>8}{'above start':>13}")
    for name in [options.only] if options.only else NETWORKS:
        rounds = options.rounds or {"mlp": 20, "vgg19": 2}.get(name, 5)
        times = measure_time(name, rounds, time.process_time if options.process_time else time.perf_counter)
        memory = {tier: measure_memory(name, tier) for tier in TIERS}
        plain_peak, plain_start = memory["plain"]
        for tier in TIERS:
            peak, start = memory[tier]
            limit = LIMITS[name].get(tier)
            print(
                f"{name:<12}{tier:<12}{times[tier] * 1e3:>7.1f} ms{times[tier] / times['plain']:>8.2f}"
                f"{f'≤ {limit:g}' if limit else '':>7}{peak:>7.0f} MiB{peak / plain_peak:>8.2f}"
                f"{(peak - start) / (plain_peak - plain_start):>13.2f}"
            )


if __name__ == "__main__":
    main()
