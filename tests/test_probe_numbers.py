"""The numbers of the probe, each against a route of its own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding import measures
from sounding.probe.gradients import log_norm
from sounding.probe.moments import FAST, FULL
from tolerance import TOLERANCE

SPECTRAL = {
    "numerical_rank": measures.numerical_rank,
    "soft_rank": measures.soft_rank,
    "effective_rank": measures.effective_rank,
    "condition_number": measures.condition_number,
    "isometry_gap": lambda rows: measures.isometry_gap(measures.gram(rows)),
}


def network(*, norm: bool = False, depth: int = 4, width: int = 12) -> nn.Sequential:
    torch.manual_seed(5)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def value(report: sounding.Report, measure: str, name: str) -> float:
    rows = report.profile.select(measure, source="check", name=name).rows
    assert len(rows) == 1, rows
    return rows[0].value


def close(expected: float) -> object:
    return pytest.approx(expected, rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32)


@pytest.mark.parametrize("norm", [False, True])
def test_gradients_equal_those_of_a_plain_backward_pass(norm: bool) -> None:
    """With respect to every output (retain_grad) and every weight (.grad), computed by hand."""
    model, inputs, targets = network(norm=norm), torch.randn(16, 12), torch.randint(0, 3, (16,))
    report = sounding.check(model, inputs, targets)
    clone = copy.deepcopy(model)
    hidden, outputs = inputs.clone().requires_grad_(), {}
    first = hidden
    for name, part in clone.named_children():
        hidden = part(hidden)
        hidden.retain_grad()
        outputs[name] = hidden
    functional.cross_entropy(hidden, targets).backward()
    for name, output in outputs.items():
        assert value(report, "gradient_log_norm", name) == close(math.log(float(output.grad.norm())))
    assert value(report, "gradient_log_norm", "input") == close(math.log(float(first.grad.norm())))
    for name, weight in clone.named_parameters():
        norm_of = float(weight.grad.double().norm())
        measured = value(report, "weight_gradient_log_norm", name)
        if norm_of > 1e-6:  # a bias before batch norm has no gradient but rounding
            assert measured == close(math.log(norm_of))


def test_spectral_measures_equal_those_of_the_outputs() -> None:
    model, inputs = network(), torch.randn(9, 12)
    report = sounding.check(model, inputs)
    hidden = inputs
    for name, part in model.named_children():
        hidden = part(hidden).detach()
        for measure, of_rows in SPECTRAL.items():
            assert value(report, measure, name) == close(float(of_rows(hidden))), (name, measure)


def test_fast_and_full_agree_and_fast_has_no_spectra() -> None:
    model, inputs = network(norm=True), torch.randn(16, 12)
    full, fast = sounding.check(model, inputs), sounding.check(model, inputs, tier="fast")
    assert not set(FULL) & set(fast.profile.measures)
    assert set(FULL) <= set(full.profile.measures)
    for row in fast.profile.where(lambda row: row.measure in FAST and row.source == "check"):
        assert row.value == close(value(full, row.measure, row.name))


@pytest.mark.parametrize("distance", [1e-1, 1e-3, 1e-5])
def test_a_nearly_collapsed_layer_keeps_its_digits(distance: float) -> None:
    """Rows that differ by a share ε of their length: the distinct share is ε² to the precision of the rows, far below
    what a float32 Gram matrix can tell from rounding."""
    generator = torch.Generator().manual_seed(0)
    common, own = torch.randn(256, generator=generator), torch.randn(64, 256, generator=generator)
    rows = (common + distance * own).float()
    for tier in ("fast", "full"):
        report = sounding.check(nn.Identity(), rows, tier=tier)
        expected = float(measures.distinct_share(rows.double()))
        assert value(report, "distinct_share", "model") == pytest.approx(expected, rel=TOLERANCE.float32_forward)
        cosine = 1 - float(measures.mean_cosine(rows.double()))
        assert 1 - value(report, "mean_cosine", "model") == pytest.approx(cosine, rel=TOLERANCE.three_digits)


@pytest.mark.parametrize("width", [6, 20_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-12, 1e-9, 1e10, 1e14, 1e20, 1e30])
def test_squares_that_leave_float32_do_not_spoil_the_measures(scale: float, width: int) -> None:
    """Activations and gradients of a vanishing or exploding network are float32, their squares, and the squares of
    their inner products, are not."""
    rows = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
    for tier in ("fast", "full"):
        plain = sounding.check(nn.Identity(), rows, tier=tier)
        scaled = sounding.check(nn.Identity(), rows * scale, tier=tier)
        for measure in ("participation_ratio", "mean_cosine", "distinct_share"):
            assert value(scaled, measure, "model") == close(value(plain, measure, "model"))
        ratio = value(scaled, "mean_square", "model") / value(plain, "mean_square", "model")
        assert ratio == pytest.approx(scale**2, rel=TOLERANCE.float32_forward)
    assert log_norm(rows * scale) == pytest.approx(
        math.log(scale) + float(rows.norm().log()), rel=TOLERANCE.float32_layer
    )


def test_log_norm_of_anything() -> None:
    many = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    assert log_norm(many) == pytest.approx(float(many.double().norm().log()), abs=TOLERANCE.float32)
    assert log_norm(torch.zeros(3)) == -math.inf
    assert math.isnan(log_norm(torch.tensor([1.0, math.nan])))
    assert log_norm(torch.tensor([1.0, math.inf])) == math.inf
    assert log_norm(torch.tensor([3.0, 4.0]).bfloat16()) == pytest.approx(math.log(5))
    assert log_norm(torch.tensor([3.0 + 4.0j])) == pytest.approx(math.log(5))
    assert log_norm(torch.tensor([3.0, 0.0, 4.0]).to_sparse()) == pytest.approx(math.log(5))


def test_alignment_is_that_of_the_samples_contributions_to_the_batch_gradient() -> None:
    """Under batch norm too: the per-sample gradients are the summands of the batch's, which they add up to."""
    model, inputs, targets = network(norm=True), torch.randn(10, 12), torch.randint(0, 3, (10,))
    report = sounding.check(model, inputs, targets)
    clone = copy.deepcopy(model)
    hidden = clone[:-1](inputs)
    output = clone[-1](hidden)
    output.retain_grad()
    functional.cross_entropy(output, targets).backward()
    contributions = torch.einsum("no,ni->oni", output.grad, hidden.detach())
    torch.testing.assert_close(contributions.sum(1), clone[-1].weight.grad)
    expected = float(measures.gradient_alignment(contributions).mean())
    assert value(report, "gradient_alignment", "network") == close(expected)


def test_alignment_of_a_sequence_model_sums_over_positions() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 9))
    tokens = torch.randint(0, 9, (7, 4))
    report = sounding.check(model, tokens, tokens)
    hidden = model[:2](tokens)
    output = model[2](hidden)
    (delta,) = torch.autograd.grad(functional.cross_entropy(output.flatten(0, 1), tokens.flatten()), output)
    contributions = torch.einsum("nto,nti->oni", delta, hidden.detach())
    assert value(report, "gradient_alignment", "network") == close(
        float(measures.gradient_alignment(contributions).mean())
    )


def test_collapsed_features_align_the_gradients_of_every_sample() -> None:
    """Proposition 8 of rank2020: rank one in, one direction out, whatever the targets."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    rows = torch.outer(torch.linspace(-2, 3, 8), torch.randn(5))
    nn.init.zeros_(model[0].bias)
    report = sounding.check(model, rows, torch.randint(0, 3, (8,)))
    assert value(report, "gradient_alignment", "network") == close(1.0)


def test_rows_without_a_gradient_say_nothing_about_alignment() -> None:
    """Half of the last layer's units are dead behind a ReLU: the other half is what aligns."""
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-99.0, -99.0, 99.0, 99.0]))
    rows = torch.outer(torch.linspace(1, 3, 8), torch.ones(5))
    assert value(sounding.check(model, rows), "gradient_alignment", "network") == close(1.0)


def test_tokens_report_the_rank_across_positions() -> None:
    """Equal positions span one direction, orthogonal ones as many as there are."""
    same = torch.randn(4, 1, 6).expand(4, 5, 6).contiguous()
    assert value(sounding.check(nn.Identity(), same), "token_participation_ratio", "model") == close(1.0)
    orthogonal = torch.eye(5, 6).expand(4, 5, 6).contiguous()
    assert value(sounding.check(nn.Identity(), orthogonal), "token_participation_ratio", "model") == close(5.0)
    expected = float(measures.participation_ratio(torch.arange(60.0).reshape(4, 3, 5).sin()).mean())
    report = sounding.check(nn.Identity(), torch.arange(60.0).reshape(4, 3, 5).sin())
    assert value(report, "token_participation_ratio", "model") == close(expected)


def test_a_convolution_flattens_channels_and_places_and_counts_dead_channels() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU())
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, -1.0
    images = torch.randn(6, 2, 5, 5)
    report = sounding.check(model, images)
    rows = model(images).detach().reshape(6, -1)
    assert value(report, "participation_ratio", "1") == close(float(measures.participation_ratio(rows)))
    assert value(report, "dead_fraction", "1") == 0.25
    assert report.profile.settings["features"]["2"] == 36
    assert report.profile.settings["positions"]["2"] == 9


@pytest.mark.parametrize("channels_last", [False, True])
def test_dead_units_of_vectors_and_tokens(channels_last: bool) -> None:
    units = torch.randn(6, 8).abs()
    units[:, :3] = -1.0
    rows = units[:, None, :].expand(6, 4, 8).contiguous() if channels_last else units
    assert value(sounding.check(nn.ReLU(), rows), "dead_fraction", "model") == pytest.approx(3 / 8)


def test_a_foreign_activation_is_read_by_its_zeros() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([1.0, 0.0, 1.0, 0.0])

    assert value(sounding.check(Gate(), torch.randn(5, 4)), "dead_fraction", "model") == 0.5


@pytest.mark.parametrize(
    ("module", "slope"),
    [
        (nn.Tanh(), lambda x: 1 - torch.tanh(x) ** 2),
        (nn.Sigmoid(), lambda x: 4 * torch.sigmoid(x) * (1 - torch.sigmoid(x))),
        (nn.Softsign(), lambda x: 1 / (1 + x.abs()) ** 2),
        (nn.Hardtanh(), lambda x: (x.abs() < 1).double()),
        (nn.Hardsigmoid(), lambda x: (x.abs() < 3).double()),
    ],
    ids=lambda item: type(item).__name__,
)
def test_saturated_means_a_slope_below_one_percent(module: nn.Module, slope: object) -> None:
    inputs = torch.linspace(-12, 12, 4001, dtype=torch.float64).reshape(-1, 1)[1:].reshape(40, 100)
    expected = float((slope(inputs) < 0.01).double().mean())  # type: ignore[operator]
    report = sounding.check(module, inputs)
    assert value(report, "saturated_fraction", "model") == pytest.approx(expected, abs=2 / 4000)


def test_the_first_layer_that_is_not_finite_is_told() -> None:
    model = network()
    with torch.no_grad():
        model[2].bias[0] = math.nan
    report = sounding.check(model, torch.randn(6, 12))
    fractions = {row.layer: row.value for row in report.profile.select("non_finite_fraction")}
    assert min(fractions) == 3
    assert fractions[3] == pytest.approx(1 / 12)
    assert any(item.name == "2" and "not finite" in item.reason for item in report.unmeasured)
    assert not report.verdict.healthy


def test_repeats_average_over_batches_of_their_own() -> None:
    model, inputs = network(), torch.randn(24, 12)
    report = sounding.check(model, inputs, repeats=3, loss=lambda output: output.square().sum())
    singles = [sounding.check(model, part, loss=lambda output: output.square().sum()) for part in inputs.split(8)]
    for row in report.profile.where(lambda row: row.source == "check" and row.name != "network"):
        found = torch.tensor([value(single, row.measure, row.name) for single in singles], dtype=torch.float64)
        if torch.isfinite(found).all():
            assert row.value == close(float(found.mean()))
            assert row.stderr == pytest.approx(
                float(found.std() / 3**0.5), rel=TOLERANCE.three_digits, abs=TOLERANCE.two_routes
            )
    assert report.profile.settings["repeats"] == 3
    assert report.profile.settings["batch_size"] == 8


def test_samples_limit_the_forward_measures_to_the_first_ones() -> None:
    rows = torch.randn(20, 6)
    report = sounding.check(nn.Identity(), rows, samples=7)
    assert value(report, "participation_ratio", "model") == close(float(measures.participation_ratio(rows[:7])))
    assert report.profile.settings["samples"] == 7


def test_wide_outputs_are_measured_in_pieces() -> None:
    """More features than are centred at a time."""
    rows = torch.randn(4, 300_001, generator=torch.Generator().manual_seed(0)) + 1.0
    for tier in ("fast", "full"):
        report = sounding.check(nn.Identity(), rows, tier=tier)
        for measure in (measures.participation_ratio, measures.mean_cosine, measures.distinct_share):
            assert value(report, measure.__name__, "model") == close(float(measure(rows)))


def test_repeats_part_samples_where_time_comes_first() -> None:
    """Recurrent modules of torch hold the samples in axis 1: each repeat sees four of the eight, at all five times."""
    inputs = torch.randn(5, 8, 4)
    report = sounding.check(nn.LSTM(4, 6), inputs, repeats=2, theory=False)
    assert report.profile.settings["batch_size"] == 4
    assert report.profile.settings["positions"] == {"1": 5}
