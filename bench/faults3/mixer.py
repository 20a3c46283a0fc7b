"""An MLP-Mixer: one perceptron across the patches, one across the channels."""

from __future__ import annotations

import copy

import torch
from common import Fault, Network, accuracy, digits
from torch import Tensor, nn

WIDTH, PATCHES, BLOCKS = 32, 16, 6

FAULTS = (
    Fault("no_activation", "activation missing everywhere", ("activation", "cause"), r".*"),
    Fault("blocks_copied", "weights that start as copies", ("cloned_weights",), r"blocks"),
    Fault(
        "all_positive",
        "weights drawn uniformly from 0 to 1",
        ("odd_scale", "rank_collapse", "start_loss", "huge_signal", "token_collapse", "gradient_alignment"),
        r".*",
    ),
    Fault(
        "norm_left_out",
        "norm left out in one block",
        ("odd_branch", "unused", "cause", "huge_signal", "gradient_explosion"),
        r"blocks\.[34]",
    ),
    Fault(
        "norm_behind_sum",
        "norm behind the sum in a deep network",
        ("gradient_vanishing", "gradient_explosion", "token_collapse", "rank_collapse", "gradient_alignment", "cause"),
        r".*",
    ),
)


def perceptron(width: int, hidden: int, fault: str | None) -> nn.Sequential:
    act = nn.Identity() if fault == "no_activation" else nn.GELU()
    return nn.Sequential(nn.Linear(width, hidden), act, nn.Linear(hidden, width))


class Block(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.norm1, self.tokens = nn.LayerNorm(WIDTH), perceptron(PATCHES, 2 * PATCHES, fault)
        self.norm2, self.channels = nn.LayerNorm(WIDTH), perceptron(WIDTH, 4 * WIDTH, fault)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "norm_behind_sum":
            x = self.norm1(x + self.tokens(x.transpose(1, 2)).transpose(1, 2))
            return self.norm2(x + self.channels(x))
        y = x if self.fault == "norm_left_out" else self.norm1(x)
        x = x + self.tokens(y.transpose(1, 2)).transpose(1, 2)
        y = x if self.fault == "norm_left_out" else self.norm2(x)
        return x + self.channels(y)


class Mixer(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, 2, stride=2)
        count = 24 if fault == "norm_behind_sum" else BLOCKS
        chosen = [fault if fault != "norm_left_out" or i == 3 else None for i in range(count)]
        self.blocks = nn.Sequential(*(Block(each) for each in chosen))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
                if fault == "all_positive":
                    nn.init.uniform_(module.weight)
        if fault == "blocks_copied":
            self.blocks = nn.Sequential(*(copy.deepcopy(self.blocks[0]) for _ in range(BLOCKS)))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    return digits(generator, 64)


NETWORK = Network("mixer", Mixer, batch, FAULTS, "cross_entropy", accuracy, 0.1)
