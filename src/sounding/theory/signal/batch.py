"""Batch norm as a map of the signal: each channel is normalized over all N points, samples and positions.

Over channels x is Gaussian over the points with second moments K, so its deviations have the modes v_i, λ_i of C K C/N,
C = I − 11ᵀ/N, and σ² = Σ λ_i z_i² differs from channel to channel: E 1/σ² is not 1/E σ². Powers of 1/(σ² + eps) are
Laplace integrals over s, in which every moment of x is Gaussian with λ_i/(1 + 2sλ_i) in place of λ_i. So with
W(s) = e^(−s eps) Π(1 + 2sλ)^(−1/2) and ℓ_i(s) = λ_i/(1 + 2sλ_i), exactly, for any batch:

    forwards    K̂ = N Σ_i v_i v_iᵀ ∫ W ℓ_i ds
    backwards   in the basis of the modes, from C D C: f_ij D_ij + δ_ij Σ_k γ_ik D_kk,
                f_ij = ∫ W ds − ∫ s W (ℓ_i + ℓ_j) ds + 2 γ_ij,   γ_ij = ½ ∫ s² W ℓ_i ℓ_j ds

where D is independent of x. Modes beyond the leading ones share one ℓ, with the sum and the sum of squares that they
have. What follows takes y for Gaussian, an error of relative order 1/(participation ratio of the points).

A function behind the norm makes gradients depend on y: g = ĝ p(y) with ĝ independent of it and p = v, the amplitude
that gradients carry (`shapes`); D = D̂ ∘ E[p p]. By Stein's lemma for Gaussian y with Gram matrix Y and u = y p(y), the
terms along y change by

    Y_ab (s − q_a − q_b) + (2/N) Y diag(q) Y − (Y Δ + Δᵀ Y)/N,   q_a = Σ_c D̂_ac E[p′_a u_c]/N,
    s = Σ_cd D̂_cd (E[u_c u_d] − Y_cd E[p_c p_d])/N²,   Δ_cb = D̂_cb (E[p_b u′_c] − E[p_b p_c])

of which a gradient that samples share (D̂ far from diagonal) makes more than a tenth of the squared norm per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from sounding.theory.signal.description import Array, Normalize
from sounding.theory.signal.shapes import correlation_places, hermite_rows, horner, look_up
from sounding.theory.signal.signal import Signal

MODES = 48  # that are weighed one by one; the largest of the others has a few thousandths of the variance
EXACT = 192  # points up to which all modes are computed: 20 ms
PASSES = 2  # of subspace iteration: modes that it does not tell apart have almost the same weight
STEIN_GRID, STEIN_TERMS = 4097, 256  # of the tables of corrections, which need three digits
STRAIGHT = 1e-6  # a smaller table is none
NODES = 240  # of the trapezoid rule in ln s, which converges geometrically: 1e-10


def batch_norm(rule: Normalize, signal: Signal) -> Signal:
    """x̂ of a batch norm, before scale and shift."""
    return signal.like(Modes.of(signal).standard(rule.eps, centred(signal)))


def batch_norm_backward(rule: Normalize, signal: Signal, gradient: Signal, amplitude: Array | None = None) -> Signal:
    """The gradient in front of a batch norm whose scale has been applied to `gradient`, which depends on y by v."""
    modes, second = Modes.of(signal), centred(signal)
    vectors, size, share = modes.vectors, signal.points.size, signal.matrix.shape[1] / signal.points.size
    arrived = centre(gradient)
    weighed, across = gradient.weigh(arrived), np.swapaxes(vectors, 1, 2)
    turned = weighed @ vectors  # D v
    inner = across @ turned
    diagonal = np.diagonal(inner, axis1=1, axis2=2).mean(axis=0)
    # of C K C without the leading modes; `values` are of C K C/N, hence the size of a block
    led = modes.values * vectors.shape[1]
    rest_trace = (float(np.vdot(second, weighed)) - len(inner) * float(led @ diagonal)) / size
    f, gamma, gamma_rest, gamma_both = modes.backward(rule.eps)
    own_trace = gamma @ diagonal + gamma_rest * rest_trace
    left = (float(gamma_rest @ diagonal) + gamma_both * rest_trace) / size
    core = (f[:-1, :-1] - f[:-1, -1:] - f[-1:, :-1] + f[-1, -1]) * inner + np.diag(own_trace)
    # one product and its transpose give all that is made of the leading modes
    side = share * (f[:-1, -1:] - f[-1, -1]) * np.swapaxes(turned, 1, 2)
    side += 0.5 * (share * core - left * np.diag(led)) @ across
    low_rank = vectors @ side
    matrix = f[-1, -1] * arrived + left * second
    matrix += low_rank
    matrix += np.swapaxes(low_rank, 1, 2)
    if amplitude is not None:
        matrix += modes.inverse(rule.eps) * centre(
            gradient.like(_bend(rule, modes, modes.standard(rule.eps, second), gradient, amplitude))
        )
    mean = (gradient.mean - gradient.mean.mean()) * np.sqrt(f[-1, -1])
    return gradient.like(matrix, mean)


def _bend(rule: Normalize, modes: Modes, y: Array, gradient: Signal, amplitude: Array) -> Array:
    """What the amplitude of gradients changes, before the factor E σ⁻² and the centring; y are second moments of x̂."""
    size = gradient.points.size
    inverse = 1 / np.sqrt(np.maximum(np.diagonal(y, axis1=1, axis2=2), 1e-300))
    correlation = y * inverse[:, :, None]
    correlation *= inverse[:, None, :]
    tables = stein_tables(amplitude)
    bent = float(np.abs(tables[2]).max()) > STRAIGHT
    used = np.stack(tables if bent else tables[:2])
    mixed, excess, *slants = look_up(used, correlation_places(correlation, STEIN_GRID)) * gradient.matrix
    q = gradient.row_sums(mixed) / size
    s = float(gradient.row_sums(excess).sum()) / size**2
    result = y * (s - q[:, :, None] - q[:, None, :])
    # of Y diag(q) Y the leading modes are taken, which hold it
    vectors = modes.vectors * modes.forward(rule.eps)[1]
    core = np.swapaxes(modes.vectors, 1, 2) @ (q[:, :, None] * modes.vectors)
    result += (2 * y.shape[1]) * vectors @ core @ np.swapaxes(vectors, 1, 2)
    for slant in slants:
        turned = gradient.multiply(y, slant) / size
        result -= turned + np.swapaxes(turned, 1, 2)
    return np.asarray(result)


def centre(signal: Signal) -> Array:
    """C K C with C = I − 11ᵀ/N over all points: K − r_a − r_b + r̄, r the mean of a row."""
    rows = signal.row_sums(signal.matrix) / signal.points.size
    return np.asarray(signal.matrix - rows[:, :, None] - rows[:, None, :] + rows.mean())


def centred(signal: Signal) -> Array:
    """C K C of a signal at the followed pairs."""
    rows = row_means(signal)
    return np.asarray(signal.matrix - rows[:, :, None] - rows[:, None, :] + rows.mean())


def row_means(signal: Signal) -> Array:
    """Σ_b K_ab/N over all N points b, (blocks, size)."""
    if signal.is_full:
        return signal.row_sums(signal.matrix) / signal.points.size
    # Sub-grids pair no border with a border, and points at borders, where a convolution sees zeros, are shorter. So
    # what they leave out is estimated by how long it is: K_ab = s_a s_b ρ, with the ρ that is followed. Of few followed
    # pairs ρ is noise, which deep networks add up: it is smoothed to a part of the sample and a part of the position.
    samples, blocks = signal.points.samples, len(signal.matrix)
    lengths = np.sqrt(np.maximum(signal.diagonal, 0.0))
    apart = signal.apart(signal.matrix).sum(axis=2)
    here = signal.near * (signal.matrix.sum(axis=2) - apart)
    own = lengths.reshape(blocks, samples, -1).sum(axis=1)  # of all samples at a position
    own = np.repeat(own[:, None], samples, axis=1).reshape(lengths.shape)
    followed = np.maximum(lengths.sum(axis=1, keepdims=True) - own, 1e-300)
    rows = (here + apart * (lengths.sum() - signal.near * own) / followed) / signal.points.size
    share = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0).reshape(blocks, samples, -1)
    smooth = share.mean(axis=(0, 2), keepdims=True) + share.mean(axis=1, keepdims=True) - share.mean()
    return np.asarray(smooth.reshape(rows.shape) * lengths)


@dataclass(frozen=True)
class Modes:
    """The leading modes of C K C/N, and what is left of its trace."""

    values: Array  # λ_i, (modes,)
    vectors: Array  # v_i, (1, size, modes), of length 1 within a block; all blocks share them
    rest: float  # Σ λ over the modes left out
    typical: float  # the λ that the modes left out share: their Σ λ² over their Σ λ
    average: float  # the mean λ over all directions left out, most of which have none; a gradient has them all

    @classmethod
    def of(cls, signal: Signal) -> Modes:
        """The modes of a signal; over sub-grids, those of the mean block: each block is a sample of all points."""
        if "modes" in signal.kept:
            return cast(Modes, signal.kept["modes"])
        size, second = signal.points.size, signal.like(centred(signal))
        mean_block = second.weigh(second.matrix).mean(axis=0, keepdims=True)
        found, vectors = leading_modes(mean_block / size, MODES)
        values = np.maximum(found[0], 0.0)
        total = second.total / size
        squares = second.inner(second.matrix, second.matrix) / size**2
        rest = max(total - float(values.sum()), 0.0)
        modes = cls(values, vectors, 0.0, 0.0, 0.0)
        if rest > 1e-12 * total:
            typical = max((squares - float((values**2).sum())) / rest, rest / size)
            modes = cls(values, vectors, rest, typical, rest / max(size - values.size, 1))
        signal.kept["modes"] = modes
        return modes

    def _nodes(self, eps: float) -> tuple[Array, Array]:
        """s and W(s) ds at the nodes of the trapezoid rule in ln s."""
        scale = max(float(self.values.sum()) + self.rest, 1e-300)
        high = min(1e13 / scale, 60.0 / eps if eps > 0 else np.inf)
        low = min(1e-10 / scale, 1e-6 * high)
        logs = np.linspace(np.log(low), np.log(high), NODES)
        s = np.exp(logs)
        exponent = -s * eps - 0.5 * np.log1p(2 * s[:, None] * self.values).sum(axis=1)
        if self.rest > 0:
            exponent -= 0.5 * self.rest / self.typical * np.log1p(2 * s * self.typical)
        weights = np.exp(exponent) * s * (logs[1] - logs[0])
        weights[0] = 0.5 * weights[0] + s[0]  # and what lies below the first node, where W is 1
        return s, weights

    def standard(self, eps: float, second: Array) -> Array:
        """K̂, the second moments of x/√(σ² + eps), from those of x around its means."""
        shared, own = self.forward(eps)
        weights = (own - shared * self.values) * self.vectors.shape[1]
        matrix = shared * second
        matrix += (self.vectors * weights) @ np.swapaxes(self.vectors, 1, 2)
        return np.asarray(matrix)

    def inverse(self, eps: float) -> float:
        """E 1/(σ² + eps) over channels."""
        return float(self._nodes(eps)[1].sum())

    def forward(self, eps: float) -> tuple[float, Array]:
        """∫ W/(1 + 2sλ) ds for the modes left out, and ∫ W ℓ_i ds of the others."""
        s, weights = self._nodes(eps)
        shared = float((weights / (1 + 2 * s * self.typical)).sum())
        own = weights @ (self.values / (1 + 2 * s[:, None] * self.values))
        return shared, own

    def backward(self, eps: float) -> tuple[Array, Array, Array, float]:
        """f_ij with the modes left out as the last; γ_ij; γ of each mode and one left out, per its λ; of two."""
        s, weights = self._nodes(eps)
        loose = 1 / (1 + 2 * s * self.typical)
        shrunk = np.column_stack([self.values / (1 + 2 * s[:, None] * self.values), self.average * loose])
        once = (s * weights) @ shrunk
        gamma = 0.5 * shrunk.T @ ((s * s * weights)[:, None] * shrunk)
        f = weights.sum() - once[:, None] - once + 2 * gamma
        # the modes left out differ in λ, to which their γ is proportional: what is left of the matrix carries it
        gamma_rest = 0.5 * (s * s * weights * loose) @ shrunk[:, :-1]
        return f, gamma[:-1, :-1], gamma_rest, float(0.5 * (s * s * weights * loose**2).sum())


def stein_tables(amplitude: Array) -> tuple[Array, Array, Array]:
    """E[p′u]/E[pp], E[uu]/E[pp] − ρ and E[pu′]/E[pp] − 1 over equal steps of ρ from −1 to 1, p the amplitude."""
    # p = Σ p_k he_k and u_k = √k p_{k−1} + √(k+1) p_{k+1}; a derivative takes c_k to √(k+1) c_{k+1}. Where p is a step
    # (ReLU), E[pu′] is E[pp], and the last table is 0 up to what the series leaves out.
    p = hermite_rows(STEIN_TERMS) @ amplitude
    roots = np.sqrt(np.arange(1, p.size))
    raised, lowered = np.append(0.0, roots * p[:-1]), np.append(roots * p[1:], 0.0)
    u = raised + lowered
    u[-1] = 0.0  # the term that would need the next coefficient
    u_slope = np.append(roots * u[1:], 0.0)
    rho = np.linspace(-1.0, 1.0, STEIN_GRID)
    pairs = np.maximum(horner(p * p, rho), 1e-3)
    flat = float((amplitude**2 * (1 - amplitude**2 / amplitude.max() ** 2)).max()) < 1e-9 * amplitude.max() ** 2
    slant = np.zeros_like(rho) if flat else horner(p * u_slope, rho) / pairs - 1
    return horner(lowered * u, rho) / pairs, horner(u * u, rho) / pairs - rho, slant


def leading_modes(matrix: Array, count: int) -> tuple[Array, Array]:
    """The largest eigenvalues (blocks, count) of symmetric matrices with their vectors; all of them if small."""
    size = matrix.shape[-1]
    if size <= EXACT:
        values, vectors = np.linalg.eigh(matrix)
        return values[:, ::-1], vectors[:, :, ::-1]
    # Any start will do: the passes turn it to the leading modes.
    basis = np.linalg.qr(matrix @ np.random.default_rng(0).standard_normal((size, count + 16)))[0]
    for _ in range(PASSES):
        basis = np.linalg.qr(matrix @ basis)[0]
    values, turns = np.linalg.eigh(np.swapaxes(basis, 1, 2) @ matrix @ basis)
    return values[:, ::-1][:, :count], (basis @ turns)[:, :, ::-1][:, :, :count]
