"""Thirteen healthy networks of styles that differ, each with a seeded batch, a loss and a rate.

``build(name, seed)`` returns ``(model, x, y, loss)``. Where ``x`` is a tuple, the model takes its
entries as separate arguments. ``loss(outputs, y)`` is a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from bench.fresh import sequences as S
from torch import Tensor, nn


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class SkipAutoencoder(nn.Module):
    """Two strides down, two steps up, and a skip at each size; gives the clean picture."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.stem = ConvBlock(1, width)
        self.down1 = ConvBlock(width, 2 * width, stride=2)
        self.down2 = ConvBlock(2 * width, 4 * width, stride=2)
        self.middle = ConvBlock(4 * width, 4 * width)
        self.up1 = ConvBlock(6 * width, 2 * width)
        self.up2 = ConvBlock(3 * width, width)
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def bottleneck(self, x: Tensor) -> Tensor:
        return self.middle(x)

    def join(self, low: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([F.interpolate(low, scale_factor=2.0, mode="nearest"), skip], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.down1(a)
        c = self.up1(self.join(self.bottleneck(self.down2(b)), b))
        return self.head(self.up2(self.join(c, a)))


def autoencoder_data() -> tuple[Tensor, Tensor]:
    n, side = 32, torch.linspace(-1, 1, 16)
    rows, columns = torch.meshgrid(side, side, indexing="ij")
    angle = torch.rand(n, 1, 1) * math.pi
    waves = torch.sin(4 * (rows * torch.cos(angle) + columns * torch.sin(angle)) + 6 * torch.rand(n, 1, 1))
    clean = waves[:, None]
    return clean + 0.5 * torch.randn_like(clean), clean


class Inverted(nn.Module):
    """Widen by 1×1, filter each channel, narrow by 1×1; with a shortcut where shapes allow one."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, widen: int = 3):
        super().__init__()
        inner = inputs * widen
        self.expand = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=inner, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.project = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.act = nn.Hardswish()
        self.same = stride == 1 and inputs == outputs

    def branch(self, x: Tensor) -> Tensor:
        x = self.act(self.bn1(self.expand(x)))
        x = self.act(self.bn2(self.depthwise(x)))
        return self.bn3(self.project(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if self.same else self.branch(x)


class SeparableNet(nn.Module):
    def __init__(self, classes: int = 6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        sizes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1)]
        self.blocks = nn.Sequential(*(Inverted(*size) for size in sizes))
        self.fc = nn.Linear(40, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def separable_data() -> tuple[Tensor, Tensor]:
    n, side = 48, torch.linspace(-1, 1, 16)
    rows, columns = torch.meshgrid(side, side, indexing="ij")
    y = torch.arange(n) % 6
    turn = (y % 3) * math.pi / 3
    wave = torch.sin(7 * (rows * torch.cos(turn)[:, None, None] + columns * torch.sin(turn)[:, None, None]))
    colour = F.one_hot(y // 3, 3).float() + 0.3
    return wave[:, None] * colour[:, :, None, None] + 0.5 * torch.randn(n, 3, 16, 16), y


class GatedResidual(nn.Module):
    """Two layers, a gate (GLU) and a norm behind the shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
        self.glu = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width)

    def gate(self, x: Tensor) -> Tensor:
        value, gate = self.glu(x).chunk(2, dim=-1)
        return value * torch.sigmoid(gate)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.gate(self.fc2(F.elu(self.fc1(x)))))


class TableNet(nn.Module):
    # Each column has an embedding, a softmax selects columns, gated blocks follow.
    def __init__(self, columns: int = 20, width: int = 48, depth: int = 4):
        super().__init__()
        self.columns = nn.Parameter(torch.randn(columns, width) / math.sqrt(columns))
        self.select = nn.Linear(columns, columns)
        self.blocks = nn.ModuleList(GatedResidual(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def embed(self, x: Tensor) -> Tensor:
        return (x * self.select(x).softmax(-1) * x.shape[-1]) @ self.columns

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def table_data() -> tuple[Tensor, Tensor]:
    x = torch.randn(96, 20)
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3] - x[:, 3:4].abs() + x[:, 4:8].sum(1, keepdim=True) / 2
    return x, (y - y.mean()) / y.std()


class GraphAttention(nn.Module):
    """Attention from node to neighbour (GAT), several heads, over a dense adjacency matrix."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.lin = nn.Linear(width, width, bias=False)
        self.source = nn.Parameter(torch.randn(heads, width // heads) / math.sqrt(width // heads))
        self.target = nn.Parameter(torch.randn(heads, width // heads) / math.sqrt(width // heads))
        self.bias = nn.Parameter(torch.zeros(width))

    def weights(self, scores: Tensor, adjacency: Tensor) -> Tensor:
        return scores.masked_fill(adjacency[:, None] == 0, float("-inf")).softmax(dim=-1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.lin(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        to, of = (h * self.target[:, None]).sum(-1), (h * self.source[:, None]).sum(-1)
        scores = F.leaky_relu(to[..., :, None] + of[..., None, :], 0.2)
        mixed = self.weights(scores, adjacency) @ h
        return mixed.transpose(1, 2).flatten(2) + self.bias


class GraphBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = GraphAttention(width)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return x + F.elu(self.attention(self.norm(x), adjacency))


class GraphNet(nn.Module):
    """Labels each node of each graph of the batch."""

    def __init__(self, features: int = 12, width: int = 48, classes: int = 4, depth: int = 4):
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.head(self.norm(x))


def graph_data() -> tuple[tuple[Tensor, Tensor], Tensor]:
    n, nodes = 16, 20
    y = torch.randint(4, (n, nodes))
    same = (y[:, :, None] == y[:, None, :]).float()
    edges = (torch.rand(n, nodes, nodes) < 0.1 + 0.5 * same).float().triu(1)
    adjacency = edges + edges.transpose(1, 2) + torch.eye(nodes)
    hint = F.one_hot(y, 12).float() * (torch.rand(n, nodes, 1) < 0.4)
    return (3 * hint + torch.randn(n, nodes, 12), adjacency), y


class PointNet(nn.Module):
    """One MLP for all points, the maximum over them, and a classifier of the cloud."""

    def __init__(self, classes: int = 5):
        super().__init__()
        sizes = [3, 32, 32, 64, 128]
        self.convs = nn.ModuleList(nn.Conv1d(a, b, 1, bias=False) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(b) for b in sizes[1:])
        self.fc1 = nn.Linear(128, 64)
        self.bn = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.1)
        self.fc2 = nn.Linear(64, classes)

    def encode(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return x

    def pool(self, x: Tensor) -> Tensor:
        return x.amax(dim=-1)

    def classify(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(F.relu(self.bn(self.fc1(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.pool(self.encode(x.transpose(1, 2))))


def point_data() -> tuple[Tensor, Tensor]:
    n = 60
    y = torch.arange(n) % 5
    ball = F.normalize(torch.randn(n, 64, 3), dim=-1)
    shapes = torch.stack(
        [ball, ball * torch.tensor([1.0, 1.0, 0.1]), ball / ball.abs().amax(-1, keepdim=True),
         ball.abs(), ball * torch.rand(n, 64, 1)]
    )  # fmt: skip
    return shapes[y, torch.arange(n)] + 0.03 * torch.randn(n, 64, 3), y


class Tower(nn.Module):
    def __init__(self, inputs: int, width: int = 64, outputs: int = 32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
        )  # fmt: skip
        self.proj = nn.Linear(width, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.net(x))


class TwoTower(nn.Module):
    """A user tower and an item tower; gives both embeddings, of length one, times a learned scale."""

    def __init__(self, left: int = 24, right: int = 40):
        super().__init__()
        self.user, self.item = Tower(left), Tower(right)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.normalize(self.user(a), dim=-1), F.normalize(self.item(b), dim=-1)
        return a * self.log_scale.exp(), b


def tower_data() -> tuple[tuple[Tensor, Tensor], Tensor]:
    fixed = torch.Generator().manual_seed(11)
    left, right = torch.randn(8, 24, generator=fixed), torch.randn(8, 40, generator=fixed)
    latent = torch.randn(64, 8)
    a = torch.tanh(latent @ left / math.sqrt(8)) + 0.1 * torch.randn(64, 24)
    b = torch.tanh(latent @ right / math.sqrt(8)) + 0.1 * torch.randn(64, 40)
    return (a, b), torch.arange(64)


def contrastive(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    logits = outputs[0] @ outputs[1].t()
    return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2


class Expert(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """A router sends each row to two of the experts and weights what they give."""

    def __init__(self, width: int, experts: int = 6, chosen: int = 2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        top, index = self.router(x).topk(self.chosen, dim=-1)
        gates = torch.zeros(len(x), len(self.experts)).scatter(1, index, top.softmax(-1))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = gates[:, number].nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * gates[rows, number, None])
        return out


class MultiTask(nn.Module):
    """A shared trunk with two mixtures of experts and three heads: a class, a value, a yes or no."""

    def __init__(self, features: int = 24, width: int = 48):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixtures = nn.ModuleList(Mixture(width) for _ in range(2))
        self.final = nn.LayerNorm(width)
        self.heads = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, size))
             for name, size in (("kind", 5), ("price", 1), ("click", 1))}
        )  # fmt: skip

    def trunk(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.final(x)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.trunk(x)
        return {name: head(x) for name, head in self.heads.items()}


def multi_data() -> tuple[Tensor, dict[str, Tensor]]:
    fixed = torch.Generator().manual_seed(5)
    x, wheel = torch.randn(128, 24), torch.randn(24, 5, generator=fixed)
    price = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    click = (x[:, 3:6].sum(1, keepdim=True) + x[:, 6:7].abs() > 0.8).float()
    return x, {"kind": (x @ wheel).argmax(1), "price": (price - price.mean()) / price.std(), "click": click}


def multi_loss(outputs: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    return (
        F.cross_entropy(outputs["kind"], y["kind"])
        + F.mse_loss(outputs["price"], y["price"])
        + F.binary_cross_entropy_with_logits(outputs["click"], y["click"])
    )


class DenoiseBlock(nn.Module):
    """A residual block of 1-d convolutions; the time scales and shifts what its norm gives."""

    def __init__(self, width: int, time: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, width)
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.film = nn.Linear(time, 2 * width)
        self.norm2 = nn.GroupNorm(8, width)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)

    def modulate(self, h: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.film(time)[..., None].chunk(2, dim=1)
        return self.norm2(h) * (1 + scale) + shift

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.modulate(self.conv1(F.silu(self.norm1(x))), time)))


class Denoiser(nn.Module):
    """Predicts the noise in a curve of 32 points from the noisy curve and the time."""

    def __init__(self, width: int = 32, time: int = 32, depth: int = 4):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(time // 2) / (time // 2)))
        self.stem = nn.Conv1d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(DenoiseBlock(width, time) for _ in range(depth))
        self.norm = nn.GroupNorm(8, width)
        self.out = nn.Conv1d(width, 1, 3, padding=1)

    def embed_time(self, t: Tensor) -> Tensor:
        angles = t[:, None].float() * self.frequencies
        return self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.embed_time(t)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, time)
        return self.out(F.silu(self.norm(x)))


def denoiser_data() -> tuple[tuple[Tensor, Tensor], Tensor]:
    n, place = 64, torch.linspace(0, 2 * math.pi, 32)
    clean = math.sqrt(2) * torch.sin(torch.randint(1, 4, (n, 1, 1)) * place + 6 * torch.rand(n, 1, 1))
    t, noise = torch.randint(1000, (n,)), torch.randn(n, 1, 32)
    kept = torch.cos(t / 1000 * math.pi / 2)[:, None, None]
    return (kept * clean + (1 - kept**2).sqrt() * noise, t), noise


@dataclass(frozen=True)
class Body:
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    rate: float
    optimizer: str = "adam"


BODIES: dict[str, Body] = {
    "sandwich": Body(S.SandwichLM, S.language_data, S.token_loss, 1e-3),
    "relpos": Body(S.RelativeEncoder, S.majority_data, F.cross_entropy, 1e-3),
    "convae": Body(SkipAutoencoder, autoencoder_data, F.mse_loss, 2e-3),
    "sepcnn": Body(SeparableNet, separable_data, F.cross_entropy, 0.05, "sgd"),
    "tcn": Body(S.TemporalNet, S.forecast_data, F.mse_loss, 2e-3),
    "table": Body(TableNet, table_data, F.mse_loss, 2e-3),
    "graph": Body(GraphNet, graph_data, S.token_loss, 2e-3),
    "gru": Body(S.AttentiveGRU, S.motif_data, F.cross_entropy, 3e-3),
    "points": Body(PointNet, point_data, F.cross_entropy, 0.03, "sgd"),
    "towers": Body(TwoTower, tower_data, contrastive, 1e-3),
    "multi": Body(MultiTask, multi_data, multi_loss, 2e-3),
    "denoiser": Body(Denoiser, denoiser_data, F.mse_loss, 2e-3),
    "linmix": Body(S.MixingLM, S.language_data, S.token_loss, 2e-3),
}


def build(name: str, seed: int) -> tuple[nn.Module, Any, Any, Callable[[Any, Any], Tensor]]:
    """The healthy network of this name with its batch and its loss; one seed gives one result."""
    body = BODIES[name]
    torch.manual_seed(seed)
    model = body.make()
    x, y = body.data()
    return model, x, y, body.loss
