"""What the instruments between modules cost: processor time of a check with and without them, beside a bare pass.

    python bench/inside_cost.py

Prints a Markdown table: processor seconds of one forward and one backward pass, of a check (fast tier, no theory) with
and without the instruments, and what they add over the pass. The least of fifteen interleaved rounds, on one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sounding.probe.check import check

ROUNDS = 15


def gpt2(width: int, blocks: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=width, n_layer=blocks, n_head=width // 32, n_positions=256,
                                      bos_token_id=None, eos_token_id=None))  # fmt: skip


def encoder(width: int, blocks: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


def spend(runs: Sequence[Callable[[], object]]) -> list[float]:
    """The least processor seconds of each, in rounds that take one after the other: what else computes is in all."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, taken in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            taken.append(time.process_time() - start)
    return [min(taken) for taken in times]


def total(output: Any) -> Tensor:
    tensor: Tensor = getattr(output, "logits", output)
    return tensor.float().square().mean()


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cases = {
        "GPT-2, width 256, 6 blocks, 8 × 128 tokens": (gpt2(256, 6), torch.randint(0, 512, (8, 128))),
        "GPT-2, width 64, 4 blocks, 8 × 32 tokens": (gpt2(64, 4), torch.randint(0, 512, (8, 32))),
        "encoder, width 128, 3 blocks, 4 × 128 tokens": (encoder(128, 3), torch.randn(4, 128, 128)),
    }
    print("| network | pass | check without | check with | added over the pass |\n|---|---|---|---|---|")
    for name, (model, inputs) in cases.items():
        looked = partial(check, model, inputs, loss=total, tier="fast", theory=False)
        plain, without, whole = spend([partial(run, model, inputs), partial(deaf, looked), looked])
        print(f"| {name} | {plain:.3f} | {without:.3f} | {whole:.3f} | {(whole - without) / plain:.0%} |", flush=True)


def run(model: nn.Module, inputs: Tensor) -> None:
    total(model(inputs)).backward()


def deaf(looked: Callable[[], object]) -> None:
    with mock.patch("sounding.probe.check._Checked._listen_inside", return_value=None):
        looked()


if __name__ == "__main__":
    main()
