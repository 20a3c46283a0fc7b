"""A gated graph network and a network for tables with a mixture of experts."""

import torch
import torch.nn.functional as F
from torch import nn

from .common import Network


class GatedGraph(nn.Module):
    """Messages along the edges, a GRU cell for each round, mean over the nodes, a small head for one number."""

    def __init__(self, kinds=8, width=48, rounds=3):
        super().__init__()
        self.embed = nn.Linear(kinds, width)
        self.messages = nn.ModuleList([nn.Linear(width, width) for _ in range(rounds)])
        self.updates = nn.ModuleList([nn.GRUCell(width, width) for _ in range(rounds)])
        self.readout = nn.Sequential(
            nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, 1)
        )

    def pool(self, h):
        return h.mean(dim=1)

    def forward(self, nodes, adjacency):
        b, n, _ = nodes.shape
        h = torch.tanh(self.embed(nodes))
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        for message, update in zip(self.messages, self.updates, strict=True):
            m = torch.bmm(adjacency, F.relu(message(h))) / degree
            h = update(m.reshape(b * n, -1), h.reshape(b * n, -1)).view(b, n, -1)
        return self.readout(self.pool(h)).squeeze(-1)


def draw_graphs(generator, batch=64, count=14, kinds=8):
    """Random graphs with node kinds; the target grows with the share of edges between low and high kinds."""
    kind = torch.randint(0, kinds, (batch, count), generator=generator)
    # each graph has its own leaning, so that the targets spread
    lean = torch.randint(0, 3, (batch, 1), generator=generator)
    kind = torch.where(torch.rand(batch, count, generator=generator) < 0.5, kind, (kind % 4) + 2 * lean)
    upper = (torch.rand(batch, count, count, generator=generator) < 0.25).float().triu(1)
    adjacency = upper + upper.transpose(1, 2)
    low = (kind < 4).float()
    mixed = (adjacency * low[:, :, None] * (1 - low)[:, None, :]).sum((1, 2))
    share = mixed / upper.sum((1, 2)).clamp(min=1)
    target = (share - 0.42) / 0.14 + 0.8 * (low.mean(1) - 0.5)
    return (F.one_hot(kind, kinds).float(), adjacency), target


# ---------------------------------------------------------------------------------------------------------------------

CARDINALITIES = (10, 7, 24)


class TableExperts(nn.Module):
    """Embeddings for categories, four small experts mixed by a gate, a tower that gives one logit."""

    def __init__(self, numbers=8, embed=6, hidden=80, experts=4):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(c, embed) for c in CARDINALITIES])
        width = numbers + embed * len(CARDINALITIES)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
                )
                for _ in range(experts)
            ]
        )
        self.gate = nn.Linear(width, experts)
        self.tower = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in self.embeddings:
            nn.init.normal_(table.weight, std=0.3)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                nn.init.zeros_(m.bias)
        nn.init.xavier_uniform_(self.gate.weight)
        nn.init.xavier_uniform_(self.tower[-1].weight)

    def join(self, numbers, categories):
        parts = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
        return torch.cat([numbers, *parts], dim=1)

    def mix(self, x):
        share = F.softmax(self.gate(x), dim=1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return torch.einsum("be,beh->bh", share, outputs)

    def forward(self, numbers, categories):
        return self.tower(self.mix(self.join(numbers, categories))).squeeze(1)


def draw_table(generator, batch=64, numbers=8):
    """Customers: eight normalized numbers and three categories; the answer hangs on products and on a category."""
    x = torch.randn(batch, numbers, generator=generator)
    cats = torch.stack([torch.randint(0, c, (batch,), generator=generator) for c in CARDINALITIES], dim=1)
    fixed = torch.Generator().manual_seed(9)
    effect = torch.randn(max(CARDINALITIES), generator=fixed)
    score = 2.0 * x[:, 0] * (cats[:, 1] > 3) + 1.5 * x[:, 1].abs() - 1.2 + 1.5 * effect[cats[:, 2]] - x[:, 3]
    target = (torch.rand(batch, generator=generator) < torch.sigmoid(2 * score)).float()
    return (x, cats), target


NETWORKS = {
    "graph": Network(GatedGraph, draw_graphs, F.mse_loss, lr=2e-3, sgd_lr=0.002),
    "tabular": Network(TableExperts, draw_table, F.binary_cross_entropy_with_logits, lr=2e-3, sgd_lr=0.02),
}
