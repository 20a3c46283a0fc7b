"""Theory beside measurement: where it applies it agrees, where it does not it says so."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import networks
from sounding.activations import resolve
from sounding.probe.attach import attach
from sounding.probe.check import check as check_all
from sounding.probe.records import Report
from sounding.profile import Profile
from sounding.theory.batchnorm import BatchNormPrediction, batchnorm
from sounding.theory.length import product_moment, second_moment, slope_kurtosis, squared_slope
from tolerance import TOLERANCE, assert_within_standard_errors

SEEDS = range(6)

# the stack of theory alone, without the description that is read off the module
check = functools.partial(check_all, theory=False)


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


def pairs(profile: Profile, measure: str) -> list[tuple[float, float]]:
    """(theory, measured) at every call that has both."""
    measured = {row.layer: row.value for row in profile.select(measure, source="check")}
    return [(row.value, measured[row.layer]) for row in profile.select(measure, source="theory")]


def reports(build: Callable[[], nn.Module], samples: int = 24) -> list[Report]:
    found = []
    for seed in SEEDS:
        with networks.seeded(seed):
            found.append(check(build(), torch.randn(samples, 64)))
    return found


@pytest.mark.parametrize("name", STACKS)
def test_length_and_cosine_maps_follow_the_measurement(name: str) -> None:
    """At every layer, over seeds, within 5 standard errors plus the allowance for width 400 that theory leaves out."""
    profiles = [report.profile for report in reports(STACKS[name])]
    for measure in ("mean_square", "mean_cosine"):
        columns = list(zip(*(pairs(profile, measure) for profile in profiles), strict=True))
        assert len(columns) >= 6
        for column in columns:
            scale = max(theory for theory, _ in column) if measure == "mean_square" else 1.0
            excess = torch.tensor([(measured - theory) / scale for theory, measured in column], dtype=torch.float64)
            stderr = float(excess.std()) / math.sqrt(len(excess))
            assert_within_standard_errors(float(excess.mean()), 0.0, stderr, allowance=2 * TOLERANCE.finite_width)


@pytest.mark.parametrize("name", STACKS)
def test_the_predicted_growth_is_the_measured_one(name: str) -> None:
    for report in reports(STACKS[name]):
        theory = report.profile.value("gradient_growth", source="theory")
        measured = report.profile.value("gradient_growth", source="check")
        assert theory.stderr is not None
        assert measured.stderr is not None
        assert_within_standard_errors(measured.value, theory.value, math.hypot(theory.stderr, measured.stderr))


@pytest.mark.parametrize("samples", [8, 32])
def test_batch_norm_is_laid_beside_its_fixed_point(samples: int) -> None:
    def build() -> nn.Module:
        return networks.mlp(24, 200, normalization=nn.BatchNorm1d)

    exact = batchnorm("relu", batch_size=samples, eps=1e-5, weight_std=3**-0.5)
    for report in reports(build, samples)[:3]:
        theory = report.profile.value("gradient_growth", source="theory")
        measured = report.profile.value("gradient_growth", source="check")
        expected = exact.gradient_growth * first_factor(report, exact)
        assert math.isclose(theory.value, expected, rel_tol=TOLERANCE.finite_width)
        assert theory.stderr is not None
        assert measured.stderr is not None
        assert_within_standard_errors(measured.value, theory.value, math.hypot(theory.stderr, measured.stderr))
        deep = report.profile.value("trainable_depth", source="theory").value
        assert math.isclose(deep, exact.trainable_depth, rel_tol=TOLERANCE.float32_forward)
        cosines = pairs(report.profile, "mean_cosine")[5:]
        gaps = torch.tensor([measured - predicted for predicted, measured in cosines], dtype=torch.float64)
        stderr = float(gaps.std()) / math.sqrt(len(gaps))
        assert_within_standard_errors(float(gaps.mean()), 0.0, stderr, allowance=4 * TOLERANCE.finite_width)


def test_eps_and_shift_take_the_quadrature_route() -> None:
    with networks.seeded(0):
        model = networks.mlp(12, 200, normalization=lambda width: nn.BatchNorm1d(width, eps=0.5))
        for module in model:
            if isinstance(module, nn.BatchNorm1d):
                nn.init.constant_(module.bias, 2.0)
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        report = check(model, torch.randn(32, 64))
    weights = [module for module in model if isinstance(module, nn.Linear)][:-1]
    spread = math.sqrt(sum(float(w.weight.detach().double().square().mean()) * w.in_features for w in weights) / 11)
    exact = batchnorm("relu", batch_size=32, eps=0.5, shift=2.0, weight_std=spread)
    expected = exact.gradient_growth * first_factor(report, exact)
    found = report.profile.value("gradient_growth", source="theory").value
    assert math.isclose(found, expected, rel_tol=TOLERANCE.float32_forward)


def first_factor(report: Report, theory: BatchNormPrediction) -> float:
    """What a first batch norm that divides by the inputs' spread adds to the growth of each of the steps."""
    (square,) = [row.value for row in report.profile.select("mean_square", source="check") if row.layer == 1]
    (share,) = [row.value for row in report.profile.select("distinct_share", source="check") if row.layer == 1]
    layers = report.profile.settings["theory"]["layers"]
    settled = theory.weight_std**2 * theory.fixed_point.mu * (1 - 1 / theory.batch_size)
    return ((settled + theory.eps) / (square * share + theory.eps)) ** (1 / (layers - 1))


def test_the_first_layer_of_a_narrow_network_is_no_error() -> None:
    """ReLU, 64 wide, 20 deep: ln measured/theory was −0.056 on average, beyond its scatter, before theory knew."""
    ratios = []
    for report in reports(lambda: networks.mlp(21, 64, normalization=nn.BatchNorm1d), 32):
        values = [report.profile.value("gradient_growth", source=source).value for source in ("check", "theory")]
        ratios.append(math.log(values[0] / values[1]))
    stderr = float(torch.tensor(ratios).std()) / math.sqrt(len(ratios))
    assert_within_standard_errors(sum(ratios) / len(ratios), 0.0, stderr, allowance=2 * TOLERANCE.finite_width)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Mish, "Mish"),
        (nn.Hardswish, "Hardswish"),
        (nn.ReLU6, "ReLU6"),
        (nn.Softsign, "Softsign"),
        (nn.PReLU, "leaky_relu:0.25"),
        (lambda: nn.Hardtanh(-2.0, 2.0), "Hardtanh(min_val=-2.0, max_val=2.0)"),
    ],
)
def test_activation_modules_without_a_name_are_taken_as_functions(module: Callable[[], nn.Module], name: str) -> None:
    """Beside the measurement, with dropout that is off in between."""

    def build() -> nn.Module:
        model = networks.mlp(8, 300, activation=module)
        parts = [part for layer in model for part in (layer, nn.Dropout(0.3))]
        return nn.Sequential(*parts[:-1])

    with networks.seeded(0):
        report = check(build(), torch.randn(24, 64))
    settings = report.profile.settings["theory"]
    assert settings["applied"], settings["note"]
    assert settings["activation"] == name
    for predicted, measured in pairs(report.profile, "mean_square"):
        assert measured == pytest.approx(predicted, rel=0.25)
    growths = [report.profile.value("gradient_growth", source=source) for source in ("check", "theory")]
    stderr = math.hypot(*(growth.stderr or 0.0 for growth in growths))
    assert_within_standard_errors(growths[0].value, growths[1].value, stderr)


def test_dropout_that_is_on_is_an_obstacle_with_a_name() -> None:
    with networks.seeded(0):
        model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Dropout(0.3), nn.ReLU())))
        note = check(model, torch.randn(16, 64), dropout=True).profile.settings["theory"]["note"]
    assert "Dropout '1' is none of these" in note


def test_the_note_names_what_ended_the_longest_stack() -> None:
    """Not the first module that theory does not know, but the one without which the stack would be longer."""
    with networks.seeded(0):
        parts: list[nn.Module] = [nn.LayerNorm(64)]
        for activation in (nn.ReLU, nn.ReLU, nn.Tanh, nn.Tanh):
            parts += [nn.Linear(64, 64), activation()]
        note = check(nn.Sequential(*parts, nn.Softmax(-1)), torch.randn(16, 64)).profile.settings["theory"]["note"]
    assert "the activation changes from relu to tanh at '5'" in note


def test_a_critical_network_has_no_trainable_depth() -> None:
    """He ReLU: χ = 1 within its error, so no depth is named."""
    (report, *_) = reports(STACKS["He ReLU"])
    assert "trainable_depth" not in report.profile.measures


def test_the_finding_carries_the_prediction() -> None:
    with networks.seeded(0):
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
    assert slope_kurtosis(activation, 1.7) == pytest.approx(slope_kurtosis(hidden, 1.7), rel=TOLERANCE.two_routes)


class Functional(nn.Module):
    """Activations as functions, which hooks cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Shared(nn.Module):
    """One layer, called six times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(64, 64), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = self.act(self.layer(x))
        return x


def uneven() -> nn.Module:
    model = networks.mlp(6, 64, normalization=nn.BatchNorm1d)
    nn.init.uniform_(model[1].weight, 0.5, 1.5)  # type: ignore[arg-type]
    return model


OUTSIDE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "residual": (lambda: networks.resnet(), (8, 1, 8, 8), "ways around"),
    "convolution": (lambda: nn.Sequential(*(nn.Conv2d(1, 1, 3) for _ in range(3))), (8, 1, 8, 8), "Conv2d '0' is none"),
    "functional": (Functional, (8, 64), "cannot be seen"),
    "shared": (Shared, (8, 64), "no 3 consecutive blocks"),
    "layer norm": (lambda: networks.mlp(6, 64, normalization=nn.LayerNorm), (8, 64), "no 3 consecutive blocks"),
    "uneven scales": (uneven, (8, 64), "differ between units"),
    "batch of three": (lambda: networks.mlp(6, 64, normalization=nn.BatchNorm1d), (3, 64), "batch of 4 or more"),
    "shallow": (lambda: nn.Linear(64, 4), (8, 64), "no 3 consecutive blocks"),
    "tokens": (lambda: networks.mlp(5, 32, features=8), (4, 6, 8), "no 3 consecutive blocks"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_where_theory_does_not_apply_it_says_why(name: str) -> None:
    build, shape, reason = OUTSIDE[name]
    with networks.seeded(0):
        report = check(build(), torch.randn(shape))
    assert "theory" not in report.profile.sources
    note = report.profile.settings["theory"]
    assert note["applied"] is False
    assert reason in note["note"]


def test_running_statistics_are_not_what_theory_describes() -> None:
    with networks.seeded(0):
        model = networks.mlp(6, 64, normalization=nn.BatchNorm1d)
        report = check(model, torch.randn(16, 64), mode="eval")
    assert "running statistics" in report.profile.settings["theory"]["note"]


def test_a_stack_inside_a_larger_model_is_found() -> None:
    with networks.seeded(0):
        body = networks.mlp(7, 64, features=32, initialize=networks.he)
        model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), body)
        settings = check(model, torch.randn(16, 64)).profile.settings["theory"]
    assert settings["applied"]
    assert (settings["first"], settings["last"], settings["layers"]) == ("2.0", "2.11", 6)


def test_an_empty_profile_is_left_alone() -> None:
    assert attach(nn.Linear(2, 2), Profile()).rows == ()


def test_a_linear_layer_without_a_weight_is_left_to_the_measurement() -> None:
    """A subclass may keep what it multiplies by under another name, and have no bias: this theory names it."""

    class Renamed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.kernel = nn.Parameter(self.weight.detach().clone())
            del self.weight, self.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.kernel.T

    model = nn.Sequential(*(part for _ in range(4) for part in (Renamed(), nn.ReLU())), nn.Linear(16, 4))
    report = check_all(model, torch.randn(32, 16))
    measured = Profile(tuple(row for row in report.profile if row.source != "theory"), report.profile.settings)
    assert measured.select("gradient_log_norm")
    assert "Renamed" in attach(model, measured).settings["theory"]["note"]
