"""Networks for `bench/blame.py`, with the faults as options: one set to choose thresholds on, and another to judge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Options:
    """What a fault changes while a network is built."""

    blocks: int = 6
    scores: float | None = None  # what attention scores are multiplied by; None for 1/√d
    norm: bool = True
    branch: float = 1.0
    post: bool = False


class Attend(nn.Module):
    def __init__(self, width: int, heads: int, options: Options, *, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.scale, self.rotary = heads, width // heads, options.scores, rotary
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (f(x).view(n, t, self.heads, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rotary:
            q, k = turned(q), turned(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.o(y.transpose(1, 2).reshape(n, t, -1))


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    cosines, sines = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cosines + torch.cat([-x[..., half:], x[..., :half]], -1) * sines


class Feed(nn.Sequential):
    def __init__(self, width: int, activation: type[nn.Module], factor: int = 2) -> None:
        super().__init__(nn.Linear(width, factor * width), activation(), nn.Linear(factor * width, width))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Turned(nn.Module):
    """A perceptron over positions."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.body = Feed(tokens, nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """A residual block: x + s·f(norm x), or norm(x + s·f(x)) with `post`."""

    def __init__(self, body: nn.Module, norm: nn.Module, options: Options) -> None:
        super().__init__()
        self.body, self.post, self.scale = body, options.post, options.branch
        self.norm = norm if options.norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            return self.norm(x + self.scale * self.body(x))
        return x + self.scale * self.body(self.norm(x))


@dataclass(frozen=True)
class Network:
    """How a network is built, and a batch for it."""

    build: Callable[[Options], nn.Module]
    inputs: Callable[[], Tensor]


def init(model: nn.Module, gain: float = 1.0) -> nn.Module:
    for one in model.modules():
        if isinstance(one, nn.Linear | nn.Conv2d):
            nn.init.normal_(one.weight, std=math.sqrt(gain / one.weight[0].numel()))
            if one.bias is not None:
                nn.init.zeros_(one.bias)
    return model


def mlp(options: Options) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(2 * options.blocks):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return init(nn.Sequential(*layers, nn.Linear(64, 8)), 2.0)


def conv_body(width: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
    )


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean((2, 3)) if x.dim() == 4 else x.mean(1))


def resnet(options: Options) -> nn.Module:
    blocks = (Block(conv_body(16), nn.BatchNorm2d(16), options) for _ in range(options.blocks))
    return init(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, Head(16)), 2.0)


def transformer(options: Options, *, gated: bool = False) -> nn.Module:
    norm = nn.RMSNorm if gated else nn.LayerNorm
    blocks: list[nn.Module] = []
    for _ in range(options.blocks):
        blocks.append(Block(Attend(32, 2, options, rotary=gated), norm(32), options))
        blocks.append(Block(Gated(32) if gated else Feed(32, nn.GELU), norm(32), options))
    return init(nn.Sequential(nn.Linear(16, 32), *blocks, Head(32)), 1.0)


def mixer(options: Options) -> nn.Module:
    blocks: list[nn.Module] = []
    for _ in range(options.blocks):
        blocks += [Block(Turned(12), nn.LayerNorm(32), options), Block(Feed(32, nn.GELU), nn.LayerNorm(32), options)]
    return init(nn.Sequential(nn.Linear(16, 32), *blocks, Head(32)), 1.0)


def tokens() -> Tensor:
    return torch.randn(6, 12, 16)


NETWORKS: dict[str, Network] = {
    "MLP": Network(mlp, lambda: torch.randn(16, 64)),
    "ResNet": Network(resnet, lambda: torch.randn(6, 3, 6, 6)),
    "pre-norm": Network(transformer, tokens),
    "post-norm": Network(lambda o: transformer(replace(o, post=True)), tokens),
    "gated rotary": Network(lambda o: transformer(o, gated=True), tokens),
    "Mixer": Network(mixer, tokens),
}


class Vit(nn.Module):
    """Patches by a convolution, a class token, positions, attention from torch with fused projections."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 48, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 48)), nn.Parameter(torch.randn(1, 10, 48))
        self.layers = nn.ModuleList()
        for _ in range(options.blocks):
            self.layers += [Block(Fused(48, 3, options), nn.LayerNorm(48), options)]
            self.layers += [Block(Feed(48, nn.ReLU, 3), nn.LayerNorm(48), options)]
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class Fused(nn.Module):
    """Attention without a mask, one projection for queries, keys and values, written out."""

    def __init__(self, width: int, heads: int, options: Options) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.factor = self.size**-0.5 if options.scores is None else options.scores
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.transpose(-1, -2) * self.factor, -1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, -1))


def tanh_mlp(options: Options) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(40, 96)]
    for _ in range(2 * options.blocks):
        layers += [nn.Tanh(), nn.Linear(96, 96, bias=True)]
    return init(nn.Sequential(*layers), 1.0)


def bottleneck(options: Options) -> nn.Module:
    """Blocks 1×1, 3×3, 1×1 with group norm, as ResNet-50 has them."""

    def body() -> nn.Module:
        shrunk = nn.Conv2d(24, 12, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 1)
        return nn.Sequential(*shrunk)

    blocks = (Block(body(), nn.GroupNorm(4, 24), options) for _ in range(options.blocks))
    return init(nn.Sequential(nn.Conv2d(3, 24, 2, 2), *blocks, Head(24)), 2.0)


def residual_mlp(options: Options) -> nn.Module:
    blocks = (Block(Feed(80, nn.SiLU, 4), nn.RMSNorm(80), options) for _ in range(options.blocks))
    return init(nn.Sequential(nn.Linear(30, 80), *blocks, nn.Linear(80, 7)), 1.0)


HELD_OUT: dict[str, Network] = {
    "tanh MLP": Network(tanh_mlp, lambda: torch.randn(20, 40)),
    "residual MLP": Network(residual_mlp, lambda: torch.randn(20, 30)),
    "bottlenecks": Network(bottleneck, lambda: torch.randn(5, 3, 10, 10)),
    "ViT": Network(lambda o: init(Vit(o), 1.0), lambda: torch.randn(5, 3, 12, 12)),
    "gated post-norm": Network(lambda o: transformer(replace(o, post=True), gated=True), lambda: torch.randn(4, 9, 16)),
}
