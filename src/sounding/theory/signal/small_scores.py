"""Softmax attention in closed form, to second order in the scores: the fast path where scores are small.

Rows of A = softmax(s) are expanded around u, the weights at s = 0 (uniform over the visible keys). With J = diag(u) −
u uᵀ of a row, δA = J s, and E s_ab s_cd = τ Q_ac K_bd for Gaussian queries and keys with Gram matrices Q and K,
τ = scale² · head size. Two sums over pairs of positions then give all six matrices of the rule:

    B(X, Y)_ac = Σ_bd (J^a X J^c)_bd Y_bd        G(W, X)_bd = Σ_ac W_ac (J^a X J^c)_bd

    forwards   K_out = Ā V Āᵀ + τ Q ∘ B(K, V)
    backwards  D_V = Āᵀ D Ā + τ G(Q ∘ D, K),  D_Q = τ D ∘ B(K, V),  D_K = τ G(Q ∘ D, V)

Keys and values that are made of N features add tr(J^a K) tr(J^c V)/N to B(K, V)_ac; see `attention`.
Terms of fourth order in the scores are left out, so the error is of the order of their variance squared.
"""

from __future__ import annotations

import numpy as np

from sounding.theory.signal.description import Array, Attention
from sounding.theory.signal.heads import Floats, Projections, score_mask


class SmallScores:
    """The closed form, with the matrices that forward and backward pass share."""

    def __init__(self, rule: Attention, inputs: Projections) -> None:
        weights = np.exp(score_mask(rule, inputs))
        weights /= weights.sum(axis=2, keepdims=True)
        self.uniform = np.broadcast_to(weights, (inputs.samples, *inputs.positions))
        self.inputs = inputs
        self.strength = rule.scale**2 * rule.head_size
        # `spread`: the variance of a row's scores around their mean over the row's keys, root mean square over rows
        self.spread, self.mean = self._mean_weights()
        self.error = self.spread**2  # of the terms that are left out, relative to the signal: from above where tested

    def forward(self) -> Array:
        """K_out."""
        inputs = self.inputs
        return mixed(self.mean, inputs.values) + self.strength * inputs.queries * self._fluctuation()

    def backward(self, gradient: Array) -> tuple[Array, Array, Array]:
        """D at queries, keys and values."""
        weighted = self.strength * self.inputs.queries * gradient
        at_keys, at_values = self._scattered(weighted, (self.inputs.values, self.inputs.keys))
        queries = self.strength * gradient * self._fluctuation()
        return queries, at_keys, mixed(self.mean.swapaxes(1, 2), gradient) + at_values

    def _mean_weights(self) -> tuple[float, Array]:
        """`spread`, and Ā = E A to second order."""
        u, samples = self.uniform, self.inputs.samples
        averaged = u @ _own(self.inputs.keys, samples)
        squares = np.diag(self.inputs.keys).reshape(samples, 1, -1)
        centred = squares - 2 * averaged + np.einsum("sab,sab->sa", averaged, u)[..., None]
        variance = self.strength * np.diag(self.inputs.queries).reshape(samples, -1, 1) * centred
        row = np.einsum("sab,sab->sa", u, variance)
        return float(np.sqrt(np.mean(row**2))), u * (1 + 0.5 * (variance - row[..., None]))

    def _fluctuation(self) -> Array:
        """B(K, V), by multiplying out the four products of J^a = diag(u_a) − u_a u_aᵀ and J^c."""
        u = self.uniform.astype(np.float32)
        (keys, one), (values, other) = (self._centred(gram) for gram in (self.inputs.keys, self.inputs.values))
        by_keys, by_values = left(u, keys), left(u, values)
        cross = left(u, (by_keys * by_values).T)
        squares = left(u, by_keys.T) * left(u, by_values.T)
        found = one * other * (mixed(u, keys * values) - cross - cross.T + squares).astype(np.float64)
        rows = [self._row_variances(gram) for gram in (self.inputs.keys, self.inputs.values)]
        return np.asarray(found + np.outer(*rows) / self.inputs.width)

    def _row_variances(self, gram: Array) -> Array:
        """tr(J^a X) of every row a: the variance of the keys, or values, that it sees."""
        u, own = self.uniform, _own(gram, self.inputs.samples)
        squares = np.einsum("sab,sb->sa", u, np.einsum("sbb->sb", own))
        return np.asarray(squares - np.einsum("sab,sbc,sac->sa", u, own, u, optimize=True)).ravel()

    def _scattered(self, weighted: Array, grams: tuple[Array, ...]) -> list[Array]:
        """G(W, X) for each X."""
        u = self.uniform.astype(np.float32)
        back = u.swapaxes(1, 2)
        size = float(np.abs(weighted).max()) or 1.0
        sent = (weighted / size).astype(np.float32)
        half = left(back, sent)
        whole = left(back, half.T)
        found = []
        for gram in grams:
            centred, scale = self._centred(gram)
            averaged = left(u, centred)
            cross = left(back, averaged * half.T)
            squares = mixed(back, sent * left(u, averaged.T))
            found.append(size * scale * (whole * centred - cross - cross.T + squares).astype(np.float64))
        return found

    def _centred(self, gram: Array) -> tuple[Floats, float]:
        """A Gram matrix without the means of rows and columns over each sample, in single precision, and its scale."""
        samples = self.inputs.samples
        blocks = gram.reshape(samples, len(gram) // samples, samples, -1)
        # The Jacobians take these means off anyway. Without them no digits cancel, however alike the tokens are.
        rows = blocks - blocks.mean(axis=3, keepdims=True)
        rows -= rows.mean(axis=1, keepdims=True)
        size = float(np.abs(rows).max()) or 1.0
        return (rows / size).astype(np.float32).reshape(gram.shape), size


def left(weights: Floats, gram: Floats) -> Floats:
    """A X for A block diagonal over samples, weights (samples, rows, columns), X (samples · columns, anything)."""
    samples, rows, columns = weights.shape
    return np.asarray(weights @ gram.reshape(samples, columns, -1)).reshape(samples * rows, -1)


def mixed(weights: Floats, gram: Floats) -> Floats:
    """A X Aᵀ for a symmetric X."""
    return left(weights, left(weights, gram).T)


def _own(matrix: Array, samples: int) -> Array:
    """The blocks (samples, rows, columns) of a matrix that join points of one sample."""
    blocks = matrix.reshape(samples, len(matrix) // samples, samples, -1)
    return np.asarray(blocks[np.arange(samples), :, np.arange(samples), :])
