"""Small networks for `bench/causes.py`, with the faults as options: some to choose thresholds on, others to judge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Options:
    """What a fault, or what makes it matter, changes while a network is built."""

    blocks: int = 8
    scores: float | None = None  # what attention scores are multiplied by; None for 1/√d
    norm: bool = True
    branch: float = 1.0
    gain: float = 1.0  # times the usual variance of weights
    loud: bool = False  # weights 100 times as large, which norms hold
    fan: str = ""  # the weight in a block that is drawn by its outputs in place of its inputs


class Attend(nn.Module):
    """Attention with separate projections, causal or not, with or without rotary positions."""

    def __init__(self, width: int, options: Options, *, rotary: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.size, self.scale = 4, width // 4, options.scores
        self.rotary, self.causal = rotary, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (f(x).view(n, t, self.heads, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rotary:
            q, k = turned(q), turned(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.o(y.transpose(1, 2).reshape(n, t, -1))


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    cosines, sines = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cosines + torch.cat([-x[..., half:], x[..., :half]], -1) * sines


class Fused(nn.Module):
    """Attention without a mask, one projection for queries, keys and values, written out."""

    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self.heads, self.size = 4, width // 4
        self.factor = self.size**-0.5 if options.scores is None else options.scores
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.transpose(-1, -2) * self.factor, -1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, -1))


class Feed(nn.Module):
    def __init__(self, width: int, activation: type[nn.Module], factor: int = 4) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, factor * width), activation(), nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Both(nn.Module):
    """Attention and perceptron side by side, as GPT-J has them."""

    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self.attend, self.feed = Attend(width, options), Feed(width, nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) + self.feed(x)


class Turned(nn.Module):
    """A perceptron over positions."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.feed = Feed(tokens, nn.GELU, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(x.transpose(1, 2)).transpose(1, 2)


class Convs(nn.Module):
    """Two 3×3 convolutions, each behind a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(torch.relu(x))))


class Squeeze(nn.Module):
    """1×1, 3×3, 1×1 over a quarter of the channels, as ResNet-50 has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.mid = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width // 4, 3, padding=1)
        self.down = nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.mid(torch.relu(self.up(torch.relu(x))))))


class Depthwise(nn.Module):
    """A depthwise convolution and a perceptron over channels, as ConvNeXt has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(self.depthwise(x))))


class Block(nn.Module):
    """A residual block: x + s·f(norm x), or norm(x + s·f(x)) with `post`; without `skip` just f(norm x)."""

    def __init__(self, body: nn.Module, norm: nn.Module, options: Options, *, post: bool = False) -> None:
        super().__init__()
        self.body, self.post, self.scale = body, post, options.branch
        self.norm = norm if options.norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            return self.norm(x + self.scale * self.body(x))
        return x + self.scale * self.body(self.norm(x))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean((2, 3)) if x.dim() == 4 else x.mean(1))


class Words(nn.Module):
    """Embeddings of tokens and of positions, of mean square 1 together."""

    def __init__(self, width: int, tokens: int = 16) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(50, width), nn.Embedding(tokens, width)
        for one in (self.token, self.place):
            nn.init.normal_(one.weight, std=0.5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.place(torch.arange(x.shape[1]))


def initialize(model: nn.Module, gain: float, options: Options) -> nn.Module:
    """Gaussian weights of this gain over the inputs, biases of zero; `loud` and `fan` as the options say."""
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Conv1d | nn.Conv2d)]
    for name, one in layers:
        fan = one.weight[0].numel()
        if options.fan and name.endswith(options.fan):  # what torch's fan_out is, groups unknown
            fan = one.weight.shape[0] * one.weight[0, 0].numel()
        nn.init.normal_(one.weight, std=math.sqrt(options.gain * gain / fan))
        if one.bias is not None:
            nn.init.zeros_(one.bias)
        role = name.rpartition(".")[2]
        if options.loud and one is not layers[-1][1] and role not in ("q", "k", "qkv", "gate", "mid", "depthwise"):
            # two matrices of a branch share the factor; layers that stand alone have all of it
            one.weight.data.mul_(10.0 if ".body." in name and role != "out" else 100.0)
    return model


Norm = Callable[[int], nn.Module]


class Separable(nn.Module):
    """A convolution in groups and a pointwise one, as MobileNet has them."""

    def __init__(self, width: int, groups: int, activation: type[nn.Module], *, line: bool = False) -> None:
        super().__init__()
        conv: Callable[..., nn.Module] = nn.Conv1d if line else nn.Conv2d
        self.grouped, self.pointwise = conv(width, width, 3, padding=1, groups=groups), conv(width, width, 1)
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.pointwise(self.act(self.grouped(x))))


def separable(
    options: Options, groups: int = 32, activation: type[nn.Module] = nn.ReLU, *, gain: float = 2.0, line: bool = False
) -> nn.Module:
    conv: Callable[..., nn.Module] = nn.Conv1d if line else nn.Conv2d
    blocks = (Separable(32, groups, activation, line=line) for _ in range(options.blocks))
    stem = conv(24 if line else 3, 32, 3, padding=1)
    return initialize(nn.Sequential(stem, *blocks, nn.Flatten(2), Mean(), nn.Linear(32, 8)), gain, options)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


def mlp(
    options: Options, *, activation: type[nn.Module] = nn.ReLU, gain: float = 2.0, norm: Norm | None = None
) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(options.blocks + 2):
        layers += [nn.Linear(64, 64), *([norm(64)] if norm else []), activation()]
    return initialize(nn.Sequential(*layers, nn.Linear(64, 8)), gain, options)


def vgg(options: Options) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(options.blocks):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return initialize(nn.Sequential(*layers, Head(32)), 2.0, options)


def images(
    body: Callable[[int], nn.Module], norm: Norm, options: Options, *, width: int = 32, gain: float = 2.0
) -> nn.Module:
    blocks = (Block(body(width), norm(width), options) for _ in range(options.blocks))
    return initialize(nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, Head(width)), gain, options)


def vectors(body: Callable[[int], nn.Module], norm: Norm, options: Options, *, gain: float = 1.0) -> nn.Module:
    blocks = (Block(body(64), norm(64), options) for _ in range(options.blocks))
    return initialize(nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, 8)), gain, options)


def tokens(
    parts: Callable[[Options], list[nn.Module]],
    norm: Norm,
    options: Options,
    *,
    post: bool = False,
    words: bool = False,
) -> nn.Module:
    blocks = [Block(part, norm(64), options, post=post) for _ in range(options.blocks // 2) for part in parts(options)]
    stem = Words(64) if words else nn.Linear(24, 64)
    return initialize(nn.Sequential(stem, *blocks, Head(64)), 1.0, options)


class Vit(nn.Module):
    """Patches by a convolution, a class token, positions, attention with one projection."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 64)), nn.Parameter(torch.randn(1, 10, 64))
        parts = (part for _ in range(options.blocks // 2) for part in (Fused(64, options), Feed(64, nn.ReLU)))
        self.layers = nn.ModuleList(Block(part, nn.LayerNorm(64), options) for part in parts)
        self.out = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.out(x[:, 0])


def batch_norm(width: int) -> nn.Module:
    return nn.BatchNorm1d(width)


def image_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width)


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(4, width)


@dataclass(frozen=True)
class Network:
    """How a network is built, a batch for it, and what it has: "batch", "norm", "skip", "scores", "stem"."""

    build: Callable[[Options], nn.Module]
    inputs: Callable[[], Tensor]
    has: frozenset[str]


def has(words: str) -> frozenset[str]:
    return frozenset(words.split())


def vector() -> Tensor:
    return torch.randn(16, 64)


def sequence() -> Tensor:
    return torch.randn(4, 16, 24)


def ids() -> Tensor:
    return torch.randint(50, (4, 16))


def image() -> Tensor:
    return torch.randn(8, 3, 6, 6)


NETWORKS: dict[str, Network] = {
    "plain MLP": Network(mlp, vector, has("plain")),
    "batch-norm MLP": Network(lambda o: mlp(o, norm=batch_norm), vector, has("batch norm")),
    "residual MLP": Network(
        lambda o: vectors(lambda w: Feed(w, nn.GELU), nn.LayerNorm, o), vector, has("skip stem norm")
    ),
    "ResNet": Network(lambda o: images(Convs, image_norm, o), image, has("batch skip stem norm")),
    "GPT": Network(
        lambda o: tokens(lambda p: [Attend(64, p), Feed(64, nn.GELU)], nn.LayerNorm, o, words=True),
        ids,
        has("skip scores norm words"),
    ),
    "post-norm encoder": Network(
        lambda o: tokens(lambda p: [Attend(64, p, causal=False), Feed(64, nn.ReLU)], nn.LayerNorm, o, post=True),
        sequence,
        has("scores norm post"),
    ),
    "gated rotary": Network(
        lambda o: tokens(lambda p: [Attend(64, p, rotary=True), Gated(64)], nn.RMSNorm, o),
        sequence,
        has("skip scores stem norm"),
    ),
    "Mixer": Network(
        lambda o: tokens(lambda p: [Turned(16), Feed(64, nn.GELU)], nn.LayerNorm, o), sequence, has("skip stem norm")
    ),
    "separable": Network(separable, image, has("groups plain")),
    "separable in one dimension": Network(
        lambda o: separable(o, line=True), lambda: torch.randn(8, 24, 20), has("groups plain")
    ),
}

HELD_OUT: dict[str, Network] = {
    "tanh MLP": Network(lambda o: mlp(o, activation=nn.Tanh, gain=1.0), vector, has("plain")),
    "layer-norm MLP": Network(lambda o: mlp(o, activation=nn.SiLU, norm=nn.LayerNorm), vector, has("norm")),
    "VGG": Network(vgg, image, has("batch norm")),
    "residual batch norm": Network(
        lambda o: vectors(lambda w: Feed(w, nn.ReLU, 2), batch_norm, o), vector, has("batch skip stem norm")
    ),
    "RMS residual MLP": Network(
        lambda o: vectors(lambda w: Feed(w, nn.SiLU), nn.RMSNorm, o), vector, has("skip stem norm")
    ),
    "bottlenecks": Network(lambda o: images(Squeeze, group_norm, replace(o), width=48), image, has("skip stem norm")),
    "bottlenecks with batch norm": Network(
        lambda o: images(Squeeze, image_norm, o, width=48), image, has("batch skip stem norm")
    ),
    "ConvNeXt": Network(lambda o: images(Depthwise, group_norm, o, gain=1.0), image, has("skip stem norm")),
    "grouped": Network(lambda o: separable(o, 8), image, has("groups plain")),
    "separable tanh": Network(lambda o: separable(o, 32, nn.Tanh, gain=1.0), image, has("groups plain")),
    "separable SiLU": Network(lambda o: separable(o, 16, nn.SiLU, gain=2.8), image, has("groups plain")),
    "ViT": Network(lambda o: initialize(Vit(o), 1.0, o), lambda: torch.randn(4, 3, 12, 12), has("skip scores norm")),
    "parallel GPT": Network(
        lambda o: tokens(lambda p: [Both(64, p)], nn.LayerNorm, replace(o, blocks=2 * o.blocks), words=True),
        ids,
        has("skip scores norm words"),
    ),
    "gated post-norm": Network(
        lambda o: tokens(lambda p: [Attend(64, p, rotary=True), Gated(64)], nn.LayerNorm, o, post=True),
        sequence,
        has("scores norm post"),
    ),
}
