"""The verdict: the rates it must hold, each kind of finding on a network that has it, and what must not accuse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import nn

import networks
import sounding
from networks import Case
from sounding.errors import UsageError
from sounding.probe.check import check
from sounding.probe.records import FindingKind, MeasuredKind, Verdict
from sounding.probe.shortcut import shortest_depth
from sounding.probe.verdict import judge
from sounding.profile import Profile, Row
from sounding.repair import METHODS

SAMPLE, ALL = range(12), range(200)
PAPERS = ("rank2020", "meanfield2019", "thesis2024")


def look(case: Case, *, theory: bool | None = None) -> Verdict:
    return check(case.model, case.inputs, case.targets, theory=theory).verdict


def severities(verdict: Verdict) -> dict[FindingKind, str]:
    return {finding.kind: finding.severity for finding in verdict.findings}


def accused(family: Callable[[int], Case], seeds: range) -> list[str]:
    """The cases that get a finding of high severity."""
    return [case.label for case in map(family, seeds) if not look(case).healthy]


def missed(family: Callable[[int], Case], seeds: range, kind: FindingKind) -> list[str]:
    """The cases that do not get the finding with high severity, from measurement alone, which takes half the time."""
    return [case.label for case in map(family, seeds) if severities(look(case, theory=False)).get(kind) != "high"]


@pytest.mark.parametrize("family", networks.HEALTHY)
def test_networks_that_train_well_are_not_accused_on_a_sample(family: Callable[[int], Case]) -> None:
    assert accused(family, SAMPLE) == []


def test_the_ill_are_found_on_a_sample() -> None:
    assert missed(networks.collapsed_mlp, SAMPLE, "rank_collapse") == []
    assert missed(networks.exploding_mlp, SAMPLE, "gradient_explosion") == []


@pytest.mark.slow
@pytest.mark.parametrize("family", networks.HEALTHY)
def test_at_most_one_percent_of_networks_that_train_well_are_accused(family: Callable[[int], Case]) -> None:
    assert len(accused(family, ALL)) <= len(ALL) // 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [(networks.collapsed_mlp, "rank_collapse"), (networks.exploding_mlp, "gradient_explosion")]
)
def test_at_least_99_percent_of_the_ill_are_found(family: Callable[[int], Case], kind: FindingKind) -> None:
    assert len(missed(family, ALL, kind)) <= len(ALL) // 100


HEALTHY_STRANGERS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "default ReLU of 8 layers": lambda: (networks.mlp(8, 64), torch.randn(32, 64)),
    "default tanh of 10 layers": lambda: (networks.mlp(10, 64, activation=nn.Tanh), torch.randn(32, 64)),
    "batch norm of 20 layers": lambda: (networks.mlp(20, 64, normalization=nn.BatchNorm1d), torch.randn(64, 64)),
    "layer norm of 10 layers": lambda: (networks.mlp(10, 64, normalization=nn.LayerNorm), torch.randn(32, 64)),
    "SELU of 50 layers": lambda: (
        networks.mlp(50, 128, activation=nn.SELU, initialize=lecun),
        torch.randn(32, 64),
    ),
    "one output": lambda: (networks.mlp(8, 64, classes=1, initialize=networks.he), torch.randn(32, 64)),
    "bottleneck of one": lambda: (bottleneck(1), torch.randn(32, 64)),
    "narrow": lambda: (networks.mlp(6, 8, initialize=networks.he), torch.randn(32, 64)),
    "few samples": lambda: (networks.mlp(8, 64, initialize=networks.he), torch.randn(3, 64)),
    "many samples": lambda: (networks.mlp(8, 64, initialize=networks.he), torch.randn(512, 64)),
    "very correlated": lambda: (networks.mlp(10, 64, initialize=networks.he), torch.randn(32, 64) + 5),
    "residual of 56 layers": lambda: (networks.resnet((9, 9, 9)), torch.randn(16, 1, 8, 8)),
    "zero-initialized branches": lambda: (zero_branches(), torch.randn(16, 1, 8, 8)),
    "zero-initialized head": lambda: (zero_head(), torch.randn(32, 64)),
    "pre-norm of 24 blocks": lambda: (networks.Transformer(24), networks.batch("digits", shape=(8, 8))[0]),
    "post-norm of 12 blocks": lambda: (networks.Transformer(12, pre=False), torch.randn(32, 8, 8)),
    "recurrent": lambda: (Recurrent(), torch.randint(0, 50, (16, 12))),
}


def lecun(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def bottleneck(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, width), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 64)
    )


def zero_branches() -> nn.Module:
    model = networks.resnet()
    for block in model:
        if isinstance(block, networks.ResidualBlock):
            nn.init.zeros_(block.bn2.weight)
    return model


def zero_head() -> nn.Module:
    model = networks.mlp(6, 64, initialize=networks.he)
    nn.init.zeros_(model[-1].weight)  # type: ignore[arg-type]
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(50, 16), nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.embed(x))[0][:, -1])  # type: ignore[no-any-return]


class Unnormalized(nn.Module):
    """Residual blocks without normalization: the signal doubles with each."""

    def __init__(self, blocks: int, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            networks.mlp(2, width, classes=width, initialize=networks.he) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("name", HEALTHY_STRANGERS)
def test_common_architectures_are_not_accused(name: str) -> None:
    for seed in range(2):
        with networks.drawn_from(seed):
            model, inputs = HEALTHY_STRANGERS[name]()
            verdict = check(model, inputs).verdict
        assert verdict.healthy, verdict.summary


def dead() -> nn.Module:
    model = networks.mlp(6, 64, initialize=networks.he)
    nn.init.constant_(model[4].bias, -100.0)  # type: ignore[arg-type]
    return model


def saturated() -> nn.Module:
    return networks.mlp(5, 64, activation=nn.Tanh, initialize=lambda w: nn.init.normal_(w, std=30 * w.shape[1] ** -0.5))


class Overflow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e30 * 1e30


ILL: dict[str, tuple[FindingKind, Callable[[], tuple[nn.Module, torch.Tensor]]]] = {
    "He ReLU of 60 layers": (
        "rank_collapse",
        lambda: (networks.mlp(60, 64, initialize=networks.he), torch.randn(16, 64)),
    ),
    "layer norm of 60 layers": (
        "rank_collapse",
        lambda: (networks.mlp(60, 64, normalization=nn.LayerNorm), torch.randn(32, 64)),
    ),
    "linear of 200 layers": (
        "rank_collapse",
        lambda: (networks.mlp(200, 32, activation=nn.Identity, initialize=lecun), torch.randn(32, 64)),
    ),
    "He ReLU, alignment": (
        "gradient_alignment",
        lambda: (networks.mlp(80, 64, initialize=networks.he), torch.randn(32, 64)),
    ),
    "default ReLU of 16 layers": ("gradient_vanishing", lambda: (networks.mlp(16, 64), torch.randn(32, 64))),
    "default tanh of 25 layers": (
        "gradient_vanishing",
        lambda: (networks.mlp(25, 64, activation=nn.Tanh), torch.randn(32, 64)),
    ),
    "sigmoid of 8 layers": (
        "gradient_vanishing",
        lambda: (networks.mlp(8, 64, activation=nn.Sigmoid), torch.randn(32, 64)),
    ),
    "batch norm of 60 layers": (
        "gradient_explosion",
        lambda: (networks.mlp(60, 64, normalization=nn.BatchNorm1d), torch.randn(32, 64)),
    ),
    "residual without norm": ("gradient_explosion", lambda: (Unnormalized(50), torch.randn(32, 64))),
    "one sample repeated": ("degenerate_batch", lambda: (networks.mlp(4, 32), torch.ones(16, 64))),
    "multiples of one sample": (
        "degenerate_batch",
        lambda: (networks.mlp(4, 32), torch.rand(16, 1) * torch.ones(16, 64)),
    ),
    "batch norm over two": (
        "batch_too_small",
        lambda: (networks.mlp(4, 32, normalization=nn.BatchNorm1d), torch.randn(2, 64)),
    ),
    "dead layer": ("dead_units", lambda: (dead(), torch.randn(32, 64))),
    "saturated": ("saturation", lambda: (saturated(), torch.randn(32, 64))),
    "overflow": (
        "non_finite",
        lambda: (nn.Sequential(nn.Linear(64, 8), Overflow(), nn.Linear(8, 4)), torch.randn(8, 64)),
    ),
}


@pytest.mark.parametrize("name", ILL)
def test_each_illness_is_found_and_explained(name: str) -> None:
    kind, build = ILL[name]
    with networks.drawn_from(3):
        model, inputs = build()
        verdict = check(model, inputs).verdict
    assert severities(verdict).get(kind) == "high", verdict.summary
    assert not verdict.healthy
    assert verdict.summary.startswith("Unhealthy: ")
    for finding in verdict.findings:
        if finding.kind in get_args(MeasuredKind):
            assert any(paper in finding.why for paper in PAPERS)
            assert finding.paper in PAPERS
        with pytest.warns(DeprecationWarning, match=r"Finding\.paper"):
            assert finding.seed == finding.paper
        assert finding.remedies
        assert all(math.isfinite(value) for value in finding.evidence.values())
    json.dumps(verdict.to_dict(), allow_nan=False)


@pytest.mark.parametrize("name", ILL)
def test_the_cures_that_are_named_exist(name: str) -> None:
    _, build = ILL[name]
    with networks.drawn_from(3):
        model, inputs = build()
        findings = check(model, inputs).verdict.findings
    named = re.findall(r"--method ([a-z_,]+)", " ".join(cure for finding in findings for cure in finding.remedies))
    assert {method for methods in named for method in methods.split(",")} <= set(METHODS)


def test_every_kind_is_tried() -> None:
    assert {kind for kind, _ in ILL.values()} == set(get_args(MeasuredKind))


def test_findings_come_worst_first() -> None:
    with networks.drawn_from(0):
        verdict = check(networks.mlp(50, 32), torch.randn(2, 64)).verdict
    ranks = [["high", "medium", "low"].index(finding.severity) for finding in verdict.findings]
    assert ranks == sorted(ranks)


def test_the_overflow_is_found_where_it_begins() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8), Overflow(), nn.Linear(8, 4))
    verdict = check(model, torch.randn(8, 64)).verdict
    assert verdict.findings[0].kind == "non_finite"
    assert (verdict.findings[0].layer, verdict.findings[0].depth) == ("2", 3)


def test_more_samples_than_features_are_no_degenerate_batch() -> None:
    """They are dependent whatever they are; repeating one of them is another matter."""
    with networks.drawn_from(0):
        model, inputs = networks.mlp(4, 32, features=16), torch.randn(64, 16)
        assert "degenerate_batch" not in severities(check(model, inputs).verdict)
        inputs[32:] = inputs[:32]
        assert severities(check(model, inputs).verdict)["degenerate_batch"] == "medium"


def test_dependent_samples_are_told_from_different_ones() -> None:
    with networks.drawn_from(0):
        model, inputs = networks.mlp(4, 32), torch.randn(8, 64)
        inputs[7] = inputs[0] + 2 * inputs[1]
        assert severities(check(model, inputs).verdict)["degenerate_batch"] == "low"


def test_a_sure_output_is_not_saturation() -> None:
    with networks.drawn_from(0):
        last = nn.Linear(32, 4)
        nn.init.normal_(last.weight, std=100.0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), last, nn.Sigmoid())
        assert "saturation" not in severities(check(model, torch.randn(16, 64)).verdict)


class Gated(nn.Module):
    """A side branch of few units scales the features; when its units are dead the gate is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 4)
        self.gate = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16), nn.Sigmoid())
        nn.init.constant_(self.gate[0].bias, -100.0)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(x * self.gate(x))  # type: ignore[no-any-return]


def test_a_dead_gate_on_a_side_branch_is_a_warning() -> None:
    with networks.drawn_from(0):
        found = severities(check(Gated(), torch.randn(16, 64)).verdict)
    assert found == {"dead_units": "medium", "large_bias": "medium", "behind_zeros": "low"}


class OneHot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(x, 500).float()


def test_zeros_of_a_module_that_is_no_activation_do_not_accuse() -> None:
    with networks.drawn_from(0):
        model = nn.Sequential(OneHot(), nn.Linear(500, 16), nn.ReLU(), nn.Linear(16, 4))
        assert check(model, torch.randint(0, 500, (16,))).verdict.healthy


def test_one_sample_judges_norms_only() -> None:
    with networks.drawn_from(0):
        verdict = check(networks.mlp(50, 64, initialize=networks.he), torch.randn(1, 64)).verdict
    assert verdict.status == "not known"
    assert severities(verdict) == {"batch_too_small": "medium"}


def test_batch_norm_over_pixels_is_not_too_small() -> None:
    with networks.drawn_from(0):
        verdict = check(networks.resnet(), torch.randn(4, 1, 8, 8)).verdict
    assert "batch_too_small" not in severities(verdict)


def test_a_loop_of_ones_own_gets_the_same_verdict() -> None:
    """The watch sees the ways around a network as the check does."""
    with networks.drawn_from(5):
        model, (inputs, _) = networks.Transformer(24), networks.batch("digits", shape=(8, 8))
        with sounding.watch(model) as watched:
            model(inputs).square().mean().backward()
    assert watched.report.profile.settings["shortest_depth"] == 2
    assert watched.report.verdict.healthy


def test_a_filter_does_not_make_a_network_shallower() -> None:
    with networks.drawn_from(0):
        model = networks.mlp(60, 64, normalization=nn.BatchNorm1d)
        verdict = check(model, torch.randn(32, 64), only=["0", "3", "6"]).verdict
    assert severities(verdict)["gradient_explosion"] == "high"


def test_theory_rows_are_not_judged() -> None:
    """Theory of a network that explodes beside the measurement of one that does not."""
    with networks.drawn_from(0):
        report = check(networks.mlp(6, 64, initialize=networks.he), torch.randn(32, 64))
    foreign = Profile([Row(9, "network", "gradient_growth", 1e9, None, "theory")])
    assert judge(report.profile + foreign).findings == report.verdict.findings


def test_a_profile_from_json_gets_the_same_verdict() -> None:
    report = check(networks.collapsed_mlp(0).model, networks.collapsed_mlp(0).inputs)
    assert judge(Profile.from_json(report.profile.to_json())) == report.verdict


def test_only_profiles_are_judged() -> None:
    with pytest.raises(UsageError, match="expected a Profile"):
        judge({"healthy": True})  # type: ignore[arg-type]


def test_the_shortest_way_counts_weights_only() -> None:
    inputs = torch.randn(4, 64)
    assert shortest_depth(networks.mlp(50, 16)(inputs)) == 50
    assert shortest_depth(networks.mlp(9, 16, normalization=nn.BatchNorm1d)(inputs)) == 9
    assert shortest_depth(networks.Transformer(6)(inputs.view(4, 8, 8))) == 2
    assert shortest_depth(networks.resnet((9, 9, 9))(inputs.view(4, 1, 8, 8))) == 4
    assert shortest_depth(inputs) is None


def test_the_shortest_way_sees_through_parametrized_and_masked_weights() -> None:
    normed = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3)))
    assert shortest_depth(normed(torch.randn(2, 8))) == 3
    weight = nn.Parameter(torch.randn(8, 8))
    masked = torch.nn.functional.linear(normed(torch.randn(2, 8)), weight * torch.ones(8, 8).tril())
    assert shortest_depth(masked) == 4
