"""Networks over tokens: a decoder with ALiBi, a small Llama, a WaveNet, a translator of GRUs with attention."""

import torch
from held_common import scale_all
from nets_common import VOCABULARY, Arch, chain, token_loss, translation
from torch import Tensor, nn
from torch.nn import functional as F


class AlibiAttention(nn.Module):
    """Causal attention whose scores fall with distance, by another slope in each head."""

    def __init__(self, width: int, heads: int, fault: str | None) -> None:
        super().__init__()
        self.heads, self.fault = heads, fault
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        power = torch.arange(1, heads + 1) * 8 / heads
        self.register_buffer("slopes", 2.0 ** (power if fault == "slopes_rise" else -power))

    def forward(self, signal: Tensor) -> Tensor:
        samples, length, width = signal.shape
        if self.fault == "heads_viewed":  # view(N, heads, T, d) where view(N, T, heads, d).transpose(1, 2) is due
            q, k, v = (part.reshape(samples, self.heads, length, -1) for part in self.qkv(signal).chunk(3, -1))
        else:
            q, k, v = self.qkv(signal).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        places = torch.arange(length)
        distance = (places[:, None] - places[None]).clamp(min=0)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 - self.slopes[:, None, None] * distance
        allowed = torch.ones(length, length).tril()
        if self.fault == "mask_times":  # a score of zero is no mask
            scores = scores * allowed
        elif self.fault != "no_mask":
            scores = scores.masked_fill(allowed == 0, float("-inf"))
        mixed = scores.softmax(-1) @ v
        if self.fault == "heads_viewed":
            return self.out(mixed.reshape(samples, length, width))
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class AlibiBlock(nn.Module):
    def __init__(self, width: int, fault: str | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = AlibiAttention(width, 4, fault)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, signal: Tensor) -> Tensor:
        signal = signal + self.attention(self.norm1(signal))
        return signal + self.down(F.gelu(self.up(self.norm2(signal))))


class Alibi(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(AlibiBlock(width, fault) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if fault != "tied_one":
            nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        signal = self.embed(tokens)
        for block in self.blocks:
            signal = block(signal)
        return self.head(self.norm(signal))


class RmsNorm(nn.Module):
    def __init__(self, width: int, fault: str | None = None) -> None:
        super().__init__()
        self.weight, self.fault = nn.Parameter(torch.ones(width)), fault

    def forward(self, signal: Tensor) -> Tensor:
        if self.fault == "rms_sum":
            size = signal.square().sum(-1, keepdim=True)
        else:
            size = signal.square().mean(1 if self.fault == "rms_axis" else -1, keepdim=True)
        return signal * torch.rsqrt(size + 1e-6) * self.weight


def turned(signal: Tensor) -> Tensor:
    """Rotary positions of (N, H, T, D)."""
    half = signal.shape[-1] // 2
    angle = torch.arange(signal.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    one, two = signal[..., :half], signal[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


class LlamaBlock(nn.Module):
    """Grouped queries, rotary positions, SwiGLU."""

    def __init__(self, width: int, fault: str | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(width, fault), RmsNorm(width, fault)
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, signal: Tensor) -> Tensor:
        given = self.norm1(signal)
        q, k, v = (
            layer(given).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.wq, 4), (self.wk, 2), (self.wv, 2))
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        signal = signal + self.wo(mixed.transpose(1, 2).flatten(2))
        given = self.norm2(signal)
        return signal + self.down(F.silu(self.gate(given)) * self.up(given))


class Llama(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, fault) for _ in range(4))
        self.norm, self.head = RmsNorm(width, fault), nn.Linear(width, VOCABULARY, bias=False)
        scale_all(self, 0.05)
        nn.init.normal_(self.tokens.weight, std=0.05)
        with torch.no_grad():
            if fault == "swiglu_zero":
                for block in self.blocks:
                    block.gate.weight.zero_()
                    block.down.weight.zero_()
            if fault == "output_big":
                self.blocks[1].wo.weight.mul_(300)
            if fault == "norm_thirty":
                self.norm.weight.fill_(30)
        if fault == "nothing_learns":
            self.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        signal = self.tokens(tokens)
        for block in self.blocks:
            signal = block(signal)
        return self.head(self.norm(signal))


class GatedConv(nn.Module):
    def __init__(self, width: int, dilation: int, fault: str | None) -> None:
        super().__init__()
        self.filter = nn.Conv1d(width, width, 2, dilation=dilation)
        self.gate = nn.Conv1d(width, width, 2, dilation=dilation)
        self.tanh, self.sigmoid = nn.Tanh(), nn.Sigmoid()
        self.skip, self.res = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.dilation, self.fault = dilation, fault

    def forward(self, signal: Tensor) -> tuple[Tensor, Tensor]:
        pad = (self.dilation, 0)
        if self.fault == "padded_right":  # padded on the wrong side
            pad = (0, self.dilation)
        given = F.pad(signal, pad)
        hidden = self.tanh(self.filter(given)) * self.sigmoid(self.gate(given))
        return signal + self.res(hidden), self.skip(hidden)


class WaveNet(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(GatedConv(width, 2**k, fault) for k in range(4))
        self.post1, self.relu, self.post2 = nn.Conv1d(width, 64, 1), nn.ReLU(), nn.Conv1d(64, VOCABULARY, 1)
        self.fault = fault
        with torch.no_grad():
            for layer in self.layers:
                if fault == "gates_shut":
                    layer.gate.bias.fill_(-12)
                if fault == "filters_loud":
                    layer.filter.weight.mul_(100)
            if fault == "post_dead":
                self.post1.bias.fill_(-20)

    def forward(self, tokens: Tensor) -> Tensor:
        signal, total = self.embed(tokens).transpose(1, 2), 0
        for layer in self.layers:
            signal, skip = layer(signal)
            total = total + skip
        logits = self.post2(self.relu(self.post1(F.relu(total)))).transpose(1, 2)
        if self.fault == "relu_logits":
            logits = F.relu(logits)
        return logits.softmax(-1) if self.fault == "softmax_out" else logits


class Seq2seq(nn.Module):
    """A GRU reads, a GRU writes, additive attention between them."""

    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, batch_first=fault != "time_first")
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query, self.key, self.energy = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, 1)
        self.places, self.out = nn.Parameter(torch.randn(12, 32)), nn.Linear(2 * width, VOCABULARY)
        self.fault = fault
        with torch.no_grad():
            if fault == "update_stuck":  # torch keeps z of the old state: it never reads
                self.encoder.bias_ih_l0[width : 2 * width] = 20
            if fault == "source_zero":
                self.source.weight.zero_()
            if fault == "energy_loud":
                self.energy.weight.mul_(200)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        if self.fault == "time_first":
            last = memory[:, -1][None].contiguous()
        if self.fault == "memory_cut":
            memory, last = memory.detach(), last.detach()
        written, _ = self.decoder(self.target(target), last)
        near = self.query(written)[:, :, None] + self.places[:, None] + (self.key(memory) + self.places)[:, None]
        weights = self.energy(torch.tanh(near))[..., 0].softmax(0 if self.fault == "softmax_batch" else -1)
        return self.out(torch.cat([written, weights @ memory], -1))


def draw_chain(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    tokens, targets = chain(generator)
    return (tokens, tokens) if fault == "not_shifted" else (tokens, targets)


def draw_translation(generator: torch.Generator, fault: str | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    (source, shifted), target = translation(generator)
    return (source, target if fault == "fed_target" else shifted), target


ARCHES = [
    Arch("alibi", Alibi, draw_chain, token_loss),
    Arch("plain_llama", Llama, draw_chain, token_loss),
    Arch("wavenet", WaveNet, draw_chain, token_loss),
    Arch("gru_translator", Seq2seq, draw_translation, token_loss, adam=5e-3),
]
