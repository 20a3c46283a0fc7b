"""Random batch-normalized networks of finite width, layer by layer, for what a row wants to see inside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from sounding.claims.claim import Context

if TYPE_CHECKING:
    import torch

    from sounding.chain import Simulation


def settle(
    activation: str,
    width: int,
    batch_size: int,
    *,
    depth: int,
    runs: int,
    context: Context,
    offset: int,
    start: torch.Tensor | None = None,
    watch: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """The states (runs, B, width) after `depth` layers φ(BN(HWᵀ)) from Gaussian inputs; `watch` sees each layer's."""
    import torch

    from sounding.chain.law import make_law
    from sounding.chain.step import Chains, choose_route

    law = make_law(width=width, batch_size=batch_size, activation=activation, depth=depth)
    generator = context.generator(offset, device=context.device)
    if start is None:
        start = torch.randn(runs, batch_size, width, device=context.device, generator=generator)
    chains = Chains([law] * runs, start, route=choose_route(law, explicit=False), generator=generator)
    for layer in range(1, depth + 1):
        chains.step()
        if watch is not None:
            watch(layer, chains.state)
    return chains.state


@cache
def pull_gradients(
    activation: str, width: int, batch_size: int, depth: int, runs: int, offset: int, device: str, random_seed: int
) -> Simulation:
    """Gradients through random networks and back, with their profile; kept for the rows that show the same networks."""
    from sounding.chain import simulate

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
