"""Rules that ask what a part does, and not what it is called; and the sentences that findings are told in."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.probe.records import SEVERITIES, Finding, FindingKind
from sounding.probe.sentences import sentences
from sounding.start.parameters import acts_as_norm

SOURCE = Path(sounding.__file__).parent


def look(network: nn.Module, inputs: Tensor, targets: Tensor | None = None) -> dict[str, Finding]:
    return {finding.kind: finding for finding in sounding.check(network, inputs, targets).verdict.findings}


class Even(nn.Module):
    """A norm whose name and parameter do not say so, by the root of the mean square of an axis."""

    def __init__(self, width: int, axis: int = -1) -> None:
        super().__init__()
        self.g, self.axis = nn.Parameter(torch.ones(width)), axis

    def forward(self, x: Tensor) -> Tensor:
        scale = self.g if self.axis == -1 else self.g[:, None, None]
        return scale * x * x.square().mean(self.axis, keepdim=True).add(1e-6).rsqrt()


class Gain(nn.Module):
    """Scales and no norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x


def test_a_norm_is_known_by_what_it_does() -> None:
    assert acts_as_norm(Even(8))
    assert acts_as_norm(Even(8, axis=1))
    assert not acts_as_norm(Gain(8))
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), Even(8))), nn.Linear(8, 3))
    assert "norm_weight" not in {one.kind for one in sounding.audit(model).findings}
    with torch.no_grad():
        model[3].g.fill_(0.1)  # type: ignore[operator, union-attr]
    (found,) = [one for one in sounding.audit(model).findings if one.kind == "norm_weight"]
    assert (found.layer, found.severity) == ("3", "medium")


class Attention(nn.Module):
    """Self-attention in a residual block, with a factor in front of the softmax."""

    def __init__(self, factor: float | None, *, fused: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.factor, self.fused = factor, fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 16)).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, scale=self.factor)
        else:
            scores = q @ k.transpose(-1, -2)
            mixed = (scores if self.factor is None else scores * self.factor).softmax(-1) @ v
        return x + mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("factor", "fused", "raw"), [(None, False, True), (0.25, False, False), (1.0, True, True), (None, True, False)]
)
def test_scores_that_nothing_divides_are_said(factor: float | None, fused: bool, raw: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(factor, fused=fused), Attention(factor, fused=fused), nn.Linear(32, 3))
    found = look(model, torch.randn(8, 10, 32)).get("entropy_collapse")
    assert (found is not None) == raw
    assert found is None or (found.severity, (found.layer or "")[0]) == ("low", "0")


def test_queries_may_be_drawn_smaller_in_place_of_a_division() -> None:
    """T5 does so."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(None), nn.Linear(32, 3))
    with torch.no_grad():
        for part in model[0].query.parameters():  # type: ignore[union-attr]
            part.mul_(0.25)
    assert "entropy_collapse" not in look(model, torch.randn(8, 10, 32))


class Loop(nn.Module):
    """A recurrent cell that is written out: half of its state is kept at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new, self.head = nn.Linear(38, 32), nn.Linear(38, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for step in x.unbind(1):
            joined = torch.cat([step, state], -1)
            kept = self.gate(joined).sigmoid()
            state = kept * state + (1 - kept) * self.new(joined).tanh()
        return self.head(state)  # type: ignore[no-any-return]


def test_what_fades_over_the_steps_of_a_loop_is_no_depth() -> None:
    torch.manual_seed(0)
    report = sounding.check(Loop(), torch.randn(16, 60, 6), torch.arange(16) % 3)
    assert "gradient_vanishing" not in {one.kind for one in report.verdict.findings}


def test_batch_norms_left_in_evaluation_mode_are_said() -> None:
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(16, 3))
    inputs = torch.randn(32, 16)
    assert "huge_signal" not in look(model, inputs)
    model[4].eval()
    found = look(model, inputs)["huge_signal"]
    assert (found.layer, found.severity) == ("4", "medium")
    assert not model[4].training
    model[4].num_batches_tracked.fill_(100)  # type: ignore[operator, union-attr]
    assert "huge_signal" not in look(model, inputs)  # a part that was trained before may rest
    model[4].num_batches_tracked.zero_()  # type: ignore[operator, union-attr]
    assert "huge_signal" not in look(model.eval(), inputs)


def test_signals_beyond_float16_are_said_though_a_norm_brings_them_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    with torch.no_grad():
        model[1].weight.mul_(1e6)
    found = look(model, torch.randn(32, 16))["huge_signal"]
    assert (found.layer, found.severity) == ("1", "low")
    assert "65504" in found.why


def keys_in_use() -> set[str]:
    """The texts that the rules name sentences by."""
    paths = (*(SOURCE / "start").rglob("*.py"), *(SOURCE / "probe").rglob("*.py"))
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_sentence_is_used_whole_and_of_a_known_kind() -> None:
    used = keys_in_use()
    for key, said in sentences().items():
        assert key in used, f"no rule tells {key}"
        assert said.kind in get_args(FindingKind)
        assert said.severity in SEVERITIES
        assert said.why.endswith(".") or said.why.endswith("}")
        for text in (said.why, said.expected, said.found, *said.remedies):
            assert all(name != "" for _, name, _, _ in Formatter().parse(text)), f"{key} has an empty pair of braces"


def test_gates_of_both_directions_are_looked_at() -> None:
    torch.manual_seed(0)
    model = Both()
    inputs = torch.randn(16, 12, 6)
    assert "shut_gates" not in look(model, inputs)
    with torch.no_grad():
        model.rnn.bias_ih_l1_reverse[8:16] = -8.0
    found = look(model, inputs)["shut_gates"]
    assert (found.layer, found.severity) == ("rnn layer 1 backward", "high")


class Both(nn.Module):
    """A recurrent network of two layers and two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("depth", "first", "said"), [(16, False, True), (16, True, False), (4, False, False)])
def test_deep_stacks_with_norms_behind_their_sums_are_said(depth: int, first: bool, said: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=first) for _ in range(depth)]
    found = look(nn.Sequential(*layers, nn.Linear(16, 3)), torch.randn(8, 6, 16)).get("odd_branch")
    assert (found is not None and "post-norm" in found.why) == said


class Rows(nn.Module):
    """A picture whose places are read one by one, by moving its channels last or by a mere view."""

    def __init__(self, *, moved: bool) -> None:
        super().__init__()
        self.make, self.read, self.moved = nn.Conv2d(3, 8, 3), nn.Linear(8, 5), moved

    def forward(self, x: Tensor) -> Tensor:
        maps = self.make(x)
        rows = maps.movedim(1, -1).reshape(-1, 8) if self.moved else maps.view(-1, 8)
        return self.read(rows.relu()).view(len(x), -1, 5).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("moved", [True, False])
def test_a_view_in_the_place_of_a_transpose_is_said(moved: bool) -> None:
    torch.manual_seed(0)
    found = look(Rows(moved=moved), torch.randn(16, 3, 8, 8))
    assert ("wrong_axis" in found) != moved
    assert moved or found["wrong_axis"].severity == "medium"
