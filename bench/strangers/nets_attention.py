"""Transformers of our own: a ViT, a GPT, a GPT with experts, an encoder-decoder, a deep encoder, a DiT."""

import copy
import math

import torch
from nets_common import VOCABULARY, Arch, chain, digits, noised, rows, translation
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head attention with separate projections; `fault` changes what is done with the scores."""

    def __init__(self, width: int, heads: int, fault: str | None = None) -> None:
        super().__init__()
        self.heads, self.fault = heads, fault
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, signal: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        memory = signal if memory is None else memory
        if self.fault == "batch_attends":  # (N, T, D) given to code that expects (T, N, D)
            signal = memory = signal.transpose(0, 1)
        q, k, v = (
            layer(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, given in ((self.q, signal), (self.k, memory), (self.v, memory))
        )
        scale = 1 / math.sqrt(q.shape[-1])
        if self.fault == "no_scale":
            scale = 1.0
        if self.fault == "scaled_twice":
            scale = scale * scale
        scores = q @ k.transpose(-2, -1) * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0 if self.fault == "mask_strict" else 1)
            if self.fault == "mask_transposed":
                hidden = hidden.T
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-2 if self.fault == "softmax_axis" else -1)
        mixed = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return mixed.transpose(0, 1) if self.fault == "batch_attends" else mixed


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, signal: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(signal)))


class Block(nn.Module):
    """Pre-norm, or post-norm."""

    def __init__(
        self, width: int, heads: int, fault: str | None = None, post: bool = False, mlp: nn.Module | None = None
    ):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads, fault), mlp or Mlp(width)
        self.post, self.mixes = post, False

    def forward(self, signal: Tensor, causal: bool = False) -> Tensor:
        if self.mixes:  # meant to centre the features, centres the batch
            signal = signal - signal.mean(0)
        if self.post:
            signal = self.ln1(signal + self.attn(signal, causal=causal))
            return self.ln2(signal + self.mlp(signal))
        signal = signal + self.attn(self.ln1(signal), causal=causal)
        return signal + self.mlp(self.ln2(signal))


def gpt_init(network: nn.Module, std: float = 0.02) -> None:
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Vit(nn.Module):
    """Six blocks over 16 patches, a class token."""

    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.fault = fault
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, 17, width) * (30.0 if fault == "pos_huge" else 0.02))
        heads = 1 if fault == "no_scale" else 3
        blocks = [Block(width, heads, fault) for _ in range(6)]
        if fault == "cloned":
            blocks = [copy.deepcopy(blocks[0]) for _ in range(6)]
        if fault == "same_block":  # [Block()] * 6
            blocks = [blocks[0]] * 6
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        signal = self.patch(images).flatten(2).transpose(1, 2)
        signal = torch.cat([self.cls.expand(len(signal), -1, -1), signal], 1) + self.pos
        for index, block in enumerate(self.blocks):
            if self.fault == "detached" and index == 4:
                signal = signal.detach()
            signal = block(signal)
        if self.fault == "wrong_token":  # there is a class token, the head reads the batch mean of it
            return self.head(self.norm(signal[:, 0].mean(0, keepdim=True).expand(len(signal), -1)))
        return self.head(self.norm(signal[:, 0]))


class Gpt(nn.Module):
    """Four blocks, embedding tied to the output."""

    def __init__(self, fault: str | None = None, width: int = 64) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, fault) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        gpt_init(self)
        for block in self.blocks:
            for layer in (block.attn.proj, block.mlp.fc2):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(8))
        self.lm_head.weight = self.tok.weight
        self.fault = fault
        with torch.no_grad():
            if fault == "embedding_one":
                nn.init.normal_(self.tok.weight)
            if fault == "zero_pair":
                for block in self.blocks:
                    block.mlp.fc1.weight.zero_()
                    block.mlp.fc2.weight.zero_()
            if fault == "mixes_samples":
                self.blocks[2].mixes = True
            if fault == "norm_left_out":
                self.norm = nn.Identity()
                for block in self.blocks:
                    block.ln1, block.ln2 = nn.Identity(), nn.Identity()
            if fault == "half_overflow":
                self.blocks[1].mlp.act = nn.ReLU()
                self.blocks[1].mlp.fc1.weight.mul_(1e6)
                self.blocks[1].mlp.fc2.weight.mul_(1e-6)
            if fault == "unused":
                self.adapter = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        signal = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            signal = block(signal, causal=True)
        logits = self.lm_head(self.norm(signal))
        return logits.softmax(-1) if self.fault == "softmax_twice" else logits


def draw_gpt(generator: torch.Generator, fault: str | None):
    tokens, following = chain(generator)
    return (tokens, tokens) if fault == "not_shifted" else (tokens, following)


class Experts(nn.Module):
    """Top-1 of four experts."""

    def __init__(self, width: int, fault: str | None) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(4))
        self.fault = fault

    def forward(self, signal: Tensor) -> Tensor:
        shape, signal = signal.shape, signal.flatten(0, -2)
        weights = self.router(signal).softmax(-1)
        if self.fault == "router_detached":
            weights = weights.detach()
        gate, chosen = weights.max(-1)
        result = torch.zeros_like(signal)
        for index, expert in enumerate(self.experts):
            here = (chosen == index).nonzero()[:, 0]
            if len(here):
                result = result.index_add(0, here, gate[here, None] * expert(signal[here]))
        return result.reshape(shape)


class ExpertGpt(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, mlp=Experts(width, fault)) for _ in range(3))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        gpt_init(self, 0.05)
        with torch.no_grad():
            for block in self.blocks:
                if fault == "router_collapsed":
                    block.mlp.router.bias[1] = 20.0
                if fault == "experts_cloned":
                    for expert in block.mlp.experts[1:]:
                        expert.load_state_dict(block.mlp.experts[0].state_dict())
            if fault == "expert_dead":
                for layer in (self.blocks[1].mlp.experts[2].fc1, self.blocks[1].mlp.experts[2].fc2):
                    layer.weight.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        signal = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            signal = block(signal, causal=True)
        return self.lm_head(self.norm(signal))


class DecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2, self.ln3 = (nn.LayerNorm(width) for _ in range(3))
        self.attn, self.cross, self.mlp = Attention(width, 4), Attention(width, 4), Mlp(width)

    def forward(self, signal: Tensor, memory: Tensor) -> Tensor:
        signal = signal + self.attn(self.ln1(signal), causal=True)
        signal = signal + self.cross(self.ln2(signal), memory)
        return signal + self.mlp(self.ln3(signal))


class Translator(nn.Module):
    """An encoder and a decoder of two blocks each."""

    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.fault = fault
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(32, width)
        self.encoder = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.memory_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderBlock(width) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        with torch.no_grad():
            if fault == "cross_gain":
                self.decoder[1].cross.k.weight.mul_(100)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        places = self.places(torch.arange(source.shape[1]))
        memory = self.source(source) + places
        for block in self.encoder:
            memory = block(memory)
        memory = self.memory_norm(memory)
        if self.fault == "memory_detached":
            memory = memory.detach()
        signal = self.target(target) + places
        for block in self.decoder:
            signal = block(signal, signal if self.fault == "memory_ignored" else memory)
        return self.out(self.norm(signal))


class DeepEncoder(nn.Module):
    """Twenty-four blocks over the rows of a digit; healthy with the norm in front."""

    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.pos = nn.Parameter(torch.randn(8, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, 2, post=fault == "post_norm") for _ in range(24))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(self, steps: Tensor) -> Tensor:
        signal = self.embed(steps) + self.pos
        for block in self.blocks:
            signal = block(signal)
        return self.head(self.norm(signal).mean(1))


class DitBlock(nn.Module):
    """adaLN-zero: shift, scale and gate come from the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attn, self.mlp, self.mod = Attention(width, 4), Mlp(width), nn.Linear(width, 6 * width)
        nn.init.zeros_(self.mod.weight)
        nn.init.zeros_(self.mod.bias)

    def forward(self, signal: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.mod(F.silu(time))[:, None].chunk(6, -1)
        signal = signal + gate1 * self.attn(self.norm1(signal) * (1 + scale1) + shift1)
        return signal + gate2 * self.mlp(self.norm2(signal) * (1 + scale2) + shift2)


class Dit(nn.Module):
    """Three blocks over 16 patches; predicts noise."""

    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.fault = fault
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.pos = nn.Parameter(torch.randn(16, width) * 0.02)
        self.time1, self.time2 = nn.Linear(1 if fault == "raw_time" else 32, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(DitBlock(width) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 4)
        if fault == "zero_twice":  # gates are zero, and the last layers of both branches too
            for block in self.blocks:
                nn.init.zeros_(block.attn.proj.weight)
                nn.init.zeros_(block.attn.proj.bias)
                nn.init.zeros_(block.mlp.fc2.weight)
                nn.init.zeros_(block.mlp.fc2.bias)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        if self.fault == "raw_time":
            wave = time[:, None].float()
        else:
            wave = time[:, None] * torch.exp(-torch.arange(16) / 16 * math.log(10000))
            wave = torch.cat([wave.sin(), wave.cos()], 1)
        wave = self.time2(F.silu(self.time1(wave)))
        if self.fault == "time_unused":
            wave = torch.zeros_like(wave)
        signal = self.patch(images).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            signal = block(signal, wave)
        patches = self.out(self.norm(signal)).unflatten(1, (4, 4)).unflatten(-1, (2, 2))
        return patches.permute(0, 1, 3, 2, 4).reshape(images.shape)


ARCHES = [
    Arch("vit", Vit, lambda g, f: digits(g, 32), adam=2e-3),
    Arch("gpt", Gpt, draw_gpt),
    Arch("moe", ExpertGpt, lambda g, f: chain(g)),
    Arch("translator", Translator, lambda g, f: translation(g)),
    Arch("deep_encoder", DeepEncoder, lambda g, f: rows(g, 32), adam=1e-3, twin="pre-norm of the same depth"),
    Arch("dit", Dit, lambda g, f: noised(g), metric="r2"),
]
