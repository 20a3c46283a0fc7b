"""The bodies that read sequences: two language models, an encoder, a forecaster and a GRU."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def weights(self, scores: Tensor) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.out((self.weights(self.scores(q, k)) @ v).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SandwichBlock(nn.Module):
    """A norm in front of each branch and another one behind it, before the sum."""

    def __init__(self, width: int):
        super().__init__()
        self.pre1, self.post1 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = CausalAttention(width)
        self.pre2, self.post2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = GatedMLP(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post1(self.attention(self.pre1(x)))
        return x + self.post2(self.mlp(self.pre2(x)))


class SandwichLM(nn.Module):
    def __init__(self, words: int = 30, width: int = 48, depth: int = 5, steps: int = 20):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Embedding(steps, width)
        self.blocks = nn.ModuleList(SandwichBlock(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_data() -> tuple[Tensor, Tensor]:
    """Each word follows from the last one and a step that stays the same in a sequence."""
    step = torch.randint(1, 6, (32, 1))
    words = (torch.randint(30, (32, 1)) + step * torch.arange(21)) % 30
    noise = torch.rand(words.shape) < 0.05
    words = torch.where(noise, torch.randint_like(words, 30), words)
    return words[:, :-1], words[:, 1:]


class RelativeAttention(nn.Module):
    """Attention whose scores get a learned number for each distance and head, as in T5."""

    def __init__(self, width: int, heads: int = 4, reach: int = 8):
        super().__init__()
        self.heads, self.reach = heads, reach
        self.qkv = nn.Linear(width, 3 * width)
        self.distance = nn.Embedding(2 * reach + 1, heads)
        self.out = nn.Linear(width, width)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[-2])
        apart = (place[None] - place[:, None]).clamp(-self.reach, self.reach) + self.reach
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + self.distance(apart).permute(2, 0, 1)

    def weights(self, scores: Tensor, real: Tensor) -> Tensor:
        return scores.masked_fill(~real[:, None, None, :], float("-inf")).softmax(dim=-1)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out((self.weights(self.scores(q, k), real) @ v).transpose(1, 2).flatten(2))


class RelativeBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = RelativeAttention(width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), real)
        return x + self.mlp(self.norm2(x))


class RelativeEncoder(nn.Module):
    """Reads a padded text and names its class; word 0 is padding."""

    def __init__(self, words: int = 40, width: int = 48, depth: int = 4, classes: int = 4):
        super().__init__()
        self.config = SimpleNamespace(initializer_range=0.02, hidden_size=width, num_hidden_layers=depth)
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.embed_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(RelativeBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])

    def real(self, words: Tensor) -> Tensor:
        return words != 0

    def pool(self, x: Tensor, real: Tensor) -> Tensor:
        return (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)

    def forward(self, words: Tensor) -> Tensor:
        real = self.real(words)
        x = self.embed_norm(self.words(words))
        for block in self.blocks:
            x = block(x, real)
        return self.classifier(self.norm(self.pool(x, real)))


def majority_data() -> tuple[Tensor, Tensor]:
    """The class is the one whose words are most frequent in the text."""
    y = torch.arange(48) % 4
    own = torch.rand(48, 24) < 0.4
    group = torch.where(own, y[:, None], torch.randint(4, (48, 24)))
    words = 1 + group + 4 * torch.randint(9, (48, 24))
    length = torch.randint(12, 25, (48, 1))
    return words * (torch.arange(24) < length), y


class TemporalBlock(nn.Module):
    """Two dilated convolutions that see only the past, and a shortcut."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.past = 2 * dilation
        self.conv1 = nn.Conv1d(width, width, 3, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 3, dilation=dilation)

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.past, 0))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv1(self.pad(x)))
        return x + F.relu(self.conv2(self.pad(h)))


class TemporalNet(nn.Module):
    """Forecasts the next value of each of four series at every step."""

    def __init__(self, series: int = 4, width: int = 32, depth: int = 4):
        super().__init__()
        self.lift = nn.Conv1d(series, width, 1)
        self.blocks = nn.ModuleList(TemporalBlock(width, 2**level) for level in range(depth))
        self.head = nn.Conv1d(width, series, 1)
        for block in self.blocks:
            for conv in (block.conv1, block.conv2):
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
                nn.init.zeros_(conv.bias)
            with torch.no_grad():
                block.conv2.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def forecast_data() -> tuple[Tensor, Tensor]:
    n, steps = 32, torch.arange(41)
    speed = 0.2 + 0.5 * torch.rand(n, 4, 1)
    series = math.sqrt(2) * torch.sin(speed * steps + 6 * torch.rand(n, 4, 1)) + 0.05 * torch.randn(n, 4, 41)
    return series[:, :, :-1], series[:, :, 1:]


class AttentiveGRU(nn.Module):
    """Two layers of GRU; a small network weights their steps; a classifier reads the weighted sum."""

    def __init__(self, features: int = 6, width: int = 40, classes: int = 4):
        super().__init__()
        self.lift = nn.Linear(features, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.attend = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.classify = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def weights(self, states: Tensor) -> Tensor:
        return self.attend(states).softmax(dim=1)

    def summary(self, states: Tensor) -> Tensor:
        return (self.weights(states) * states).sum(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(torch.tanh(self.lift(x)))
        return self.classify(self.summary(states))


def motif_data() -> tuple[Tensor, Tensor]:
    """A motif of five steps stands somewhere in noise; the class says which one it is."""
    fixed = torch.Generator().manual_seed(3)
    motifs = 2 * torch.randn(4, 5, 6, generator=fixed)
    y = torch.arange(48) % 4
    x = torch.randn(48, 24, 6) * 0.7
    for row, place in enumerate(torch.randint(19, (48,)).tolist()):
        x[row, place : place + 5] += motifs[y[row]]
    return x, y


class Decay(nn.Module):
    """A linear recurrence of outer products with a decay that depends on the input, and a gate."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.decay = nn.Linear(width, heads)
        self.gate = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width // heads)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.constant_(self.decay.bias, 2.0)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def keep(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.decay(x))

    def step(self, state: Tensor, keep: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return state * keep[..., None, None] + k[..., :, None] * v[..., None, :]

    def mix(self, x: Tensor) -> Tensor:
        q, k, v, keep = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x)), self.keep(x)
        state = q.new_zeros(len(x), self.heads, q.shape[-1], q.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            state = self.step(state, keep[:, t], k[:, t], v[:, t])
            outputs.append(torch.einsum("bhi,bhij->bhj", q[:, t], state))
        return self.norm(torch.stack(outputs, dim=1)).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x) * F.silu(self.gate(x)))


class MixingBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mixer = Decay(width)
        self.norm2 = nn.LayerNorm(width)
        self.key = nn.Linear(width, 2 * width, bias=False)
        self.value = nn.Linear(2 * width, width, bias=False)

    def channels(self, x: Tensor) -> Tensor:
        return self.value(F.relu(self.key(x)).square())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.channels(self.norm2(x))


class MixingLM(nn.Module):
    def __init__(self, words: int = 30, width: int = 48, depth: int = 3):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(MixingBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
