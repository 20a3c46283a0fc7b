"""Language networks that read from left to right: a GPT, a Llama, a mixture of experts and an LSTM."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .common import VOCAB, Network, draw_text, token_loss


@dataclass
class GPTConfig:
    vocab_size: int = VOCAB
    block_size: int = 32
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 64
    initializer_range: float = 0.02
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Decoder-only transformer; weights N(0, 0.02), residual outputs N(0, 0.02 / sqrt(2 * layers)), tied head."""

    def __init__(self, config=None):
        super().__init__()
        config = config or GPTConfig()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=config.initializer_range / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# ---------------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_table(length, dim, base=10000.0):
    freq = base ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(length).float(), freq)
    return torch.cos(angle), torch.sin(angle)


def rotate(x, cos, sin):
    """x (batch, time, heads, dim): turn the pairs of the two halves by the angle of the position."""
    one, two = x.chunk(2, dim=-1)
    cos, sin = cos[: x.size(1), None], sin[: x.size(1), None]
    return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1)


class LlamaLayer(nn.Module):
    """Bare parameters and einsum; two query heads share each key head."""

    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attn_norm = RMSNorm(dim)
        self.wq = nn.Parameter(torch.empty(heads * self.head_dim, dim))
        self.wk = nn.Parameter(torch.empty(kv_heads * self.head_dim, dim))
        self.wv = nn.Parameter(torch.empty(kv_heads * self.head_dim, dim))
        self.wo = nn.Parameter(torch.empty(dim, heads * self.head_dim))
        self.ffn_norm = RMSNorm(dim)
        self.w1 = nn.Parameter(torch.empty(hidden, dim))
        self.w2 = nn.Parameter(torch.empty(dim, hidden))
        self.w3 = nn.Parameter(torch.empty(hidden, dim))

    def attend(self, x, cos, sin):
        b, t, _ = x.shape
        q = rotate(F.linear(x, self.wq).view(b, t, self.heads, -1), cos, sin)
        k = rotate(F.linear(x, self.wk).view(b, t, self.kv_heads, -1), cos, sin)
        v = F.linear(x, self.wv).view(b, t, self.kv_heads, -1)
        q = q.view(b, t, self.kv_heads, self.heads // self.kv_heads, -1)
        scores = torch.einsum("btkgd,bskd->bkgts", q, k) / math.sqrt(self.head_dim)
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        y = torch.einsum("bkgts,bskd->btkgd", weights, v).reshape(b, t, -1)
        return F.linear(y, self.wo)

    def feed(self, x):
        return F.linear(F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3), self.w2)

    def forward(self, x, cos, sin):
        x = x + self.attend(self.attn_norm(x), cos, sin)
        return x + self.feed(self.ffn_norm(x))


class Llama(nn.Module):
    """RMSNorm, rotary positions, SwiGLU; matrices N(0, 1 / fan_in), residual outputs divided by sqrt(2 * layers)."""

    def __init__(self, vocab=VOCAB, dim=64, layers=4, heads=4, kv_heads=2, hidden=160, length=64):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaLayer(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        cos, sin = rotary_table(length, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.tok_embeddings.weight, std=0.5)
        nn.init.normal_(self.output.weight, std=self.output.in_features**-0.5)
        for layer in self.layers:
            for name in ("wq", "wk", "wv", "w1", "w3"):
                w = getattr(layer, name)
                nn.init.normal_(w, std=w.shape[1] ** -0.5)
            for name in ("wo", "w2"):
                w = getattr(layer, name)
                nn.init.normal_(w, std=(w.shape[1] * 2 * len(self.layers)) ** -0.5)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(length, length, dtype=torch.bool)))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~self.mask[: x.size(1), : x.size(1)], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Expert(nn.Sequential):
    def __init__(self, width, hidden):
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class SparseMoE(nn.Module):
    """Every token goes to its two best experts; their outputs are weighted by the router."""

    def __init__(self, width, hidden, count=4, chosen=2):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList([Expert(width, hidden) for _ in range(count)])
        self.chosen = chosen

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        best, index = self.router(flat).topk(self.chosen, dim=-1)
        share = best.softmax(dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(index == number)
            if row.numel():
                out = out.index_add(0, row, expert(flat[row]) * share[row, slot, None])
        return out.view_as(x)


class MoELayer(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, length)
        self.norm2 = nn.LayerNorm(width)
        self.moe = SparseMoE(width, 2 * width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MoEModel(nn.Module):
    def __init__(self, vocab=VOCAB, width=64, heads=2, layers=3, length=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.1)
        self.layers = nn.Sequential(*[MoELayer(width, heads, length) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        nn.init.normal_(self.embed.weight, std=0.3)
        for layer in self.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
            nn.init.normal_(layer.moe.router.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.05)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.size(1)]
        return self.head(self.norm(self.layers(x)))


# ---------------------------------------------------------------------------------------------------------------------


class WordLSTM(nn.Module):
    """Two-layer LSTM language model: uniform(-0.1, 0.1) embedding, torch's own LSTM start, linear decoder."""

    def __init__(self, vocab=VOCAB, embedding=48, hidden=96, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(vocab, embedding)
        self.rnn = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.decoder = nn.Linear(hidden, vocab)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens):
        out, _ = self.rnn(self.encoder(tokens))
        return self.decoder(out)


def draw_lstm(generator):
    return draw_text(generator, batch=32, length=24)


NETWORKS = {
    "gpt": Network(GPT, draw_text, token_loss, lr=3e-3, sgd_lr=0.1),
    "llama": Network(Llama, draw_text, token_loss, lr=3e-3, sgd_lr=0.05),
    "moe": Network(MoEModel, draw_text, token_loss, lr=2e-3, sgd_lr=0.05),
    "lstm": Network(WordLSTM, draw_lstm, token_loss, lr=1e-2, sgd_lr=5.0),
}
