"""Rules that faults of networks written by others asked for: each fault with its sound twin, which has no finding of
the kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import sounding
from sounding.probe.records import Finding


def findings(network: nn.Module, inputs: Tensor, kind: str, targets: Tensor | None = None) -> list[Finding]:
    found = sounding.check(network, inputs, targets, tier="fast").verdict.findings
    return [finding for finding in found if finding.kind == kind]


class Block(nn.Module):
    def __init__(self, skip: float = 1.0) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        branch = self.second(torch.relu(self.first(self.norm(x))))
        return branch if self.skip == 0 else self.skip * x + branch


def residual(*skips: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(skip) for skip in skips), nn.Linear(32, 4))


def test_a_block_without_the_shortcut_of_its_siblings_is_named() -> None:
    inputs = torch.randn(16, 32)
    assert not findings(residual(1, 1, 1, 1, 1, 1), inputs, "odd_branch")
    (found,) = findings(residual(1, 1, 1, 0, 1, 1), inputs, "odd_branch")
    assert found.layer == "3"
    assert not findings(residual(1, 0, 1, 0, 1, 1), inputs, "odd_branch")  # then it is a pattern


def test_a_stream_that_every_block_multiplies_is_named() -> None:
    (found,) = findings(residual(*[2.0] * 6), torch.randn(16, 32), "odd_branch")
    assert found.found == "2"
    assert found.evidence["stream_growth"] > 100


class Skipping(nn.Module):
    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.down, self.deep, self.up, self.cut = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(64, 4), cut

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.down(x))
        deep = torch.relu(self.deep(skip))
        return self.up(torch.cat([deep, skip.detach() if self.cut else skip], 1))  # type: ignore[no-any-return]


def test_a_skip_that_is_detached_is_said_though_every_weight_gets_a_gradient() -> None:
    inputs = torch.randn(16, 32)
    assert not findings(Skipping(cut=False), inputs, "detached")
    (found,) = findings(Skipping(cut=True), inputs, "detached")
    assert (found.layer, found.severity) == ("up", "low")


class Cell(nn.Module):
    """A GRU, or an LSTM without peepholes, written out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, count = kind, {"lstm": 4, "gru": 2}[kind]
        self.gates, self.new, self.head = nn.Linear(40, 32 * count), nn.Linear(40, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(len(x), 32)
        for step in x.unbind(1):
            if self.kind == "lstm":
                i, f, g, o = self.gates(torch.cat([step, state], -1)).chunk(4, -1)
                cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
                state = o.sigmoid() * cell.tanh()
            else:
                reset, update = self.gates(torch.cat([step, state], -1)).sigmoid().chunk(2, -1)
                new = self.new(torch.cat([step, reset * state], -1)).tanh()
                state = (1 - update) * new + update * state
        return self.head(state)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "gate", "shuts"), [("lstm", 1, True), ("lstm", 3, True), ("gru", 1, True), ("gru", 0, False)]
)
def test_gates_of_a_cell_that_is_written_out_are_looked_at(kind: str, gate: int, shuts: bool) -> None:
    torch.manual_seed(0)
    network, inputs = Cell(kind), torch.randn(16, 10, 8)
    assert not findings(network, inputs, "shut_gates")
    with torch.no_grad():
        network.gates.bias[32 * gate : 32 * (gate + 1)] = -8.0
    found = findings(network, inputs, "shut_gates")
    assert [one.severity for one in found] == (["high"] if shuts else [])
    if not shuts:
        return
    assert found[0].layer in ("gates", "new")
    assert "time_gradient_log_rate" in found[0].evidence


def weights(normalize: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (normalize(nn.Linear(32, 32)), nn.ReLU())]
    return nn.Sequential(*parts)


def test_a_weight_behind_weight_norm_is_judged_as_it_multiplies() -> None:
    network = weights(weight_norm)
    assert not sounding.audit(network).findings
    with torch.no_grad():
        network[6].parametrizations.weight.original0.mul_(30)
        network[2].bias.fill_(50.0)
    found = {(one.kind, one.parameter) for one in sounding.audit(network).findings}
    assert found == {("odd_scale", "6.weight"), ("large_bias", "2.bias")}


def test_a_parametrization_with_a_state_is_left_as_it_is() -> None:
    network = weights(spectral_norm)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    sounding.audit(network)
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())


def test_one_tensor_in_two_layers_is_named_and_a_tied_output_is_not() -> None:
    network = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    network[1].weight = network[0].weight
    (found,) = sounding.audit(network).findings
    assert (found.kind, found.severity) == ("cloned_weights", "low")
    words = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    nn.init.normal_(words[0].weight, std=0.02)
    words[1].weight = words[0].weight
    assert not sounding.audit(words).findings


def test_layers_that_all_follow_the_other_fan_are_named() -> None:
    torch.manual_seed(0)
    sizes = (32, 128, 32, 128, 32, 128, 32)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for mode, kinds in (("fan_in", set()), ("fan_out", {"fans_exchanged"})):
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="linear")
        assert {one.kind for one in sounding.audit(nn.Sequential(*layers)).findings} == kinds


class Positions(nn.Module):
    def __init__(self, std: float) -> None:
        super().__init__()
        self.pos, self.head = nn.Parameter(std * torch.randn(1, 16, 32)), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.pos).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("std", "severities"), [(0.0, []), (1e-6, []), (1.0, []), (30.0, ["medium"])])
def test_positions_that_drown_what_they_are_added_to_are_named(std: float, severities: list[str]) -> None:
    found = sounding.audit(Positions(std)).findings
    assert [one.severity for one in found] == severities


class Gated(nn.Module):
    """A branch times a gate of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.head = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 4)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate(x) * self.body(x))  # type: ignore[no-any-return]


def test_two_factors_of_zero_never_learn_and_one_does() -> None:
    network, inputs = Gated(), torch.randn(16, 32)
    assert not [one for one in findings(network, inputs, "behind_zeros") if one.severity != "low"]
    nn.init.zeros_(network.body.weight)
    nn.init.zeros_(network.body.bias)
    stuck = [one for one in findings(network, inputs, "behind_zeros") if one.severity == "medium"]
    assert [one.parameter for one in stuck] == ["body.weight"]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()
    assert not network.body.weight.any()
    assert not network.gate.weight.any()


def test_a_recurrent_matrix_is_applied_at_every_step() -> None:
    network = nn.LSTM(8, 32)
    assert not sounding.audit(network).findings
    with torch.no_grad():
        network.weight_hh_l0.mul_(20 / math.sqrt(3))
    (found,) = sounding.audit(network).findings
    assert (found.severity, found.parameter) == ("medium", "weight_hh_l0")


class Branching(nn.Module):
    """Blocks whose four layers stand side by side: the gradient rises and falls from call to call, and not with depth.

    What the last block adds to its stream is read by nobody, as in WaveNet, where the sum of all skips is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(128, 128) for _ in range(4)) for _ in range(4))
        self.first, self.last = nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for filtered, gate, onwards, skip in self.blocks:  # type: ignore[misc]
            hidden = torch.tanh(filtered(x)) * torch.sigmoid(gate(x))
            x, total = x + onwards(hidden), total + skip(hidden)
        return self.last(torch.relu(self.first(torch.relu(total))))


def test_branches_side_by_side_are_no_growth_of_the_gradient() -> None:
    torch.manual_seed(0)
    assert not findings(Branching(), torch.randn(128, 128), "gradient_explosion", torch.randint(10, (128,)))
