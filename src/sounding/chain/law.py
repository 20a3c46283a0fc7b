"""The law of a chain: what one layer does to a batch, checked before any work.

With rows as samples, one layer takes H (samples × features) to

    A = H Wᵀ                        without a skip connection (γ = ∞), entries of W of variance 1/width
    A = H + γ H Wᵀ                  with one, entries of W of unit variance (rank2020, eq. 1)
    H′ = φ(g·N(A))  or  N(φ(g·A))   with the normalization N before or after the activation φ, g the layer's gain

A chain without normalization is kept at unit mean square and its scale in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from sounding.activations import Activation, resolve
from sounding.errors import UsageError
from sounding.weights import WeightLaw
from sounding.weights import resolve as resolve_weights

Norm = Literal["none", "batch", "layer", "rms"]
Placement = Literal["before", "after"]
GainSpec = float | str | Callable[[int], float]

NORMS: tuple[Norm, ...] = get_args(Norm)
LARGEST_NORMAL = 10.0  # a standard normal exceeds it once in 10²³ draws: no pre-activation of a chain does
SCALE_LIMIT = 1e12  # an activation looks linear from there on: the logarithm alone tells larger scales apart


@dataclass(frozen=True)
class Gain:
    """The factor in front of the activation's input, layer by layer; `constant` where it is one number."""

    at: Callable[[int], float]
    constant: float | None = None
    name: str = ""


@dataclass(frozen=True)
class ChainLaw:
    """What a layer is made of, by the names of `simulate`'s arguments; the same for each layer but for the gain."""

    width: int
    batch_size: int
    weights: WeightLaw
    activation: Activation
    gain: Gain
    norm: Norm = "batch"
    centring: bool = True  # whether the norm subtracts a mean: layer norm always does, rms never
    placement: Placement = "before"
    eps: float = 0.0
    residual: float = math.inf

    @property
    def skip(self) -> float:
        """The coefficient of H in A."""
        return 0.0 if math.isinf(self.residual) else 1.0

    @property
    def weight_scale(self) -> float:
        """The standard deviation of an entry of the matrix that multiplies H."""
        return 1.0 / math.sqrt(self.width) if math.isinf(self.residual) else self.residual

    @property
    def vanishes(self) -> bool:
        """Whether φ(0) = 0, so that small signals stay small."""
        return float(self.activation(np.zeros(1))[0]) == 0.0

    @property
    def renormalizes(self) -> bool:
        """Whether the scale travels in logarithms, apart from the state."""
        return self.norm == "none"


def make_law(
    *,
    width: int,
    batch_size: int,
    weights: Any = "gaussian",
    activation: Any = "identity",
    gain: GainSpec = 1.0,
    norm: str = "batch",
    centring: bool = True,
    placement: str = "before",
    eps: float = 0.0,
    residual: float = math.inf,
    depth: int = 1,
    dtype: str = "float32",
) -> ChainLaw:
    """The checked law of a chain; raises `UsageError` on anything without a meaning."""
    _check_count("width", width, minimum=1)
    _check_count("batch size", batch_size, minimum=1)
    if norm not in NORMS:
        raise UsageError(f"unknown normalization {norm!r}", hint=f"one of {', '.join(NORMS)}")
    if placement not in ("before", "after"):
        raise UsageError(f"the normalization stands 'before' or 'after' the activation, got {placement!r}")
    if norm == "batch" and centring and batch_size < 2:
        raise UsageError(
            f"centred batch norm needs at least 2 samples to have a variance, got a batch of {batch_size}",
            hint="--batch-size 32, or --no-centring",
        )
    if norm == "layer" and width < 2:
        raise UsageError(f"layer norm needs at least 2 features to have a variance, got width {width}")
    if not (math.isfinite(eps) and eps >= 0):
        raise UsageError(f"eps must be a finite number of at least 0, got {eps}")
    gamma = _as_float("residual strength", residual)
    if math.isnan(gamma) or gamma <= 0:
        raise UsageError(f"the residual strength must lie in (0, inf], got {residual}", hint="0.1, or inf for no skip")
    law = ChainLaw(
        width=width,
        batch_size=batch_size,
        weights=resolve_weights(weights),
        activation=resolve(activation),
        gain=make_gain(gain),
        norm=norm,
        centring=centring if norm == "batch" else norm == "layer",
        placement=placement,  # type: ignore[arg-type]
        eps=float(eps),
        residual=gamma,
    )
    _check_residual(law, dtype=dtype)
    _check_activation(law, depth=depth, dtype=dtype)
    return law


def make_gain(gain: GainSpec) -> Gain:
    """The gain of each layer: a number, "power:K" for ℓ^(−K) (thesis2024, section 6.4), or a function of the layer.

    >>> make_gain("power:0.5").at(4)
    0.5
    """
    if isinstance(gain, str):
        kind, _, parameter = gain.partition(":")
        if kind == "power":
            exponent = _as_float("gain exponent", parameter)
            if not math.isfinite(exponent):
                raise UsageError(f"the gain ℓ^(−K) needs a finite K, got {gain!r}", hint="power:0.4")
            return Gain(lambda layer: float(layer) ** -exponent, name=gain)
        gain = _as_float("gain", gain)
    if callable(gain):
        return Gain(gain, name=getattr(gain, "__name__", "callable"))
    value = _as_float("gain", gain)
    if not math.isfinite(value) or value == 0:
        raise UsageError(f"the gain must be finite and not 0, got {gain}")
    return Gain(lambda layer: value, constant=value)


def normalize_(values: torch.Tensor, law: ChainLaw) -> torch.Tensor:
    """N(A) over the last two axes (samples, features), in A's own memory; a constant feature becomes 0, never NaN."""
    if law.norm == "none":
        return values
    axis = -2 if law.norm == "batch" else -1  # each feature over samples, or each sample over features
    if law.centring:
        values = values - values.mean(dim=axis, keepdim=True)
    square = values.square().sum(dim=axis, keepdim=True).div_(values.shape[axis])  # biased, as in torch's forward pass
    if law.eps > 0:
        square.add_(law.eps)
    inverse = square.clamp_min_(torch.finfo(values.dtype).tiny).rsqrt_()  # 0 · a large number is 0, 0 · ∞ is NaN
    return values * inverse if values.requires_grad else values.mul_(inverse)  # autograd keeps `values`


def _check_count(name: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise UsageError(f"the {name} must be a whole number of at least {minimum}, got {value!r}")


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"the {name} must be a number, got {value!r}") from None


def _check_residual(law: ChainLaw, *, dtype: str) -> None:
    """Raise when γWH would overflow `dtype`, or drown in the rounding of H + γWH."""
    if math.isinf(law.residual):
        return
    numbers = np.finfo(dtype)
    size = law.residual * math.sqrt(law.width)  # of γWH, for H of unit size
    if size * LARGEST_NORMAL * math.sqrt(law.batch_size) > float(numbers.max) ** 0.5:
        raise UsageError(
            f"the residual strength {law.residual:g} overflows {dtype} at width {law.width}", hint="inf for no skip"
        )
    if size < float(numbers.eps) / 2:  # half a last digit: H + γWH would round to H
        raise UsageError(
            f"the residual strength {law.residual:g} is lost in the rounding of {dtype} at width {law.width}",
            hint="--dtype float64" if dtype == "float32" and size > float(np.finfo("float64").eps) else "0.01 or more",
        )


def _check_activation(law: ChainLaw, *, depth: int, dtype: str) -> None:
    """Raise when the activation or the gain would leave the numbers of `dtype` on the way."""
    largest = 0.0
    # a sample of layers, dense at the input, where gains change fastest
    for layer in np.unique(np.geomspace(1, max(depth, 1), num=min(max(depth, 1), 64)).astype(np.int64)):
        value = _as_float(f"gain of layer {layer}", law.gain.at(int(layer)))
        if not math.isfinite(value):
            raise UsageError(f"the gain of layer {layer} must be finite, got {value}")
        largest = max(largest, abs(value) * _largest_input(law))
    limit = float(np.finfo(dtype).max) ** 0.5  # its square is summed
    name = law.activation.name
    with np.errstate(all="ignore"):
        grid = np.concatenate([-np.geomspace(1e-3, largest, 64)[::-1], [0.0], np.geomspace(1e-3, largest, 64)])
        values = np.asarray(law.activation(grid), dtype=np.float64)
        if not np.all(np.isfinite(values)) or np.max(np.abs(values)) > limit:
            raise UsageError(
                f"activation {name!r} overflows {dtype} on inputs up to {largest:.3g}, which this chain reaches",
                hint="a smaller batch size or gain, a normalization before the activation, or --dtype float64",
            )
        if law.renormalizes and not _looks_linear(law.activation):
            raise UsageError(
                f"activation {name!r} is not linear at infinity, so a chain without normalization overflows",
                hint="--norm batch, layer or rms",
            )


def _largest_input(law: ChainLaw) -> float:
    """The largest |value| that reaches the activation at gain 1: √n or √d after a norm, a rare normal otherwise."""
    if law.norm == "none":
        return LARGEST_NORMAL
    if law.placement == "before":
        largest = math.sqrt(law.batch_size if law.norm == "batch" else law.width)
        # without a skip connection features are close to normal; with one, a feature may be a single sample's own
        return min(largest, 2 * LARGEST_NORMAL) if math.isinf(law.residual) else largest
    if math.isinf(law.residual):
        return LARGEST_NORMAL * (math.sqrt(law.batch_size) if law.norm == "batch" else 1.0)
    return (1 + law.residual * math.sqrt(law.width) * LARGEST_NORMAL) * math.sqrt(law.batch_size)


def _looks_linear(activation: Activation) -> bool:
    """Whether φ(sx)/s settles as s → ∞, and as s → 0 when φ(0) = 0: the scale can then travel in logarithms."""
    points = np.array([-2.0, -1.0, 1.0, 2.0])
    far = [np.asarray(activation(points * s)) / s for s in (SCALE_LIMIT, 1e3 * SCALE_LIMIT)]
    if not (np.all(np.isfinite(far)) and np.allclose(far[0], far[1], rtol=1e-3, atol=1e-9)):
        return False
    if float(activation(np.zeros(1))[0]) != 0.0:
        return True
    near = [np.asarray(activation(points * s)) / s for s in (1 / SCALE_LIMIT, 1e-3 / SCALE_LIMIT)]
    return bool(np.allclose(near[0], near[1], rtol=1e-3, atol=1e-9))
