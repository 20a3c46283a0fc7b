"""gradient_explosion and gradient_vanishing: the squared norm of the gradient changes by a factor per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from sounding.probe.findings.unseen import unseen_products
from sounding.probe.growth import bounded_exp, find_breaks, student_quantile
from sounding.probe.reading import WEIGHT_GRADIENT, Call, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.thresholds import Thresholds
from sounding.profile import Estimate

FLOAT32_RANGE = 2 * math.log(3.4028235e38)


@dataclass(frozen=True)
class _Change:
    """How the squared gradient norm changes towards the input, in logarithms.

    Args:
        rate: per weight layer, with the ends of its interval at 95%.
        slowest: the end of the interval at 99% that is nearer to no change.
        steps: how many weight layers it is multiplied through.
        seen: the most that was seen between the last layers and the first.
        layers: how many there are.
        jump: what one layer alone changes beyond the rate, in the direction of the change; 0 without such a layer.
        broken: that layer.
    """

    rate: float
    low: float
    high: float
    slowest: float
    steps: int
    seen: float
    layers: int
    jump: float = 0.0
    broken: Call | None = None

    @property
    def explodes(self) -> bool:
        return (self.rate if self.broken is None else self.jump) > 0

    @property
    def spread(self) -> float:
        """Depth scales of the rate alone, none where it points the other way."""
        along = self.rate if self.explodes else -self.rate
        return min(max(along, 0.0) * self.steps, self.seen)

    @property
    def scales(self) -> float:
        """Depth scales spanned, the jump included, and not more than was seen."""
        return min(self.spread + abs(self.jump), self.seen)

    @property
    def surely(self) -> float:
        """The same at 99% confidence of the rate."""
        along = self.slowest if self.explodes else -self.slowest
        return min(max(along, 0.0) * self.steps + abs(self.jump), self.seen)


def find_gradient_change(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    r"""Gradients that grow or shrink towards the input by more than the network's depth allows.

    With a factor $g$ per weight layer of the squared norm the depth scale is $\xi = 1/|\ln g|$, and networks train to
    about $16\,\xi$ (meanfield2019, figure 2). A network of $L$ weight layers spans $(L - 1)/\xi$ depth scales, and not
    more than its gradients were seen to change. A single layer that multiplies by $e^{16}$ does the same damage.

    Explosion is of high severity above 16 depth scales if 12 of them are sure at 99%; vanishing, which an optimizer
    that rescales each weight outlives for a while, if all 16 are sure, or above 20 (a rate that changes along the
    network widens the interval, not the damage). A single weak layer is a warning: it gets a full gradient and
    recovers.
    """
    silenced = _silenced(reading)
    if silenced is not None:
        return [silenced]
    change = _measure(reading, thresholds)
    if change is None:
        return []
    line, near = thresholds.depth_scales, thresholds.near * thresholds.depth_scales
    if change.explodes:
        fatal = change.scales >= line and change.surely >= near
    else:
        fatal = change.spread >= near and max(change.surely, change.scales / thresholds.margin) >= line
    sure = change.low * change.high > 0 or abs(change.jump) >= near
    severity: Severity
    if fatal:
        severity = "high"
    elif change.scales >= near and sure:
        severity = "medium"
    elif abs(change.jump) >= thresholds.broken * line:
        severity = "low"
    else:
        return []
    return [_finding(reading, change, severity=severity, thresholds=thresholds)]


def _measure(reading: Reading, thresholds: Thresholds) -> _Change | None:
    """The fitted rate, and the layer that breaks it if there is one."""
    growth = reading.network.get("gradient_growth")
    steps = reading.depth - 1
    if growth is None and reading.calls and unseen_products(reading):
        return _measure_ends(reading)
    if growth is None or steps < 1 or not math.isfinite(growth.value) or growth.value <= 0:
        return None
    rate = math.log(growth.value)
    low, high = _interval(reading, growth, thresholds)
    jump, broken = _largest_break(reading, rate)
    explodes = jump > 0 if broken is not None else rate > 0
    slowest = rate + _widening(reading) * ((low if explodes else high) - rate)
    seen = _seen_change(reading, explodes=explodes)
    return _Change(rate, low, high, slowest, steps, seen, reading.depth, jump, broken)


def _measure_ends(reading: Reading) -> _Change | None:
    """Where no layers in between can be seen: from the gradient at the output and at the input, as one rate."""
    products = unseen_products(reading) + reading.depth
    total = 2 * (reading.input.get("gradient_log_norm") - reading.calls[-1].get("gradient_log_norm"))
    if not math.isfinite(total) or total == 0:
        return None
    rate = total / products
    return _Change(rate, rate, rate, rate, products, abs(total), products)


def _largest_break(reading: Reading, rate: float) -> tuple[float, Call | None]:
    """The single layer that changes the squared norm most, beyond the rate, and by how much, in logarithms.

    The gradient of the weights has to show it as well: a batch norm behind inputs in raw units divides the gradient by
    their scale, and the weights in front of it, which multiply those inputs, get it back. The head may start as small
    as one likes, and in a residual network so may the end of every branch.
    """
    layers = reading.weight_layers
    if reading.has_shortcuts or len(layers) < reading.depth:
        return 0.0, None
    norms = [2 * call.get("gradient_log_norm") for call in layers]
    if len(norms) < 5 or not all(math.isfinite(norm) for norm in norms):
        return 0.0, None
    steps = [before - after for before, after in pairwise(norms)]
    best: tuple[float, Call | None] = (0.0, None)
    for index in find_breaks([step / 2 for step in steps]):
        before, after = (2 * layers[at].get(WEIGHT_GRADIENT) for at in (index, index + 1))
        shown = before - after if math.isfinite(before - after) else steps[index]
        if steps[index] * shown <= 0 or (steps[index] < 0 and index == len(steps) - 1):
            continue
        jump = math.copysign(min(abs(steps[index] - rate), abs(shown)), steps[index])
        best = max(best, (jump, layers[index + 1]), key=lambda found: abs(found[0]))
    return best


def _silenced(reading: Reading) -> Finding | None:
    """The loss asks for something, and yet the gradient of every weight is exactly zero: nothing can be learned.

    A head that starts at zero silences the layers before it, but not itself, and is no finding. The layer is the first
    one that puts out nothing but zeros, where there is such a one: behind it no weight has anything to multiply.
    """
    asked = [call for call in reading.calls if math.isfinite(call.get("gradient_log_norm"))]
    measured = [call for call in reading.calls if not math.isnan(call.get(WEIGHT_GRADIENT))]
    if not asked or not measured or any(call.get(WEIGHT_GRADIENT) > -math.inf for call in measured):
        return None
    silent = next((call for call in reading.calls if call.get("mean_square") == 0.0), None)
    end = silent or asked[0]
    what = "The signal ends, all zeros," if silent is not None else "The gradient ends"
    return Finding(
        kind="gradient_vanishing",
        severity="high",
        layer=end.name,
        depth=end.depth,
        evidence={"weights_without_gradient": float(len(measured))},
        why=(
            f"{what} at {end.name!r}: the gradient is exactly zero for the weights of all {len(measured)} layers that "
            "have any, the end of a gradient that vanishes with depth (meanfield2019)."
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


def _finding(reading: Reading, change: _Change, *, severity: Severity, thresholds: Thresholds) -> Finding:
    """The finding at the broken layer where that is most of the change, else at the one the gradient suffers most."""
    broken = change.broken if abs(change.jump) > change.spread else None
    layer = broken or _extreme(reading, explodes=change.explodes)
    return Finding(
        kind="gradient_explosion" if change.explodes else "gradient_vanishing",
        severity=severity,
        layer=layer.name if layer else None,
        depth=layer.depth if layer else None,
        evidence=_evidence(reading, change, broken, thresholds),
        why=(
            _why_broken(reading, change, broken, thresholds)
            if broken is not None
            else _why(change, within="beyond" if severity == "high" else "close to", thresholds=thresholds)
        ),
        seed="meanfield2019",
        remedies=_broken_remedies(broken) if broken is not None else _remedies(reading, explodes=change.explodes),
    )


def _evidence(reading: Reading, change: _Change, broken: Call | None, thresholds: Thresholds) -> dict[str, float]:
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


def _why(change: _Change, *, within: str, thresholds: Thresholds) -> str:
    low, growth, high = (bounded_exp(value) for value in (change.low, change.rate, change.high))
    interval = f" ({low:.3g} to {high:.3g})" if low < high else ""
    fatal = thresholds.depth_scales / abs(change.rate)
    return (
        f"The squared gradient norm changes by ×{growth:.3g}{interval} "
        f"per weight layer towards the input, ×10^{change.rate * change.steps / math.log(10):.0f} over "
        f"{change.layers} layers: {within} the {fatal:.0f} layers ({thresholds.depth_scales:.0f} depth scales) to "
        "which such a network trains (meanfield2019)."
    )


def _why_broken(reading: Reading, change: _Change, broken: Call, thresholds: Thresholds) -> str:
    return (
        f"Weight layer {reading.order(broken)} of {reading.depth}, {broken.name!r}, alone multiplies the squared "
        f"gradient norm by ×10^{change.jump / math.log(10):.0f} on its way to the input, where the other layers take "
        f"×{bounded_exp(change.rate):.3g} each: for the layers before it that is {abs(change.jump):.0f} depth scales, "
        f"and networks train to {thresholds.depth_scales:.0f} (meanfield2019)."
    )


def _broken_remedies(broken: Call) -> tuple[str, ...]:
    return (
        f"look at the scale of the weights of {broken.name!r}, and at what stands between it and the layer before",
        "sounding repair TARGET --method he (or haar): one scale for all layers",
        "sounding repair TARGET --method add_batchnorm",
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
    kinds = {call.kind for call in reading.calls}
    orthogonal = "sounding repair TARGET --method haar: orthogonal weights of gain 1"
    if "Sigmoid" in kinds:
        first = ("put tanh or ReLU in place of the sigmoid, whose slope is at most 1/4", orthogonal)
    elif "Tanh" in kinds:
        first = (orthogonal, "sounding repair TARGET --method shape_activations: gains that fall with depth")
    else:
        first = (
            "sounding repair TARGET --method he: variance 2/fan_in for ReLU, where PyTorch's default is 1/(3 fan_in)",
            orthogonal,
        )
    return (*first, "sounding repair TARGET --method add_batchnorm")
