"""Figures 5.1 and 5.2: the fixed-point iteration of kernel maps, one activation for each case of Theorem 5.11."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.polynomial import hermite_e

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, apart_from, exact, highest, scaled
from sounding.claims.picture import Panel, Picture, Series
from sounding.claims.thesis2024.convergence import algebraic_exponent
from sounding.claims.thesis2024.correlation_maps import CorrelationMap, grid, iterate, map_of, map_of_weights, walk_pair
from sounding.encoding import fields_of
from sounding.theory.bounds.kernel_maps import theorem_5_11


def polynomial_activation(weights: Array) -> Callable[[Any], Any]:
    """x ↦ Σ √p_k h_k(x), h_k the normalized Hermite polynomials: the activation whose κ is Σ p_k ρ^k."""
    scaled = [math.sqrt(weight / math.factorial(order)) for order, weight in enumerate(weights)]
    plain = [float(c) for c in hermite_e.herme2poly(scaled)]

    def activation(x: Any) -> Any:
        total = 0.0 * x + plain[-1]
        for coefficient in reversed(plain[:-1]):
            total = total * x + coefficient
        return total

    return activation


def distance_of(one: CorrelationMap, start: float, depth: int) -> Array:
    """|ρ_ℓ − ρ*| over depth."""
    return np.abs(iterate(one, np.array([start]), depth)[:, 0] - one.fixed_point)


def local_rate(one: CorrelationMap, start: float) -> Number:
    """The factor per layer of |ρ_ℓ − ρ*|, where it is between 1e-4 and 1e-7: small, and far above rounding."""
    far = distance_of(one, start, 2000)
    inside = np.flatnonzero((far < 1e-4) & (far > 1e-7))
    first, middle, last = inside[0], inside[len(inside) // 2], inside[-1]
    early, late = ((far[b] / far[a]) ** (1 / (b - a)) for a, b in ((first, middle), (middle, last)))
    # the local factor tends to its limit: the later half is nearer than the two halves are to each other
    return exact(float(late), error=abs(float(late - early)))


def draw_case(
    one: CorrelationMap, activation: Any, values: Mapping[str, Any], context: Context, *, offset: int, title: str
) -> tuple[Panel, Number]:
    """|ρ_ℓ − ρ*| over depth: networks of finite width, κ, and the corrected bound; and the networks' deviation."""
    start, depth = values["start"], values["depth"]
    layers = np.arange(depth + 1)
    path = iterate(one, np.array([start]), depth)[:, 0]
    numbers = fields_of(one, "slope_zero slope_one fixed_point slope_fixed_point")
    bound = theorem_5_11(kappa_zero=one.zero, **numbers, start=start, depth=depth)
    limit = bound.curve / (1 + bound.curve) if one.case == 1 else bound.curve
    far = np.abs(path - one.fixed_point)
    kept = far > 1e-8
    series = [
        Series("κ", layers[kept], far[kept], role="theory"),
        Series("Theorem 5.11, corrected", layers, limit, role="bound"),
    ]
    deviation = exact(0.0)
    if activation is not None:
        mean, half = walk_pair(values, context, activation, norm="pre-rms", depth=depth, offset=offset)
        seen = np.abs(mean - one.fixed_point) > 2 * half
        seen &= layers % 3 == 0
        series.insert(0, Series("networks", layers[seen], np.abs(mean - one.fixed_point)[seen], error=half[seen]))
        deviation = apart_from(path, mean, half, samples=values["runs"])
    return Panel("layer ℓ", "|ρ_ℓ − ρ*|", series, y_scale="log", title=title), deviation


def measure_figure(values: Mapping[str, Any], context: Context) -> Outcome:
    """Each case's sequence: where it ends from every start, how fast, and whether networks follow."""
    numbers: dict[str, Number] = {}
    panels, curves, deviations = [], [], []
    rho = np.linspace(-1, 1, 31)
    for index, (label, spec) in enumerate(values["maps"].items()):
        one = map_of(spec) if isinstance(spec, str) else map_of_weights(np.array(spec), name=label)
        activation = spec if isinstance(spec, str) else polynomial_activation(np.array(spec))
        walked = None if label in values.get("not_walked", ()) else activation
        numbers[f"{label}_zero"] = exact(one.zero, error=1e-9)
        numbers[f"{label}_slope_one"] = exact(one.slope_one, error=1e-9)
        end = np.abs(iterate(one, grid(), values["far"])[-1] - one.fixed_point).max()
        numbers[f"{label}_farthest_end"] = exact(float(end), error=1e-9)
        if one.case == 3:
            numbers[f"{label}_exponent"] = algebraic_exponent(one, values["start"], first=1000, last=10000)
        else:
            numbers[f"{label}_rate_over_slope"] = scaled(local_rate(one, values["start"]), 1 / one.slope_fixed_point)
        kind = f"case {one.case}" if label.startswith("case") else f"{label}, case {one.case}"
        title = f"{kind}: ρ* = {one.fixed_point:.4g}"
        panel, deviation = draw_case(one, walked, values, context, offset=index, title=title)
        panels.append(panel)
        deviations.append(deviation)
        curves.append(Series(f"{label} (κ)", rho, one.kappa(rho), role="theory"))
    numbers["chain_deviation"] = highest(deviations)
    curves.append(Series("ρ", [-1, 1], [-1, 1], role="bound"))
    maps = Panel("correlation ρ", "κ(ρ)", curves, title="kernel maps")
    return Outcome(numbers, Picture((maps, *panels), values["caption"]))
