"""Ten healthy networks, each with a batch, a loss and the step rate at which it learns."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from bench.later import tasks
from torch import Tensor, nn
from torch.nn import functional as F


class Heads(nn.Module):
    """Attention of several heads; `bias` is added to the scores."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = self.scores(self.split(self.query(x)), self.split(self.key(x)))
        mixed = self.weights(scores if bias is None else scores + bias) @ self.split(self.value(x))
        return self.out(mixed.transpose(1, 2).flatten(2))


def feed_forward(width: int, factor: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))


class EncoderBlock(nn.Module):
    """A post-norm block, as in BERT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Heads(width), nn.LayerNorm(width)
        self.mlp, self.norm2 = feed_forward(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, bias))
        return self.norm2(x + self.mlp(x))


class MaskedEncoder(nn.Module):
    """Token 0 is padding, 1 the mask, 2 the end of a sentence; the segment is counted from the ends."""

    def __init__(self, words: int = 24, steps: int = 26, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(steps, width)
        self.segments, self.norm = nn.Embedding(3, width), nn.LayerNorm(width)
        for table in (self.tokens, self.positions, self.segments):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(depth))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(words))

    def padding(self, x: Tensor) -> Tensor:
        return x == 0

    def embed(self, x: Tensor) -> Tensor:
        ends = (x == 2).long()
        segments = (ends.cumsum(1) - ends).clamp(max=2)
        places = torch.arange(x.shape[1], device=x.device)
        return self.norm(self.tokens(x) + self.positions(places) + self.segments(segments))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.zeros(x.shape).masked_fill(self.padding(x), -1e9)[:, None, None, :]
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, bias)
        return F.linear(self.transform(hidden), self.tokens.weight, self.bias)


class WindowBlock(nn.Module):
    """Attention inside windows of 4 by 4 places, on a map that may be rolled by two places."""

    def __init__(self, width: int, side: int, shift: int) -> None:
        super().__init__()
        self.side, self.shift = side, shift
        self.norm1, self.attention = nn.LayerNorm(width), Heads(width)
        self.norm2, self.mlp = nn.LayerNorm(width), feed_forward(width, 2)
        self.relative = nn.Parameter(torch.randn(49, 4) * 0.02)
        row, column = torch.arange(16) // 4, torch.arange(16) % 4
        self.register_buffer("index", (row[:, None] - row + 3) * 7 + column[:, None] - column + 3)
        region = torch.zeros(1, side, side, 1)
        for part in (slice(-4, -2), slice(-2, None)) if shift else ():
            region[:, part] += 1
            region[:, :, part] += 3
        region = self.cut(region)[..., 0]
        self.register_buffer("apart", (region[:, None, :] != region[:, :, None]) * -100.0)

    def cut(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).transpose(2, 3)
        return parts.reshape(-1, 16, x.shape[-1])

    def join(self, x: Tensor, count: int) -> Tensor:
        n = self.side // 4
        return x.reshape(count, n, n, 4, 4, -1).transpose(2, 3).reshape(count, self.side, self.side, -1)

    def mix(self, x: Tensor) -> Tensor:
        bias = self.relative[self.index].permute(2, 0, 1) + self.apart.repeat(len(x), 1, 1)[:, None]
        x = self.cut(x.roll((-self.shift, -self.shift), (1, 2)))
        count = len(bias) * 16 // self.side**2
        return self.join(self.attention(x, bias), count).roll((self.shift, self.shift), (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Windows(nn.Module):
    def __init__(self, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(1, width, 2, 2), nn.LayerNorm(width)
        self.stage1 = nn.Sequential(WindowBlock(width, 8, 0), WindowBlock(width, 8, 2))
        self.merge = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False))
        self.stage2 = nn.Sequential(WindowBlock(2 * width, 4, 0), WindowBlock(2 * width, 4, 0))
        self.last, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage1(self.norm(self.patch(x).permute(0, 2, 3, 1)))
        x = x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).transpose(2, 3).flatten(3)
        return self.head(self.last(self.stage2(self.merge(x))).mean((1, 2)))


class HighwayLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.xavier_normal_(self.transform.weight)
        nn.init.zeros_(self.transform.bias)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * self.transform(x).tanh() + (1 - gate) * x


class Highway(nn.Module):
    def __init__(self, features: int = 20, width: int = 40, depth: int = 10) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.layers = nn.Sequential(*(HighwayLayer(width) for _ in range(depth)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.enter(x)))


class Coordinates(nn.Module):
    """A colour for each point of space; the encoded point comes in again at the fourth layer."""

    def __init__(self, width: int = 64, octaves: int = 4, depth: int = 6) -> None:
        super().__init__()
        self.octaves, size = octaves, 3 + 6 * octaves
        widths = [size] + [width] * (depth - 1)
        widths[3] += size
        self.layers = nn.ModuleList(nn.Linear(n, width) for n in widths)
        self.colour, self.activation = nn.Linear(width, 3), nn.ReLU()
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def encode(self, x: Tensor) -> Tensor:
        angles = (x[..., None] * math.pi * 2.0 ** torch.arange(self.octaves)).flatten(1)
        return torch.cat([x, angles.sin(), angles.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(x)
        hidden = code
        for number, layer in enumerate(self.layers):
            hidden = self.activation(layer(torch.cat([hidden, code], -1) if number == 3 else hidden))
        return self.colour(hidden).sigmoid()


class MemoryReader(nn.Module):
    """Reads rows of (key, value); the last row is the question. Each hop moves the question."""

    def __init__(self, words: int = 12, width: int = 32, hops: int = 2, answers: int = 6) -> None:
        super().__init__()
        self.address, self.content = nn.Embedding(words, width), nn.Embedding(words, width)
        self.ask = nn.Embedding(words, width)
        for book in (self.address, self.content, self.ask):
            nn.init.normal_(book.weight, std=width**-0.25)
        self.order = nn.Parameter(torch.tensor([1.0, 0.5])[:, None].repeat(1, width))
        self.hops = nn.ModuleList(nn.Linear(width, width) for _ in range(hops))
        self.answer = nn.Linear(width, answers)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :-1], x[:, -1]

    def attend(self, state: Tensor, keys: Tensor) -> Tensor:
        return torch.einsum("nd,nsd->ns", state, keys).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        facts, question = self.split(x)
        keys, values = ((book(facts) * self.order).sum(2) for book in (self.address, self.content))
        state = (self.ask(question) * self.order).sum(1)
        for hop in self.hops:
            state = hop(state) + torch.einsum("ns,nsd->nd", self.attend(state, keys), values)
        return self.answer(state)


def conv(inputs: int, outputs: int, size: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Scales(nn.Module):
    """Four branches of different reach, side by side."""

    def __init__(self, inputs: int, each: int = 8) -> None:
        super().__init__()
        self.one = conv(inputs, each, 1)
        self.three = nn.Sequential(conv(inputs, each, 1), conv(each, each, 3))
        self.five = nn.Sequential(conv(inputs, each, 1), conv(each, each, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, each, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16, 3)
        self.parts = nn.Sequential(Scales(16), nn.MaxPool2d(2), Scales(32), Scales(32))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.parts(self.stem(x)).mean((2, 3))))


class Dueling(nn.Module):
    def __init__(self, features: int = 12, width: int = 64, actions: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.advantage = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions))

    def combine(self, value: Tensor, advantage: Tensor) -> Tensor:
        return value + advantage - advantage.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        return self.combine(self.value(hidden), self.advantage(hidden))


class Variational(nn.Module):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mean, self.logvar = nn.Linear(512, latent), nn.Linear(512, latent)
        self.grow = nn.Sequential(nn.Linear(latent, 512), nn.ReLU(), nn.Unflatten(1, (32, 4, 4)))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.decoder(self.grow(z)), mean, logvar


class ColumnBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Heads(width)
        self.norm2, self.mlp = nn.LayerNorm(width), feed_forward(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Columns(nn.Module):
    """A token for each column of a table and one that is read in the end."""

    def __init__(self, columns: int = 10, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.summary = nn.Parameter(torch.empty(1, 1, width).uniform_(-bound, bound))
        self.blocks = nn.Sequential(*(ColumnBlock(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def tokens(self, x: Tensor) -> Tensor:
        return torch.cat([self.summary.expand(len(x), -1, -1), x[..., None] * self.weight + self.bias], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x))[:, 0]))[:, 0]


class MinimalCell(nn.Module):
    """The gate and the candidate see the input alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, new = self.gate(x).sigmoid(), self.candidate(x)
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = (1 - gate[:, step]) * state + gate[:, step] * new[:, step]
            states.append(state)
        return torch.stack(states, 1)


class BothWays(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.ahead, self.back = nn.LayerNorm(width), MinimalCell(width), MinimalCell(width)
        self.join = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.join(torch.cat([self.ahead(y), self.back(y.flip(1)).flip(1)], -1))


class Tagger(nn.Module):
    def __init__(self, words: int = 12, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(BothWays(width), BothWays(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(x))))


Built = tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]


class Body(NamedTuple):
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[..., Any]
    optimizer: str
    rate: float


BODIES = {
    "masked_encoder": Body(MaskedEncoder, tasks.sentences, tasks.token_loss, "Adam", 3e-3),
    "windows": Body(Windows, lambda: tasks.gratings(1), F.cross_entropy, "Adam", 2e-3),
    "highway": Body(Highway, lambda: tasks.classes(tasks.table(20)), F.cross_entropy, "SGD", 0.5),
    "coordinates": Body(Coordinates, tasks.colours, F.mse_loss, "Adam", 2e-3),
    "memory_reader": Body(MemoryReader, tasks.facts, F.cross_entropy, "Adam", 1e-2),
    "inception": Body(Inception, lambda: tasks.gratings(3), F.cross_entropy, "SGD", 0.05),
    "dueling": Body(Dueling, tasks.returns, tasks.value_loss, "Adam", 2e-3),
    "variational": Body(Variational, tasks.boxes, tasks.bound, "Adam", 3e-3),
    "columns": Body(Columns, lambda: tasks.total(tasks.table(10)), F.mse_loss, "Adam", 2e-3),
    "tagger": Body(Tagger, tasks.marks, tasks.token_loss, "Adam", 5e-3),
}


def build(name: str, seed: int) -> Built:
    body = BODIES[name]
    torch.manual_seed(seed)
    model = body.make()
    x, y = body.data()
    return model, x, y, body.loss
