"""What a check and a monitor cost on a GPU, against the plain pass: `python bench/probe.py --device cuda`.

Networks: GPT-2 small and of 1.5 B parameters (8 sequences of 1024 tokens), ResNet-50 (batch 128, 224 × 224), a 64-layer
MLP (width and batch 128). Ways take turns and the ratio is of the medians of their rounds.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.probe.on_device import multiply
from sounding.train.monitor.between import LISTENED

GOALS = {"fast": 1.5, "full": 2.0}
EVERY = 100


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 with its own initialization and a tied head."""

    def __init__(self, width: int, heads: int, blocks: int, *, words: int = 50257, tokens: int = 1024) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                shrink = (2 * blocks) ** -0.5 if name.endswith(("join.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * shrink)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.act = nn.ReLU()
        self.past: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.past = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))
        return self.act(self.past(x) + self.norm3(self.conv3(y)))


def resnet50() -> nn.Module:
    """ResNet-50 with torch's default start."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def mlp() -> nn.Module:
    """64 layers of width 128, ReLU, He's start."""
    layers: list[nn.Module] = []
    for _ in range(64):
        layers += [nn.Linear(128, 128), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
    return nn.Sequential(*layers, nn.Linear(128, 10))


def make(name: str, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with its inputs and targets."""
    torch.manual_seed(0)
    with torch.device(device):
        if name.startswith("gpt2"):
            model: nn.Module = GPT(768, 12, 12) if name == "gpt2" else GPT(1600, 25, 48)
            tokens = torch.randint(0, 50257, (8, 1025))
            return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if name == "resnet50":
            return resnet50(), torch.randn(128, 3, 224, 224), torch.randint(0, 1000, (128,))
        return mlp(), torch.randn(128, 128), torch.randint(0, 10, (128,))


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def medians(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each way, in seconds; the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, way in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if turn > 1:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def peaks(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The peak memory of each way, in GiB."""
    found = {}
    for name, way in ways.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        way()
        found[name] = torch.cuda.max_memory_allocated() / 2**30
    return found


def ways_of(name: str, *, compiled: bool = False) -> dict[str, Callable[[], object]]:
    """A plain pass of a network, a watched one of each tier with its profile, and whole checks without theory."""
    model, inputs, targets = make(name, "cuda")
    run = torch.compile(model) if compiled else model

    def plain() -> None:
        model.zero_grad()
        loss_of(run(inputs), targets).backward()

    def watched(tier: str) -> Callable[[], object]:
        def one() -> object:
            with sounding.watch(run, tier=tier) as kept:
                plain()
            return kept.profile

        return one

    def checked(tier: str) -> Callable[[], object]:
        return lambda: sounding.check(run, inputs, targets, loss=loss_of, tier=tier, theory=False)

    return {
        "plain": plain,
        "fast": watched("fast"),
        "full": watched("full"),
        "check fast": checked("fast"),
        "check full": checked("full"),
    }


def measure_checks(name: str, *, rounds: int, tf32: bool = False, compiled: bool = False) -> None:
    """Print what the tiers and whole checks of a network cost."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    ways = ways_of(name, compiled=compiled)
    times, memory = medians(ways, rounds), peaks(ways)
    label = name + (" tf32" if tf32 else "") + (" compiled" if compiled else "")
    for way, took in times.items():
        goal = GOALS.get(way)
        print(
            f"{label:<18}{way:<12}{took * 1e3:>9.2f} ms{took / times['plain']:>8.2f}"
            f"{f'≤ {goal:g}' if goal else '':>8}{memory[way]:>8.2f} GiB{memory[way] / memory['plain']:>7.2f}",
            flush=True,
        )


def write_profiles(name: str, folder: Path) -> None:
    """Write where the time of each way goes: kernels and operations by torch's profiler, functions by Python's."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for way, work in ways_of(name).items():
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as seen:
            work()
            torch.cuda.synchronize()
        tables = [seen.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60)
                  for key in ("self_cuda_time_total", "self_cpu_time_total")]  # fmt: skip
        functions, words = cProfile.Profile(), io.StringIO()
        functions.runcall(lambda work=work: (work(), torch.cuda.synchronize()))
        for order in ("cumulative", "tottime"):
            pstats.Stats(functions, stream=words).sort_stats(order).print_stats(45)
        (folder / f"{name}-{way.replace(' ', '-')}.txt").write_text("\n".join([*tables, words.getvalue()]))


def measure_products() -> None:
    """Print what the inner products of sample matrices cost, and what reading them or casting them would."""
    for samples, features in ((8, 786432), (64, 802816), (128, 802816), (128, 100352), (128, 25088)):
        matrix = torch.randn(samples, features, device="cuda")
        wide = matrix.double()
        out, broken = torch.zeros(samples, samples, dtype=torch.float64, device="cuda"), torch.zeros((), device="cuda")
        ways: dict[str, Callable[[], object]] = {
            "multiply": partial(multiply, matrix, out, broken),
            "read": matrix.sum,
            "cast": matrix.double,
            "product in float64": partial(torch.mm, wide, wide.mT),
        }
        told = ", ".join(f"{way} {took * 1e6:.0f}" for way, took in medians(ways, 9).items())
        print(f"products of {samples} × {features}, µs: {told}", flush=True)


def measure_monitor(name: str, *, rounds: int, compiled: bool = False) -> None:
    """Print what a monitor of every 100th step adds to a training in bfloat16 (the MLP in float32).

    One of LISTENED measured steps is listened to between modules, the others are not; the mean of both counts.
    """
    model, inputs, targets = make(name, "cuda")
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    kind = torch.bfloat16 if name != "mlp" else torch.float32

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", kind, enabled=kind is not torch.float32):
            loss = loss_of(run(inputs), targets)
        loss.backward()
        optimizer.step()

    def measured(monitor: sounding.Monitor) -> None:
        step()
        monitor.step()

    times = {"plain": medians({"plain": step}, rounds)["plain"]}
    always: Literal["always"] = "always"
    for told, inside in (("listened", always), ("light", True)):  # the second listens to its first step, a warm-up
        with sounding.Monitor(run, every=1, inside=inside) as monitor:
            times[told] = medians({told: partial(measured, monitor)}, min(rounds, LISTENED - 2))[told]
    mean = (times["listened"] + (LISTENED - 1) * times["light"]) / LISTENED
    label = name + (" compiled" if compiled else "")
    print(
        f"{label:<18}monitor at every={EVERY}: step {times['plain'] * 1e3:.2f} ms, measured step listened to "
        f"{times['listened'] * 1e3:.2f} ms, not listened to {times['light'] * 1e3:.2f} ms, "
        f"{(mean - times['plain']) / times['plain'] / EVERY:+.2%} of the training",
        flush=True,
    )


def run(only: str | None, rounds: int, *, compiled: bool, profiles: Path | None) -> None:
    """Print the whole table, of plain passes under torch.compile if asked; with a folder for profiles, write those."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    if profiles is not None:
        measure_products()
        for name in ("mlp", "gpt2", "resnet50"):
            if only in (None, name):
                write_profiles(name, profiles)
        return
    print(f"{'network':<18}{'way':<12}{'time':>12}{'ratio':>8}{'goal':>8}{'peak':>12}{'ratio':>7}")
    for name in ("mlp", "gpt2", "resnet50", "gpt2-xl"):
        if only in (None, name):
            measure_checks(name, rounds=rounds, compiled=compiled)
            if name == "gpt2" and not compiled:
                measure_checks(name, rounds=rounds, tf32=True)
    for name in ("mlp", "gpt2"):
        if only in (None, name):
            measure_monitor(name, rounds=rounds, compiled=compiled)
