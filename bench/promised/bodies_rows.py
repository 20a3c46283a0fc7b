"""Networks for rows, sets, pairs and graphs."""

from __future__ import annotations

import itertools
import math

import torch
from bench.promised.tasks import CLASSES
from torch import Tensor, nn
from torch.nn import functional as F


def he(module: nn.Module) -> None:
    """He's law and biases of zero for every linear layer within."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            nn.init.zeros_(part.bias)


class NormedStack(nn.Module):
    """Twelve hidden layers with batch norm and no shortcut."""

    def __init__(self, width: int = 64, depth: int = 12) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for number in range(depth):
            parts += [nn.Linear(32 if number == 0 else width, width), nn.BatchNorm1d(width), nn.ReLU()]
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(width, CLASSES)
        he(self.body)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows))


class Isometric(nn.Module):
    """Fourteen tanh layers with orthogonal weights."""

    def __init__(self, width: int = 48, depth: int = 14) -> None:
        super().__init__()
        self.inside = nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = nn.Tanh()
        self.head = nn.Linear(width, CLASSES)
        for layer in [self.inside, *self.layers]:
            nn.init.orthogonal_(layer.weight, gain=1.05)
            nn.init.zeros_(layer.bias)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.act(self.inside(rows))
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


class TableBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.relu(self.up(self.norm(x)))))


class Tabular(nn.Module):
    """Eight residual blocks for a table of numbers; one number out."""

    def __init__(self, width: int = 32, blocks: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.blocks = nn.ModuleList(TableBlock(width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)))


class DeepSet(nn.Module):
    """The same network on each point, a mean over points, another network on the mean."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.point = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.norm = nn.LayerNorm(width)
        self.whole = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )
        he(self.point)
        he(self.whole[:-1])

    def forward(self, points: Tensor) -> Tensor:
        return self.whole(self.norm(self.point(points).mean(1)))


class Autoencoder(nn.Module):
    """Four layers to eight numbers, four layers back."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [32, 64, 48, 24, 8]
        self.encoder = self.stack(sizes)
        self.decoder = self.stack(sizes[::-1])

    @staticmethod
    def stack(sizes: list[int]) -> nn.Sequential:
        parts: list[nn.Module] = []
        for inside, outside in itertools.pairwise(sizes):
            parts += [nn.Linear(inside, outside), nn.LayerNorm(outside), nn.SiLU()]
        return nn.Sequential(*parts[:-2])

    def forward(self, rows: Tensor) -> Tensor:
        return self.decoder(self.encoder(rows))


class Siamese(nn.Module):
    """One encoder for both vectors; the logit is a scaled cosine of the two codes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, 16),
        )  # fmt: skip
        self.log_scale = nn.Parameter(torch.tensor(math.log(3.0)))
        self.offset = nn.Parameter(torch.zeros(()))

    def codes(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.encoder(pairs).unbind(1)
        return first, second

    def forward(self, pairs: Tensor) -> Tensor:
        first, second = self.codes(pairs)
        return self.log_scale.exp() * F.cosine_similarity(first, second, dim=-1) + self.offset


class GraphBlock(nn.Module):
    """Each node adds what it makes of itself and of the mean of its neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, walk: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.out(F.relu(self.own(h) + self.others(walk @ h)))


class GraphNet(nn.Module):
    """Six blocks on graphs that are given by a dense adjacency; a label for each node."""

    def __init__(self, width: int = 32, blocks: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(GraphBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def walk(self, adjacency: Tensor) -> Tensor:
        return adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        walk = self.walk(adjacency)
        x = self.first(features)
        for block in self.blocks:
            x = block(x, walk)
        return self.head(self.norm(x))
