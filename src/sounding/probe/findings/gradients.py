"""gradient_explosion and gradient_vanishing: the squared norm of the gradient changes by a factor per layer."""

from __future__ import annotations

import math

from sounding.probe.growth import bounded_exp, student_quantile
from sounding.probe.reading import WEIGHT_GRADIENT, Call, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.thresholds import Thresholds
from sounding.profile import Estimate

FLOAT32_RANGE = 2 * math.log(3.4028235e38)


def find_gradient_change(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    r"""Gradients that grow or shrink towards the input by more than the network's depth allows.

    With a factor $g$ per weight layer of the squared norm the depth scale is $\xi = 1/|\ln g|$, and networks train to
    about $16\,\xi$ (meanfield2019, figure 2). A network of $L$ weight layers spans $(L - 1)/\xi$ depth scales, and not
    more than its gradients were seen to change. High severity: above 16 at 99% confidence, or above 20 as measured
    (a rate that changes along the network widens the interval, not the damage). Medium: three quarters of 16.
    """
    silenced = _silenced(reading)
    if silenced is not None:
        return [silenced]
    growth = reading.network.get("gradient_growth")
    steps = reading.depth - 1
    if growth is None or steps < 1 or not math.isfinite(growth.value) or growth.value <= 0:
        return []
    rate = math.log(growth.value)
    low, high = _interval(reading, growth, thresholds)
    seen = _seen_change(reading, explodes=rate > 0)
    scales = min(abs(rate) * steps, seen)
    slowest = rate + _widening(reading) * ((low if rate > 0 else high) - rate)
    surely = min(abs(slowest) * steps, seen) if slowest * rate > 0 else 0.0
    if max(surely, scales / thresholds.margin) >= thresholds.depth_scales:
        severity: Severity = "high"
    elif scales >= thresholds.near * thresholds.depth_scales and low * high > 0:
        severity = "medium"
    else:
        return []
    return [_finding(reading, (low, rate, high), steps=steps, severity=severity, thresholds=thresholds)]


def _silenced(reading: Reading) -> Finding | None:
    """The loss asks for something, and yet the gradient of every weight is exactly zero: nothing can be learned.

    A head that starts at zero silences the layers before it, but not itself, and is no finding.
    """
    asked = [call for call in reading.calls if math.isfinite(call.get("gradient_log_norm"))]
    measured = [call for call in reading.calls if not math.isnan(call.get(WEIGHT_GRADIENT))]
    if not asked or not measured or any(call.get(WEIGHT_GRADIENT) > -math.inf for call in measured):
        return None
    return Finding(
        kind="gradient_vanishing",
        severity="high",
        layer=asked[0].name,
        depth=asked[0].depth,
        evidence={"weights_without_gradient": float(len(measured))},
        why=(
            f"The gradient ends at {asked[0].name}: it is exactly zero for the weights of all {len(measured)} layers "
            "that have any, the end of a gradient that vanishes with depth (meanfield2019)."
        ),
        seed="meanfield2019",
        remedies=(
            "look for weights of zero, and for units that are zero for the whole batch",
            "sounding repair TARGET --method he: variance 2/fan_in for ReLU, where PyTorch's default is 1/(3 fan_in)",
        ),
    )


def _interval(reading: Reading, growth: Estimate, thresholds: Thresholds) -> tuple[float, float]:
    """Of ln growth at 95%: Student's interval where the fit gives one, else from the standard error."""
    given = reading.settings.get("growth_interval")
    if given is not None and all(isinstance(end, int | float) and 0 < end < math.inf for end in given):
        return math.log(given[0]), math.log(given[1])
    half = thresholds.deviations * (growth.stderr or 0.0) / growth.value
    return math.log(growth.value) - half, math.log(growth.value) + half


def _widening(reading: Reading) -> float:
    """How much wider the interval is at 99% than at 95%, for the fit's degrees of freedom."""
    degrees = reading.settings.get("growth_degrees_of_freedom") or math.inf
    return student_quantile(0.995, degrees) / student_quantile(0.975, degrees)


def _seen_change(reading: Reading, *, explodes: bool) -> float:
    """The largest change of the squared norm from the last quarter of the weight layers to the first, in logarithms.

    A fit within stages of a network extrapolates over the jumps between them; this does not. Infinite where gradients
    left the range of the format, or where a filter hides layers.
    """
    sign = 1.0 if explodes else -1.0
    measured = [sign * call.get("gradient_log_norm") for call in reading.weight_layers]
    known = [value for value in measured if not math.isnan(value)]
    if len(known) < reading.depth or not known or any(math.isinf(value) for value in known):
        return math.inf
    quarter = max(1, len(known) // 4)
    return 2 * (max(known[:quarter]) - min(known[-quarter:]))


def _finding(
    reading: Reading, rates: tuple[float, float, float], *, steps: int, severity: Severity, thresholds: Thresholds
) -> Finding:
    low, rate, high = rates
    explodes = rate > 0
    slow, fast = sorted((abs(low), abs(high)))
    fatal = thresholds.depth_scales / abs(rate)
    extreme = _extreme(reading, explodes=explodes)
    evidence = {
        "growth": bounded_exp(rate),
        "growth_low": bounded_exp(low),
        "growth_high": bounded_exp(high),
        "weight_layers": float(steps + 1),
        "depth_scale": 1 / abs(rate),
        "depth_scales": abs(rate) * steps,
        "fatal_depth": fatal,
        "fatal_depth_low": thresholds.depth_scales / fast,
        "fatal_depth_high": thresholds.depth_scales / slow if low * high > 0 else math.inf,
        "overflow_depth": FLOAT32_RANGE / abs(rate),
    }
    predicted = reading.predicted.get("gradient_growth")
    if predicted is not None:
        evidence |= {"growth_predicted": predicted.value, "growth_predicted_error": predicted.stderr or 0.0}
    within = "beyond" if severity == "high" else "close to"
    return Finding(
        kind="gradient_explosion" if explodes else "gradient_vanishing",
        severity=severity,
        layer=extreme.name if extreme else None,
        depth=extreme.depth if extreme else None,
        evidence=evidence,
        why=(
            f"The squared gradient norm changes by ×{evidence['growth']:.3g} "
            f"({evidence['growth_low']:.3g} to {evidence['growth_high']:.3g}) "
            f"per weight layer towards the input, ×10^{rate * steps / math.log(10):.0f} over {steps + 1} layers: "
            f"{within} the {fatal:.0f} layers ({thresholds.depth_scales:.0f} depth scales) to which such a network "
            "trains (meanfield2019)."
        ),
        seed="meanfield2019",
        remedies=_remedies(reading, explodes=explodes),
    )


def _extreme(reading: Reading, *, explodes: bool) -> Call | None:
    """The weight layer with the largest gradient, or the smallest."""
    measured = [call for call in reading.weight_layers if math.isfinite(call.get("gradient_log_norm"))]
    sign = 1 if explodes else -1
    return max(measured, key=lambda call: sign * call.get("gradient_log_norm"), default=None)


def _remedies(reading: Reading, *, explodes: bool) -> tuple[str, ...]:
    normalized = any("BatchNorm" in call.kind for call in reading.calls)
    if explodes and normalized and reading.has_shortcuts:
        return (
            "sounding repair TARGET --method zero_residual: residual branches that start at zero",
            "sounding repair TARGET --method tune_batchnorm: a shift β and eps for which gradients reach this depth",
            "make it shallower, or warm the learning rate up",
        )
    if explodes and normalized:
        return (
            "sounding repair TARGET --method tune_batchnorm: a shift β and eps for which gradients reach this depth",
            "sounding repair TARGET --method haar,shape_activations: orthogonal weights and gains that fall with depth",
            "make it shallower, or add residual connections",
        )
    if explodes and reading.has_shortcuts:
        return (
            "sounding repair TARGET --method zero_residual: residual branches that start at zero",
            "sounding repair TARGET --method add_batchnorm: normalize inside the branches",
            "clip gradients adaptively (sounding.repair.AdaptiveClipping)",
        )
    if explodes:
        return (
            "sounding repair TARGET --method haar: orthogonal weights of gain 1",
            "sounding repair TARGET --method add_batchnorm",
            "clip gradients adaptively (sounding.repair.AdaptiveClipping)",
        )
    return (
        "sounding repair TARGET --method he: variance 2/fan_in for ReLU, where PyTorch's default is 1/(3 fan_in)",
        "sounding repair TARGET --method haar: orthogonal weights of gain 1",
        "sounding repair TARGET --method add_batchnorm",
    )
