"""A vision transformer with a class token, written out."""

from __future__ import annotations

import torch
from common import Fault, Network, accuracy, digits
from torch import Tensor, nn

WIDTH, HEADS, PATCHES, BLOCKS = 48, 4, 16, 6

FAULTS = (
    Fault("softmax_over_queries", "softmax over the wrong axis", ("wrong_axis",), r"blocks|attn"),
    Fault("norm_over_tokens", "norm over the wrong axis", ("wrong_axis", "mixed_samples"), r"norm|blocks"),
    Fault("axes_exchanged", "samples taken for steps", ("mixed_samples",), r"blocks|attn|^$"),
    Fault("patches_no_grad", "part cut off from the gradient", ("detached", "frozen"), r"patch"),
    Fault(
        "places_large",
        "embedding too large",
        ("odd_scale", "large_bias", "rank_collapse", "odd_branch", "entropy_collapse", "gradient_alignment"),
        r"place|blocks|patch|norm|^$",
    ),
    Fault(
        "no_shortcuts",
        "all shortcuts missing",
        ("token_collapse", "rank_collapse", "gradient_vanishing", "gradient_explosion", "gradient_alignment", "cause"),
        r".*",
    ),
)


class Attention(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "axes_exchanged":
            x = x.transpose(0, 1)
        count, steps, _ = x.shape
        q, k, v = self.qkv(x).view(count, steps, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        weights = scores.softmax(-2 if self.fault == "softmax_over_queries" else -1)
        out = self.out((weights @ v).transpose(1, 2).reshape(count, steps, WIDTH))
        return out.transpose(0, 1) if self.fault == "axes_exchanged" else out


class TokenNorm(nn.LayerNorm):
    """A layer norm that runs over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.norm1 = TokenNorm(PATCHES + 1) if fault == "norm_over_tokens" else nn.LayerNorm(WIDTH)
        self.attn, self.norm2 = Attention(fault), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "no_shortcuts":
            return self.mlp(self.norm2(self.attn(self.norm1(x))))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.patch = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.place = nn.Parameter(torch.randn(1, PATCHES + 1, WIDTH) * (30 if fault == "places_large" else 0.02))
        self.blocks = nn.Sequential(*(Block(fault) for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.fault != "patches_no_grad"):
            patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(images), 1, WIDTH), patches), 1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    return digits(generator, 64)


NETWORK = Network("vit", Vision, batch, FAULTS, "cross_entropy", accuracy, 0.1, rate=1e-3, steps=100)
