"""What a check says of the start: loss beside ignorance, targets of language models, gradients that do not arrive."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.probe.kinds import page_of, pages
from sounding.probe.losses import next_tokens
from sounding.probe.records import Finding, FindingKind
from sounding.start.loss import StartLoss, measure_loss
from test_audit import Tower
from tolerance import TOLERANCE


def plain(depth: int = 3, width: int = 16, classes: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def kinds(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {finding.kind: finding.severity for finding in findings}


def measured(logits: Tensor, targets: Tensor, loss: Any = None) -> StartLoss:
    value = functional.cross_entropy(logits.requires_grad_(), targets)
    return measure_loss(logits, targets, loss=loss, name="cross_entropy", value=value)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_logits_cost_half_their_variance(spread: float) -> None:
    """ln E e^z = σ²/2 for Gaussian logits of many classes; measured over labels drawn at random it is the excess."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(400, 2000, generator=generator)
    found = measured(logits, torch.randint(0, 2000, (400,), generator=generator))
    assert math.isclose(found.blind, math.log(2000))
    assert math.isclose(found.spread, spread, rel_tol=0.01)
    assert math.isclose(found.excess, spread**2 / 2, rel_tol=0.02)
    assert abs(found.value - found.blind - found.excess) < TOLERANCE.standard_errors * spread / math.sqrt(400) + 0.01


def test_the_sentence_is_in_settings_and_names_its_numbers() -> None:
    inputs, labels = torch.randn(40, 16), torch.randint(0, 5, (40,))
    start = sounding.check(plain(), inputs, labels).profile.settings["start"]
    assert start["classes"] == 5
    assert "ln C = 1.609" in start["sentence"]
    random = sounding.check(plain(), inputs).profile.settings["start"]
    assert "random direction" in random["sentence"]
    targets = torch.tensor([[1.0], [5.0]]).repeat(20, 5)  # a mean of 3 that a constant knows, and a variance of 4
    mean = sounding.check(plain(), inputs, targets).profile.settings["start"]
    assert mean["blind"] == 4.0


def test_language_models_predict_the_next_token_by_default() -> None:
    torch.manual_seed(0)
    model, tokens = Tower(), torch.randint(0, 100, (8, 6))
    report = sounding.check(model, tokens)
    expected = functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert report.profile.settings["loss"] == "cross_entropy"
    assert math.isclose(report.profile.settings["start"]["value"], expected.item(), rel_tol=1e-5)
    hidden = model.embed(tokens)
    assert next_tokens(hidden, [tokens], {100}) is None
    assert next_tokens(model(tokens), [tokens.float()], {100}) is None


def test_a_loss_far_above_ignorance_is_high() -> None:
    torch.manual_seed(0)
    model = Tower(width=64)
    model.head.weight = model.embed.weight  # standard deviation 1: logits of 8
    found = sounding.check(model, torch.randint(0, 100, (16, 12))).verdict
    assert kinds(found.findings)["start_loss"] == "high"
    assert "ln 100" in found.findings[0].why


def test_probabilities_in_front_of_cross_entropy() -> None:
    inputs, labels = torch.randn(40, 16), torch.randint(0, 5, (40,))
    soft = nn.Sequential(plain(), nn.Softmax(1))
    assert kinds(sounding.check(soft, inputs, labels).verdict.findings)["softmax_twice"] == "medium"
    named = sounding.check(soft, inputs, labels, loss=nn.CrossEntropyLoss()).verdict
    assert named.findings[0].layer == "1"  # the softmax
    assert kinds(named.findings)["softmax_twice"] == "high"
    gate = nn.Sequential(plain(classes=1), nn.Sigmoid(), nn.Flatten(0))
    two = sounding.check(gate, inputs, labels.clamp(max=1), loss="cross_entropy").verdict
    assert kinds(two.findings)["softmax_twice"] == "high"
    logs = nn.Sequential(plain(), nn.LogSoftmax(1))
    for harmless in (plain(), logs):
        assert "softmax_twice" not in kinds(sounding.check(harmless, inputs, labels).verdict.findings)


def test_uneven_labels_are_named() -> None:
    inputs, labels = torch.randn(60, 16), torch.cat([torch.zeros(55), torch.arange(5.0)]).long()
    found = sounding.check(plain(), inputs, labels).verdict
    assert kinds(found.findings) == {"class_imbalance": "low"}
    assert found.healthy
    assert kinds(sounding.check(plain(), inputs, torch.arange(60) % 5).verdict.findings) == {}


def test_inputs_that_nothing_brings_back() -> None:
    inputs = 1e30 * torch.randn(40, 16)
    assert kinds(sounding.check(plain(), inputs).verdict.findings)["huge_signal"] == "high"
    normalized = nn.Sequential(nn.LayerNorm(16), plain())
    assert "huge_signal" not in kinds(sounding.check(normalized, 1e5 * torch.randn(40, 16)).verdict.findings)


class Asleep(nn.BatchNorm1d):
    """A batch norm that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Asleep:
        super().train(False)
        return self


def test_batch_norms_in_evaluation_mode_are_named_as_the_cause() -> None:
    torch.manual_seed(0)
    blocks = [part for _ in range(12) for part in (nn.Linear(64, 64), Asleep(64), nn.ReLU())]
    for part in blocks:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight)
    (huge,) = [
        finding
        for finding in sounding.check(nn.Sequential(*blocks, nn.Linear(64, 5)), torch.randn(32, 64)).verdict.findings
        if finding.kind == "huge_signal"
    ]
    assert huge.severity == "high"
    assert "evaluation mode" in huge.why


class Lossy(nn.Module):
    """A body, a head, and each way in which a gradient does not arrive."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.body, self.side, self.head = way, plain(2, classes=16), nn.Linear(16, 16), nn.Linear(16, 5)
        if way == "frozen":
            self.side.requires_grad_(False)
        if way == "behind_zeros":
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        match self.way:
            case "detached":
                x = x + self.side(x).detach()
            case "body":
                x = x.detach() + self.side(x.detach())
            case "frozen" | "behind_zeros":
                x = x + self.side(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["frozen", "detached", "unused", "behind_zeros"])
def test_gradients_that_do_not_arrive_are_told_apart(way: str) -> None:
    torch.manual_seed(0)
    findings = sounding.check(Lossy(way), torch.randn(32, 16)).verdict.findings
    (found,) = [finding for finding in findings if finding.kind in ("frozen", "detached", "unused", "behind_zeros")]
    assert (found.kind, found.severity) == (way, "low")
    assert found.parameter == ("body.0.weight" if way == "behind_zeros" else "side.weight")
    assert found.why.endswith(".")


def test_a_body_that_is_cut_off_is_unhealthy() -> None:
    torch.manual_seed(0)
    verdict = sounding.check(Lossy("body"), torch.randn(32, 16)).verdict
    assert (verdict.findings[0].kind, verdict.findings[0].severity) == ("detached", "high")
    assert verdict.findings[0].parameter == "body.0.weight"


def test_some_frozen_siblings_are_a_warning() -> None:
    model = plain(4)
    model[0].requires_grad_(False)
    assert kinds(sounding.check(model, torch.randn(32, 16)).verdict.findings) == {"frozen": "medium"}


def test_every_kind_has_a_page() -> None:
    assert set(pages()) == set(get_args(FindingKind))
    for page in pages().values():
        assert all(f"**{word}" in page.text for word in ("Means.", "Seen.", "Do.", "Ignore it")), page.kind
    assert page_of("Rank collapse").kind == "rank_collapse"
    with pytest.raises(sounding.errors.UsageError, match="no kind of finding"):
        page_of("sonar")


class Compressing(nn.Module):
    """A residual linear map beside a compressor of 64 positions at a time, of which short sequences leave none."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.compressor = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16), Windows())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.compressor(x)
        return self.head(torch.cat([x + self.main(x), extra], 1).mean(1))


class Windows(nn.Module):
    """Means over whole windows of 64 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.shape[1] // 64
        return x[:, : 64 * whole].unflatten(1, (whole, 64)).mean(2) + self.bias


def test_what_gave_nothing_is_unused_and_a_single_row_is_no_layer():
    report = sounding.check(Compressing(), torch.randn(8, 10, 16), torch.randint(4, (8,)), theory=False)
    assert {"detached"}.isdisjoint(finding.kind for finding in report.verdict.findings if finding.severity != "low")
    assert len(report.profile.settings["weight_layers"]) == 4


def test_targets_of_zero_and_one_and_the_frequencies_of_tokens_are_told() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 16), (torch.arange(40) % 2).float()
    start = sounding.check(plain(classes=1), inputs, targets[:, None], theory=False).profile.settings["start"]
    assert "only 0 and 1: given as whole numbers they get binary cross-entropy" in start["sentence"]
    tokens = torch.randint(0, 4, (80, 12))  # few words make most of a text, and none of them half
    tokens[:, ::6] = torch.randint(0, 100, (80, 2))
    found = sounding.check(Tower(), tokens, theory=False)
    assert "class_imbalance" not in kinds(found.verdict.findings)
    assert "Who knows only how frequent each token is has" in found.profile.settings["start"]["sentence"]


def test_the_largest_column_is_named() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(40, 16)
    inputs[:, 3] += 1e6
    (found,) = [one for one in sounding.check(plain(), inputs).verdict.findings if one.kind == "huge_signal"][:1]
    assert "column 3 has the largest values, up to 1e+06" in found.why
    assert "subtract its mean and divide by its deviation" in found.remedies[0]
