"""What a live monitor costs: steps with and without `sounding.Monitor(model, every=100)`, and memory over time.

    python bench/monitor.py                   all networks
    python bench/monitor.py --only small --rounds 20 --threads 1
    python bench/monitor.py --trial --rounds 3 --threads 1    what `sounding check --steps 20` costs beside a plain loop

Blocks of 100 steps without a monitor, with one, with one that writes JSON lines and with one that does not look between
modules take turns, so that a busy machine slows them alike; a block with a monitor holds exactly one measured step. The
overhead is of the best blocks, in time of the processor: others may use the machine meanwhile. Memory is
the resident size of the process while a monitor measures every step, far more often than anyone would.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding import Monitor
from sounding.train import JsonLines
from sounding.train.trial import run_trial

EVERY = 100
LIMIT = 0.05
MEASURED = (500, 1000, 2000, 4000)


def tiny() -> tuple[nn.Module, Tensor]:
    """Two hidden layers of 64 units, batch 32: a step in a fraction of a millisecond."""
    return _mlp(64, 64, 2), torch.randn(32, 64)


def small() -> tuple[nn.Module, Tensor]:
    """Two hidden layers of 256 units on 28 × 28 images, batch 128."""
    return _mlp(784, 256, 2), torch.randn(128, 784)


def deep() -> tuple[nn.Module, Tensor]:
    """64 layers of width 128, batch 128."""
    return _mlp(128, 128, 64), torch.randn(128, 128)


def vgg() -> tuple[nn.Module, Tensor]:
    """A VGG of 8 convolutions with batch norm on 32 × 32 images, batch 32."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((32, 2), (64, 2), (128, 2), (256, 2)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10)), torch.randn(32, 3, 32, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    """Two encoder layers of width 64 with 4 heads over 32 positions, batch 16."""
    return _encoder(2, 64, 32), torch.randn(16, 32, 64)


def encoder() -> tuple[nn.Module, Tensor]:
    """Six encoder layers of width 256 with 4 heads over 64 positions, batch 16."""
    return _encoder(6, 256, 64), torch.randn(16, 64, 256)


def _encoder(depth: int, width: int, positions: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(positions * width, 10))


def _mlp(inputs: int, width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for layer in range(depth):
        layers += [nn.Linear(width if layer else inputs, width), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
    return nn.Sequential(*layers, nn.Linear(width, 10))


NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int]] = {
    "tiny": (tiny, 30),
    "small": (small, 20),
    "deep": (deep, 6),
    "vgg": (vgg, 4),
    "transformer": (transformer, 8),
    "encoder": (encoder, 3),
}


def make_step(model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    """One step of SGD with momentum, at a rate that leaves the network as it is."""
    targets = torch.randint(0, 10, (len(inputs),))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def measure_time(name: str, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds per step in the best block of each kind."""
    model, inputs = NETWORKS[name][0]()
    step = make_step(model, inputs)
    monitors = {
        "none": None,
        "memory": Monitor(model, every=EVERY, initial_step=1),
        "json": Monitor(model, every=EVERY, initial_step=1, sinks=JsonLines(folder / f"{name}.jsonl")),
        "outside": Monitor(model, every=EVERY, initial_step=1, inside=False),
    }
    best = dict.fromkeys(monitors, float("inf"))
    for turn in range(rounds + 1):
        for kind, monitor in monitors.items():
            start = time.process_time()
            if monitor is None:
                for _ in range(EVERY):
                    step()
            else:
                with monitor:
                    for _ in range(EVERY):
                        step()
                        monitor.step()
            if turn:  # the first is for warming up
                best[kind] = min(best[kind], (time.process_time() - start) / EVERY)
    return best


def measure_trial(name: str, rounds: int, steps: int = 20) -> tuple[float, float]:
    """Seconds per step of a plain loop and of a short trial, three of whose steps are measured; the best of each."""
    model, inputs = NETWORKS[name][0]()
    targets = torch.randint(0, 10, (len(inputs),))

    def train_plainly() -> None:
        trained = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            functional.cross_entropy(trained(inputs), targets).backward()
            optimizer.step()

    best = [float("inf"), float("inf")]
    for turn in range(rounds + 1):
        for place, work in enumerate((train_plainly, lambda: run_trial(model, lambda: (inputs, targets), steps=steps))):
            start = time.process_time()
            work()
            if turn:  # the first is for warming up
                best[place] = min(best[place], (time.process_time() - start) / steps)
    return best[0], best[1]


def resident() -> float:
    """Resident memory in MiB (Linux)."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def measure_memory(folder: Path) -> list[tuple[int, float]]:
    """Resident memory after some measured steps, every step measured and written."""
    model, inputs = tiny()
    step = make_step(model, inputs)
    found = []
    with Monitor(model, every=1, sinks=JsonLines(folder / "memory.jsonl")) as monitor:
        for done in range(1, MEASURED[-1] + 1):
            step()
            monitor.step()
            if done in MEASURED:
                gc.collect()
                found.append((done, resident()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, help="blocks of each kind; by default as many as take about 10 s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trial", action="store_true", help="the short trial instead of the monitor")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    logging.getLogger("sounding.monitor").setLevel(logging.ERROR)  # what it finds is not the point here
    if options.trial:
        for name in [options.only] if options.only else list(NETWORKS):
            plain, trial = measure_trial(name, options.rounds or 5)
            print(f"{name:<13}step {plain * 1e3:.2f} ms, of a trial {trial * 1e3:.2f} ms: ×{trial / plain:.2f}")
        return
    print(f"every={EVERY}, torch {torch.__version__}, {options.threads} threads")
    print(f"{'network':<13}{'step':>11}{'monitor':>11}{'+ JSON':>11}{'outside':>11}   limit {LIMIT:.0%}")
    with tempfile.TemporaryDirectory() as folder:
        for name in [options.only] if options.only else list(NETWORKS):
            best = measure_time(name, options.rounds or NETWORKS[name][1], Path(folder))
            memory, json, outside = (best[kind] / best["none"] - 1 for kind in ("memory", "json", "outside"))
            met = "met" if memory < LIMIT else "missed"
            print(f"{name:<13}{best['none'] * 1e3:>8.3f} ms{memory:>+11.1%}{json:>+11.1%}{outside:>+11.1%}   {met}")
        print("resident memory, every step measured and written:")
        for done, size in measure_memory(Path(folder)):
            print(f"  {done:>5} steps  {size:8.1f} MiB")


if __name__ == "__main__":
    main()
