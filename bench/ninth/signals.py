"""Networks on pictures, sound, graphs and states."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VGG(nn.Module):
    plan = (16, 16, 0, 32, 32, 0, 64, 64, 0, 64, 64, 0, 64, 64, 0)

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in self.plan:
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels, 64), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(64, classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_uniform_(module.weight, a=1.0)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.classifier[-1].weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class GatedLayer(nn.Module):
    def __init__(self, channels: int, dilation: int, last: bool = False) -> None:
        super().__init__()
        self.dilation = dilation
        self.filter = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.gate = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.residual = None if last else nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, channels, 1)

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.dilation, 0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        padded = self.pad(x)
        z = torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded))
        return x if self.residual is None else x + self.residual(z), self.skip(z)


class WaveNet(nn.Module):
    """Takes samples (batch, 1, time) in [-1, 1]; gives scores (batch, levels, time) of the next sample."""

    def __init__(self, channels: int = 24, levels: int = 32, stacks: int = 2, depth: int = 5) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, channels, 1)
        dilations = [2**i for _ in range(stacks) for i in range(depth)]
        self.layers = nn.ModuleList(GatedLayer(channels, d) for d in dilations[:-1])
        self.layers.append(GatedLayer(channels, dilations[-1], last=True))
        self.end1 = nn.Conv1d(channels, channels, 1)
        self.end2 = nn.Conv1d(channels, levels, 1)

    def skips(self, x: Tensor) -> Tensor:
        total = 0.0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return total

    def forward(self, x: Tensor) -> Tensor:
        return self.end2(F.relu(self.end1(F.relu(self.skips(self.start(x))))))


class GraphAttention(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(fan_in, heads * fan_out, bias=False)
        self.source = nn.Parameter(torch.empty(heads, fan_out))
        self.target = nn.Parameter(torch.empty(heads, fan_out))
        self.bias = nn.Parameter(torch.zeros(heads * fan_out))
        for weight in (self.linear.weight, self.source, self.target):
            nn.init.xavier_uniform_(weight, gain=math.sqrt(2))

    def weights(self, scores: Tensor, adjacency: Tensor) -> Tensor:
        return scores.masked_fill(~adjacency, float("-inf")).softmax(-1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.linear(x).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        to = (h * self.target[:, None]).sum(-1)
        of = (h * self.source[:, None]).sum(-1)
        scores = F.leaky_relu(to[:, :, None] + of[:, None, :], 0.2)
        return (self.weights(scores, adjacency) @ h).transpose(0, 1).flatten(1) + self.bias


class GAT(nn.Module):
    """Takes features (nodes, features) and an adjacency (nodes, nodes) that is true at edges."""

    def __init__(self, features: int = 24, hidden: int = 8, heads: int = 4, classes: int = 4, depth: int = 2) -> None:
        super().__init__()
        widths = [features] + [hidden * heads] * (depth - 1)
        self.convs = nn.ModuleList(GraphAttention(width, hidden, heads) for width in widths[:-1])
        self.last = GraphAttention(widths[-1], classes, 1)
        self.dropout = nn.Dropout(0.1)

    def edges(self, adjacency: Tensor) -> Tensor:
        return adjacency | torch.eye(len(adjacency), dtype=torch.bool, device=adjacency.device)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        edges = self.edges(adjacency)
        for conv in self.convs:
            x = F.elu(conv(self.dropout(x), edges))
        return self.last(self.dropout(x), edges)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Quantizer(nn.Module):
    def __init__(self, codes: int, width: int, beta: float = 0.25) -> None:
        super().__init__()
        self.beta = beta
        self.codebook = nn.Embedding(codes, width)

    def flat(self, z: Tensor) -> Tensor:
        return z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])

    def back(self, q: Tensor, z: Tensor) -> Tensor:
        batch, width, high, wide = z.shape
        return q.view(batch, high, wide, width).permute(0, 3, 1, 2)

    def straight(self, z: Tensor, q: Tensor) -> Tensor:
        return z + (q - z).detach()

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(self.flat(z), self.codebook.weight).argmin(1)
        q = self.back(self.codebook(nearest), z)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        return self.straight(z, q), loss


class VQVAE(nn.Module):
    """Gives the picture made again, in [-1, 1], and the loss of the codebook."""

    def __init__(self, channels: int = 32, codes: int = 64, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, channels, 4, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 4, 2, 1),
            ResidualUnit(channels), nn.ReLU(), nn.Conv2d(channels, width, 1), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.quantizer = Quantizer(codes, width)
        self.decoder = nn.Sequential(
            nn.Conv2d(width, channels, 3, 1, 1), ResidualUnit(channels), nn.ReLU(),
            nn.ConvTranspose2d(channels, channels, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(channels, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, loss = self.quantizer(self.encoder(x))
        return torch.tanh(self.decoder(z)), loss


class ActorCritic(nn.Module):
    """Gives the scores of the actions (batch, actions) and the values (batch)."""

    def __init__(self, states: int = 12, hidden: int = 64, actions: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.critic_body = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh())
        self.actor = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.orthogonal_(self.critic.weight, 1.0)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def value(self, features: Tensor) -> Tensor:
        return self.critic(self.critic_body(features)).squeeze(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.actor(features), self.value(features)
