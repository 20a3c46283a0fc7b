"""Random networks layer by layer: the walkers over depth that the rows share.

A row says what a layer is and looks at the states that come out. `walk` multiplies by the weights it is given, for rows
that need the matrices themselves or a layer that `sounding.simulate` does not know. `walk_in_law` leaves the layers to
the chains of `sounding.chain`, which draw states with the law of the network's and are quicker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from sounding.chain.law import make_law
from sounding.chain.step import Chains, choose_route

Map: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

TINY = 1e-30  # a state that has vanished is divided by this instead of 0, and stays 0; every other one is far above it


def walk(
    state: torch.Tensor,
    weights: Iterable[torch.Tensor],
    *,
    norm: Map | None = None,
    activation: Map | None = None,
    inside: Map | None = None,
    skip: float = math.inf,
    products: list[torch.Tensor] | None = None,
) -> Iterator[torch.Tensor]:
    """The states after each layer H ↦ φ(N(H + γ F(H)Wᵀ)), samples as rows, one layer for each of `weights`.

    Args:
        state: the input, (..., n, d).
        norm: N, such as `batch_norm` or `unit_features`; None for no norm.
        activation: φ, behind the norm; None for the identity. A gain is part of it.
        inside: F, in front of the weights; None for the identity.
        skip: γ; infinite without a skip connection, where the layer is φ(N(F(H)Wᵀ)).
        products: a list that gets what each norm is given, for gradients at that place.
    """
    for weight in weights:
        branch = (state if inside is None else inside(state)) @ weight.mT
        state = branch if math.isinf(skip) else state + skip * branch  # γ = ∞ leaves no skip connection
        if products is not None:
            products.append(state)  # before the norm, where gradients are asked for
        state = state if norm is None else norm(state)
        state = state if activation is None else activation(state)
        yield state


def walk_in_law(start: torch.Tensor, *, depth: int, generator: torch.Generator, **law: Any) -> Iterator[Chains]:
    """The chains at the input, (runs, n, d), and after each of `depth` layers; `law` has the options of `make_law`.

    It is one object that goes on: what a row keeps of a layer must be copied from it, as its Gram matrix is.
    """
    runs, size, width = start.shape
    made = make_law(width=width, batch_size=size, depth=depth, **law)  # one law, many chains of it
    # not explicit: states with the right law, weights are never formed
    chains = Chains([made] * runs, start, route=choose_route(made, explicit=False), generator=generator)
    yield chains
    for _ in range(depth):
        chains.step()
        yield chains


def draw_normals(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Standard normals in float64 on the generator's device."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def measure_at(states: Iterable[torch.Tensor], layers: Collection[int], measure: Map) -> torch.Tensor:
    """The measure after the wanted layers of a walk, stacked along a first axis; the walk begins with layer 1."""
    wanted = set(layers)
    return torch.stack([measure(state) for layer, state in enumerate(states, start=1) if layer in wanted])


def batch_norm(product: torch.Tensor, *, eps: float = 0.0) -> torch.Tensor:
    """Batch norm over the samples, the last axis but one: mean 0 and mean square 1, less what `eps` takes."""
    centred = product - product.mean(-2, keepdim=True)
    square = centred.square().mean(-2, keepdim=True)
    return centred * (square + eps if eps else square).rsqrt()  # adding 0 would cost a copy


def unit_features(state: torch.Tensor, *, centring: bool = False) -> torch.Tensor:
    """Each feature over its root mean square, centred first if asked: the batch norm of the linear chains."""
    if centring:
        state = state - state.mean(-2, keepdim=True)
    return state / state.square().mean(-2, keepdim=True).sqrt().clamp_min(TINY)


def unit_matrix(state: torch.Tensor) -> torch.Tensor:
    """The state over its Frobenius norm, which leaves its directions as they are."""
    size: torch.Tensor = torch.linalg.matrix_norm(state)[..., None, None]
    return state / size.clamp_min(TINY)
