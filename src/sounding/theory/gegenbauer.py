"""The Gegenbauer route: batch norm theory from the expansion of the activation on the sphere.

Functions of one coordinate of the sphere S^(B−2) expand in Gegenbauer polynomials of index (B−3)/2 in t = x/√(B−1).
With orthonormal coefficients a_k and P_k normalized to P_k(1) = 1, two coordinates at angle cosine ρ₀ = −1/(B−1) give
E φ(x₁)φ(x₂) = Σ a_k² P_k(ρ₀), and (meanfield2019, Theorem 9)

    growth = Σ k(k+B−3)/(B−3) (1 − P_k(ρ₀)) a_k² / Σ (1 − P_k(ρ₀)) a_k².

The coefficients come from one Gauss rule, so the route shares nothing with the panels of `integrals.quadrature`. It
converges exponentially for smooth activations and only like 1/terms for kinked ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import roots_gegenbauer, roots_hermitenorm

from sounding.activations import ActivationLike, resolve
from sounding.activations.activation import Array
from sounding.errors import NumericalError, UsageError
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.quadrature import check_batch_size


@dataclass(frozen=True)
class GegenbauerPrediction:
    """Fixed point and growth from a truncated series."""

    variance: float
    correlation: float
    growth: float
    coefficients: tuple[float, ...]


def gegenbauer_batchnorm(
    activation: ActivationLike, *, batch_size: float, scale: float = 1.0, shift: float = 0.0, terms: int = 120
) -> GegenbauerPrediction:
    """The BSB1 fixed point and gradient growth at eps = 0 by the series of meanfield2019, Theorem 9.

    >>> round(gegenbauer_batchnorm("identity", batch_size=10).growth, 12)  # (B − 2)/(B − 3)
    1.142857142857
    """
    size = check_batch_size(batch_size)
    if terms < 10:
        raise UsageError(f"terms must be at least 10, got {terms}")
    affine = Affine(resolve(activation), float(scale), float(shift))
    degree, index = np.arange(terms + 1.0), 0.5 * (size - 3.0)
    if math.isinf(size):  # the limit: Hermite polynomials, independent samples
        t, weights = roots_hermitenorm(min(2 * terms, 180))
        reach, step, raised = 1.0, np.sqrt(degree), degree[:-1]
        second = (degree[:-1] == 0).astype(np.float64)
    else:
        t, weights = roots_gegenbauer(2 * terms, index)
        reach, raised = math.sqrt(size - 1.0), (degree * (degree + size - 3.0) / (size - 3.0))[:-1]
        # t p_k = step_{k+1} p_{k+1} + step_k p_{k−1}; at degree 0 the formula is 0/0 for a batch of 4
        step = np.zeros(terms + 1)
        k = degree[1:]
        step[1:] = np.sqrt(k * (k + 2 * index - 1) / (4 * (k + index) * (k + index - 1)))
        corner, ends = _recurrence(np.array([-1.0 / (size - 1.0), 1.0]), step).T
        second = corner / ends
    values = affine.value(affine.scale * reach * t + affine.shift)
    if not np.isfinite(values).all():
        raise NumericalError(f"{affine.activation.name} is not finite on the nodes of the series")
    coefficients = _recurrence(t, step) @ (weights / weights.sum() * values)
    share = (1.0 - second) * coefficients**2
    growth, variance = float((raised * share).sum() / share.sum()), float((coefficients**2).sum())
    return GegenbauerPrediction(variance, 1 - float(share.sum()) / variance, growth, tuple(coefficients.tolist()))


def _recurrence(t: Array, step: Array) -> Array:
    """Orthonormal polynomials from t p_k = step_{k+1} p_{k+1} + step_k p_{k−1}, (terms, places)."""
    rows = [np.ones_like(t)]
    previous = np.zeros_like(t)
    for k in range(step.size - 2):
        previous, current = rows[-1], (t * rows[-1] - step[k] * previous) / step[k + 1]
        rows.append(current)
    return np.stack(rows)
