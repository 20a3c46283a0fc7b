"""The mean field of a network without normalization: variance, correlation, order and chaos.

The base of meanfield2019, after Poole et al. 2016 and Schoenholz et al. 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from sounding.activations import Activation, ActivationLike, resolve
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.theory import length
from sounding.theory.bounds.bound import check_integer
from sounding.theory.integrals.quadrature import Integral
from sounding.theory.kernel import Neuron, check_correlation, crossing, kappa, slope_at
from sounding.theory.length import LengthPoint, LengthTable

Phase = Literal["ordered", "critical", "chaotic"]
Status = Literal["fixed", "vanishing", "marginal", "diverging"]

EDGE = 1e-9  # |χ₁ − 1| below this is the edge of chaos
LINEAR = 1e-6  # how close to 1 the slope of the correlation map at 1 comes at infinite variance where φ becomes linear
LARGEST_STD = 1e100  # its square times the span of the grid of variances, 1e24 and more, still fits float64
FADED = 1e-290  # a variance whose square root and products are hardly numbers any more
SETTLING = 200  # layers after which the nearest attracting variance is the one a variance goes to

NOTES: dict[Status, str] = {
    "fixed": "",
    "vanishing": "the variance goes to 0: both samples end at the same point, the origin",
    "marginal": "every variance is a fixed point; the one stated is the start",
    "diverging": "the variance grows without bound; χ₁ and χ are those of ever larger variances",
}


@dataclass(frozen=True)
class Vanilla:
    """Where variance and correlation of two samples end in a deep wide network without normalization.

    Args:
        activation, weight_std, bias_std: what it belongs to.
        variance: q*, the mean square of the preactivations; 0 and infinity are results too, see `status`.
        correlation: c*, of two samples' preactivations.
        chi_1: χ₁ = σ_w² E φ′(√q* z)²: slope of the correlation map at 1, and growth per layer of squared gradients.
        chi: χ at c*: σ_w² E φ′(u₁)φ′(u₂).
        variance_scale: ξ_q = −1/ln|dq′/dq|, the layers in which a change of variance shrinks by e.
        correlation_scale: ξ_c = −1/ln χ, the same for a change of correlation; infinite at the edge of chaos.
        phase: "ordered" for χ₁ < 1, "critical" for χ₁ = 1, "chaotic" for χ₁ > 1.
        status: whether the variance has a "fixed" point, or is "vanishing", "marginal" or "diverging".
        fixed_points: all variances that a layer leaves as they are.
        error: an upper estimate of the relative error of the numbers above.
        linear: whether φ is a multiple of the identity, which leaves every correlation as it is.
    """

    activation: str
    weight_std: float
    bias_std: float
    variance: float
    correlation: float
    chi_1: float
    chi: float
    variance_scale: float
    correlation_scale: float
    phase: Phase
    status: Status
    fixed_points: tuple[LengthPoint, ...]
    error: float
    linear: bool = False

    @property
    def note(self) -> str:
        """What the status means, in words; empty for an ordinary fixed point."""
        if self.status == "marginal" and self.linear:
            return "every variance and every correlation is a fixed point; those stated are the start and 1"
        return NOTES[self.status]

    def to_dict(self) -> dict[str, Any]:
        """Plain types under the names of `sounding predict vanilla --json`."""
        numbers = "activation weight_std bias_std variance correlation chi_1 chi variance_scale correlation_scale"
        return fields_of(self, f"{numbers} phase status note fixed_points error")

    def __str__(self) -> str:
        head = f"Vanilla({self.activation}, σ_w {self.weight_std:g}, σ_b {self.bias_std:g}): {self.phase}"
        tail = f" ({self.note})" if self.note else ""
        return (
            f"{head}{tail}\n  variance {self.variance:.6g}  correlation {self.correlation:.6g}  χ₁ {self.chi_1:.6g}  "
            f"χ {self.chi:.6g}\n  depth scales: variance {self.variance_scale:.4g}, "
            f"correlation {self.correlation_scale:.4g} layers"
        )


def vanilla(activation: ActivationLike, *, weight_std: float, bias_std: float = 0.0, start: float = 1.0) -> Vanilla:
    """Fixed points, χ₁, depth scales and phase for weights N(0, σ_w²/fan-in) and biases N(0, σ_b²).

    q′ = σ_w² E φ(√q z)² + σ_b² and c′ = (σ_w² E φ(u₁)φ(u₂) + σ_b²)/q*. The correlation map is a power series in c with
    non-negative coefficients, so c* = 1 attracts when χ₁ ≤ 1, and otherwise one c* in [0, 1) does.

    Args:
        activation: name, record or callable.
        weight_std, bias_std: σ_w > 0 and σ_b ≥ 0.
        start: the variance of the input; it decides where several fixed points attract.

    Raises:
        UsageError: a standard deviation is negative or not finite, σ_w or the start is 0, or φ is 0.

    >>> relu = vanilla("relu", weight_std=1.0, bias_std=0.5)
    >>> round(relu.variance, 12), round(relu.chi_1, 12), relu.phase
    (0.5, 0.5, 'ordered')
    """
    phi = resolve(activation)
    weight, bias = check_stds(weight_std, bias_std)
    if not (math.isfinite(start) and start > 0):
        raise UsageError(f"the start variance must be positive and finite, got {start}")
    moments = None if phi.degree == 1.0 else length.tabulate(phi, weight=weight, bias=bias)
    return _describe(phi, weight, bias, settle(phi, weight, bias, start, moments))


class Settled(NamedTuple):
    """Where a variance goes: its end, what kind of end that is, the length map's slope there, and all fixed points."""

    variance: float
    status: Status
    slope: float
    points: tuple[LengthPoint, ...]


def settle(phi: Activation, weight: float, bias: float, start: float, moments: LengthTable | None) -> Settled:
    """The end of the variance for weight = σ_w² and bias = σ_b², from tabulated moments; degree 1 needs none."""
    if moments is None:
        return _settle_linear(phi, weight, bias, start)
    if not (moments.values > 0).any():
        raise UsageError(f"activation {phi.name!r} is 0 almost everywhere, so no correlation is defined after it")
    if np.nanmax(np.abs(length.relative_change(moments, weight, bias))) <= EDGE:
        return Settled(start, "marginal", 1.0, (LengthPoint(start, 1.0),))
    return _follow(moments, length.fixed_points(moments, weight, bias), weight, bias, start)


def first_chi(phi: Activation, weight: float, settled: Settled) -> Integral:
    """χ₁ = σ_w² E φ′² at the variance a network ends with, or in the limit of ever larger or smaller ones."""
    if settled.status == "diverging":
        return Integral(weight * length.limit(length.squared_slope, phi), 1e-8, 0)
    gain = length.squared_slope(phi, settled.variance)
    return Integral(weight * gain.value, weight * gain.error, gain.evaluations)


def phase_of(chi_1: float) -> Phase:
    """ "ordered", "critical" or "chaotic"."""
    return "critical" if abs(chi_1 - 1) <= EDGE else "ordered" if chi_1 < 1 else "chaotic"


def trajectory(
    activation: ActivationLike,
    *,
    weight_std: float,
    bias_std: float = 0.0,
    depth: int,
    variance: float = 1.0,
    correlation: float = 0.5,
) -> Profile:
    """Variance and correlation of two samples' preactivations over depth: `mean_square` and `mean_cosine`.

    Layers 0 … depth, c followed at the running q. A variance beyond float64 ends the profile at the last finite layer,
    with `diverged_at` in its settings.

    >>> path = trajectory("relu", weight_std=2**0.5, depth=2, variance=3.0, correlation=0.0)
    >>> path.series("mean_square").value.round(6).tolist(), path.series("mean_cosine").value.round(6).tolist()
    ([3.0, 3.0, 3.0], [0.0, 0.31831, 0.493731])
    """
    phi = resolve(activation)
    weight, bias = check_stds(weight_std, bias_std)
    layers, rho, q = check_integer(depth, name="depth", least=0), check_correlation(correlation), float(variance)
    if not (math.isfinite(q) and q > 0):
        raise UsageError(f"the start variance must be positive and finite, got {variance}")
    settings: dict[str, Any] = {
        "activation": phi.name, "weight_std": weight_std, "bias_std": bias_std, "of": "preactivations",
    }  # fmt: skip
    signals = list(layer_maps(phi, q, rho, [(weight, bias)] * layers))
    if len(signals) <= layers:
        ended = math.isfinite(weight * signals[-1].square + bias)
        settings["vanished_at" if ended else "diverged_at"] = len(signals)
    variances, correlations = zip(*((signal.variance, signal.correlation) for signal in signals), strict=True)
    return Profile.over_depth({"mean_square": variances, "mean_cosine": correlations}, settings)


@dataclass(frozen=True)
class LayerSignal:
    """Two samples at one layer: mean square and correlation before the activation, E φ² and E φφ after it."""

    variance: float
    correlation: float
    square: float
    product: float


def layer_maps(
    phi: Activation, variance: float, correlation: float, layers: Sequence[tuple[float, float]]
) -> Iterator[LayerSignal]:
    """The length and correlation maps (meanfield2019, section 2), layer by layer, from the first one's pre-activations.

    q′ = σ_w² E φ² + σ_b² and q′c′ = σ_w² E φφ + σ_b². The signals end early where the variance fades below 1e-290 or
    leaves the range of floating-point numbers. `layers` holds (σ_w², σ_b²) of each layer behind the first.
    """
    for following in (*layers, None):
        square = length.second_moment(phi, variance).value
        product = length.product_moment(phi, variance, correlation).value if square > 0 else 0.0
        yield LayerSignal(variance, correlation, square, product)
        if following is None:
            return
        weight, bias = following
        variance = weight * square + bias
        if not (math.isfinite(variance) and variance >= FADED):
            return
        if square > 0:
            correlation = max(-1.0, min(1.0, (weight * product + bias) / variance))


def check_stds(weight_std: float, bias_std: float) -> tuple[float, float]:
    """σ_w² and σ_b² of a positive and a non-negative standard deviation."""
    for name, value, least in (("weight_std", weight_std, "above 0"), ("bias_std", bias_std, "at least 0")):
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (name == "weight_std" and value == 0):
            raise UsageError(f"{name} must be a finite number {least}, got {value!r}")
        if value > LARGEST_STD:
            raise UsageError(f"{name} must be at most {LARGEST_STD:g}, got {value!r}: variances leave float64")
    return float(weight_std) ** 2, float(bias_std) ** 2


def _settle_linear(phi: Activation, weight: float, bias: float, start: float) -> Settled:
    """φ of degree 1: q′ = aq + σ_b² with a = σ_w² E φ² = χ₁, exactly; ReLU has a = σ_w²/2."""
    factor = weight * length.second_moment(phi, 1.0).value
    if abs(factor - 1) <= EDGE and bias == 0:
        return Settled(start, "marginal", 1.0, (LengthPoint(start, 1.0),))
    if factor >= 1 - EDGE:
        return Settled(math.inf, "diverging", factor, (LengthPoint(0.0, factor),) if bias == 0 else ())
    point = LengthPoint(bias / (1 - factor), factor)
    return Settled(point.variance, "fixed" if bias else "vanishing", factor, (point,))


def _follow(moments: LengthTable, points: tuple[LengthPoint, ...], weight: float, bias: float, start: float) -> Settled:
    """The fixed point that a variance goes to: the next one in the direction of its first step."""
    phi, largest = moments.activation, float(moments.variances[-1])
    diverging = Settled(math.inf, "diverging", math.nan, points)

    def step(q: float) -> float:
        return weight * length.second_moment(phi, q).value + bias

    if moments.increasing:
        # an increasing map moves every variance towards the next fixed point in the direction of its first step
        upwards = step(start) > start
        beyond = [point for point in points if (point.variance >= start if upwards else point.variance <= start)]
        if not beyond:
            return diverging
        end = beyond[0] if upwards else beyond[-1]
    else:
        # E φ(√q z)² falls no faster than 1/√q, so a variance may jump across its end, by less each time: no cycles
        q = start
        for _ in range(SETTLING):
            q = min(step(q), largest)
        if q >= largest or not points:
            return diverging
        end = min((p for p in points if p.attracting), key=lambda p: abs(p.variance - q), default=points[-1])
    return Settled(end.variance, "fixed" if end.variance else "vanishing", end.slope, points)


def _describe(phi: Activation, weight: float, bias: float, settled: Settled) -> Vanilla:
    """The record of a network whose variance has settled."""
    variance, status, slope, points = settled
    first = first_chi(phi, weight, settled)
    chi_1, damping = first.value, 1.0
    if status == "diverging":
        correlation, chi, error = _far_correlation(phi, chi_1)
        # correlations settle relative to a variance that grows by this factor per layer
        damping, slope = 1 / (weight * length.limit(length.moment_slope, phi) or 1.0), 1.0
    elif status == "vanishing":
        correlation, chi, error = 1.0, chi_1, 1e-13
    else:
        moment = length.second_moment(phi, variance).value
        correlation, chi, error = _correlation(_neuron(phi, variance, moment), weight * moment / variance, chi_1)
        error = max(error, 1e-13, first.error / chi_1 if 0 < chi_1 < math.inf else 0.0)
        # an error of the map moves its fixed point by 1/(1 − slope) of it
        error = error / max(abs(1 - slope), 1e-6) + 2 * phi.derivative_error
    return Vanilla(
        activation=phi.name,
        weight_std=math.sqrt(weight),
        bias_std=math.sqrt(bias),
        variance=variance,
        correlation=correlation,
        chi_1=chi_1,
        chi=chi,
        variance_scale=depth_scale(slope),
        correlation_scale=depth_scale(chi * damping),
        phase=phase_of(chi_1),
        status=status,
        fixed_points=points,
        error=error,
        linear=phi.linear,
    )


def depth_scale(factor: float) -> float:
    """−1/ln|factor|: the layers in which a deviation that changes by `factor` per layer shrinks by e.

    Infinite from |factor| = 1 on, where it does not shrink; 0 at 0; not a number where the factor is not.

    >>> depth_scale(math.exp(-0.25)), depth_scale(1.0), depth_scale(0.0)
    (4.0, inf, 0.0)
    """
    size = abs(factor)
    if math.isnan(size) or size == 0:
        return size
    return math.inf if size >= 1 - EDGE else -1 / math.log(size)


def _neuron(phi: Activation, variance: float, moment: float) -> Neuron:
    """ψ of a layer at variance q, scaled to E ψ² = 1."""
    return Neuron(phi.scaled(math.sqrt(variance)), 0.0, math.sqrt(moment), moment)


def _correlation(neuron: Neuron, share: float, chi_1: float) -> tuple[float, float, float]:
    """c*, χ at c* and its error, of c′ = share·κ(c) + 1 − share; κ the map of φ(√q* ·), share = σ_w² E φ²/q*."""
    if chi_1 <= 1 + EDGE:
        return 1.0, chi_1, 0.0
    # without a bias an odd activation keeps orthogonal samples orthogonal
    rest = 1 - share + share * kappa(neuron, 0.0).value
    correlation = 0.0 if rest < 1e-13 else crossing(neuron, weight=share)
    if correlation == 1.0:
        return 1.0, chi_1, 1e-8
    slope = slope_at(neuron, correlation)
    return correlation, share * slope.value, share * slope.error


def _far_correlation(phi: Activation, chi_1: float) -> tuple[float, float, float]:
    """c*, χ and the error where the variance is so large that the bias no longer counts."""
    moment = length.second_moment(phi, length.LARGEST).value
    if not math.isfinite(moment) or not math.isfinite(chi_1):
        return math.nan, math.nan, 0.0
    neuron = _neuron(phi, length.LARGEST, moment)
    slope = slope_at(neuron, 1.0).value
    # what becomes linear on each side far out is a leaky ReLU there, for which 1 attracts; as in `limit`
    near = slope_at(_neuron(phi, length.LARGEST / 4, length.second_moment(phi, length.LARGEST / 4).value), 1.0).value
    if abs(2 * slope - near - 1) <= LINEAR:
        return 1.0, chi_1, 1e-8
    correlation, chi, error = _correlation(neuron, 1.0, slope)
    return correlation, chi_1 * chi / slope, error + 1e-8
