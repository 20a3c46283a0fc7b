"""Chapter 5: where the correlation of two samples goes under a kernel map, and how fast.

The maps to try it on are those of activations, and power series with random Hermite weights: κ(ρ) = Σ p_k ρ^k with
p_k = c_k² ≥ 0 and Σ p_k = 1 is the kernel map of the activation Σ c_k h_k, so every such series is a case of the
theorems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.polynomial import chebyshev, hermite_e
from scipy.optimize import brentq

from sounding.activations.activation import Array
from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import GROUPS, Number, apart_from, exact, extreme_of, highest, scaled, slope_of, student
from sounding.claims.picture import Panel, Series, level, thin
from sounding.encoding import fields_of
from sounding.theory.bounds.kernel_maps import kernel_case, theorem_5_11
from sounding.theory.kernel import kernel, normalized
from sounding.theory.kernel_path import bound, interpolate, sequence

RESOLVED = 1e-6  # below this a distance is rounding
ORDER = 30  # of the highest Hermite coefficient that is drawn


@dataclass(frozen=True)
class CorrelationMap:
    """κ with κ(1) = 1, and what the theorems use of it."""

    name: str
    kappa: Callable[[Array], Array]
    zero: float
    slope_zero: float
    slope_one: float
    fixed_point: float
    slope_fixed_point: float
    case: int


def map_of(activation: str, norm: Any = "none") -> CorrelationMap:
    """The map of an activation; κ as a series in arccos ρ, exact to about 1e-12."""
    found = kernel(activation, norm)
    coefficients = np.array(interpolate(normalized(activation, norm)).coefficients)

    def kappa(rho: Array) -> Array:
        # the series is in the angle, for in ρ a map may have square roots at ±1
        unit = 2 * np.arccos(np.clip(rho, -1.0, 1.0)) / np.pi - 1
        return np.asarray(chebyshev.chebval(unit, coefficients))

    label = activation if norm == "none" else f"{activation}, {norm}"
    numbers = (found.zero, found.slope_zero, found.slope_one, found.fixed_point, found.slope_fixed_point)
    return CorrelationMap(label, kappa, *numbers, found.case)


def map_of_weights(weights: Array, name: str = "") -> CorrelationMap:
    """The map of the squared Hermite coefficients p_0, p_1, …"""
    series = np.polynomial.Polynomial(weights)
    slope = series.deriv()
    case = kernel_case(float(weights[0]), float(slope(1.0)))
    point = {1: 0.0, 2: 1.0, 3: 1.0}.get(case)  # case 4 has its fixed point inside
    if point is None:
        # short of 1, which is a fixed point of every map
        point = float(brentq(lambda rho: float(series(rho)) - rho, 0.0, 1 - 1e-7, xtol=1e-15))
    return CorrelationMap(
        name=name,
        kappa=lambda rho: np.asarray(series(rho)),
        zero=float(weights[0]),
        slope_zero=float(weights[1]),
        slope_one=float(slope(1.0)),
        fixed_point=point,
        slope_fixed_point=float(slope(point)),
        case=case,
    )


def random_maps(case: int, count: int, context: Context) -> list[CorrelationMap]:
    """Maps of one case of Theorem 5.11 with few or many Hermite coefficients up to order 30."""
    generator = np.random.default_rng([context.random_seed, case])
    found: list[CorrelationMap] = []
    while len(found) < count:
        concentration = 10 ** generator.uniform(-2, 0.5)
        rest = generator.dirichlet(np.full(ORDER, concentration) * 0.9 ** np.arange(ORDER))
        growth = float(rest @ np.arange(1, ORDER + 1))
        if not growth > 1 + 1e-3:  # all of it on order 1 is the identity
            continue
        edge = 1 - 1 / growth  # κ′(1) = (1 − p_0)·growth is 1 there
        zero = {1: 0.0, 3: edge, 2: generator.uniform(edge, 1), 4: generator.uniform(0, edge)}[case]
        weights = np.concatenate([[zero], (1 - zero) * rest])
        one = map_of_weights(weights, name=f"random {len(found)}")
        if one.case == case:
            found.append(one)
    return found


def iterate(one: CorrelationMap, starts: Array, depth: int) -> Array:
    """ρ_0 … ρ_depth from each start: (depth + 1, starts)."""
    path = [np.asarray(starts, dtype=np.float64)]
    for _ in range(depth):
        path.append(np.clip(one.kappa(path[-1]), -1.0, 1.0))  # rounding must not leave the correlations
    return np.array(path)


def grid() -> Array:
    """80 starts in (−1, 1), dense near both ends, without 0."""
    half = 1 - np.geomspace(1e-3, 0.98, 40)
    return np.concatenate([-half, half])


def worst_over_bound(
    one: CorrelationMap, rate: float, *, depth: int, starts: Array | None = None, form: str = "potential"
) -> float:
    """The largest ratio of a sequence to its bound over starts and layers, where the bound is above rounding.

    Args:
        form: "potential" for |ρ|/(1 − |ρ|) ≤ α^ℓ|ρ_0|/(1 − |ρ_0|), "value" for |ρ| below the same, "one" for
            1 − ρ ≤ α^ℓ(1 − ρ_0), "algebraic" for (5.9) and "point" for (5.10).
    """
    path = iterate(one, grid() if starts is None else starts, depth)
    origin, layers = path[0], np.arange(depth + 1)[:, None]
    inverse = 1 / (1 - np.abs(origin))
    if form in ("potential", "value"):
        bound = np.abs(origin) * inverse * rate**layers
        actual = np.abs(path) / (1 - np.abs(path)) if form == "potential" else np.abs(path)
    elif form == "point":
        bound = np.abs(origin - one.fixed_point) * inverse * rate**layers
        actual = np.abs(path - one.fixed_point)
    else:
        bound = (1 - origin) * rate**layers if form == "one" else (1 - origin) / (1 + layers * rate * (1 - origin))
        actual = 1 - path
    # without the start, where the ratio is 1
    return float(np.max(np.where(bound > RESOLVED, actual / np.maximum(bound, RESOLVED), 0.0)[1:]))


def walk_pair(
    values: Values, context: Context, activation: Any, *, norm: str, depth: int, offset: int
) -> tuple[Array, Array]:
    """The cosine of two samples over depth in random networks of finite width: mean over runs and its half interval.

    The norm is "pre-rms", "post-rms", "pre-ln" or "post-ln".
    """
    place, _, kind = norm.partition("-")
    start, width, runs = (values[name] for name in ("start", "width", "runs"))
    batch = torch.zeros(2, width, dtype=torch.float64)
    batch[0, 0], batch[1, 0], batch[1, 1] = 1.0, start, np.sqrt(1 - start**2)  # two unit vectors with the wanted cosine
    law: dict[str, Any] = {"norm": {"rms": "rms", "ln": "layer"}[kind], "activation": activation}
    law["placement"] = {"pre": "before", "post": "after"}[place]
    found = simulate(
        **pick(values, "width runs"), **law, batch_size=2, depth=depth, measures=["mean_cosine"], profile=True,
        input=batch * np.sqrt(width), generator=context.generator(offset), dtype="float64",
    )  # fmt: skip
    rows = found.profile.series("mean_cosine")
    return rows.value, student(runs - 1) * np.nan_to_num(rows.stderr)  # NaN where a layer has no spread


SHOWN = 60  # maps in a picture

RATES: dict[str, Callable[[CorrelationMap], float]] = {
    "5.6": lambda one: 1 / (2 - one.slope_zero),
    "5.7": lambda one: 1 / one.slope_one,
    "5.8": lambda one: one.slope_one,
    "5.9": lambda one: 1 - one.zero - one.slope_zero,
    "5.10": lambda one: max(1 - one.zero, one.slope_fixed_point, (1 - one.fixed_point) / (2 - one.slope_fixed_point)),
    "5.10 corrected": lambda one: max(1 - one.zero, 1 / (2 - one.slope_fixed_point)),
}


def measure_contraction(values: Values, context: Context) -> Outcome:
    """Every map's sequence from many starts against the printed and the corrected bound."""
    maps = [map_of(name, norm) for name, norm in values["activations"]]
    for weights in values.get("weights", ()):
        series = np.zeros(max(map(int, weights)) + 1)  # keys of a row's file are strings
        for order, weight in weights.items():
            series[int(order)] = weight
        maps.append(map_of_weights(series, name=" + ".join(f"{w:g}ρ^{k}" for k, w in weights.items())))
    maps += random_maps(values["case"], values["random"], context)
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
    drawn = []
    for version, found in ratios.items():
        shown = np.maximum(np.sort(found)[thin(len(found), SHOWN)], 1e-4)  # a logarithmic axis takes no 0
        drawn.append(Series(f"{version} bound", np.linspace(0, 100, len(shown)), shown))
    drawn.append(level("never above 1", [0, 100], 1.0))
    return present(numbers, path, drawn, named=named)


def over_groups(found: Array, named: int, extreme: Callable[[Array], Any]) -> Number:
    """The extreme of the named activations' maps and an eighth of the random ones."""
    parts = np.array_split(found[named:], GROUPS)  # named maps are not drawn: every group has them all
    return extreme_of([extreme(np.concatenate([found[:named], part])) for part in parts])


def algebraic_exponent(one: CorrelationMap, start: float, *, first: int, last: int) -> Number:
    """The slope of ln(1 − ρ_ℓ) against ln ℓ between two layers."""
    layers = np.unique(np.geomspace(first, last, 12).astype(int))
    return slope_of(np.log(layers), np.log(1 - iterate(one, np.array([start]), last)[layers, 0]))


def draw_path(values: Values, context: Context) -> tuple[Panel, Number]:
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
    panel = Panel(series=series, title=f"{name}, ρ_0 = {start:g}, width {values['width']}")
    return panel, apart_from(exact_path, mean, half, samples=values["runs"])


def measure_attractor(values: Values, context: Context) -> Outcome:
    """How many fixed points attract, where they lie, and that every start of the named activations ends there."""
    activations = [map_of(name) for name in values["activations"]]
    randoms = [one for case in (1, 2, 3, 4) for one in random_maps(case, values["random"], context)]
    counts, places = [], []
    fine = np.linspace(
        -1 + 1e-9, 1 - 1e-9, 4001
    )  # 1 is a fixed point of every map: whether it attracts shows beside it
    for one in activations + randoms:
        rising = one.kappa(fine) - fine > 0
        inside = np.flatnonzero(rising[:-1] & ~rising[1:])  # κ crosses the diagonal from above
        counts.append(len(inside) + int(rising[-1]))
        places += [float(fine[i]) for i in inside] + ([1.0] if rising[-1] else [])
    # from all starts
    ends = [np.abs(iterate(one, grid(), values["depth"])[-1] - one.fixed_point).max() for one in activations]
    numbers = {
        "fewest_attracting": exact(min(counts)),
        "most_attracting": exact(max(counts)),
        "lowest_attracting": exact(min(places), error=float(fine[1] - fine[0])),
        "farthest_end": exact(float(max(ends)), error=1e-9),
    }
    rho = np.linspace(-1, 1, 31)
    series = [Series(f"{one.name} (κ)", rho, one.kappa(rho), role="theory") for one in activations]
    return present(numbers, [*series, Series("ρ", [-1, 1], [-1, 1], role="bound")], cumulative(np.array(places)))


def cumulative(places: Array) -> tuple[Series]:
    """How many of the maps lie below each place, in percent."""
    ordered = np.sort(places)
    kept = thin(len(ordered), SHOWN)
    return (Series("maps", ordered[kept], 100 * (kept + 1) / len(ordered)),)


def measure_normalized(values: Values, context: Context) -> Outcome:
    """Theorem 5.15: each norm's maps against both rates, and networks of finite width against κ."""
    outcome = measure_contraction(values, context)
    deviations = []
    for index, (name, norm) in enumerate(values["walked"]):
        walked = walk_pair(values, context, name, norm=norm, depth=values["layers"], offset=index + 1)
        path = iterate(map_of(name, norm), np.array([values["start"]]), values["layers"])[:, 0]
        deviations.append(apart_from(path, *walked, samples=values["runs"]))
    return replace(outcome, numbers={**outcome.numbers, "chain_deviation": highest(deviations)})


def polynomial_activation(weights: Array) -> Callable[[Any], Any]:
    """x ↦ Σ √p_k h_k(x), h_k the normalized Hermite polynomials: the activation whose κ is Σ p_k ρ^k."""
    scaled = [math.sqrt(weight / math.factorial(order)) for order, weight in enumerate(weights)]  # h_k = He_k/√k!
    plain = [float(c) for c in hermite_e.herme2poly(scaled)]

    def activation(x: Any) -> Any:
        total = 0.0 * x + plain[-1]  # Horner, for arrays and tensors alike
        for coefficient in reversed(plain[:-1]):
            total = total * x + coefficient
        return total

    return activation


def local_rate(one: CorrelationMap, start: float) -> Number:
    """The factor per layer of |ρ_ℓ − ρ*|, where it is between 1e-4 and 1e-7: small, and far above rounding."""
    far = np.abs(iterate(one, np.array([start]), 2000)[:, 0] - one.fixed_point)
    inside = np.flatnonzero((far < 1e-4) & (far > 1e-7))
    first, middle, last = inside[0], inside[len(inside) // 2], inside[-1]
    early, late = ((far[b] / far[a]) ** (1 / (b - a)) for a, b in ((first, middle), (middle, last)))
    # the local factor tends to its limit: the later half is nearer than the two halves are to each other
    return exact(float(late), error=abs(float(late - early)))


def measure_figure(values: Values, context: Context) -> Outcome:
    """Each case's sequence: where it ends from every start, how fast, and whether networks follow."""
    numbers: dict[str, Number] = {}
    panels, curves, deviations = [], [], [exact(0.0)]
    start, depth, rho = values["start"], values["depth"], np.linspace(-1, 1, 31)
    layers = np.arange(depth + 1)
    for index, (label, spec) in enumerate(values["maps"].items()):
        one = map_of(spec) if isinstance(spec, str) else map_of_weights(np.array(spec), name=label)
        activation = spec if isinstance(spec, str) else polynomial_activation(np.array(spec))
        numbers[f"{label}_zero"] = exact(one.zero, error=1e-9)
        numbers[f"{label}_slope_one"] = exact(one.slope_one, error=1e-9)
        end = np.abs(iterate(one, grid(), values["far"])[-1] - one.fixed_point).max()
        numbers[f"{label}_farthest_end"] = exact(float(end), error=1e-9)
        if one.case == 3:
            numbers[f"{label}_exponent"] = algebraic_exponent(one, start, first=1000, last=10000)
        else:
            numbers[f"{label}_rate_over_slope"] = scaled(local_rate(one, start), 1 / one.slope_fixed_point)
        kind = f"case {one.case}" if label.startswith("case") else f"{label}, case {one.case}"
        title = f"{kind}: ρ* = {one.fixed_point:.4g}"
        path = iterate(one, np.array([start]), depth)[:, 0]
        bound = theorem_5_11(
            kappa_zero=one.zero, **fields_of(one, "slope_zero slope_one fixed_point slope_fixed_point"), start=start,
            depth=depth,
        )  # fmt: skip
        limit = bound.curve / (1 + bound.curve) if one.case == 1 else bound.curve  # case 1 bounds |ρ|/(1 − |ρ|)
        far = np.abs(path - one.fixed_point)
        kept = far > 1e-8  # below, rounding
        series = [
            Series("κ", layers[kept], far[kept], role="theory"),
            Series("Theorem 5.11, corrected", layers, limit, role="bound"),
        ]
        if label not in values.get("not_walked", ()):
            mean, half = walk_pair(values, context, activation, norm="pre-rms", depth=depth, offset=index)
            off = np.abs(mean - one.fixed_point)
            seen = (off > 2 * half) & (layers % 3 == 0)
            series.insert(0, Series("networks", layers[seen], off[seen], error=half[seen]))
            deviations.append(apart_from(path, mean, half, samples=values["runs"]))
        panels.append(Panel(series=series, title=title))
        curves.append(Series(f"{label} (κ)", rho, one.kappa(rho), role="theory"))
    numbers["chain_deviation"] = highest(deviations)
    return present(numbers, [*curves, Series("ρ", [-1, 1], [-1, 1], role="bound")], *panels)
