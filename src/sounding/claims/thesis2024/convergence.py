"""Chapter 5: where the correlation of two samples goes under a kernel map, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import GROUPS, Number, apart_from, exact, extreme_of, highest, slope_of
from sounding.claims.picture import Panel, Picture, Series
from sounding.claims.thesis2024.correlation_maps import (
    CorrelationMap,
    grid,
    iterate,
    map_of,
    map_of_weights,
    random_maps,
    walk_pair,
    worst_over_bound,
)
from sounding.claims.thesis2024.gram_paths import thin
from sounding.theory.kernel import kernel
from sounding.theory.kernel_path import bound, sequence

SHOWN = 60  # maps in a picture

RATES: dict[str, Callable[[CorrelationMap], float]] = {
    "5.6": lambda one: 1 / (2 - one.slope_zero),
    "5.7": lambda one: 1 / one.slope_one,
    "5.8": lambda one: one.slope_one,
    "5.9": lambda one: 1 - one.zero - one.slope_zero,
    "5.10": lambda one: max(1 - one.zero, one.slope_fixed_point, (1 - one.fixed_point) / (2 - one.slope_fixed_point)),
    "5.10 corrected": lambda one: max(1 - one.zero, 1 / (2 - one.slope_fixed_point)),
}


def gather_maps(values: Mapping[str, Any], context: Context) -> list[CorrelationMap]:
    """The maps of the named activations, those given by weights, and random ones of the case."""
    found = [map_of(name, norm) for name, norm in values["activations"]]
    for weights in values.get("weights", ()):
        series = np.zeros(max(map(int, weights)) + 1)  # keys of a row's file are strings
        for order, weight in weights.items():
            series[int(order)] = weight
        found.append(map_of_weights(series, name=" + ".join(f"{w:g}ρ^{k}" for k, w in weights.items())))
    return found + random_maps(values["case"], values["random"], context)


def measure_contraction(values: Mapping[str, Any], context: Context) -> Outcome:
    """Every map's sequence from many starts against the printed and the corrected bound."""
    maps = gather_maps(values, context)
    ratios = {
        version: np.array([worst_over_bound(one, RATES[rate](one), depth=values["depth"], form=form) for one in maps])
        for version, (rate, form) in values["versions"].items()
    }
    named = len(maps) - values["random"]
    numbers: dict[str, Number] = {}
    for version, found in ratios.items():
        numbers[f"largest_over_{version}"] = over_groups(found, named, np.max)
        for one, ratio in zip(maps[:named], found, strict=False):
            numbers[f"{version}: {one.name}"] = exact(float(ratio), error=1e-9)
    if values["case"] == 3:
        numbers["relu_exponent"] = algebraic_exponent(map_of("relu"), 0.0, first=200, last=2000)
    path, deviation = draw_path(values, context)
    numbers["chain_deviation"] = deviation
    series = [
        Series(f"{version} bound", np.linspace(0, 100, len(kept)), kept)
        for version, kept in ((v, _thinned(r)) for v, r in ratios.items())
    ]
    series.append(Series("never above 1", [0, 100], [1.0, 1.0], role="bound"))
    others = Panel(
        "share of kernel maps (%)", "largest ratio of sequence to bound", series, y_scale="log",
        title=f"{named} activations, {values['random']} random maps",
    )  # fmt: skip
    return Outcome(numbers, Picture((path, others), values["caption"]))


def over_groups(found: Array, named: int, extreme: Callable[[Array], Any]) -> Number:
    """The extreme of the named activations' maps and an eighth of the random ones."""
    parts = np.array_split(found[named:], GROUPS)
    return extreme_of([extreme(np.concatenate([found[:named], part])) for part in parts])


def _thinned(ratios: Array) -> Array:
    return np.asarray(np.maximum(np.sort(ratios)[thin(len(ratios), SHOWN)], 1e-4))


def algebraic_exponent(one: CorrelationMap, start: float, *, first: int, last: int) -> Number:
    """The slope of ln(1 − ρ_ℓ) against ln ℓ between two layers."""
    layers = np.unique(np.geomspace(first, last, 12).astype(int))
    return slope_of(np.log(layers), np.log(1 - iterate(one, np.array([start]), last)[layers, 0]))


def draw_path(values: Mapping[str, Any], context: Context) -> tuple[Panel, Number]:
    """The first activation's distance to ρ* over depth: networks, κ, and both bounds; and the networks' deviation."""
    (name, norm), start, depth = values["activations"][0], values["start"], values["layers"]
    known = kernel(name, norm)
    layers = np.arange(depth + 1)
    exact_path = np.array([row.value for row in sequence(name, start, depth=depth, norm=norm)])
    placed = "pre-rms" if norm == "none" else norm
    mean, half = walk_pair(values, context, name, norm=placed, depth=depth, offset=0)
    # what noise alone would give is no distance
    seen = np.abs(mean - known.fixed_point) > 2 * half
    seen &= layers % 2 == 0
    series = [
        Series(name, layers[seen], np.abs(mean - known.fixed_point)[seen], error=half[seen]),
        Series(f"{name} (κ)", layers, np.abs(exact_path - known.fixed_point), role="theory"),
    ]
    for version, role in (("printed", "paper"), ("corrected", "bound")):
        line = [row.value for row in bound(known, start, depth=depth, version=version)]  # type: ignore[arg-type]
        series.append(Series(f"{version} bound", layers, line, role=role))  # type: ignore[arg-type]
    title = f"{name}, ρ_0 = {start:g}, width {values['width']}"
    panel = Panel("layer ℓ", "|ρ_ℓ − ρ*|", series, y_scale="log", title=title)
    return panel, apart_from(exact_path, mean, half, samples=values["runs"])


def measure_attractor(values: Mapping[str, Any], context: Context) -> Outcome:
    """How many fixed points attract, where they lie, and that every start of the named activations ends there."""
    activations = [map_of(name) for name in values["activations"]]
    randoms = [one for case in (1, 2, 3, 4) for one in random_maps(case, values["random"], context)]
    counts, places = [], []
    fine = np.linspace(-1 + 1e-9, 1 - 1e-9, 4001)
    for one in activations + randoms:
        rising = one.kappa(fine) - fine > 0
        inside = np.flatnonzero(rising[:-1] & ~rising[1:])
        counts.append(len(inside) + int(rising[-1]))
        places += [float(fine[i]) for i in inside] + ([1.0] if rising[-1] else [])
    ends = [np.abs(iterate(one, grid(), values["depth"])[-1] - one.fixed_point).max() for one in activations]
    numbers = {
        "fewest_attracting": exact(min(counts)),
        "most_attracting": exact(max(counts)),
        "lowest_attracting": exact(min(places), error=float(fine[1] - fine[0])),
        "farthest_end": exact(float(max(ends)), error=1e-9),
    }
    rho = np.linspace(-1, 1, 31)
    series = [Series(f"{one.name} (κ)", rho, one.kappa(rho), role="theory") for one in activations]
    series.append(Series("ρ", [-1, 1], [-1, 1], role="bound"))
    panel = Panel("correlation ρ", "κ(ρ)", series)
    cases = Panel("attracting fixed point ρ*", "share of maps (%)", cumulative(np.array(places)))
    caption = "Each κ crosses the diagonal from above once: one fixed point attracts, and it is not negative."
    return Outcome(numbers, Picture((panel, cases), caption))


def cumulative(places: Array) -> tuple[Series, ...]:
    ordered = np.sort(places)
    kept = thin(len(ordered), SHOWN)
    return (Series("maps", ordered[kept], 100 * (kept + 1) / len(ordered)),)


def measure_normalized(values: Mapping[str, Any], context: Context) -> Outcome:
    """Theorem 5.15: each norm's maps against both rates, and networks of finite width against κ."""
    outcome = measure_contraction(values, context)
    deviations = []
    for index, (name, norm) in enumerate(values["walked"]):
        walked = walk_pair(values, context, name, norm=norm, depth=values["layers"], offset=index + 1)
        path = iterate(map_of(name, norm), np.array([values["start"]]), values["layers"])[:, 0]
        deviations.append(apart_from(path, *walked, samples=values["runs"]))
    numbers = {**outcome.numbers, "chain_deviation": highest(deviations)}
    return Outcome(numbers, outcome.picture)
