"""thesis2024, chapters 3, 4 and 6: mean field at finite width, isometry, batch norm without gradient explosion.

Chapter 6 studies X ↦ BN(WX) with Haar-orthogonal weights, as many samples as features (n = d), no centring, features
of norm 1; ψ is the isometry gap −ln(det(XᵀX)^{1/d}/(Tr XᵀX/d)). Chapter 5 is in `kernel_maps`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.theory.bounds.bound import Assumption, Bound, Version, check_integer, check_matrix, check_number, state
from sounding.theory.bounds.spectrum import isometry, normalize_features

HAAR = Assumption("Haar-orthogonal weights, linear activations, batch norm without centring", None)


def theorem_3_2(
    fixed_gram: ArrayLike,
    *,
    width: int,
    depth: int,
    mixing: float,
    growth_constant: float = 1.0,
    failure: float = 0.05,
    constant: float = 1.0,
    version: Version = "corrected",
) -> Bound:
    """How far the Gram matrix of a batch norm network of finite width strays from the mean field's G*.

    printed: κ(G*)·C·[(1 − α)^{ℓ/2} + (n/√d)·√(ln(d/n)/α)] (thesis2024 Theorem 3.2, eq. 3.5). corrected: √(C(‖G*‖²(1 −
    α)^ℓ + ε² ln(1/ε)/α)/δ), ε = nbκ(G*)/√d, which is what Theorem B.6 (eq. B.19) says at failure probability δ. Errata:
    (3.9) drops α^{-1/2}; φ(x)² ≤ bx² excludes sigmoid and softplus; for linear activations with centring G* is
    singular, and the theorem says nothing; for tanh the distance of the first layer grows like n, and no C serves all
    batch sizes.

    Args:
        fixed_gram: G*, n × n.
        mixing: α of Assumption 3.1, the geometric rate of mixing.
        growth_constant: b with φ(x)² ≤ bx².
        failure: δ, the probability with which the bound may fail (corrected version only).
        constant: the absolute constant C, which the source does not give: the value is a scale, not a certificate.
    """
    gram = check_matrix(fixed_gram, name="fixed_gram", square=True)
    d = check_integer(width, name="width", least=1)
    layers = check_integer(depth, name="depth", least=0)
    alpha = check_number(mixing, name="mixing", least=0.0, most=1.0)
    check_number(failure, name="failure", least=0.0, most=1.0, open_ends=True)
    n = gram.shape[0]
    eigenvalues = np.linalg.eigvalsh((gram + gram.T) / 2)
    regular = bool(eigenvalues[0] > 1e-9 * eigenvalues[-1])
    condition = float(eigenvalues[-1] / eigenvalues[0]) if regular else math.inf
    levels = np.arange(layers + 1)
    epsilon = n * growth_constant * condition / math.sqrt(d)
    if not regular or alpha == 0:
        curve = np.full(layers + 1, math.inf)
    elif version == "printed":
        # below d = n the printed root has no meaning; 0 is its limit at d = n
        floor = n / math.sqrt(d) * math.sqrt(max(math.log(d / n), 0.0) / alpha)
        curve = constant * condition * ((1 - alpha) ** (levels / 2) + floor)
    else:
        # from ε = 1 on the logarithm is not positive, and the theorem says nothing
        noise = epsilon**2 * math.log(1 / epsilon) / alpha if epsilon < 1 else math.inf
        curve = np.sqrt(constant * (eigenvalues[-1] ** 2 * (1 - alpha) ** levels + noise) / failure)
    return state(
        "thesis2024-theorem3.2",
        curve,
        version=version,
        assumptions=(
            Assumption("G* is not degenerate", regular, f"condition number {condition:.4g}"),
            Assumption("the chain mixes geometrically at rate α > 0", None if alpha > 0 else False, "Assumption 3.1"),
            Assumption("φ(x)² ≤ bx²", None, f"b = {growth_constant:g}"),
            Assumption("ε is below 1", epsilon < 1, f"ε = {epsilon:.4g}; otherwise the bound is vacuous"),
            Assumption("the absolute constant C is known", None, f"the source does not give it; C = {constant:g}"),
        ),
        values={"condition_number": condition, "epsilon": epsilon},
    )


def theorem_4_3(features: ArrayLike) -> Bound:
    """Dividing each sample by its norm cannot lower the isometry: I(G̃) ≥ I(G)(1 + Var a/ā²), a_i = ‖x_i‖.

    thesis2024 Theorem 4.3, eq. (4.3); (4.7), printed as an equality, drops ā² ≥ (Πa_i)^{2/n}.
    """
    matrix = check_matrix(features, name="features")
    return _isometry_gain("thesis2024-theorem4.3", matrix, after=matrix)


def corollary_4_4(features: ArrayLike, *, version: Version = "corrected") -> Bound:
    """RMS normalization raises isometry by the spread of the lengths (thesis2024 Corollary 4.4).

    printed: for layer norm, which also centres each sample, and there it is false: it takes I₄ from isometry 1 to 0.
    `actual` is the isometry after RMS normalization, or after layer norm when printed.
    """
    matrix = check_matrix(features, name="features")
    after = matrix - matrix.mean(axis=1, keepdims=True) if version == "printed" else matrix
    return _isometry_gain("thesis2024-corollary4.4", matrix, after=after, version=version)


def corollary_4_5(features: ArrayLike, *, version: Version = "corrected") -> Bound:
    """Batch norm without centring cannot lower the isometry of the features' covariance C = XᵀX (Corollary 4.5).

    I(C̃) ≥ I(C)(1 + Var a/ā²) with a_i the norm of feature i over the batch; the printed ā = (1/n)Σa_i, in place of
    (1/d)Σa_i, is false when there are more samples than features.
    """
    matrix = check_matrix(features, name="features")
    n, d = matrix.shape
    lengths = np.linalg.norm(matrix, axis=0)
    _refuse_zero(lengths, "feature")
    mean = float(lengths.sum()) / (n if version == "printed" else d)
    before = isometry(matrix.T @ matrix)
    scaled = normalize_features(matrix)
    return state(
        "thesis2024-corollary4.5",
        before * (1 + float(np.mean((lengths - mean) ** 2)) / mean**2),
        actual=isometry(scaled.T @ scaled),
        version=version,
        assumptions=(Assumption("batch norm does not centre", None),),
        values={"isometry_before": before},
    )


def _isometry_gain(name: str, matrix: Array, *, after: Array, version: Version = "corrected") -> Bound:
    """The bound I(G̃) ≥ I(G)(1 + relative variance of the lengths), beside the isometry of `after` with unit rows."""
    lengths = np.linalg.norm(matrix, axis=1)
    _refuse_zero(lengths, "sample")
    before = isometry(matrix @ matrix.T)
    after_lengths = np.linalg.norm(after, axis=1, keepdims=True)
    actual = 0.0  # where centring annihilates a sample, the Gram matrix is degenerate
    if np.all(after_lengths > 0):
        actual = isometry((after / after_lengths) @ (after / after_lengths).T)
    value = before * (1 + float(np.var(lengths) / np.mean(lengths) ** 2))
    return state(name, value, actual=actual, version=version, values={"isometry_before": before})


def _refuse_zero(lengths: Array, what: str) -> None:
    """Raise where a sample or feature is all zero."""
    if np.any(lengths == 0):
        raise UsageError(f"expected no {what} to be all zero, got {int(np.sum(lengths == 0))}")


def theorem_6_3(features: ArrayLike) -> Bound:
    """One Haar layer raises the expected isometry: E I(BN(WX)) ≥ I(X)/(1 − Σ(λ_k − 1)²/(2d²(d + 2))).

    λ are the eigenvalues of XXᵀ for X = BN(·), square, features of norm 1 (thesis2024 Theorem 6.3, eq. 6.8). Erratum:
    they lie in (0, d], not (0, 1]; they sum to d.
    """
    before, factor, assumptions = _haar_layer(features)
    values = {"isometry_before": before, "factor": factor}
    return state("thesis2024-theorem6.3", before / factor, assumptions=assumptions, values=values)


def corollary_6_4(features: ArrayLike, *, version: Version = "corrected") -> Bound:
    """The isometry gap falls: E ψ(BN(WX)) ≤ ψ(X) + ln(1 − Σ(λ_k − 1)²/(2d²(d + 2))) (thesis2024 eq. 6.9).

    printed: for ψ(WX), which omits BN and is false, since a rotation leaves ψ as it is; `actual` shows it.
    """
    before, factor, assumptions = _haar_layer(features)
    gap = -math.log(before) if before > 0 else math.inf
    return state(
        "thesis2024-corollary6.4",
        gap + math.log(factor),
        actual=gap if version == "printed" else None,
        version=version,
        assumptions=assumptions,
        values={"isometry_gap": gap},
    )


def _haar_layer(features: ArrayLike) -> tuple[float, float, tuple[Assumption, ...]]:
    """The isometry of a square batch, the expected factor of one Haar layer, and what statements about it assume."""
    matrix = check_matrix(features, name="features", square=True)
    gram, d = matrix.T @ matrix, len(matrix)
    before, deviation = isometry(gram), float(np.max(np.abs(np.linalg.norm(matrix, axis=0) - 1)))
    factor = 1 - float(np.sum((np.linalg.eigvalsh(gram) - 1) ** 2)) / (2 * d**2 * (d + 2))
    unit = Assumption("every feature has norm 1 over the batch", deviation < 1e-6, f"largest deviation {deviation:.3g}")
    return before, factor, (unit, Assumption("the batch is not degenerate", before > 0, f"isometry {before:.4g}"), HAAR)


def theorem_6_1(
    width: int, *, input_gap: float, depth: int, constant: float = 32.0, version: Version = "corrected"
) -> Bound:
    """The isometry gap decays geometrically in depth: E ψ(X_{ℓ+1}) ≤ ψ(X_0)e^{−ℓ/k} (thesis2024 Theorem 6.1, eq. 6.6).

    printed: k = C·d²(1 + dψ₀) with an absolute constant C; the proof's k = max(2d², 32d³ψ₀) gives C = 32.
    corrected: k = max(2d(d + 2), 32d²(d + 2)ψ₀), the same proof without its approximation d(d + 2) ≈ d². Very loose
    near isometry, where the gap decays by the factor d/(d + 2) per layer.

    Args:
        input_gap: ψ(X_0), the isometry gap of the input batch.
    """
    d = check_integer(width, name="width", least=2)
    layers = check_integer(depth, name="depth", least=0)
    gap = check_number(input_gap, name="input_gap", least=0.0)
    k = constant * d**2 * (1 + d * gap) if version == "printed" else decay_length(d, gap)
    return state(
        "thesis2024-theorem6.1",
        gap * np.exp(-np.arange(layers + 1) / k) if math.isfinite(gap) else np.full(layers + 1, math.inf),
        version=version,
        assumptions=(
            Assumption("the input batch is not degenerate", math.isfinite(gap), f"ψ(X_0) = {gap:.4g}"),
            Assumption("as many samples as features", None, "n = d"),
            HAAR,
        ),
        values={"decay_length": k},
    )


def decay_length(width: int, gap: float) -> float:
    """k = max(2d(d + 2), 32d²(d + 2)ψ₀) of the corrected Theorem 6.1 (thesis2024 C.73)."""
    return max(2.0 * width * (width + 2), 32.0 * width**2 * (width + 2) * gap)


def theorem_6_5(
    width: int, *, input_gap: float, loss_slope: float = 1.0, constant: float = 1.0, version: Version = "corrected"
) -> Bound:
    """With Haar weights the gradient of every layer stays bounded at any depth (thesis2024 Theorem 6.5, eq. 6.10).

    printed: E ln‖∂L/∂W_ℓ‖ ≤ C·d⁵(ψ₀³ + 1), C an absolute constant not given. corrected, with every constant: ln s + ½
    ln d + ½(1 + dψ₀)(1 + 16dψ₀(k + 1)) + d(d + 2), k of the corrected Theorem 6.1; only the second phase if ψ₀ ≤
    1/(16d). The first phase is the proof's, with ‖J‖ ≤ λ_d^{-1/2} in place of 1/λ_d; in the second E√ψ ≤ √Eψ gives the
    ratio 1 − 1/(4d(d + 2)) where the proof has 1 − 1/(32d⁴). Errata: the loss is a function of X_L, not X_ℓ; (C.92)
    drops a factor 2.

    Args:
        loss_slope: s, a bound on ‖∂L/∂H_L‖_F.
    """
    d = check_integer(width, name="width", least=2)
    gap = check_number(input_gap, name="input_gap", least=0.0)
    slope = check_number(loss_slope, name="loss_slope", least=0.0)
    if version == "printed":
        value = constant * d**5 * (gap**3 + 1)
    elif not math.isfinite(gap):
        value = math.inf
    else:
        first = 0.0
        if gap > 1 / (16 * d):
            first = 0.5 * (1 + d * gap) * (1 + 16 * d * gap * (decay_length(d, gap) + 1))
        value = (math.log(slope) if slope > 0 else -math.inf) + 0.5 * math.log(d) + first + d * (d + 2)
    return state(
        "thesis2024-theorem6.5",
        value,
        version=version,
        assumptions=(
            Assumption("the input batch is not degenerate", math.isfinite(gap), f"ψ(X_0) = {gap:.4g}"),
            Assumption("the input features have norm 1 and n = d", None),
            Assumption("the loss has a bounded slope", None, f"s = {slope:g}"),
            HAAR,
            *((Assumption("the absolute constant C is known", None, f"C = {constant:g}"),) * (version == "printed")),
        ),
    )
