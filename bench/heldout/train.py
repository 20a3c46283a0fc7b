"""Does a planted fault hurt, and does every sound twin train? A few steps of Adam each; nothing is checked.

python bench/heldout/train.py [--steps 80] [--only PATTERN]
"""

import argparse
import re

import torch
from held_cases import CASES
from held_images import ARCHES as IMAGES
from held_other import ARCHES as OTHER
from held_tokens import ARCHES as TOKENS
from nets_common import Arch, seed_all


def train(arch: Arch, fault: str | None, steps: int) -> tuple[float, float]:
    """The loss at the start, and the mean loss of the last five steps, each on a fresh batch."""
    seed_all(1000)
    network, losses = arch.make(fault), []
    drawn = torch.Generator().manual_seed(5000)
    learning = [value for value in network.parameters() if value.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=arch.adam) if learning else None
    loss_of = arch.loss or torch.nn.functional.cross_entropy
    for _ in range(steps):
        inputs, targets = arch.draw(drawn, fault)
        loss = loss_of(network(*inputs) if isinstance(inputs, tuple) else network(inputs), targets)
        losses.append(loss.item())
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses[0], sum(losses[-5:]) / 5


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=80)
    options.add_argument("--only", default="", help="a pattern of architecture/fault")
    given = options.parse_args()
    for arch in (*TOKENS, *IMAGES, *OTHER):
        for fault in (None, *(one.fault for one in CASES if one.arch == arch.name)):
            if re.search(given.only, f"{arch.name}/{fault}"):
                first, last = train(arch, fault, given.steps)
                print(f"{arch.name:16s} {fault or 'sound':26s} {first:12.4g} {last:12.4g}", flush=True)


if __name__ == "__main__":
    main()
