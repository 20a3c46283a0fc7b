"""Chapter 6 at initialization: with Haar weights and batch norm gradients do not explode with depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, highest, lowest, mean_of, mean_slope_of, scaled
from sounding.claims.picture import Panel, Picture, Series, points_over
from sounding.claims.thesis2024.networks import (
    build_networks,
    build_on_data,
    every_layer_log_norms,
    first_layer_log_norms,
    square_inputs,
)
from sounding.measures import gram, isometry_gap
from sounding.theory.batchnorm import batchnorm
from sounding.theory.bounds.thesis2024 import theorem_6_5


def log_norms(
    values: Mapping[str, Any], context: Context, *, law: str, offset: int, distinct: int | None = None
) -> Array:
    """ln of the gradient norm of the first square layer, (runs, depths)."""
    depths, length = values["depths"], math.sqrt(values["batch_size"])
    options: dict[str, Any] = {"law": law, "centring": values["center"], "length": length, "distinct": distinct}
    return first_layer_log_norms(build_on_data(values, context, depth=max(depths), offset=offset, **options), depths)


def draw_log_norms(curves: Mapping[str, Array], values: Mapping[str, Any], theory: Mapping[str, Array]) -> Panel:
    """Gradient norms against depth, as decimal logarithms."""
    depths = np.array(values["depths"])
    series = []
    for name, logs in curves.items():
        series.append(points_over(name, depths, logs / math.log(10)))
        if name in theory:
            series.append(Series(f"{name} (theory)", depths, theory[name] / math.log(10), role="theory"))
    return Panel("depth L", "log₁₀ of the first layer's gradient norm", series)


def measure_weights(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 6.3: the first layer's gradient norm against depth for Haar and Gaussian weights."""
    depths = np.array(values["depths"])
    late = depths >= values["window"]
    curves = {
        "Gaussian weights": log_norms(values, context, law="gaussian", offset=1),
        "orthogonal weights": log_norms(values, context, law="orthogonal", offset=2),
    }
    gaussian, orthogonal = curves.values()
    # without centring n samples span what n + 1 do with it
    growth = batchnorm("identity", batch_size=values["batch_size"] + (0 if values["center"] else 1)).gradient_growth
    wide = 0.5 * math.log(growth)
    middle = late.nonzero()[0][0]
    numbers = {
        "gaussian_slope": mean_slope_of(depths[late], gaussian[:, late]),
        "orthogonal_slope": mean_slope_of(depths[late], orthogonal[:, late]),
        "gaussian_rise": mean_of(gaussian[:, -1] - gaussian[:, 0]),
        "orthogonal_rise": mean_of(orthogonal[:, -1] - orthogonal[:, 0]),
        "gaussian_slope_over_wide_theory": scaled(mean_slope_of(depths[late], gaussian[:, late]), 1 / wide),
    }
    line = gaussian[:, middle].mean() + wide * (depths - depths[middle])
    panel = draw_log_norms(curves, values, {"Gaussian weights": line})
    caption = (
        f"{values['data']}, width and batch {values['width']}, batch norm without centring, {values['runs']} networks. "
        "With Gaussian weights the gradient grows exponentially with depth (line: the rate of a width far above the "
        "batch; here they are equal); with orthogonal weights it stays."
    )
    return Outcome(numbers, Picture((panel,), caption))


def measure_degenerate(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 6.2: orthogonal weights on a batch with repeated samples and on one without."""
    depths = np.array(values["depths"])
    late = depths >= values["window"]
    curves = {
        "repeated samples": log_norms(values, context, law="orthogonal", offset=1, distinct=values["distinct"]),
        "different samples": log_norms(values, context, law="orthogonal", offset=2),
    }
    repeated, different = curves.values()
    numbers = {
        "repeated_slope": mean_slope_of(depths[late], repeated[:, late]),
        "different_slope": mean_slope_of(depths[late], different[:, late]),
        "different_rise": mean_of(different[:, -1] - different[:, 0]),
    }
    panel = draw_log_norms(curves, values, {})
    caption = (
        f"{values['data']}, width and batch {values['width']}, orthogonal weights. With {values['distinct']} samples "
        "that fill the batch in turn the gradient of the first layer grows exponentially with depth; with as many "
        "samples as the batch has places it stays."
    )
    return Outcome(numbers, Picture((panel,), caption))


@dataclass(frozen=True)
class Cell:
    """Networks of one width, input and law; every run has its own input. Arrays are over runs.

    Attributes:
        logs: ln of the first layer's gradient norm in the networks of each depth, (runs, depths).
        depth_slope: its slope against depth.
        layer_growth: that of ln‖∂L/∂W_ℓ‖ towards the input, per layer of the deepest network.
        rise_over_bound: of ln‖∂L/∂W_ℓ‖ from the last layer to the largest, over the theorem's bound for the input.
    """

    logs: Array
    depth_slope: Number
    layer_growth: Number
    rise_over_bound: Number


def measure_cell(values: Mapping[str, Any], context: Context, *, width: int, kind: str, law: str, offset: int) -> Cell:
    """Gradients of random networks on random inputs; slopes from the depth or layer `window` on."""
    depths, window = np.array(values["depths"]), values["window"]
    generator = context.generator(offset, device=context.device)
    start = torch.cat([square_inputs(kind, width, 1, generator=generator) for _ in range(values["runs"])])
    labels = torch.arange(width, device=context.device) % 10
    made = build_networks(
        start, labels, depth=int(depths[-1]), generator=generator, law=law, centring=False, length=1.0
    )
    logs = first_layer_log_norms(made, values["depths"])
    layers = every_layer_log_norms(made)
    gaps = isometry_gap(gram(start), tolerance=0.0).cpu().numpy()
    # with a loss of slope s = 1 the bound limits the rise of the gradient from its last layer
    bounds = np.array([theorem_6_5(width, input_gap=float(gap)).value for gap in gaps])
    rise = (layers - layers[:, -1:]) / bounds[:, None]
    return Cell(
        logs=logs,
        depth_slope=mean_slope_of(depths[depths >= window], logs[:, depths >= window]),
        layer_growth=mean_slope_of(-np.arange(window, layers.shape[1] + 1), layers[:, window - 1 :]),
        rise_over_bound=mean_of(rise[:, int(np.argmax(rise.mean(0)))]),
    )


def measure_theorem_6_5(values: Mapping[str, Any], context: Context) -> Outcome:
    """Gradients at any depth and layer, features of norm 1: the worst cell, and Gaussian weights beside it."""
    cells: dict[str, list[Cell]] = {"orthogonal": [], "gaussian": []}
    series: dict[str, list[Series]] = {law: [] for law in cells}
    for index, (width, kind) in enumerate(values["inputs"]):
        for law, made in cells.items():
            if law == "gaussian" and width < values["wide"]:
                continue
            offset = 2 * index + (law == "gaussian")
            cell = measure_cell(values, context, width=width, kind=kind, law=law, offset=offset)
            made.append(cell)
            series[law].append(points_over(f"d = {width}, {kind}", values["depths"], cell.logs / math.log(10)))
        context.progress((index + 1) / len(values["inputs"]))
    orthogonal, gaussian = cells.values()
    numbers = {
        "depth_slope": highest(cell.depth_slope for cell in orthogonal),
        "layer_growth": highest(cell.layer_growth for cell in orthogonal),
        "gaussian_depth_slope": lowest(cell.depth_slope for cell in gaussian),
        "gaussian_layer_growth": lowest(cell.layer_growth for cell in gaussian),
        "largest_rise_over_bound": highest(cell.rise_over_bound for cell in orthogonal),
    }
    panels = [
        Panel("depth L", "log₁₀ of the first layer's gradient norm", drawn, title=f"{law} weights")
        for law, drawn in series.items()
    ]
    caption = (
        "With orthogonal weights depth does not enter, whatever width and input; with Gaussian ones "
        f"(d ≥ {values['wide']}) the gradient grows exponentially with it."
    )
    return Outcome(numbers, Picture(panels, caption))
