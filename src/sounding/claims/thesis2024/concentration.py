"""Theorem 3.2: which constant the distance of the Gram matrix to the mean field's fixed point needs.

1 − α is the square of the mean field's slowest rate λ, κ the condition of G*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, highest, mean_of, mean_slope_of, scaled
from sounding.claims.picture import Panel, Picture, points_over
from sounding.claims.thesis2024.gram_paths import bound_line, distances, fixed_gram, slowest_rate, stretched

EARLY = 5  # layers in which the transient must peak; a later peak is told by a number of its own
ABOVE_FLOOR = 10.0  # times the noise of a finite width: below, the noise would enter the ratio by a tenth and more


def apart(size: int) -> Array:
    """One sample apart from the others, which lie almost together."""
    place = np.array([size - 1.0] + [-1.0] * (size - 1)) / math.sqrt(size)
    return np.asarray(np.outer(place, place) + 1e-3 * np.eye(size))


def halves(size: int) -> Array:
    """Two groups of samples on opposite sides."""
    place = np.where(np.arange(size) < size // 2, -1.0, 1.0)
    return np.asarray(np.outer(place, place) + 0.05 * np.eye(size))


def near_pair(size: int, distance: float) -> Array:
    """Independent samples, but for two with the cosine 1 − distance."""
    gram = np.eye(size)
    gram[0, 1] = gram[1, 0] = 1 - distance
    return gram


STARTS = {"stretched": stretched, "one sample apart": apart, "two halves": halves}


def transient(found: Array, rate: float, noise: float) -> Array:
    """‖G_ℓ − G*‖_F/λ^ℓ of each run at the layers whose mean distance is well above the noise of a finite width."""
    mean = found.mean(0)
    below = np.flatnonzero(mean < ABOVE_FLOOR * noise)
    kept = int(below[0]) if len(below) else len(mean)
    return np.asarray(found[:, :kept] / rate ** np.arange(1, kept + 1))


def measure_concentration(values: Mapping[str, Any], context: Context) -> Outcome:
    """The needed constant over widths, batch sizes, starts and layers, and what of it grows."""
    numbers: dict[str, Number] = {}
    trends, by_run, series = [], [], []
    largest, late, above = list[Number](), list[Number](), list[Number]()
    offset = 0
    options: dict[str, Any] = {"context": context}
    for name in values["activations"]:
        first: dict[int, Array] = {}
        own: dict[int, Array] = {}
        for size in values["batch_sizes"]:
            rate, condition = slowest_rate(name, size), float(np.linalg.cond(fixed_gram(name, size)))
            layers = np.arange(1, values["depth"] + 1)
            tails = []
            finite: dict[str, list[Array]] = {start: [] for start in STARTS}
            for width in values["widths"]:
                bound = bound_line(name, size, width=width, depth=values["depth"])
                for start, make in STARTS.items():
                    depth = values["depth"] if start == "stretched" else values["short"]
                    found = distances(
                        name, make(size), width=width, depth=depth, runs=values["runs"], offset=offset, **options
                    )
                    offset += 1
                    finite[start].append(found / bound[:depth])
                    if start == "stretched":
                        tail = np.log(found[:, values["burn_in"] :])
                        later = layers[values["burn_in"] :]
                        trends.append(tail @ (later - later.mean()) / np.var(later) / len(later))
                        tails.append(found[:, values["burn_in"] :].mean(1))
            by_run.append(np.log(np.array(tails)).T)
            noise = float(tails[-1].mean()) * math.sqrt(values["widths"][-1] / values["wide"])
            limits, constants = [], []
            for start, make in STARTS.items():
                found = distances(
                    name, make(size), width=values["wide"], depth=values["short"], runs=values["wide_runs"],
                    offset=offset, **options,
                )  # fmt: skip
                offset += 1
                ratio = transient(found, rate, noise)
                peak = int(np.argmax(ratio.mean(0)[:EARLY]))
                if ratio.shape[1] > EARLY:
                    beyond = EARLY + int(np.argmax(ratio.mean(0)[EARLY:]))
                    late.append(mean_of(ratio[:, beyond] / ratio[:, peak]))
                limit = float(ratio.mean(0).max()) / condition
                limits.append(found[:, 0] / condition)
                constants.append(ratio[:, peak] / ratio[:, 0])
                for needed in finite[start]:
                    top = mean_of(needed[:, int(np.argmax(needed.mean(0)))])
                    largest.append(top)
                    above.append(scaled(top, 1 / limit))
                if size == values["batch_sizes"][0]:
                    shown = np.arange(1, ratio.shape[1] + 1)
                    series.append(points_over(f"{name}, {start}", shown, ratio / condition))
            first[size], own[size] = np.max(limits, axis=0), np.max(constants, axis=0)
        sizes = np.log(list(first))
        numbers[f"{name}_batch_exponent"] = mean_slope_of(sizes, np.log(np.array(list(first.values()))).T)
        numbers[f"{name}_corrected_batch_exponent"] = mean_slope_of(sizes, np.log(np.array(list(own.values()))).T)
    numbers |= {
        "needed_constant": highest(largest),
        "needed_over_wide_limit": highest(above),
        "late_over_early": highest(late),
        "log_growth_per_layer": mean_of(np.concatenate(trends)),
        "width_exponent": mean_slope_of(np.log(values["widths"]), np.concatenate(by_run)),
        "near_pair_exponent": measure_near_pair(values, context, offset),
    }
    panel = Panel("layer ℓ", "‖G_ℓ − G*‖_F/(κ(G*)(1 − α)^(ℓ/2))", series, x_scale="linear", y_scale="log")
    caption = (
        f"Batch {values['batch_sizes'][0]}, width {values['wide']}, as long as the distance is above the noise of that "
        "width: the constant that the first term needs, from three starts. It is largest in the first layers."
    )
    return Outcome(numbers, Picture((panel,), caption))


def measure_near_pair(values: Mapping[str, Any], context: Context, offset: int) -> Number:
    """The exponent with which the needed constant grows as two samples approach one another."""
    name, size = values["activations"][0], values["batch_sizes"][0]
    rate = slowest_rate(name, size)
    constants = []
    for index, distance in enumerate(values["pairs"]):
        found = distances(
            name, near_pair(size, distance), width=values["wide"], depth=20, runs=values["wide_runs"], context=context,
            offset=offset + index,
        )  # fmt: skip
        ratio = found / rate ** np.arange(1, 21)
        settled = int(np.argmax(found.mean(0) < found.mean(0)[0] / 3)) or 20
        constants.append(np.log(ratio[:, :settled].max(1) / ratio[:, 0]))
    return mean_slope_of(-np.log(values["pairs"]), np.array(constants).T)
