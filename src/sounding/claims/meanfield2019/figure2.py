"""Figure 2: the depth to which ReLU networks with batch norm train, over the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Context, Outcome
from sounding.claims.meanfield2019.trainable import draw_cells, judge_cells, train_cells
from sounding.claims.picture import Picture
from sounding.data import known_shape
from sounding.predict import batchnorm


def measure_depth_by_batch_size(values: Mapping[str, Any], context: Context) -> Outcome:
    """Accuracy over depth × batch size; with `whole_batch`, batches of that size and statistics over a part of them."""
    sizes, whole = values["batch_sizes"], values.get("whole_batch")
    norm = {"eps": values["eps"]}
    parts = []
    for place, size in enumerate(sizes):
        settings = {**values, "activation": "relu", "statistics_over": size if whole else None}
        parts.append(train_cells([norm], settings, context, batch_size=whole or size, offset=place))
        context.progress((place + 1) / len(sizes))
    accuracy = np.concatenate(parts, axis=1)
    allowed = [batchnorm("relu", batch_size=size, eps=values["eps"]).trainable_depth for size in sizes]
    shape = known_shape(values["data"])
    numbers = judge_cells(accuracy, values["depths"], allowed, chance=1 / shape[1] if shape else 0.1)
    panel = draw_cells(accuracy, values["depths"], sizes, allowed, label="batch size B")
    caption = (
        f"Test accuracy on {values['data']}, width {values['width']}, mean of {values['seeds']} seeds. Networks much "
        "deeper than 16ξ (white) learn nothing, whatever the batch size."
    )
    return Outcome(numbers, Picture((panel,), caption))
