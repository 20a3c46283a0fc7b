"""Every animal of the zoo: it is checked, what it shows is what was called, and it is left exactly as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import ZOO, Animal
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import sounding
from sounding.errors import TargetError
from sounding.measures import distinct_share, mean_cosine, orthogonality_gap, participation_ratio
from tolerance import TOLERANCE

HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks")]


def bits(tensor: Tensor) -> Any:
    if is_lazy(tensor):
        return "lazy"
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist() if tensor.numel() else []


def picture(model: nn.Module) -> dict[str, Any]:
    """Everything a check must not change, bit for bit; identities where a new equal object would be a change."""
    seen: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        seen[f"parameter {name}"] = (id(parameter), parameter.requires_grad, bits(parameter))
        seen[f"gradient {name}"] = None if gradient is None else (id(gradient), bits(gradient))
    for name, buffer in model.named_buffers():
        seen[f"buffer {name}"] = (id(buffer), bits(buffer))
    for name, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        seen[f"module {name}"] = (id(module), type(module), module.training, repr(attributes))
        seen[f"hooks {name}"] = [len(getattr(module, hooks) or ()) for hooks in HOOKS]
    return seen


def prepare(animal: Animal) -> tuple[nn.Module, Any, Any]:
    """The module, its inputs and targets; every other trainable parameter already has a gradient."""
    torch.manual_seed(0)
    model = animal.build()
    for index, parameter in enumerate(model.parameters()):
        if parameter.requires_grad and not is_lazy(parameter) and index % 2:
            parameter.grad = torch.full_like(parameter, 7.0)
    return model, animal.inputs(), animal.targets()


def without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
    return model


@pytest.mark.parametrize("name", ZOO)
def test_the_check_shows_every_call_and_leaves_no_trace(name: str) -> None:
    animal = ZOO[name]
    model, inputs, targets = prepare(animal)
    before = picture(model)
    report = sounding.check(model, inputs, targets, **animal.options)
    assert picture(model) == before
    profile = report.profile.where(lambda row: row.source == "check")
    measured = profile.select("mean_square").where(lambda row: row.layer > 0)
    assert tuple(row.name for row in measured) == animal.names
    assert [row.layer for row in measured] == sorted(row.layer for row in measured)
    with_gradient = {row.name for row in profile.select("gradient_log_norm")}
    assert set(animal.names) - with_gradient == set(animal.no_gradient)
    reasons = [(item.name, item.reason) for item in report.unmeasured]
    for missing, word in animal.unmeasured:
        assert any(who == missing and word in why for who, why in reasons), reasons
    assert sounding.Profile.from_json(report.profile.to_json()) == report.profile


@pytest.mark.parametrize("name", ZOO)
def test_every_weight_is_measured_or_listed(name: str) -> None:
    """What cannot be measured is listed with the reason, never silently skipped."""
    animal = ZOO[name]
    model, inputs, targets = prepare(animal)
    report = sounding.check(model, inputs, targets, **animal.options)
    rows = {row.name for row in report.profile.select("weight_gradient_log_norm")}
    listed = {item.name for item in report.unmeasured}
    expected = {key.replace("_orig_mod.", "") for key, _ in model.named_parameters()}
    assert expected <= rows | listed


@pytest.mark.parametrize("name", ZOO)
def test_a_model_that_raises_is_left_as_it_was(name: str) -> None:
    """The forward pass ends, then the loss raises: hooks, mode, statistics, gradients, random states are put back."""
    animal = ZOO[name]
    model, inputs, _ = prepare(animal)
    before = picture(model)

    def fail(_output: Any) -> Tensor:
        raise RuntimeError("no")

    with pytest.raises(TargetError, match="the loss raised RuntimeError: no"):
        sounding.check(model, inputs, loss=fail, **animal.options)
    assert picture(model) == before


@pytest.mark.parametrize(
    "name", ["plain", "in place", "convolutions", "transformer", "transformer, time first", "lstm"]
)
def test_forward_measures_equal_those_of_the_plain_outputs(name: str) -> None:
    """Two routes: the hooks' inner products, and the measures of outputs kept by a hook of the test's own."""
    animal = ZOO[name]
    model, inputs, targets = prepare(animal)
    report = sounding.check(model, inputs, targets)
    kept: dict[str, Tensor] = {}
    clone = without_dropout(copy.deepcopy(model))

    def keep(part: nn.Module, _inputs: Any, output: Any) -> None:
        kept[names[part]] = (output if isinstance(output, Tensor) else output[0]).detach().clone()

    names = {part: key for key, part in clone.named_modules() if key in animal.names}
    for part in names:
        part.register_forward_hook(keep)
    clone(inputs.clone())
    for key in animal.names:
        out = kept[key].transpose(0, 1) if name.endswith("time first") else kept[key]
        rows = out.reshape(len(out), -1)
        for measure in (participation_ratio, orthogonality_gap, mean_cosine, distinct_share):
            value = report.profile.select(measure.__name__, source="check", name=key).rows[0].value
            assert value == pytest.approx(float(measure(rows)), rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32)
        mean_square = report.profile.select("mean_square", source="check", name=key).rows[0].value
        assert mean_square == pytest.approx(float(rows.double().square().mean()), rel=TOLERANCE.float32_forward)


@pytest.mark.parametrize("name", [key for key, animal in ZOO.items() if not animal.options and key != "stateful"])
def test_watch_and_check_agree(name: str) -> None:
    """The same numbers from a loop of one's own, where gradients reach: what a check measures beyond that is nothing
    but the gradients in front of the first trainable weight."""
    animal = ZOO[name]
    model, inputs, targets = prepare(animal)
    without_dropout(model)

    def loss(output: Any, _targets: Any = None) -> Tensor:
        tensors = [t for _, t in sounding.probe.outputs.tensors_in(output) if t.is_floating_point()]
        return sum((t.double() * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in tensors)  # type: ignore[return-value]

    rng = torch.get_rng_state()
    checked = sounding.check(model, inputs, targets, loss=loss, tier="fast").profile
    torch.set_rng_state(rng)
    if "checkpointed" in name:  # a reentrant checkpoint needs an input that asks for a gradient
        inputs.requires_grad_()
    with sounding.watch(model) as watched:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        value = loss(output)
        if value.requires_grad:
            value.backward()
    between = sounding.probe.inside.rows.INSIDE  # a watch does not look between modules
    expected = {
        (r.name, r.measure): r.value
        for r in checked
        if r.source == "check" and r.name != "network" and r.measure not in between
    }
    found = {(r.name, r.measure): r.value for r in watched.profile if r.name != "network"}
    gradients = {key for key in expected if "gradient" in key[1]}
    assert found.keys() <= expected.keys()
    assert expected.keys() - found.keys() <= gradients
    for key, value in found.items():
        assert value == pytest.approx(expected[key], rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32), key
    assert all(
        not getattr(part, hooks) for part in model.modules() for hooks in ("_forward_hooks", "_forward_pre_hooks")
    )
