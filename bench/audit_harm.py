"""Whether what the audit names hurts: short trainings with and without each fault, on three architectures.

    python bench/audit_harm.py            # all of them (some minutes on one core)
    python bench/audit_harm.py clone norm # those with such a word in their name

Prints the Markdown table of docs/audit.md. A perceptron and a residual network of convolutions learn the digits, a
small GPT the word that follows from the last but one, where half is the most there is. The number is the accuracy over
the last 20 of 120 steps at batch 32, for Adam at 0.003 and for SGD with momentum at 0.05; beside it what
`sounding.check` finds.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.probe.check import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from short_training import accuracy_of

import networks

STEPS, BATCH, LAST, WORDS, LENGTH = 120, 32, 20, 16, 8
ADAM_RATE, SGD_RATE = 3e-3, 0.05


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

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64 if i == 0 else width, width) for i in range(depth))
        self.head = nn.Linear(width, 10)
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

    def __init__(self, channels: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(depth)
        )
        self.norm, self.head = nn.BatchNorm2d(channels), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 1, 8, 8))
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.relu(self.norm(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """A network with something behind it, or with its input changed."""

    def __init__(self, body: nn.Module, behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.behind = body, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.body(x))


BUILDERS: dict[str, Callable[[], nn.Module]] = {"perceptron": Perceptron, "residual": Residual, "GPT": Gpt}


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
        if isinstance(part, nn.LayerNorm | nn.BatchNorm2d):
            part.weight.fill_(value)


def shift(model: nn.Module) -> None:
    found = [part for part in model.modules() if isinstance(part, nn.LayerNorm | nn.BatchNorm2d)]
    for part in found[2:3]:
        part.bias.fill_(10.0)


def freeze(model: nn.Module) -> None:
    for block in list(model.blocks)[:-1]:  # type: ignore[arg-type]
        block.requires_grad_(False)


def cut(model: nn.Module) -> None:
    last = model.norm if isinstance(model, Residual) else model.blocks[-1]  # type: ignore[index]
    last.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),))  # type: ignore[union-attr]


def unwritten(weight: Tensor) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, weight.shape, dtype=torch.int64).to(torch.int32).view(torch.float32)
    weight.copy_(torch.where(torch.isfinite(bits), bits, torch.zeros(())))


FAULTS: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda model: None,
    "never_written: one block": lambda model: each(matrices(model), unwritten),
    "constant_weight: one block of zeros": lambda model: each(matrices(model), lambda w: w.zero_()),
    "constant_weight: one block of 0.1": lambda model: each(matrices(model), lambda w: w.fill_(0.1)),
    "constant_weight: all blocks of 0.1": lambda model: each(matrices(model, None), lambda w: w.fill_(0.1)),
    "zero_start: the head": lambda model: model.head.weight.zero_(),  # type: ignore[union-attr, operator]
    "cloned_weights: all blocks": clone,
    "odd_scale: one block × 10": lambda model: each(matrices(model), lambda w: w.mul_(10)),
    "odd_scale: one block × 100": lambda model: each(matrices(model), lambda w: w.mul_(100)),
    "odd_scale: one block ÷ 100": lambda model: each(matrices(model), lambda w: w.div_(100)),
    "start_loss: the head × 10": lambda model: model.head.weight.mul_(10),  # type: ignore[union-attr, operator]
    "start_loss: tied embedding of 1, or head × 100": tie,
    "norm_weight: norms of 10": lambda model: norms(model, 10.0),
    "norm_weight: norms of 0.1": lambda model: norms(model, 0.1),
    "large_bias: one block of 10": lambda model: each(biases(model, 1), lambda b: b.fill_(10.0)),
    "large_bias: one norm of shift 10": shift,
    "softmax_twice": lambda model: None,
    "huge_signal: inputs × 10⁵": lambda model: None,
    "frozen: all blocks but the last": freeze,
    "detached: before the last block, or norm": cut,
}


def build(architecture: str, fault: str) -> nn.Module:
    """The network with the fault planted."""
    with networks.seeded(1):
        model = BUILDERS[architecture]()
        with torch.no_grad():
            FAULTS[fault](model)
    return Wrapped(model, lambda logits: logits.softmax(-1)) if fault == "softmax_twice" else model


def draw(architecture: str, fault: str) -> tuple[Tensor, Tensor]:
    """A batch with its labels."""
    if architecture == "GPT":
        words = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
        for index in range(LENGTH):
            before = words[:, index - 1] if index else words[:, 0]  # the word before the last: attention is needed
            words[:, index + 1] = (5 * before + torch.randint(0, 2, (BATCH,))) % WORDS
        return words[:, :-1], words[:, 1:].flatten()
    pixels, labels = networks.batch("standardized digits", samples=BATCH, shape=(64,))
    return (pixels * 1e5 if "inputs" in fault else pixels), labels


def accuracy(architecture: str, fault: str, rate: float, *, adam: bool) -> float:
    """Of the last steps; 0 where the loss leaves the numbers."""
    model = build(architecture, fault)
    return accuracy_of(model, lambda: draw(architecture, fault), rate, adam=adam, steps=STEPS, last=LAST)


def findings(architecture: str, fault: str) -> str:
    """What the check says about the start, high first."""
    with networks.seeded(2):
        inputs, labels = draw(architecture, fault)
        verdict = check(build(architecture, fault), inputs, labels, loss="cross_entropy", theory=False).verdict
    return ", ".join(dict.fromkeys(f"{one.kind} ({one.severity})" for one in verdict.findings)) or "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose name has one of these words")
    words = parser.parse_args().words
    torch.set_num_threads(1)
    print("| fault | network | Adam | SGD | found |\n|---|---|---|---|---|")
    for fault in FAULTS:
        if words and not any(word in fault for word in words):
            continue
        for architecture in BUILDERS:
            if architecture == "GPT" and "inputs" in fault:
                continue
            if architecture == "perceptron" and ("norm_weight" in fault or "one norm" in fault):
                continue
            best = [
                accuracy(architecture, fault, rate, adam=adam) for adam, rate in ((True, ADAM_RATE), (False, SGD_RATE))
            ]
            told = findings(architecture, fault)
            print(f"| {fault} | {architecture} | {best[0]:.0%} | {best[1]:.0%} | {told} |", flush=True)


if __name__ == "__main__":
    main()
