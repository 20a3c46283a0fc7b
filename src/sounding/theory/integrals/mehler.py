"""Gaussian pair expectations one coordinate after the other, for correlations close to ±1.

Y = ρX + √(1−ρ²)·W with W independent of X. Near ρ = ±1 the kinks of h(X, ·) and h(·, Y) nearly coincide and a rule that
treats the plane as a whole needs millions of points where they run side by side; taken in turn, each kink is one edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sounding.activations.activation import Array
from sounding.theory.integrals.panels import HIGH_ORDER, LOW_ORDER, composite, integrate, interval
from sounding.theory.integrals.quadrature import Integral, JointFunction

# up to 38, where the density leaves float64; panels as wide as two orders agree on where the Gaussian has its weight
_INNER_EDGES = np.array([-38.0, -20.0, -13.0, -9.5, -7.0, -5.0, -3.5, -2.0, -1.0, 0.0, 1.0, 2.0, 3.5, 5.0, 7.0, 9.5])
_INNER = np.concatenate([_INNER_EDGES, -_INNER_EDGES[2::-1]])


def nested_mean(
    h: JointFunction,
    correlation: float,
    *,
    kinks: tuple[Sequence[float], Sequence[float]] = ((), ()),
    length: float = 1.0,
    center: float = 0.0,
    tolerance: float = 1e-12,
) -> Integral:
    """E h(X, Y) for standard Gaussian X, Y with the given correlation; h is smooth except on the lines of `kinks`.

    The inner mean over W has panel edges where ρx + √(1−ρ²)W meets a kink, at two orders whose difference counts as
    error; the outer is adaptive, with edges at the kinks of X and ladders around those of Y, where the inner mean
    turns over a distance of √(1−ρ²).
    """
    free = math.sqrt((1 - correlation) * (1 + correlation))
    ladder = [4.0**j for j in range(-1, 12)]
    turning = [kink / correlation for kink in kinks[1]] if correlation else []
    soft = [place + sign * free * rung for place in turning for rung in ladder for sign in (1, -1)]
    if length < 1.0:
        soft += [center + sign * length * rung for rung in ladder for sign in (1, -1)]
    soft += [*turning, *_INNER.tolist()]
    calls = 0

    def outer(x: Array) -> Array:
        nonlocal calls
        density = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
        rows = []
        for order in (HIGH_ORDER, LOW_ORDER):
            w, weight = _inner_rule(x, correlation, free, kinks[1], order)
            calls += w.size
            values = h(np.broadcast_to(x[:, None], w.shape), correlation * x[:, None] + free * w)
            rows.append((values * weight).sum(axis=1) * density)
        return np.stack(rows)

    panels = interval(-38.0, 38.0, kinks=kinks[0], edges=soft)
    adapted = integrate(outer, panels, tolerance=tolerance, what="the inner mean")
    return Integral(
        float(adapted.values[0]), float(adapted.errors[0] + abs(adapted.values[0] - adapted.values[1])), calls
    )


def _inner_rule(x: Array, correlation: float, free: float, kinks: Sequence[float], order: int) -> tuple[Array, Array]:
    """Nodes w and weights of the standard Gaussian, (x.size, n) each, with edges where ρx + free·w is a kink."""
    edges = np.broadcast_to(_INNER, (x.size, _INNER.size))
    if kinks:
        moved = (np.asarray(kinks)[None, :] - correlation * x[:, None]) / free
        edges = np.sort(np.concatenate([edges, np.clip(moved, _INNER[0], _INNER[-1])], axis=1), axis=1)
    w, step = composite(edges, order)
    density = np.exp(-0.5 * w**2) / math.sqrt(2 * math.pi)
    return w.reshape(x.size, -1), (step * density).reshape(x.size, -1)
