"""Networks φ(α_ℓ BN(HWᵀ)) with Haar weights at initialization: gradients of weights and isometry gaps over depth.

Gradients are pulled back with their norm in logarithms; networks of all depths share their first layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sounding.claims.claim import Context
from sounding.claims.thesis2024.haar_networks import CHUNK, draw_haar, loss_gradient

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]
Schedule = Callable[[int], float]


def constant(gain: float) -> Schedule:
    """The same gain in every layer."""
    return lambda layer: gain


def power(exponent: float) -> Schedule:
    """α_ℓ = ℓ^(−exponent)."""
    return lambda layer: float(layer) ** -exponent


@dataclass(frozen=True)
class Layer:
    """One layer of many networks: its weights, the slope φ′(α b)α at every value, b = BN(HWᵀ), and b's scale.

    `factor` is what batch norm multiplied each feature by.
    """

    weight: torch.Tensor
    slope: torch.Tensor
    normalized: torch.Tensor
    factor: torch.Tensor


@dataclass(frozen=True)
class Networks:
    """states[ℓ] (runs, n, d) after ℓ layers; layers[ℓ − 1] led there. The loss is that of `labels` (runs, n)."""

    states: list[torch.Tensor]
    layers: list[Layer]
    center: bool
    labels: torch.Tensor
    classes: int
    generator: torch.Generator


def build_networks(
    values: Mapping[str, Any],
    context: Context,
    *,
    activation: str,
    gain: Schedule,
    depth: int,
    offset: int,
    center: bool = True,
) -> Networks:
    """`runs` networks, each on a batch of its own, behind an input layer with orthonormal columns and batch norm.

    A run has the same batch whatever the activation, the gains and `offset`: what differs between them is not the data.
    """
    import torch

    generator = context.generator(offset, device=context.device)
    runs, width = values["runs"], values["width"]
    inputs, labels, classes = draw_batches(values["data"], values["batch_size"], runs, context)
    shape = (runs, inputs.shape[2], width)
    first = torch.randn(shape, generator=generator, dtype=torch.float64, device=context.device)
    start = _normalize(inputs @ torch.linalg.qr(first).Q, center=center)[0]
    states, layers = [start], list[Layer]()
    while len(layers) < depth:
        drawn = draw_haar(min(CHUNK, depth - len(layers)) * runs, width, generator=generator)
        for weight in drawn.view(-1, runs, width, width):
            state, layer = _forward(states[-1], weight, activation, gain(len(layers) + 1), center=center)
            states.append(state)
            layers.append(layer)
    return Networks(states, layers, center, labels, classes, generator)


def draw_batches(data: str, size: int, runs: int, context: Context) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Flat normalized inputs (runs, size, features) of a batch for every run, their labels, the number of classes."""
    return _draw_batches(data, size, runs, context.device, context.random_seed)


@cache
def _draw_batches(
    data: str, size: int, runs: int, device: str, random_seed: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    import torch

    from sounding.data import load_dataset
    from sounding.data.dataset import batches

    dataset = load_dataset(data)
    generator = Context(random_seed=random_seed).generator(7)
    drawn = [next(batches(dataset, size, generator=generator)) for _ in range(runs)]
    inputs = torch.stack([batch.flatten(1) for batch, _ in drawn]).to(device, torch.float64)
    return inputs, torch.stack([labels for _, labels in drawn]).to(device), dataset.classes


def _normalize(product: torch.Tensor, *, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of unit mean square over the samples, and what each was multiplied by."""
    if center:
        product = product - product.mean(dim=1, keepdim=True)
    factor = product.square().mean(dim=1, keepdim=True).rsqrt()
    return product * factor, factor


def _forward(
    state: torch.Tensor, weight: torch.Tensor, activation: str, gain: float, *, center: bool
) -> tuple[torch.Tensor, Layer]:
    import torch

    normalized, factor = _normalize(state @ weight.mT, center=center)
    inner = gain * normalized
    if activation == "sin":
        output, slope = torch.sin(inner), gain * torch.cos(inner)
    elif activation == "tanh":
        output = torch.tanh(inner)
        slope = gain * (1 - output.square())
    else:
        output, slope = inner, torch.full_like(inner, gain)
    return output, Layer(weight, slope, normalized, factor)


def _pull_back(networks: Networks, layer: int, cotangent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient at layer `layer`'s product HWᵀ, and at the state before it; (..., runs, n, d)."""
    made = networks.layers[layer - 1]
    inner = cotangent * made.slope
    if networks.center:
        inner = inner - inner.mean(dim=-2, keepdim=True)
    inner = inner - made.normalized * (made.normalized * inner).mean(dim=-2, keepdim=True)
    product = inner * made.factor
    return product, product @ made.weight


def _heads(networks: Networks) -> torch.Tensor:
    import torch

    runs, _, width = networks.states[0].shape
    shape = (runs, width, networks.classes)
    drawn = torch.randn(shape, generator=networks.generator, dtype=torch.float64, device=networks.generator.device)
    return drawn / math.sqrt(width)


def log_norms_at(networks: Networks, depths: Sequence[int], layers: Sequence[int]) -> Array:
    """ln‖∂loss/∂W_ℓ‖_F at some layers of the networks of each depth, (layers, runs, depths), in one pass back.

    NaN for a layer that a network does not have.
    """
    import torch

    start = networks.states[0]
    gradient, logs = start.new_empty(0, *start.shape), start.new_empty(0, len(start))
    found = {}
    for layer in range(max(depths), 0, -1):
        if layer in depths:
            fresh = loss_gradient(networks.states[layer], networks.labels, _heads(networks))
            size = fresh.norm(dim=(-2, -1), keepdim=True)
            gradient, logs = torch.cat([gradient, (fresh / size)[None]]), torch.cat([logs, size.log().view(1, -1)])
        product, below = _pull_back(networks, layer, gradient)
        if layer in layers:
            found[layer] = logs + (product.mT @ networks.states[layer - 1]).norm(dim=(-2, -1)).log()
        norm = below.norm(dim=(-2, -1), keepdim=True)
        gradient, logs = below / norm, logs + norm.flatten(1).log()
    order = np.argsort(-np.asarray(depths))
    result = np.full((len(layers), len(start), len(depths)), np.nan)
    for index, layer in enumerate(layers):
        rows = found[layer].cpu().numpy()
        result[index][:, order[: len(rows)]] = rows.T
    return result


def first_layer_log_norms(networks: Networks, depths: Sequence[int]) -> Array:
    """ln‖∂loss/∂W_1‖_F of the networks of each depth, (runs, depths)."""
    return np.asarray(log_norms_at(networks, depths, (1,))[0])


def every_layer_log_norms(networks: Networks) -> Array:
    """ln‖∂loss/∂W_ℓ‖_F of every layer of the deepest network, (runs, depth)."""
    depth = len(networks.layers)
    gradient = loss_gradient(networks.states[depth], networks.labels, _heads(networks))
    found = gradient.new_empty(len(gradient), depth)
    scale = gradient.new_zeros(len(gradient))
    for layer in range(depth, 0, -1):
        product, below = _pull_back(networks, layer, gradient)
        found[:, layer - 1] = scale + (product.mT @ networks.states[layer - 1]).norm(dim=(-2, -1)).log()
        norm = below.norm(dim=(-2, -1), keepdim=True)
        gradient, scale = below / norm, scale + norm.flatten().log()
    return np.asarray(found.cpu().numpy())


def rates_at(logs: Array, layers: Sequence[int], *, gap: int) -> Array:
    """R(ℓ), positive when gradients grow towards the input: ln‖∇W_ℓ‖ − ln‖∇W_{ℓ+gap}‖ over `gap`, (runs, layers).

    (C.155) prints the opposite sign, under which exploding gradients have negative rates.
    """
    index = np.asarray(layers, dtype=np.int64) - 1
    return np.asarray((logs[:, index] - logs[:, index + gap]) / gap)


def gaps_at(networks: Networks, depths: Sequence[int]) -> Array:
    """Isometry gaps of the centred representations after each depth, (runs, depths).

    Centred batch norm makes the samples sum to zero, so the gap is taken in the n − 1 directions that are left; with a
    network that does not centre, in all n.
    """
    import torch

    from sounding.measures import of_spectrum

    found = []
    for depth in depths:
        state = networks.states[depth]
        values = torch.linalg.svdvals(state - state.mean(dim=1, keepdim=True) if networks.center else state)
        kept = values[:, :-1] if networks.center and state.shape[1] <= state.shape[2] else values
        found.append(of_spectrum.isometry_gap(kept.square(), tolerance=0.0))
    return np.asarray(torch.stack(found, dim=1).cpu().numpy())
