"""One layer of a batch of chains: (chains, samples, features) in, the same out.

Two routes with one law. The explicit route draws the d × d matrix of each chain. The Gram route draws what the batch
sees of it: n × d normals times a factor of the Gram matrix for Gaussian weights, a uniformly random frame times that
factor for Haar weights. `Chains` holds the state; nothing here looks at the values, so that a GPU never waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from sounding.chain.factor import factor_gram, factor_rows, find_repeats, whiten
from sounding.chain.law import SCALE_LIMIT, ChainLaw, normalize_
from sounding.chain.normals import Normals

Route = Literal["gram", "explicit"]

SINGLE_WIDTH = 96  # from here on, a CPU's library multiplies matrices faster one by one than as a batch


def choose_route(law: ChainLaw, *, explicit: bool) -> Route:
    """The Gram route where the law has one and it draws less: rotation-invariant weights and n < d."""
    return "gram" if law.weights.invariance and law.batch_size < law.width and not explicit else "explicit"


class Chains:
    """A batch of independent chains that share everything but the residual strength.

    There is one law per chain. `normals` draws standard normals of a shape, used before the next are asked for; without
    it they come from `generator`, which is on the device of `state`.
    """

    def __init__(
        self,
        laws: Sequence[ChainLaw],
        state: torch.Tensor,  # (chains, samples, features), the input
        *,
        route: Route,
        generator: torch.Generator,
        normals: Normals | None = None,
    ) -> None:
        self.law = laws[0]
        self.route = route
        self.generator = generator
        self.state = state
        self.log_scale = torch.zeros(len(laws), dtype=torch.float64, device=state.device)
        self.skips = any(law.skip for law in laws)
        self.skip = state.new_tensor([law.skip for law in laws]).view(-1, 1, 1)
        self.scale = state.new_tensor([law.weight_scale for law in laws]).view(-1, 1, 1)
        self._activation = self.law.activation.torch()
        self._linear = self.law.activation.name == "identity"
        self._normals = normals or self._draw_normals
        self._gram: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        self.repeats = find_repeats(state)
        if self.law.renormalizes:
            self._renormalize()

    def step(self, gain: float | torch.Tensor = 1.0) -> None:
        """Advance every chain by one layer; the memory of the state is that of the next layer but one."""
        previous, self.state = self.state, self.finish(self.multiply(), gain)
        self._gram = None
        if self.law.renormalizes:
            self._renormalize()
        if previous.device.type == "cpu":
            self._spare = previous  # for `_multiply_in_one`, which then needs no new memory

    def gram(self) -> torch.Tensor:
        """HHᵀ of the state in float64, computed once per layer."""
        if self._gram is None:
            wide = self.state.double()
            self._gram = wide @ wide.mT
        return self._gram

    def multiply(self) -> torch.Tensor:
        """A = H Wᵀ or H + γ H Wᵀ with a fresh W for each chain."""
        if self.route == "explicit" and _goes_singly(self.state) and not self.state.requires_grad:
            return self._multiply_in_one()
        product = self.product().mul_(self.scale)
        return product.addcmul_(self.state, self.skip) if self.skips else product

    def _multiply_in_one(self) -> torch.Tensor:
        """What `multiply` returns, chain by chain: each matrix is multiplied while it is in the cache, with its sum."""
        values = torch.empty_like(self.state) if self._spare is None else self._spare
        skips, scales = self.skip.flatten().tolist(), self.scale.flatten().tolist()
        for one, out, skip, scale in zip(self.state, values, skips, scales, strict=True):
            torch.addmm(one, one, self._draw_weights(()).T, beta=skip, alpha=scale, out=out)
        return values if self.repeats is None else values[:, self.repeats]

    def product(self) -> torch.Tensor:
        """H Wᵀ with the entries of W of unit variance; equal samples get equal rows."""
        if self.route == "explicit":
            if _goes_singly(self.state):  # in the order in which `_multiply_in_one` would draw them
                weights = torch.stack([self._draw_weights(()).clone() for _ in self.state])
            else:
                weights = self._draw_weights((len(self.state),))
            product = multiply_each(self.state, weights)
        else:
            normals = self._normals(tuple(self.state.shape))  # drawn first: a second thread goes on to the next ones
            factor = factor_rows(self.state) if self.state.dtype == torch.float64 else factor_gram(self.gram())
            if self.law.weights.invariance == "haar":
                factor = factor @ whiten(normals) * math.sqrt(self.law.width)
            product = torch.bmm(factor.to(self.state.dtype), normals)
        return product if self.repeats is None else product[:, self.repeats]

    def _draw_weights(self, chains: tuple[int, ...]) -> torch.Tensor:
        """(*chains, d, d) with entries of unit variance."""
        shape = (*chains, self.law.width, self.law.width)
        if self.law.weights.invariance == "gaussian":
            return self._normals(shape)
        place = {"dtype": self.state.dtype, "device": self.state.device}
        return self.law.weights.draw(shape, generator=self.generator, **place)

    def forget_gram(self) -> None:
        """The state has changed behind this object's back."""
        self._gram = None

    def finish(self, values: torch.Tensor, gain: float | torch.Tensor) -> torch.Tensor:
        """φ(g·N(A)) or N(φ(g·A))."""
        if self.law.placement == "before":
            return self._activate(normalize_(values, self.law), gain)
        return normalize_(self._activate(values, gain), self.law)

    def _activate(self, values: torch.Tensor, gain: float | torch.Tensor) -> torch.Tensor:
        """The values behind gain and activation, rescaled where the law keeps its scale in a logarithm."""
        if isinstance(gain, torch.Tensor) or gain != 1.0:
            values = values * gain
        if self._linear:
            return values
        if not self.law.renormalizes or self.law.activation.degree == 1.0:
            return self._activation(values)
        # the true input is scale times `values`; far out on either side the activation is linear, and only the
        # logarithm still tells the scales apart. With φ(0) ≠ 0 small inputs are forgotten, and so is their scale
        least = 1 / SCALE_LIMIT if self.law.vanishes else 0.0
        scale = self.log_scale.exp().clamp(least, SCALE_LIMIT).to(values.dtype).view(-1, 1, 1)
        if self.law.vanishes:
            return self._activation(values * scale) / scale
        self.log_scale = self.log_scale.clamp_min(0.0)
        return self._activation(values * scale) / scale.clamp_min(1.0)

    def _renormalize(self) -> None:
        """Unit mean square, the scale moved into `log_scale`; an all-zero state has none, and stays."""
        square = self.state.double().square().mean(dim=(-2, -1))
        alive = square > 0
        square = torch.where(alive, square, torch.ones_like(square))
        self.log_scale = torch.where(alive, self.log_scale + 0.5 * square.log(), torch.zeros_like(square))
        inverse = square.rsqrt()
        self.state = self.state * inverse.to(self.state.dtype).view(-1, 1, 1)

    def _draw_normals(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.state.dtype, device=self.state.device)


def multiply_each(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """A Bᵀ for each chain."""
    if not _goes_singly(rows) or rows.requires_grad:
        return torch.bmm(rows, others.mT)
    product = rows.new_empty(*rows.shape[:-1], others.shape[-2])
    for one, other, out in zip(rows, others, product, strict=True):
        torch.mm(one, other.T, out=out)
    return product


def _goes_singly(rows: torch.Tensor) -> bool:
    return rows.device.type == "cpu" and rows.shape[-1] >= SINGLE_WIDTH
