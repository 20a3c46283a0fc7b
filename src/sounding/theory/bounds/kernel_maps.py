"""thesis2024, chapter 5: how fast the correlation of two samples converges under a kernel map, ρ ↦ κ(ρ).

κ(ρ) = Σ c_k²ρ^k with the Hermite coefficients of an activation scaled to E φ² = 1, so κ(1) = 1. The functions take
κ's numbers; `kappa`, a callable, adds the true sequence as `actual`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.theory.bounds.bound import (
    Assumption,
    Bound,
    Version,
    check_integer,
    check_number,
    check_version,
    depth_profile,
)

KernelMap = Callable[[float], float]
Norm = Literal["none", "pre-rms", "post-rms", "pre-ln", "post-ln"]
NORMS: tuple[Norm, ...] = get_args(Norm)

# κ′(1) = 1 exactly for positively homogeneous activations and exp; quadrature gives it to about 1e-10
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
    slope = check_number(slope_zero, name="slope_zero", least=0.0, most=1.0)
    return _contraction(
        1 / (2 - slope),
        start=start,
        depth=depth,
        kappa=kappa,
        name="thesis2024-theorem5.8",
        source="thesis2024, Theorem 5.8, eq. (5.6)",
        statement="|ρ_ℓ|/(1 − |ρ_ℓ|) ≤ α^ℓ |ρ_0|/(1 − |ρ_0|), α = 1/(2 − κ′(0))",
        assumptions=(
            Assumption("the activation is centred, κ(0) = 0", abs(kappa_zero) < _EDGE, f"κ(0) = {kappa_zero:.4g}"),
            Assumption("the activation is not linear, κ′(0) < 1", slope < 1, f"κ′(0) = {slope:.6g}"),
        ),
    )


def corollary_5_10(
    slope_zero: float, *, start: float, depth: int, kappa: KernelMap | None = None, kappa_zero: float = 0.0
) -> Bound:
    """A geometric bound on ρ itself, |ρ_ℓ| ≤ α^ℓ|ρ_0|/(1 − |ρ_0|) (thesis2024 Corollary 5.10; ρ_0 needs a modulus)."""
    inner = theorem_5_8(slope_zero, start=start, depth=depth, kappa_zero=kappa_zero)
    sequence = _sequence(kappa, start, int(depth))
    return replace(
        inner,
        name="thesis2024-corollary5.10",
        source="thesis2024, Corollary 5.10",
        statement="|ρ_ℓ| ≤ α^ℓ |ρ_0|/(1 − |ρ_0|), α = 1/(2 − κ′(0))",
        quantity=f"|correlation| at layer {int(depth)}",
        actual=None if sequence is None else abs(float(sequence[-1])),
        erratum="printed ρ_0 needs its modulus",
        profile=depth_profile(inner.curve, measure="correlation", name="thesis2024-corollary5.10"),
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
    check_version(version)
    zero = check_number(kappa_zero, name="kappa_zero", least=-_EDGE, most=1.0)
    slope0 = check_number(slope_zero, name="slope_zero", least=-_EDGE, most=1.0 + _EDGE)
    slope1 = check_number(slope_one, name="slope_one", least=0.0)
    target = check_number(fixed_point, name="fixed_point", least=-_EDGE, most=1.0 + _EDGE)
    slope = check_number(slope_fixed_point, name="slope_fixed_point", least=0.0)
    origin = check_number(start, name="start", least=-1.0, most=1.0)
    layers = check_integer(depth, name="depth", least=0)
    case = kernel_case(zero, slope1)
    levels = np.arange(layers + 1)
    if case == 1:
        rate = 1 / slope1 if version == "printed" else 1 / (2 - slope0)
        curve, quantity = potential(origin) * rate**levels, "|ρ_ℓ|/(1 − |ρ_ℓ|)"
        statement = "|ρ_ℓ|/(1 − |ρ_ℓ|) ≤ α^ℓ |ρ_0|/(1 − |ρ_0|), α = " + (
            "1/κ′(1)" if version == "printed" else "1/(2 − κ′(0))"
        )
    elif case == 2:
        rate, quantity, statement = slope1, "1 − ρ_ℓ", "|ρ_ℓ − 1| ≤ |ρ_0 − 1| κ′(1)^ℓ"
        curve = (1 - origin) * rate**levels
    elif case == 3:
        rate, quantity = 1 - zero - slope0, "1 − ρ_ℓ"
        statement = "|ρ_ℓ − 1| ≤ x_0/(1 + ℓαx_0), x_0 = 1 − ρ_0, α = 1 − κ(0) − κ′(0)"
        curve = (1 - origin) / (1 + levels * rate * (1 - origin))
    else:
        rate = case_four_rate(zero, target, slope, version=version)
        quantity = "|ρ_ℓ − ρ*|"
        curve = (abs(origin - target) / (1 - abs(origin)) if abs(origin) < 1 else math.inf) * rate**levels
        statement = "|ρ_ℓ − ρ*| ≤ α^ℓ |ρ_0 − ρ*|/(1 − |ρ_0|), α = " + (
            "max{1 − κ(0), κ′(ρ*), (1 − ρ*)/(2 − κ′(ρ*))}" if version == "printed" else "max{1 − κ(0), 1/(2 − κ′(ρ*))}"
        )
    sequence = _sequence(kappa, origin, layers)
    actual = None
    if sequence is not None:
        last = float(sequence[-1])
        actual = {1: potential(last), 2: 1 - last, 3: 1 - last, 4: abs(last - target)}[case]
    return Bound(
        name="thesis2024-theorem5.11",
        source=f"thesis2024, Theorem 5.11 case {case}, eq. (5.{6 + case})",
        statement=statement,
        quantity=f"{quantity} at layer {layers}",
        sense="upper",
        value=float(curve[-1]),
        actual=actual,
        version=version,
        erratum={1: "(5.7) is false", 4: "(5.10): the last numerator must be 1"}.get(case, ""),
        assumptions=(
            Assumption("the activation is not linear", slope0 < 1, f"κ′(0) = {slope0:.6g}"),
            Assumption("the start is inside (−1, 1)", abs(origin) < 1, f"ρ_0 = {origin:g}"),
        ),
        values={"case": float(case), "rate": rate, "fixed_point": target},
        profile=depth_profile(curve, measure="correlation_bound", name="thesis2024-theorem5.11"),
    )


def kernel_case(kappa_zero: float, slope_one: float) -> int:
    """The case of Theorem 5.11: 1 for κ(0) = 0, else 2, 3, 4 for κ′(1) below, at, above 1."""
    if abs(kappa_zero) < _EDGE:
        return 1
    if abs(slope_one - 1) < _EDGE:
        return 3
    return 2 if slope_one < 1 else 4


def case_four_rate(kappa_zero: float, fixed_point: float, slope: float, *, version: Version = "corrected") -> float:
    """α of (5.10): max{1 − κ(0), 1/(2 − κ′(ρ*))}, or as printed."""
    if version == "printed":
        return max(1 - kappa_zero, slope, (1 - fixed_point) / (2 - slope))
    return max(1 - kappa_zero, 1 / (2 - slope))


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
        second_moment: κ(1) = E φ².
        squared_mean: κ(0) = (E φ)².
        slope_zero, slope_one: κ′(0), κ′(1) of the unscaled activation.
        kappa: the kernel map of the *normalized* activation, for `actual`.
    """
    if norm not in NORMS:
        raise UsageError(f"expected a norm among {', '.join(NORMS)}, got {norm!r}")
    check_version(version)
    total = check_number(second_moment, name="second_moment", least=0.0)
    zero = check_number(squared_mean, name="squared_mean", least=0.0, most=total * (1 + _EDGE))
    spread = total - zero
    if spread <= 0:
        raise UsageError("expected an activation that is not constant, got E φ² = (E φ)²")
    centred = Assumption("the activation is centred", zero < _EDGE * total, f"(E φ)² = {zero:.4g}")
    unit = Assumption("E φ² = 1", abs(total - 1) < _EDGE, f"E φ² = {total:.6g}")
    needed = {"none": (centred, unit), "post-ln": ()}.get(norm, (centred,))
    linear = Assumption("the activation is not linear", slope_zero < spread * (1 - _EDGE), f"κ′(0) = {slope_zero:.4g}")
    return _contraction(
        spread / slope_one if version == "printed" else spread / (2 * spread - slope_zero),
        start=start,
        depth=depth,
        kappa=kappa,
        name="thesis2024-theorem5.15",
        source="thesis2024, Theorem 5.15, eq. (5.14)",
        statement="|ρ_ℓ|/(1 − |ρ_ℓ|) ≤ α^ℓ |ρ_0|/(1 − |ρ_0|), α = "
        + ("K/κ′(1)" if version == "printed" else "K/(2K − κ′(0)), K = κ(1) − κ(0)"),
        assumptions=(*needed, linear),
        version=version,
        erratum="(5.14) with κ′(1) is false; with K = κ(1) − κ(0) the rate is K/(2K − κ′(0))",
    )


def _contraction(
    rate: float,
    *,
    start: float,
    depth: int,
    kappa: KernelMap | None,
    name: str,
    source: str,
    statement: str,
    assumptions: tuple[Assumption, ...],
    version: Version = "corrected",
    erratum: str = "",
) -> Bound:
    """The bound |ρ_ℓ|/(1 − |ρ_ℓ|) ≤ rate^ℓ·|ρ_0|/(1 − |ρ_0|); theorems differ in the rate and its conditions."""
    origin = check_number(start, name="start", least=-1.0, most=1.0)
    layers = check_integer(depth, name="depth", least=0)
    curve = potential(origin) * rate ** np.arange(layers + 1)
    sequence = _sequence(kappa, origin, layers)
    return Bound(
        name=name,
        source=source,
        statement=statement,
        quantity=f"|ρ_ℓ|/(1 − |ρ_ℓ|) at layer {layers}",
        sense="upper",
        value=float(curve[-1]),
        actual=None if sequence is None else potential(float(sequence[-1])),
        version=version,
        erratum=erratum,
        assumptions=(
            *assumptions,
            Assumption("the start is inside (−1, 1)", abs(origin) < 1, f"ρ_0 = {origin:g}"),
        ),
        values={"rate": rate},
        profile=depth_profile(curve, measure="correlation_potential", name=name),
    )


def _sequence(kappa: KernelMap | None, start: float, layers: int) -> Array | None:
    """ρ_0, κ(ρ_0), κ(κ(ρ_0)), …, None without a map."""
    if kappa is None:
        return None
    values = [float(start)]
    for _ in range(layers):
        values.append(float(kappa(values[-1])))
    return np.array(values)
