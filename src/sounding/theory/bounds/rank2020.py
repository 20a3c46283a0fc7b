"""rank2020: the rank of linear residual networks with batch norm, H ↦ BN(H + γWH), never collapses.

Weights have mean 0, variance 1, a symmetric law with bounded support; batch norm does not centre. M = XᵀX/N is the
second-moment matrix of a batch, with ones on its diagonal after batch norm. rank2020v1 proves the same main theorem
(its Theorems 3 and 19, Lemmas 12 and 18).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.theory.bounds.bound import Assumption, Bound, Version, check_integer, check_matrix, check_number, state
from sounding.theory.bounds.spectrum import participation_ratio, second_moment

_UNIT = 1e-6  # what batch norm in float32 leaves of a mean square of 1


def lemma_1(features: ArrayLike, *, threshold: float = 0.5) -> Bound:
    """The soft rank is at least (1 − τ)²·r(H), and the rank at least r(H).

    rank_τ(H) = #{λ_i(M) ≥ τ} ≥ (1 − τ)² (Tr M)²/‖M‖_F² for τ in [0, 1] (rank2020 Lemma 1, eq. 3, 4, 21; rank2020v1
    Lemmas 1 and 2). rank ≥ r holds for every matrix; the soft part needs features of unit mean square.

    >>> print(lemma_1(2 * np.eye(4), threshold=0.5).value)
    1.0
    """
    matrix = check_matrix(features, name="features")
    tau = check_number(threshold, name="threshold", least=0.0, most=1.0)
    moment = second_moment(matrix)
    ratio = participation_ratio(moment)
    eigenvalues = np.linalg.eigvalsh(moment)
    # an eigenvalue that is 1 up to rounding must count at τ = 1
    soft = int(np.sum(eigenvalues >= tau - 1e-12 * max(float(eigenvalues[-1]), 1.0)))
    return state(
        "rank2020-lemma1",
        (1 - tau) ** 2 * ratio,
        tau=tau,
        actual=float(soft),
        assumptions=(_unit_features(moment),),
        values={"participation_ratio": ratio, "rank": float(np.linalg.matrix_rank(matrix))},
    )


def lemma_7(features: ArrayLike, *, step: float) -> Bound:
    """What one layer H ↦ BN(H + γWH) does to ‖M‖_F², to order γ².

    (E‖M₊‖_F² − ‖M‖_F²)/γ² = 2d² − 2‖M‖_F² − 8 Tr M³ + 8 Tr diag(M²)² + O(γ) (rank2020 Lemma 7, eq. 43). Right as
    printed. `value` is the change γ²δ_F(M).
    """
    matrix = check_matrix(features, name="features")
    gamma = check_number(step, name="step", least=0.0, most=1.0)
    moment = second_moment(matrix)
    d = moment.shape[0]
    square = moment @ moment
    drift = (
        2 * d**2
        - 2 * float(np.sum(moment**2))
        - 8 * float(np.trace(square @ moment))
        + 8 * float(np.sum(np.diag(square) ** 2))
    )
    return state(
        "rank2020-lemma7",
        gamma**2 * drift,
        assumptions=(
            _unit_features(moment),
            Assumption("weights are symmetric, of variance 1 and bounded", None, "U[−√3, √3] is"),
            Assumption("γ is small: γ√d well below 1", gamma * math.sqrt(d) < 0.2, f"γ√d = {gamma * math.sqrt(d):.3g}"),
        ),
        values={"drift": drift},
    )


def _unit_features(moment: Array) -> Assumption:
    deviation = float(np.max(np.abs(np.diag(moment) - 1.0)))
    return Assumption("every feature has mean square 1", deviation < _UNIT, f"largest deviation {deviation:.3g}")


def regularity_constant(moments: ArrayLike) -> float:
    """α = E Tr diag(M²)² / E Tr M³ over second-moment matrices of the invariant law (rank2020 Definition 3, eq. 46).

    Args:
        moments: (draws, features, features), or one matrix; their average estimates the expectation (eq. 49).

    Below 1 for an invariant law (Lemma 10); 1 for a single matrix with equal nonzero eigenvalues and equal row norms.

    >>> float(regularity_constant(np.eye(4)))
    1.0
    """
    stack = np.asarray(moments, dtype=np.float64)
    stack = stack[None] if stack.ndim == 2 else stack
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or 0 in stack.shape:
        raise UsageError(f"expected second-moment matrices (draws, d, d), got the shape {stack.shape}")
    squares = stack @ stack
    cubes = float(np.einsum("bij,bji->", squares, stack))
    if not cubes > 0:
        raise UsageError(f"expected second-moment matrices with a positive trace, got Tr M³ = {cubes:g}")
    return float(np.sum(np.einsum("bii->bi", squares) ** 2)) / cubes


def lemma_13(width: int, *, regularity: float, version: Version = "corrected") -> Bound:
    """An upper bound on E‖M‖_F² under the invariant law of width d and regularity constant α.

    printed: d^{3/2}/√(1 − α) (rank2020 Lemma 13, eq. 50). corrected: d(√(1 + 16(1 − α)d) − 1)/(8(1 − α)), which tends
    to d^{3/2}/(2√(1 − α)) for wide networks and to d² for α → 1. Erratum: (53) and (54) carry the sign of 8(1 − α)
    wrong; the drift of Lemma 7 is zero in expectation, so d² = E‖M‖² + 4(1 − α)E Tr M³, and (E‖M‖²)² ≤ d·E Tr M³ makes
    that a quadratic inequality.

    >>> print(round(lemma_13(64, regularity=0.5).value, 3))
    346.392
    >>> print(round(lemma_13(64, regularity=0.5, version="printed").value, 3))
    724.077
    """
    d = check_integer(width, name="width", least=1)
    alpha = check_number(regularity, name="regularity", least=0.0, most=1.0)
    if version == "printed":
        value = d**1.5 / math.sqrt(1 - alpha) if alpha < 1 else math.inf
    else:
        # (√(1 + 16sd) − 1)/(8s) = 2d/(√(1 + 16sd) + 1), which survives s = 1 − α = 0
        value = 2 * d**2 / (math.sqrt(1 + 16 * (1 - alpha) * d) + 1)
    return state("rank2020-lemma13", value, version=version, assumptions=_chain_assumptions(alpha))


def theorem_2(width: int, *, regularity: float, threshold: float = 0.5, version: Version = "corrected") -> Bound:
    """The average soft rank over infinite depth is at least (1 − τ)²·E r, of order √d (rank2020 Theorems 2 and 14).

    printed: (1 − τ)²√((1 − α)d) (eq. 58). corrected: (1 − τ)²(1 + √(1 + 16(1 − α)d))/2, from the corrected Lemma 13
    and E r ≥ d²/E‖M‖_F². The theorem speaks of the average over depth; Corollary 15, for each layer, assumes that the
    soft rank never grows, and it can.

    >>> print(theorem_2(256, regularity=0.5, threshold=0.0).value)
    23.13294059551255
    """
    d = check_integer(width, name="width", least=1)
    alpha = check_number(regularity, name="regularity", least=0.0, most=1.0)
    tau = check_number(threshold, name="threshold", least=0.0, most=1.0)
    ratio = math.sqrt((1 - alpha) * d) if version == "printed" else (1 + math.sqrt(1 + 16 * (1 - alpha) * d)) / 2
    return state(
        "rank2020-theorem2",
        (1 - tau) ** 2 * ratio,
        tau=tau,
        version=version,
        assumptions=_chain_assumptions(alpha),
        values={"participation_ratio": ratio},
    )


def _chain_assumptions(alpha: float) -> tuple[Assumption, ...]:
    """What every statement about the residual chain assumes."""
    return (
        Assumption("the regularity constant α is below 1", alpha < 1, f"α = {alpha:.4g}"),
        Assumption("the input has full rank d", None, "on rank k < d the chain stays at rank k"),
        Assumption("γ is small enough", None, "an O(γ) term is dropped"),
        Assumption("weights are i.i.d., symmetric, of variance 1 and bounded", None, "U[−√3, √3] is"),
        Assumption("the chain has a unique invariant law on full-rank matrices", None, "not unique on lower ranks"),
    )
