"""gradient_explosion and gradient_vanishing: the squared norm of the gradient changes by a factor per layer."""

from __future__ import annotations

import math

from sounding.probe.findings.change import Change, measure_change
from sounding.probe.growth import bounded_exp
from sounding.probe.reading import WEIGHT_GRADIENT, LayerCall, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import tell
from sounding.probe.thresholds import Thresholds

FLOAT32_RANGE = 2 * math.log(3.4028235e38)  # ln of a squared norm that overflows
NO_GRADIENT = -63 * math.log(2.0)  # ln of the norm below which float32 rounds the square of every entry to zero


def find_gradient_change(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    r"""Gradients that grow or shrink towards the input by more than the network's depth allows.

    With a factor $g$ per weight layer of the squared norm the depth scale is $\xi = 1/|\ln g|$, and networks train to
    about $16\,\xi$ (meanfield2019, figure 2). A network of $L$ weight layers spans $(L - 1)/\xi$ depth scales, and not
    more than its gradients were seen to change. A single layer that multiplies by $e^{16}$ does the same damage.

    High severity is above 16 depth scales where 12 of them are sure at 99%. Where the interval at 95% contains no
    change at all nothing is said. A single weak layer is a warning: it gets a full gradient and recovers.
    """
    silenced = _silenced(reading)
    if silenced is not None:
        return [silenced]
    found = _find_change(reading, thresholds)
    if not any(finding.severity == "high" for finding in found):
        silenced = _silenced(reading, floor=NO_GRADIENT)
    return [silenced] if silenced is not None else found


def _find_change(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """The finding of the rate, or of the layer that breaks it."""
    change = measure_change(reading, thresholds)
    if change is None:
        return []
    line, near = thresholds.depth_scales, thresholds.near * thresholds.depth_scales
    fatal = change.scales >= line and change.surely >= near and (change.explodes or change.spread >= near)
    sure = change.low * change.high > 0 or abs(change.jump) >= near
    severity: Severity
    if fatal and sure:
        severity = "high"
    elif change.scales >= near and sure:
        severity = "medium"
    elif abs(change.jump) >= thresholds.broken * line:
        severity = "low"
    else:
        return []
    return [_finding(reading, change, severity=severity, thresholds=thresholds)]


def _silenced(reading: Reading, *, floor: float = -math.inf) -> Finding | None:
    """The loss asks for something, and yet no weight has a gradient that an optimizer could use: nothing is learned.

    Such a gradient is exactly zero, or below a floor at which its square is: SGD then loses the step in rounding, and
    Adam, which divides by the root of the square, by its own epsilon. A head that starts at zero silences the layers
    before it, but not itself, and is no finding. The layer is the first one that puts out nothing but zeros, where
    there is such a one: behind it no weight has anything to multiply.
    """
    asked = [call for call in reading.calls if floor < call.get("gradient_log_norm") < math.inf]
    measured = [call for call in reading.calls if not math.isnan(call.get(WEIGHT_GRADIENT))]
    if not asked or not measured or any(call.get(WEIGHT_GRADIENT) > floor for call in measured):
        return None
    silent = next((call for call in reading.calls if call.get("mean_square") == 0.0), None)
    end = silent or asked[0]
    what = "The signal ends, all zeros," if silent is not None else "The gradient ends"
    size = "exactly zero" if floor == -math.inf else "below 1e-19, its square zero,"
    evidence = {"weights_without_gradient": float(len(measured))}
    return tell("no_gradient", layer=end.name, depth=end.depth, evidence=evidence, what=what, size=size)


def _finding(reading: Reading, change: Change, *, severity: Severity, thresholds: Thresholds) -> Finding:
    """The finding at the broken layer where that is most of the change, else at the one the gradient suffers most."""
    broken = change.broken if abs(change.jump) > change.spread else None
    layer = broken or _extreme(reading, explodes=change.explodes)
    evidence = _evidence(reading, change, broken, thresholds)
    key = _situation(reading, severity, explodes=change.explodes)
    if broken is not None:
        key = "explosion_at_a_layer" if change.explodes else "vanishing_at_a_layer"
    low, high = bounded_exp(change.low), bounded_exp(change.high)
    return tell(
        key, severity, layer=layer.name if layer else None, depth=layer.depth if layer else None, evidence=evidence,
        interval=f" ({low:.3g} to {high:.3g})" if low < high else "", layers=change.layers,
        power=(change.jump if broken is not None else change.rate * change.steps) / math.log(10),
        fatal=thresholds.depth_scales / abs(change.rate) if change.rate else math.inf, line=thresholds.depth_scales,
        within="beyond" if severity == "high" else "close to", depth_of_network=reading.depth, scales=abs(change.jump),
    )  # fmt: skip


def _evidence(reading: Reading, change: Change, broken: LayerCall | None, thresholds: Thresholds) -> dict[str, float]:
    """The numbers behind a finding: growth with its interval, and the fatal depth or the layer that jumps."""
    evidence = {
        "growth": bounded_exp(change.rate),
        "growth_low": bounded_exp(change.low),
        "growth_high": bounded_exp(change.high),
        "weight_layers": float(change.layers),
    }
    if broken is not None:  # what the other layers do would be fatal nowhere
        return evidence | {
            "depth_scales": change.scales,
            "jump": bounded_exp(change.jump),
            "weight_layer": float(reading.order(broken)),
        }
    slow, fast = sorted((abs(change.low), abs(change.high)))
    line = thresholds.depth_scales
    evidence |= {
        "depth_scale": 1 / abs(change.rate),
        "depth_scales": abs(change.rate) * change.steps,
        "fatal_depth": line / abs(change.rate),
        "fatal_depth_low": line / fast,
        "fatal_depth_high": line / slow if change.low * change.high > 0 else math.inf,
        "overflow_depth": FLOAT32_RANGE / abs(change.rate),
    }
    predicted = reading.predicted.get("gradient_growth")
    if predicted is not None:
        evidence |= {"growth_predicted": predicted.value, "growth_predicted_error": predicted.stderr or 0.0}
    return evidence


def _extreme(reading: Reading, *, explodes: bool) -> LayerCall | None:
    """The weight layer with the largest gradient, or the smallest."""
    measured = [call for call in reading.weight_layers if math.isfinite(call.get("gradient_log_norm"))]
    sign = 1 if explodes else -1
    return max(measured, key=lambda call: sign * call.get("gradient_log_norm"), default=None)


def _situation(reading: Reading, severity: Severity, *, explodes: bool) -> str:
    """What there is to try, by what is in the network: the key of a sentence."""
    kinds = {call.kind for call in reading.calls}
    if not explodes:
        known = {"Sigmoid": "vanishing_of_sigmoids", "Tanh": "vanishing_of_tanh"}
        return next((key for kind, key in known.items() if kind in kinds), "gradient_vanishing")
    if not any("BatchNorm" in kind for kind in kinds):
        return "explosion_of_branches" if reading.has_shortcuts else "gradient_explosion"
    if reading.has_shortcuts:
        return "explosion_around_norms"
    return "mild_explosion_of_norms" if severity == "medium" else "explosion_of_norms"
