"""Two networks side by side: equal ones say so, a planted difference is found where it is, ports are matched."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import networks
from torch import Tensor, nn

import sounding
from sounding.cli import cli
from sounding.errors import TargetError, UsageError
from sounding.probe.compare import match
from sounding.report.compare import write_compare_html
from tolerance import TOLERANCE

DEPTH = 5
X = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))


def make() -> nn.Sequential:
    with networks.drawn_from(0):
        return nn.Sequential(
            *(part for _ in range(DEPTH) for part in (nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.5))), nn.Linear(12, 3)
        )


class Turned(nn.Module):
    """A linear layer that holds its matrix the other way round, as the transformers library's Conv1D does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.detach().T.clone()), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Port(nn.Module):
    """The network of `make` with other names, activations as functions, and turned matrices."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turned(layer) for layer in model if isinstance(layer, nn.Linear))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = torch.tanh(block(x))
        return self.blocks[-1](x)


def test_a_copy_is_equal_to_the_bit_and_both_stay_as_they_were() -> None:
    a = make()
    b = copy.deepcopy(a)
    before = copy.deepcopy(a.state_dict())
    result = sounding.compare(a, b, X)
    assert result.status == "equal"
    assert result.summary == f"Equal: {2 * DEPTH + 2} outputs agree to the bit."
    assert (result.only_a, result.only_b, result.first) == ((), (), None)
    for model in (a, b):
        assert model.training
        assert not any(module._forward_hooks for module in model.modules())
        assert all(weight.grad is None for weight in model.parameters())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@settings(max_examples=8)
@given(layer=st.integers(0, DEPTH - 1), factor=st.floats(1.01, 3.0))
def test_a_changed_layer_is_the_first_where_they_part(layer: int, factor: float) -> None:
    """Scaling W by f changes it by f − 1 of its size, and nothing in front of it changes at all."""
    a = make()
    b = copy.deepcopy(a)
    changed = b[3 * layer]
    with torch.no_grad():
        changed.weight.mul_(factor)
    result = sounding.compare(a, b, X)
    first = result.first
    assert first is not None
    assert first.a == first.b == str(3 * layer)
    assert first.weights == pytest.approx(factor - 1, rel=TOLERANCE.four_digits)
    assert all(pair.difference == 0 for pair in result.pairs[: result.pairs.index(first)])
    with torch.no_grad():
        inputs = a[: 3 * layer].eval()(X)
        x, y = a[3 * layer](inputs), changed(inputs)
    assert first.difference == pytest.approx(float((x - y).norm() / x.norm()), rel=TOLERANCE.float32_layer)


def test_rounding_is_no_difference_and_a_tolerance_is_yours() -> None:
    a = make()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].weight.mul_(1 + 1e-6)
    assert sounding.compare(a, b, X).status == "same"
    assert sounding.compare(a, b, X, tolerance=0.0).status == "parted"
    assert sounding.compare(a.double(), b.double(), X.double()).status == "parted"  # rounding is 1.5e-8 there
    with pytest.raises(UsageError, match="tolerance of 0 or more, got -1"):
        sounding.compare(a, b, X, tolerance=-1)


def test_another_activation_with_equal_weights() -> None:
    a = make()
    b = copy.deepcopy(a)
    b[4] = nn.ReLU()
    first = sounding.compare(a, b, X).first
    assert first is not None
    assert (first.a, first.weights) == ("4", None)


def test_a_port_is_matched_by_order() -> None:
    """Other names, no activation modules, matrices turned: weights and outputs agree to rounding all the same."""
    a = make()
    result = sounding.compare(a, Port(a), X)
    assert result.status in ("equal", "same")
    assert [(pair.a, pair.b) for pair in result.pairs] == [
        *((str(3 * index), f"blocks.{index}") for index in range(DEPTH + 1)),
        ("output", "output"),
    ]
    assert all(pair.weights == 0 for pair in result.pairs[:-1])
    assert result.only_a == tuple(str(3 * index + 1) for index in range(DEPTH))
    assert "Only in the first: '1', '4', '7' and 2 more." in result.summary
    broken = Port(a)
    with torch.no_grad():
        broken.blocks[2].bias = nn.Parameter(broken.blocks[2].bias + 1)
    first = sounding.compare(a, broken, X).first
    assert first is not None
    assert (first.a, first.b) == ("6", "blocks.2")


def test_names_win_over_order() -> None:
    assert match([("p", 1), ("q", 1)], [("q", 1), ("p", 1)]) == [("p", "p"), ("q", "q")]
    assert match([("p", 1)], [("q", 2)]) == []


def test_shapes_that_differ_part_and_nan_is_equal_to_nan() -> None:
    a, wide = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3)), nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 3))
    first = sounding.compare(a, wide, X).first
    assert first is not None
    assert first.difference == math.inf
    with torch.no_grad():
        a[0].weight[0, 0] = math.nan
    assert sounding.compare(a, copy.deepcopy(a), X).status == "equal"


def test_the_network_that_fails_is_named() -> None:
    with pytest.raises(TargetError, match="the second network: the model raised RuntimeError"):
        sounding.compare(make(), nn.Linear(5, 5), X)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["compare", *words])
        return result.exit_code, result.stdout

    small = "mlp,depth=4,width=16"
    code, text = run(small, small, "--json")
    found = json.loads(text)
    assert (code, found["status"], found["first"], found["targets"]) == (0, "equal", None, [small, small])
    code, text = run(small, f"{small},norm=batch", "--html", "page.html")
    assert (code, text.startswith("They part at '1.activation', output 2 of 10: ")) == (1, True)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Side by side" in page
    assert "<code>1.norm</code>" in page
    assert "TARGET" not in page
    assert run(small, "mlp,depth=four")[0] == 2


def test_names_in_the_report_are_escaped(tmp_path: Path) -> None:
    model = nn.ModuleDict({"<b>": nn.Linear(12, 3)})
    model.forward = lambda x: model["<b>"](x)  # type: ignore[method-assign, assignment]
    page = write_compare_html(sounding.compare(model, model, X), tmp_path / "page.html", names=("<i>", "<i>"))
    text = page.read_text("utf-8")
    assert "&lt;b&gt;" in text
    assert "<b>" not in text.partition("<main>")[2].partition("<script")[0]
