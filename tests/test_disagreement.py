"""Disagreement: faults that no random network has are found at their layer, and healthy networks are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import networks
import sounding
from sounding.probe.records import Finding


class Cut(nn.Module):
    """Passes the signal on and keeps the gradient back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def found(model: nn.Module, inputs: Tensor, **options: object) -> list[Finding]:
    report = sounding.check(model, inputs, theory=True, **options)  # type: ignore[arg-type]
    return [finding for finding in report.verdict.findings if finding.kind == "disagreement"]


def clone(model: nn.Sequential) -> None:
    model[8].load_state_dict(model[6].state_dict())


def tie(model: nn.Sequential) -> None:
    model[8].weight = model[6].weight


@torch.no_grad()
def lower_rank(model: nn.Sequential) -> None:
    model[8].weight.copy_(torch.randn(64, 4) @ torch.randn(4, 64) / 16)


@torch.no_grad()
def train_a_direction(model: nn.Sequential) -> None:
    model[8].weight.add_(torch.outer(torch.randn(64), torch.randn(64)) / 8)


@torch.no_grad()
def hide(model: nn.Sequential) -> None:
    model[8].weight[:48] = 0


def cut(model: nn.Sequential) -> None:
    model[9] = nn.Sequential(Cut(), nn.ReLU())


FAULTS: dict[str, Callable[[nn.Sequential], None]] = {
    "copy": clone,
    "again": tie,
    "rank 4": lower_rank,
    "singular values": train_a_direction,
    "exactly zero for 48 of 64 units": hide,
    "gradient is cut": cut,
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_is_named_with_its_layer(words: str) -> None:
    with networks.drawn_from(1):
        model = networks.mlp(6, 64)
        assert found(model, torch.randn(24, 64)) == []
        FAULTS[words](model)
        (finding,) = found(model, torch.randn(24, 64))
    assert finding.layer == "9.1" if words == "gradient is cut" else finding.layer == "8"
    assert words in finding.why, finding.why
    assert finding.severity in ("low", "medium")
    assert finding.remedies


def test_running_statistics_in_a_training_pass_are_named() -> None:
    with networks.drawn_from(0):
        model = networks.mlp(4, 64, normalization=nn.BatchNorm1d)
        inputs = torch.randn(24, 64)
        assert found(model, inputs) == []
        model[1].eval()
        (finding,) = found(model, inputs, mode="keep")
        assert found(model, inputs, mode="eval") == [], "running statistics are right in evaluation"
    assert finding.layer == "1"
    assert "running statistics" in finding.why


def test_half_precision_that_loses_the_gradient_is_named() -> None:
    with networks.drawn_from(0):
        (finding,) = found(networks.mlp(24, 64).half(), torch.randn(24, 64).half())
    assert "float16" in finding.why


def test_a_layer_shared_by_two_inputs_is_no_disagreement() -> None:
    """Independent paths through one weight are what theory describes; a weight behind itself is not."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(32, 64), nn.Linear(128, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.body(x[:, :32]), self.body(x[:, 32:])], 1))

    with networks.drawn_from(0):
        assert found(Siamese(), torch.randn(24, 64)) == []


def test_a_cut_that_a_skip_leads_around_is_named_all_the_same() -> None:
    """The stream keeps its gradient, so that none is zero: the graph of autograd tells."""

    class Branch(nn.Module):
        def __init__(self, *, cut: bool) -> None:
            super().__init__()
            self.cut, self.up, self.down = cut, nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x.detach() if self.cut else x)))

    with networks.drawn_from(0):
        inputs = torch.randn(16, 64)
        whole, cut = (
            nn.Sequential(nn.Linear(64, 64), *(Branch(cut=some and at == 2) for at in range(4)))
            for some in (False, True)
        )
        assert found(whole, inputs) == []
        (finding,) = found(cut, inputs)
        whole.requires_grad_(False)
        whole[-1].requires_grad_(True)
        assert found(whole, inputs) == [], "frozen layers are no cut"
    assert finding.layer == "3.up"
    assert "no gradient goes back" in finding.why


def test_a_few_masked_units_are_named() -> None:
    with networks.drawn_from(0):
        model = networks.mlp(6, 64)
        with torch.no_grad():
            model[8].weight[:5] = 0
        (finding,) = found(model, torch.randn(24, 64))
    assert finding.layer == "8"
    assert "exactly zero for 5 of 64 units" in finding.why


def test_queries_that_start_at_zero_are_a_note() -> None:
    with networks.drawn_from(0):
        model = networks.mlp(6, 64)
        with torch.no_grad():
            model[8].weight[:32] = 0  # as one of two projections in one matrix
        (finding,) = found(model, torch.randn(24, 64))
    assert (finding.layer, finding.severity) == ("8", "low")


class InPlace(torch.nn.Module):
    """Adds to the output of a linear map in place, which loses the gradient at that output to a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(32, 32) for _ in range(3))
        self.table = torch.nn.Parameter(torch.randn(6, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += self.table
        return self.third(torch.relu(self.second(y)))  # type: ignore[no-any-return]


def test_a_gradient_that_was_not_measured_is_not_zero_where_the_weights_have_one() -> None:
    torch.manual_seed(0)
    report = sounding.check(InPlace(), torch.randn(16, 6, 32), theory=True)
    assert "first" in {item.name for item in report.unmeasured if item.reason.startswith("gradient")}
    assert not [finding for finding in report.verdict.findings if finding.severity != "low"]
