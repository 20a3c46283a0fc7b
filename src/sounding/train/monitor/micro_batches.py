"""The gradients of a step's micro-batches, joined as if they had been one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sounding.probe.calls import OpenCall, Pass
from sounding.probe.gradients import join_log_norms


def gradients_of(one: Pass) -> list[float]:
    """ln‖∂L/∂output‖ of the calls that a gradient came back to."""
    return [call.gradient for call in one.calls if call.gradient is not None]


def join_gradients_(passes: Sequence[Pass], *, shift: float) -> None:
    """Move the gradients of every call to those of the joined batch, keeping the passes' scatter for the errors."""
    if len(passes) == 1 and not shift:  # one batch that was not scaled is what it is
        return
    found: dict[str, list[OpenCall]] = {}
    for one in passes:
        if one.input_gradient is not None:
            one.input_gradient -= shift  # a logarithm: the scale is divided out
        for call in one.calls:
            if call.gradient is not None:
                found.setdefault(call.name, []).append(call)
    for calls in found.values():
        values = [call.gradient for call in calls if call.gradient is not None]
        total = join_log_norms(values)
        spread = math.isfinite(total) and all(map(math.isfinite, values))
        mean = math.fsum(values) / len(values) if spread else 0.0  # around which the passes scatter
        for call, value in zip(calls, values, strict=True):
            call.gradient = total - shift + (value - mean if spread else 0.0)
