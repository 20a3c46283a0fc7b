"""What the optimizer does to each layer, and news that does not flicker."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import SEVERITIES, Finding, Severity
from sounding.train.monitor import Monitor
from sounding.train.monitor.changes import HELD, Changes
from sounding.train.monitor.moved import SAMPLE
from tolerance import TOLERANCE


def ratios(model: nn.Module, inputs: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The measured ratios of one step."""
    with Monitor(model, every=1, optimizer=optimizer) as monitor:
        optimizer.zero_grad()
        output = model(inputs)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()
    return {row.name: row.value for row in monitor.profile.rows if row.measure == "update_ratio"}


def test_the_ratio_of_sgd_is_the_rate_times_the_gradient_over_the_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(56, 3))
    model[2] = nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 4, 3))
    sizes = {name: weight.detach().norm() for name, weight in model.named_parameters()}
    found = ratios(model, torch.randn(10, 8), torch.optim.SGD(model.parameters(), lr=0.5))
    expected = {
        name.removesuffix(".weight"): float(0.5 * weight.grad.norm() / sizes[name])
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and weight.grad is not None
    }
    assert found == pytest.approx(expected, rel=TOLERANCE.four_digits)
    assert set(found) == {"0", "2.1", "4"}


def test_a_sample_of_a_large_matrix_tells_the_ratio() -> None:
    """Two root mean squares of 4096 Gaussian entries each: five of their standard errors."""
    torch.manual_seed(0)
    model = nn.Linear(600, 500, bias=False)
    nn.init.normal_(model.weight)
    assert model.weight.numel() > 10 * SAMPLE
    size = float(model.weight.detach().norm())
    found = ratios(model, torch.randn(64, 600), torch.optim.SGD(model.parameters(), lr=1.0))
    assert model.weight.grad is not None
    exact = float(model.weight.grad.norm()) / size
    assert found["model"] == pytest.approx(exact, rel=5 / math.sqrt(SAMPLE))


def test_parameters_of_a_module_count_together_at_its_last_call() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.dim() > 1}

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.attention(x, x, x)[0]
            again: torch.Tensor = self.attention(y, y, y)[0]
            return again

    whole = Self()
    found = ratios(whole, torch.randn(4, 5, 16), torch.optim.SGD(whole.parameters(), lr=1.0))
    moved = sum(float((model.get_parameter(name).detach() - old).norm()) ** 2 for name, old in before.items())
    size = sum(float(old.norm()) ** 2 for old in before.values())
    assert found == pytest.approx({"attention#2": math.sqrt(moved / size)}, rel=TOLERANCE.four_digits)


def test_zero_and_frozen_weights_have_no_ratio_and_lost_updates_are_zero() -> None:
    """A step of 1e-4 of a bfloat16 weight is lost to rounding: the ratio is of what is stored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
    nn.init.zeros_(model[0].weight)
    model[1].weight.requires_grad_(False)
    model.insert(2, Narrow())
    nn.init.ones_(model[3].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    assert ratios(model, torch.randn(4, 8), optimizer) == {"3": 0.0}


class Narrow(nn.Module):
    """The step to bfloat16 between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() * 1e-3


def test_a_large_update_is_told_and_the_line_is_yours() -> None:
    def kinds(rate: float, **options: object) -> set[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        with Monitor(model, every=1, optimizer=optimizer, **options) as monitor:  # type: ignore[arg-type]
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
        return {event.kind for event in monitor.findings}

    assert "update_ratio" in kinds(0.3)
    assert "update_ratio" not in kinds(1e-3)
    assert "update_ratio" in kinds(1e-3, limits={"update_ratio": (None, 1e-3)})
    assert "update_ratio" not in kinds(0.3, limits={"update_ratio": (None, None)})


EMPTY = Reading(LayerCall(0, "input", {}), (LayerCall(1, "0", {"gradient_log_norm": 0.0}),), {}, {})
ILL = Finding("dead_units", "low", "0", 1, {"dead_fraction": 0.5}, "", "", ())
HEARD = st.sampled_from([None, *SEVERITIES])


@given(st.lists(HEARD, min_size=1, max_size=30))
def test_what_is_told_is_the_worst_of_the_last_steps(severities: list[Severity | None]) -> None:
    """News alone gives the state back, worse news comes at once, and better news only after steps that agree."""
    changes, told = Changes(), None
    for step, severity in enumerate(severities):
        found = [] if severity is None else [replace(ILL, severity=severity)]
        events = changes.since(step, found, EMPTY)
        assert len(events) <= 1
        for event in events:
            told = None if event.change == "gone" else event.severity
        window = [one for one in severities[max(0, step - HELD + 1) : step + 1] if one is not None]
        assert told == min(window, key=SEVERITIES.__getitem__, default=None)


def test_a_number_at_its_line_makes_news_once() -> None:
    """Every second step beyond the line: told when it is crossed, and not again."""
    changes = Changes({"mean_square": (None, 1.0)})
    events = []
    for step in range(20):
        call = LayerCall(1, "0", {"mean_square": 1.1 if step % 2 else 0.9})
        events += changes.since(step, (), replace(EMPTY, layers=(call,)))
    assert [(event.step, event.change) for event in events] == [(1, "appeared")]


def test_what_a_nan_hides_is_not_back_within_its_limit() -> None:
    changes = Changes({"mean_square": (None, 1.0)})
    told = []
    for step, value in enumerate([2.0, *[math.nan] * 5, *[0.5] * 3]):
        call = LayerCall(1, "0", {"mean_square": value})
        told += [(event.step, event.change) for event in changes.since(step, (), replace(EMPTY, layers=(call,)))]
    assert told == [(0, "appeared"), (8, "gone")]
