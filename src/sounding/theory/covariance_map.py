"""The forward map of batch normalization at any covariance of the batch, symmetric or not.

V(Σ) = E[φ(x)φ(x)ᵀ], x = Gh/√(|Gh|²/B + eps), h ~ N(0, Σ) (meanfield2019, Definition B.2 and eq. 28). It depends on Σ
through S = GΣG alone. Positively homogeneous activations have the Laplace integral of Theorem 2, deterministic to
rounding; a batch-symmetric S falls back on the quadratures of `sounding.theory.batchnorm`; any other case is a double
integral over the density of `integrals.projected` for each pair of samples, or, for large batches or on demand,
sampled, with standard errors and with x xᵀ, whose mean is known, as control.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from sounding.activations import Activation, ActivationLike, resolve
from sounding.activations.activation import Array
from sounding.errors import NumericalError, UsageError
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.moments import Expectations
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.projected import projected_map
from sounding.theory.signal.gaussian import map_pairs

Method = Literal["laplace", "symmetric", "quadrature", "sampled"]
_LARGEST_QUADRATURE = 64  # samples: integrals grow with the square, 14 s of a core at 32 for tanh


@dataclass(frozen=True)
class MappedCovariance:
    """The covariance after one layer, (B, B), with an error for each entry: a bound, or a standard error if sampled."""

    covariance: Array
    error: Array
    method: Method


def covariance_map(
    activation: ActivationLike,
    covariance: Array,
    *,
    eps: float = 0.0,
    scale: float = 1.0,
    shift: float = 0.0,
    samples: int = 200_000,
    generator: np.random.Generator | None = None,
    tolerance: float = 1e-10,
) -> MappedCovariance:
    """V(Σ): the covariance of a batch after batch norm and activation, from its covariance before.

    Homogeneous activations and symmetric batches are deterministic and quick. Others take B(B−1)/2 double integrals of
    some 20 ms, several times that with eps > 0 or with kinks; with a generator they are sampled instead.

    Args:
        activation: a name, an `Activation`, or a callable.
        covariance: (B, B), symmetric and positive semidefinite; samples × samples.
        samples: how many Gaussian batches to draw with a generator.
        generator: sample where no quick method applies; needed there for batches of more than 64.
        tolerance: of the double integrals.

    >>> map_of_identity = covariance_map("identity", np.diag([1.0, 2.0, 3.0, 4.0]))
    >>> print(map_of_identity.method, round(float(map_of_identity.covariance.trace()), 12))
    laplace 4.0
    """
    phi = resolve(activation)
    sigma = check_covariance(covariance)
    if not (math.isfinite(eps) and eps >= 0):
        raise UsageError(f"eps must be at least 0 and finite, got {eps}")
    adapted = phi.scaled(scale, shift)
    centred = center(sigma)
    if centred.trace() <= 1e-14 * max(float(sigma.trace()), 1e-300) and eps == 0:
        raise UsageError("all samples of the batch are equal: at eps = 0 batch normalization divides 0 by 0")
    if adapted.power is not None:
        return laplace_covariance_map(adapted, sigma, eps=eps)
    size = sigma.shape[0]
    mu = float(centred.trace()) / (size - 1)
    if size >= 4 and np.allclose(centred, mu * center(np.eye(size)), rtol=0, atol=1e-13 * mu):
        return _symmetric(Affine(phi, float(scale), float(shift)), size, mu, eps)
    if generator is None:
        if size > _LARGEST_QUADRATURE:
            raise UsageError(
                f"V of {phi.name} at a covariance without batch symmetry takes {size * (size - 1) // 2} double "
                f"integrals for a batch of {size}: sample it with a generator",
                hint="generator=numpy.random.default_rng(0)",
            )
        if centred.trace() <= 0:
            level = float(adapted(np.zeros(1))[0]) ** 2
            return MappedCovariance(np.full((size, size), level), np.full((size, size), 1e-15 * level), "symmetric")
        mapped, error = projected_map(adapted, centred, eps=eps, tolerance=tolerance)
        return MappedCovariance(mapped, error, "quadrature")
    return _sampled(adapted, sigma, eps, samples, generator)


def check_covariance(covariance: Array) -> Array:
    """The covariance as float64, or a UsageError that says what is wrong with it."""
    sigma = np.asarray(covariance, dtype=np.float64)
    if sigma.ndim != 2 or sigma.shape[0] != sigma.shape[1] or len(sigma) < 2:
        raise UsageError(f"expected a covariance of shape (batch, batch) with a batch of 2 or more, got {sigma.shape}")
    if not np.isfinite(sigma).all() or not np.allclose(sigma, sigma.T, rtol=1e-10, atol=1e-12 * np.abs(sigma).max()):
        raise UsageError("expected a finite symmetric covariance")
    lowest = float(np.linalg.eigvalsh(sigma)[0])
    if lowest < -1e-9 * max(float(np.trace(sigma)), 1e-300):
        raise UsageError(f"expected a positive semidefinite covariance, got an eigenvalue of {lowest:.3g}")
    return 0.5 * (sigma + sigma.T)


def center(matrix: Array) -> Array:
    """GMG with G = I − 11ᵀ/B: the matrix with row and column means taken off."""
    rows = matrix.mean(axis=0, keepdims=True)
    return np.asarray(matrix - rows - matrix.mean(axis=1, keepdims=True) + rows.mean())


def laplace_covariance_map(
    activation: Activation, covariance: Array, *, eps: float = 0.0, tolerance: float = 1e-12
) -> MappedCovariance:
    """V(Σ) for a positively homogeneous activation of degree α, at any covariance and eps.

    B^α/Γ(α) ∫₀^∞ s^(α−1) e^(−s·B·eps) det(I + 2sS)^(−1/2) V_φ(S(I + 2sS)^(−1)) ds, S = GΣG, with V_φ the Gaussian map
    (meanfield2019, Theorem 2; the factor with eps is added here and follows from the same Laplace integral for
    (|Gh|² + B·eps)^(−α)). In ln s the integrand is analytic in a strip and decays on both sides, so the trapezoid rule
    converges geometrically; the step is halved until two agree.
    """
    if activation.power is None or activation.power[0] <= 0:
        raise UsageError(f"{activation.name} is not positively homogeneous", hint="relu or leaky_relu:0.1")
    sigma = check_covariance(covariance)
    size, alpha = sigma.shape[0], activation.power[0]
    values, vectors = np.linalg.eigh(center(sigma))
    unit = float(values.mean())
    if unit <= 0:
        return MappedCovariance(np.zeros_like(sigma), np.zeros_like(sigma), "laplace")
    values = np.where(values > 1e-13 * values[-1], values, 0.0) / unit  # below, they are rounding of a singular S
    rank = int((values > 0).sum())
    shrink = eps / unit
    # where the integrand has fallen by e^−40: like s^α on the left, like s^(−rank/2) or e^(−s·B·eps) on the right
    low, high = -40.0 / alpha - math.log(float(values.max())), 80.0 / rank - math.log(float(values[values > 0].min()))
    if shrink > 0:
        high = min(high, math.log(40.0 / (size * shrink)))
    over, step = partial(_trapezoid, activation, alpha, (values, vectors), shrink), 0.5
    result = over(np.arange(low, high + step, step), step)
    for _ in range(6):
        between = over(np.arange(low + 0.5 * step, high + step, step), step)
        error, result, step = np.abs(between - result), 0.5 * (result + between), 0.5 * step
        if float(error.max()) <= tolerance * float(np.abs(result).max()):
            break
    factor = size**alpha / math.gamma(alpha)
    return MappedCovariance(factor * result, factor * error + 1e-15 * np.abs(factor * result), "laplace")


def _trapezoid(
    activation: Activation, alpha: float, spectrum: tuple[Array, Array], eps: float, logs: Array, step: float
) -> Array:
    """step·Σ over nodes of the Laplace integrand in ln s, for an activation of degree α; `spectrum` is that of S."""
    values, vectors = spectrum
    total = np.zeros((values.size, values.size))
    for chunk in np.array_split(logs, max(1, logs.size * values.size**2 // 2_000_000)):
        s = np.exp(chunk)
        shrunk = values / (1.0 + 2.0 * s[:, None] * values)
        weight = alpha * chunk - s * values.size * eps - 0.5 * np.log1p(2.0 * s[:, None] * values).sum(axis=1)
        covariance = np.einsum("ik,sk,jk->sij", vectors, shrunk, vectors, optimize=True)
        mapped = map_pairs(activation, covariance, np.zeros(covariance.shape[:2])).matrix
        total += np.einsum("s,sij->ij", np.exp(weight), mapped)
    return step * total


def _symmetric(affine: Affine, size: int, mu: float, eps: float) -> MappedCovariance:
    """V at a batch-symmetric covariance, from the moments of one and two coordinates."""
    law = NormalizedLaw(float(size), mu, eps)
    expectations = Expectations(affine, float(size))
    line, error = expectations.line(law)
    spread, _ = expectations.spread(law)
    variance = line.square + 2 * affine.level * line.mean + affine.level**2
    mapped = np.full((size, size), variance - spread) + spread * np.eye(size)
    return MappedCovariance(mapped, np.full((size, size), error.square + 1e-12 * variance), "symmetric")


def _sampled(
    activation: Activation, sigma: Array, eps: float, samples: int, generator: np.random.Generator
) -> MappedCovariance:
    """Antithetic Monte Carlo with x xᵀ as control variate."""
    if samples < 1000:
        raise UsageError(f"samples must be at least 1000, got {samples}")
    size = sigma.shape[0]
    values, vectors = np.linalg.eigh(center(sigma))
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    # the control's mean: E x xᵀ is the map of the identity
    known = laplace_covariance_map(resolve("identity"), sigma, eps=eps).covariance
    sums = np.zeros((5, size, size))
    count = 0
    block = max(1000, 4_000_000 // size**2)
    while count < samples:
        draws = min(block, samples - count)
        u = generator.standard_normal((draws, size)) @ root.T
        x = u / np.sqrt((u * u).mean(axis=1, keepdims=True) + eps)
        plus, minus = activation(x), activation(-x)
        if not (np.isfinite(plus).all() and np.isfinite(minus).all()):
            raise NumericalError(f"{activation.name} is not finite on batch-normalized samples")
        pair = 0.5 * (plus[:, :, None] * plus[:, None, :] + minus[:, :, None] * minus[:, None, :])
        control = x[:, :, None] * x[:, None, :]
        sums += np.stack([q.sum(axis=0) for q in (pair, control, pair * pair, pair * control, control * control)])
        count += draws
    mean, control_mean, square, cross, control_square = sums / count
    variance, covariance = control_square - control_mean**2, cross - mean * control_mean
    slope = covariance / np.where(variance > 0, variance, 1.0)
    residual = np.maximum(square - mean**2 - slope * covariance, 0.0)
    error = np.sqrt(residual / count) + 1e-13 * np.abs(mean)
    return MappedCovariance(mean - slope * (control_mean - known), error, "sampled")
