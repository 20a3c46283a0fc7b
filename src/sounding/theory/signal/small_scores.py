"""Softmax attention in closed form, to second order in the scores: the fast path where scores are small.

Rows of A = softmax(s) are expanded around u, the weights at s = 0 (uniform over the visible keys). With J = diag(u) −
u uᵀ of a row, δA = J s, and E s_ab s_cd = τ Q_ac K_bd for Gaussian queries and keys with Gram matrices Q and K,
τ = scale² · head size. Two sums over pairs of positions then give all six matrices of the rule:

    B(X, Y)_ac = Σ_bd (J^a X J^c)_bd Y_bd        G(W, X)_bd = Σ_ac W_ac (J^a X J^c)_bd

    forwards   K_out = Ā V Āᵀ + τ Q ∘ B(K, V)
    backwards  D_V = Āᵀ D Ā + τ G(Q ∘ D, K),  D_Q = τ D ∘ B(K, V),  D_K = τ G(Q ∘ D, V)

Terms of fourth order in the scores are left out, so the error is of the order of their variance squared.
"""

from __future__ import annotations

import numpy as np

from sounding.theory.signal.description import Array, Attention
from sounding.theory.signal.heads import Floats, Projections, score_mask


class SmallScores:
    """The closed form, with the matrices that forward and backward pass share.

    `spread` is the variance of a row's scores around their mean over the row's keys, root mean square over rows.
    """

    def __init__(self, rule: Attention, inputs: Projections) -> None:
        weights = np.exp(score_mask(rule, inputs))
        weights /= weights.sum(axis=2, keepdims=True)
        self.uniform = np.broadcast_to(weights, (inputs.samples, *inputs.positions))
        self.inputs = inputs
        self.strength = rule.scale**2 * rule.head_size
        self.spread, self.mean = self._mean_weights()

    @property
    def error(self) -> float:
        """The size of the terms that are left out, relative to the signal: an estimate, from above where tested."""
        return self.spread**2

    def forward(self) -> Array:
        """K_out."""
        inputs = self.inputs
        return mixed(self.mean, inputs.values) + self.strength * inputs.queries * self._fluctuation()

    def backward(self, gradient: Array) -> tuple[Array, Array, Array]:
        """D at queries, keys and values."""
        inputs, weighted = self.inputs, self.strength * self.inputs.queries * gradient
        values = mixed(self.mean.swapaxes(1, 2), gradient) + self._scattered(weighted, inputs.keys)
        queries = self.strength * gradient * self._fluctuation()
        return queries, self._scattered(weighted, inputs.values), values

    def _mean_weights(self) -> tuple[float, Array]:
        """`spread`, and Ā = E A to second order."""
        u, keys = self.uniform, self.inputs.keys
        averaged = left(u, keys)
        blocks = _own(averaged, self.inputs.samples)
        centred = _diagonals(keys, self.inputs) - 2 * blocks + np.einsum("sab,sab->sa", blocks, u)[..., None]
        variance = self.strength * np.diag(self.inputs.queries).reshape(len(u), -1, 1) * centred
        row = np.einsum("sab,sab->sa", u, variance)
        return float(np.sqrt(np.mean(row**2))), u * (1 + 0.5 * (variance - row[..., None]))

    def _fluctuation(self) -> Array:
        """B(K, V), by multiplying out the four products of J^a = diag(u_a) − u_a u_aᵀ and J^c."""
        u, keys, values = self.uniform, self.inputs.keys, self.inputs.values
        by_keys, by_values = left(u, keys), left(u, values)
        cross = left(u, (by_keys * by_values).T)
        squares: Array = left(u, by_keys.T) * left(u, by_values.T)
        return mixed(u, keys * values) - cross - cross.T + squares

    def _scattered(self, weighted: Array, gram: Array) -> Array:
        """G(W, X)."""
        u, back = self.uniform, self.uniform.swapaxes(1, 2)
        averaged = left(u, gram)
        cross = left(back, averaged * left(back, weighted).T)
        squares: Array = mixed(back, weighted * left(u, averaged.T))
        return mixed(back, weighted) * gram - cross - cross.T + squares


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


def _diagonals(gram: Array, inputs: Projections) -> Array:
    return np.diag(gram).reshape(inputs.samples, 1, -1)
