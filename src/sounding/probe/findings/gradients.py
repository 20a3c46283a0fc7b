"""gradient_explosion and gradient_vanishing: the squared norm of the gradient changes by a factor per layer."""

from __future__ import annotations

import math

from sounding.probe.reading import Call, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.thresholds import Thresholds
from sounding.profile import Estimate

FLOAT32_RANGE = 2 * math.log(3.4028235e38)


def find_gradient_change(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    r"""Gradients that grow or shrink towards the input by more than the network's depth allows.

    With a factor $g$ per weight layer of the squared norm the depth scale is $\xi = 1/|\ln g|$, and networks train to
    about $16\,\xi$ (meanfield2019, figure 2). A network of $L$ weight layers spans $(L - 1)/\xi$ depth scales; the
    finding is of high severity when that is above 16 by more than the noise of $g$, medium when it may be or when half
    of it is reached.
    """
    growth = reading.network.get("gradient_growth")
    steps = len(reading.weight_layers) - 1
    if growth is None or steps < 1 or not math.isfinite(growth.value) or growth.value <= 0:
        return []
    rate = Estimate(math.log(growth.value), (growth.stderr or 0.0) / growth.value)
    scales = abs(rate.value) * steps
    noise = thresholds.deviations * (rate.stderr or 0.0) * steps
    if scales - noise >= thresholds.depth_scales:
        severity: Severity = "high"
    elif scales >= thresholds.near * thresholds.depth_scales and scales > noise:
        severity = "medium"
    else:
        return []
    return [_finding(reading, growth, rate=rate, steps=steps, severity=severity, thresholds=thresholds)]


def _finding(
    reading: Reading, growth: Estimate, *, rate: Estimate, steps: int, severity: Severity, thresholds: Thresholds
) -> Finding:
    explodes = rate.value > 0
    low, high = growth.interval(thresholds.deviations)
    fatal = thresholds.depth_scales / abs(rate.value)
    span = thresholds.deviations * (rate.stderr or 0.0)
    extreme = _extreme(reading, explodes=explodes)
    within = "beyond" if severity == "high" else "within reach of"
    return Finding(
        kind="gradient_explosion" if explodes else "gradient_vanishing",
        severity=severity,
        layer=extreme.name if extreme else None,
        depth=extreme.depth if extreme else None,
        evidence={
            "growth": growth.value,
            "growth_low": low,
            "growth_high": high,
            "weight_layers": float(steps + 1),
            "depth_scale": 1 / abs(rate.value),
            "depth_scales": abs(rate.value) * steps,
            "fatal_depth": fatal,
            "fatal_depth_low": thresholds.depth_scales / (abs(rate.value) + span),
            "fatal_depth_high": thresholds.depth_scales / max(abs(rate.value) - span, 1e-300),
            "overflow_depth": FLOAT32_RANGE / abs(rate.value),
        },
        why=(
            f"The squared gradient norm changes by ×{growth} per weight layer towards the input, ×10^"
            f"{rate.value * steps / math.log(10):.0f} over {steps + 1} layers: {within} the {fatal:.0f} layers "
            f"({thresholds.depth_scales:.0f} depth scales) to which such a network trains (meanfield2019)."
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
    if explodes and normalized:
        return (
            "sounding repair --method tune_batchnorm: a shift β and eps for which gradients reach this depth",
            "sounding repair --method haar with shape_activations: orthogonal weights and gains that fall with depth",
            "make it shallower, or add residual connections",
        )
    if explodes:
        return (
            "scale residual branches down with depth, or normalize them",
            "sounding repair --method haar: orthogonal weights of gain 1",
            "clip gradients adaptively",
        )
    return (
        "He initialization (gain √2 for ReLU), or gain 5/3 for tanh: PyTorch's default gain is 1/√3",
        "sounding repair --method haar: orthogonal weights of gain 1",
        "sounding repair --method add_batchnorm",
    )
