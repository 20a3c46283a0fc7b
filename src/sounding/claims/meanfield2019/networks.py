"""Random batch-normalized networks of finite width, layer by layer, for what a row wants to see inside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from sounding.chain import Simulation, simulate
from sounding.claims.claim import Context
from sounding.claims.walk import walk_in_law


def settle(
    activation: str,
    width: int,
    batch_size: int,
    *,
    depth: int,
    runs: int,
    context: Context,
    offset: int,
    watch: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """The states (runs, B, width) after `depth` layers φ(BN(HWᵀ)) from Gaussian inputs; `watch` sees each layer's."""
    generator = context.generator(offset, device=context.device)
    start = torch.randn(runs, batch_size, width, device=context.device, generator=generator)
    for layer, chains in enumerate(walk_in_law(start, depth=depth, generator=generator, activation=activation)):
        if layer and watch is not None:
            watch(layer, chains.state)
    return chains.state


@cache
def pull_gradients(
    activation: str, width: int, batch_size: int, depth: int, runs: int, offset: int, device: str, random_seed: int
) -> Simulation:
    """Gradients through random networks and back, with their profile; kept for the rows that show the same networks."""
    return simulate(
        activation=activation,
        width=width,
        batch_size=batch_size,
        depth=depth,
        runs=runs,
        backward=True,
        profile=True,
        measures=("mean_cosine",),
        device=device,
        generator=Context(device, random_seed).generator(offset),
    )
