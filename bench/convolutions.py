"""Convolutions of a stack as products and in groups: milliseconds of a training step of the networks of the ledger.

    python bench/convolutions.py --device cuda
    python bench/convolutions.py --small

`sounding.train` turns wide convolutions of a stack into products of patches and weights on a GPU. Each line is a step
of a stack, with all its convolutions as products or all in groups, after the first one, which captures it on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from sounding.models import AlexNet, Vgg19
from sounding.train import Recipe, vmapped
from sounding.train.group import Group


def time_step(make: Callable[[torch.Generator], nn.Module], runs: int, batch: int, *, own: bool, wide: int) -> float:
    """Seconds of a step of `runs` networks, convolutions of at least `wide` channels as products."""
    vmapped.WIDE = wide
    device = torch.device(arguments.device)
    stack = vmapped.Vmapped([make(torch.Generator().manual_seed(run)).to(device) for run in range(runs)], device)
    if device.type == "cpu":  # where a stack keeps its convolutions by itself
        for module in stack._skeleton.modules():
            vmapped.multiply_patches_(module)
    group = Group(stack, [0.01] * runs, Recipe(batch_size=batch, steps=arguments.steps), device, own=own)
    shape = (runs, batch) if own else (batch,)
    inputs, targets = torch.randn(*shape, 3, 32, 32, device=device), torch.randint(10, shape, device=device)
    group.step(inputs, targets)
    started = read_clock()
    for _ in range(arguments.steps):
        group.step(inputs, targets)
    return (read_clock() - started) / arguments.steps


def read_clock() -> float:
    """Seconds; of the GPU by the wall once it has nothing left to do, else those of this process."""
    if arguments.device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--small", action="store_true", help="networks that a CPU trains in seconds")
arguments = parser.parse_args()
torch.set_float32_matmul_precision("high")  # TF32, as torch's convolutions have it
small = arguments.small or arguments.device == "cpu"
width, narrow = (4, 2) if small else (64, 16)
CASES: dict[str, tuple[Callable[[torch.Generator], nn.Module], int, int, bool]] = {
    "AlexNet, 20 convolutions": (lambda g: AlexNet(depth=20, width=width, dropout=0.0, generator=g), 48, 30, True),
    "AlexNet, 80 convolutions": (lambda g: AlexNet(depth=80, width=width, dropout=0.0, generator=g), 12, 30, True),
    "VGG-19": (lambda g: Vgg19(width=narrow, dropout=0.0, init="he", generator=g), 12, 128, False),
}
print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if arguments.device != 'cpu' else 'one CPU'}")
for name, (make, runs, batch, own) in CASES.items():
    runs, batch = (2, 8) if small else (runs, batch)
    products, groups = (1e3 * time_step(make, runs, batch, own=own, wide=wide) for wide in (0, 1 << 30))
    print(f"{name}, {runs} networks, batch {batch}: {products:.1f} ms a step as products, {groups:.1f} in groups")
