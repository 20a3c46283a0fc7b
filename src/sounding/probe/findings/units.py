"""dead_units, saturation and non_finite: single layers that let nothing through."""

from __future__ import annotations

import math

from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import tell
from sounding.probe.thresholds import Thresholds

ROUNDING = 1e-7  # a layer of flat units alone is e⁻¹⁶ of all paths; from 1e-12 to 1e-4 findings are the same
RECTIFIERS = ("ReLU", "relu", "Threshold", "shrink", "swish", "Swish", "igmoid", "Act")


def find_dead_units(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """Units that are zero for the whole batch.

    Half of the units is what a collapsed batch gives by symmetry (every sample has the same signs), so only a share
    beyond one half plus its binomial noise is a finding of its own. A dead layer is of high severity where it blocks:
    no gradient reaches the layers before it, or few units are left and no way leads around them. A gate of a few
    units that is dead on a side branch does no harm, and foreign modules that return zeros need not be activations.
    """
    found = _worst(reading, "dead_fraction")
    if found is None:
        return []
    share = found.get("dead_fraction")
    width = max(found.features // found.positions, 1)
    line = min(0.5 + thresholds.deviations * 2 * 0.5 / math.sqrt(width), 1.0)
    if share < thresholds.dead and (share <= line or not found.features):
        return []
    severity: Severity = "high" if share >= thresholds.dead and _blocks(reading, found) else "medium"
    evidence = {"dead_fraction": share, "line": thresholds.dead, "layers": float(_count(reading, share, line))}
    return [tell("dead_units", severity, layer=found.name, depth=found.depth, evidence=evidence)]


def find_saturation(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """Units on the flat part of a bounded activation, where the derivative vanishes.

    Only in front of a weight layer: the output of a trained classifier saturates because it is sure. One layer blocks
    where 90% of its units are flat. Layers with fewer block together: of all paths through them the share Π(1 − p_ℓ)
    meets no flat unit. Tanh networks of 8 layers have e⁻⁵ at a gain of 5, and train; e⁻¹¹ at 11, and do not
    (docs/verdict.md).
    """
    last = max((call.depth for call in reading.weight_layers), default=0)
    found = _worst(reading, "saturated_fraction", before=last)
    if found is None:
        return []
    share = found.get("saturated_fraction")
    if share < thresholds.flat:
        return []
    flat = [call.get("saturated_fraction") for call in reading.calls if call.depth < last]
    closed = sum(-math.log(max(1 - p, ROUNDING)) for p in flat if p >= thresholds.flat)
    blocked = share >= thresholds.saturated or closed >= thresholds.paths
    severity: Severity = "high" if blocked and not reading.has_shortcuts else "medium"
    layers = sum(p >= thresholds.flat for p in flat)
    together = f", and {math.exp(-closed):.1g} of all paths through {layers} layers meet none" if layers > 1 else ""
    evidence = {
        "saturated_fraction": share,
        "line": thresholds.saturated,
        "layers": float(layers),
        "free_paths": math.exp(-closed),
    }
    return [tell("saturation", severity, layer=found.name, depth=found.depth, evidence=evidence, together=together)]


def find_non_finite(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """NaN or infinity, and the first layer that has it; a mask of -inf that later layers absorb is a warning."""
    bad = [call for call in (reading.input, *reading.calls) if call.get("non_finite_fraction") > 0]
    broken = _bad_gradients(reading)
    if not bad and broken:  # the layer nearest to the output, where the gradient breaks first
        last = broken[-1]
        return [tell("non_finite_gradient", layer=last.name, depth=last.depth, evidence={"layers": float(len(broken))})]
    if not bad:
        return []
    first = bad[0]
    absorbed = first.depth > 0 and bad[-1].depth < reading.calls[-1].depth and not broken
    consequence = (
        "and later layers absorb them"
        if absorbed
        else "so nothing behind it can be measured; a norm that grows by a constant factor per layer leaves the range "
        "of the format (meanfield2019)"
    )
    scale = "for every column of the inputs subtract its mean and divide by its deviation"
    return [
        tell(
            "non_finite", "medium" if absorbed else "high", layer=first.name, depth=first.depth,
            evidence={"non_finite_fraction": first.get("non_finite_fraction"), "layers": float(len(bad))},
            consequence=consequence, first=scale if first.depth else "look for NaN in the data first",
        )
    ]  # fmt: skip


def _bad_gradients(reading: Reading) -> list[LayerCall]:
    """The calls whose gradient was measured and is NaN or +∞; −∞ is a gradient of zero."""
    measured = [(call, call.values.get("gradient_log_norm", 0.0)) for call in reading.calls]
    return [call for call, value in measured if math.isnan(value) or value == math.inf]


def _blocks(reading: Reading, call: LayerCall) -> bool:
    """Whether the signal has to pass: nothing comes back to the layers before it, or no way leads around."""
    if call.kind and not any(word in call.kind for word in RECTIFIERS):
        return False
    before = [layer.get("gradient_log_norm") for layer in reading.weight_layers if layer.depth < call.depth]
    if call.get("dead_fraction") == 1.0 and before and not any(math.isnan(value) for value in before):
        return all(value == -math.inf for value in before)
    return not reading.has_shortcuts


def _worst(reading: Reading, measure: str, *, before: float = math.inf) -> LayerCall | None:
    """The first call where the measure is largest, among those before a depth."""
    found = [call for call in reading.calls if math.isfinite(call.get(measure)) and call.depth < before]
    return max(found, key=lambda call: call.get(measure), default=None)


def _count(reading: Reading, share: float, line: float) -> int:
    return sum(call.get("dead_fraction") >= min(share, line) for call in reading.calls)
