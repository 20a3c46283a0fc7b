"""Transformers for sequences of tokens: five styles of decoder and an encoder with a decoder."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from bench.promised.tasks import LENGTH, VOCABULARY
from torch import Tensor, nn
from torch.nn import functional as F


def causal(length: int) -> Tensor:
    """True where a position may look."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def start(model: nn.Module, blocks: int, ends: tuple[str, ...], std: float = 0.02) -> None:
    """GPT-2's law: 0.02 everywhere, and 0.02/√(2L) where a branch ends."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std / math.sqrt(2 * blocks) if name.endswith(ends) else std)


class RotaryAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def turn(self, x: Tensor) -> Tensor:
        half = self.size // 2
        speed = 100.0 ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[2])[:, None] * speed
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.size)

    def weights(self, scores: Tensor) -> Tensor:
        mask = causal(scores.shape[-1])
        return scores.masked_fill(~mask, float("-inf")).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        mixed = self.weights(self.scores(self.turn(q), self.turn(k))) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RotaryBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = RotaryAttention(width, heads)
        self.mlp = GatedMLP(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Rotary(nn.Module):
    """Rotary positions, RMS norm in front of the branches, gated MLP, head of its own."""

    def __init__(self, width: int = 40, blocks: int = 6) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=width, num_hidden_layers=blocks, initializer_range=0.05)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(RotaryBlock(width, 4) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        start(self, blocks, (), self.config.initializer_range)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ParallelBlock(nn.Module):
    """Attention with linear biases and MLP side by side behind one norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1).float(), persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        distance = (torch.arange(t)[None] - torch.arange(t)[:, None]).float()
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads) + self.slopes[:, None, None] * distance
        weights = torch.softmax(scores.masked_fill(~causal(t), -1e9), dim=-1)
        return self.attention_out((weights @ v).transpose(1, 2).reshape(n, t, d))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attend(h) + self.down(F.gelu(self.up(h)))


class Alibi(nn.Module):
    """Parallel blocks; the embedding is the head, too."""

    def __init__(self, width: int = 40, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(ParallelBlock(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        start(self, blocks, ("attention_out.weight", "down.weight"), 0.08)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NormedAttention(nn.Module):
    """Queries and keys are normalized; a temperature for each head is learned."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


class SquaredMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class NormedBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = NormedAttention(width, heads), SquaredMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class QKNorm(nn.Module):
    """Learned positions, normalized queries and keys, squared ReLU."""

    def __init__(self, width: int = 40, blocks: int = 6) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=width, num_hidden_layers=blocks, initializer_range=0.08)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(NormedBlock(width, 4) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        start(self, blocks, (), self.config.initializer_range)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Two of four experts for each token, weighted by what the router says."""

    def __init__(self, width: int, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, width) for _ in range(experts))

    def logits(self, x: Tensor) -> Tensor:
        return self.router(x)

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.logits(x).softmax(-1).topk(self.chosen, -1)
        best = best / best.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (best * (which == number)).sum(-1, keepdim=True)
            rows = share.squeeze(-1) > 0
            out[rows] = out[rows] + share[rows] * expert(x[rows])
        return out


class ExpertBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.moe = RotaryAttention(width, heads), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MixtureOfExperts(nn.Module):
    """A decoder whose MLPs are mixtures of experts."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        start(self, blocks, ("out.weight", "down.weight"), 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CrossBlock(nn.Module):
    """A block of the decoder: looks at what stands before, then at the source."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=~causal(x.shape[1]), need_weights=False)[0]
        x = x + self.cross(self.norm2(x), memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


class ReadBlock(nn.Module):
    """A block of the encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Translator(nn.Module):
    """Encoder and decoder of three blocks each, with wave positions."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.read, self.write = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        for table in (self.read, self.write):
            nn.init.normal_(table.weight, std=width**-0.5)
        self.encoder = nn.ModuleList(ReadBlock(width, 4) for _ in range(3))
        self.memory_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(CrossBlock(width, 4) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        angle = torch.arange(10)[:, None] * 50.0 ** (-torch.arange(width // 2) / (width // 2))
        self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], 1))

    def encode(self, source: Tensor) -> Tensor:
        x = self.read(source) * self.scale + self.positions
        for block in self.encoder:
            x = block(x)
        return self.memory_norm(x)

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        memory = self.encode(source)
        x = self.write(before) * self.scale + self.positions
        for block in self.decoder:
            x = block(x, memory)
        return self.head(self.norm(x))
