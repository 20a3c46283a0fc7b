"""Figure 4: three ways against gradient explosion, each by the depth it allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sounding.claims.claim import Context, Outcome
from sounding.claims.meanfield2019.trainable import chance_of, draw_cells, judge_cells, train_cells
from sounding.claims.number import mean_of
from sounding.claims.picture import Picture
from sounding.predict import batchnorm


def measure_depth_by_norm(values: Mapping[str, Any], context: Context) -> Outcome:
    """Accuracy over depth × one number of the batch norm: its scale γ, its shift β or its eps."""
    knob, columns, size = values["knob"], values["columns"], values["batch_size"]
    fixed = {"eps": values["eps"], "scale": 1.0, "shift": values.get("shift", 0.0)}
    norms = [{**fixed, knob: value} for value in columns]
    accuracy = train_cells(norms, values, context, batch_size=size, offset=0)
    allowed = [batchnorm(values["activation"], batch_size=size, **norm).trainable_depth for norm in norms]
    chance = chance_of(values)
    numbers = judge_cells(accuracy, values["depths"], allowed, chance=chance)
    good, bad = (columns.index(values[which]) for which in ("deep_at", "shallow_at"))
    unit = numbers["best_accuracy"].value - chance
    numbers["gain_at_deepest"] = mean_of((accuracy[-1, good] - accuracy[-1, bad]) / unit)
    name = {"scale": "scale γ", "shift": "shift β", "eps": "eps"}[knob]
    panel = draw_cells(accuracy, values["depths"], columns, allowed, label=f"{name} of batch norm")
    caption = (
        f"Test accuracy of {values['activation']} networks on {values['data']}, B = {size}, width {values['width']}, "
        "mean of "
        f"{values['seeds']} seeds; 16ξ in white, cut above the deepest networks."
    )
    return Outcome(numbers, Picture((panel,), caption))
