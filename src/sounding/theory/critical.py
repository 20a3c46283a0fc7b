"""The edge of chaos of a network without normalization, and its phases on a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from sounding.activations import Activation, ActivationLike, resolve
from sounding.activations.activation import Array
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.theory.length import NOISE, LengthTable, moment_slope, second_moment, squared_slope, tabulate
from sounding.theory.vanilla import check_stds, first_chi, phase_of, settle


@dataclass(frozen=True)
class Critical:
    """The weight standard deviation at which χ₁ = 1, where signals reach deepest.

    Args:
        weight_std: σ_w, or None when no weight makes χ₁ = 1 at a variance that attracts.
        variance: q* there; 0 is the limit of vanishing signals, infinity a variance that keeps growing.
        note: what is unusual about it, or why there is none.
    """

    activation: str
    bias_std: float
    weight_std: float | None
    variance: float | None
    note: str = ""
    error: float = 0.0

    @property
    def exists(self) -> bool:
        """Whether there is an edge of chaos."""
        return self.weight_std is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain types under the names of `sounding predict critical --json`."""
        return fields_of(self, "activation bias_std weight_std variance exists note error")

    def __str__(self) -> str:
        head = f"Critical({self.activation}, σ_b {self.bias_std:g})"
        tail = f" ({self.note})" if self.note else ""
        if self.weight_std is None:
            return f"{head}: no edge of chaos{tail}"
        return f"{head}: σ_w {self.weight_std:.9g} at variance {self.variance:.6g}{tail}"


@dataclass(frozen=True)
class PhaseDiagram:
    """Phases over a grid of weight and bias standard deviations; arrays are (biases, weights).

    `variance` and `chi_1` are as in `Vanilla`; `phase` holds "ordered", "critical" or "chaotic".
    """

    activation: str
    weight_stds: tuple[float, ...]
    bias_stds: tuple[float, ...]
    variance: Array
    chi_1: Array
    phase: NDArray[np.str_]

    def to_dict(self) -> dict[str, Any]:
        """Plain types, rows by bias."""
        return fields_of(self, "activation weight_stds bias_stds variance chi_1 phase")


def critical(activation: ActivationLike, *, bias_std: float = 0.0) -> Critical:
    """The σ_w at which χ₁ = σ_w² E φ′(√q* z)² = 1 for a bias standard deviation σ_b: the edge of chaos.

    Poole et al. 2016 and Schoenholz et al. 2017, on which meanfield2019 builds. On the edge σ_w² = 1/E φ′² and q = σ_w²
    E φ² + σ_b², so q solves q − E φ²/E φ′² = σ_b². Where σ_b = 0 and φ(0) = 0 it lies at vanishing variance: σ_w =
    1/√(E φ′²) as q → 0, for tanh 1, for erf √π/2. An activation of degree 1 has it at one σ_w: √2 for ReLU. Only
    variances that attract count: exp has χ₁ = 1 at a repelling variance and so no edge.

    >>> round(critical("erf").weight_std, 9), round(critical("relu").weight_std, 9)
    (0.886226925, 1.414213562)
    >>> print(critical("softplus"))
    Critical(softplus, σ_b 0): no edge of chaos (no variance q has q − E φ²/E φ′² = σ_b²)
    """
    phi = resolve(activation)
    _, bias = check_stds(1.0, bias_std)
    if phi.degree == 1.0:
        gain = squared_slope(phi, 1.0)
        note = "at every variance" if bias == 0 else "the variance grows by σ_b² per layer"
        variance = 1.0 if bias == 0 else math.inf
        return Critical(phi.name, float(bias_std), 1 / math.sqrt(gain.value), variance, note, 1e-13)
    if math.isinf(squared_slope(phi, 1.0).value):
        return Critical(phi.name, float(bias_std), None, None, "E φ′² is infinite, so χ₁ is above 1 for all weights")
    if bias == 0 and second_moment(phi, 0.0).value == 0:
        gain = squared_slope(phi, 0.0)
        if 0 < gain.value < math.inf:
            note = "in the limit of vanishing variance"
            # the variance grows at the weight of this edge: the edge holds for vanishing signals only
            if second_moment(phi, 0.01).value > 0.01 * gain.value * (1 + NOISE):
                note += "; larger variances grow there"
            return Critical(phi.name, 0.0, 1 / math.sqrt(gain.value), 0.0, note, 1e-12 + phi.derivative_error)
    candidates = _solve_edge(phi, bias)
    attracting = [(q, gain) for q, gain in candidates if abs(moment_slope(phi, q).value) < gain]
    if attracting:
        q, gain_here = attracting[0]
        error = 1e-11 + phi.derivative_error
        return Critical(phi.name, float(bias_std), 1 / math.sqrt(gain_here), q, error=error)
    note = "no variance q has q − E φ²/E φ′² = σ_b²"
    if candidates:
        q, gain_here = candidates[0]
        note = f"χ₁ = 1 only at a variance that repels, {q:.4g} with σ_w {1 / math.sqrt(gain_here):.6g}"
    return Critical(phi.name, float(bias_std), None, None, note)


def phase_diagram(
    activation: ActivationLike, weight_stds: Sequence[float], *, bias_stds: Sequence[float], start: float = 1.0
) -> PhaseDiagram:
    """Variance, χ₁ and phase at every pair of weight and bias standard deviation.

    >>> phase_diagram("tanh", [0.5, 2.0], bias_stds=[0.1]).phase.tolist()
    [['ordered', 'chaotic']]
    """
    phi = resolve(activation)
    if not len(weight_stds) or not len(bias_stds):
        raise UsageError("a phase diagram needs at least one weight and one bias standard deviation, got none")
    squares = [[check_stds(w, b) for w in weight_stds] for b in bias_stds]
    moments: LengthTable | None = None
    if phi.degree != 1.0:
        largest = [max(pair[i] for row in squares for pair in row) for i in (0, 1)]
        moments = tabulate(phi, weight=largest[0], bias=largest[1])
    ends = [[settle(phi, *pair, start, moments) for pair in row] for row in squares]
    variance = np.array([[end.variance for end in row] for row in ends])
    chi_1 = np.array([
        [first_chi(phi, weight, end).value for (weight, _), end in zip(pairs, row, strict=True)]
        for pairs, row in zip(squares, ends, strict=True)
    ])  # fmt: skip
    phase = np.array([[phase_of(value) for value in row] for row in chi_1.tolist()])
    return PhaseDiagram(phi.name, tuple(map(float, weight_stds)), tuple(map(float, bias_stds)), variance, chi_1, phase)


def _solve_edge(phi: Activation, bias: float) -> list[tuple[float, float]]:
    """All (q, E φ′²) with q − E φ²/E φ′² = bias, ascending in q."""
    moments = tabulate(phi, weight=1e4, bias=bias)  # σ_w up to 100, far above any edge of a useful activation
    inside = np.isfinite(moments.values)
    positions = np.log(moments.variances[inside])

    def excess(log_variance: float) -> float:
        q, slope = math.exp(log_variance), squared_slope(phi, math.exp(log_variance)).value
        return 1 - second_moment(phi, q).value / slope / q - bias / q if slope else math.nan  # a dead activation

    values = [excess(u) for u in positions]
    known = [(u, v) for u, v in zip(positions, values, strict=True) if math.isfinite(v) and abs(v) > NOISE]
    found = []
    for (low, left), (high, right) in pairwise(known):
        if (left < 0) != (right < 0):
            q = math.exp(float(brentq(excess, low, high, xtol=1e-14, rtol=1e-14)))
            found.append((q, squared_slope(phi, q).value))
    return found
