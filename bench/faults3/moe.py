"""A language model whose feed-forward layers are mixtures of experts, two for each word."""

from __future__ import annotations

import torch
from common import Fault, Network, accuracy, class_loss, draw, text
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LENGTH, BLOCKS, EXPERTS = 32, 48, 4, 16, 4, 4

FAULTS = (
    Fault("router_biased", "router to the same experts", ("router_collapse", "large_bias"), r"blocks\.\d\.moe|router"),
    Fault("experts_copied", "weights that start as copies", ("cloned_weights",), r"experts"),
    Fault("router_no_grad", "part cut off from the gradient", ("detached", "unused", "behind_zeros"), r"router"),
    Fault("softmax_over_words", "softmax over the wrong axis", ("wrong_axis", "mixed_samples"), r"moe|router|blocks"),
    Fault("experts_large", "branch not scaled in one block", ("odd_scale", "odd_branch"), r"blocks\.2"),
    Fault("place_unused", "parameter never used", ("unused",), r"place"),
)


class Mixture(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        words = x.reshape(-1, WIDTH)
        share = self.router(words).softmax(0 if self.fault == "softmax_over_words" else -1)
        best, chosen = share.topk(2, -1)
        best = torch.full_like(best, 0.5) if self.fault == "router_no_grad" else best / best.sum(-1, keepdim=True)
        out = torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(words[rows]) * best[rows, slots, None])
        return out.view(x.shape)


class Block(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = Mixture(fault)

    def attend(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        scores = split(self.query(x)) @ split(self.key(x)).transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.out((weights @ split(self.value(x))).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.moe(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(fault) for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        draw(self)
        nn.init.normal_(self.head.weight, std=0.02)
        for block in self.blocks:
            if fault == "router_biased":
                block.moe.router.bias.data.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
            if fault == "experts_copied":
                for expert in block.moe.experts[1:]:
                    expert.load_state_dict(block.moe.experts[0].state_dict())
        if fault == "experts_large":
            for expert in self.blocks[2].moe.experts:
                expert[2].weight.data.mul_(30)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        if self.fault != "place_unused":
            x = x + self.place(torch.arange(words.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    words = text(generator, 32, LENGTH + 1, WORDS)
    return words[:, :-1], words[:, 1:]


NETWORK = Network("moe", Decoder, batch, FAULTS, class_loss, accuracy, 1 / WORDS, steps=100)
