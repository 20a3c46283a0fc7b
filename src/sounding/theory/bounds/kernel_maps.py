"""thesis2024, chapter 5: how fast the correlation of two samples converges under a kernel map, ρ ↦ κ(ρ).

κ(ρ) = Σ c_k²ρ^k with the Hermite coefficients of an activation scaled to E φ² = 1, so κ(1) = 1. The functions take
κ's numbers; `kappa`, a callable, adds the true sequence as `actual`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.theory.bounds.bound import Assumption, Bound, Version, check_integer, check_number, state

KernelMap = Callable[[float], float]
Norm = Literal["none", "pre-rms", "post-rms", "pre-ln", "post-ln"]
NORMS: tuple[Norm, ...] = get_args(Norm)

# κ′(1) = 1 exactly for positively homogeneous activations and exp; quadrature gives it to about 1e-10, so that cases
# are told apart with room to spare
_EDGE = 1e-8


def potential(correlation: float) -> float:
    """|ρ|/(1 − |ρ|), what contracts in Theorem 5.8; infinite at ±1."""
    return abs(correlation) / (1 - abs(correlation)) if abs(correlation) < 1 else math.inf


def theorem_5_8(
    slope_zero: float, *, start: float, depth: int, kappa: KernelMap | None = None, kappa_zero: float = 0.0
) -> Bound:
    """A centred activation sends correlations to 0: |ρ_ℓ|/(1 − |ρ_ℓ|) ≤ α^ℓ|ρ_0|/(1 − |ρ_0|), α = 1/(2 − κ′(0)).

    thesis2024 Theorem 5.8, eq. (5.6). Right as printed; Remark 5.9 means κ′(0) where it says κ′(1).

    Args:
        slope_zero: κ′(0) = c_1², in [0, 1].
        start: ρ_0.
    """
    rate, assumptions = _centred(slope_zero, kappa_zero)
    return _contraction("thesis2024-theorem5.8", rate, assumptions, start=start, depth=depth, kappa=kappa)


def corollary_5_10(
    slope_zero: float, *, start: float, depth: int, kappa: KernelMap | None = None, kappa_zero: float = 0.0
) -> Bound:
    """A geometric bound on ρ itself, |ρ_ℓ| ≤ α^ℓ|ρ_0|/(1 − |ρ_0|) (thesis2024 Corollary 5.10; ρ_0 needs a modulus)."""
    rate, assumptions = _centred(slope_zero, kappa_zero)
    # |ρ| ≤ |ρ|/(1 − |ρ|), so the bound of Theorem 5.8 holds for it
    return _contraction(
        "thesis2024-corollary5.10", rate, assumptions, start=start, depth=depth, kappa=kappa, bounded=abs
    )


def _centred(slope_zero: float, kappa_zero: float) -> tuple[float, tuple[Assumption, ...]]:
    """The rate of Theorem 5.8 and what it assumes of the activation."""
    slope = check_number(slope_zero, name="slope_zero", least=0.0, most=1.0)
    return 1 / (2 - slope), (
        Assumption("the activation is centred, κ(0) = 0", abs(kappa_zero) < _EDGE, f"κ(0) = {kappa_zero:.4g}"),
        Assumption("the activation is not linear, κ′(0) < 1", slope < 1, f"κ′(0) = {slope:.6g}"),
    )


def theorem_5_11(
    *,
    kappa_zero: float,
    slope_zero: float,
    slope_one: float,
    fixed_point: float,
    slope_fixed_point: float,
    start: float,
    depth: int,
    kappa: KernelMap | None = None,
    version: Version = "corrected",
) -> Bound:
    """Any activation sends correlations to one fixed point ρ*; the rate in its four cases (thesis2024 Theorem 5.11).

    1. κ(0) = 0: ρ* = 0, |ρ|/(1 − |ρ|) contracts by 1/(2 − κ′(0)); printed 1/κ′(1) (5.7), false for tanh, SELU, sin.
    2. κ(0) > 0, κ′(1) < 1: ρ* = 1, 1 − ρ contracts by κ′(1) (5.8).
    3. κ(0) > 0, κ′(1) = 1: ρ* = 1, 1 − ρ_ℓ ≤ x_0/(1 + ℓαx_0), x_0 = 1 − ρ_0, α = 1 − κ(0) − κ′(0) (5.9). ReLU and
       every positively homogeneous activation are here (Figure 5.2 says case 2); for ReLU the true speed is 1/ℓ².
    4. κ(0) > 0, κ′(1) > 1: ρ* in (0, 1), |ρ_ℓ − ρ*| ≤ α^ℓ|ρ_0 − ρ*|/(1 − |ρ_0|), α = max{1 − κ(0), 1/(2 − κ′(ρ*))};
       printed max{1 − κ(0), κ′(ρ*), (1 − ρ*)/(2 − κ′(ρ*))} (5.10), false for κ(ρ) = 0.9 + 0.1ρ³⁰ near ρ_0 = 1.
    """
    zero = check_number(kappa_zero, name="kappa_zero", least=-_EDGE, most=1.0)
    slope0 = check_number(slope_zero, name="slope_zero", least=-_EDGE, most=1.0 + _EDGE)
    slope1 = check_number(slope_one, name="slope_one", least=0.0)
    target = check_number(fixed_point, name="fixed_point", least=-_EDGE, most=1.0 + _EDGE)
    slope = check_number(slope_fixed_point, name="slope_fixed_point", least=0.0)
    origin = check_number(start, name="start", least=-1.0, most=1.0)
    layers = check_integer(depth, name="depth", least=0)
    case = kernel_case(zero, slope1)
    rate = 1 - zero - slope0
    if case != 3:
        rate = case_rate(case, zero, slope0, slope1, fixed_point=target, slope=slope, version=version)
    seen: KernelMap = {1: potential, 4: lambda rho: abs(rho - target)}.get(case, lambda rho: 1 - rho)
    return state(
        "thesis2024-theorem5.11",
        decay(case, rate, start=origin, fixed_point=target, layers=layers),
        case=case,
        actual=None if kappa is None else seen(_last(kappa, origin, layers)),
        version=version,
        assumptions=(Assumption("the activation is not linear", slope0 < 1, f"κ′(0) = {slope0:.6g}"), _inside(origin)),
        values={"case": float(case), "rate": rate, "fixed_point": target},
    )


def kernel_case(kappa_zero: float, slope_one: float) -> int:
    """The case of Theorem 5.11: 1 for κ(0) = 0, else 2, 3, 4 for κ′(1) below, at, above 1."""
    if abs(kappa_zero) < _EDGE:
        return 1
    if abs(slope_one - 1) < _EDGE:
        return 3
    return 2 if slope_one < 1 else 4


def case_rate(
    case: int, zero: float, slope_zero: float, slope_one: float, *, fixed_point: float, slope: float, version: Version
) -> float:
    """α of a case of Theorem 5.11, corrected or as printed; 1 in case 3, which is slower than any rate."""
    printed = version == "printed"
    if case == 1:
        if printed:
            return 1 / slope_one if slope_one > 0 else math.inf
        return 1 / (2 - min(slope_zero, 1.0))  # rounding may leave κ′(0) of a linear activation above 1
    if case in (2, 3):
        return slope_one if case == 2 else 1.0
    return max(1 - zero, slope, (1 - fixed_point) / (2 - slope)) if printed else max(1 - zero, 1 / (2 - slope))


def decay(case: int, rate: float, *, start: float, fixed_point: float, layers: int) -> Array:
    """The bound of each case of Theorem 5.11 over layers 0 … `layers`, on what that case bounds."""
    levels = np.arange(layers + 1)
    if case == 3:
        return np.asarray((1 - start) / (1 + levels * rate * (1 - start)))
    if case == 4:
        first = abs(start - fixed_point) / (1 - abs(start)) if abs(start) < 1 else math.inf
    else:
        first = potential(start) if case == 1 else 1 - start
    return np.asarray(first * rate**levels)


def theorem_5_15(
    *,
    second_moment: float,
    squared_mean: float,
    slope_zero: float,
    slope_one: float,
    norm: Norm = "none",
    start: float,
    depth: int,
    kappa: KernelMap | None = None,
    version: Version = "corrected",
) -> Bound:
    """The contraction of Theorem 5.8 with a normalization layer (thesis2024 Theorem 5.15, eq. 5.14).

    With κ of the unscaled activation and K = κ(1) − κ(0) = E φ² − (E φ)²: rate K/(2K − κ′(0)); printed K/κ′(1), false
    for tanh, SELU, sin and, post layer norm, for ReLU, leaky ReLU, sigmoid, ELU. Needs E φ = 0 except after post layer
    norm, and E φ² = 1 without a norm.

    Args:
        second_moment, squared_mean: κ(1) = E φ² and κ(0) = (E φ)².
        slope_zero, slope_one: κ′(0), κ′(1) of the unscaled activation.
        kappa: the kernel map of the *normalized* activation, for `actual`.
    """
    if norm not in NORMS:
        raise UsageError(f"expected a norm among {', '.join(NORMS)}, got {norm!r}")
    total = check_number(second_moment, name="second_moment", least=0.0)
    zero = check_number(squared_mean, name="squared_mean", least=0.0, most=total * (1 + _EDGE))
    spread = total - zero
    if spread <= 0:
        raise UsageError("expected an activation that is not constant, got E φ² = (E φ)²")
    centred = Assumption("the activation is centred", zero < _EDGE * total, f"(E φ)² = {zero:.4g}")
    unit = Assumption("E φ² = 1", abs(total - 1) < _EDGE, f"E φ² = {total:.6g}")
    needed = {"none": (centred, unit), "post-ln": ()}.get(norm, (centred,))
    linear = Assumption("the activation is not linear", slope_zero < spread * (1 - _EDGE), f"κ′(0) = {slope_zero:.4g}")
    rate = spread / slope_one if version == "printed" else spread / (2 * spread - slope_zero)
    return _contraction(
        "thesis2024-theorem5.15", rate, (*needed, linear), start=start, depth=depth, kappa=kappa, version=version
    )


def _contraction(
    name: str,
    rate: float,
    assumptions: tuple[Assumption, ...],
    *,
    start: float,
    depth: int,
    kappa: KernelMap | None,
    bounded: KernelMap = potential,
    version: Version = "corrected",
) -> Bound:
    """The bound rate^ℓ·|ρ_0|/(1 − |ρ_0|) on a function of the last correlation."""
    origin = check_number(start, name="start", least=-1.0, most=1.0)
    layers = check_integer(depth, name="depth", least=0)
    return state(
        name,
        potential(origin) * rate ** np.arange(layers + 1),
        actual=None if kappa is None else bounded(_last(kappa, origin, layers)),
        version=version,
        assumptions=(*assumptions, _inside(origin)),
        values={"rate": rate},
    )


def _inside(start: float) -> Assumption:
    return Assumption("the start is inside (−1, 1)", abs(start) < 1, f"ρ_0 = {start:g}")


def _last(kappa: KernelMap, start: float, layers: int) -> float:
    """ρ_layers of ρ_0 = start and ρ_ℓ = κ(ρ_{ℓ−1})."""
    rho = start
    for _ in range(layers):
        rho = float(kappa(rho))
    return rho
