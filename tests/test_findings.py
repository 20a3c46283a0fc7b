"""The findings on profiles made by hand: where the lines are, what noise does to them, and that nothing breaks them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from importlib import resources
from typing import get_args

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sounding.activations import resolve
from sounding.probe.findings.collapse import share_outside
from sounding.probe.records import FindingKind
from sounding.probe.thresholds import THRESHOLDS, Thresholds
from sounding.probe.verdict import judge
from sounding.profile import Profile, Row
from sounding.theory.length import product_moment, second_moment


def severities(profile: Profile) -> dict[str, str]:
    return {finding.kind: finding.severity for finding in judge(profile).findings}


def plain_profile(shares: list[float], *, at_input: float = 0.9, shortest: int | None = None) -> Profile:
    """A stack of linear layers with the given shares outside one direction."""
    ratios = [(1 - share) ** -2 for share in (at_input, *shares)]
    rows = [Row(0, "input", "participation_ratio", ratios[0], None, "check")]
    rows += [Row(i, f"layer{i}", "participation_ratio", ratio, None, "check") for i, ratio in enumerate(ratios[1:], 1)]
    kinds = {str(i): "Linear" for i in range(1, len(ratios))}
    return Profile(rows, {"samples": 32, "kinds": kinds, "shortest_depth": shortest})


@given(
    st.lists(st.floats(0.12, 0.8), min_size=1, max_size=10),
    st.integers(0, 40),
    st.floats(1e-9, 0.09),
)
@settings(max_examples=60, deadline=None)
def test_the_collapse_is_dated_and_graded_by_the_layers_behind_it(above: list[float], below: int, share: float) -> None:
    findings = judge(plain_profile([*above, *[share] * below])).findings
    if below >= 30:
        assert (findings[0].severity, findings[0].depth) == ("high", len(above) + 1)
        assert findings[0].evidence["collapsed_layers"] == below
    else:
        assert all(finding.severity != "high" for finding in findings)
        lost = below * min(math.log(0.1 / share), 8 + 1e-9)  # three layers at least
        assume(math.log(0.1 / share) > 8 or abs(lost - 24) > 1e-3)  # a ratio near one keeps 1e-9 to seven digits
        assert bool(findings) == (lost >= 24)


def test_a_way_around_the_collapsed_layers_takes_more_to_be_fatal() -> None:
    """There what differs is learned 1/share times more slowly: 0.1% trains, 0.01% does not."""
    assert severities(plain_profile([0.05] * 40)) == {"rank_collapse": "high"}
    assert severities(plain_profile([0.05] * 40, shortest=3)) == {}
    assert severities(plain_profile([0.001] * 40, shortest=3)) == {}
    assert severities(plain_profile([1e-5] * 20, shortest=3)) == {"rank_collapse": "medium"}
    assert severities(plain_profile([5e-5] * 40, shortest=3)) == {"rank_collapse": "high"}


def test_samples_that_are_the_same_up_to_rounding_are_fatal_at_any_depth() -> None:
    assert severities(plain_profile([0.6, 1e-14, 1e-15])) == {"rank_collapse": "high"}
    assert severities(plain_profile([0.6, 0.5, 1e-15])) == {}  # a head of zeros with a bias
    assert "rank_collapse" not in severities(plain_profile([1e-14] * 3, at_input=1e-14))


def test_inputs_that_are_alike_already_do_not_accuse_the_network() -> None:
    """The layers keep what the input has."""
    assert judge(plain_profile([0.04] * 40, at_input=0.05)).findings == ()


def growth_profile(rate: float, stderr: float, *, layers: int = 40) -> Profile:
    """Gradients with a log rate of the squared norm per layer towards the input."""
    rows = [
        Row(i, f"layer{i}", "gradient_log_norm", 0.5 * rate * (layers - i), None, "check") for i in range(1, layers + 1)
    ]
    rows.append(Row(layers, "network", "gradient_growth", math.exp(rate), math.exp(rate) * stderr, "check"))
    return Profile(rows, {"samples": 32, "kinds": {str(i): "Linear" for i in range(1, layers + 1)}})


@given(st.floats(0.42, 3.0), st.sampled_from([-1.0, 1.0]))
@settings(max_examples=30, deadline=None)
def test_a_rate_is_fatal_from_sixteen_depth_scales_on(rate: float, sign: float) -> None:
    """16 depth scales are 16/rate layers; 40 layers have 39 steps."""
    (finding,) = judge(growth_profile(sign * rate, 1e-6)).findings
    assert finding.kind == ("gradient_explosion" if sign > 0 else "gradient_vanishing")
    assert finding.severity == "high"
    assert math.isclose(finding.evidence["fatal_depth"], 16 / rate)
    assert finding.evidence["growth_low"] <= finding.evidence["growth"] <= finding.evidence["growth_high"]


def test_noise_softens_a_rate_near_the_line() -> None:
    """17 depth scales are fatal when the rate is known to 10%, a warning at 20%, and nothing at 100%."""
    rate = 17 / 39
    assert severities(growth_profile(-rate, 0.1 * rate)) == {"gradient_vanishing": "high"}
    assert severities(growth_profile(-rate, 0.2 * rate)) == {"gradient_vanishing": "medium"}
    assert severities(growth_profile(rate, 0.1 * rate)) == {"gradient_explosion": "high"}
    assert severities(growth_profile(rate, 0.2 * rate)) == {"gradient_explosion": "medium"}
    assert severities(growth_profile(rate, rate)) == {}
    assert severities(growth_profile(11 / 39, 1e-6)) == {}


@given(st.floats(1.0, 1e6))
def test_the_share_outside_brackets_the_dominant_direction(ratio: float) -> None:
    """For the spectrum (p, 1 − p) with this participation ratio: 1 − r^(−1/2) ≤ 1 − p ≤ 1 − 1/r, for r up to 2."""
    share = share_outside(ratio)
    assert 0 <= share <= 1 - 1 / ratio + 1e-15
    if ratio <= 2:
        dominant = (1 + math.sqrt(2 / ratio - 1)) / 2
        assert share <= 1 - dominant + 1e-9


def test_the_line_lies_where_theory_puts_fourteen_relu_layers() -> None:
    """The ReLU correlation map from uncorrelated inputs: 1 − c stays above 0.1 up to layer 13 and falls as 1/ℓ²."""
    relu, correlation, shares = resolve("relu"), 0.0, []
    for _ in range(50):
        correlation = product_moment(relu, 1.0, correlation).value / second_moment(relu, 1.0).value
        shares.append(1 - correlation)
    below = next(layer for layer, share in enumerate(shares, 1) if share < 0.1)
    assert below in (13, 14, 15)
    assert 0.8 < shares[-1] * (50 + 6.66) ** 2 / (2 / 0.3001) ** 2 < 1.2


MEASURES = (
    "participation_ratio gradient_log_norm dead_fraction saturated_fraction non_finite_fraction distinct_share "
    "mean_square numerical_rank repeated_fraction gradient_growth gradient_alignment weight_gradient_log_norm"
)
rows = st.builds(
    Row,
    st.integers(0, 6),
    st.sampled_from(["input", "a", "network"]),
    st.sampled_from(MEASURES.split()),
    st.floats(),
    st.none() | st.floats(min_value=0),
    st.sampled_from(["check", "theory"]),
)
kinds = st.dictionaries(st.integers(0, 6).map(str), st.sampled_from(["Linear", "BatchNorm1d", "ReLU", "Odd"]))


@given(st.lists(rows, max_size=30), kinds, st.none() | st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_any_profile_gets_a_verdict(found: list[Row], kinds: dict[str, str], samples: int | None) -> None:
    """NaN, infinities, missing layers and contradictions included; what comes out is JSON."""
    verdict = judge(Profile(found, {"kinds": kinds, "samples": samples}))
    json.dumps(verdict.to_dict(), allow_nan=False)
    assert (verdict.status == "unhealthy") == any(finding.severity == "high" for finding in verdict.findings)


def test_the_table_of_rules_has_a_row_for_every_line_and_only_kinds_that_exist() -> None:
    rows = resources.files("sounding.probe").joinpath("rules.md").read_text("utf-8").splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    lines = {one.name: getattr(THRESHOLDS, one.name) for one in fields(Thresholds) if one.name != "deviations"}
    assert {name: float(number) for name, number, *_ in cells} == lines
    known = {f"`{kind}`" for kind in get_args(FindingKind)}
    for _, _, kinds, severity, when, origin in cells:
        assert set(kinds.split(", ")) <= known
        assert severity in {"–", "low", "medium", "high", "low or medium", "the collapse's"}
        assert re.search(r"\bx\b", when)
        assert origin


def test_branches_that_start_small_are_no_growth_of_the_stream():
    """Gradients of e⁻¹² in branches between layers of the stream: a fit over both has a rate, the stream has none."""

    def kinds(slope: float) -> set[str]:
        norms = [(-1.0 if place % 5 == 0 else -12.0) - slope * place for place in range(29)]
        rows = [Row(at, f"layer{at}", "gradient_log_norm", norm, None, "check") for at, norm in enumerate(norms, 1)]
        rows.append(Row(29, "network", "gradient_growth", 40.0, 1.0, "check"))
        settings = {"weight_layers": list(range(1, 30)), "growth_interval": [1.3, 1600.0], "shortest_depth": 4}
        return {finding.kind for finding in judge(Profile(tuple(rows), settings)).findings}

    assert "gradient_explosion" not in kinds(0.0)
    assert "gradient_explosion" in kinds(1.0)
