"""A graph network: nodes with features, a matrix of edges for each graph, one number to predict."""

from __future__ import annotations

import torch
from common import Fault, Network, explained
from torch import Tensor, nn

NODES, FEATURES, WIDTH, LAYERS = 12, 8, 48, 5

FAULTS = (
    Fault(
        "edges_not_normalized",
        "sum where a mean is meant",
        ("gradient_explosion", "huge_signal", "start_loss", "odd_branch", "cause"),
        r".*",
    ),
    Fault("mean_over_graphs", "mean over the samples", ("mixed_samples",), r".*", "graphs are mixed"),
    Fault("loss_broadcast", "loss of shapes that broadcast", ("mixed_samples", "wrong_axis"), r".*", "wrong targets"),
    Fault(
        "raw_features",
        "raw inputs",
        ("huge_signal", "start_loss", "degenerate_batch", "saturation"),
        r".*",
    ),
    Fault(
        "weights_too_small",
        "weights too small everywhere",
        ("gradient_vanishing", "odd_scale", "cause", "rank_collapse"),
        r".*",
    ),
    Fault(
        "neighbours_shared", "one module used several times", ("cloned_weights", "disagreement"), r"layers|neighbour"
    ),
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(self.own.weight, std=(1 / WIDTH) ** 0.5)
        nn.init.normal_(self.neighbours.weight, std=(1 / WIDTH) ** 0.5)
        nn.init.zeros_(self.own.bias)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.relu(self.own(x) + self.neighbours(edges @ x))


class GraphNet(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        if fault == "weights_too_small":
            for layer in self.layers:
                nn.init.normal_(layer.own.weight, std=0.01)
                nn.init.normal_(layer.neighbours.weight, std=0.01)
        if fault == "neighbours_shared":
            for layer in self.layers[1:]:
                layer.neighbours = self.layers[0].neighbours

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        if self.fault != "edges_not_normalized":
            edges = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        x = self.embed(features)
        for layer in self.layers:
            x = layer(x, edges)
        pooled = x.mean(1)
        if self.fault == "mean_over_graphs":
            pooled = x.mean(0)[torch.arange(len(x)) % NODES]
        return self.head(pooled)


def batch(generator: torch.Generator, fault: str | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    features = torch.randn(64, NODES, FEATURES, generator=generator)
    edges = (torch.rand(64, NODES, NODES, generator=generator) < 0.5).float().triu(1)
    edges = edges + edges.transpose(1, 2)
    near = edges @ features / edges.sum(-1, keepdim=True).clamp(min=1)
    targets = (3 * features[..., :2].mean(1).sum(-1) + 4 * (features[..., 2] * near[..., 2]).mean(1))[:, None]
    if fault == "raw_features":
        features = features * torch.tensor([300.0, 1, 1, 5000, 1, 40, 1, 1]) + torch.tensor(
            [800.0, 0, 0, 2e4, 0, 90, 0, 0]
        )
    return (features, edges), targets / 1.2


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def broadcast(output: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error of a column and a row, which is taken over all pairs."""
    return (output - targets.squeeze(-1)).square().mean()


NETWORK = Network("graph", GraphNet, batch, FAULTS, loss, explained, 0.0, {"loss_broadcast": broadcast}, rate=2e-3)
