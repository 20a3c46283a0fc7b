"""Theory beside measurement: where it applies it agrees, where it does not it says so."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import networks
import sounding
from sounding.activations import resolve
from sounding.probe.check import check
from sounding.probe.records import Report
from sounding.profile import Profile
from sounding.reader.beside import foresee_shares
from sounding.theory.batchnorm import batchnorm
from sounding.theory.length import product_moment, second_moment, squared_slope
from tolerance import TOLERANCE, assert_within_standard_errors

SEEDS = range(2)


def tanh_gain(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(weight, std=1.3 * weight.shape[1] ** -0.5)


STACKS: dict[str, Callable[[], nn.Module]] = {
    "He ReLU": lambda: networks.mlp(9, 400, initialize=networks.he),
    "default ReLU": lambda: networks.mlp(9, 400),
    "default tanh": lambda: networks.mlp(9, 400, activation=nn.Tanh),
    "chaotic tanh": lambda: networks.mlp(9, 400, activation=nn.Tanh, initialize=tanh_gain),
    "GELU": lambda: networks.mlp(7, 400, activation=nn.GELU, initialize=networks.he),
    "leaky ReLU": lambda: networks.mlp(9, 400, activation=lambda: nn.LeakyReLU(0.3), initialize=networks.he),
    "linear": lambda: networks.mlp(6, 400, activation=nn.Identity, classes=400),
}


def assert_in_band(profile: Profile, measure: str) -> None:
    """Every measured value lies within five standard deviations over seeds of its prediction."""
    measured = {row.layer: row.value for row in profile.select(measure, source="check")}
    rows = profile.select(measure, source="theory").rows
    assert len(rows) >= 6
    for row in rows:
        assert row.stderr is not None
        assert_within_standard_errors(measured[row.layer], row.value, row.stderr)


def reports(build: Callable[[], nn.Module], samples: int = 24) -> list[Report]:
    found = []
    for seed in SEEDS:
        with networks.drawn_from(seed):
            found.append(check(build(), torch.randn(samples, 64)))
    return found


@pytest.mark.parametrize("name", STACKS)
def test_theory_is_the_measurement(name: str) -> None:
    for report in reports(STACKS[name]):
        for measure in ("mean_square", "mean_cosine", "gradient_log_norm"):
            assert_in_band(report.profile, measure)
        theory = report.profile.value("gradient_growth", source="theory")
        measured = report.profile.value("gradient_growth", source="check")
        assert theory.stderr is not None
        assert measured.stderr is not None
        assert_within_standard_errors(measured.value, theory.value, math.hypot(theory.stderr, measured.stderr))


@pytest.mark.parametrize("samples", [8, 32])
def test_batch_norm_settles_at_its_fixed_point(samples: int) -> None:
    """Two routes: the description read off the module, and the fixed point of meanfield2019."""

    def build() -> nn.Module:
        return networks.mlp(24, 200, normalization=nn.BatchNorm1d)

    exact = batchnorm("relu", batch_size=samples, eps=1e-5, weight_std=3**-0.5)
    for report in reports(build, samples)[:2]:
        theory = report.profile.value("gradient_growth", source="theory")
        measured = report.profile.value("gradient_growth", source="check")
        assert theory.stderr is not None
        assert measured.stderr is not None
        # the first batch norm divides by the inputs' own spread: one factor in 22 steps
        assert_within_standard_errors(theory.value, exact.gradient_growth, theory.stderr, allowance=0.05)
        assert_within_standard_errors(measured.value, theory.value, math.hypot(theory.stderr, measured.stderr))
        depth = report.profile.value("trainable_depth", source="theory").value
        assert math.isclose(depth, 16 / abs(math.log(theory.value)), rel_tol=TOLERANCE.exact)
        assert_in_band(report.profile, "mean_cosine")


def test_the_first_layer_of_a_narrow_network_is_no_error() -> None:
    """ReLU, 64 wide, 20 deep: ln measured/theory was −0.056 on average, beyond its scatter, before theory knew."""
    ratios = []
    for report in reports(lambda: networks.mlp(21, 64, normalization=nn.BatchNorm1d), 32):
        values = [report.profile.value("gradient_growth", source=source).value for source in ("check", "theory")]
        ratios.append(math.log(values[0] / values[1]))
    stderr = float(torch.tensor(ratios).std()) / math.sqrt(len(ratios))
    assert_within_standard_errors(sum(ratios) / len(ratios), 0.0, stderr, allowance=2 * TOLERANCE.finite_width)


@pytest.mark.parametrize("module", [nn.Mish, nn.Softsign, nn.PReLU, lambda: nn.Hardtanh(-2.0, 2.0)])
def test_activation_modules_without_a_name_are_taken_as_functions(module: Callable[[], nn.Module]) -> None:
    """Beside the measurement, with dropout that is off in between."""

    def build() -> nn.Module:
        model = networks.mlp(8, 300, activation=module)
        parts = [part for layer in model for part in (layer, nn.Dropout(0.3))]
        return nn.Sequential(*parts[:-1])

    with networks.drawn_from(0):
        report = check(build(), torch.randn(24, 64))
    assert_in_band(report.profile, "mean_square")
    growths = [report.profile.value("gradient_growth", source=source) for source in ("check", "theory")]
    stderr = math.hypot(*(growth.stderr or 0.0 for growth in growths))
    assert_within_standard_errors(growths[0].value, growths[1].value, stderr)


def test_a_critical_network_has_no_trainable_depth() -> None:
    """He ReLU: χ = 1 within its error, so no depth is named."""
    (report, *_) = reports(STACKS["He ReLU"])
    assert "trainable_depth" not in report.profile.measures


def test_the_finding_carries_the_prediction() -> None:
    with networks.drawn_from(0):
        model = networks.mlp(60, 64, normalization=nn.BatchNorm1d)
        (finding, *_) = check(model, torch.randn(32, 64)).verdict.findings
    # 1.52195 but for the first of 58 steps
    assert math.isclose(finding.evidence["growth_predicted"], 1.52195, rel_tol=0.05)


@pytest.mark.parametrize("name", ["relu", "leaky_relu:0.3", "identity"])
@pytest.mark.parametrize("correlation", [-1.0, -0.4, 0.0, 0.7, 1.0])
def test_closed_moments_are_the_quadrature(name: str, correlation: float) -> None:
    """Two routes: the arc-cosine kernels, and the same activation with its homogeneity hidden."""
    from dataclasses import replace

    activation = resolve(name)
    hidden = replace(activation, degree=None, slopes=None)
    closed, numeric = (product_moment(phi, 1.7, correlation).value for phi in (activation, hidden))
    assert closed == pytest.approx(numeric, rel=TOLERANCE.two_routes, abs=TOLERANCE.two_routes)
    for moment in (second_moment, squared_slope):
        closed, numeric = (moment(phi, 1.7).value for phi in (activation, hidden))
        assert closed == pytest.approx(numeric, rel=TOLERANCE.two_routes)


def test_parallel_inputs_do_not_hide_what_layers_lose() -> None:
    """From correlation zero, the closed form of ReLU: 1 − c = 0.682 behind one layer, below 0.1 from layer 14 on."""
    with networks.drawn_from(0):
        blueprint = sounding.read(networks.mlp(51, 64, initialize=networks.he), 1 + 0.01 * torch.randn(8, 64))
    shares = foresee_shares(blueprint)
    # the weights of a layer have a variance of their own, which the correlation of ReLU does not see
    assert shares[:2] == pytest.approx([1.0, 1 - 1 / math.pi], abs=TOLERANCE.float32_forward)
    assert (len(shares), sum(share < 0.1 for share in shares)) == (50, 37)


@pytest.mark.parametrize("kind", ["batch norm", "convolution", "measured again"])
def test_only_plain_networks_are_foreseen(kind: str) -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sort(dim=-1).values

    model: nn.Module = networks.mlp(5, 16, features=16, normalization=nn.BatchNorm1d if kind == "batch norm" else None)
    inputs = torch.randn(8, 16)
    if kind == "convolution":
        model, inputs = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(8, 1, 8, 8)
    if kind == "measured again":
        model = nn.Sequential(nn.Linear(16, 16), Sorted(), nn.Linear(16, 16))
    assert foresee_shares(sounding.read(model, inputs)) == []
