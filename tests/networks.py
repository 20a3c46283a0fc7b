"""Networks whose health is known, built plainly from torch.nn: the reference for the rates of the verdict.

A case is drawn from a seed: the seed decides depth, width, data and weights, so that a rate over seeds is a rate over
all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

CLASSES = 10
DIGITS = ("digits", "standardized digits")
DATA = ("gaussian", "correlated", *DIGITS)
CIFAR_COSINE = 0.81


@dataclass(frozen=True)
class Case:
    """A network with a batch to look at it."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    label: str


@contextmanager
def drawn_from(seed: int) -> Iterator[random.Random]:
    """Draw from this seed inside, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield random.Random(seed)


def mlp(
    depth: int,
    width: int,
    *,
    features: int = 64,
    classes: int = CLASSES,
    activation: Callable[[], nn.Module] = nn.ReLU,
    normalization: Callable[[int], nn.Module] | None = None,
    initialize: Callable[[Tensor], object] | None = None,
) -> nn.Sequential:
    """`depth` linear layers with activations between them; PyTorch's own initialization unless told."""
    layers: list[nn.Module] = []
    for index in range(depth):
        last = index == depth - 1
        linear = nn.Linear(features if index == 0 else width, classes if last else width)
        if initialize is not None:
            initialize(linear.weight)
            nn.init.zeros_(linear.bias)
        layers.append(linear)
        if not last:
            layers += [] if normalization is None else [normalization(width)]
            layers.append(activation())
    return nn.Sequential(*layers)


def he(weight: Tensor) -> Tensor:
    """He initialization: variance 2/fan_in."""
    return nn.init.kaiming_normal_(weight, nonlinearity="relu")


class ResidualBlock(nn.Module):
    """conv–norm–ReLU–conv–norm, added to the (projected) input, ReLU."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        same = stride == 1 and channels == out
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (2, 2, 2), *, channels: int = 8, planes: int = 1) -> nn.Sequential:
    """The CIFAR form of a residual network with batch norm."""
    layers: list[nn.Module] = [nn.Conv2d(planes, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    width = channels
    for stage, count in enumerate(blocks):
        out = channels * 2**stage
        for index in range(count):
            layers.append(ResidualBlock(width, out, stride=2 if stage > 0 and index == 0 else 1))
            width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class Transformer(nn.Module):
    """An encoder over rows of features, with learned positions, mean pooling and a linear head."""

    def __init__(
        self, blocks: int = 6, *, width: int = 32, tokens: int = 8, features: int = 8, pre: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=pre)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))  # type: ignore[no-any-return]


def batch(data: str, *, samples: int = 48, shape: tuple[int, ...] = (64,)) -> tuple[Tensor, Tensor]:
    """Inputs of the shape and labels: gaussian, correlated like CIFAR-10 (mean cosine 0.81), or real digits."""
    if data in DIGITS:
        pixels, labels = digits()
        if data == "standardized digits":
            pixels = (pixels - pixels.mean()) / pixels.std()
        chosen = torch.randperm(len(pixels))[:samples]
        return pixels[chosen].reshape(samples, *shape), labels[chosen]
    inputs = torch.randn(samples, *shape)
    if data == "correlated":
        inputs = inputs + math.sqrt(CIFAR_COSINE / (1 - CIFAR_COSINE)) * torch.randn(1, *shape)
    return inputs, torch.randint(0, CLASSES, (samples,))


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 8×8 digits, pixels in [0, 1]."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return torch.tensor(loaded.data / 16.0, dtype=torch.float32), torch.tensor(loaded.target)


def healthy_mlp(seed: int) -> Case:
    """A He-initialized ReLU MLP of 5 to 10 layers."""
    with drawn_from(seed) as draw:
        depth, width, data = draw.randint(5, 10), draw.choice((32, 64, 128, 256)), draw.choice(DATA)
        return Case(mlp(depth, width, initialize=he), *batch(data), f"He {depth}x{width} on {data}")


def healthy_resnet(seed: int) -> Case:
    """A small residual network with batch norm."""
    with drawn_from(seed) as draw:
        data = draw.choice(DATA)
        return Case(resnet(), *batch(data, shape=(1, 8, 8)), f"ResNet on {data}")


def healthy_transformer(seed: int) -> Case:
    """A pre-norm transformer of 6 blocks over the rows of an image."""
    with drawn_from(seed) as draw:
        data = draw.choice(DATA)
        return Case(Transformer(), *batch(data, shape=(8, 8)), f"transformer on {data}")


def collapsed_mlp(seed: int) -> Case:
    """A plain ReLU MLP of 50 layers, He or PyTorch's initialization."""
    with drawn_from(seed) as draw:
        width, data = draw.choice((32, 64, 128)), draw.choice(DATA)
        initialize = draw.choice((he, None))
        return Case(
            mlp(50, width, initialize=initialize),
            *batch(data),
            f"{'He' if initialize else 'default'} 50x{width} on {data}",
        )


def exploding_mlp(seed: int) -> Case:
    """A ReLU MLP of 100 layers with batch norm, He or PyTorch's initialization."""
    with drawn_from(seed) as draw:
        width, data = draw.choice((32, 64)), draw.choice(DATA)
        initialize = draw.choice((he, None))
        return Case(
            mlp(100, width, normalization=nn.BatchNorm1d, initialize=initialize),
            *batch(data),
            f"batch norm 100x{width} on {data}",
        )


HEALTHY = (healthy_mlp, healthy_resnet, healthy_transformer)
