"""Section 6.4 and appendix C.5 at initialization: gains in front of activations that keep gradients from exploding.

Networks are φ(α_ℓ BN(HWᵀ)) with Haar weights, every run on a batch of its own; gradients are those of the weights.
A run keeps its batch under all gains and activations, so that numbers of several of them leave out whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, jackknife, mean_of, mean_slope_of
from sounding.claims.picture import Panel, Picture, Series, points_of, points_over
from sounding.claims.thesis2024.networks import (
    build_on_data,
    constant,
    every_layer_log_norms,
    first_layer_log_norms,
    gaps_at,
    log_norms_at,
    power,
    rates_at,
)

NONLINEAR = ("tanh", "sin")
GRADIENT = "log₁₀ of the first layer's gradient norm"


def measure_shaping(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 6.5: the first layer's gradient against depth with gain 1 and with α_ℓ = ℓ^(−exponent)."""
    depths = np.array(values["depths"])
    late = depths >= values["window"]
    numbers: dict[str, Number] = {}
    panels = []
    for place, activation in enumerate(NONLINEAR):
        series = []
        gaps = {}
        for name, gain in (("plain", None), ("shaped", power(values["exponent"]))):
            offset = 10 * place + (name == "shaped")
            made = build_on_data(
                values, context, activation=activation, gain=gain, depth=int(depths[-1]), offset=offset
            )
            logs = first_layer_log_norms(made, values["depths"])
            gaps[name] = gaps_at(made, (int(depths[-1]),))[:, 0]
            numbers[f"{name}_{activation}_slope"] = mean_slope_of(depths[late], logs[:, late])
            numbers[f"{name}_{activation}_rise"] = mean_of(logs[:, -1] - logs[:, 1])
            label = "gain 1" if name == "plain" else f"gain ℓ^−{values['exponent']:g}"
            series.append(points_over(label, depths, logs / math.log(10)))
            context.progress((2 * place + 1 + (name == "shaped")) / 4)
        numbers[f"gap_{activation}_shaped_over_plain"] = jackknife_ratio(gaps["shaped"], gaps["plain"])
        panels.append(Panel("depth L", GRADIENT, series, title=activation))
    caption = (
        f"{values['data']}, width and batch {values['width']}, orthogonal weights, centred batch norm. With gain 1 the "
        "gradient of the first layer grows exponentially with depth; with gains that fall with the layer it stays."
    )
    return Outcome(numbers, Picture(panels, caption))


def bulk_rates(
    values: Mapping[str, Any], context: Context, *, activation: str, gain: float, offset: int, centring: bool = True
) -> tuple[Array, Array]:
    """Rates at some layers, (runs, layers), and between the ends of the bulk, (runs,).

    The bulk leaves out `margin` layers at either end: near the input the representation settles, near the output the
    gradient does.
    """
    depth, margin = values["depth"], values["margin"]
    made = build_on_data(
        values, context, activation=activation, gain=constant(gain), depth=depth, offset=offset, centring=centring
    )
    logs = every_layer_log_norms(made)
    places = rates_at(logs, values.get("layers", ()), gap=10)
    return places, rates_at(logs, (margin,), gap=depth - 2 * margin)[:, 0]


def measure_gain_law(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure C.1: the rate of explosion against the gain, and the exponent of its power law in two halves of gains."""
    gains = sorted(values["gains"])
    half = len(gains) // 2
    lower, upper = slice(0, half + 1), slice(half, len(gains))
    floor = bulk_rates(values, context, activation="identity", gain=1.0, offset=99)[1]
    numbers: dict[str, Number] = {"linear_rate": mean_of(floor)}
    panels = []
    for place, activation in enumerate(NONLINEAR):
        layers, bulk = [], []
        for index, gain in enumerate(gains):
            at, whole = bulk_rates(values, context, activation=activation, gain=gain, offset=20 * place + index)
            layers.append(at)
            bulk.append(whole)
            context.progress((place * len(gains) + index + 1) / (2 * len(gains)))
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
            level = float(np.mean(np.log(excess.mean(0)) - c2 * np.log(gains)))
            series.append(
                Series(f"c₁α^{c2:.2f}, our fit", gains, [math.exp(level) * g**c2 for g in gains], role="paper")
            )
        label = "R(α) − R(linear) [ln per layer]"
        panels.append(Panel("gain α", label, series, x_scale="log", y_scale="log", title=activation))
    caption = (
        f"{values['data']}, width and batch {values['width']}, depth {values['depth']}, one gain in all layers. The "
        "rate falls with the gain at every layer, the steeper the smaller the gain: no one power law fits."
    )
    return Outcome(numbers, Picture(panels, caption))


def _clear_points(label: str, gains: Sequence[float], rates: Sequence[Number]) -> Series:
    """The points that a logarithmic axis can show with their intervals."""
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
        return float(centred @ np.log(means) / np.sum(centred**2)) if np.all(means > 0) else math.nan

    return {
        "": jackknife(lambda rows: exponent(rows, slice(None)), excess),
        "_lower": jackknife(lambda rows: exponent(rows, lower), excess),
        "_upper": jackknife(lambda rows: exponent(rows, upper), excess),
        "_change": jackknife(lambda rows: exponent(rows, lower) - exponent(rows, upper), excess),
    }


def jackknife_ratio(top: Array, bottom: Array) -> Number:
    """The mean of `top` over that of `bottom`, of the same runs."""
    return jackknife(lambda rows: float(rows[:, 0].mean() / rows[:, 1].mean()), np.stack([top, bottom], axis=1))


def measure_gain_exponent(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure C.2: the rate at layer 10 against the exponent of the gains, for networks of several depths."""
    exponents, depths = values["exponents"], values["depths"]
    layer, gap = values["layer"], 10
    numbers: dict[str, Number] = {}
    panels = []
    for place, activation in enumerate(NONLINEAR):
        rows = []
        for index, exponent in enumerate(exponents):
            shape: dict[str, Any] = {"activation": activation, "gain": power(exponent), "depth": max(depths)}
            made = build_on_data(values, context, offset=20 * place + index, **shape)
            near, far = log_norms_at(made, depths, (layer, layer + gap))
            rows.append((near - far) / gap)
            context.progress((place * len(exponents) + index + 1) / (2 * len(exponents)))
        rates = np.stack(rows)
        mean = rates.mean(axis=2)
        numbers[f"{activation}_rate_without"] = mean_of(mean[0])
        numbers[f"{activation}_rate_with"] = mean_of(mean[-1])
        numbers[f"{activation}_rate_left"] = jackknife_ratio(mean[-1], mean[0])
        numbers[f"{activation}_fall"] = mean_slope_of(exponents, mean.T)
        numbers[f"{activation}_change_with_depth"] = jackknife_ratio((rates[..., -1] - rates[..., 0]).mean(0), mean[0])
        series = [points_over(f"depth {depth}", exponents, rates[..., column].T) for column, depth in enumerate(depths)]
        panels.append(Panel("gain exponent", f"rate at layer {layer} [ln per layer]", series, title=activation))
    caption = (
        f"{values['data']}, width and batch {values['width']}: the rate at layer {layer} falls with the exponent k of "
        "the gains ℓ^−k and hardly depends on the depth of the network."
    )
    return Outcome(numbers, Picture(panels, caption))
