"""Random batch-normalized networks of finite width, layer by layer, for what a row wants to see inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sounding.claims.claim import Context

if TYPE_CHECKING:
    import torch


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
