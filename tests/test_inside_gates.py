"""Gates, routers, mixed samples and the range of number formats, each by a second route."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import sounding
from sounding.probe.inside.gates import _unroll, _weights
from sounding.probe.inside.precision import FORMATS, headroom
from tolerance import TOLERANCE

WIDTH, STEPS, SAMPLES = 8, 6, 16


@pytest.fixture(autouse=True)
def one_stream() -> Any:
    with networks.drawn_from(0):
        yield


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.body, self.head = kind(WIDTH, WIDTH, batch_first=True, **options), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])  # type: ignore[no-any-return]


def values(report: Any) -> dict[tuple[str, str], float]:
    return {(row.name, row.measure): row.value for row in report.profile.rows}


def kinds(report: Any) -> dict[str, Any]:
    return {finding.kind: finding for finding in report.verdict.findings}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_unrolled_steps_are_torchs(kind: Any) -> None:
    """The gates are computed again; so are the outputs, which torch knows."""
    module = kind(WIDTH, WIDTH, num_layers=2)
    steps = torch.randn(STEPS, SAMPLES, WIDTH)
    found = steps
    with torch.no_grad():
        for layer in range(2):
            _, found = _unroll(kind.__name__, found, _weights(module, f"l{layer}"))
        expected = module(steps)[0]
    assert torch.allclose(found, expected, atol=TOLERANCE.float32_forward)


@pytest.mark.parametrize(
    ("kind", "gate", "name"),
    [(nn.LSTM, 1, "forget"), (nn.LSTM, 0, "input"), (nn.LSTM, 3, "output"), (nn.GRU, 1, "update")],
)
def test_a_shut_gate_is_found_and_named(kind: Any, gate: int, name: str) -> None:
    """σ(−10) = 4.5e-5 in the mean; the gradient through time of a forgetful layer falls steeply."""
    model, inputs = Recurrent(kind, num_layers=2), torch.randn(SAMPLES, STEPS, WIDTH)
    sound = sounding.check(model, inputs, theory=False)
    assert "shut_gates" not in kinds(sound)
    with torch.no_grad():
        for bias in (model.body.bias_ih_l1, model.body.bias_hh_l1):
            bias[gate * WIDTH : (gate + 1) * WIDTH] = -5.0
    report = sounding.check(model, inputs, theory=False)
    finding = kinds(report)["shut_gates"]
    assert finding.layer == "body layer 1"
    assert f"The {name} gates" in finding.why
    assert finding.severity == "high"
    assert values(report)["body layer 1", f"{name}_gate_mean"] < 1e-3
    if name in ("forget", "update"):
        rates = [values(one)["body layer 0", "time_gradient_log_rate"] for one in (report, sound)]
        assert rates[0] < rates[1] < 0


def test_cells_show_their_gates_too() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(len(x), WIDTH)
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state

    found = values(sounding.check(Loop(), torch.randn(SAMPLES, 3, WIDTH), theory=False))
    assert {0.4 < found[name, "update_gate_mean"] < 0.6 for name in ("cell", "cell#2", "cell#3")} == {True}


class Experts(nn.Module):
    """Tokens to the `each` experts that a router prefers."""

    def __init__(self, each: int, experts: int = 4) -> None:
        super().__init__()
        self.each, self.router = each, nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(self.each) if self.each > 1 else logits.max(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return x + out


@pytest.mark.parametrize("each", [1, 2])
def test_the_load_of_experts_is_counted(each: int) -> None:
    """Against a count by hand; then a bias that sends all tokens to the same experts."""
    model, inputs = Experts(each), torch.randn(64, WIDTH)
    counts = torch.bincount(model.router(inputs).topk(each).indices.flatten(), minlength=4)
    report = sounding.check(model, inputs, theory=False)
    assert values(report)["router", "expert_load_max"] == pytest.approx(float(counts.max()) / (64 * each) * 4)
    assert "router_collapse" not in kinds(report)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([200.0, 100.0, 0.0, 0.0]))
    finding = kinds(sounding.check(model, inputs, theory=False))["router_collapse"]
    assert finding.layer == "router"
    assert finding.evidence["dead_expert_fraction"] == 1 - each / 4
    assert finding.evidence["favoured_share"] == 1


class Graph(nn.Module):
    """Nodes that see their neighbours, by a matrix or along edges."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        nodes = len(x)
        if self.way == "matrix":
            x = (torch.eye(nodes) + torch.eye(nodes).roll(1, 0)) @ self.first(x)
        elif self.way == "edges":
            source, target = torch.arange(2 * nodes) % nodes, (torch.arange(2 * nodes) + 1) % nodes
            inner = self.first(x)
            x = torch.zeros_like(inner).index_add(0, target, inner[source])
        else:
            x = self.first(x)
        return self.second(x.relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("way", "mixed"), [("matrix", True), ("edges", True), ("none", False)])
def test_rows_that_meet_are_said_to(way: str, mixed: bool) -> None:
    found = kinds(sounding.check(Graph(way), torch.randn(12, WIDTH), theory=False))
    assert ("mixed_samples" in found) == mixed
    if mixed:
        assert found["mixed_samples"].severity == "low"


def test_sizes_and_headroom_are_those_of_the_tensors() -> None:
    """Outputs of 2^k, gradients of 2^-k: exact powers, so exact logarithms; torch's own limits of the formats."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(WIDTH) * 2.0**17)
    report = sounding.check(model, torch.ones(4, WIDTH), loss=lambda output: output.sum() * 2.0**-20, theory=False)
    found = {measure: value for (name, measure), value in values(report).items() if name == "0"}
    assert found["largest_log2"] == found["weight_largest_log2"] == 17
    assert found["gradient_median_log2"] == found["gradient_largest_log2"] == -20
    assert headroom(found)["float16"] == pytest.approx(math.log2(65504) - 17)
    for name, kind in (("float16", torch.float16), ("bfloat16", torch.bfloat16), ("float8 e5m2", torch.float8_e5m2),
                       ("float8 e4m3", torch.float8_e4m3fn)):  # fmt: skip
        low, high = FORMATS[name]
        assert 2**high == pytest.approx(torch.finfo(kind).max)
        assert 2**low == pytest.approx(torch.finfo(kind).smallest_normal * torch.finfo(kind).eps)
