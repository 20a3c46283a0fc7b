"""Networks as other people hand them in, sorted by whether they train (bench/verdict_foreign.py trains them)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import networks
from networks import he, mlp

Inputs = Callable[[], Tensor]
Build = Callable[[], nn.Module]


def spread_inputs() -> Tensor:
    return torch.randn(64, 64)


def digits() -> Tensor:
    return networks.batch("standardized digits", samples=64)[0]


def bright_digits() -> Tensor:
    """Pixels from 0.8 to 1: a mean cosine of 0.99."""
    return 0.8 + 0.2 * networks.batch("digits", samples=64)[0]


def images() -> Tensor:
    return networks.batch("standardized digits", samples=32, shape=(1, 8, 8))[0]


def rows() -> Tensor:
    return networks.batch("standardized digits", samples=32, shape=(8, 8))[0]


def tokens() -> Tensor:
    return torch.randint(0, 64, (16, 16))


def gained(gain: float) -> Callable[[Tensor], Tensor]:
    """Normal weights of this gain."""
    return lambda weight: nn.init.normal_(weight, std=gain / math.sqrt(weight.shape[1]))


def unit_normal(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight)


def equal(weight: Tensor) -> Tensor:
    return nn.init.constant_(weight, 0.05)


def break_layer(model: nn.Sequential, position: int, factor: float) -> nn.Sequential:
    """Multiply the weights of one linear layer."""
    layers = [module for module in model if isinstance(module, nn.Linear)]
    with torch.no_grad():
        layers[position].weight.mul_(factor)
    return model


def conv_net(depth: int, *, channels: int = 16, normalized: bool = True) -> nn.Sequential:
    """A plain stack of 3×3 convolutions, pooled over positions; He's weights where there is no batch norm."""
    layers: list[nn.Module] = []
    for index in range(depth - 1):
        layers.append(nn.Conv2d(channels if index else 1, channels, 3, padding=1, bias=normalized))
        if not normalized:
            he(layers[-1].weight)  # type: ignore[arg-type]
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if normalized else [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class FunctionalStack(nn.Module):
    """ReLU layers whose weights are parameters of the whole; no module multiplies."""

    def __init__(self, layers: int, *, gain: float = math.sqrt(2)) -> None:
        super().__init__()
        self.weights = nn.ParameterList(gain * torch.randn(64, 64) / 8 for _ in range(layers))
        self.head = nn.Parameter(torch.randn(10, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = functional.relu(functional.linear(x, weight))
        return functional.linear(x, self.head)


class LanguageModel(nn.Module):
    """A causal pre-norm transformer with GPT-2's weights (0.02), PyTorch's biases and a tied head."""

    def __init__(self, blocks: int, width: int = 32) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(64, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "attend": nn.Linear(width, 3 * width),
                    "mix": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "wide": nn.Linear(width, 4 * width),
                    "narrow": nn.Linear(4 * width, width),
                }
            )
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1]))
        shape = (*words.shape, 3, 4, x.shape[-1] // 4)
        for block in self.blocks:
            query, key, value = block["attend"](block["norm1"](x)).reshape(shape).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + block["mix"](mixed.transpose(1, 2).reshape(x.shape))
            x = x + block["narrow"](functional.gelu(block["wide"](block["norm2"](x))))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Biased(nn.Module):
    """Pre-norm residual blocks whose biases, the same for all samples, add up beside the signal."""

    def __init__(self, bias: float, *, blocks: int = 16, width: int = 64) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(blocks)
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.05)
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.normal_(block[-1].bias, std=bias)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(functional.relu(x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Stacked recurrent layers behind an embedding."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], layers: int) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(64, 32), cell(32, 32, layers, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(words))[0][:, -1])  # type: ignore[no-any-return]


HEALTHY: dict[str, tuple[Build, Inputs]] = {
    "He ReLU of 30 layers": (lambda: mlp(30, 64, initialize=he), digits),
    "He ReLU of 10 layers, bright pixels": (lambda: mlp(10, 64, initialize=he), bright_digits),
    "orthogonal tanh of 50 layers, bright pixels": (
        lambda: mlp(50, 64, activation=nn.Tanh, initialize=nn.init.orthogonal_),
        bright_digits,
    ),
    "tanh of gain 3, 8 layers": (lambda: mlp(8, 64, activation=nn.Tanh, initialize=gained(3.0)), digits),
    "tanh of gain 5, 8 layers": (lambda: mlp(8, 64, activation=nn.Tanh, initialize=gained(5.0)), digits),
    "hard tanh with batch norm": (lambda: mlp(20, 64, activation=nn.Hardtanh, normalization=nn.BatchNorm1d), digits),
    "one layer of a thousandth": (lambda: break_layer(mlp(8, 64, initialize=he), 3, 1e-3), digits),
    "group norm": (lambda: mlp(10, 64, normalization=lambda width: nn.GroupNorm(4, width)), digits),
    "convolutions of 15 layers with batch norm": (lambda: conv_net(15), images),
    "residual of 110 layers": (lambda: networks.resnet((18, 18, 18)), images),
    "residual with biases of 1": (lambda: Biased(1.0), digits),
    "GPT of 12 blocks": (lambda: LanguageModel(12), tokens),
    "GRU": (lambda: Recurrent(nn.GRU, 3), tokens),
    "pre-norm of 12 blocks": (lambda: networks.Transformer(12), rows),
}

ILL: dict[str, tuple[str, Build, Inputs]] = {
    "He ReLU of 50 layers, bright pixels": ("rank_collapse", lambda: mlp(50, 64, initialize=he), bright_digits),
    "equal weights with batch norm": (
        "rank_collapse",
        lambda: mlp(8, 64, normalization=nn.BatchNorm1d, initialize=equal),
        digits,
    ),
    "residual with biases of 30": ("rank_collapse", lambda: Biased(30.0), digits),
    "functional ReLU of 60 layers": ("rank_collapse", lambda: FunctionalStack(60), digits),
    "convolutions of 60 layers": ("rank_collapse", lambda: conv_net(60, normalized=False), images),
    "convolutions of 60 layers with batch norm": ("gradient_explosion", lambda: conv_net(60), images),
    "tanh of 100 layers with batch norm": (
        "gradient_explosion",
        lambda: mlp(100, 64, activation=nn.Tanh, normalization=nn.BatchNorm1d),
        digits,
    ),
    "tanh of gain 2, 60 layers": (
        "gradient_explosion",
        lambda: mlp(60, 64, activation=nn.Tanh, initialize=gained(2.0)),
        digits,
    ),
    "batch norm of 60 layers on raw pixels": (
        "gradient_explosion",
        lambda: mlp(60, 64, normalization=nn.BatchNorm1d),
        lambda: 255 * networks.batch("digits", samples=64)[0],
    ),
    "one layer of ten thousand": (
        "gradient_explosion",
        lambda: break_layer(mlp(8, 64, initialize=he), 3, 1e4),
        digits,
    ),
    "unit normal weights and tanh": (
        "saturation",
        lambda: mlp(8, 128, activation=nn.Tanh, initialize=unit_normal),
        digits,
    ),
}
