"""Batch normalization with callables: kinks far out and many, waves, steep and narrow functions, numerical slopes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
from bench.callables import OTHERS, WILD, settings, slope_of_broken_line, triangle

from sounding.activations import from_callable
from sounding.activations.custom import widened
from sounding.activations.kinks import find_kinks
from sounding.errors import NumericalError, UsageError
from sounding.theory.batchnorm import batchnorm
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.moments import Expectations, rescaled
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.plane import PAIRS
from sounding.theory.integrals.polynomials import line_sums
from sounding.theory.integrals.sketch import Sketch
from tolerance import TOLERANCE, assert_within_standard_errors

Array = np.ndarray

# what a user may bring, with its slope: waves, many kinks, steep and narrow functions, growing ones
CALLABLES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "cos 10x": (WILD["cos 10x"], lambda x: -10 * np.sin(10 * x)),
    "snake": (WILD["x + sin²5x/5"], lambda x: 1 + np.sin(10 * x)),
    "chirp": (WILD["sin x²"], lambda x: 2 * x * np.cos(x * x)),
    "sin exp": (WILD["sin exp x"], lambda x: np.exp(x) * np.cos(np.exp(x))),
    "rectified wave": (WILD["max(sin 5x, 0)"], lambda x: 5 * np.cos(5 * x) * (np.sin(5 * x) > 0)),
    "folded wave": (WILD["|sin 3x|"], lambda x: 3 * np.cos(3 * x) * np.sign(np.sin(3 * x))),
    "triangle": (WILD["triangle"], lambda x: 4 * np.sign((x + 0.25) % 1.0 - 0.5)),
    "fine triangle": (WILD["fine triangle"], lambda x: 4 / 0.3 * np.sign((x / 0.3 + 0.25) % 1.0 - 0.5)),
    "broken line": (WILD["50 bends"], slope_of_broken_line),
    "hat": (WILD["hat"], lambda x: -np.sign(x) * (np.abs(x) < 1)),
    "steep tanh": (WILD["tanh 50x"], lambda x: 50 / np.cosh(np.minimum(np.abs(50 * x), 300)) ** 2),
    "sharp softplus": (WILD["softplus 100x"], lambda x: 0.5 * (1 + np.tanh(50 * x))),
    "narrow bump": (WILD["exp(−50(x−1)²)"], lambda x: -100 * (x - 1) * np.exp(-50 * (x - 1) ** 2)),
    "polynomial": (WILD["x⁹/1000 − x⁵/10 + x"], lambda x: 9 * x**8 / 1000 - x**4 / 2 + 1),
    "cosh": (WILD["cosh 0.3x"], lambda x: 0.3 * np.sinh(0.3 * x)),
}


def reference(name: str, size: int, scale: float, shift: float, points: int) -> tuple[float, float]:
    """Growth (Theorem 7 of meanfield2019) and μ at eps = 0 from one dense grid of two coordinates of the sphere."""
    f, slope = CALLABLES[name]
    node, weight = np.polynomial.legendre.leggauss(points)
    angle, half = 0.5 * math.pi * node, 0.5 * math.pi * weight
    rho, reach = -1.0 / (size - 1.0), math.sqrt(size - 1.0)
    first = half * np.cos(angle) ** (size - 3)
    second = half * np.cos(angle) ** (size - 4)
    first, second = first / first.sum(), second / second.sum()
    x1 = reach * np.sin(angle)
    own = np.stack([f(scale * x1 + shift), scale * slope(scale * x1 + shift)])
    square, steep = first @ own[0] ** 2, first @ ((size - 1 - x1**2) * own[1] ** 2)
    product = cross = 0.0
    for part in np.array_split(np.arange(points), max(1, points // 100)):
        sine, cosine = np.sin(angle[part])[:, None], np.cos(angle[part])[:, None]
        x2 = reach * (rho * sine + math.sqrt(1 - rho**2) * cosine * np.sin(angle))
        other = np.stack([f(scale * x2 + shift), scale * slope(scale * x2 + shift)])
        product += first[part] @ (own[0, part] * (other[0] @ second))
        cross += first[part] @ (own[1, part] * (((1 + x1[part, None] * x2) * other[1]) @ second))
    mu = square - product
    return float((steep + cross) / (mu * (size - 3))), float(mu)


def test_kinks_of_a_callable_are_found_as_far_out_as_the_batch_reaches():
    """|sin x| at scale 5 has kinks beyond the first search, which ends at 12: against the same with its kinks given."""
    found = batchnorm(from_callable(lambda x: np.abs(np.sin(x)), name="wave"), batch_size=32, scale=5.0)
    given = from_callable(
        lambda x: np.abs(np.sin(x)),
        name="wave",
        kinks=[k * math.pi for k in range(-13, 14)],
        derivative=lambda x: np.cos(x) * np.sign(np.sin(x)),
    )
    expected = batchnorm(given, batch_size=32, scale=5.0)
    assert found.gradient_growth == pytest.approx(expected.gradient_growth, rel=TOLERANCE.two_routes)
    assert max(found.error, expected.error) < TOLERANCE.two_routes


def test_a_numerical_slope_costs_no_digits_of_a_narrow_function():
    """x/(1 + |x|) at scale 20: most of its slopes are small against the largest, for which the error is stated."""
    known = from_callable(
        lambda x: x / (1 + np.abs(x)), name="softsign", derivative=lambda x: 1 / (1 + np.abs(x)) ** 2, kinks=[0.0]
    )
    searched = from_callable(lambda x: x / (1 + np.abs(x)), name="softsign")
    for size in (4, 64):
        a, b = (batchnorm(phi, batch_size=size, eps=0.1, scale=20.0, shift=2.0) for phi in (known, searched))
        assert abs(a.gradient_growth / b.gradient_growth - 1) <= 2 * (a.error + b.error) < TOLERANCE.two_routes


@pytest.mark.parametrize(
    ("name", "size", "scale", "shift", "points"),
    [
        ("cos 10x", 4, 20.0, 0.0, 900),
        ("snake", 5, 3.0, 0.5, 400),
        ("chirp", 8, 3.0, 0.5, 700),
        ("sin exp", 5, 1.0, 0.5, 700),
        ("steep tanh", 4, 0.3, 0.1, 700),
        ("sharp softplus", 5, 0.3, 0.1, 700),
        ("narrow bump", 8, 1.0, 0.5, 500),
        ("polynomial", 4, 3.0, -3.0, 200),
        ("cosh", 5, 20.0, 2.0, 400),
    ],
)
def test_smooth_callables_meet_a_dense_grid(name, size, scale, shift, points):
    """A product rule of a thousand nodes each way resolves these; their slopes are the library's own."""
    found = batchnorm(CALLABLES[name][0], batch_size=size, scale=scale, shift=shift)
    growth, mu = reference(name, size, scale, shift, points)
    assert found.error < 1e-6
    assert abs(found.gradient_growth / growth - 1) <= found.error + TOLERANCE.two_routes
    assert abs(found.fixed_point.mu / mu - 1) <= found.error + TOLERANCE.two_routes


@pytest.mark.parametrize(
    ("name", "size", "scale", "shift"),
    [
        ("rectified wave", 4, 3.0, 0.0),
        ("folded wave", 4, 20.0, 0.0),
        ("triangle", 5, 3.0, 0.5),
        ("fine triangle", 4, 1.0, 0.0),
        ("broken line", 5, 1.0, 0.5),
        ("broken line", 4, 3.0, 0.0),
        ("hat", 8, 3.0, 0.5),
    ],
)
def test_kinked_callables_meet_a_dense_grid_within_its_resolution(name, size, scale, shift):
    """A jump of the slope between two nodes of a fixed grid leaves an error of its spacing, over many jumps less."""
    found = batchnorm(CALLABLES[name][0], batch_size=size, scale=scale, shift=shift)
    growth, mu = reference(name, size, scale, shift, 1500)
    rougher, roughly = reference(name, size, scale, shift, 1100)
    own = abs(growth / rougher - 1) + 1e-4, abs(mu / roughly - 1) + 1e-6
    assert abs(found.gradient_growth / growth - 1) <= found.error / growth + 3 * own[0]
    assert abs(found.fixed_point.mu / mu - 1) <= found.error + 3 * own[1]


@pytest.mark.parametrize(
    ("name", "size", "eps", "scale", "shift"),
    [
        ("cos 10x", 16, 0.1, 3.0, 0.0),
        ("snake", 64, 1e-3, 20.0, 0.5),
        ("triangle", 64, 0.1, 20.0, 2.0),
        ("fine triangle", 16, 0.1, 1.0, 0.0),
        ("rectified wave", 8, 1.0, 3.0, 0.5),
        ("broken line", 8, 0.1, 1.0, 0.0),
        ("steep tanh", 12, 0.1, 3.0, 0.5),
    ],
)
def test_callables_with_eps_meet_the_definition_by_sampling(name, size, eps, scale, shift):
    """E|A|²/(B−1) of A = s⁻¹GD(G − xxᵀ/B), and μ, over batches drawn at the fixed point."""
    f, slope = CALLABLES[name]
    found = batchnorm(f, batch_size=size, eps=eps, scale=scale, shift=shift)
    generator = np.random.default_rng(3)
    u = generator.standard_normal((60_000, size)) * math.sqrt(found.fixed_point.mu)
    u -= u.mean(axis=1, keepdims=True)
    s = np.sqrt((u**2).mean(axis=1) + eps)
    x = u / s[:, None]
    phi, d = f(scale * x + shift), scale * slope(scale * x + shift)
    spread = phi.var(axis=1, ddof=1)
    assert_within_standard_errors(spread.mean(), found.fixed_point.mu, spread.std() / math.sqrt(len(u)), found.error)
    rho = (u**2).mean(axis=1) / s**2
    norm = (d**2).sum(axis=1) * (1 - 1 / size) - (2 - rho) * (d**2 * x**2).sum(axis=1) / size
    norm -= ((d**2).sum(axis=1) - (d.sum(axis=1) ** 2 + (2 - rho) * (d * x).sum(axis=1) ** 2) / size) / size
    values = norm / (s**2 * (size - 1))
    allowance = found.error * max(1.0, found.gradient_growth)
    assert_within_standard_errors(values.mean(), found.gradient_growth, values.std() / math.sqrt(len(u)), allowance)


def _expectations(name: str, size: int, scale: float, shift: float) -> Expectations:
    phi = widened(from_callable(CALLABLES[name][0]), abs(shift) + scale * math.sqrt(size - 1.0))
    return Expectations(Affine(phi, scale, shift), float(size))


@pytest.mark.parametrize(
    ("method", "name", "size", "eps", "scale", "shift"),
    [
        ("cells", "cos 10x", 4, 0.1, 3.0, 0.3),
        ("cells", "hat", 4, 0.1, 1.0, 0.2),
        ("cells", "hat", 5, 0.0, 3.0, 0.5),
        ("cells", "steep tanh", 5, 0.01, 1.0, 0.1),
        ("polynomials", "hat", 24, 0.1, 1.0, 0.2),
        ("polynomials", "snake", 16, 1e-3, 1.0, 0.0),
        ("polynomials", "cosh", 4, 1e-5, 3.0, 0.0),
        ("polynomials", "polynomial", 4, 1.0, 1.0, 0.5),
        ("bounded", "snake", 16, 1e-3, 1.0, 0.0),
        ("bounded", "hat", 10, 0.1, 1.0, 0.2),
        ("bounded", "hat", 8, 0.0, 1.0, 0.2),
    ],
)
def test_every_method_for_two_samples_agrees_with_cells_in_the_plane(method, name, size, eps, scale, shift):
    """Against cells that evaluate the activation itself; what is stated as error covers the difference."""
    expectations, law = _expectations(name, size, scale, shift), NormalizedLaw(float(size), 0.4, eps)
    table = expectations.tables.at(law, degree=0, tolerance=1e-12)
    if method == "cells":
        found = expectations.cells.sums(law, tolerance=1e-11, table=table)
    elif method == "bounded":
        found = expectations.polynomials.bounded(law, PAIRS, tolerance=1e-12)[0]
    else:
        tabled = expectations.polynomials.sums(law, PAIRS, tolerance=1e-12)
        assert tabled is not None
        found = tabled[0]
    planar, errors = (np.array(astuple(record)) for record in Expectations(expectations.affine, size).planar(law))
    line = line_sums(table, law)[0]
    bound = line[[1, 2, 3, 3, 5, 6, 6, 7, 7, 6]]
    off = np.abs(found.values - planar)
    assert method == "bounded" or (off <= TOLERANCE.two_routes * bound).all()
    assert (off <= found.errors + errors + 1e-14 * bound).all()


@pytest.mark.parametrize(
    ("name", "size", "eps", "scale"),
    [
        *(("smooth stairs", size, 0.1, 1.0) for size in (6, 10, 16)),
        ("tanh 50x", 8, 0.1, 1.0),
        ("max(sin 5x, 0)", 10, 0.01, 1.0),
        ("|sin 3x|", 12, 1.0, 1.0),
    ],
)
def test_polynomials_that_have_not_converged_state_an_honest_error(name, size, eps, scale):
    """With eps what is left out meets what is kept; a degree close by may agree by chance, half of it does not."""
    phi = widened(from_callable(WILD[name]), scale * math.sqrt(size - 1.0))
    expectations, law = Expectations(Affine(phi, scale, 0.0), float(size)), NormalizedLaw(float(size), 0.4, eps)
    bounded, table = expectations.polynomials.bounded(law, PAIRS, tolerance=1e-12)
    cells = expectations.cells.sums(law, tolerance=1e-10, table=table)
    assert (np.abs(bounded.values - cells.values) <= bounded.errors + cells.errors).all()


def test_a_prediction_says_how_it_was_computed():
    """Closed forms, then polynomials, then cells, then polynomials with a bound, each with its reason."""
    cases = {
        "closed form": ("relu", 8, 1.0),
        "polynomials": ("tanh", 8, 1.0),
        "cells": ("hardtanh", 8, 1.0),
        "bounded polynomials": (CALLABLES["folded wave"][0], 4, 20.0),
        "one variable": ("gelu", math.inf, 1.0),
    }
    for name, (activation, size, scale) in cases.items():
        method = batchnorm(activation, batch_size=size, scale=scale).method
        assert method.name == name
        assert method.why
        assert str(method) == f"{name}: {method.why}"


def test_kinks_close_together_are_told_apart():
    """On the first grid, of 0.005, a kink hides its neighbours within a few cells."""
    found = [kink.place for kink in find_kinks(lambda x: np.abs(x - 0.3) + np.abs(x - 0.312) + np.abs(x + 1))]
    assert found == pytest.approx([-1.0, 0.3, 0.312], abs=TOLERANCE.two_routes)
    assert len(find_kinks(triangle(0.3))) == 160


def test_a_flat_side_of_a_kink_is_no_infinite_slope():
    """max(sin 5x, 0) is 0 beside its kinks, where only the rounding of their places is left to see."""
    assert batchnorm(CALLABLES["rectified wave"][0], batch_size=8, eps=0.1).error < TOLERANCE.two_routes
    with pytest.raises(UsageError, match="infinite slope"):
        batchnorm(lambda x: np.sign(x) * np.sqrt(np.abs(x)), batch_size=8)


def test_what_no_table_holds_is_an_error():
    """The squared slope of x sin(1/x) has no mean."""

    def wild(x):
        with np.errstate(all="ignore"):
            return np.where(x == 0, 0.0, x * np.sin(1 / x))

    with pytest.raises(NumericalError, match="varies too fast"):
        batchnorm(wild, batch_size=4, eps=0.1, scale=0.3)


def test_a_spike_between_the_nodes_of_a_panel_is_seen():
    """tanh(1000x) at a shift: its slope is 0 at all but a thousandth of the batch."""
    steep = from_callable(lambda x: np.tanh(1000 * x), name="steep")
    found = batchnorm(steep, batch_size=4, shift=0.5)
    # uniform x₁ on [−√3, √3]: E D² = 1000·(4/3)/(2√3), and E D₁² (B−1−x₁²) weighs it at x₁ = −0.5
    leading = (3 - 0.25) * 1000 * (4 / 3) / (2 * math.sqrt(3)) / found.fixed_point.mu
    assert found.gradient_growth == pytest.approx(leading, rel=2 * TOLERANCE.three_digits)


def test_a_large_error_is_printed_with_the_prediction():
    """Sixty-six kinks within reach of a batch of 4 leave an error that a reader must see."""
    wild = batchnorm(CALLABLES["folded wave"][0], batch_size=4, scale=20.0)
    assert wild.error > 1e-4
    assert "off by up to" in str(wild)
    assert "off by" not in str(batchnorm("relu", batch_size=4))


def test_a_second_moment_below_float64_is_said() -> None:
    """μ² would be 0: a narrow bump far from the batch."""
    with pytest.raises(NumericalError, match="too small for float64"):
        batchnorm(lambda x: np.exp(-5000 * (x - 1) ** 2), batch_size=8, scale=0.3, shift=2.0)


@pytest.mark.parametrize(
    ("name", "size", "scale", "shift", "off"),
    [
        ("polynomial", 4, 1.0, 0.5, 1e-12),
        ("cosh", 1024, 3.0, 0.0, 1e-12),
        ("cos 10x", 8, 1.0, 0.3, 1e-6),
        ("hat", 5, 3.0, 0.5, 1e-3),
        ("sharp softplus", 16, 20.0, 2.0, 1e-4),
    ],
)
def test_a_sketch_of_the_map_serves_every_law(name, size, scale, shift, off):
    """One set of circles against F at laws from a nearly collapsed batch to one without eps."""
    expectations = _expectations(name, size, scale, shift)
    sketch = Sketch.of(expectations.affine, float(size))
    for law in (
        *(NormalizedLaw(float(size), ratio, 1.0) for ratio in (1e-4, 0.1, 1e4)),
        NormalizedLaw(float(size), 1.0, 0.0),
    ):
        assert sketch.spread(law) == pytest.approx(expectations.spread(law)[0], rel=off)
    assert sketch.resolved == (off == 1e-12)


def test_the_largest_fixed_point_may_lie_above_the_map_without_eps():
    """A bump off the batch's centre: with eps it varies more than without."""
    found = batchnorm(WILD["bump"], batch_size=16, eps=1.0, scale=20.0, shift=2.0)
    affine = Affine(widened(from_callable(WILD["bump"]), 100.0), 20.0, 2.0)
    expectations = Expectations(affine, 16.0)
    image = expectations.spread(NormalizedLaw(16.0, found.fixed_point.mu, 1.0))[0]
    assert image == pytest.approx(found.fixed_point.mu, rel=TOLERANCE.two_routes)
    assert image > 4 * expectations.spread(NormalizedLaw(16.0, 1.0, 0.0))[0]


@pytest.mark.parametrize("size", [5, 6, 8])
@pytest.mark.parametrize("places", [(0.0,), (0.9,), (-0.45, 0.7)])
def test_two_steep_places_meet_in_a_peak(size, places):
    """D(x₁)D(x₂) of Σ tanh λ(x − c) becomes 4 Σ δ(x₁ − c)δ(x₂ − c′): the density of two samples there, to 1/λ²."""
    steepness, rho = 3000.0, -1.0 / (size - 1.0)
    phi = from_callable(lambda x: sum(np.tanh(steepness * (x - place)) for place in places), name="steps")
    affine = Affine(widened(phi, math.sqrt(size - 1.0)), 1.0, 0.0)
    (_, pair), (_, error) = Expectations(affine, float(size)).at(NormalizedLaw(float(size), 1.0, 0.0))
    front = (size - 3.0) / (2 * math.pi * (size - 1.0) * math.sqrt(1 - rho**2))
    expected = 0.0
    for x in places:
        for y in places:
            square = (x * x - 2 * rho * x * y + y * y) / ((1 - rho**2) * (size - 1.0))
            expected += 4 * front * (1 - square) ** (0.5 * (size - 5.0)) * size / (size - 3.0)
    assert abs(pair.r2_slopes - expected) <= error.r2_slopes + 30 / steepness**2 * expected


def test_moments_without_eps_follow_from_those_at_another_variance():
    expectations = _expectations("hat", 8, 1.0, 0.2)
    one, other = (expectations.at(NormalizedLaw(8.0, mu, 0.0))[0] for mu in (1.0, 0.3))
    for mine, theirs in zip(rescaled(one, 0.3), other, strict=True):
        assert astuple(mine) == pytest.approx(astuple(theirs), rel=TOLERANCE.exact, abs=TOLERANCE.rounding)


def test_a_wave_has_no_kinks_and_a_smooth_step_no_infinite_slope():
    """Twelve waves of frequency up to 50 bend much within a cell of the search; smoothstep is flat beside its kinks."""
    assert find_kinks(OTHERS["twelve waves 0"], reach=60.0) == ()
    assert batchnorm(OTHERS["smoothstep"], batch_size=8, eps=0.01).error < TOLERANCE.two_routes


def test_kinks_are_found_beyond_those_known():
    everywhere = find_kinks(WILD["fine triangle"], reach=40.0)
    further = find_kinks(WILD["fine triangle"], reach=40.0, beyond=12.0)
    assert [kink.place for kink in further] == [kink.place for kink in everywhere if abs(kink.place) >= 12.0]
    assert next(kink for kink in further if kink.place > 0).place == pytest.approx(12.075, abs=TOLERANCE.two_routes)


def test_a_difference_stays_between_two_kinks_far_out():
    """At 160 a step grows with x beyond half of the 0.15 between the kinks of a fine triangle."""
    phi = widened(from_callable(WILD["fine triangle"]), 165.0)
    x = 160.0 + 0.15 * np.arange(8) + 0.02
    assert np.abs(phi.derivative(x)) == pytest.approx(4 / 0.3, rel=TOLERANCE.float32)


def test_no_rates_where_a_collapsed_batch_finds_no_slope():
    """x sin(1/x) at 0: by symmetry its differences there are 0."""
    with pytest.raises(NumericalError, match="no slope there"):
        batchnorm(WILD["x sin(1/x)"], batch_size=4, eps=0.1, scale=0.01)


def test_every_callable_is_answered_or_refused():
    """One random setting of each function of the bench: a prediction with an error, or why there is none."""
    generator = np.random.default_rng(5)
    for name, function in {**WILD, **OTHERS}.items():
        [(size, eps, scale, shift)] = settings(1, generator)
        try:
            found = batchnorm(function, batch_size=size, eps=eps, scale=scale, shift=shift)
        except (NumericalError, UsageError):
            assert name in {"sawtooth", "floor", "round(4x)/4", "sign", "x sin(1/x)", "round(8x)/8", "x > 0", "exp"}, (
                name
            )
        else:
            assert math.isfinite(found.error), name
