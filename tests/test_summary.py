"""What the verdict says in words: no more than was measured, and nothing that contradicts itself."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.errors import UsageError


def plain(depth: int, *, width: int = 16, gain: float = 2.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=(gain / width) ** 0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Rectified(nn.Module):
    """Linear layers with ReLU as a function, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in plain(5) if isinstance(layer, nn.Linear))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return self.layers[-1](x)


class Cut(nn.Module):
    """The gradient ends in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = plain(3), plain(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.before(x).detach())


class Asleep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = plain(3)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_depth_is_told_in_words_that_fit_it() -> None:
    inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    assert "all 3 weight layers" in sounding.check(plain(3), inputs).verdict.summary
    assert "its one weight layer" in sounding.check(nn.Linear(16, 4), inputs).verdict.summary
    for weightless in (nn.Sequential(), nn.ReLU()):
        assert "no layer multiplies by a weight" in sounding.check(weightless, inputs).verdict.summary


def test_a_gradient_that_was_not_measured_is_not_said_to_survive() -> None:
    inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    asleep = sounding.check(Asleep(), inputs).verdict
    assert "no gradient came back" in asleep.summary
    assert "gradient survive" not in asleep.summary
    cut = sounding.check(Cut(), inputs).verdict
    assert (cut.findings[0].kind, cut.findings[0].severity) == ("detached", "high")
    assert any("(2 of 5)" in gap for gap in cut.not_judged)
    assert "gradient survive" not in cut.summary


def test_a_head_of_zeros_is_told_and_no_finding() -> None:
    model = plain(4)
    nn.init.zeros_(model[-1].weight)
    verdict = sounding.check(model, torch.randn(16, 16, generator=torch.Generator().manual_seed(1))).verdict
    assert [(finding.kind, finding.severity) for finding in verdict.findings] == [
        ("zero_start", "low"),
        ("behind_zeros", "low"),
    ]
    assert "practice" in verdict.findings[1].why
    assert "exactly zero at 3 of them" in verdict.summary


def test_a_network_in_which_no_weight_has_a_gradient_cannot_learn() -> None:
    """A layer of zeros under a ReLU that no hook sees: neither dead units nor a rate can be measured."""
    model = Rectified()
    nn.init.zeros_(model.layers[2].weight)
    verdict = sounding.check(model, torch.randn(16, 16, generator=torch.Generator().manual_seed(1))).verdict
    found = [(finding.kind, finding.severity) for finding in verdict.findings]
    assert found[0] == ("gradient_vanishing", "high")
    assert {("constant_weight", "medium"), ("behind_zeros", "medium")} <= set(found[1:])
    assert "no gradient reaches any weight" in verdict.summary
    assert not verdict.healthy


def test_a_warning_does_not_speak_of_death() -> None:
    """Gradients that change by 12 to 16 depth scales are a warning; the words must not say fatal."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    found = {}
    for depth in (6, 8, 30):
        verdict = sounding.check(plain(depth, gain=0.35), inputs).verdict
        found |= {finding.severity: verdict.summary for finding in verdict.findings if "gradient_v" in finding.kind}
    assert "near the limit of about" in found["medium"]
    assert "fatal" not in found["medium"]
    assert "fatal from about" in found["high"]


def test_an_expert_that_sees_some_samples_is_not_read_along_its_features() -> None:
    """Its output (10, 16) has 16 features, and the batch happens to have 16 samples."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.expert(x[:10]), x[10:]]))

    report = sounding.check(Routed(), torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    assert "no axis of the batch size 16" in {gap.name: gap.reason for gap in report.unmeasured}["expert"]
    assert "participation_ratio" not in report.profile.select(layer=1).measures


def test_layers_without_a_derivative_are_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces another home for its quantization
        model = torch.ao.quantization.quantize_dynamic(plain(3), {nn.Linear}, dtype=torch.qint8)
        report = sounding.check(model, torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    assert report.profile.settings["weight_layers"] == [1, 3, 5]
    assert "participation_ratio" in report.profile.select(layer=1).measures
    assert "(1 of 3)" in report.verdict.summary


def test_attention_alone_is_measured_with_its_projection() -> None:
    tokens = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    report = sounding.check(nn.MultiheadAttention(8, 2, batch_first=True), (tokens, tokens, tokens))
    assert "out_proj" not in {gap.name for gap in report.unmeasured}


def test_a_nested_tensor_is_refused_in_words() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        nested = torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)])
    with pytest.raises(UsageError, match="nested tensor"):
        sounding.check(nn.Linear(16, 4), nested)


def test_a_residual_network_is_not_told_to_add_residual_connections() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
            nn.init.normal_(self.branch[-1].weight, std=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x / 8 + self.branch(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(60)), nn.Linear(16, 3))
    findings = sounding.check(model, torch.randn(32, 16)).verdict.findings
    tried = [remedy for finding in findings if finding.kind == "gradient_explosion" for remedy in finding.remedies]
    assert "zero_residual" in tried[0]
    assert not any("add residual" in remedy for remedy in tried)


def test_gradients_whose_squares_vanish_are_as_good_as_none() -> None:
    """Norms that start near zero, as EfficientNet's at 0.02 in 163 places: only what is added gets a gradient."""
    layers = [part for _ in range(2) for part in (nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16))]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    batch = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    assert sounding.check(model, batch).verdict.healthy
    for norm in (model[1], model[3]):
        nn.init.constant_(norm.weight, 1e-25)
    verdict = sounding.check(model, batch).verdict
    assert (verdict.findings[0].kind, verdict.findings[0].severity) == ("gradient_vanishing", "high")
    assert "below 1e-19" in verdict.findings[0].why
