"""Appendix C.7 at initialization: what nonlinearity, and what centring, does to gradients behind Haar weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Setting
from sounding.claims.number import Number, mean_of
from sounding.claims.picture import Panel, Picture
from sounding.claims.thesis2024.appendix_explosion import (
    BATCH,
    DEPTHS,
    GRADIENT,
    NONLINEAR,
    SMALL_BATCH,
    bulk_rates,
    depth_settings,
)
from sounding.claims.thesis2024.appendix_networks import (
    build_networks,
    constant,
    first_layer_log_norms,
    gaps_at,
)
from sounding.claims.thesis2024.gram_paths import points, slopes


def measure_nonlinearity(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure C.9: gradients and isometry gaps against depth for sin, tanh and the identity, gain 1."""
    depths = np.array(values["depths"])
    late = depths >= values["window"]
    numbers: dict[str, Number] = {}
    gradients, isometries = [], []
    for place, activation in enumerate((*NONLINEAR, "identity")):
        made = build_networks(
            values, context, activation=activation, gain=constant(1.0), depth=int(depths[-1]), offset=place
        )
        logs = first_layer_log_norms(made, values["depths"])
        gaps = gaps_at(made, values["depths"])
        numbers[f"{activation}_slope"] = slopes(depths[late], logs[:, late])
        numbers[f"{activation}_gap"] = mean_of(gaps[:, -1])
        gradients.append(points(activation, depths, logs / math.log(10)))
        isometries.append(points(activation, depths, gaps))
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
    for place, (name, center) in enumerate((("standard", True), ("simplified", False))):
        made = build_networks(
            values,
            context,
            activation="identity",
            gain=constant(1.0),
            depth=int(depths[-1]),
            offset=place,
            center=center,
        )
        shown = first_layer_log_norms(made, values["depths"])
        rates = bulk_rates(narrow, context, activation="identity", gain=1.0, offset=10 + place, center=center)[1]
        rises.append(shown[:, -1] - shown[:, 0])
        numbers[f"{name}_rise"] = mean_of(rises[-1])
        numbers[f"{name}_growth_over_square_of_width"] = mean_of(rates * narrow["width"] ** 2)
        series.append(points(f"{name} batch norm", depths, shown / math.log(10)))
        context.progress((place + 1) / 2)
    numbers["difference_of_rises"] = mean_of(rises[0] - rises[1])
    panel = Panel("depth L", GRADIENT, series)
    caption = (
        f"{values['data']}, width and batch {values['width']}, linear networks with orthogonal weights: with and "
        "without centring the gradient of the first layer is nearly the same at every depth shown."
    )
    return Outcome(numbers, Picture((panel,), caption))


NONLINEARITY = Claim(
    id="thesis2024-figC.9",
    seed="thesis2024",
    place="figure C.9",
    kind="figure",
    statement="With standard batch norm and orthogonal weights sin and tanh keep a large isometry gap and an "
    "exponential explosion of gradients; the identity reaches isometry, and its gradients stay.",
    expectations=(
        *(Expectation(f"{a}_slope", f"{a}: exponential growth with depth", low=0.01) for a in NONLINEAR),
        *(Expectation(f"{a}_gap", f"{a}: far from isometry in the last layer", low=0.3) for a in NONLINEAR),
        Expectation("identity_slope", "identity: no growth", low=-0.003, high=0.003),
        Expectation("identity_gap", "identity: close to isometry in the last layer", high=0.05),
    ),
    settings=depth_settings(100),
    measure=measure_nonlinearity,
    paper="CIFAR-10, depths on the axis; width, batch and runs not given",
    released="width 100, batch 100, depths 5, 10, 20, 50, 100, 200, 500, 1000, 10 runs, one CIFAR-10 batch, gradient "
    "of the second linear layer (the first square one), Xavier-normal gains 1 for sin and 5/3 for tanh",
    note="The gap is taken in the n − 1 directions that centring leaves; in all n it is infinite for the identity.",
)

CENTRING = Claim(
    id="thesis2024-figC.10",
    seed="thesis2024",
    place="figure C.10",
    kind="figure",
    statement="For the identity activation gradients stay bounded in depth with standard, centring batch norm just as "
    "with the simplified one that does not centre.",
    expectations=(
        Expectation("difference_of_rises", "the two traces are alike, to a factor e", low=-1.0, high=1.0),
        Expectation("simplified_growth_over_square_of_width", "simplified: bounded", low=-0.3, high=0.3),
        Expectation("standard_growth_over_square_of_width", "standard: bounded", low=-0.3, high=0.3),
    ),
    correction=Correction(
        "The traces are alike at the depths shown, but only the simplified one is bounded: centring leaves n − 1 of n "
        "directions, d features cannot be orthogonal in them, and gradients grow at a rate of about 1/d² per layer.",
        (
            Expectation("difference_of_rises", "the two traces are alike, to a factor e", low=-1.0, high=1.0),
            Expectation("simplified_growth_over_square_of_width", "simplified: bounded", low=-0.3, high=0.3),
            Expectation("standard_growth_over_square_of_width", "standard: of order 1", low=0.3, high=3.0),
        ),
    ),
    settings={
        "quick": Setting(
            {
                **SMALL_BATCH,
                "runs": 12,
                "depths": (5, 10, 20, 50, 100, 200, 300),
                "narrow": {**SMALL_BATCH, "width": 20, "batch_size": 20, "runs": 40, "depth": 400, "margin": 100},
            },
            reduction="digits in place of CIFAR-10, width and batch 32 in place of 100 (20 for the rates), depths up "
            "to 300 in place of 1000",
        ),
        "paper": Setting(
            {
                **BATCH,
                "runs": 10,
                "depths": DEPTHS,
                "narrow": {**BATCH, "width": 32, "batch_size": 32, "runs": 150, "depth": 800, "margin": 150},
            },
            reduction="rates from width and batch 32, where depth 800 is many times d",
        ),
    },
    measure=measure_centring,
    paper="CIFAR-10, 10 runs, 95% intervals; width, batch and depths not given",
    released="centring on and off, width 100, batch 100, depths up to 1000",
    note="At width 100 and depth 1000 the growth is a factor of about 1.1, which the figure cannot show.",
)

CLAIMS: tuple[Claim, ...] = (NONLINEARITY, CENTRING)
