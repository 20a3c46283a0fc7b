"""Whether the networks that tests/foreign.py calls healthy or ill train, beside what the verdict says of them.

    python bench/verdict_foreign.py            # all of them (a quarter of an hour on one core)
    python bench/verdict_foreign.py GPT tanh   # those with such a word in their name

Prints the Markdown table of docs/verdict.md: accuracy of the last 30 of 300 steps at batch 64, best of three rates for
SGD with momentum and of two for Adam.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from sounding.probe.check import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import foreign
import networks

STEPS, BATCH, LAST = 300, 64, 30
SGD_RATES, ADAM_RATES = (0.001, 0.01, 0.1), (3e-4, 3e-3)
Stream = Callable[[nn.Module], tuple[Tensor, Tensor]]


def stream(inputs: foreign.Inputs) -> Stream:
    """Batches of what the check sees, with labels: digits, or the next word of a chain that has two of them."""
    if inputs is foreign.tokens:
        return lambda model: _words(labelled=isinstance(model, foreign.Recurrent))
    shape = {foreign.images: (1, 8, 8), foreign.rows: (8, 8)}.get(inputs, (64,))
    centred = inputs in (foreign.digits, foreign.images, foreign.rows)

    def draw(model: nn.Module) -> tuple[Tensor, Tensor]:
        pixels, labels = networks.batch("standardized digits" if centred else "digits", samples=BATCH, shape=shape)
        if inputs is foreign.bright_digits:
            pixels = 0.8 + 0.2 * pixels
        return (pixels if centred or inputs is foreign.bright_digits else 255 * pixels), labels

    return draw


def _words(*, labelled: bool) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, 64, (BATCH, 17))
    for index in range(16):
        words[:, index + 1] = (5 * words[:, index] + torch.randint(0, 2, (BATCH,))) % 64
    return words[:, :-1], (words[:, -2] % 10 if labelled else words[:, 1:].flatten())


def accuracy(build: foreign.Build, draw: Stream, rate: float, *, adam: bool) -> float:
    """Of the last steps; 0 where the loss leaves the numbers."""
    with networks.drawn_from(1):
        model = build()
        optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(model.parameters(), lr=rate)
            if adam
            else torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        )
        right = []
        for _ in range(STEPS):
            inputs, labels = draw(model)
            answers = model(inputs)
            answers = answers.flatten(0, -2) if answers.dim() == 3 else answers
            loss = nn.functional.cross_entropy(answers, labels)
            if not torch.isfinite(loss):
                return 0.0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right.append(float((answers.argmax(1) == labels).double().mean()))
        return sum(right[-LAST:]) / LAST


def show(name: str, build: foreign.Build, inputs: foreign.Inputs) -> None:
    with networks.drawn_from(0):
        verdict = check(build(), inputs()).verdict
    high = [finding.kind for finding in verdict.findings if finding.severity == "high"]
    draw = stream(inputs)
    sgd = max(accuracy(build, draw, rate, adam=False) for rate in SGD_RATES)
    adam = max(accuracy(build, draw, rate, adam=True) for rate in ADAM_RATES)
    print(f"| {name} | {', '.join(high) or 'healthy'} | {sgd:.0%} | {adam:.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only networks with one of these in their name")
    words = parser.parse_args().words
    print("| network | high severity | SGD | Adam |\n|---|---|---|---|")
    cases = dict(foreign.HEALTHY)
    cases |= {name: (build, inputs) for name, (_, build, inputs) in foreign.ILL.items()}
    for name, (build, inputs) in cases.items():
        if not words or any(word in name for word in words):
            show(name, build, inputs)


if __name__ == "__main__":
    main()
