"""Appendix C.7 at initialization: what nonlinearity, and what centring, does to gradients behind Haar weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, mean_of, mean_slope_of
from sounding.claims.picture import Panel, Picture, points_over
from sounding.claims.thesis2024.appendix_explosion import (
    GRADIENT,
    NONLINEAR,
    bulk_rates,
)
from sounding.claims.thesis2024.networks import (
    build_on_data,
    first_layer_log_norms,
    gaps_at,
)


def measure_nonlinearity(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure C.9: gradients and isometry gaps against depth for sin, tanh and the identity, gain 1."""
    depths = np.array(values["depths"])
    late = depths >= values["window"]
    numbers: dict[str, Number] = {}
    gradients, isometries = [], []
    for place, activation in enumerate((*NONLINEAR, "identity")):
        made = build_on_data(values, context, activation=activation, depth=int(depths[-1]), offset=place)
        logs = first_layer_log_norms(made, values["depths"])
        gaps = gaps_at(made, values["depths"])
        numbers[f"{activation}_slope"] = mean_slope_of(depths[late], logs[:, late])
        numbers[f"{activation}_gap"] = mean_of(gaps[:, -1])
        gradients.append(points_over(activation, depths, logs / math.log(10)))
        isometries.append(points_over(activation, depths, gaps))
        context.progress((place + 1) / 3)
    panels = (
        Panel("depth L", GRADIENT, gradients, title="gradients"),
        Panel("depth L", "isometry gap of the last layer", isometries, y_scale="log", title="isometry"),
    )
    caption = (
        f"{values['data']}, width and batch {values['width']}, orthogonal weights, centred batch norm (gaps in the "
        "directions that centring leaves). Where the gap stays large, gradients grow exponentially with depth."
    )
    return Outcome(numbers, Picture(panels, caption))


def measure_centring(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure C.10: linear networks with centred batch norm and without centring, and the rates of narrow deep ones."""
    depths, narrow = np.array(values["depths"]), values["narrow"]
    numbers: dict[str, Number] = {}
    rises, series = [], []
    for place, (name, centring) in enumerate((("standard", True), ("simplified", False))):
        made = build_on_data(values, context, depth=int(depths[-1]), offset=place, centring=centring)
        shown = first_layer_log_norms(made, values["depths"])
        rates = bulk_rates(narrow, context, activation="identity", gain=1.0, offset=10 + place, centring=centring)[1]
        rises.append(shown[:, -1] - shown[:, 0])
        numbers[f"{name}_rise"] = mean_of(rises[-1])
        numbers[f"{name}_growth_over_square_of_width"] = mean_of(rates * narrow["width"] ** 2)
        series.append(points_over(f"{name} batch norm", depths, shown / math.log(10)))
        context.progress((place + 1) / 2)
    numbers["difference_of_rises"] = mean_of(rises[0] - rises[1])
    panel = Panel("depth L", GRADIENT, series)
    caption = (
        f"{values['data']}, width and batch {values['width']}, linear networks with orthogonal weights: with and "
        "without centring the gradient of the first layer is nearly the same at every depth shown."
    )
    return Outcome(numbers, Picture((panel,), caption))
