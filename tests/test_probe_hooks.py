"""Hooks without handles: where torch keeps them, beside those of others, and gone afterwards."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sounding
from sounding.probe.hooks import Hooks
from sounding.probe.inside.guest import GuestTap
from sounding.probe.tap import Tap
from tolerance import TOLERANCE


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Double(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return Doubled.apply(rows)  # type: ignore[no-untyped-call,no-any-return]


class Halves(nn.Module):
    """Its output is the second of two that one operation gives, and is changed in place by whoever gets it."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.unbind(rows.view(len(rows), 2, -1), dim=1)[1].clone()


def gradients_of(watched: sounding.probe.watch.Watched) -> dict[str, float]:
    return {row.name: row.value for row in watched.profile.select("gradient_log_norm").rows}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Double(), nn.Linear(8, 8), Halves(), nn.ReLU(inplace=True))


def test_gradients_are_those_that_torchs_own_hooks_see() -> None:
    model, rows = network(), torch.randn(5, 6)
    seen: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            output.register_hook(lambda gradient: seen.__setitem__(name, float(gradient.norm().log())))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_children()]
    with sounding.watch(model) as outer, sounding.watch(model, tier="full") as inner:
        model(rows).square().sum().backward()
    for handle in handles:
        handle.remove()
    assert seen.keys() == gradients_of(outer).keys()
    for found in (gradients_of(outer), gradients_of(inner)):
        assert found == pytest.approx(seen, rel=TOLERANCE.float32_forward)
    alone = network()
    with sounding.watch(alone) as single:
        alone(rows).square().sum().backward()
    assert gradients_of(single) == pytest.approx(seen, rel=TOLERANCE.float32_forward)


def test_the_gradient_of_one_output_alone_is_seen() -> None:
    """A backward pass that stops at a hidden output reaches its hook, though not the operation behind it."""
    model = network()
    with sounding.watch(model) as watched:
        hidden = model[0](torch.randn(5, 6))
        torch.autograd.grad(model[1](hidden).sum(), hidden)
    assert gradients_of(watched).keys() == {"0", "1"}


def test_what_torch_stores_is_as_before() -> None:
    model = network()
    weight, called = model[0].weight, []
    own = weight.register_hook(lambda gradient: called.append(gradient))
    before = {name: list(module._forward_hooks.values()) for name, module in model.named_modules()}
    hooks_before = list(weight._backward_hooks.values())  # type: ignore[attr-defined]

    def body() -> None:
        with sounding.watch(model):
            model(torch.randn(5, 6)).sum().backward()
            assert len(weight._backward_hooks) == 2  # type: ignore[attr-defined]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert {name: list(module._forward_hooks.values()) for name, module in model.named_modules()} == before
    assert list(weight._backward_hooks.values()) == hooks_before  # type: ignore[attr-defined]
    assert all(not parameter._backward_hooks for parameter in model[3].parameters())
    own.remove()
    assert len(called) == 1


def test_groups_do_not_take_off_each_others_hooks() -> None:
    module, weight = nn.Identity(), nn.Parameter(torch.ones(3))
    first, second = Hooks(), Hooks()
    calls: list[str] = []
    for name, hooks in (("first", first), ("second", second)):
        hooks.on_call(module, lambda *_, name=name: calls.append(f"{name} call"))
        hooks.on_weight(weight, lambda _, name=name: calls.append(f"{name} weight"))
    first.remove()
    first.remove()
    module(weight).sum().backward()
    assert calls == ["second call", "second weight"]


def test_a_tensor_of_another_class_keeps_its_own_way() -> None:
    class Odd(Tensor):
        pass

    weight = torch.ones(3).as_subclass(Odd).requires_grad_()
    hooks, seen = Hooks(), []
    hooks.on_weight(weight, lambda gradient: seen.append("weight"))
    output = weight * 2
    hooks.on_output(output, lambda gradient: seen.append("output"))
    output.sum().backward()
    hooks.remove()
    (weight * 2).sum().backward()
    assert seen == ["output", "weight"]


def test_a_check_is_forgotten_without_the_garbage_collector() -> None:
    """What a check recorded goes with its report: a loop of checks would else hold the records of many."""
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(6, 8)
    sounding.check(model, inputs)
    gc.collect()
    gc.disable()
    try:
        # other tests of this process may still hold the graphs, and with them the taps, of theirs
        before = {id(one) for one in gc.get_objects() if type(one) is Tap or type(one) is GuestTap}
        sounding.check(model, inputs)
        left = [one for one in gc.get_objects() if type(one) is Tap or type(one) is GuestTap]
    finally:
        gc.enable()
    assert not [one for one in left if id(one) not in before]
