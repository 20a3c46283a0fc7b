"""Whether what the instruments inside transformers name hurts: short trainings with and without each fault.

    python bench/inside_harm.py              # all of them (some minutes on one core)
    python bench/inside_harm.py score branch # those with such a word in their name

Prints the Markdown table of docs/verdict.md. A GPT (pre-norm, fused attention) and a Llama of the transformers library
(RMS norms, rotations, softmax in steps) learn the word that follows from the last but one, where half is the most there
is; an encoder of torch (post-norm) learns the digits, a row of pixels as a token. The number is the accuracy over the
last 20 of 120 steps at batch 32, mean of three seeds, for Adam at 0.002 and for SGD with momentum at 0.02; beside it
what `sounding.check` measures and finds at the first seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.probe.check import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from short_training import accuracy_of
from workers import in_order

import networks

STEPS, BATCH, LAST, WORDS, LENGTH = 120, 32, 20, 16, 16
WIDTH, HEADS, BLOCKS = 64, 2, 4
ADAM_RATE, SGD_RATE, SEEDS = 2e-3, 0.02, (1, 2, 3)


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and around which the stream goes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        normed = self.first(x)
        q, k, v = (layer(normed).view(n, t, HEADS, d // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """Pre-norm blocks; PyTorch's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Llama(nn.Module):
    """A small Llama of the transformers library."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS, max_position_embeddings=LENGTH, attn_implementation="eager",
            initializer_range=0.1, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.body = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        self.blocks = self.body.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.body(tokens, use_cache=False).logits
        return logits.flatten(0, 1)


class Encoder(nn.Module):
    """Post-norm blocks of torch over the rows of a digit, each initialized by itself."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embed, self.place = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH))
        self.body = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.blocks, self.head = self.body.layers, nn.Linear(WIDTH, 10)
        for weight in self.body.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.body(self.embed(pixels.view(-1, 8, 8)) + self.place).mean(1))  # type: ignore[no-any-return]


BUILDERS: dict[str, Callable[[], nn.Module]] = {"GPT": Gpt, "Llama": Llama, "encoder": Encoder}


def blocks_of(model: nn.Module, index: int | None) -> list[nn.Module]:
    """One block, or all."""
    found = list(model.blocks)  # type: ignore[arg-type]
    return found if index is None else [found[index]]


def queries(block: nn.Module) -> Tensor:
    """The rows of a block's weights that make queries."""
    if isinstance(block, nn.TransformerEncoderLayer):
        return block.self_attn.in_proj_weight[:WIDTH]
    return block.q.weight if isinstance(block, Block) else block.self_attn.q_proj.weight  # type: ignore[union-attr, return-value]


def outputs(block: nn.Module) -> list[nn.Linear]:
    """The two layers of a block that write into its stream."""
    if isinstance(block, nn.TransformerEncoderLayer):
        return [block.self_attn.out_proj, block.linear2]
    if isinstance(block, Block):
        return [block.out, block.down]
    return [block.self_attn.o_proj, block.mlp.down_proj]  # type: ignore[union-attr, list-item]


def scores(factor: float, index: int | None = None) -> Callable[[nn.Module], None]:
    """Scores times a factor, in one block or all."""

    def change(model: nn.Module) -> None:
        for block in blocks_of(model, index):
            queries(block).mul_(factor)

    return change


def branch(factor: float, index: int | None = 2, *, layers: slice = slice(2)) -> Callable[[nn.Module], None]:
    """What a block writes into its stream times a factor; `layers` chooses attention, the perceptron, or both."""

    def change(model: nn.Module) -> None:
        for block in blocks_of(model, index):
            for layer in outputs(block)[layers]:
                layer.weight.mul_(factor)

    return change


def shift(size: float, features: int, index: int | None = 2) -> Callable[[nn.Module], None]:
    """A number added to some features of every token, by the last layer of a block."""

    def change(model: nn.Module) -> None:
        for block in blocks_of(model, index):
            layer = outputs(block)[1]
            if layer.bias is None:
                layer.bias = nn.Parameter(torch.zeros(WIDTH))
            layer.bias[:features] += size * (1 - 2 * (torch.arange(features) % 2))

    return change


FAULTS: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda model: None,
    "scores × √d (no 1/√d)": scores((WIDTH // HEADS) ** 0.5),
    "scores × 8": scores(8.0),
    "scores × 16": scores(16.0),
    "scores × 32": scores(32.0),
    "scores × 100": scores(100.0),
    "scores × 100 in one block": scores(100.0, 2),
    "branches × 10": branch(10.0, None),
    "branch × 10 in one block": branch(10.0),
    "branch × 100 in one block": branch(100.0),
    "branch ÷ 100 in one block": branch(0.01),
    "tokens: attention × 30 in all blocks": branch(30.0, None, layers=slice(1)),
    "tokens: + 10 on all features, first block": shift(10.0, WIDTH, 0),
    "tokens: + 100 on all features, first block": shift(100.0, WIDTH, 0),
    "tokens: + 1000 on all features, first block": shift(1000.0, WIDTH, 0),
    "massive: + 100 on one feature": shift(100.0, 1),
    "massive: + 1000 on one feature": shift(1000.0, 1),
    "massive: + 10000 on one feature": shift(1e4, 1),
}


def build(architecture: str, fault: str, seed: int) -> nn.Module:
    """The network with the fault planted."""
    with networks.drawn_from(seed):
        model = BUILDERS[architecture]()
        with torch.no_grad():
            FAULTS[fault](model)
    return model


def draw(architecture: str) -> tuple[Tensor, Tensor]:
    """A batch with its labels."""
    if architecture == "encoder":
        return networks.batch("standardized digits", samples=BATCH, shape=(64,))
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
    for index in range(LENGTH):
        before = words[:, index - 1] if index else words[:, 0]  # the word before the last: attention is needed
        words[:, index + 1] = (5 * before + torch.randint(0, 2, (BATCH,))) % WORDS
    return words[:, :-1], words[:, 1:].flatten()


def accuracy(architecture: str, fault: str, rate: float, *, adam: bool) -> float:
    """Of the last steps, mean over seeds; 0 where the loss leaves the numbers."""
    found = [
        accuracy_of(
            build(architecture, fault, seed),
            lambda: draw(architecture),
            rate,
            adam=adam,
            steps=STEPS,
            last=LAST,
            seed=seed,
        )
        for seed in SEEDS
    ]
    return sum(found) / len(found)


def look(architecture: str, fault: str) -> tuple[str, str]:
    """The numbers behind the findings of the inside, and the findings, high first."""
    with networks.drawn_from(2):
        inputs, labels = draw(architecture)
        report = check(build(architecture, fault, SEEDS[0]), inputs, labels, loss="cross_entropy", theory=False)
    rows = report.profile.rows
    measures = ("condensation", "token_cosine", "largest_over_median", "branch_over_stream")
    told = [f"{max(row.value for row in rows if row.measure == measure):.4g}" for measure in measures]
    names = dict.fromkeys(f"{one.kind} ({one.severity})" for one in report.verdict.findings)
    return " | ".join(told), ", ".join(names) or "–"


def line(task: tuple[str, str, bool]) -> str:
    """One line of the table."""
    fault, architecture, trains = task
    rates = ((True, ADAM_RATE), (False, SGD_RATE)) if trains else ()
    best = " | ".join(f"{accuracy(architecture, fault, rate, adam=adam):.0%}" for adam, rate in rates)
    numbers, told = look(architecture, fault)
    return f"| {fault} | {architecture} | {best or '– | –'} | {numbers} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose name has one of these words")
    parser.add_argument("--look", action="store_true", help="only check, do not train")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.words or any(word in fault for word in options.words)]
    tasks = [(fault, architecture, not options.look) for fault in chosen for architecture in BUILDERS]
    print("| fault | network | Adam | SGD | condensation | token cosine | largest | branch | found |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in in_order(line, tasks, processes=options.processes):
        print(row, flush=True)


if __name__ == "__main__":
    main()
