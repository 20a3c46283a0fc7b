"""The mean field of batch normalization: fixed point, eigenvalues, gradient growth and trainable depth.

A layer is h = W φ(γ BN(h_prev) + β) with independent weights of variance 1/width (meanfield2019). In the limit of
infinite width the covariance of a batch through the layers is a deterministic map; its permutation-symmetric fixed
points (BSB1) have one variance and one correlation. All expectations are quadratures with an error.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np

from sounding.activations import ActivationLike, resolve
from sounding.activations.custom import widened
from sounding.encoding import fields_of
from sounding.errors import NumericalError, UsageError
from sounding.profile import Profile
from sounding.theory.collapse import CriticalEps, collapse_rates, find_critical_eps, require_slope, solve_spread
from sounding.theory.eigenvalues import (
    Eigenvalues,
    backward_eigenvalues,
    forward_eigenvalues,
    infinite_batch_eigenvalues,
)
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.moments import Expectations, Method, Moments, rescaled
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.quadrature import check_batch_size

__all__ = ["BatchNormPrediction", "CrossBatch", "FixedPoint", "batchnorm", "critical_eps", "depth_scale"]

DEPTH_SCALES = 16.0  # that training survives: the overlay 16ξ of the training figures of meanfield2019
_LARGE = 1e-4  # an error that a reader must be told of
_FARTHEST = 10.5  # standard deviations within which kinks matter: the root of what lies beyond is 1e-12
_DRIFT = 1e-10  # of μ against its image, relative: what the solution may leave without another step
# the collapsed phase knows the activation through its slopes at one point alone
CLOSED = Method("closed form", "the batch collapses, and only the slopes at the shift matter")


@dataclass(frozen=True)
class FixedPoint:
    """A BSB1 fixed point: E φ², the correlation of two samples, μ = variance·(1 − correlation), and its stability.

    μ is 0 in the collapsed phase, which only eps > 0 has: all samples of the batch become equal. Attracting means that
    no forward eigenvalue exceeds 1; one equal to 1, as for ReLU at B → ∞, is the limit of attracting ones and counts.
    """

    variance: float
    correlation: float
    mu: float
    attracting: bool


@dataclass(frozen=True)
class CrossBatch:
    """Samples of two different batches: their covariance at the fixed point and the eigenvalue of its decay."""

    covariance: float
    eigenvalue: float


@dataclass(frozen=True)
class BatchNormPrediction:
    """What the mean field says of a deep batch-normalized network.

    `gradient_growth` is the factor per layer of the squared gradient norm towards the input, of activations and weights
    alike (meanfield2019, sections 4 and G). `depth_scale` is ξ = 1/|ln growth|, `trainable_depth` 16ξ, the overlay of
    meanfield2019's figures. `error` bounds the quadrature error of every number, absolute below 1 and relative above.
    """

    activation: str
    batch_size: float
    eps: float
    scale: float
    shift: float
    weight_std: float
    fixed_point: FixedPoint
    forward_eigenvalues: Eigenvalues
    backward_eigenvalues: Eigenvalues
    cross_batch: CrossBatch
    error: float
    method: Method = CLOSED

    @property
    def gradient_growth(self) -> float:
        """The backward eigenvalue G."""
        return self.backward_eigenvalues.G

    @property
    def depth_scale(self) -> float:
        """ξ = 1/|ln growth|; infinite where growth is 1 within its error."""
        if abs(self.gradient_growth - 1.0) <= max(self.error, 1e-14):
            return math.inf
        return depth_scale(self.gradient_growth)

    @property
    def trainable_depth(self) -> float:
        """16ξ layers, to which training succeeds (meanfield2019)."""
        return DEPTH_SCALES * self.depth_scale

    @property
    def collapsed(self) -> bool:
        """Whether the samples of a batch become equal (μ = 0)."""
        return self.fixed_point.mu == 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain types, by the names the command line uses."""
        settings = fields_of(self, "activation batch_size eps scale shift weight_std")
        if math.isfinite(self.batch_size):
            settings["batch_size"] = int(self.batch_size)
        found = "fixed_point forward_eigenvalues backward_eigenvalues cross_batch gradient_growth depth_scale"
        return settings | fields_of(self, f"{found} trainable_depth collapsed error method")

    def profile(self, depth: int) -> Profile:
        """The prediction over layers 1 … depth at the fixed point, to lay over a measurement.

        `gradient_log_norm` is ½ ln of the mean squared gradient norm relative to the last layer's.
        """
        if depth < 1:
            raise UsageError(f"depth must be at least 1, got {depth}")
        rate = 0.5 * math.log(self.gradient_growth) if self.gradient_growth > 0 else -math.inf
        columns = {
            "mean_square": [self.fixed_point.variance] * depth,
            "mean_cosine": [self.fixed_point.correlation] * depth,
            "gradient_log_norm": [*((depth - layer) * rate for layer in range(1, depth)), 0.0],
        }
        return Profile.over_depth(columns, {"theory": "batchnorm", **fields_of(self, "activation eps")}, first=1)

    def __str__(self) -> str:
        size = "∞" if math.isinf(self.batch_size) else f"{self.batch_size:g}"
        extras = "".join(
            f", {name}={value:g}"
            for name, value, default in (("eps", self.eps, 0), ("scale", self.scale, 1), ("shift", self.shift, 0))
            if value != default
        )
        name = f"BatchNorm({self.activation}, B={size}{extras})"
        state = "attracting" if self.fixed_point.attracting else "not attracting"
        lines = [
            f"{name}: {self._headline()}",
            f"  fixed point  variance {self.fixed_point.variance:.4f}  correlation {self.fixed_point.correlation:.4f}  "
            f"{'collapsed, ' if self.collapsed else ''}{state}",
        ]
        if self.error > _LARGE:
            lines.append(f"  off by up to {self.error:.1g} (of each number, or absolutely below 1); {self.method}")
        return "\n".join(lines)

    def _headline(self) -> str:
        """How gradients grow and how deep one may go, or that a network does not stay at the fixed point."""
        if not self.fixed_point.attracting:
            return (
                "the fixed point of equal samples does not attract, so deep batches leave it and the growth of their "
                f"gradients is not predicted (it would be ×{self.gradient_growth:.6g} per layer there)"
            )
        deep = f"about {self.trainable_depth:.0f}" if self.trainable_depth < 1e6 else "more than a million"
        return (
            f"gradients {'grow' if self.gradient_growth >= 1 else 'shrink'} ×{self.gradient_growth:.6g} per layer "
            f"(squared norm), depth scale {self.depth_scale:.3g}, trainable to {deep} layers"
        )

    __repr__ = __str__


def depth_scale(growth: float) -> float:
    """ξ = 1/|ln growth|: over how many layers the squared gradient norm changes by a factor e; infinite at growth 1."""
    if growth <= 0:
        return 0.0
    return 1.0 / abs(math.log(growth)) if growth != 1.0 else math.inf


def batchnorm(
    activation: ActivationLike,
    *,
    batch_size: float,
    eps: float = 0.0,
    scale: float = 1.0,
    shift: float = 0.0,
    weight_std: float = 1.0,
    tolerance: float = 1e-12,
) -> BatchNormPrediction:
    """The mean field of φ(scale·BN(h) + shift) in a deep fully connected network of infinite width.

    BN uses the biased batch variance with eps inside the root (meanfield2019, Definition B.2; its eq. 9 writes 1/N for
    1/B). The fixed point is Theorem 4, the growth Theorem 7, both for eps = 0; eps > 0 and the eigenvalues L and M for
    any activation are derived in `integrals.normalized` and `eigenvalues`. Of several fixed points the one reached from
    large variance is reported; where μ goes to 0 the result is the collapsed phase.

    Args:
        activation: a name, an `Activation`, or a callable.
        batch_size: at least 4; `math.inf` for the limit.
        eps: the constant under the root, at least 0.
        scale, shift: γ (not 0) and β of the batch norm.
        weight_std: σ_w of weights with variance σ_w²/width; matters only with eps > 0, as eps/σ_w².

    Raises:
        UsageError: a batch below 4, a negative eps, a scale of 0, an unusable activation.
        NumericalError: the activation or its derivative has no second moment, or is constant.

    >>> print(batchnorm("relu", batch_size=32))  # doctest: +ELLIPSIS
    BatchNorm(relu, B=32): gradients grow ×1.52195 per layer (squared norm), depth scale 2.38, trainable to about 38 ...
      fixed point  variance 0.5000  correlation 0.3023  attracting
    """
    affine, size = _check(activation, batch_size, eps, scale, shift)
    if not (math.isfinite(weight_std) and weight_std > 0):
        raise UsageError(f"weight_std must be positive and finite, got {weight_std}")
    effective = eps / weight_std**2  # batch norm sees eps beside the variance of the weights' output
    expectations = Expectations(affine, size)
    mu = solve_spread(expectations, effective) if effective > 0 else 1.0
    if mu > 0:
        found = _at_fixed_point(expectations, NormalizedLaw(size, mu, effective), tolerance)
        found["method"] = expectations.method
    else:
        found = _collapsed(affine, size, effective)
    settings = (float(eps), affine.scale, affine.shift, float(weight_std))
    return BatchNormPrediction(affine.activation.name, size, *settings, **found)


def critical_eps(
    activation: ActivationLike, *, batch_size: float, scale: float = 1.0, shift: float = 0.0
) -> CriticalEps:
    """The eps at which a batch collapses: the largest with a positive fixed point (weights of variance 1/width).

    For an activation that is smooth at the shift the linear value is φ′(β)²γ² (1 for tanh and identity); for ReLU
    without shift it is (1 − J₁(−1/(B−1)))(B−1)/(2B). Below collapse the growth falls slowly; above it is
    `unit_growth`/eps.

    >>> critical_eps("tanh", batch_size=32).collapse
    1.0
    """
    affine, size = _check(activation, batch_size, 0.0, scale, shift)
    return find_critical_eps(Expectations(affine, size))


def _check(
    activation: ActivationLike, batch_size: float, eps: float, scale: float, shift: float
) -> tuple[Affine, float]:
    """The activation behind its scale and shift, with kinks known as far as the batch reaches, and the batch size."""
    size = check_batch_size(batch_size)
    if not (math.isfinite(eps) and eps >= 0):
        raise UsageError(f"eps must be at least 0 and finite, got {eps}", hint="eps 1e-5")
    if not math.isfinite(scale) or scale == 0:
        raise UsageError(f"scale must be finite and not 0, got {scale}: with 0 the layer forgets its input")
    if not math.isfinite(shift):
        raise UsageError(f"shift must be finite, got {shift}")
    reach = abs(shift) + abs(scale) * min(math.sqrt(size - 1.0), _FARTHEST)
    affine = Affine(widened(resolve(activation), reach), float(scale), float(shift))
    affine.reject_jumps()
    return affine, size


def _at_fixed_point(expectations: Expectations, law: NormalizedLaw, tolerance: float) -> dict[str, Any]:
    """Everything reported and its error, at a μ that a Newton step with λ_G improves where it misses its image."""
    affine = expectations.affine
    _require_representable(affine, law.mu, law.eps)
    for attempt in range(2):
        moments, errors = expectations.at(law, tolerance=tolerance)
        # without eps the map of μ is constant, and so is the law of x: the moments at any μ give those at the fixed
        # point
        if law.eps == 0:
            mu = _spread(moments)
            _require_representable(affine, mu, law.eps)
            law = NormalizedLaw(law.batch_size, mu, 0.0)
            moments, errors = rescaled(moments, mu), rescaled(errors, mu)
        found = _assemble(moments, law, affine.level)
        error = _propagate(found, moments, errors, law, affine.level)
        image, slope = found["fixed_point"].mu, found["forward_eigenvalues"].G
        known = errors[0].square + (errors[1].product if len(errors) == 2 else 0.0)
        off = abs(image - law.mu) if law.eps > 0 else 0.0
        # the solved μ, to which every number responds with a factor of order one over 1 − λ_G
        drift = 2 * off / (law.mu * max(abs(1.0 - slope), 1e-6))
        # nearer than its own error no step can lead, and from afar a Newton step may lead anywhere
        near = off <= max(_DRIFT * law.mu, 3 * known) or not off < 0.1 * abs(1 - slope) * law.mu
        if attempt or near or drift <= 0.1 * error:
            break
        law = NormalizedLaw(law.batch_size, law.mu + (image - law.mu) / (1 - slope), law.eps)
    return found | {"error": error + drift}


def _spread(moments: Moments) -> float:
    """μ after a layer: E φ² less what two samples share."""
    return moments[0].square - (moments[0].mean ** 2 if len(moments) == 1 else moments[1].product)


def _require_representable(affine: Affine, mu: float, eps: float) -> None:
    """Raise where μ or its square is no number of float64, or φ is constant on the batch."""
    name = affine.activation.name
    if not mu < 1e150:  # eigenvalues divide by μ², which must be a number, and so must 1/μ²
        raise NumericalError(
            f"the second moment of {name} at scale {affine.scale:g} is too large for float64", hint="a smaller scale"
        )
    if 0 < mu < 1e-150 and eps == 0:
        raise NumericalError(
            f"the second moment of {name} at shift {affine.shift:g} is too small for float64",
            hint="a multiple of the activation: without eps its size does not matter",
        )
    if mu <= 1e-15 * affine.level**2 and eps == 0:
        raise NumericalError(
            f"{name} is constant on the batch: batch normalization has nothing to normalize",
            hint="another shift or activation",
        )


def _assemble(moments: Moments, law: NormalizedLaw, level: float) -> dict[str, Any]:
    """Everything reported except the error, from the moments of φ − level."""
    size, eps, mu, line = law.batch_size, law.eps, _spread(moments), moments[0]
    if len(moments) == 1:
        forward, backward = infinite_batch_eigenvalues(moments[0], mu=mu, eps=eps)
        crossed = line.slope**2 / (mu + eps)
    else:
        forward = forward_eigenvalues(*moments, batch_size=size, mu=law.mu, eps=eps)
        backward = backward_eigenvalues(*moments, batch_size=size)
        # tr E[D(G − xxᵀ/B)/s]/(B−1) = E[s^−1 D(1 − x²/(B−1))]: meanfield2019, Theorems E.1 and F.1, at any eps
        crossed = line.slope**2
    variance = line.square + 2 * level * line.mean + level**2
    return {
        "fixed_point": FixedPoint(variance, 1.0 - mu / variance, mu, _attracting(forward)),
        "forward_eigenvalues": forward,
        "backward_eigenvalues": backward,
        "cross_batch": CrossBatch((line.mean + level) ** 2, crossed),
    }


def _attracting(forward: Eigenvalues) -> bool:
    """Whether no forward eigenvalue exceeds 1 by more than rounding."""
    return max(forward.G, forward.L, forward.M) <= 1.0 + 1e-11


def _collapsed(affine: Affine, size: float, eps: float) -> dict[str, Any]:
    """What is reported of the collapsed phase, from the slopes at the shift alone."""
    require_slope(affine)
    rates = collapse_rates(affine, size)
    height = float(affine.value(np.array([affine.shift]))[0]) ** 2
    forward, backward = (Eigenvalues(e.G / eps, e.L / eps, e.M / eps) for e in (rates.forward, rates.backward))
    return {
        "fixed_point": FixedPoint(height, 1.0, 0.0, _attracting(forward)),
        "forward_eigenvalues": forward,
        "backward_eigenvalues": backward,
        "cross_batch": CrossBatch(height, rates.cross / eps),
        "error": affine.activation.derivative_error * backward.G + 1e-12,
    }


def _numbers(found: dict[str, Any]) -> np.ndarray:
    """All numbers reported, in one array, to see how errors move them."""
    forward, backward = found["forward_eigenvalues"], found["backward_eigenvalues"]
    point, cross = found["fixed_point"], found["cross_batch"]
    return np.array([*astuple(forward), *astuple(backward), point.variance, point.correlation,
                     cross.covariance, cross.eigenvalue])  # fmt: skip


def _propagate(found: dict[str, Any], moments: Moments, errors: Moments, law: NormalizedLaw, level: float) -> float:
    """The largest first-order error of a reported number, relative above 1: moved by each moment's error, added up."""
    base = _numbers(found)
    total = np.zeros_like(base)
    records: tuple[Any, ...] = moments
    # by differences: every number is a ratio of up to nineteen moments, whose derivatives would be pages of formulas
    for place, (record, error) in enumerate(zip(records, errors, strict=True)):
        for field in fields(record):
            moved: Any = list(records)
            moved[place] = replace(record, **{field.name: getattr(record, field.name) + getattr(error, field.name)})
            total += np.abs(_numbers(_assemble(tuple(moved), law, level)) - base)
    return float((total / np.maximum(np.abs(base), 1.0)).max())
