"""Chapter 5: where the correlation of two samples goes under a kernel map, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Setting
from sounding.claims.number import GROUPS, Number, exact, extreme_of, slope_of
from sounding.claims.picture import Panel, Picture, Series
from sounding.claims.thesis2024.correlation_maps import (
    Array,
    CorrelationMap,
    grid,
    iterate,
    map_of,
    map_of_weights,
    random_maps,
    walk_pair,
    worst_over_bound,
)

ROUNDING = 1e-6
SHOWN = 60

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
        series = np.zeros(max(weights) + 1)
        for order, weight in weights.items():
            series[order] = weight
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
        numbers["relu_exponent"] = _algebraic_exponent(map_of("relu"))
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
    kept = np.sort(ratios)[np.unique(np.linspace(0, len(ratios) - 1, SHOWN).astype(int))]
    return np.asarray(np.maximum(kept, 1e-4))


def _algebraic_exponent(one: CorrelationMap) -> Number:
    layers = np.unique(np.geomspace(200, 2000, 12).astype(int))
    return slope_of(np.log(layers), np.log(1 - iterate(one, np.array([0.0]), 2000)[layers, 0]))


def draw_path(values: Mapping[str, Any], context: Context) -> tuple[Panel, Number]:
    """The first activation's distance to ρ* over depth: networks, κ, and both bounds; and the networks' deviation."""
    from sounding.theory.kernel import kernel
    from sounding.theory.kernel_path import bound, sequence

    (name, norm), start, depth = values["activations"][0], values["start"], values["layers"]
    known = kernel(name, norm)
    layers = np.arange(depth + 1)
    exact_path = np.array([row.value for row in sequence(name, start, depth=depth, norm=norm)])
    placed = "pre-rms" if norm == "none" else norm
    mean, half = walk_pair(
        name, start, norm=placed, width=values["width"], depth=depth, runs=values["runs"], context=context, offset=0
    )
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
    far = int(np.argmax(np.abs(mean - exact_path)))
    off = abs(float(mean[far] - exact_path[far]))
    title = f"{name}, ρ_0 = {start:g}, width {values['width']}"
    panel = Panel("layer ℓ", "|ρ_ℓ − ρ*|", series, y_scale="log", title=title)
    return panel, Number(off, max(off - half[far], 0.0), off + float(half[far]), values["runs"])


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
    kept = np.unique(np.linspace(0, len(ordered) - 1, SHOWN).astype(int))
    return (Series("maps", ordered[kept], 100 * (kept + 1) / len(ordered)),)


def measure_normalized(values: Mapping[str, Any], context: Context) -> Outcome:
    """Theorem 5.15: each norm's maps against both rates, and networks of finite width against κ."""
    numbers: dict[str, Number] = {}
    outcome = measure_contraction(values, context)
    numbers.update(outcome.numbers)
    deviations = []
    for index, (name, norm) in enumerate(values["walked"]):
        one = map_of(name, norm)
        mean, half = walk_pair(
            name,
            values["start"],
            norm=norm,
            width=values["width"],
            depth=values["layers"],
            runs=values["runs"],
            context=context,
            offset=index + 1,
        )
        path = iterate(one, np.array([values["start"]]), values["layers"])[:, 0]
        far = int(np.argmax(np.abs(mean - path)))
        off = abs(float(mean[far] - path[far]))
        deviations.append(Number(off, max(off - half[far], 0.0), off + float(half[far]), values["runs"]))
    numbers["chain_deviation"] = max(deviations, key=lambda number: number.high)
    return Outcome(numbers, outcome.picture)


def scales(**values: Any) -> dict[Any, Setting]:
    shared = {"depth": 40, "layers": 20, "start": 0.6, "width": 1000, "runs": 200, **values}
    return {"quick": Setting({**shared, "random": 120}), "standard": Setting({**shared, "random": 2000, "runs": 1000})}


def plain(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "none") for name in names)


def within(version: str, why: str) -> Expectation:
    return Expectation(f"largest_over_{version}", why, high=1 + ROUNDING)


CENTRED = plain("tanh", "sin", "selu", "erf", "hermite:3")
THEOREM = "a theorem; figures 5.1 and 5.2 illustrate it"
WIDE = Expectation("chain_deviation", "networks of width 1000 follow κ", high=0.05)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="thesis2024-thm5.11",
        seed="thesis2024",
        place="theorem 5.11",
        kind="theorem",
        statement="For every non-linear activation with E φ² = 1 exactly one fixed point of κ attracts; it lies in "
        "[0, 1], and every ρ_0 in (−1, 1) goes there.",
        expectations=(
            Expectation("fewest_attracting", "at least one", low=1),
            Expectation("most_attracting", "at most one", high=1),
            Expectation("lowest_attracting", "none is negative", low=-0.002),
            Expectation("farthest_end", "all starts end there", high=0.01),
        ),
        settings={
            "quick": Setting({"activations": ("tanh", "sigmoid", "relu", "gelu"), "random": 150, "depth": 3000}),
            "standard": Setting({"activations": ("tanh", "sigmoid", "relu", "gelu"), "random": 2000, "depth": 3000}),
        },
        measure=measure_attractor,
        paper=THEOREM,
    ),
    Claim(
        id="thesis2024-thm5.11-case1",
        seed="thesis2024",
        place="theorem 5.11, case 1, eq. (5.7)",
        kind="theorem",
        statement="If κ(0) = 0, |ρ|/(1 − |ρ|) shrinks at least by 1/κ′(1) per layer.",
        expectations=(within("printed", "no sequence of any map exceeds (5.7)"),),
        correction=Correction(
            "The rate is that of Theorem 5.8, 1/(2 − κ′(0)); tanh, SELU and sin violate 1/κ′(1).",
            (within("corrected", "no sequence of any map exceeds (5.6)"),),
        ),
        settings=scales(
            activations=CENTRED,
            case=1,
            versions={"printed": ("5.7", "potential"), "corrected": ("5.6", "potential")},
            caption="Left: tanh networks lie above the printed bound (dashed) and below the corrected one (dotted). "
            "Right: (5.7) fails for a quarter of the maps, (5.6) for none.",
        ),
        measure=measure_contraction,
        paper=THEOREM,
    ),
    Claim(
        id="thesis2024-thm5.11-case2",
        seed="thesis2024",
        place="theorem 5.11, case 2, eq. (5.8)",
        kind="theorem",
        statement="If κ(0) > 0 and κ′(1) < 1, 1 − ρ shrinks at least by κ′(1) per layer.",
        expectations=(within("printed", "no sequence of any map exceeds (5.8)"), WIDE),
        settings=scales(
            activations=plain("softplus", "sigmoid"),
            case=2,
            start=-0.6,
            versions={"printed": ("5.8", "one")},
            caption="Left: softplus networks and (5.8). Right: no map exceeds it.",
        ),
        measure=measure_contraction,
        paper=THEOREM,
    ),
    Claim(
        id="thesis2024-thm5.11-case3",
        seed="thesis2024",
        place="theorem 5.11, case 3, eq. (5.9)",
        kind="theorem",
        statement="If κ(0) > 0 and κ′(1) = 1, 1 − ρ_ℓ ≤ x/(1 + αℓx) with x = 1 − ρ_0 and α = 1 − κ(0) − κ′(0).",
        expectations=(within("printed", "no sequence of any map exceeds (5.9)"), WIDE),
        settings=scales(
            activations=plain("relu", "leaky_relu:0.1", "exp"),
            case=3,
            start=-0.6,
            versions={"printed": ("5.9", "algebraic")},
            caption="Left: ReLU networks fall faster than (5.9): like 1/ℓ², not 1/ℓ. Right: no map exceeds it.",
        ),
        measure=measure_contraction,
        paper=THEOREM,
        note="For ReLU the bound is loose: 1 − ρ_ℓ falls like 1/ℓ² (relu_exponent), since κ has an infinite second "
        "derivative at 1. For exp, as for every map with κ″(1) finite, 1/ℓ is the true speed.",
    ),
    Claim(
        id="thesis2024-thm5.11-case4",
        seed="thesis2024",
        place="theorem 5.11, case 4, eq. (5.10)",
        kind="theorem",
        statement="If κ(0) > 0 and κ′(1) > 1, |ρ_ℓ − ρ*| ≤ α^ℓ|ρ_0 − ρ*|/(1 − |ρ_0|) with "
        "α = max{1 − κ(0), κ′(ρ*), (1 − ρ*)/(2 − κ′(ρ*))}.",
        expectations=(within("printed", "no sequence of any map exceeds (5.10)"),),
        correction=Correction(
            "α = max{1 − κ(0), 1/(2 − κ′(ρ*))}: the last numerator is 1. κ(ρ) = 0.9 + 0.1ρ³⁰ violates the printed one; "
            "GELU, SiLU and ELU satisfy both.",
            (within("corrected", "no sequence of any map exceeds the corrected bound"), WIDE),
        ),
        settings=scales(
            activations=plain("gelu", "silu", "elu"),
            case=4,
            start=-0.6,
            weights=({0: 0.9, 30: 0.1},),
            versions={"printed": ("5.10", "point"), "corrected": ("5.10 corrected", "point")},
            caption="Left: GELU networks, below both bounds. Right: some maps exceed the printed bound, none the "
            "corrected one.",
        ),
        measure=measure_contraction,
        paper=THEOREM,
    ),
    Claim(
        id="thesis2024-thm5.15",
        seed="thesis2024",
        place="theorem 5.15, eq. (5.14)",
        kind="theorem",
        statement="With RMS or layer norm before or after a centred activation, or layer norm after any, |ρ|/(1 − |ρ|) "
        "shrinks at least by (κ(1) − κ(0))/κ′(1) per layer.",
        expectations=(within("printed", "no sequence of any activation and norm exceeds (5.14)"),),
        correction=Correction(
            "With K = κ(1) − κ(0) the rate is K/(2K − κ′(0)). The printed one fails for tanh, SELU and sin, and after "
            "layer norm for ReLU, leaky ReLU, sigmoid and ELU.",
            (within("corrected", "no sequence exceeds the corrected bound"), WIDE),
        ),
        settings=scales(
            activations=(
                *((name, "post-ln") for name in ("relu", "leaky_relu:0.1", "sigmoid", "elu")),
                *((name, norm) for name in ("tanh", "selu", "sin") for norm in ("pre-rms", "post-rms", "pre-ln")),
            ),
            walked=(
                ("relu", "post-ln"),
                ("sigmoid", "post-ln"),
                ("tanh", "pre-rms"),
                ("tanh", "post-rms"),
                ("sin", "pre-ln"),
            ),
            case=1,
            versions={"printed": ("5.7", "potential"), "corrected": ("5.6", "potential")},
            caption="Left: ReLU networks with layer norm after the activation decorrelate, above the printed bound "
            "(dashed) and below the corrected one (dotted). Right: every activation and norm, and random maps.",
        ),
        measure=measure_normalized,
        paper=THEOREM,
        note="In terms of the normalized activation, whose κ(1) is 1 and κ(0) is 0, (5.14) is (5.7).",
    ),
)
