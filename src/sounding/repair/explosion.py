"""The explosion law: how fast gradients grow in a batch-normalized network as its activations' gain shrinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sounding.activations import Activation, resolve
from sounding.chain import simulate
from sounding.errors import UsageError
from sounding.profile import Estimate

SMALLEST_GAIN = 2.0**-6  # where the search ends without a fall: tanh differs from a line by 3e-4 there
FALLEN = 20.0  # the window ends where the rate has fallen this far below its largest
SIGNIFICANT = 3.0  # standard errors above the linear network's rate
LEAST_POWER = 0.5  # of the law; below, the exponent of the gains exceeds 2 and leaves the second layer a quarter


@dataclass(frozen=True)
class ExplosionLaw:
    """R(α) ≈ floor + c₁ α^c₂ over a window of gains, R the growth of ln‖gradient‖ per layer.

    Args:
        c1: the prefactor.
        c2: the exponent.
        stderr: standard error of c2.
        floor: the rate of the linear network, which no gain changes.
        window: smallest and largest gain of the fit.
        rates: (gain, rate) pairs measured.
    """

    c1: float
    c2: float
    stderr: float
    floor: Estimate
    window: tuple[float, float]
    rates: tuple[tuple[float, Estimate], ...]

    def exponent(self, margin: float = 1.1) -> float:
        """k/c₂ with the margin k > 1: gains ℓ^(−k/c₂) make the growth over layer ℓ fall as ℓ^(−k), a finite sum."""
        if not (math.isfinite(margin) and margin > 1):
            raise UsageError(
                f"expected a margin above 1, got {margin}", hint="1.1; at 1 the growth over layers diverges"
            )
        return margin / self.c2

    def __str__(self) -> str:
        low, high = self.window
        return (
            f"R(α) = {self.floor} + {self.c1:.3g} α^c₂ per layer, c₂ = {Estimate(self.c2, self.stderr)} "
            f"for gains {low:.3g} to {high:.3g}"
        )


def explosion_law(
    activation: str | Activation | Callable[[Tensor], Tensor],
    *,
    width: int = 64,
    batch_size: int = 64,
    gains: Sequence[float] | None = None,
    depth: int = 48,
    generator: torch.Generator | None = None,
) -> ExplosionLaw:
    """Measure how the growth of gradients depends on the gain α in networks of Haar weights, batch norm and σ(αx).

    thesis2024 (C.5, figure C.1) fits R(α) = c₁ α^c₂. It is only roughly a power law: c₂ depends on the window of gains,
    which the result states, and at small gains R tends to the rate of the linear network, not to 0, because a batch of
    n samples in width d is isometric only to within n/d; that floor is measured with the identity and taken off first.
    (C.155) has R's sign reversed; here it is positive when gradients grow towards the input.

    Args:
        activation: a name, an Activation or a callable.
        width, batch_size: of the networks.
        gains: the gains to fit. By default 1, 2^(−½), 2^(−1), … until R has fallen twentyfold: past the plateau that
            GELU keeps down to 0.25. The plateau counts, as every layer of the network must cross it.
        depth: layers; growth is taken over the middle half.
        generator: source of randomness.

    Raises:
        UsageError: the rate does not fall with the gain (a positively homogeneous activation), or too few gains.

    >>> law = explosion_law("tanh", width=32, batch_size=32, generator=torch.Generator().manual_seed(0))
    >>> law.c2 > 1.5 and law.window[0] < law.window[1]
    True
    """
    if gains is not None and (len(set(gains)) < 2 or min(gains) <= 0 or not all(map(math.isfinite, gains))):
        raise UsageError(f"expected at least 2 positive gains, got {list(gains)}", hint="gains=(1, 0.5, 0.25)")

    def measure(function: Any, gain: float) -> Estimate:
        return _rate(function, gain, width=width, batch_size=batch_size, depth=depth, generator=generator)

    if is_homogeneous(activation):
        raise UsageError(
            f"{activation} is positively homogeneous: a gain changes its scale, not the growth", hint="tune_batchnorm"
        )
    floor = measure("identity", 1.0)
    rates: list[tuple[float, Estimate]] = []
    halvings = int(-2 * math.log2(SMALLEST_GAIN))
    for gain in gains if gains is not None else [2.0 ** (-step / 2) for step in range(halvings + 1)]:
        rates.append((float(gain), measure(activation, float(gain))))
        if gains is None and len(rates) > 2 and _has_fallen(rates, floor):
            break
    return _fit(activation, rates, floor)


def is_homogeneous(activation: str | Activation | Callable[[Tensor], Tensor]) -> bool:
    """Whether f(αx) ∝ f(x) for α > 0, as for ReLU: what a gain does to it, the next norm undoes."""
    function = resolve(activation).torch() if isinstance(activation, str | Activation) else activation
    points = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64)
    with torch.no_grad():
        whole, part = function(points), function(points / 4)
    size = torch.linalg.vector_norm
    return torch.allclose(part * size(whole), whole * size(part), rtol=1e-6)


def _rate(
    activation: Any, gain: float, *, width: int, batch_size: int, depth: int, generator: torch.Generator | None
) -> Estimate:
    """The growth of gradients at this gain, measured in a random chain with Haar weights."""
    simulation = simulate(
        width=width,
        batch_size=batch_size,
        depth=depth,
        burn_in=depth // 4,
        every=depth,
        measures=("log_norm",),
        weights="haar",
        activation=activation,
        gain=gain,
        backward=True,
        generator=generator,
    )
    gradients = simulation.gradients
    assert gradients is not None
    return gradients["log_rate"]


def _has_fallen(rates: list[tuple[float, Estimate]], floor: Estimate) -> bool:
    excesses = [rate.value - floor.value for _, rate in rates]
    return excesses[-1] < max(max(excesses) / FALLEN, SIGNIFICANT * _noise(rates[-1][1], floor))


def _noise(rate: Estimate, floor: Estimate) -> float:
    return math.hypot(rate.stderr or 0.0, floor.stderr or 0.0)


def _fit(activation: Any, rates: list[tuple[float, Estimate]], floor: Estimate) -> ExplosionLaw:
    """Least squares of ln(R − floor) on ln α, weighted by the standard errors."""
    kept = [
        (gain, rate.value - floor.value, _noise(rate, floor))
        for gain, rate in rates
        if rate.value - floor.value > SIGNIFICANT * _noise(rate, floor)
    ]
    if len(kept) < 2:
        raise UsageError(
            f"gradients with {activation} grow hardly faster than those of the linear network at gains from "
            f"{rates[-1][0]:.3g} to {rates[0][0]:.3g}: there is no law to fit",
            hint="a larger width and depth, or larger gains",
        )
    log_gain, log_rate = np.log([k[0] for k in kept]), np.log([k[1] for k in kept])
    # the law bends: each point counts alike once its noise is below a tenth
    deviation = np.maximum([k[2] / k[1] for k in kept], 0.1)
    weight = deviation**-2
    centre = float(np.average(log_gain, weights=weight))
    spread = float(np.sum(weight * (log_gain - centre) ** 2))
    slope = float(np.sum(weight * (log_gain - centre) * log_rate) / spread)
    if slope < LEAST_POWER:
        raise UsageError(
            f"the growth of gradients with {activation} falls only as gain^{slope:.2g}, so no gain can hold them",
            hint="smaller gains, or tune_batchnorm",
        )
    level = float(np.average(log_rate, weights=weight)) - slope * centre
    window = (min(k[0] for k in kept), max(k[0] for k in kept))
    return ExplosionLaw(math.exp(level), slope, 1 / math.sqrt(spread), floor, window, tuple(rates))
