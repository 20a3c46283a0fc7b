"""A denoiser: a residual network of convolutions that is told the time, and guesses the noise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from common import Fault, Network, digits, explained
from torch import Tensor, nn

WIDTH, BLOCKS = 24, 5

FAULTS = (
    Fault(
        "time_raw",
        "raw inputs",
        ("huge_signal", "start_loss", "degenerate_batch", "rank_collapse", "large_bias", "odd_branch", "cause"),
        r".*",
    ),
    Fault("time_unused", "parameter never used", ("unused", "detached", "unused_input"), r"time|blocks|^$|input"),
    Fault(
        "scale_without_one",
        "weights of zero where they are not meant",
        ("behind_zeros", "constant_weight", "zero_start", "gradient_vanishing"),
        r"film|blocks|conv",
    ),
    Fault("norm_weights_zero", "norm weights of zero", ("norm_weight", "constant_weight", "behind_zeros"), r"norm"),
    Fault("out_large", "output too large", ("start_loss", "odd_scale", "huge_signal"), r"out|^$"),
)


class Block(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.norm1, self.conv1 = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.film = nn.Linear(64, 2 * WIDTH)
        self.norm2, self.conv2 = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        if fault == "scale_without_one":
            nn.init.zeros_(self.film.weight)
            nn.init.zeros_(self.film.bias)
        if fault == "norm_weights_zero":
            nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.norm2(self.conv1(F.silu(self.norm1(x))))
        if self.fault != "time_unused":
            scale, shift = self.film(time)[..., None, None].chunk(2, 1)
            y = y * scale + shift if self.fault == "scale_without_one" else y * (1 + scale) + shift
        return x + self.conv2(F.silu(y))


class Denoiser(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.time = nn.Sequential(nn.Linear(1 if fault == "time_raw" else 32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(BLOCKS))
        self.norm, self.out = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, 1, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.out.weight, std=10 if fault == "out_large" else 0.02)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        if self.fault == "time_raw":
            told = self.time(time[:, None])
        else:
            angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(16) / 16)
            told = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        x = self.stem(images)
        for block in self.blocks:
            x = block(x, told)
        return self.out(F.silu(self.norm(x)))


def batch(generator: torch.Generator, fault: str | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    images, _ = digits(generator, 32)
    time = torch.randint(1000, (32,), generator=generator).float()
    noise = torch.randn(images.shape, generator=generator)
    kept = torch.cos(time / 1000 * math.pi / 2)[:, None, None, None]
    return (kept * images + (1 - kept**2).sqrt() * noise, time), noise


NETWORK = Network("diffusion", Denoiser, batch, FAULTS, "mse", explained, 0.0, rate=2e-3, steps=100)
