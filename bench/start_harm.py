"""More of what a check names before the first step: short trainings as in bench/audit_harm.py.

    python bench/start_harm.py            # all of them (some minutes on one core)
    python bench/start_harm.py inputs     # those with such a word in their name

Prints rows of the Markdown table of docs/faults.md: accuracy over the last 20 of 120 steps at batch 32, mean of three
seeds, for Adam at 0.003 and for SGD with momentum at 0.05, and what `sounding.check` finds at the first seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from audit_harm import (
    ADAM_RATE,
    FEW,
    LAST,
    PIXELS,
    SEEDS,
    SGD_RATE,
    STEPS,
    THREE,
    Builders,
    Gpt,
    Residual,
    Wrapped,
    around,
    draw,
    plain,
    print_table,
)
from short_training import accuracy_of
from torch import Tensor, nn
from torch.nn import functional

import networks
from sounding.probe.check import check


class Rows(nn.Module):
    """A network that reads a digit row by row."""

    def __init__(self, kind: type[nn.RNNBase] | None) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3) if kind is None else kind(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        signal = self.body(self.stem(x.view(-1, 8, 8)))
        return self.head(signal[0][:, -1] if isinstance(signal, tuple) else signal.mean(1))  # type: ignore[no-any-return]


SEQUENCES: Builders = {
    "encoder": lambda: Rows(None),
    "GRU": lambda: Rows(nn.GRU),
    "LSTM": lambda: Rows(nn.LSTM),
}
BENT: Builders = {"ReLU": lambda: plain(nn.ReLU), "tanh": lambda: plain(nn.Tanh), "residual": Residual}
AROUND: Builders = {
    "residual": Residual,
    "GPT": lambda: Gpt(blocks=6),
    "residual with batch norm": lambda: around(nn.ReLU),
}
Change = Callable[[nn.Module], nn.Module | None]


def behind(function: Callable[[Tensor], Tensor]) -> Change:
    return lambda model: Wrapped(model, function)


def before(function: Callable[[Tensor], Tensor]) -> Change:
    """The network with its input changed."""

    def change(model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda _module, given: (function(given[0]),))

    return change


def read_every(step: int) -> Change:
    """Of every so many pixels one is read."""
    kept = torch.zeros(64).index_fill(0, torch.arange(4, 64, step), 1.0)
    return before(lambda x: x * kept)


def straighten(model: nn.Module) -> None:
    """No activation in any block but the last, so that linear maps stand in a row."""
    for block in list(model.blocks)[:-1]:  # type: ignore[arg-type]
        for index, part in enumerate(block):
            if isinstance(part, nn.ReLU | nn.Tanh | nn.BatchNorm2d):
                block[index] = nn.Identity()


def drop(share: float) -> Change:
    """Dropout behind every block."""

    def change(model: nn.Module) -> None:
        for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[index] = nn.Sequential(block, nn.Dropout(share))  # type: ignore[index, operator]

    return change


def normalize_one(model: nn.Module) -> None:
    """Norms over single values in place of batch norms."""
    for block in model.blocks:  # type: ignore[union-attr]
        for index, part in enumerate(block):  # type: ignore[arg-type]
            if isinstance(part, nn.BatchNorm1d):
                block[index] = nn.GroupNorm(64, 64)  # type: ignore[index, operator]


def exchange_axes(model: nn.Module) -> None:
    """Samples are taken for steps."""
    for part in model.modules():
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.batch_first = False


def add_again(count: int) -> Change:
    """The last blocks, so many of them, add what they are given to what holds it already."""

    def change(model: nn.Module) -> None:
        for block in list(model.blocks)[-count:]:  # type: ignore[arg-type]
            block.register_forward_hook(lambda _module, given, out: given[0] + out)

    return change


FAULTS: dict[str, tuple[Builders, Change]] = {
    "none": (SEQUENCES | BENT | PIXELS, lambda model: None),
    "huge_signal: inputs × 10⁴": (PIXELS, before(lambda x: 1e4 * x)),
    "huge_signal: inputs × 1000": (PIXELS, before(lambda x: 1e3 * x)),
    "huge_signal: inputs × 100": (PIXELS, before(lambda x: 100 * x)),
    "huge_signal: inputs × 30": (PIXELS, before(lambda x: 30 * x)),
    "activation: ReLU behind the last layer": (THREE, behind(torch.relu)),
    "activation: tanh behind the last layer": (THREE, behind(torch.tanh)),
    "activation: none in a row of layers": (BENT, straighten),
    "dead_units: dropout of 0.9": (THREE, drop(0.9)),
    "dead_units: dropout of 0.99": (THREE, drop(0.99)),
    "wrong_axis: norms over one value": (FEW, normalize_one),
    "mixed_samples: samples taken for steps": (SEQUENCES, exchange_axes),
    "odd_branch: the last block adds its input twice": (AROUND, add_again(1)),
    "odd_branch: four blocks add their input twice": (AROUND, add_again(4)),
    "start_loss: nll_loss of logits": (THREE, lambda model: None),
    "unused_input: 1 of 16 pixels is read": (PIXELS, read_every(16)),
    "unused_input: 1 of 4 pixels is read": (PIXELS, read_every(4)),
}


def build(architecture: str, fault: str, seed: int) -> nn.Module:
    """The network with the fault planted."""
    builders, change = FAULTS[fault]
    with networks.drawn_from(seed):
        model = builders[architecture]()
        return change(model) or model


def line(task: tuple[str, str]) -> str:
    """One line of the table."""
    fault, architecture = task
    loss = functional.nll_loss if "nll_loss" in fault else functional.cross_entropy
    cells = []
    for adam, rate in ((True, ADAM_RATE), (False, SGD_RATE)):
        found = [
            accuracy_of(
                build(architecture, fault, seed), lambda: draw(architecture, ""), rate, adam=adam, steps=STEPS,
                last=LAST, seed=seed, loss=loss,
            )
            for seed in SEEDS
        ]  # fmt: skip
        cells.append(f"{sum(found) / len(found):.0%}")
    with networks.drawn_from(2):
        inputs, labels = draw(architecture, "")
        scale = float(fault.rpartition(" ")[2].replace("10⁴", "1e4")) if "inputs" in fault else 1.0
        model = build(architecture, "none" if "inputs" in fault else fault, SEEDS[0])
    verdict = check(model, scale * inputs if scale != 1 else inputs, labels, loss=loss).verdict
    kinds = dict.fromkeys(f"{one.kind} ({one.severity})" for one in verdict.findings if one.kind != "disagreement")
    return f"| {fault} | {architecture} | {cells[0]} | {cells[1]} | {', '.join(kinds) or '–'} |"


if __name__ == "__main__":
    print_table(__doc__, FAULTS, line)
