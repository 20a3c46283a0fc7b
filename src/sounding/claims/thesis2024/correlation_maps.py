"""Kernel maps to try chapter 5 on: those of activations, and power series with random Hermite weights.

κ(ρ) = Σ p_k ρ^k with p_k = c_k² ≥ 0 and Σ p_k = 1 is the kernel map of the activation Σ c_k h_k, so every such series
is a case of the theorems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.polynomial import chebyshev
from scipy.optimize import brentq

from sounding.activations.activation import Array
from sounding.chain import simulate
from sounding.claims.claim import Context
from sounding.claims.number import student
from sounding.theory.bounds.kernel_maps import kernel_case
from sounding.theory.kernel import kernel, normalized
from sounding.theory.kernel_path import interpolate

# below this a distance is rounding
RESOLVED = 1e-6
ORDER = 30  # of the highest Hermite coefficient that is drawn


@dataclass(frozen=True)
class CorrelationMap:
    """κ with κ(1) = 1, and what the theorems use of it."""

    name: str
    kappa: Callable[[Array], Array]
    zero: float
    slope_zero: float
    slope_one: float
    fixed_point: float
    slope_fixed_point: float
    case: int


def map_of(activation: str, norm: Any = "none") -> CorrelationMap:
    """The map of an activation; κ as a series in arccos ρ, exact to about 1e-12."""
    found = kernel(activation, norm)
    coefficients = np.array(interpolate(normalized(activation, norm)).coefficients)

    def kappa(rho: Array) -> Array:
        unit = 2 * np.arccos(np.clip(rho, -1.0, 1.0)) / np.pi - 1
        return np.asarray(chebyshev.chebval(unit, coefficients))

    label = activation if norm == "none" else f"{activation}, {norm}"
    numbers = (found.zero, found.slope_zero, found.slope_one, found.fixed_point, found.slope_fixed_point)
    return CorrelationMap(label, kappa, *numbers, found.case)


def map_of_weights(weights: Array, name: str = "") -> CorrelationMap:
    """The map of the squared Hermite coefficients p_0, p_1, …"""
    series = np.polynomial.Polynomial(weights)
    slope = series.deriv()
    case = kernel_case(float(weights[0]), float(slope(1.0)))
    point = {1: 0.0, 2: 1.0, 3: 1.0}.get(case)
    if point is None:
        point = float(brentq(lambda rho: float(series(rho)) - rho, 0.0, 1 - 1e-7, xtol=1e-15))
    return CorrelationMap(
        name=name,
        kappa=lambda rho: np.asarray(series(rho)),
        zero=float(weights[0]),
        slope_zero=float(weights[1]),
        slope_one=float(slope(1.0)),
        fixed_point=point,
        slope_fixed_point=float(slope(point)),
        case=case,
    )


def random_maps(case: int, count: int, context: Context) -> list[CorrelationMap]:
    """Maps of one case of Theorem 5.11 with few or many Hermite coefficients up to order 30."""
    generator = np.random.default_rng([context.random_seed, case])
    found: list[CorrelationMap] = []
    while len(found) < count:
        concentration = 10 ** generator.uniform(-2, 0.5)
        rest = generator.dirichlet(np.full(ORDER, concentration) * 0.9 ** np.arange(ORDER))
        growth = float(rest @ np.arange(1, ORDER + 1))
        if not growth > 1 + 1e-3:
            continue
        edge = 1 - 1 / growth
        zero = {1: 0.0, 3: edge, 2: generator.uniform(edge, 1), 4: generator.uniform(0, edge)}[case]
        weights = np.concatenate([[zero], (1 - zero) * rest])
        one = map_of_weights(weights, name=f"random {len(found)}")
        if one.case == case:
            found.append(one)
    return found


def iterate(one: CorrelationMap, starts: Array, depth: int) -> Array:
    """ρ_0 … ρ_depth from each start: (depth + 1, starts)."""
    path = [np.asarray(starts, dtype=np.float64)]
    for _ in range(depth):
        path.append(np.clip(one.kappa(path[-1]), -1.0, 1.0))
    return np.array(path)


def grid(count: int = 81) -> Array:
    """Starts in (−1, 1), dense near both ends, without 0."""
    half = 1 - np.geomspace(1e-3, 0.98, count // 2)
    return np.concatenate([-half, half])


def worst_over_bound(
    one: CorrelationMap, rate: float, *, depth: int, starts: Array | None = None, form: str = "potential"
) -> float:
    """The largest ratio of a sequence to its bound over starts and layers, where the bound is above rounding.

    Args:
        form: "potential" for |ρ|/(1 − |ρ|) ≤ α^ℓ|ρ_0|/(1 − |ρ_0|), "value" for |ρ| below the same, "one" for
            1 − ρ ≤ α^ℓ(1 − ρ_0), "algebraic" for (5.9) and "point" for (5.10).
    """
    path = iterate(one, grid() if starts is None else starts, depth)
    origin, layers = path[0], np.arange(depth + 1)[:, None]
    inverse = 1 / (1 - np.abs(origin))
    if form in ("potential", "value"):
        bound = np.abs(origin) * inverse * rate**layers
        actual = np.abs(path) / (1 - np.abs(path)) if form == "potential" else np.abs(path)
    elif form == "point":
        bound = np.abs(origin - one.fixed_point) * inverse * rate**layers
        actual = np.abs(path - one.fixed_point)
    else:
        bound = (1 - origin) * rate**layers if form == "one" else (1 - origin) / (1 + layers * rate * (1 - origin))
        actual = 1 - path
    return float(np.max(np.where(bound > RESOLVED, actual / np.maximum(bound, RESOLVED), 0.0)[1:]))


def walk_pair(
    values: Mapping[str, Any], context: Context, activation: Any, *, norm: str, depth: int, offset: int
) -> tuple[Array, Array]:
    """The cosine of two samples over depth in random networks of finite width: mean over runs and its half interval.

    Args:
        norm: "pre-rms", "post-rms", "pre-ln" or "post-ln".
    """
    place, _, kind = norm.partition("-")
    start, width, runs = (values[name] for name in ("start", "width", "runs"))
    batch = torch.zeros(2, width, dtype=torch.float64)
    batch[0, 0], batch[1, 0], batch[1, 1] = 1.0, start, np.sqrt(1 - start**2)
    found = simulate(
        width=width,
        batch_size=2,
        depth=depth,
        runs=runs,
        measures=["mean_cosine"],
        profile=True,
        activation=activation,
        norm={"rms": "rms", "ln": "layer"}[kind],
        placement={"pre": "before", "post": "after"}[place],
        input=batch * np.sqrt(width),
        generator=context.generator(offset),
        dtype="float64",
    )
    rows = [row for row in found.profile if row.measure == "mean_cosine"]
    return np.array([row.value for row in rows]), student(runs - 1) * np.array([row.stderr or 0.0 for row in rows])
