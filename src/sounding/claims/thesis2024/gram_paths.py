"""Gram matrices of random networks over depth, and what the mean field says of them (chapter 3)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sounding.activations.activation import Array
from sounding.claims.claim import Context
from sounding.claims.walk import walk_in_law
from sounding.theory.batchnorm import batchnorm
from sounding.theory.bounds.thesis2024 import theorem_3_2
from sounding.theory.gram_deviation import gram_deviation


def walk_grams(
    activation: str,
    start: Array,
    *,
    width: int,
    depth: int,
    runs: int,
    context: Context,
    offset: int,
    norm: str = "batch",
) -> torch.Tensor:
    """G_1 … G_depth of independent networks whose input has the Gram matrix `start`: (runs, depth, n, n)."""
    size = len(start)
    factor = torch.as_tensor(np.linalg.cholesky(start) * math.sqrt(width), dtype=torch.float32)
    rows = torch.zeros(size, width, dtype=torch.float32)
    rows[:, :size] = factor
    generator = context.generator(offset, device=context.device)
    state = rows.to(context.device).expand(runs, size, width).clone()
    grams = []
    for chains in walk_in_law(state, depth=depth, generator=generator, activation=activation, norm=norm):
        scale = (2 * chains.log_scale).exp() if norm == "none" else torch.ones_like(chains.log_scale)
        grams.append(chains.gram() * scale.view(-1, 1, 1) / width)
    return torch.stack(grams[1:], dim=1)


def distances(activation: str, start: Array, **options: Any) -> Array:
    """‖G_ℓ − G*‖_F of each run and layer, (runs, depth)."""
    target = start if options.get("norm") == "none" else fixed_gram(activation, len(start))
    grams = walk_grams(activation, start, **options)
    return np.asarray(torch.linalg.matrix_norm(grams - torch.as_tensor(target).to(grams)).cpu().numpy())


def fixed_gram(activation: str, size: int) -> Array:
    """G* = q((1 − c)I + c11ᵀ) of the mean field."""
    point = batchnorm(activation, batch_size=size).fixed_point
    return np.asarray(point.variance * ((1 - point.correlation) * np.eye(size) + point.correlation))


def stretched(size: int) -> Array:
    """A Gram matrix far from every G*: one direction that orders the samples, and a little of each sample's own."""
    place = np.linspace(-1.5, 1.5, size)
    return np.asarray(np.outer(place, place) + 0.05 * np.eye(size))


def slowest_rate(activation: str, size: int) -> float:
    """The larger of the mean field's |λ_L| and |λ_M|, by which G_ℓ comes to G* per layer."""
    forward = batchnorm(activation, batch_size=size).forward_eigenvalues
    return max(abs(forward.L), abs(forward.M))


def bound_line(activation: str, size: int, *, width: int, depth: int) -> Array:
    """Theorem 3.2 as printed with C = 1, layers 1 … depth; 1 − α is the square of the mean field's slowest rate."""
    alpha = 1 - slowest_rate(activation, size) ** 2
    found = theorem_3_2(fixed_gram(activation, size), width=width, depth=depth, mixing=alpha, version="printed")
    return found.curve[1:]


def deviation_line(activation: str, size: int, *, width: int, depth: int, context: Context) -> Array:
    """The root mean square of ‖G_ℓ − G*‖_F from G*, to leading order in 1/√d, layers 1 … depth."""
    generator = np.random.default_rng(context.random_seed)
    found = gram_deviation(activation, batch_size=size, width=width, generator=generator)
    return np.array([row.value for row in found.profile(depth)])


def thin(count: int, most: int = 40) -> NDArray[np.int64]:
    """Indices 0 … count − 1, at most so many."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
