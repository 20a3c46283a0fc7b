"""Whether what a check names hurts: short trainings with and without each fault, on three architectures or more.

    python bench/audit_harm.py            # all of them (some minutes on one core)
    python bench/audit_harm.py clone norm # those with such a word in their name

Prints the Markdown table of docs/faults.md. A perceptron and a residual network of convolutions learn the digits, a
small GPT the word that follows from the last but one, where half is the most there is; some faults need other networks.
The number is the accuracy over the last 20 of 120 steps at batch 32, mean of three seeds, for Adam at 0.003 and for SGD
with momentum at 0.05; beside it what `sounding.check` finds at the first seed.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.probe.check import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from short_training import accuracy_of
from workers import in_order

import networks

STEPS, BATCH, LAST, WORDS, LENGTH = 120, 32, 20, 16, 8
ADAM_RATE, SGD_RATE, SEEDS = 3e-3, 0.05, (1, 2, 3)


class Layer(nn.Module):
    """A linear map behind a normalization, around which the signal also goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (part.view(n, t, 4, d // 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(n, t, d))


class Gpt(nn.Module):
    """Four blocks of attention and perceptron, weights of 0.02."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(nn.Sequential(Attention(width), Layer(width)) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Perceptron(nn.Module):
    """Eight ReLU layers by He."""

    def __init__(self, widths: tuple[int, ...] = 8 * (64,)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(*pair) for pair in pairwise((64, *widths)))
        self.head = nn.Linear(widths[-1], 10)
        for layer in self.blocks:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = torch.relu(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Six residual blocks of convolutions with batch norm."""

    def __init__(self, channels: int = 8, depth: int = 6, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels), activation(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(depth)
        )
        self.norm, self.head = nn.BatchNorm2d(channels), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 1, 8, 8))
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.relu(self.norm(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Blocks one behind the other, in front of them what makes their width and behind them a head."""

    def __init__(self, blocks: list[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(64, width), nn.ModuleList(blocks), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def plain(activation: type[nn.Module], *, norm: bool = False, depth: int = 6) -> nn.Module:
    """Linear maps by He for ReLU and by LeCun for others, batch norms if wanted, and activations."""
    parts = [[nn.Linear(64, 64), *([nn.BatchNorm1d(64)] if norm else []), activation()] for _ in range(depth)]
    for linear, *_ in parts:
        nn.init.normal_(linear.weight, std=((2 if activation is nn.ReLU else 1) / 64) ** 0.5)  # type: ignore[arg-type]
    return Stack([nn.Sequential(*block) for block in parts])


class Around(nn.Sequential):
    """Parts around which the signal also goes."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def around(activation: type[nn.Module], depth: int = 4) -> nn.Module:
    """Residual blocks of batch norm, activation and a linear map."""
    return Stack([Around(nn.BatchNorm1d(64), activation(), nn.Linear(64, 64)) for _ in range(depth)])


class Wrapped(nn.Module):
    """A network with something behind it, or with its input changed."""

    def __init__(self, body: nn.Module, behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.behind = body, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.body(x))


class Parts(nn.Module):
    """A network that is given a few samples at a time, so that batch norms see no more."""

    def __init__(self, body: nn.Module, size: int) -> None:
        super().__init__()
        self.body, self.size = body, size

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(part) for part in x.split(self.size)])


Builders = dict[str, Callable[[], nn.Module]]
THREE: Builders = {"perceptron": Perceptron, "residual": Residual, "GPT": Gpt}
NORMED: Builders = {name: THREE[name] for name in ("residual", "GPT")} | {
    "batch norm": lambda: plain(nn.ReLU, norm=True)
}
PIXELS: Builders = {name: THREE[name] for name in ("perceptron", "residual")} | {"tanh": lambda: plain(nn.Tanh)}
RECTIFIED: Builders = {"ReLU": lambda: plain(nn.ReLU), "residual": Residual, "GPT": Gpt}
FEW: Builders = {
    "batch norm": lambda: plain(nn.ReLU, norm=True),
    "tanh with batch norm": lambda: plain(nn.Tanh, norm=True),
    "residual with batch norm": lambda: around(nn.ReLU),
}
BOUNDED: Builders = {
    "tanh": lambda: plain(nn.Tanh),
    "hard tanh": lambda: plain(nn.Hardtanh),
    "residual tanh": lambda: Residual(activation=nn.Tanh),
}
UNEVEN: Builders = {
    "perceptron": lambda: Perceptron(4 * (128, 32)),
    "GPT": Gpt,
    "residual perceptron": lambda: Stack([Layer(64) for _ in range(4)]),
}
BUILDERS: Builders = (
    THREE | NORMED | PIXELS | FEW | BOUNDED | RECTIFIED | {f"{name}, uneven": one for name, one in UNEVEN.items()}
)


def matrices(model: nn.Module, index: int | None = 2) -> list[Tensor]:
    """The matrices of one block, or of all blocks."""
    blocks = list(model.blocks) if index is None else [model.blocks[index]]  # type: ignore[arg-type, index]
    return [weight for block in blocks for weight in block.parameters() if weight.dim() > 1]


def biases(model: nn.Module, index: int) -> list[Tensor]:
    """The biases of linear maps and convolutions of a block."""
    found = (part for part in model.blocks[index].modules() if isinstance(part, nn.Linear | nn.Conv2d))  # type: ignore[index, union-attr]
    return [part.bias for part in found if part.bias is not None]


def each(weights: list[Tensor], change: Callable[[Tensor], object]) -> None:
    for weight in weights:
        change(weight)


def clone(model: nn.Module) -> None:
    for index in range(1, len(model.blocks)):  # type: ignore[arg-type]
        model.blocks[index] = copy.deepcopy(model.blocks[0])  # type: ignore[index, operator]


def tie(model: nn.Module) -> None:
    if isinstance(model, Gpt):
        nn.init.normal_(model.embed.weight)
        model.head.weight = model.embed.weight
    else:
        model.head.weight.mul_(100)  # type: ignore[union-attr, operator]


def norms(model: nn.Module, value: float) -> None:
    for part in model.modules():
        if isinstance(part, nn.LayerNorm | nn.BatchNorm2d | nn.BatchNorm1d):
            part.weight.fill_(value)


def shift(model: nn.Module) -> None:
    found = [part for part in model.modules() if isinstance(part, nn.LayerNorm | nn.BatchNorm2d | nn.BatchNorm1d)]
    for part in found[2:3]:
        part.bias.fill_(10.0)


def freeze(model: nn.Module) -> None:
    for block in list(model.blocks)[:-1]:  # type: ignore[arg-type]
        block.requires_grad_(False)


def cut(model: nn.Module) -> None:
    last = model.norm if isinstance(model, Residual) else model.blocks[-1]  # type: ignore[index]
    last.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),))  # type: ignore[union-attr]


def kill(model: nn.Module, share: float) -> None:
    """Let a share of the units of the third block be zero for every sample: the bias before their activation."""
    block = model.blocks[2]  # type: ignore[index]
    before = block if isinstance(block, nn.Linear) else block[1].up if isinstance(model, Gpt) else block[0]  # type: ignore[index, union-attr]
    before.bias[: round(share * len(before.bias))] = -30.0  # type: ignore[union-attr, index, arg-type]


def saturate(model: nn.Module, factor: float) -> None:
    """What bounded activations are given times a factor, in all blocks."""
    for block in model.blocks:  # type: ignore[union-attr]
        block[0].weight.mul_(factor)  # type: ignore[index, union-attr, operator]


def exchange(model: nn.Module) -> None:
    """Every matrix of the blocks drawn by He, those of the third with fan-out for fan-in."""
    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        for part in block.modules():
            if isinstance(part, nn.Linear):
                mode = "fan_out" if index == 2 else "fan_in"
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu", mode=mode)


def unwritten(weight: Tensor) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, weight.shape, dtype=torch.int64).to(torch.int32).view(torch.float32)
    weight.copy_(torch.where(torch.isfinite(bits), bits, torch.zeros(())))


FAULTS: dict[str, tuple[Builders, Callable[[nn.Module], object]]] = {
    "none": (BUILDERS, lambda model: None),
    "never_written: one block": (THREE, lambda model: each(matrices(model), unwritten)),
    "constant_weight: one block of zeros": (THREE, lambda model: each(matrices(model), lambda w: w.zero_())),
    "constant_weight: one block of 0.1": (THREE, lambda model: each(matrices(model), lambda w: w.fill_(0.1))),
    "constant_weight: all blocks of 0.1": (THREE, lambda model: each(matrices(model, None), lambda w: w.fill_(0.1))),
    "zero_start: the head": (THREE, lambda model: model.head.weight.zero_()),  # type: ignore[union-attr, operator]
    "cloned_weights: all blocks": (THREE, clone),
    "odd_scale: one block × 10": (THREE, lambda model: each(matrices(model), lambda w: w.mul_(10))),
    "odd_scale: one block × 100": (THREE, lambda model: each(matrices(model), lambda w: w.mul_(100))),
    "odd_scale: one block ÷ 100": (THREE, lambda model: each(matrices(model), lambda w: w.div_(100))),
    "start_loss: the head × 10": (THREE, lambda model: model.head.weight.mul_(10)),  # type: ignore[union-attr, operator]
    "start_loss: tied embedding of 1, or head × 100": (THREE, tie),
    "norm_weight: norms of 10": (NORMED, lambda model: norms(model, 10.0)),
    "norm_weight: norms of 0.1": (NORMED, lambda model: norms(model, 0.1)),
    "large_bias: one block of 10": (THREE, lambda model: each(biases(model, 1), lambda b: b.fill_(10.0))),
    "large_bias: one norm of shift 10": (NORMED, shift),
    "softmax_twice": (THREE, lambda model: None),
    "huge_signal: inputs × 10⁵": (PIXELS, lambda model: None),
    "frozen: all blocks but the last": (THREE, freeze),
    "parameter_not_finite: one entry": (
        THREE,
        lambda model: each(matrices(model)[:1], lambda w: w[0, 0].fill_(math.nan)),
    ),
    "config_law: all blocks × 5": (THREE, lambda model: each(matrices(model, None), lambda w: w.mul_(5))),
    "fans_exchanged": ({f"{name}, uneven": one for name, one in UNEVEN.items()}, exchange),
    "dead_units: 60% of one block": (RECTIFIED, lambda model: kill(model, 0.6)),
    "dead_units: one block": (RECTIFIED, lambda model: kill(model, 1.0)),
    "saturation: gain × 10": (BOUNDED, lambda model: saturate(model, 10.0)),
    "saturation: gain × 100": (BOUNDED, lambda model: saturate(model, 100.0)),
    "degenerate_batch: half of the samples repeated": (PIXELS, lambda model: None),
    "degenerate_batch: one sample repeated": (PIXELS, lambda model: None),
    "batch_too_small: norm over 4 samples": (FEW, lambda model: None),
    "batch_too_small: norm over 2 samples": (FEW, lambda model: None),
    "class_imbalance: one class of ten with 9 of 10 samples": (PIXELS, lambda model: None),
    "detached: before the last block, or norm": (THREE, cut),
}


def build(architecture: str, fault: str, seed: int) -> nn.Module:
    """The network with the fault planted."""
    builders, change = FAULTS[fault]
    with networks.drawn_from(seed):
        model = builders[architecture]()
        with torch.no_grad():
            change(model)
    return Wrapped(model, lambda logits: logits.softmax(-1)) if fault == "softmax_twice" else model


def draw(architecture: str, fault: str) -> tuple[Tensor, Tensor]:
    """A batch with its labels."""
    if architecture.startswith("GPT"):
        words = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
        for index in range(LENGTH):
            before = words[:, index - 1] if index else words[:, 0]  # the word before the last: attention is needed
            words[:, index + 1] = (5 * before + torch.randint(0, 2, (BATCH,))) % WORDS
        return words[:, :-1], words[:, 1:].flatten()
    if "imbalance" in fault:
        pixels, labels = networks.batch("standardized digits", samples=40 * BATCH, shape=(64,))
        rare, common = (torch.nonzero(condition).flatten() for condition in (labels > 0, labels == 0))
        kept = torch.cat([common[: BATCH - BATCH // 10], rare[: BATCH // 10]])
        return pixels[kept], labels[kept]
    pixels, labels = networks.batch("standardized digits", samples=BATCH, shape=(64,))
    if "repeated" in fault:
        kept = torch.arange(BATCH) % (BATCH // 2 if "half" in fault else 1)
        return pixels[kept], labels[kept]
    return (pixels * 1e5 if "inputs" in fault else pixels), labels


def norm_over(fault: str) -> int:
    """Over how many samples batch norms take their statistics."""
    return next((size for size in (2, 4) if f"norm over {size} samples" in fault), BATCH)


def accuracy(architecture: str, fault: str, rate: float, *, adam: bool) -> float:
    """Of the last steps, mean over seeds; 0 where the loss leaves the numbers."""
    found = []
    for seed in SEEDS:
        model, size = build(architecture, fault, seed), norm_over(fault)
        found.append(
            accuracy_of(
                Parts(model, size) if size < BATCH else model, lambda: draw(architecture, fault), rate,
                adam=adam, steps=STEPS, last=LAST, seed=seed,
            )
        )  # fmt: skip
    return sum(found) / len(found)


def findings(architecture: str, fault: str) -> str:
    """What the check says, high first; batch norms over few samples are given no more."""
    with networks.drawn_from(2):
        inputs, labels = (part[: norm_over(fault)] if norm_over(fault) < BATCH else part
                          for part in draw(architecture, fault))  # fmt: skip
        model = build(architecture, fault, SEEDS[0])
        verdict = check(model, inputs, labels, loss="cross_entropy", theory=False).verdict
    return ", ".join(dict.fromkeys(f"{one.kind} ({one.severity})" for one in verdict.findings)) or "–"


def line(task: tuple[str, str]) -> str:
    """One line of the table."""
    fault, architecture = task
    best = [accuracy(architecture, fault, rate, adam=adam) for adam, rate in ((True, ADAM_RATE), (False, SGD_RATE))]
    return f"| {fault} | {architecture} | {best[0]:.0%} | {best[1]:.0%} | {findings(architecture, fault)} |"


def print_table(description: str | None, faults: Mapping[str, Any], line: Callable[[tuple[str, str]], str]) -> None:
    """Print a row for every fault and each of its architectures, which stand first in what belongs to it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose name has one of these words")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    chosen = [fault for fault in faults if not given.words or any(word in fault for word in given.words)]
    tasks = [(fault, architecture) for fault in chosen for architecture in faults[fault][0]]
    print("| fault | network | Adam | SGD | found |\n|---|---|---|---|---|")
    for row in in_order(line, tasks, processes=given.processes):
        print(row, flush=True)


if __name__ == "__main__":
    print_table(__doc__, FAULTS, line)
