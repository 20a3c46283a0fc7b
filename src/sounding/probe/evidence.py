"""What a reading lets one judge: whether it is enough for a verdict, and what it leaves out."""

from __future__ import annotations

import math

from sounding.probe.findings.unseen import unseen_products
from sounding.probe.reading import LayerCall, Reading

NAMED = 3  # names told in a sentence; the profile's settings hold all of them


def find_missing(reading: Reading) -> str | None:
    """Why a network without findings cannot be called healthy, None where it can."""
    if not reading.calls:
        return "nothing was measured, so nothing can be said"
    if not reading.depth:
        products = reading.settings.get("shortest_depth") or 0
        if products:
            return f"the {products} multiplications by weights ran outside of the modules that could be measured"
        return "signal passes, and no layer multiplies by a weight, so there is no depth to survive"
    if reading.samples == 1:
        return "one sample cannot show whether samples are told apart; check with a batch of 32 or more"
    if not any(_has(call, "participation_ratio") for call in reading.calls):
        return "no output of a layer could be measured, so how samples are told apart was not judged"
    if "gradient_growth" not in reading.network and not any(_has_gradient(call) for call in reading.weight_layers):
        return "no gradient came back to any weight layer, so none was judged"
    return None


def find_gaps(reading: Reading) -> tuple[str, ...]:
    """What was not looked at, a phrase each; empty where every weight layer was measured in both directions."""
    layers, depth = reading.weight_layers, reading.depth
    gaps = []
    unseen = unseen_products(reading)
    if unseen:
        gaps.append(
            f"{unseen} multiplications by weights outside of modules, or inside one that is measured as a whole"
        )
    if len(layers) < depth:
        gaps.append(f"{depth - len(layers)} of {depth} weight layers, which a filter hides")
    silent = sum(not _has(call, "participation_ratio") for call in layers)
    if silent:
        gaps.append(f"the output of {silent} of {len(layers)} weight layers")
    reached = sum(map(_has_gradient, layers))
    if reached < len(layers):
        gaps.append(f"the gradient beyond the weight layers that it reached ({reached} of {len(layers)})")
    idle = reading.settings.get("never_called") or ()
    if idle:
        more = f" and {len(idle) - NAMED} more" if len(idle) > NAMED else ""
        gaps.append(f"{', '.join(map(repr, idle[:NAMED]))}{more}, never called as a module")
    return tuple(gaps)


def _has(call: LayerCall, measure: str) -> bool:
    return math.isfinite(call.get(measure)) or call.get("non_finite_fraction") > 0


def _has_gradient(call: LayerCall) -> bool:
    return not math.isnan(call.get("gradient_log_norm"))
