"""Chapter 6 and appendix C at initialization: which weights, gains, activations and norms let gradients explode.

Networks are φ(α_ℓ BN(HWᵀ)), every run on a batch of its own; gradients are those of the weights. A run keeps its batch
under all gains and activations, so that numbers of several of them leave out whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import Number, highest, jackknife, jackknife_ratio, lowest, mean_of, mean_slope_of, scaled
from sounding.claims.picture import Panel, Series, points_of, points_over
from sounding.claims.thesis2024 import networks
from sounding.claims.thesis2024.networks import build_on_data, every_layer_log_norms, first_layer_log_norms
from sounding.measures import gram, isometry_gap
from sounding.theory.batchnorm import batchnorm
from sounding.theory.bounds.thesis2024 import theorem_6_5

NONLINEAR = ("tanh", "sin")
GRADIENT = "log₁₀ of the first layer's gradient norm"


def log_norms(values: Values, context: Context, *, law: str, offset: int, distinct: int | None = None) -> Array:
    """ln of the gradient norm of the first square layer, (runs, depths)."""
    depths, length = values["depths"], math.sqrt(values["batch_size"])
    options: dict[str, Any] = {"law": law, "centring": values["center"], "length": length, "distinct": distinct}
    return first_layer_log_norms(build_on_data(values, context, depth=max(depths), offset=offset, **options), depths)


def late_slope(values: Values, logs: Array) -> Number:
    """The slope of (runs, depths) against depth, from the depth `window` on, where the transient is over."""
    depths = np.array(values["depths"])
    late = depths >= values["window"]
    return mean_slope_of(depths[late], logs[:, late])


def against_depth(label: str, values: Values, logs: Array) -> Series:
    """Gradient norms of (runs, depths) against depth, as decimal logarithms."""
    return points_over(label, values["depths"], logs / math.log(10))


def measure_weights(values: Values, context: Context) -> Outcome:
    """Figure 6.3: the first layer's gradient norm against depth for Haar and Gaussian weights."""
    depths = np.array(values["depths"])
    gaussian = log_norms(values, context, law="gaussian", offset=1)
    orthogonal = log_norms(values, context, law="orthogonal", offset=2)
    # without centring n samples span what n + 1 do with it
    growth = batchnorm("identity", batch_size=values["batch_size"] + (0 if values["center"] else 1)).gradient_growth
    wide = 0.5 * math.log(growth)  # growth is that of the square
    first = int(np.argmax(depths >= values["window"]))
    numbers = {
        "gaussian_slope": late_slope(values, gaussian),
        "orthogonal_slope": late_slope(values, orthogonal),
        "gaussian_rise": mean_of(gaussian[:, -1] - gaussian[:, 0]),
        "orthogonal_rise": mean_of(orthogonal[:, -1] - orthogonal[:, 0]),
        "gaussian_slope_over_wide_theory": scaled(late_slope(values, gaussian), 1 / wide),
    }
    line = gaussian[:, first].mean() + wide * (depths - depths[first])
    series = (
        against_depth("Gaussian weights", values, gaussian),
        Series("Gaussian weights (theory)", depths, line / math.log(10), role="theory"),
        against_depth("orthogonal weights", values, orthogonal),
    )
    return present(numbers, series)


def measure_degenerate(values: Values, context: Context) -> Outcome:
    """Figure 6.2: orthogonal weights on a batch with repeated samples and on one without."""
    repeated = log_norms(values, context, law="orthogonal", offset=1, distinct=values["distinct"])
    different = log_norms(values, context, law="orthogonal", offset=2)
    numbers = {
        "repeated_slope": late_slope(values, repeated),
        "different_slope": late_slope(values, different),
        "different_rise": mean_of(different[:, -1] - different[:, 0]),
    }
    series = (
        against_depth("repeated samples", values, repeated),
        against_depth("different samples", values, different),
    )
    return present(numbers, series)


def measure_cell(
    values: Values, context: Context, *, width: int, kind: str, law: str, offset: int
) -> tuple[Array, dict[str, Number]]:
    """ln of the first layer's gradient norm, (runs, depths), in random networks on inputs of their own; three numbers.

    These are its slope against depth, the growth of ln‖∂L/∂W_ℓ‖ towards the input per layer of the deepest network,
    both from the depth or layer `window` on, and its rise from the last layer to the largest over the theorem's bound.
    """
    window, generator = values["window"], context.generator(offset, device=context.device)
    start = networks.draw_inputs(kind, width, values["runs"], generator=generator)
    labels = torch.arange(width, device=context.device) % 10
    options: dict[str, Any] = {"depth": values["depths"][-1], "law": law, "centring": False, "length": 1.0}
    made = networks.build_networks(start, labels, generator=generator, **options)
    logs = first_layer_log_norms(made, values["depths"])
    layers = every_layer_log_norms(made)
    gaps = isometry_gap(gram(start), tolerance=0.0).cpu().numpy()
    # with a loss of slope s = 1 the bound limits the rise of the gradient from its last layer
    bounds = np.array([theorem_6_5(width, input_gap=float(gap)).value for gap in gaps])
    rise = (layers - layers[:, -1:]) / bounds[:, None]  # from the last layer back
    return logs, {
        "depth_slope": late_slope(values, logs),
        "layer_growth": mean_slope_of(-np.arange(window, layers.shape[1] + 1), layers[:, window - 1 :]),
        "rise_over_bound": mean_of(rise[:, int(np.argmax(rise.mean(0)))]),
    }


def measure_theorem_6_5(values: Values, context: Context) -> Outcome:
    """Gradients at any depth and layer, features of norm 1: the worst cell, and Gaussian weights beside it."""
    cells: dict[str, list[dict[str, Number]]] = {"orthogonal": [], "gaussian": []}
    series: dict[str, list[Series]] = {law: [] for law in cells}
    for index, (width, kind) in context.each(values["inputs"]):
        for law, made in cells.items():
            if law == "gaussian" and width < values["wide"]:  # narrow Gaussian networks are no part of the claim
                continue
            offset = 2 * index + (law == "gaussian")
            logs, cell = measure_cell(values, context, width=width, kind=kind, law=law, offset=offset)
            made.append(cell)
            series[law].append(against_depth(f"d = {width}, {kind}", values, logs))
    orthogonal, gaussian = cells.values()
    numbers = {
        "depth_slope": highest(cell["depth_slope"] for cell in orthogonal),
        "layer_growth": highest(cell["layer_growth"] for cell in orthogonal),
        "gaussian_depth_slope": lowest(cell["depth_slope"] for cell in gaussian),
        "gaussian_layer_growth": lowest(cell["layer_growth"] for cell in gaussian),
        "largest_rise_over_bound": highest(cell["rise_over_bound"] for cell in orthogonal),
    }
    panels = [Panel(series=drawn, title=f"{law} weights") for law, drawn in series.items()]
    return present(numbers, *panels)


def measure_shaping(values: Values, context: Context) -> Outcome:
    """Figure 6.5: the first layer's gradient against depth with gain 1 and with α_ℓ = ℓ^(−exponent)."""
    depth, exponent = values["depths"][-1], values["exponent"]
    kinds = (("plain", 0.0, "gain 1"), ("shaped", exponent, f"gain ℓ^−{exponent:g}"))
    numbers: dict[str, Number] = {}
    panels = []
    for place, activation in enumerate(NONLINEAR):
        series, gaps = [], []
        for which, (name, falls, label) in enumerate(kinds):
            shape: dict[str, Any] = {"activation": activation, "exponent": falls, "depth": depth}
            made = build_on_data(values, context, offset=10 * place + which, **shape)
            logs = first_layer_log_norms(made, values["depths"])
            gaps.append(networks.gaps_at(made, (depth,))[:, 0])
            numbers[f"{name}_{activation}_slope"] = late_slope(values, logs)
            numbers[f"{name}_{activation}_rise"] = mean_of(logs[:, -1] - logs[:, 1])
            series.append(against_depth(label, values, logs))
            context.progress((2 * place + 1 + which) / 4)
        plain, shaped = gaps
        numbers[f"gap_{activation}_shaped_over_plain"] = jackknife_ratio(shaped, plain)
        panels.append(Panel(series=series, title=activation))
    return present(numbers, *panels)


def bulk_rates(
    values: Values, context: Context, *, activation: str, gain: float, offset: int, centring: bool = True
) -> tuple[Array, Array]:
    """Rates at some layers, (runs, layers), and between the ends of the bulk, (runs,).

    The bulk leaves out `margin` layers at either end: near the input the representation settles, near the output the
    gradient does.
    """
    depth, margin = values["depth"], values["margin"]
    shape: dict[str, Any] = {"activation": activation, "gain": gain, "centring": centring}
    logs = every_layer_log_norms(build_on_data(values, context, depth=depth, offset=offset, **shape))
    places = networks.rates_at(logs, values.get("layers", ()), gap=10)
    return places, networks.rates_at(logs, (margin,), gap=depth - 2 * margin)[:, 0]


def measure_gain_law(values: Values, context: Context) -> Outcome:
    """Figure C.1: the rate of explosion against the gain, and the exponent of its power law in two halves of gains."""
    gains = sorted(values["gains"])
    half = len(gains) // 2
    lower, upper = slice(0, half + 1), slice(half, len(gains))  # they share the middle gain
    # what a linear network of this depth has: finite size, not nonlinearity
    floor = bulk_rates(values, context, activation="identity", gain=1.0, offset=99)[1]
    numbers: dict[str, Number] = {"linear_rate": mean_of(floor)}
    panels = []
    for place, activation in enumerate(NONLINEAR):
        rows = []
        for index, gain in enumerate(gains):
            rows.append(bulk_rates(values, context, activation=activation, gain=gain, offset=20 * place + index))
            context.progress((place * len(gains) + index + 1) / (2 * len(gains)))
        layers, bulk = zip(*rows, strict=True)
        numbers |= {f"rate_{activation}_{gain:.3g}": mean_of(r) for gain, r in zip(gains, bulk, strict=True)}
        excess = np.stack(bulk, axis=1) - floor[:, None]
        numbers |= {f"exponent_{activation}{name}": n for name, n in _exponents(gains, excess, lower, upper).items()}
        series = [
            _clear_points(f"layer {layer}", gains, [mean_of(at[:, column] - floor) for at in layers])
            for column, layer in enumerate(values["layers"])
        ]
        series.append(_clear_points("bulk", gains, [mean_of(rates) for rates in excess.T]))
        c2 = numbers[f"exponent_{activation}"].value
        if math.isfinite(c2):
            front = math.exp(float(np.mean(np.log(excess.mean(0)) - c2 * np.log(gains))))
            series.append(Series(f"c₁α^{c2:.2f}, our fit", gains, [front * g**c2 for g in gains], role="paper"))
        panels.append(Panel(series=series, title=activation))
    return present(numbers, *panels)


def _clear_points(label: str, gains: Sequence[float], rates: Sequence[Number]) -> Series:
    """The points that a logarithmic axis can show with their intervals."""
    # an interval that reaches 0 has no place on a logarithmic axis
    kept = [(gain, rate) for gain, rate in zip(gains, rates, strict=True) if rate.low > 0]
    return points_of(label, [gain for gain, _ in kept], [rate for _, rate in kept])


def _exponents(gains: Sequence[float], excess: Array, lower: slice, upper: slice) -> dict[str, Number]:
    """Slopes of ln R̄ on ln α, R̄ the mean of `excess` (runs, gains) over runs: of all gains and of two windows.

    The points are not taken to lie on a line. The windows share a gain and all points share runs and the linear rate
    taken off, so runs are left out of everything at once. NaN where a mean is not positive.
    """
    x = np.log(gains)

    def exponent(rows: Array, window: slice) -> float:
        means = rows.mean(axis=0)[window]
        centred = x[window] - x[window].mean()
        # a logarithm needs positive rates
        return float(centred @ np.log(means) / np.sum(centred**2)) if np.all(means > 0) else math.nan

    return {
        "": jackknife(lambda rows: exponent(rows, slice(None)), excess),
        "_lower": jackknife(lambda rows: exponent(rows, lower), excess),
        "_upper": jackknife(lambda rows: exponent(rows, upper), excess),
        "_change": jackknife(lambda rows: exponent(rows, lower) - exponent(rows, upper), excess),
    }


def measure_gain_exponent(values: Values, context: Context) -> Outcome:
    """Figure C.2: the rate at layer 10 against the exponent of the gains, for networks of several depths."""
    exponents, depths = values["exponents"], values["depths"]
    layer, gap = values["layer"], 10
    numbers: dict[str, Number] = {}
    panels = []
    for place, activation in enumerate(NONLINEAR):
        rows = []
        for index, exponent in enumerate(exponents):
            shape: dict[str, Any] = {"activation": activation, "exponent": exponent, "depth": max(depths)}
            made = build_on_data(values, context, offset=20 * place + index, **shape)
            near, far = networks.log_norms_at(made, depths, (layer, layer + gap))
            rows.append((near - far) / gap)  # (runs, depths)
            context.progress((place * len(exponents) + index + 1) / (2 * len(exponents)))
        rates = np.stack(rows)
        mean = rates.mean(axis=2)
        numbers |= {
            f"{activation}_rate_without": mean_of(mean[0]),
            f"{activation}_rate_with": mean_of(mean[-1]),
            f"{activation}_rate_left": jackknife_ratio(mean[-1], mean[0]),
            f"{activation}_fall": mean_slope_of(exponents, mean.T),
            f"{activation}_change_with_depth": jackknife_ratio((rates[..., -1] - rates[..., 0]).mean(0), mean[0]),
        }
        series = [points_over(f"depth {depth}", exponents, rates[..., column].T) for column, depth in enumerate(depths)]
        panels.append(Panel(series=series, title=activation))
    return present(numbers, *panels)


def measure_nonlinearity(values: Values, context: Context) -> Outcome:
    """Figure C.9: gradients and isometry gaps against depth for sin, tanh and the identity, gain 1."""
    depths = values["depths"]
    numbers: dict[str, Number] = {}
    gradients, isometries = [], []
    for place, activation in context.each((*NONLINEAR, "identity")):
        made = build_on_data(values, context, activation=activation, depth=depths[-1], offset=place)
        logs, gaps = first_layer_log_norms(made, depths), networks.gaps_at(made, depths)
        numbers |= {f"{activation}_slope": late_slope(values, logs), f"{activation}_gap": mean_of(gaps[:, -1])}
        gradients.append(against_depth(activation, values, logs))
        isometries.append(points_over(activation, depths, gaps))
    return present(numbers, gradients, isometries)


def measure_centring(values: Values, context: Context) -> Outcome:
    """Figure C.10: linear networks with centred batch norm and without centring, and the rates of narrow deep ones."""
    depths, narrow = values["depths"], values["narrow"]
    numbers: dict[str, Number] = {}
    rises, series = [], []
    for place, (name, centring) in context.each((("standard", True), ("simplified", False))):
        made = build_on_data(values, context, depth=depths[-1], offset=place, centring=centring)
        logs = first_layer_log_norms(made, depths)
        rates = bulk_rates(narrow, context, activation="identity", gain=1.0, offset=10 + place, centring=centring)[1]
        rises.append(logs[:, -1] - logs[:, 0])
        numbers[f"{name}_rise"] = mean_of(rises[-1])
        numbers[f"{name}_growth_over_square_of_width"] = mean_of(rates * narrow["width"] ** 2)
        series.append(against_depth(f"{name} batch norm", values, logs))
    numbers["difference_of_rises"] = mean_of(rises[0] - rises[1])
    return present(numbers, series)
