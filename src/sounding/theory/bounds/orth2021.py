"""orth2021: batch norm makes the samples of a linear network orthogonal, up to a floor of order 1/√width.

The chain is H ↦ BN(WH)/√d with Gaussian weights, no centring, n samples, width d ≥ n; ‖H‖_F = 1, so the eigenvalues
σ_i² of HᵀH sum to 1. V is the orthogonality gap (a norm), V̂ = 1/n − σ_n² its Lyapunov function. thesis2024 ch. 2 and
appendix A restate all of it (Theorem 2.1, Lemma 2.2, Corollary 2.3, Theorem A.2, Lemma A.5).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from sounding.activations.activation import Array
from sounding.errors import NumericalError, UsageError
from sounding.theory.bounds.bound import Assumption, Bound, Version, check_integer, check_number, check_version, state
from sounding.theory.bounds.spectrum import orthogonality_gap


def expected_spectrum(singular_values: ArrayLike) -> Array:
    """p_i(σ) = E[σ_i²w_i²/Σ_k σ_k²w_k²], w standard normal: the spectrum of HᵀH expected after one layer.

    p_i = ∫₀^∞ σ_i²/(1 + 2tσ_i²) Π_j (1 + 2tσ_j²)^{-1/2} dt (orth2021 eq. 13, C.6). Scale-free, Σp_i = 1. At infinite
    width this is the whole dynamics: near orthogonality each deviation σ_i² − 1/n contracts by n/(n + 2).

    Args:
        singular_values: the n singular values of the batch, not all zero.

    >>> expected_spectrum([3.0, 1.0])
    array([0.75, 0.25])
    """
    eigenvalues = _eigenvalues(singular_values)
    positive = eigenvalues > 0
    # the trapezoid rule in ln t is exponentially exact, for the integrand's nearest poles are at Im ln t = ±π
    coarse, fine = (_trapezoid(eigenvalues[positive], step) for step in (0.2, 0.1))
    error = float(np.max(np.abs(fine - coarse)))
    if error > 1e-11:  # the finer step leaves the square of that
        raise NumericalError(f"the p_i integral did not settle: two step sizes differ by {error:.2g}", state=fine)
    shares = np.zeros_like(eigenvalues)
    shares[positive] = fine
    return shares


def _eigenvalues(singular_values: ArrayLike) -> Array:
    """Squared singular values, scaled to add up to 1."""
    sigma = np.asarray(singular_values, dtype=np.float64)
    if sigma.ndim != 1 or sigma.size < 1 or not np.all(np.isfinite(sigma)) or np.any(sigma < 0) or not np.any(sigma):
        raise UsageError(f"expected singular values: a list of numbers ≥ 0, not all 0, got {singular_values!r}")
    eigenvalues = (sigma / sigma.max()) ** 2  # scaled before they are squared: 1e-200 has a spectrum too
    return np.asarray(eigenvalues / eigenvalues.sum())


def _trapezoid(eigenvalues: Array, step: float) -> Array:
    """∫ over ln t; the ends are where the integrand has fallen below rounding (t^1 below, t^(−n/2) above)."""
    if len(eigenvalues) == 1:
        return np.ones(1)
    lower = -math.log(2 * float(eigenvalues.max())) - 40.0
    upper = -math.log(2 * float(eigenvalues.min())) + 80.0 / len(eigenvalues) + 4.0
    nodes = np.exp(np.arange(lower, upper + step, step))
    terms = 1 + 2 * np.outer(nodes, eigenvalues)
    weights = step * nodes * np.exp(-0.5 * np.sum(np.log(terms), axis=1))
    return np.asarray(weights @ (eigenvalues / terms))


def contraction(batch_size: int, *, version: Version = "corrected") -> float:
    """The constant c of 1/n − p_n ≤ (1 − c·σ_n²)(1/n − σ_n²): 2/3 as printed, 2n/(n + 2) sharp (orth2021 Lemma 8)."""
    check_version(version)
    n = check_integer(batch_size, name="batch_size", least=2)
    return 2 / 3 if version == "printed" else 2 * n / (n + 2)


def lemma_8(singular_values: ArrayLike, *, version: Version = "corrected") -> Bound:
    """One expected layer shrinks the smallest eigenvalue's distance to 1/n.

    1/n − p_n(σ) ≤ (1 − c·σ_n²)(1/n − σ_n²) with c = 2/3 printed (orth2021 Lemma 8) and c = 2n/(n + 2), which the proof
    gives and which is attained to first order at orthogonality, corrected.
    """
    eigenvalues = _eigenvalues(singular_values)
    n = check_integer(len(eigenvalues), name="the number of singular values", least=2)
    smallest = float(eigenvalues.min())
    share = float(expected_spectrum(singular_values)[int(eigenvalues.argmin())])
    c = contraction(n, version=version)
    value = (1 - c * smallest) * (1 / n - smallest)
    return state("orth2021-lemma8", value, actual=1 / n - share, version=version)


def theorem_5(width: int, batch_size: int, *, smallest_eigenvalue: float, version: Version = "corrected") -> Bound:
    """One layer of width d: E[V̂₊ | H] ≤ (1 − c(1/n − V̂))V̂ + 1/√d, V̂ = 1/n − σ_n² (orth2021 Theorem 5).

    c = 2/3 printed, 2n/(n + 2) corrected (see `lemma_8`). Needs no assumption on later layers.
    """
    d, n = _shape(width, batch_size)
    sigma2 = check_number(smallest_eigenvalue, name="smallest_eigenvalue", least=0.0, most=1 / n)
    c = contraction(n, version=version)
    return state(
        "orth2021-theorem5",
        (1 - c * sigma2) * (1 / n - sigma2) + 1 / math.sqrt(d),
        version=version,
        assumptions=_chain(d, n),
        values={"contraction": 1 - c * sigma2},
    )


def theorem_1(
    width: int, batch_size: int, *, depth: int, smallest_singular_value: float, version: Version = "corrected"
) -> Bound:
    """The expected orthogonality gap decays geometrically in depth to a floor of order n/√d.

    printed: E V(H_{ℓ+1}) ≤ 2(1 − 2α/3)^ℓ + 3n/(α√d) with α ≤ σ_n of every layer (orth2021 Theorem 1, eq. 3). corrected:
    √(n(n−1))·[(1 − cα)^ℓ/n + 1/(cα√d)], c = 2n/(n + 2), with α ≤ σ_n², also for √E V². Errata: Assumption A1 must bound
    the square, as the proof uses it (with σ_n the decay is false for many samples); the appendix's 3n/(2α√d) is a slip;
    Lemma 4 sharpens to V ≤ √(n(n−1))V̂.

    Args:
        smallest_singular_value: a lower bound on σ_n(H_k) for every layer k ≤ depth, at most n^{-1/2}.
    """
    d, n = _shape(width, batch_size)
    layers = check_integer(depth, name="depth", least=0)
    sigma = check_number(smallest_singular_value, name="smallest_singular_value", least=0.0, most=1.0)
    printed, c = version == "printed", contraction(n, version=version)
    alpha = sigma if printed else sigma**2
    rate, spread = 1 - c * alpha, math.sqrt(n * (n - 1))
    head, floor = 2.0 if printed else spread / n, math.inf  # depth does not lower the floor
    if alpha > 0:
        floor = 3 * n / (alpha * math.sqrt(d)) if printed else spread / (c * alpha * math.sqrt(d))
    known = sigma <= n**-0.5 and (None if sigma > 0 else False)
    return state(
        "orth2021-theorem1",
        head * rate ** np.arange(layers + 1) + floor,
        version=version,
        assumptions=(*_chain(d, n), Assumption("every layer has σ_n at least this", known, "A1(α, ℓ)")),
        values={"rate": rate, "floor": floor},
    )


def lemma_2(
    batch_size: int,
    *,
    gap: float | None = None,
    singular_values: ArrayLike | None = None,
    version: Version = "corrected",
) -> Bound:
    """How far WH is in law from an isotropic Gaussian: W₂² ≤ 2n·E V (orth2021 Lemma 2, eq. 4).

    corrected: for a fixed H, W₂² = Σ(σ_i − n^{-1/2})² exactly (the coupling of the proof is optimal, both laws being
    Gaussian with commuting covariances); knowing only the gap, W₂² ≤ n·E V², of second order where the printed one is
    of first.

    Args:
        gap: E V, or √E V² for the corrected bound; or
        singular_values: those of H with ‖H‖_F = 1 (rescaled if not).
    """
    n = check_integer(batch_size, name="batch_size", least=2)
    exact = None
    if singular_values is not None:
        sigma = np.sqrt(_eigenvalues(singular_values))
        if len(sigma) != n:
            raise UsageError(f"expected {n} singular values for a batch of {n}, got {len(sigma)}")
        exact = float(np.sum((sigma - n**-0.5) ** 2))
        gap = orthogonality_gap(sigma)
    if gap is None:
        raise UsageError("expected gap or singular_values, got neither")
    size = check_number(gap, name="gap", least=0.0, most=1.0)
    value = 2 * n * size if version == "printed" else n * size**2
    return state("orth2021-lemma2", value, actual=exact, version=version)


def corollary_3(
    width: int, batch_size: int, *, depth: int, smallest_singular_value: float, version: Version = "corrected"
) -> Bound:
    """W₂² of WH_ℓ to an isotropic Gaussian over depth (orth2021 Corollary 3, eq. 5).

    printed: 4n(1 − 2α/3)^ℓ + 6n²/(α√d): a radius of order d^{-1/4}. corrected: n times the square of the corrected
    Theorem 1, which bounds √E V²: a radius of order d^{-1/2}.
    """
    gap = theorem_1(width, batch_size, depth=depth, smallest_singular_value=smallest_singular_value, version=version)
    n = int(batch_size)
    value = 2 * n * gap.curve if version == "printed" else n * gap.curve**2
    rate = {"rate": gap.values["rate"]}
    return state("orth2021-corollary3", value, version=version, assumptions=gap.assumptions, values=rate)


def _shape(width: int, batch_size: int) -> tuple[int, int]:
    """Width and batch size as checked integers."""
    return check_integer(width, name="width", least=1), check_integer(batch_size, name="batch_size", least=2)


def _chain(d: int, n: int) -> tuple[Assumption, ...]:
    """What every statement about the chain without centring assumes."""
    return (
        Assumption("the width is at least the batch size", d >= n, f"d = {d}, n = {n}"),
        Assumption("Gaussian weights, linear activations, batch norm without centring", None),
    )
