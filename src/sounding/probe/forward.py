"""What is read off the output of one call, in the hook, before it is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from sounding.probe.calls import OpenCall, Pass
from sounding.probe.late import number_of
from sounding.probe.moments import no_autocast
from sounding.probe.outputs import positions_per_sample, sample_matrix, token_stack
from sounding.probe.reductions import token_ratio
from sounding.probe.units import dead_fraction, saturated_fraction


def measure_output(one: Pass, call: OpenCall, tensor: Tensor, *, axis: int, limit: int) -> None:
    """Everything that is read off the output of one call, detached; the values appear in its record, some when reduced.

    The `axis` of the samples in the model's inputs is preferred where a size is ambiguous; `limit` counts samples.
    """
    spec, shape, batch_size = call.spec, call.shape, one.batch_size or 1
    first = axis if spec.axis is None else spec.axis
    plain = len(shape) == 2 and shape[0] == batch_size and first == 0
    matrix: Tensor | None = tensor
    if not plain:  # the common case is spared the search for its axes
        matrix = sample_matrix(tensor, batch_size, first=first, limit=limit)
        call.positions = positions_per_sample(tensor, batch_size, first=first, channels_first=spec.channels_first)
    if matrix is None:
        call.reason = f"its output of shape {shape} has no axis of the batch size {batch_size}"
        squares = torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        call.values["mean_square"] = number_of(squares / tensor.numel())
        return
    one.samples = batch_size if batch_size <= limit else limit
    call.features = shape[1] if plain else matrix.shape[1]
    units = max(call.features // max(call.positions, 1), 1) if spec.activation else 0
    vectors = spec.non_negative and units == call.features
    mean = one.moments.add(matrix, call.values, spoil=call.spoil, count_dead=vectors, limit=limit)
    if call.reason is not None:
        return  # `spoil` has found that it is not finite
    if units and not (vectors and mean is None):
        trailing = tensor.dim() == 3 and not spec.channels_first
        call.values["dead_fraction"] = dead_fraction(
            matrix[:limit], mean if spec.non_negative else None, units=units, trailing=trailing
        )
    if spec.bounds is not None:
        call.values["saturated_fraction"] = saturated_fraction(matrix[:limit], spec.bounds)
    tokens = None if plain else token_stack(tensor, batch_size, first=first)
    if tokens is not None:
        with no_autocast(tokens):
            call.values["token_participation_ratio"] = token_ratio(tokens)
