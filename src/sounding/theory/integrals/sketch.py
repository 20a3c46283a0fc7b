"""The map of μ for every law of a batch size at once: where its fixed point lies, before it is computed to all digits.

In polar form, x₁ = T cos ψ and x₂ = T cos(ψ − ω) with cos ω = −1/(B−1), the map is

    F(μ/eps) = ∫ w(T) m(T) dT,  m(T) = ½ Σ_{k≥1} f_k(T)² (1 − cos kω)

with the cosine coefficients f_k of φ(T cos ψ), and only the weight w knows μ and eps. So φ is evaluated once, on fixed
circles, and F costs a sum over their radii: it can be scanned over all of η. Where φ is smooth on its circles the sum
is exact; a kink leaves some 1e-6, and what the samples do not resolve is averaged as by Monte Carlo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.fft import dct

from sounding.activations.activation import Array
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.panels import composite

_ORDER = 12  # nodes of a panel in the radius: with these panels a wave of frequency 30 is resolved
_SAMPLES = 384  # of half a circle: kinks leave 1e-6 of F, which a later step takes off
_WIDEST, _FAR_WIDEST = 0.5, 2.0  # panels in T, before and beyond where the law of a bounded φ ends
_BULK = 9.0  # standard deviations beyond which a bounded φ adds nothing
_SMALLEST = 1e-4  # radius, and distance from the last one in the angle
_WEIGHTLESS = 1e-14  # of the law next to the edge of the sphere: no panels are needed there
# the last coefficients of a circle that count as rounding, the waves that the radii may miss (their squares are below
# rounding), and the circle on which waves are counted
_RESOLVED, _UNSEEN, _TYPICAL = 1e-13, 1e-6, 3.0


@dataclass(frozen=True)
class Sketch:
    """F of one activation and batch size: m at Gauss nodes of panels in χ, T = √(B−1) sin χ, (panels, order) each."""

    chi: Array
    step: Array
    means: Array
    resolved: bool  # whether the circles that matter hold φ to rounding; then F is as exact

    @classmethod
    @lru_cache(maxsize=64)  # no eps changes it, and a search for one asks for the same sketch at every step
    def of(cls, affine: Affine, batch_size: float) -> Sketch:
        """On circles that resolve any law of this batch size."""
        reach = math.sqrt(batch_size - 1.0)
        chi, step = composite(_edges(reach), _ORDER)
        radius, omega = reach * np.sin(chi), math.acos(-1.0 / (batch_size - 1.0))
        y = affine.scale * radius[..., None] * np.cos(math.pi * (np.arange(_SAMPLES) + 0.5) / _SAMPLES) + affine.shift
        with np.errstate(all="ignore"):  # far out a growing φ may leave float64, where the law has no weight
            series = np.asarray(dct(affine.rise(y), type=2, axis=-1)) / _SAMPLES  # the cosine coefficients, from k = 0
            means = 0.5 * (series * series) @ (1.0 - np.cos(omega * np.arange(_SAMPLES)))
        return cls(chi, step, means, _resolved(np.abs(series), radius))

    def spread(self, law: NormalizedLaw) -> float:
        """F at one law."""
        return float((law.radial_weight(self.chi, 0) * self.means * self.step).sum())


def _resolved(series: Array, radius: Array) -> bool:
    """Whether the circles of the bulk hold φ to rounding, and the radii the squares of its waves."""
    near = radius < _BULK
    largest = float(series.max(where=near[..., None], initial=0.0))
    if not float(series[..., -_SAMPLES // 16 :].max(where=near[..., None], initial=0.0)) <= _RESOLVED * largest:
        return False
    circle = series.reshape(-1, _SAMPLES)[int(np.abs(radius - _TYPICAL).argmin())]
    waves = int(_ORDER * min(_TYPICAL, float(radius.max())) / _WIDEST / 2)
    return bool(circle[waves:].max(initial=0.0) <= _UNSEEN * circle.max())


def _edges(reach: float) -> Array:
    """In χ: geometric towards 0 and, for the layer of a small eps, towards π/2; no wider than a wave of φ may ask."""
    halvings = 0.5 ** np.arange(math.ceil(-math.log2(_SMALLEST)))
    bulk, far = np.arange(1 + _WIDEST, _BULK, _WIDEST), np.arange(_BULK, reach, _FAR_WIDEST)
    radii = np.concatenate([halvings[::-1], bulk, far])
    layer = 0.5 * (math.pi - halvings[halvings ** (reach**2 - 2.0) > _WEIGHTLESS])
    return np.unique(np.concatenate([[0.0], np.arcsin(radii[radii < reach] / reach), layer, [0.5 * math.pi]]))
