"""How often blame and disagreement name the right layer, and how often they speak of a network without a fault.

`python bench/blame.py --seeds 10` judges the networks on which thresholds were chosen, `--held-out` others.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import sounding
from sounding.reader.blame import ILL, blame, measure_illness
from sounding.reader.prediction import predict

sys.path.insert(0, str(Path(__file__).parent))
from blame_networks import HELD_OUT, NETWORKS, Block, Network, Options, init

Weight = nn.Linear | nn.Conv2d
Answer = tuple[set[str], str]  # kinds that are right, and the layer or block, "" for the whole network


def weights(model: nn.Module) -> dict[str, Weight]:
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Conv2d)}


def pick(model: nn.Module, *, skip: tuple[str, ...] = ("q", "k", "gate", "qkv")) -> tuple[str, Weight]:
    """A layer of the middle half, by torch's generator; queries and keys act on scores alone."""
    names = [name for name in weights(model) if name.rpartition(".")[2] not in skip]
    inner = names[len(names) // 4 : 3 * len(names) // 4]
    name = inner[int(torch.randint(len(inner), ()))]
    return name, weights(model)[name]


def pick_block(model: nn.Module) -> tuple[str, Block]:
    blocks = [(name, one) for name, one in model.named_modules() if isinstance(one, Block)]
    inner = blocks[len(blocks) // 4 : 3 * len(blocks) // 4]
    return inner[int(torch.randint(len(inner), ()))]


@torch.no_grad()
def gain(model: nn.Module) -> Answer:
    name, one = pick(model)
    one.weight.mul_(3000)
    return {"gain"}, name


@torch.no_grad()
def small_gain(model: nn.Module) -> Answer:
    name, one = pick(model)
    one.weight.div_(3000)
    return {"gain"}, name


@torch.no_grad()
def bias(model: nn.Module) -> Answer:
    name, one = pick(model)
    assert one.bias is not None
    one.bias.normal_(0, 3000)
    return {"bias", "embedding"}, name  # a bias over positions is an input


@torch.no_grad()
def embedding(model: nn.Module) -> Answer:
    name, one = next(iter(weights(model).items()))
    one.weight.mul_(3000)
    return {"gain", "embedding"}, name


@torch.no_grad()
def gains(model: nn.Module) -> Answer:
    init(model, 0.2)
    return {"gains", "norms"}, ""


def branch(model: nn.Module) -> Answer:
    name, one = pick_block(model)
    one.scale = 3000.0
    return {"branch"}, name


@torch.no_grad()
def norm(model: nn.Module) -> Answer:
    """A block without its norm, in a network whose norms are what holds large weights."""
    name, one = pick_block(model)
    one.norm = nn.Identity()
    return {"norm"}, name


def nothing(model: nn.Module) -> Answer:
    return {"branches", "norms", "post_norm", "gains", "scores"}, ""


Build = Callable[[Options], Options]
BLAME: dict[str, tuple[Callable[[nn.Module], Answer], Build, Build, str]] = {
    # fault: what it does, options with it, options without it, networks it is put into
    "a gain 3000 times too large": (gain, lambda o: o, lambda o: o, ""),
    "a gain 3000 times too small": (small_gain, lambda o: o, lambda o: o, "MLP tanh MLP"),
    "a bias that dominates": (bias, lambda o: o, lambda o: o, ""),
    "an embedding too large": (embedding, lambda o: o, lambda o: o, "residual"),
    "gains too small everywhere": (
        gains,
        lambda o: replace(o, blocks=8),
        lambda o: replace(o, blocks=8),
        "MLP tanh MLP",
    ),
    "one branch 3000 times too large": (branch, lambda o: o, lambda o: o, "residual"),
    "scores without 1/√d": (nothing, lambda o: replace(o, scores=1.0), lambda o: o, "attention"),
    "neither norm nor residual scale": (
        nothing,
        lambda o: replace(o, norm=False, post=False, blocks=24),
        lambda o: replace(o, blocks=12),
        "residual",
    ),
    "post-norm too deep": (
        nothing,
        lambda o: replace(o, post=True, blocks=24, branch=2.0),
        lambda o: replace(o, blocks=12),
        "residual",
    ),
}


def inside(kind: str, network: str) -> bool:
    """Whether a fault can be put into a network: residual ones have no plain stacks, and so on."""
    stacks = ("MLP", "tanh MLP")
    if kind == "residual":
        return network not in stacks
    if kind == "attention":
        return network in ("pre-norm", "post-norm", "gated rotary", "ViT", "gated post-norm")
    return not kind or network in stacks


def judge(model: nn.Module, inputs: Tensor, answer: Answer) -> str:
    blueprint = sounding.read(model, inputs)
    found = blame(blueprint, patience=math.inf)
    if found is None:
        prediction = predict(blueprint)
        ill = measure_illness(blueprint.description, prediction.propagation).worst >= ILL
        return "silent" if ill else "healthy by theory"
    kinds, layer = answer
    right = found[0].kind in kinds and (not layer or f"{found[0].layer}.".startswith(f"{layer}."))
    return "right" if right else f"{found[0].kind} at {found[0].layer or 'all'}, not {layer}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    networks: dict[str, Network] = HELD_OUT if options.held_out else NETWORKS
    false = clean = 0
    for name, network in networks.items():
        for fault, (put, ill, well, where) in BLAME.items():
            if not inside(where, name) or options.only not in fault:
                continue
            answers = []
            for seed in range(options.seeds):
                torch.manual_seed(1000 * options.held_out + seed)
                healthy = network.build(well(Options()))
                clean += 1
                false += judge(healthy, network.inputs(), (set(), "")) not in ("silent", "healthy by theory")
                model = network.build(ill(Options()))
                answer = put(model)
                answers.append(judge(model, network.inputs(), answer))
            wrong = {one: answers.count(one) for one in answers if one != "right"}
            print(f"{name:16} {fault:34} {answers.count('right'):3} of {len(answers)}  {wrong or ''}", flush=True)
    print(f"false findings without the fault: {false} of {clean}")


if __name__ == "__main__":
    main()
