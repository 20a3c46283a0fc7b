"""What the instruments between modules cost: processor time of a check with and without them, beside a bare pass.

    python bench/inside_cost.py

Prints a Markdown table: processor seconds of one forward and one backward pass, of a check (fast tier, no theory) with
and without the instruments, and what they add over the pass. Medians of five runs, on one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sounding.probe.check import check

RUNS = 5


def gpt2(width: int, blocks: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=width, n_layer=blocks, n_head=width // 32, n_positions=256,
                                      bos_token_id=None, eos_token_id=None))  # fmt: skip


def encoder(width: int, blocks: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


def spend(run: Callable[[], object]) -> float:
    """Median processor seconds."""
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)


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
        plain = spend(lambda model=model, inputs=inputs: total(model(inputs)).backward())  # type: ignore[misc]
        found = []
        for off in (True, False):
            deaf = mock.patch("sounding.probe.check._Checked._listen_inside", return_value=None)
            with deaf if off else nullcontext():
                found.append(spend(lambda model=model, inputs=inputs:
                                   check(model, inputs, loss=total, tier="fast", theory=False)))  # type: ignore[misc] # fmt: skip
        added = (found[1] - found[0]) / plain
        print(f"| {name} | {plain:.3f} | {found[0]:.3f} | {found[1]:.3f} | {added:.0%} |", flush=True)


if __name__ == "__main__":
    main()
