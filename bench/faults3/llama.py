"""A language model with rotary positions, grouped queries, RMS norms and SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Fault, Network, accuracy, class_loss, draw, text
from torch import Tensor, nn

WORDS, WIDTH, HEADS, GROUPS, LENGTH, BLOCKS = 48, 64, 4, 2, 24, 5

FAULTS = (
    Fault("no_scale", "scores without 1/√d", ("entropy_collapse", "cause"), r"attn|blocks"),
    Fault("mask_inverted", "mask turned around", ("target_leak",), r".*", "it sees only what it has to predict"),
    Fault(
        "heads_by_view",
        "reshape that mixes heads and positions",
        ("target_leak", "wrong_axis", "disagreement"),
        r".*",
        "later words reach earlier places",
    ),
    Fault("no_shortcut", "shortcut missing in one block", ("odd_branch",), r"blocks\.2"),
    Fault(
        "tied_std_1", "embedding of deviation 1 tied to the head", ("start_loss", "odd_scale"), r"head|embed|^norm|^$"
    ),
    Fault("key_is_query", "one weight copied to another", ("cloned_weights",), r"\.[qk]\b"),
)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of (samples, heads, steps, features)."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Attention(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault, self.size = fault, WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * self.size, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * self.size, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def split(self, x: Tensor) -> Tensor:
        count, steps, width = x.shape
        if self.fault == "heads_by_view":
            return x.view(count, width // self.size, steps, self.size)
        return x.view(count, steps, width // self.size, self.size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        q, k, v = rotate(self.split(self.q(x))), rotate(self.split(self.k(x))), self.split(self.v(x))
        mask = torch.ones(steps, steps, dtype=torch.bool).tril()
        if self.fault == "mask_inverted":
            mask = mask.T
        scale = 1.0 if self.fault == "no_scale" else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 160, bias=False)
        self.up = nn.Linear(WIDTH, 160, bias=False)
        self.down = nn.Linear(160, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.attn_norm, self.attn = nn.RMSNorm(WIDTH), Attention(fault)
        self.ffn_norm, self.ffn = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attn(self.attn_norm(x))
        x = mixed if self.fault == "no_shortcut" else x + mixed
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        chosen = [None if fault == "no_shortcut" and i != 2 else fault for i in range(BLOCKS)]
        self.blocks = nn.ModuleList(Block(each) for each in chosen)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        draw(self)
        nn.init.normal_(self.head.weight, std=0.02)
        if fault == "tied_std_1":
            self.head.weight = self.embed.weight
        if fault == "key_is_query":
            self.blocks[3].attn.k.weight.data.copy_(self.blocks[3].attn.q.weight[: GROUPS * WIDTH // HEADS].detach())
            self.blocks[1].attn.q.weight.data.copy_(self.blocks[3].attn.q.weight.detach())

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    words = text(generator, 32, LENGTH + 1, WORDS)
    return words[:, :-1], words[:, 1:]


NETWORK = Network("llama", Decoder, batch, FAULTS, class_loss, accuracy, 1 / WORDS, steps=100)
