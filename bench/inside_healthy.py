"""How often sound networks are accused: findings over seeds of healthy networks of the kinds that people train.

    python bench/inside_healthy.py --seeds 50 --processes 2    # about half an hour of one core
    python bench/inside_healthy.py gpt2 lstm --seeds 50

Prints the Markdown table of docs/verdict.md: the share of seeds with a finding of high and of medium severity, all
kinds of findings together, and which kinds they are. Every seed draws width, depth, weights and data.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.probe.check import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from workers import in_order

import networks

WORDS, LENGTH, SAMPLES = 96, 24, 12
Case = tuple[nn.Module, Any, Any]


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (SAMPLES, length))


def sizes(draw: random.Random) -> tuple[int, int, int]:
    """Width, blocks and heads."""
    return draw.choice((64, 96, 128)), draw.choice((2, 4, 8)), draw.choice((2, 4))


def gpt2(draw: random.Random) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, blocks, heads = sizes(draw)
    config = GPT2Config(vocab_size=WORDS, n_embd=width, n_layer=blocks, n_head=heads, n_positions=LENGTH,
                        bos_token_id=None, eos_token_id=None)  # fmt: skip
    return GPT2LMHeadModel(config), tokens(), None


def llama(draw: random.Random) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, blocks, heads = sizes(draw)
    config = LlamaConfig(vocab_size=WORDS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=blocks,
                         num_attention_heads=heads, bos_token_id=None, eos_token_id=None)  # fmt: skip
    return LlamaForCausalLM(config), tokens(), None  # type: ignore[no-untyped-call]


def bert(draw: random.Random) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    width, blocks, heads = sizes(draw)
    config = BertConfig(vocab_size=WORDS, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=blocks,
                        num_attention_heads=heads, num_labels=10)  # fmt: skip
    return BertForSequenceClassification(config), tokens(), torch.randint(0, 10, (SAMPLES,))


def vit(draw: random.Random) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    width, blocks, heads = sizes(draw)
    config = ViTConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=blocks, image_size=32,
                       num_attention_heads=heads, patch_size=8, num_labels=10)  # fmt: skip
    return ViTForImageClassification(config), torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 10, (SAMPLES,))


def encoder(draw: random.Random, *, first: bool) -> Case:
    width, blocks, heads = sizes(draw)
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True, norm_first=first)
    model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.xavier_uniform_(weight)
    return model, torch.randn(SAMPLES, LENGTH, width), None


class ConvNext(nn.Module):
    """A block of ConvNeXt without its layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(functional.gelu(self.up(inner))).permute(0, 3, 1, 2)


def convnext(draw: random.Random) -> Case:
    width, blocks, _ = sizes(draw)
    parts = [nn.Conv2d(3, width // 4, 4, 4), *(ConvNext(width // 4) for _ in range(blocks))]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width // 4, 10))
    return model, torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 10, (SAMPLES,))


def resnet(draw: random.Random) -> Case:
    case = networks.healthy_resnet(draw.randrange(10**6))
    return case.model, case.inputs, case.targets


class Recurrent(nn.Module):
    """Words through an LSTM or a GRU; the last state is classified."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, width), kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.embed(words))[0][:, -1])  # type: ignore[no-any-return]


def recurrent(draw: random.Random, *, kind: type[nn.LSTM] | type[nn.GRU]) -> Case:
    model = Recurrent(kind, draw.choice((32, 64)), draw.choice((1, 2)))
    return model, tokens(12), torch.randint(0, 10, (SAMPLES,))


class Experts(nn.Module):
    """A perceptron of experts: every token goes to the two that its router prefers."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return x + out.view_as(x)


def experts(draw: random.Random) -> Case:
    width, blocks, heads = sizes(draw)
    parts: list[nn.Module] = [nn.Embedding(WORDS, width)]
    for _ in range(blocks):
        layer = nn.TransformerEncoderLayer(width, heads, width, batch_first=True, norm_first=True)
        parts += [layer, Experts(width)]
    return nn.Sequential(*parts, nn.LayerNorm(width), nn.Linear(width, WORDS)), tokens(), None


class Unet(nn.Module):
    """Two scales with a joined shortcut; `time` makes it the denoiser of a diffusion model."""

    def __init__(self, width: int, *, time: bool = False) -> None:
        super().__init__()
        self.stem, self.time = nn.Conv2d(1, width, 3, padding=1), nn.Linear(1, width) if time else None
        self.inner, self.down = self._block(width, width), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.deep, self.up = self._block(2 * width, 2 * width), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.outer, self.head = self._block(2 * width, width), nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        parts = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
        return nn.Sequential(*parts, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        if self.time is not None and t is not None:
            x = x + self.time(t[:, None])[:, :, None, None]
        kept = x + self.inner(x)
        deep = self.down(kept)
        return self.head(self.outer(torch.cat([self.up(deep + self.deep(deep)), kept], 1)))  # type: ignore[no-any-return]


def unet(draw: random.Random) -> Case:
    return Unet(draw.choice((8, 16))), torch.randn(SAMPLES, 1, 16, 16), torch.randn(SAMPLES, 1, 16, 16)


def diffusion(draw: random.Random) -> Case:
    inputs = {"x": torch.randn(SAMPLES, 1, 16, 16), "t": torch.rand(SAMPLES)}
    return Unet(draw.choice((8, 16)), time=True), inputs, torch.randn(SAMPLES, 1, 16, 16)


FAMILIES: dict[str, Callable[[random.Random], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "encoder, pre-norm": lambda draw: encoder(draw, first=True),
    "encoder, post-norm": lambda draw: encoder(draw, first=False),
    "convnext": convnext,
    "resnet": resnet,
    "lstm": lambda draw: recurrent(draw, kind=nn.LSTM),
    "gru": lambda draw: recurrent(draw, kind=nn.GRU),
    "mixture of experts": experts,
    "u-net": unet,
    "diffusion": diffusion,
}


def look(task: tuple[str, int]) -> set[tuple[str, str]]:
    """Kind and severity of the findings on one network of a family, without those of low severity."""
    name, seed = task
    with networks.drawn_from(seed) as draw:
        model, inputs, targets = FAMILIES[name](draw)
        findings = check(model, inputs, targets, theory=False).verdict.findings
    return {(finding.kind, finding.severity) for finding in findings if finding.severity != "low"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only families whose name has one of these words")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    chosen = [name for name in FAMILIES if not options.words or any(word in name for word in options.words)]
    seeds = range(options.first, options.first + options.seeds)
    results = in_order(look, [(name, seed) for name in chosen for seed in seeds], processes=options.processes)
    print("| network | seeds | high | medium | kinds |\n|---|---|---|---|---|")
    for name in chosen:
        found = [next(results) for _ in seeds]
        high, medium = (
            sum(any(severity == wanted for _, severity in told) for told in found) / len(seeds)
            for wanted in ("high", "medium")
        )
        kinds = Counter(f"{kind} ({severity})" for told in found for kind, severity in told)
        words = ", ".join(f"{kind} {count / len(seeds):.0%}" for kind, count in kinds.items()) or "none"
        print(f"| {name} | {len(seeds)} | {high:.0%} | {medium:.0%} | {words} |", flush=True)


if __name__ == "__main__":
    main()
