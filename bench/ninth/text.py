"""Networks on tokens: a classifier like BERT, a decoder like Llama, a tagger with packed sequences."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attend(x, padding)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Classifier(nn.Module):
    """Takes tokens and a mask that is 1 at words and 0 at padding."""

    def __init__(self, vocabulary: int = 200, length: int = 24, width: int = 64, classes: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(EncoderLayer(width, 4) for _ in range(3))
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)
        self.apply(self.start)

    @staticmethod
    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()

    def padding(self, mask: Tensor) -> Tensor:
        return mask == 0

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.words(tokens) + self.positions(places)))
        for layer in self.layers:
            x = layer(x, self.padding(mask))
        return self.head(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of a tensor (batch, heads, time, width of a head)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class GroupedAttention(nn.Module):
    def __init__(self, width: int, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        batch, time, _ = x.shape
        return x.view(batch, time, heads, self.size).transpose(1, 2)

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.groups, dim=1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q = rotate(self.split(self.q_proj(x), self.heads))
        k = rotate(self.split(self.k_proj(x), self.groups))
        v = self.split(self.v_proj(x), self.groups)
        out = self.mix(q, self.spread(k), self.spread(v))
        return self.o_proj(out.transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(width)
        self.attention = GroupedAttention(width)
        self.post_norm = RMSNorm(width)
        self.mlp = SwiGLU(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 96, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Tagger(nn.Module):
    """Takes tokens and lengths; gives scores (batch, time, tags)."""

    def __init__(self, vocabulary: int = 150, width: int = 32, hidden: int = 48, tags: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.rnn = nn.GRU(width, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * hidden, tags)

    def lengths(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return lengths.cpu()

    def run(self, x: Tensor, lengths: Tensor, total: int) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=total)[0]

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        out = self.run(self.embed(tokens), self.lengths(tokens, lengths), tokens.shape[1])
        return self.head(self.dropout(out))
