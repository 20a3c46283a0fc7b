"""Many networks as one against one after another: milliseconds of a training step, per network, and the limit.

    python bench/train.py --device cuda
    python bench/train.py --device cpu --sizes

Perceptrons with ReLU and batch norm, plain SGD on cross-entropy. "One after another" is the plain PyTorch loop below,
in eager mode. "As one" is `sounding.train.train_together_`, timed as the difference of a longer and a shorter call, so
that stacking and capturing a graph are left out and everything a step needs is in.

The limit of a step is the larger of two times: its matrix products at the rate of a large square product of the same
precision, and the bytes it cannot avoid moving (weights read twice and written once; of each layer's activations, the
output written and read, and in the backward pass read twice and the gradient written and read) at the rate of a copy.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.models import Mlp
from sounding.train import Recipe, train_together_

FEATURES, CLASSES, SAMPLES = 64, 10, 1024
SMALL = ((4, 16, 16), (4, 32, 32), (8, 32, 64), (8, 64, 64), (16, 64, 128), (32, 64, 128), (32, 128, 128))


@dataclass(frozen=True)
class Size:
    """Of the networks and of a batch."""

    networks: int
    depth: int
    width: int
    batch: int

    @property
    def products(self) -> float:
        """Floating-point operations of the matrix products of one step of one network, forward and twice backward."""
        weights = FEATURES * self.width + (self.depth - 1) * self.width**2 + self.width * CLASSES
        return 6.0 * self.batch * weights - 2.0 * self.batch * FEATURES * self.width

    @property
    def bytes(self) -> float:
        """Of float32 that one step of one network cannot avoid moving."""
        weights = FEATURES * self.width + (self.depth - 1) * self.width**2 + self.width * CLASSES
        return 4.0 * (3 * weights + 6 * self.depth * self.batch * self.width)


def make_networks(size: Size) -> list[nn.Module]:
    """Fresh ones, each with weights of its own."""
    return [
        Mlp(FEATURES, CLASSES, depth=size.depth, width=size.width, norm="batch",
            generator=torch.Generator().manual_seed(seed))
        for seed in range(size.networks)
    ]  # fmt: skip


def make_data(device: str) -> tuple[Tensor, Tensor]:
    """Noise with labels; what is learnt does not matter here."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs.to(device), torch.randint(CLASSES, (SAMPLES,), generator=generator).to(device)


def time_one_after_another(size: Size, device: str, *, networks: int, steps: int) -> float:
    """Seconds of a step of one network, in the loop that everybody writes; the median over networks."""
    inputs, targets = make_data(device)
    seconds = []
    for network in make_networks(Size(networks, size.depth, size.width, size.batch)):
        network.to(device).train()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        for step in range(steps + 2):
            if step == 2:
                synchronize(device)
                begin = time.perf_counter()
            chosen = torch.randperm(SAMPLES, device=device)[: size.batch]
            loss = functional.cross_entropy(network(inputs[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        synchronize(device)
        seconds.append((time.perf_counter() - begin) / steps)
    return sorted(seconds)[len(seconds) // 2]


def time_as_one(size: Size, device: str, *, steps: int, group_size: int | None = None) -> float:
    """Seconds of a step of one network in a stack, from the difference of two calls."""
    networks, data = make_networks(size), make_data(device)

    def run(count: int) -> float:
        recipe = Recipe(steps=count, batch_size=size.batch, evaluate="end")
        begin = time.perf_counter()
        train_together_(
            networks,
            data,
            learning_rates=[0.01] * size.networks,
            recipe=recipe,
            generator=torch.Generator().manual_seed(0),
            device=device,
            group_size=group_size,
        )
        synchronize(device)
        return time.perf_counter() - begin

    run(2)
    short, long = run(3), run(3 + steps)
    return (long - short) / steps / size.networks


def measure_rates(device: str) -> tuple[float, float]:
    """Operations a second of a large float32 product, and bytes a second, read and written, of a copy."""
    side = 8192 if device.startswith("cuda") else 1024
    left, right = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    product = _fastest(lambda: torch.mm(left, right), device)
    source = torch.randn(2**28 if device.startswith("cuda") else 2**25, device=device)
    target = torch.empty_like(source)
    copy = _fastest(lambda: target.copy_(source), device)
    return 2 * side**3 / product, 8 * source.numel() / copy


def _fastest(work: Callable[[], Any], device: str) -> float:
    work()
    seconds = []
    for _ in range(5):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def compare(size: Size, device: str, *, eager_networks: int, steps: int, group_size: int | None) -> dict[str, Any]:
    """Both ways, their ratio, and the limit."""
    alone = time_one_after_another(size, device, networks=eager_networks, steps=max(3, steps // 4))
    stacked = time_as_one(size, device, steps=steps, group_size=group_size)
    return {
        "networks": size.networks,
        "depth": size.depth,
        "width": size.width,
        "batch": size.batch,
        "one_after_another_ms": alone * 1e3,
        "as_one_ms": stacked * 1e3,
        "ratio": alone / stacked,
    }


def main() -> None:
    """Print, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", type=int, default=100)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=0, help="of the stack; by default 200 on a GPU, 10 to 300 on a CPU"
    )
    parser.add_argument("--eager-networks", type=int, default=5, help="how many are timed one after another")
    parser.add_argument("--group-size", type=int, default=None)
    parser.add_argument("--sizes", action="store_true", help="smaller networks too, to see from where stacking pays")
    parser.add_argument("--out", default=None, metavar="JSON")
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    size = Size(options.networks, options.depth, options.width, options.batch)
    sizes = [Size(options.networks, *small) for small in SMALL] if options.sizes else [size]
    rate, bandwidth = measure_rates(options.device)
    about = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{about}, torch {torch.__version__}, float32")
    print(f"  matrix products {rate / 1e9:.0f} GFLOP/s, copies {bandwidth / 1e9:.0f} GB/s (read and written)")
    rows = []
    for each in sizes:
        steps = options.steps or (200 if cuda else round(min(300.0, max(10.0, 2e10 / each.products / each.networks))))
        row = compare(
            each, options.device, eager_networks=options.eager_networks, steps=steps, group_size=options.group_size
        )
        row["limit_ms"] = max(each.products / rate, each.bytes / bandwidth) * 1e3
        row["bound_by"] = "products" if each.products / rate > each.bytes / bandwidth else "memory"
        row["fraction"] = row["limit_ms"] / row["as_one_ms"]
        rows.append(row)
        print(
            f"  {each.networks} networks of depth {each.depth}, width {each.width}, batch {each.batch}, a step each: "
            f"one after another {row['one_after_another_ms']:.3f} ms, as one {row['as_one_ms']:.4f} ms, "
            f"{row['ratio']:.1f} times as fast; limit {row['limit_ms']:.4f} ms ({row['bound_by']}), "
            f"{row['fraction']:.0%} of it reached",
            flush=True,
        )
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": about,
        "torch": torch.__version__,
        "command": "python bench/train.py " + " ".join(sys.argv[1:]),
        "products_per_second": rate,
        "bytes_per_second": bandwidth,
        "rows": rows,
    }
    if options.out is not None:
        with open(options.out, "w", encoding="utf-8") as stream:
            json.dump(found, stream, indent=1)


if __name__ == "__main__":
    main()
