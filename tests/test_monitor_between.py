"""What a monitor sees between modules: the numbers of a check, in the first pass of measured steps, and no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sounding
from sounding.probe.inside.rows import HEADS, INSIDE
from sounding.train.monitor import Monitor
from tolerance import TOLERANCE

TOKENS = torch.arange(96).reshape(8, 12) % 50


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(50, 32), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(32, 10)
    )


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def step(model: nn.Module, monitor: Monitor, inputs: Tensor = TOKENS, *, passes: int = 1) -> None:
    model.zero_grad()
    for _ in range(passes):
        loss_of(model(inputs), torch.zeros(inputs.shape[:2], dtype=torch.long)).backward()
    monitor.step()


def between(profile: sounding.Profile, source: str) -> dict[tuple[str, str], float]:
    wanted = INSIDE - frozenset(HEADS)
    return {(row.name, row.measure): row.value for row in profile if row.measure in wanted and row.source == source}


def test_numbers_are_those_of_a_check() -> None:
    model = transformer()
    targets = torch.zeros_like(TOKENS)
    report = sounding.check(model, TOKENS, targets, loss=loss_of, tier="fast", theory=False)
    with Monitor(model, every=1) as monitor:
        step(model, monitor)
    weighs = {report.reading.layers[depth - 1].name for depth in report.profile.settings["weight_layers"]}
    expected = between(report.profile, "check")
    found = between(monitor.profile, "step 0")
    assert {measure for _, measure in found} >= {"attention_entropy", "branch_over_stream", "headroom_bits"}
    assert set(found) == {
        (name, measure) for name, measure in expected if not measure.endswith(("log2", "bits")) or name in weighs
    }
    assert found == pytest.approx({key: expected[key] for key in found}, rel=TOLERANCE.float32_forward)


def test_attention_that_collapses_is_told_once_and_goes_after_three_measured_steps() -> None:
    model = transformer()
    with Monitor(model, every=1, inside="always") as monitor:
        step(model, monitor)
        with torch.no_grad():
            for layer in model[1].layers:
                layer.self_attn.in_proj_weight.mul_(40.0)
        step(model, monitor)
        step(model, monitor)
        with torch.no_grad():
            for layer in model[1].layers:
                layer.self_attn.in_proj_weight.div_(40.0)
        for _ in range(3):
            step(model, monitor)
    told = [(event.step, event.change) for event in monitor.findings if event.kind == "entropy_collapse"]
    assert told == [(1, "appeared"), (5, "gone")]
    assert "attention looks at few keys" in str(next(e for e in monitor.findings if e.kind == "entropy_collapse"))


def test_one_of_ten_measured_steps_is_listened_to_and_what_it_found_stays() -> None:
    model = transformer()
    with torch.no_grad():
        for layer in model[1].layers:
            layer.self_attn.in_proj_weight.mul_(40.0)
    listened = []
    with Monitor(model, every=1) as monitor:
        for number in range(14):
            if number == 2:
                with torch.no_grad():
                    for layer in model[1].layers:
                        layer.self_attn.in_proj_weight.div_(40.0)
            step(model, monitor)
            seen = between(monitor.profiles[number], f"step {number}")
            assert any(measure == "headroom_bits" for _, measure in seen)
            if any(measure == "attention_entropy" for _, measure in seen):
                listened.append(number)
    assert listened == [0, 10]
    told = [(event.step, event.change) for event in monitor.findings if event.kind == "entropy_collapse"]
    assert told == [(0, "appeared"), (12, "gone")]  # step 10 sees that it is gone, and news waits for three steps


class Counting(nn.Module):
    """Notes how many dispatch modes are on while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch._C._len_torch_dispatch_stack())
        return self.inner(x)


def test_a_perceptron_is_listened_to_once_and_only_the_first_micro_batch_of_a_step() -> None:
    model = nn.Sequential(Counting(), nn.Linear(4, 3))
    with Monitor(model, every=2) as monitor:
        for _ in range(3):
            step(model, monitor, torch.randn(5, 2, 4), passes=2)
    assert model[0].modes == [1, 0, 0, 0, 0, 0]
    assert {("1", "headroom_bits"), ("0.inner", "largest_log2")} <= set(between(monitor.profiles[2], "step 2"))


def test_nobody_listens_who_was_not_asked() -> None:
    model = nn.Sequential(Counting(), nn.Linear(4, 3))
    with Monitor(model, every=1, inside=False) as monitor:
        step(model, monitor, torch.randn(5, 2, 4))
    assert model[0].modes == [0]
    assert not between(monitor.profile, "step 0")


class Failing(nn.Module):
    """Raises what it is given in place of an output."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_pass_that_fails_leaves_no_mode_behind(error: BaseException) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Failing(error))
    with pytest.raises(type(error)), Monitor(model, every=1):
        model(torch.randn(3, 4))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert "forward" not in vars(model)


def test_a_pass_called_past_the_hooks_is_listened_to() -> None:
    model = transformer()
    with Monitor(model, every=1) as monitor:
        loss_of(model.forward(TOKENS), torch.zeros_like(TOKENS)).backward()
        monitor.step()
    assert any(measure == "attention_entropy" for _, measure in between(monitor.profile, "step 0"))


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_numbers_that_nearly_overflow_are_told(narrow: torch.dtype) -> None:
    """Outputs of more than half of the largest number have less than one bit left."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).to(narrow)
    inputs = torch.ones(3, 4, dtype=narrow)

    def kinds(share: float, **options: object) -> list[str]:
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(4) * (share * torch.finfo(narrow).max))
        with Monitor(copy.deepcopy(model), every=1, **options) as monitor:
            (monitor._model(inputs).float() * 1e-3).mean().backward()
            monitor.step()
        return [event.kind for event in monitor.findings]

    assert "headroom_bits" in kinds(0.6)
    assert "headroom_bits" not in kinds(0.4)
    assert "headroom_bits" not in kinds(0.6, limits={"headroom_bits": (None, None)})
