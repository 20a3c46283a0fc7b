"""Linear networks with batch norm and Haar or Gaussian weights (chapter 6): isometry gaps, gradients of weights.

A layer is H′ = BN(HWᵀ) on rows of samples, BN without centring unless asked for. Gradients are pulled back with their
norm in logarithms, so that a thousand exploding layers stay finite; networks of all depths share their first layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sounding.claims.claim import Context

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]

CHUNK = 50
NEARLY_SINGULAR = 1e-4


def draw_haar(count: int, width: int, *, generator: torch.Generator) -> torch.Tensor:
    """Haar matrices by Cholesky, which a GPU batches well, made orthogonal to rounding by two steps of Newton's.

    Cholesky squares the condition, so draws that are close to singular take the QR decomposition: the same matrices.
    """
    import torch

    shape = (count, width, width)
    normals = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
    lower, failed = torch.linalg.cholesky_ex(normals @ normals.mT)
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    safe = (failed == 0) & (pivots.amin(-1) > NEARLY_SINGULAR * pivots.amax(-1))
    frames: torch.Tensor = torch.linalg.solve_triangular(lower, normals, upper=False)
    for _ in range(2):
        frames = 1.5 * frames - 0.5 * frames @ (frames.mT @ frames)
    if not bool(safe.all()):
        columns, upper = torch.linalg.qr(normals[~safe].mT)
        frames[~safe] = (columns * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).mT
    return frames


def draw_weights(law: str, count: int, width: int, *, generator: torch.Generator) -> torch.Tensor:
    """(count, width, width): "orthogonal", or "gaussian" of variance 1/width."""
    import torch

    if law == "orthogonal":
        return draw_haar(count, width, generator=generator)
    shape = (count, width, width)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device) / math.sqrt(width)


@dataclass(frozen=True)
class Trunk:
    """The layers of many networks: states (runs, n, d) after each, weights, and the length of each feature before BN.

    `repeats` says which sample each sample repeats; copies are kept equal, for rounding would tell them apart, and the
    network amplifies that.
    """

    states: list[torch.Tensor]
    weights: list[torch.Tensor]
    lengths: list[torch.Tensor]
    center: bool
    feature_norm: float


def build_trunk(
    start: torch.Tensor,
    *,
    law: str,
    depth: int,
    generator: torch.Generator,
    center: bool = False,
    feature_norm: float | None = None,
    repeats: torch.Tensor | None = None,
) -> Trunk:
    """Send `start` (runs, n, d) through `depth` layers; features have the norm √n unless given."""
    runs, size, width = start.shape
    norm = math.sqrt(size) if feature_norm is None else feature_norm
    states = [start]
    weights: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    while len(weights) < depth:
        drawn = draw_weights(law, CHUNK * runs, width, generator=generator)
        for weight in drawn.view(CHUNK, runs, width, width)[: depth - len(weights)]:
            product = states[-1] @ weight.mT
            if repeats is not None:
                product = product[:, repeats]
            if center:
                product = product - product.mean(dim=1, keepdim=True)
            length = product.norm(dim=1, keepdim=True)
            states.append(product * (norm / length))
            weights.append(weight)
            lengths.append(length)
    return Trunk(states, weights, lengths, center, norm)


def pull_back(trunk: Trunk, layer: int, cotangent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient at the product before layer `layer`'s BN, and at the state before it; (..., runs, n, d)."""
    unit = trunk.states[layer] / trunk.feature_norm
    inner = cotangent - cotangent.mean(dim=-2, keepdim=True) if trunk.center else cotangent
    inner = inner - unit * (unit * inner).sum(dim=-2, keepdim=True)
    product = inner * (trunk.feature_norm / trunk.lengths[layer - 1])
    return product, product @ trunk.weights[layer - 1]


def loss_gradient(state: torch.Tensor, labels: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean cross-entropy of the linear classifier `head` (runs, d, classes) at its input."""
    import torch

    logits = state @ head
    target = torch.nn.functional.one_hot(labels, head.shape[-1]).to(logits.dtype)
    return (logits.softmax(dim=-1) - target) / state.shape[1] @ head.mT


def first_layer_log_norms(
    trunk: Trunk, labels: torch.Tensor, depths: Sequence[int], *, classes: int, generator: torch.Generator
) -> Array:
    """ln‖∂loss/∂W_1‖_F of the networks of each depth, (runs, depths), in one pass back from the deepest."""
    import torch

    runs, _, width = trunk.states[0].shape
    place = {"generator": generator, "dtype": torch.float64, "device": generator.device}
    wanted = sorted(depths, reverse=True)
    gradient = trunk.states[0].new_empty(0, *trunk.states[0].shape)
    logs = trunk.states[0].new_empty(0, runs)
    for layer in range(wanted[0], 0, -1):
        if layer in wanted:
            head = torch.randn(runs, width, classes, **place) / math.sqrt(width)  # type: ignore[call-overload]
            fresh = loss_gradient(trunk.states[layer], labels, head)
            gradient, logs = torch.cat([gradient, fresh[None]]), torch.cat([logs, logs.new_zeros(1, runs)])
        product, below = pull_back(trunk, layer, gradient)
        if layer == 1:
            weight = product.mT @ trunk.states[0]
            logs = logs + weight.norm(dim=(-2, -1)).log()
        norm = below.norm(dim=(-2, -1), keepdim=True)
        gradient, logs = below / norm, logs + (norm.flatten(1).log() if layer > 1 else 0.0)
    order = np.argsort(np.argsort(depths))
    return np.asarray(logs.cpu().numpy()[::-1][order].T)


def every_layer_log_norms(trunk: Trunk, labels: torch.Tensor, *, classes: int, generator: torch.Generator) -> Array:
    """ln‖∂loss/∂W_ℓ‖_F of every layer of the deepest network, (runs, depth)."""
    import torch

    runs, _, width = trunk.states[0].shape
    depth = len(trunk.weights)
    place = {"generator": generator, "dtype": torch.float64, "device": generator.device}
    head = torch.randn(runs, width, classes, **place) / math.sqrt(width)  # type: ignore[call-overload]
    gradient = loss_gradient(trunk.states[depth], labels, head)
    found = gradient.new_empty(runs, depth)
    scale = gradient.new_zeros(runs)
    for layer in range(depth, 0, -1):
        product, below = pull_back(trunk, layer, gradient)
        found[:, layer - 1] = scale + (product.mT @ trunk.states[layer - 1]).norm(dim=(-2, -1)).log()
        norm = below.norm(dim=(-2, -1), keepdim=True)
        gradient, scale = below / norm, scale + norm.flatten().log()
    return np.asarray(found.cpu().numpy())


def gaps_over_depth(start: torch.Tensor, *, depth: int, context: Context, offset: int) -> Array:
    """The isometry gap of Haar networks after 0 … depth layers, (runs, depth + 1); `start` is (runs, d, d)."""
    import torch

    from sounding.chain.law import make_law
    from sounding.chain.step import Chains
    from sounding.measures import isometry_gap

    runs, _, width = start.shape
    law = make_law(width=width, batch_size=width, weights="haar", center=False, depth=depth, dtype="float64")
    generator = context.generator(offset, device=context.device)
    chains = Chains([law] * runs, start.clone(), route="explicit", generator=generator)
    gaps = [isometry_gap(chains.gram(), tolerance=0.0)]
    for _ in range(depth):
        chains.step()
        gaps.append(isometry_gap(chains.gram(), tolerance=0.0))
    return np.asarray(torch.stack(gaps, dim=1).cpu().numpy())


def square_inputs(kind: str, width: int, runs: int, *, generator: torch.Generator) -> torch.Tensor:
    """Batches (runs, d, d) whose features have norm 1: "gaussian", or "correlated" samples with a common part."""
    import torch

    options = {"dtype": torch.float64, "device": generator.device}
    batch = torch.randn(1, width, width, generator=generator, **options)  # type: ignore[call-overload]
    if kind == "correlated":
        batch = batch + 2 * torch.randn(1, 1, width, generator=generator, **options)  # type: ignore[call-overload]
    one: torch.Tensor = batch / batch.norm(dim=1, keepdim=True)
    return one.expand(runs, width, width).contiguous()
