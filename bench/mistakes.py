"""Mistakes that are easily made and that no other set of planted faults has: what a check says of them.

    python -m bench.mistakes [PATTERN]

Each network has a sound twin that differs in one flag. Prints what a check finds in the faulty one and not in the twin,
and every finding of the twin that is no note. A set for development: rules may be chosen by it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from bench.promised.run import new_findings, words
from torch import Tensor, nn
from torch.nn import functional

import sounding

WIDTH = 32
Built = tuple[nn.Module, Any, Tensor | None, Callable[..., Tensor] | None]
CASES: dict[str, tuple[Callable[[bool], Built], str]] = {}


def case(what: str) -> Callable[[Callable[[bool], Built]], Callable[[bool], Built]]:
    def keep(build: Callable[[bool], Built]) -> Callable[[bool], Built]:
        CASES[build.__name__] = build, what
        return build

    return keep


class Mlp(nn.Module):
    def __init__(self, inputs: int, outputs: int, depth: int = 3) -> None:
        super().__init__()
        sizes = [inputs, *[WIDTH] * depth]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x))
        return self.head(x)


def rows(features: int = 12, count: int = 48) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, features)
    return x, torch.randint(4, (count,))


@case("the training loop calls the weight initialization of biases too: normal of standard deviation 1")
def biases_of_unit_normal(faulty: bool) -> Built:
    model = Mlp(12, 4, 6)
    for layer in model.layers if faulty else ():
        nn.init.normal_(layer.bias)
    x, y = rows()
    return model, x, y, None


@case("dropout behind the last layer, in front of the loss")
def dropout_on_logits(faulty: bool) -> Built:
    model = Mlp(12, 4)
    x, y = rows()
    return (nn.Sequential(model, nn.Dropout(0.5)) if faulty else model), x, y, None


@case("log_softmax in the model, and cross-entropy in the loss: harmless, for it changes nothing")
def log_softmax_twice(faulty: bool) -> Built:
    model = Mlp(12, 4)
    x, y = rows()
    return (nn.Sequential(model, nn.LogSoftmax(-1)) if faulty else model), x, y, None


@case("nll_loss of logits, without log_softmax")
def nll_of_logits(faulty: bool) -> Built:
    x, y = rows()
    loss = functional.nll_loss if faulty else functional.cross_entropy
    return Mlp(12, 4), x, y, loss


@case("the labels are counted from 1 and class 0 is never seen")
def labels_from_one(faulty: bool) -> Built:
    x, y = rows()
    return Mlp(12, 5), x, (y + 1 if faulty else torch.randint(5, y.shape)), None


@case("the features of a table keep their units: one is in the thousands")
def one_feature_in_thousands(faulty: bool) -> Built:
    x, y = rows()
    if faulty:
        x[:, 3] = 4000 + 900 * x[:, 3]
    return Mlp(12, 4), x, y, None


class Words(nn.Module):
    def __init__(self, fault: str = "", words: int = 20, steps: int = 12) -> None:
        super().__init__()
        self.fault = fault
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(steps, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]))
        h = self.words(x) if self.fault == "places" else self.words(x) + places
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for block in self.blocks:
            out = block(h, src_mask=mask)
            h = h + out if self.fault == "again" else out
        h = h if self.fault == "norm" else self.norm(h)
        h = h.mean(1, keepdim=True).expand_as(h) if self.fault == "pooled" else h
        return self.head(h)


def text() -> tuple[Tensor, Tensor]:
    x = torch.randint(20, (24, 13))
    return x[:, :-1], x[:, 1:]


def of_tokens(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), y.flatten())


@case("each block returns a sum with its input already, and the loop adds the input once more")
def input_added_by_block_and_loop(faulty: bool) -> Built:
    return Words("again" if faulty else ""), *text(), of_tokens


@case("positions are made and never added")
def positions_not_added(faulty: bool) -> Built:
    return Words("places" if faulty else ""), *text(), of_tokens


@case("the head reads the mean of the sequence at every place")
def mean_read_everywhere(faulty: bool) -> Built:
    return Words("pooled" if faulty else ""), *text(), of_tokens


@case("a list of blocks is a Python list, so that the optimizer does not know their weights")
def blocks_in_plain_list(faulty: bool) -> Built:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 4)
            blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
            self.blocks: Any = blocks if faulty else nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = functional.relu(block(x))
            return self.head(x)

    x, y = rows()
    return Hidden(), x, y, None


@case("weights are copied into new parameters at each call, so that no gradient reaches the old ones")
def weights_copied_at_each_call(faulty: bool) -> Built:
    class Copies(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                weight = nn.Parameter(layer.weight.clone()) if faulty else layer.weight.clone()
                x = functional.relu(functional.linear(x, weight, layer.bias))
            return self.head(x)

    x, y = rows()
    return Copies(12, 4), x, y, None


@case("the two channels of a mask are multiplied in place of being chosen: what is hidden becomes zero, scores of zero")
def mask_by_multiplication(faulty: bool) -> Built:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
            self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20)

        def forward(self, x: Tensor) -> Tensor:
            h = self.words(x)
            q, k, v = self.qkv(h).chunk(3, -1)
            seen = torch.ones(x.shape[1], x.shape[1]).tril()
            scores = q @ k.mT / WIDTH**0.5
            scores = scores * seen if faulty else scores.masked_fill(seen == 0, -1e9)
            return self.head(h + self.out(scores.softmax(-1) @ v))

    return Reader(), *text(), of_tokens


@case("the first of three facts of each row is read alone")
def first_of_three_rows_of_tokens(faulty: bool) -> Built:
    class Facts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, :1] if faulty else x
            return self.head(self.words(x).sum(2).relu().mean(1))

    return Facts(), torch.randint(20, (48, 3, 2)), torch.randint(4, (48,)), None


@case("a learning target is standardized with the wrong axis: each row by itself, so that its mean is always zero")
def targets_standardized_by_row(faulty: bool) -> Built:
    x, _ = rows()
    y = x[:, :3] * torch.tensor([1.0, 5.0, 20.0])
    y = (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True) if faulty else (y - y.mean(0)) / y.std(0)
    return Mlp(12, 3), x, y, None


def main() -> None:
    for name, (build, what) in CASES.items():
        if not re.search(sys.argv[1] if len(sys.argv) > 1 else "", name):
            continue
        found = []
        for faulty in (False, True):
            torch.manual_seed(0)
            model, x, y, loss = build(faulty)
            found.append(sounding.check(model, x, y, loss=loss, theory=True).verdict.findings)
        print(f"{name}: {words(new_findings(found[1], found[0]))}\n      {what}")
        warned = [one for one in found[0] if one.severity != "low"]
        if warned:
            print(f"      its sound twin: {words(warned)}")


if __name__ == "__main__":
    main()
