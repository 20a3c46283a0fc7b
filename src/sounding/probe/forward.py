"""What is read off the output of one call, in the hook, before it is dropped."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sounding.probe.calls import Call, Pass
from sounding.probe.moments import token_ratio
from sounding.probe.outputs import positions_per_sample, sample_matrix, token_stack
from sounding.probe.units import dead_fraction, saturated_fraction

_NOTHING = nullcontext()


def measure_output(one: Pass, call: Call, tensor: Tensor, *, axis: int, limit: int) -> None:
    """Everything that is read off the output of one call; the values appear in `call.values`, some when reduced.

    Args:
        one: the pass the call belongs to.
        call: the record to fill.
        tensor: the output, detached.
        axis: the axis of the samples in the model's inputs, preferred where a size is ambiguous.
        limit: at most so many samples.
    """
    spec, batch_size = call.spec, one.batch_size or 1
    first = axis if spec.axis is None else spec.axis
    plain = len(call.shape) == 2 and call.shape[0] == batch_size and first == 0
    matrix: Tensor | None
    if plain:  # the common case is spared the search for its axes
        matrix = tensor if batch_size <= limit else tensor[:limit]
    else:
        matrix = sample_matrix(tensor, batch_size, first=first, limit=limit)
        call.positions = positions_per_sample(tensor, batch_size, first=first, channels_first=spec.channels_first)
    if matrix is None:
        call.reason = f"its output of shape {call.shape} has no axis of the batch size {batch_size}"
        call.values["mean_square"] = float(torch.linalg.vector_norm(tensor.double()).square()) / tensor.numel()
        return
    one.samples, call.features = matrix.shape
    mean = one.moments.add(matrix, call.values)
    if mean is None:
        call.reason = "its output is not finite"
        return
    if spec.activation:
        units = max(call.features // max(call.positions, 1), 1)
        trailing = tensor.dim() == 3 and not spec.channels_first
        call.values["dead_fraction"] = dead_fraction(
            matrix, mean, units=units, trailing=trailing, non_negative=spec.non_negative
        )
        if spec.bounds is not None:
            call.values["saturated_fraction"] = saturated_fraction(matrix, spec.bounds)
    tokens = None if plain else token_stack(tensor, batch_size, first=first)
    if tokens is not None:
        call.values["token_participation_ratio"] = token_ratio(tokens)


def no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Measures multiply in their own precision, also inside a model under autocast."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING
