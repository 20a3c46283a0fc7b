"""What `sounding.depth` says of ways to build networks whose depth people know to matter, or not to.

`python bench/depths.py --to 32`: the largest power of depth of each, which its threshold lies between.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from causes_networks import (
    Attend,
    Convs,
    Feed,
    Options,
    batch_norm,
    image_norm,
    images,
    mlp,
    tokens,
    vectors,
)
from torch import Tensor, nn

import sounding

VECTOR, SEQUENCE, IMAGE = (8, 64), (3, 8, 24), (4, 3, 5, 5)
Case = tuple[Callable[[int], nn.Module], tuple[int, ...]]


def transformer(depth: int, *, post: bool = False) -> nn.Module:
    return tokens(lambda o: [Attend(64, o), Feed(64, nn.GELU)], nn.LayerNorm, Options(depth), post=post)


def perceptrons(depth: int, activation: type[nn.Module], norm: type[nn.Module], gain: float) -> nn.Module:
    return vectors(lambda width: Feed(width, activation), norm, Options(depth), gain=gain)


def without_norm(depth: int, branch: float) -> nn.Module:
    return vectors(
        lambda width: Feed(width, nn.ReLU), nn.LayerNorm, Options(depth, norm=False, branch=branch), gain=2.0
    )


CASES: dict[str, Case] = {
    "residual MLP": (lambda depth: perceptrons(depth, nn.GELU, nn.LayerNorm, 1.0), VECTOR),
    "residual MLP, He": (lambda depth: perceptrons(depth, nn.ReLU, nn.LayerNorm, 2.0), VECTOR),
    "residual MLP, RMS norm": (lambda depth: perceptrons(depth, nn.SiLU, nn.RMSNorm, 1.0), VECTOR),
    "no norm, branches over √L": (lambda depth: without_norm(depth, depth**-0.5), VECTOR),
    "ResNet": (lambda depth: images(Convs, image_norm, Options(depth), width=16), IMAGE),
    "pre-norm transformer": (transformer, SEQUENCE),
    "plain ReLU": (lambda depth: mlp(Options(depth)), VECTOR),
    "plain tanh": (lambda depth: mlp(Options(depth), activation=nn.Tanh, gain=1.0), VECTOR),
    "plain tanh, gain 2": (lambda depth: mlp(Options(depth), activation=nn.Tanh, gain=2.0), VECTOR),
    "plain ReLU, torch's start": (lambda depth: mlp(Options(depth), gain=1 / 3), VECTOR),
    "batch norm": (lambda depth: mlp(Options(depth), norm=batch_norm), VECTOR),
    "layer norm": (lambda depth: mlp(Options(depth), norm=nn.LayerNorm), VECTOR),
    "no norm, branches whole": (lambda depth: without_norm(depth, 1.0), VECTOR),
    "post-norm transformer": (lambda depth: transformer(depth, post=True), SEQUENCE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=int, default=32)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for name, (make, shape) in CASES.items():
        if options.only in name:
            torch.manual_seed(0)
            inputs: Tensor = torch.randn(shape)
            found = sounding.depth(lambda depth, make=make: make(depth), inputs, to=options.to)
            told = ", ".join(f"{one.quantity} {one.power:.2f} ± {one.stderr:.2f}" for one in found.trends)
            print(f"{name:28} transfers {found.transfers!s:5}  {told}", flush=True)


if __name__ == "__main__":
    main()
