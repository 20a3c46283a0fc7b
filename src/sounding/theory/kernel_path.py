"""The sequence ρ, κ(ρ), κ(κ(ρ)), … of a kernel map over depth, and its bound (thesis2024, chapter 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.polynomial import chebyshev

from sounding.activations import ActivationLike
from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.theory.bounds.bound import Version, check_integer
from sounding.theory.bounds.kernel_maps import Norm, decay
from sounding.theory.kernel import Kernel, Neuron, check_correlation, kappa, kernel, normalized

DIRECT = 64  # up to so many layers each is integrated by itself: about as many integrals as the series takes
SIZES = (17, 33, 65, 129)  # Chebyshev points, doubled until the last coefficients are below the tolerance


@dataclass(frozen=True)
class Interpolant:
    """κ as a Chebyshev series in the angle θ = arccos ρ ∈ [0, π]."""

    # in θ even kinked activations have a smooth map: for ReLU κ = (sin θ + (π − θ) cos θ)/π
    coefficients: tuple[float, ...]
    error: float

    def __call__(self, rho: float) -> float:
        """κ(ρ) from the series."""
        unit = 2 * math.acos(min(max(rho, -1.0), 1.0)) / math.pi - 1
        return float(chebyshev.chebval(unit, np.array(self.coefficients)))


def interpolate(neuron: Neuron) -> Interpolant:
    """A series for κ whose last coefficients are below 1e-12, or the best of 129 terms, with its error."""
    value = cache(lambda unit: kappa(neuron, math.cos(0.5 * math.pi * (1 + unit))).value)
    units = -np.cos(math.pi * np.arange(SIZES[-1]) / (SIZES[-1] - 1))
    for size in SIZES:
        chosen = units[:: (SIZES[-1] - 1) // (size - 1)].tolist()  # every other point is the coarser set
        coefficients = chebyshev.chebfit(chosen, [value(unit) for unit in chosen], size - 1)
        # a square root, as of relu_power:0.5, leaves a term θ² ln θ that converges slowly: 129 terms give 1e-9 there
        error = float(np.abs(coefficients[-max(4, size // 8) :]).max())
        if error <= 1e-12:
            break
    return Interpolant(tuple(coefficients.tolist()), error * size / 8 + 1e-14)


def sequence(activation: ActivationLike, rho: float, *, depth: int, norm: Norm = "none") -> Profile:
    """ρ_0 = rho and ρ_ℓ = κ(ρ_{ℓ−1}) for ℓ = 1 … depth, as a profile of `mean_cosine` (thesis2024, eq. 5.4).

    The cosine of two samples' features after each layer, 0 the input. Beyond 64 layers κ is interpolated in the angle
    arccos ρ, with the error in the profile's settings.

    >>> path = sequence("hermite:2", 0.5, depth=3)
    >>> [round(row.value, 10) for row in path]
    [0.5, 0.25, 0.0625, 0.00390625]
    """
    start, layers = check_correlation(rho), check_integer(depth, name="depth", least=0)
    neuron = normalized(activation, norm)
    series = interpolate(neuron) if layers > DIRECT else None
    error = 1e-12 if series is None else series.error
    values = [start]
    for _ in range(layers):
        following = kappa(neuron, values[-1]).value if series is None else series(values[-1])
        # 1 is a fixed point of every kernel map, and rounding must not push an identical pair off it
        values.append(1.0 if values[-1] == 1.0 else min(max(following, -1.0), 1.0))
    settings = {"activation": neuron.activation.name, "norm": norm, "rho": start, "error": error}
    return Profile.over_depth({"mean_cosine": values}, settings)


def bound(
    activation: ActivationLike | Kernel, rho: float, *, depth: int, norm: Norm = "none", version: Version = "corrected"
) -> Profile:
    """An upper bound on |ρ_ℓ − ρ*| for ℓ = 0 … depth, as a profile of `mean_cosine_distance_bound`.

    Case by case as `bounds.kernel_maps.theorem_5_11` has it, with α the `rate` of the kernel; in case 1 it is p/(1 + p)
    for the bound p of |ρ|/(1 − |ρ|), and in case 4 at most 1 + ρ*, the largest distance there is.

    >>> tanh = bound("tanh", 0.5, depth=2)
    >>> [round(row.value, 6) for row in tanh]
    [0.5, 0.483201, 0.466441]
    """
    start, layers = check_correlation(rho), check_integer(depth, name="depth", least=0)
    if version not in ("corrected", "printed"):
        raise UsageError(f"expected the version corrected or printed, got {version!r}")
    known = activation if isinstance(activation, Kernel) else kernel(activation, norm)
    rate = known.rate if version == "corrected" else known.rate_printed
    if known.algebraic_rate is not None:
        rate = known.algebraic_rate  # in case 3 distances shrink like 1/ℓ, and both versions agree
    with np.errstate(all="ignore"):
        values = decay(known.case, rate, start=start, fixed_point=known.fixed_point, layers=layers)
        if known.case == 1:
            values = np.where(np.isinf(values), 1.0, values / (1 + values))
        elif known.case == 4:
            values = np.minimum(values, 1 + known.fixed_point)
    settings = {"activation": known.activation, "norm": known.norm, "rho": start, "version": version}
    return Profile.over_depth({"mean_cosine_distance_bound": values}, settings)
