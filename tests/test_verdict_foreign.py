"""The verdict on networks of other people: what was handed in, whether it trains, and which layer is named.

What is called healthy or ill here was trained: `python bench/verdict_foreign.py` prints the accuracies.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import networks
from foreign import HEALTHY, ILL, FunctionalStack, break_layer, spread_inputs
from sounding.probe.check import check
from sounding.probe.records import Finding, Verdict


def look(build: Callable[[], nn.Module], inputs: Callable[[], Tensor], seed: int = 0) -> Verdict:
    with networks.drawn_from(seed):
        return check(build(), inputs()).verdict


def find(verdict: Verdict, kind: str) -> Finding:
    return next(finding for finding in verdict.findings if finding.kind == kind)


@pytest.mark.parametrize("name", HEALTHY)
def test_foreign_networks_that_train_are_not_accused(name: str) -> None:
    verdict = look(*HEALTHY[name])
    assert verdict.healthy, verdict.summary


@pytest.mark.parametrize("name", ILL)
def test_foreign_networks_that_do_not_train_are_found_out(name: str) -> None:
    kind, build, inputs = ILL[name]
    verdict = look(build, inputs)
    assert find(verdict, kind).severity == "high", verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("name", ILL)
def test_foreign_networks_that_do_not_train_are_found_out_for_any_seed(name: str) -> None:
    kind, build, inputs = ILL[name]
    verdicts = [look(build, inputs, seed) for seed in range(1, 11)]
    assert [verdict.summary for verdict in verdicts if find(verdict, kind).severity != "high"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_foreign_networks_that_train_are_not_accused_for_any_seed(name: str) -> None:
    verdicts = [look(*HEALTHY[name], seed) for seed in range(1, 11)]
    assert [verdict.summary for verdict in verdicts if not verdict.healthy] == []


@dataclass(frozen=True)
class Break:
    """One layer of eight, scaled, and what is said of it."""

    factor: float
    kind: str
    severity: str


BREAKS = (
    Break(1e-3, "gradient_vanishing", "medium"),
    Break(1e-5, "gradient_vanishing", "medium"),
    Break(1e2, "gradient_explosion", "low"),
    Break(1e4, "gradient_explosion", "high"),
)


@pytest.mark.parametrize("case", BREAKS)
@pytest.mark.parametrize("position", [1, 3, 6])
def test_a_layer_of_the_wrong_scale_is_named(case: Break, position: int) -> None:
    """The squared norm changes by the square of the factor; a weak layer gets a full gradient and recovers."""
    model = lambda: break_layer(networks.mlp(8, 64, initialize=networks.he), position, case.factor)  # noqa: E731
    finding = find(look(model, spread_inputs), case.kind)
    assert (finding.severity, finding.layer) == (case.severity, str(2 * position))
    assert math.isclose(finding.evidence["jump"], case.factor**2, rel_tol=1.0)
    assert 0.5 < finding.evidence["growth"] < 2  # the other layers are as they were
    assert finding.evidence["weight_layer"] == position + 1


def test_a_head_may_start_as_small_as_one_likes() -> None:
    verdict = look(lambda: break_layer(networks.mlp(8, 64, initialize=networks.he), 7, 1e-5), spread_inputs)
    assert verdict.findings == ()


@pytest.mark.parametrize("scale", [1e-4, 255.0, 1e4])
def test_units_of_the_inputs_do_not_hide_what_batch_norm_does(scale: float) -> None:
    """The first batch norm divides by them, once, and the weights before it get that back."""
    model = lambda: networks.mlp(60, 64, normalization=nn.BatchNorm1d)  # noqa: E731
    plain = find(look(model, spread_inputs), "gradient_explosion")
    scaled = find(look(model, lambda: scale * spread_inputs()), "gradient_explosion")
    assert scaled.severity == plain.severity == "high"
    assert math.isclose(scaled.evidence["growth"], plain.evidence["growth"], rel_tol=0.05)
    shallow = look(lambda: networks.mlp(8, 64, normalization=nn.BatchNorm1d), lambda: scale * spread_inputs())
    assert shallow.findings == ()


def test_the_layer_that_ends_the_signal_is_named() -> None:
    for model, name in ((break_layer(networks.mlp(8, 64, initialize=networks.he), 3, 0.0), "6"),):
        with networks.drawn_from(0):
            verdict = check(model, spread_inputs()).verdict
        assert find(verdict, "gradient_vanishing").layer == name
        assert verdict.summary.startswith(f"Unhealthy: no gradient reaches any weight: it ends at layer '{name}'")


@pytest.mark.parametrize("layers", [8, 60])
def test_weights_outside_of_modules_are_judged_by_their_ends(layers: int) -> None:
    """And the sentence says that no more was seen."""
    verdict = look(lambda: FunctionalStack(layers), spread_inputs)
    assert verdict.healthy == (layers == 8)
    assert "multiplications by weights" in verdict.summary
    growing = look(lambda: FunctionalStack(60, gain=2.0), spread_inputs)
    assert math.isclose(find(growing, "gradient_explosion").evidence["growth"], 2.0, rel_tol=0.1)


class Listed(nn.Module):
    """Nothing but a list of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) * math.sqrt(2 / 64) for _ in range(60))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = functional.relu(x @ weight)
        return x


def test_a_list_of_weights_belongs_to_the_module_that_holds_it() -> None:
    finding = find(look(Listed, spread_inputs), "rank_collapse")
    assert (finding.severity, finding.layer, finding.evidence["unseen_products"]) == ("high", "model", 59)


def test_scripted_modules_are_judged_by_their_ends() -> None:
    with networks.drawn_from(0), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself, which people still hand in
        model = torch.jit.script(networks.mlp(100, 64, normalization=nn.BatchNorm1d))  # type: ignore[no-untyped-call]
        finding = find(check(model, spread_inputs()).verdict, "gradient_explosion")
    assert finding.severity == "high"
    assert 1.3 < finding.evidence["growth"] < 1.7


class Einsum(nn.Module):
    """A leaf with a weight of its own, multiplied by einsum: no way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(width, width) * math.sqrt(2 / width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(torch.einsum("bi,oi->bo", x, self.kernel))


def test_a_product_by_einsum_is_a_layer() -> None:
    model = lambda: nn.Sequential(*(Einsum(64) for _ in range(60)), nn.Linear(64, 10))  # noqa: E731
    assert find(look(model, spread_inputs), "rank_collapse").severity == "high"


def test_nearly_parallel_inputs_are_told_to_the_user() -> None:
    """A table with a year in it, in centuries: shallow networks are not accused, and the remedy is about the data."""

    def table() -> Tensor:
        return torch.cat([20 + 0.1 * torch.randn(64, 1), 0.1 * torch.randn(64, 19)], dim=1)

    verdict = look(lambda: networks.mlp(6, 64, features=20, initialize=networks.he), table)
    finding = find(verdict, "degenerate_batch")
    assert verdict.healthy
    assert (finding.severity, finding.evidence["share_outside"] < 0.01) == ("low", True)
    assert "subtract the mean" in finding.remedies[0]
    assert "nearly parallel" in verdict.summary


def test_theory_says_what_parallel_inputs_hide() -> None:
    """Where the share happens not to fall below half of the input's, the stack collapses all the same."""
    decided = 0
    for seed in range(8):
        with networks.drawn_from(seed):
            model = networks.mlp(50, 64, initialize=networks.he)
            report = check(model, 0.1 * spread_inputs() + 1.0)
        finding = find(report.verdict, "rank_collapse")
        assert finding.severity == "high"
        assert len(report.profile.settings["theory"]["uncorrelated_shares"]) == 49
        if finding.evidence.get("collapsed_layers_uncorrelated", 0) > 30:
            decided += 1
            assert "subtract the mean" in finding.remedies[0]
    assert decided > 0
