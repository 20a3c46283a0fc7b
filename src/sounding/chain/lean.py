"""Few small chains, one layer at a time in numpy: where torch's cost per operation would outweigh the arithmetic.

The same laws and the same two routes as `sounding.chain.step`, for one chain. Normals and weights are drawn for a block
of layers at once, and the block's states are measured together, as if they were chains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import lapack

from sounding.chain.factor import DEPENDENT_FLOAT32, DEPENDENT_FLOAT64, find_repeats
from sounding.chain.law import SCALE_LIMIT, ChainLaw
from sounding.chain.normals import make_normals
from sounding.chain.observe import View, observe
from sounding.chain.step import Route

if TYPE_CHECKING:
    from sounding.chain.engine import Plan, Task

Matrix = NDArray[Any]

# Numbers drawn per layer, for one chain and for all of a task, up to which this route is the faster one. It takes a
# sixteenth of torch's CPU time at width 32 and 4 samples, half at width 256 and 64, four fifths with four such chains.
SMALL_CHAIN = 20_000
SMALL_TASK = 60_000
FEW_CHAINS = 16  # torch shares its cost among chains: with 32 of width 32 it takes as long as this route, with 64 half
BLOCK_NUMBERS = 1 << 18  # drawn at once: a megabyte, which a core's cache holds


def is_small(law: ChainLaw, *, chains: int, route: Route) -> bool:
    """Whether chains are few and small enough to go one by one."""
    drawn = law.width * (law.batch_size if route == "gram" else law.width)
    return chains <= FEW_CHAINS and drawn <= SMALL_CHAIN and chains * drawn <= SMALL_TASK


class OneByOne:
    """A task of few small chains: one by one within a block of layers, measured block by block."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self.plan, self.law = plan, task.laws[0]
        inputs, self.generator = plan.draw_input(task)
        self.normals = make_normals(task.seed, generator=self.generator, dtype=plan.dtype)
        self.chains = [LeanChain(self.law, one, route=plan.route) for one in inputs]
        drawn = self.law.width * max(self.law.batch_size, self.law.width if plan.route == "explicit" else 0)
        # as many layers as keep the numbers drawn and the states within a cache
        self.block = max(1, min(256, BLOCK_NUMBERS // (task.chains * drawn)))

    @property
    def state(self) -> torch.Tensor:
        return torch.stack([torch.from_numpy(chain.state) for chain in self.chains])

    def look(self) -> torch.Tensor:
        scales = torch.tensor([chain.log_scale for chain in self.chains], dtype=torch.float64)
        return observe(View(self.state, scales, self.plan.route), self.plan.observer)

    def advance(self, layers: range) -> list[tuple[int, torch.Tensor]]:
        plan, law = self.plan, self.law
        gains = [law.gain.at(layer) for layer in layers]
        rows_drawn = law.batch_size if plan.route == "gram" else law.width
        shape = (len(self.chains), len(layers), rows_drawn, law.width)
        if plan.route == "gram" or law.weights.invariance == "gaussian":
            draws = self.normals(shape)
        else:
            draws = law.weights.draw(shape, generator=self.generator, dtype=plan.dtype, device="cpu")
        looked = [index for index, layer in enumerate(layers) if plan.measures_at(layer)]
        rows = []
        for chain, draw in zip(self.chains, draws.numpy(), strict=True):
            states, logs = chain.advance(draw, gains)
            if looked:
                scales = torch.tensor([logs[index] for index in looked], dtype=torch.float64)
                rows.append(observe(View(torch.from_numpy(states[looked]), scales, plan.route), plan.observer))
        values = torch.stack(rows, dim=1) if looked else ()
        return [(layers[index], found) for index, found in zip(looked, values, strict=True)]


class LeanChain:
    """One chain; `advance` takes a block of layers and gives the state after each."""

    def __init__(self, law: ChainLaw, state: torch.Tensor, *, route: Route) -> None:
        self.law = law
        self.route = route
        self.state: Matrix = state.numpy().copy()
        self.dtype = self.state.dtype
        self.log_scale = 0.0
        repeats = find_repeats(state.unsqueeze(0))
        self.repeats = None if repeats is None else repeats.numpy()
        self._scale = self.dtype.type(law.weight_scale)
        self._tiny = np.finfo(self.dtype).tiny  # under a root, so that a constant feature becomes 0, not NaN
        self._axis = 0 if law.norm == "batch" else 1
        self._lower = np.tri(law.batch_size)
        self._linear = law.activation.name == "identity"
        if law.renormalizes:
            self._renormalize()

    def advance(self, draws: Matrix, gains: list[float]) -> tuple[Matrix, list[float]]:
        """Go through len(draws) layers: normals (n × d) of each on the Gram route, weights (d × d) on the explicit."""
        states = np.empty((len(draws), *self.state.shape), dtype=self.dtype)  # kept, to be measured all at once
        scales = []
        for index, (draw, gain) in enumerate(zip(draws, gains, strict=True)):
            values = self._multiply(draw)
            if self.law.placement == "before":
                self.state = self._activate(self._normalize(values), gain)
            else:
                self.state = self._normalize(self._activate(values, gain))
            if self.law.renormalizes:
                self._renormalize()
            states[index] = self.state
            scales.append(self.log_scale)
        return states, scales

    def _multiply(self, draw: Matrix) -> Matrix:
        """The next layer before its norm: the state times the drawn weights, by either route, plus the skip."""
        if self.route == "explicit":
            product = self.state @ draw.T
        else:
            factor = self._factor()
            if self.law.weights.invariance == "haar":
                wide = draw.astype(np.float64)
                triangle = np.linalg.cholesky(wide @ wide.T)
                # factor C⁻¹ = (C⁻ᵀ factorᵀ)ᵀ
                factor = lapack.dtrtrs(triangle, factor.T, lower=1, trans=1)[0].T * math.sqrt(self.law.width)
            product = factor.astype(self.dtype) @ draw
        if self.repeats is not None:
            product = product[self.repeats]
        product *= self._scale
        if self.law.skip:
            product += self.state
        return product

    def _factor(self) -> Matrix:
        """A factor of HHᵀ: pivoted Cholesky of the float64 Gram matrix, or QR of the rows of a float64 chain."""
        if self.dtype == np.float64:
            return _factor_rows(self.state)
        wide = self.state.astype(np.float64)
        gram = wide @ wide.T
        factor, order, rank, _ = lapack.dpstrf(gram, tol=DEPENDENT_FLOAT32 * gram.diagonal().max(), lower=1)
        factor *= self._lower  # LAPACK leaves the upper triangle as it was
        factor[:, rank:] = 0
        result: Matrix = np.empty_like(factor)
        result[order - 1] = factor  # LAPACK counts from 1
        return result

    def _normalize(self, values: Matrix) -> Matrix:
        """The values behind the norm of the law, over samples or over features."""
        law = self.law
        if law.norm == "none":
            return values
        axis = self._axis
        if law.centring:
            values = values - np.add.reduce(values, axis=axis, keepdims=True) / values.shape[axis]
        square = np.add.reduce(values * values, axis=axis, keepdims=True)
        square /= values.shape[axis]
        if law.eps > 0:
            square += square.dtype.type(law.eps)
        normalized: Matrix = values / np.sqrt(np.maximum(square, self._tiny))
        return normalized

    def _activate(self, values: Matrix, gain: float) -> Matrix:
        """The values behind gain and activation; a state that is rescaled meets the activation at its true scale."""
        if gain != 1.0:
            values = values * self.dtype.type(gain)
        if self._linear:
            return values
        activation = self.law.activation
        if not self.law.renormalizes or activation.degree == 1.0:
            return activation(values).astype(self.dtype, copy=False)
        scale = min(math.exp(min(self.log_scale, 700.0)), SCALE_LIMIT)
        if self.law.vanishes:
            divisor = scale = max(scale, 1 / SCALE_LIMIT)
        else:
            self.log_scale, divisor = max(self.log_scale, 0.0), max(scale, 1.0)
        return (activation(values.astype(np.float64) * scale) / divisor).astype(self.dtype, copy=False)

    def _renormalize(self) -> None:
        flat = self.state.ravel()
        square = float(np.dot(flat, flat)) / flat.size
        if square > 0:
            self.log_scale += 0.5 * math.log(square)
            self.state = self.state * self.dtype.type(square**-0.5)
        else:
            self.log_scale = 0.0


def _factor_rows(rows: Matrix) -> Matrix:
    """What `sounding.chain.factor.factor_rows` gives for one batch, by LAPACK alone."""
    n = len(rows)
    factored = lapack.dgeqrf(rows.T)[0]
    factor: Matrix = np.tril(factored[:n].T)
    lengths = np.sqrt((factor * factor).sum(axis=1, keepdims=True))
    rounding = np.abs(factor) <= DEPENDENT_FLOAT64 * math.sqrt(rows.shape[1]) * lengths
    factor[rounding & rounding.diagonal()] = 0.0
    return factor
