"""Networks φ(α_ℓ BN(HWᵀ)) with Haar or Gaussian weights (chapter 6): isometry gaps, gradients of the weights.

Samples are rows. Gradients are pulled back with their norm in logarithms, so that a thousand exploding layers stay
finite; networks of all depths share their first layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Values
from sounding.claims.walk import draw_normals, walk_in_law
from sounding.data import load_dataset
from sounding.data.dataset import batches
from sounding.measures import isometry_gap, of_spectrum

CHUNK = 50  # layers whose weights are drawn at once: enough to keep a GPU busy, few enough to hold

# pivots of Cholesky's factor in this ratio: beyond it Newton's two steps would not reach rounding
NEARLY_SINGULAR = 1e-4


def draw_haar(count: int, width: int, *, generator: torch.Generator) -> torch.Tensor:
    """Haar matrices by Cholesky, which a GPU batches well, made orthogonal to rounding by two steps of Newton's.

    Cholesky squares the condition, so draws that are close to singular take the QR decomposition: the same matrices.
    """
    # (L⁻¹N)(L⁻¹N)ᵀ = 1 with NNᵀ = LLᵀ, and L has a positive diagonal: Haar
    normals = draw_normals(generator, count, width, width)
    lower, failed = torch.linalg.cholesky_ex(normals @ normals.mT)
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    safe = (failed == 0) & (pivots.amin(-1) > NEARLY_SINGULAR * pivots.amax(-1))
    frames: torch.Tensor = torch.linalg.solve_triangular(lower, normals, upper=False)
    for _ in range(2):
        # Newton for the orthogonal factor, which squares the error
        frames = 1.5 * frames - 0.5 * frames @ (frames.mT @ frames)
    if not bool(safe.all()):
        columns, upper = torch.linalg.qr(normals[~safe].mT)
        frames[~safe] = (columns * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).mT
    return frames


@dataclass(frozen=True)
class Layer:
    """One layer of many networks: its weights, b = BN(HWᵀ), and the norm `length` of b's features.

    `factor` is what batch norm multiplied each feature by, `slope` is φ′(α b)α at every value, None where it is 1.
    """

    weight: torch.Tensor
    normalized: torch.Tensor
    length: float
    factor: torch.Tensor
    slope: torch.Tensor | None


@dataclass(frozen=True)
class Networks:
    """states[ℓ] (runs, n, d) after ℓ layers; layers[ℓ − 1] led there. The loss is that of `labels` (runs, n)."""

    states: list[torch.Tensor]
    layers: list[Layer]
    centring: bool
    labels: torch.Tensor
    classes: int
    generator: torch.Generator


def build_networks(
    start: torch.Tensor,
    labels: torch.Tensor,
    *,
    depth: int,
    generator: torch.Generator,
    law: str = "orthogonal",
    activation: str = "identity",
    gain: float = 1.0,
    exponent: float = 0.0,
    centring: bool = True,
    length: float | None = None,
    repeats: torch.Tensor | None = None,
    classes: int = 10,
) -> Networks:
    """Send `start` (runs, n, d) through `depth` layers of weights of the law, with `labels` for the loss at the end.

    Args:
        law: "orthogonal", Haar matrices, or "gaussian", of variance 1/d.
        gain: α in front of the activation, times ℓ^(−exponent) in layer ℓ.
        length: of every feature behind batch norm; None for unit mean square.
        repeats: which sample each sample repeats. Copies are kept equal, for rounding would tell them apart, and the
            network amplifies that.
    """
    runs, _, width = start.shape
    states, layers = [start], list[Layer]()
    while len(layers) < depth:
        count = min(CHUNK, depth - len(layers)) * runs
        if law == "orthogonal":
            drawn = draw_haar(count, width, generator=generator)
        else:
            drawn = draw_normals(generator, count, width, width) / math.sqrt(width)
        for weight in drawn.view(-1, runs, width, width):
            product = states[-1] @ weight.mT
            product = product if repeats is None else product[:, repeats]
            normalized, factor, norm = normalize(product, centring=centring, length=length)
            alpha = gain * float(len(layers) + 1) ** -exponent
            inner = normalized if alpha == 1.0 else alpha * normalized  # not copied: layers are a thousand
            slope = None
            if activation == "sin":
                inner, slope = torch.sin(inner), alpha * torch.cos(inner)
            elif activation == "tanh":
                inner = torch.tanh(inner)
                slope = alpha * (1 - inner.square())
            elif alpha != 1.0:
                slope = torch.full_like(inner, alpha)
            states.append(inner)
            layers.append(Layer(weight, normalized, norm, factor, slope))
    return Networks(states, layers, centring, labels, classes, generator)


def normalize(
    product: torch.Tensor, *, centring: bool, length: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Features of unit mean square over the samples or of the given norm, what each was multiplied by, and its norm."""
    if centring:
        product = product - product.mean(dim=1, keepdim=True)
    if length is None:
        factor, length = product.square().mean(dim=1, keepdim=True).rsqrt(), math.sqrt(product.shape[1])
    else:
        factor = length / product.norm(dim=1, keepdim=True)
    return product * factor, factor, length


def pull_back(networks: Networks, layer: int, cotangent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient at layer `layer`'s product HWᵀ, and at the state before it; (..., runs, n, d)."""
    made = networks.layers[layer - 1]
    inner = cotangent if made.slope is None else cotangent * made.slope
    if networks.centring:  # likewise along the constant vector
        inner = inner - inner.mean(dim=-2, keepdim=True)
    unit = made.normalized / made.length
    # the size of a feature is divided out, so that the gradient along the feature itself is lost
    inner = inner - unit * (unit * inner).sum(dim=-2, keepdim=True)
    product = inner * made.factor
    return product, product @ made.weight


def log_norms_at(networks: Networks, depths: Sequence[int], layers: Sequence[int]) -> Array:
    """ln‖∂loss/∂W_ℓ‖_F at some layers of the networks of each depth, (layers, runs, depths), in one pass back.

    NaN for a layer that a network does not have.
    """
    start, generator = networks.states[0], networks.generator
    runs, count, width = start.shape
    target = torch.nn.functional.one_hot(networks.labels, networks.classes).to(start.dtype)
    gradient, logs = start.new_empty(0, *start.shape), start.new_empty(0, len(start))
    found = {}
    for layer in range(max(depths), 0, -1):  # from the deepest output to the first layer: all depths in one pass
        if layer in depths:
            # a network of this depth begins here: the mean cross-entropy of a random linear classifier behind it
            head = draw_normals(generator, runs, width, networks.classes) / math.sqrt(width)
            fresh = ((networks.states[layer] @ head).softmax(dim=-1) - target) / count @ head.mT
            size = fresh.norm(dim=(-2, -1), keepdim=True)
            gradient, logs = torch.cat([gradient, (fresh / size)[None]]), torch.cat([logs, size.log().view(1, -1)])
        product, below = pull_back(networks, layer, gradient)
        if layer in layers:
            found[layer] = logs + (product.mT @ networks.states[layer - 1]).norm(dim=(-2, -1)).log()
        norm = below.norm(dim=(-2, -1), keepdim=True)
        # a thousand layers would leave the floating numbers
        gradient, logs = below / norm, logs + norm.flatten(1).log()
    order = np.argsort(-np.asarray(depths))  # networks joined in the order of falling depth
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
    return np.asarray(log_norms_at(networks, (depth,), range(1, depth + 1))[..., 0].T)


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
    found = []
    for depth in depths:
        state = networks.states[depth]
        values = torch.linalg.svdvals(state - state.mean(dim=1, keepdim=True) if networks.centring else state)
        kept = values[:, :-1] if networks.centring and state.shape[1] <= state.shape[2] else values
        found.append(of_spectrum.isometry_gap(kept.square(), tolerance=0.0))
    return np.asarray(torch.stack(found, dim=1).cpu().numpy())


def gaps_over_depth(start: torch.Tensor, *, depth: int, context: Context, offset: int) -> Array:
    """The isometry gap of linear Haar networks after 0 … depth layers, (runs, depth + 1); `start` is (runs, d, d)."""
    generator = context.generator(offset, device=context.device)
    law = {"weights": "haar", "centring": False, "dtype": "float64"}
    walked = walk_in_law(start.clone(), depth=depth, generator=generator, **law)
    gaps = [isometry_gap(chains.gram(), tolerance=0.0) for chains in walked]
    return np.asarray(torch.stack(gaps, dim=1).cpu().numpy())


def build_on_data(
    values: Values,
    context: Context,
    *,
    offset: int,
    law: str = "orthogonal",
    centring: bool = True,
    length: float | None = None,
    distinct: int | None = None,
    **layers: Any,
) -> Networks:
    """Networks on a batch of real data for every run, behind an input layer and batch norm.

    The input layer has the law of the others: orthonormal columns, or Gaussian entries. With `distinct` the batch
    repeats so many samples. A run has the same batch whatever follows it and whatever the offset. `layers` are further
    options of `build_networks`.
    """
    size, width, runs = values["batch_size"], values["width"], values["runs"]
    inputs, labels, classes = draw_batches(
        values["data"], distinct or size, runs, device=context.device, random_seed=context.random_seed
    )
    generator = context.generator(offset, device=context.device)
    weights = draw_normals(generator, runs, inputs.shape[2], width)
    state = inputs @ (torch.linalg.qr(weights).Q if law == "orthogonal" else weights)
    again = torch.arange(size, device=context.device) % distinct if distinct else None  # in turn: 0, 1, …, k − 1, 0, …
    if again is not None:
        state, labels = state[:, again], labels[:, again]
    layers |= {"law": law, "centring": centring, "length": length, "repeats": again, "classes": classes}
    start = normalize(state, centring=centring, length=length)[0]
    return build_networks(start, labels, generator=generator, **layers)


@cache
def draw_batches(
    data: str, size: int, runs: int, *, device: str, random_seed: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Flat normalized inputs (runs, size, features) of a batch for every run, their labels, the number of classes."""
    dataset = load_dataset(data)
    generator = Context(random_seed=random_seed).generator(7)  # one offset for all rows: they share their batches
    drawn = [next(batches(dataset, size, generator=generator)) for _ in range(runs)]
    inputs = torch.stack([batch.flatten(1) for batch, _ in drawn]).to(device, torch.float64)
    return inputs, torch.stack([labels for _, labels in drawn]).to(device), dataset.classes


def draw_inputs(kind: str, width: int, count: int, *, generator: torch.Generator) -> torch.Tensor:
    """Independent batches (count, d, d) whose features have norm 1.

    They are "gaussian", "correlated" samples with a common part, or "isometric", close to the identity.
    """
    if kind == "isometric":
        unit = torch.eye(width, dtype=torch.float64, device=generator.device)
        batch = unit + 0.1 * draw_normals(generator, count, width, width) / math.sqrt(width)
    else:
        common = 2.0 if kind == "correlated" else 0.0
        drawn = []
        for _ in range(count):  # an input has the same entries however many follow it
            one = draw_normals(generator, width, width)
            drawn.append(one + common * draw_normals(generator, 1, width) if common else one)
        batch = torch.stack(drawn)
    size: torch.Tensor = batch.norm(dim=1, keepdim=True)
    return batch / size
