"""Networks that read words: a small GPT, a translator with attention, a mixture of experts, two towers."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope_table(dim, length, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(length).float(), freqs)
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).flatten(-2)


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, n_heads, max_len):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        cos, sin = rope_table(self.head_dim, max_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(max_len, max_len)).bool(), persistent=False)

    def qkv(self, x):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        return apply_rope(q, self.cos[:T], self.sin[:T]), apply_rope(k, self.cos[:T], self.sin[:T]), v

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x)
        att = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        att = att.masked_fill(~self.mask[:T, :T], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, C))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim, n_heads, max_len):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = CausalSelfAttention(dim, n_heads, max_len)
        self.ffn_norm = RMSNorm(dim)
        self.feed_forward = SwiGLU(dim, 2 * dim)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class GPT(nn.Module):
    def __init__(self, vocab_size=11, dim=48, n_layers=4, n_heads=4, max_len=32):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([Block(dim, n_heads, max_len) for _ in range(n_layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(p, mean=0.0, std=0.1 / math.sqrt(2 * n_layers))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.1)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class Encoder(nn.Module):
    def __init__(self, vocab, emb_dim, hid_dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, emb_dim, padding_idx=0)
        self.rnn = nn.GRU(emb_dim, hid_dim, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hid_dim, hid_dim)

    def forward(self, src):
        lengths = (src != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(src), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, hidden = self.rnn(packed)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=src.shape[1])
        return outputs, torch.tanh(self.fc(torch.cat([hidden[0], hidden[1]], dim=1)))


class Attention(nn.Module):
    def __init__(self, hid_dim):
        super().__init__()
        self.attn = nn.Linear(3 * hid_dim, hid_dim)
        self.v = nn.Linear(hid_dim, 1, bias=False)

    def score(self, hidden, encoder_outputs):
        hidden = hidden.unsqueeze(1).expand(-1, encoder_outputs.shape[1], -1)
        return self.v(torch.tanh(self.attn(torch.cat([hidden, encoder_outputs], dim=2)))).squeeze(2)

    def forward(self, hidden, encoder_outputs, mask):
        return F.softmax(self.score(hidden, encoder_outputs).masked_fill(mask, -1e10), dim=1)


class Seq2Seq(nn.Module):
    """Teacher forcing; x holds the source and the shifted target."""

    def __init__(self, vocab=11, emb_dim=24, hid_dim=40):
        super().__init__()
        self.encoder = Encoder(vocab, emb_dim, hid_dim)
        self.attention = Attention(hid_dim)
        self.embedding = nn.Embedding(vocab, emb_dim, padding_idx=0)
        self.cell = nn.GRUCell(emb_dim + 2 * hid_dim, hid_dim)
        self.fc_out = nn.Linear(3 * hid_dim + emb_dim, vocab)

    def step(self, word, hidden, outputs, mask):
        a = self.attention(hidden, outputs, mask)
        context = torch.bmm(a.unsqueeze(1), outputs).squeeze(1)
        hidden = self.cell(torch.cat([word, context], dim=1), hidden)
        return self.fc_out(torch.cat([hidden, context, word], dim=1)), hidden

    def forward(self, x):
        src, trg = x[:, 0], x[:, 1]
        outputs, hidden = self.encoder(src)
        words, mask = self.embedding(trg), src == 0
        logits = []
        for t in range(trg.shape[1]):
            out, hidden = self.step(words[:, t], hidden, outputs, mask)
            logits.append(out)
        return torch.stack(logits, dim=1)


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        return self.net(x)


class SparseMoE(nn.Module):
    def __init__(self, dim, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, 2 * dim) for _ in range(num_experts)])

    def route(self, flat):
        probs = F.softmax(self.router(flat), dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        return probs, weights / weights.sum(-1, keepdim=True), chosen

    def combine(self, flat, weights, chosen):
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel():
                out = out.index_add(0, token, expert(flat[token]) * weights[token, slot].unsqueeze(-1))
        return out

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        probs, weights, chosen = self.route(flat)
        load = F.one_hot(chosen, self.num_experts).float().sum(1).mean(0) / self.top_k
        balance = self.num_experts * (load * probs.mean(0)).sum()
        return self.combine(flat, weights, chosen).view_as(x), balance


class MoEBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.moe = SparseMoE(dim)

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        y, balance = self.moe(self.ln2(x))
        return x + y, balance


class MoETagger(nn.Module):
    def __init__(self, vocab=16, tags=5, dim=32, depth=2, max_len=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(1, max_len, dim) * 0.5)
        self.blocks = nn.ModuleList([MoEBlock(dim) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, tags)

    def forward(self, x):
        h = self.embed(x) + self.pos[:, : x.shape[1]]
        total = 0.0
        for block in self.blocks:
            h, balance = block(h)
            total = total + balance
        return self.head(self.norm(h)), total


class Tower(nn.Module):
    def __init__(self, vocab, dim, out):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.ReLU(), nn.Linear(2 * dim, out))

    def forward(self, ids):
        return F.normalize(self.mlp(self.emb(ids).mean(dim=1)), dim=-1)


class TwoTower(nn.Module):
    """Query and item towers with a learned temperature, trained against the other items of the batch."""

    def __init__(self, vocab=60, dim=32, out=24):
        super().__init__()
        self.query_tower, self.item_tower = Tower(vocab, dim, out), Tower(vocab, dim, out)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def similarity(self, q, i):
        return self.logit_scale.exp() * q @ i.t()

    def forward(self, x):
        return self.similarity(self.query_tower(x[:, :6]), self.item_tower(x[:, 6:]))
