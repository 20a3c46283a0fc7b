"""No false refusal: what foreign modules ask of their inputs, and layers whose calls go past hooks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from tests import guests_shy as shy
from tests import guests_weights as weights
from tests.guests import meet, rows, world
from torch import Tensor, nn

import sounding
from sounding.errors import UsageError
from sounding.train.monitor import Monitor
from tolerance import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("name", ["ByForward", "HalfByForward"])
def test_layers_called_by_forward_are_seen_as_if_they_were_called(name: str) -> None:
    """The calls, and their numbers, are those of the same network whose layers are called."""

    class Called(shy.ByForward):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.act(layer(x))
            return x

    model, inputs = meet(name)
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, shy.ByForward):
            module.__class__ = Called
    found, expected = (sounding.check(net, inputs).profile for net in (model, twin))
    assert [(row.layer, row.name, row.measure) for row in found] == [
        (row.layer, row.name, row.measure) for row in expected
    ]
    assert [row.value for row in found] == pytest.approx([row.value for row in expected], nan_ok=True)
    with sounding.watch(model) as watched:
        model(inputs).sum().backward()
        clone = copy.deepcopy(model)  # a copy made meanwhile runs on its own weights
    seen = {row.name for row in watched.profile.select("gradient_log_norm")}
    assert seen >= {"layers.0" if name == "ByForward" else "two.layers.0"}
    with torch.no_grad():
        for weight in clone.parameters():
            weight.zero_()
    assert not clone(inputs).any()
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_monitor_sees_layers_called_by_forward() -> None:
    """Such calls pass a layer's hooks by; the numbers are those of the network whose layers are called."""

    class Past(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer.forward(x)
            return x

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model, inputs = Past(*copy.deepcopy(plain)), torch.randn(32, 16)
    found = []
    for net in (plain, model):
        with Monitor(net) as monitor:
            net(inputs).square().mean().backward()
            clone = copy.deepcopy(net)
            monitor.step()
            assert not monitor.unmeasured
        found.append([(row.layer, row.name, row.measure, row.value) for row in monitor.profile])
        assert all("forward" not in vars(module) for module in net.modules())
        nn.init.zeros_(clone[0].weight)  # a copy made meanwhile runs on its own weights
        assert not torch.equal(clone(inputs), net(inputs))
    assert found[0] == found[1]


def test_watches_inside_each_other_see_each_call_once() -> None:
    model, inputs = meet("HalfByForward")
    before = world()
    outer, inner = sounding.watch(model), sounding.watch(model)
    with outer:
        inner.__enter__()
        model(inputs)
        model.forward(inputs)
    model(inputs)  # the outer one has gone first and hears nothing more
    inner.__exit__(None, None, None)
    assert world() == before
    counts = [watched.profile.settings["repeats"] for watched in (outer, inner)]
    assert counts == [2, 3]
    assert not any("#" in row.name for row in outer.profile if not row.name.startswith("two.act"))
    assert all("forward" not in vars(module) for module in model.modules())


def test_gradients_of_a_model_that_takes_plain_inputs_only() -> None:
    model, inputs = meet("CallsNumpy")
    report = sounding.check(model, inputs)
    assert {row.name for row in report.profile.select("gradient_log_norm")} >= {"body.0", "body.2"}
    assert report.profile.select("weight_gradient_log_norm", name="body.0.weight")
    saliency, inputs = meet("Saliency")
    assert sounding.check(saliency, inputs).profile.select("weight_gradient_log_norm", name="body.0.weight")


def test_masks_do_not_speak_for_the_samples() -> None:
    """The batch is that of the tokens, not the size of the mask that stands in front."""
    model, inputs = meet("masked tokens")
    report = sounding.check(model, inputs)
    assert {row.name for row in report.profile.select("participation_ratio")} >= {"embedding", "body.head"}
    assert not any(finding.kind == "non_finite" for finding in report.verdict.findings)


def test_the_lone_input_must_still_be_finite() -> None:
    bad = rows()
    bad[0, 0] = -torch.inf
    with pytest.raises(UsageError, match="expected finite inputs, got 1"):
        sounding.check(weights.Host(), bad)


def test_a_function_compiled_inside_a_model_runs_eagerly_while_it_is_watched() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)
            self.fast = torch.compile(self.slow, backend="eager", fullgraph=True)

        def slow(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body.forward(x))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fast(x)
            return result

    model = Inside()
    model(rows())
    report = sounding.check(model, rows())
    assert report.profile.select("gradient_log_norm", name="body")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_are_cut_into_repeats(layout: torch.layout) -> None:
    """The numbers of a layer behind them are those of the same inputs stored densely."""
    model, inputs = shy.BagOfWords(), torch.randn(16, 6).relu()
    dense = sounding.check(model, inputs, loss=torch.sum, repeats=2).profile
    sparse = sounding.check(model, inputs.to_sparse(layout=layout), loss=torch.sum, repeats=2).profile
    for measure in ("mean_square", "gradient_log_norm"):
        found, expected = (p.select(measure, name="head").rows[0].value for p in (sparse, dense))
        assert found == pytest.approx(expected, rel=TOLERANCE.float32_forward)
