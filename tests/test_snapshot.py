"""Undo bit for bit: after any cure, however it ended, the model is what it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.repair import (
    METHODS,
    add_batchnorm_,
    break_batchnorm_,
    haar_,
    he_,
    lsuv_,
    orthogonalize_,
    raise_rank_,
    scale_branches_,
    shape_activations_,
    swap_normalization_,
    tune_batchnorm_,
    xavier_,
    zero_residual_,
)
from sounding.repair.snapshot import all_or_nothing, take_snapshot


class Block(nn.Module):
    """x + branch(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.branch(x)
        return result


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), Block(8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[4].weight.requires_grad_(False)
    model[1].eval()
    model(torch.randn(16, 6)).sum().backward()
    return model


def small(model: nn.Module) -> Any:
    return raise_rank_(model, INPUTS, batches=2, target=5.0)


INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
CURES: dict[str, Callable[[nn.Module], Any]] = {
    "haar": haar_,
    "he": he_,
    "xavier": xavier_,
    "lsuv": lambda model: lsuv_(model, INPUTS),
    "orthogonalize": lambda model: orthogonalize_(model, INPUTS),
    "raise_rank": small,
    "wrap": lambda model: shape_activations_(model, INPUTS, exponent=0.4),
    "fold": lambda model: shape_activations_(model, INPUTS, exponent=0.4, how="fold"),
    "tune_batchnorm": lambda model: tune_batchnorm_(model, INPUTS, eps=0.3, shift=1.0),
    "add_batchnorm": lambda model: add_batchnorm_(model, INPUTS),
    "swap_normalization": lambda model: swap_normalization_(model, kind="rms"),
    "break_batchnorm": break_batchnorm_,
    "zero_residual": lambda model: zero_residual_(model, INPUTS),
    "scale_branches": lambda model: scale_branches_(model, INPUTS, rule="deepnorm"),
}


def portrait(model: nn.Module) -> list[Any]:
    """Everything that undo promises, by identity where there is one."""
    return [
        [(name, id(m), type(m), m.training, getattr(m, "eps", None)) for name, m in model.named_modules()],
        [(name, id(p), p.requires_grad, id(p.grad)) for name, p in model.named_parameters()],
        [(list(m._forward_hooks.items()), list(m._forward_pre_hooks.items())) for m in model.modules()],
        [m.__dict__.keys() for m in model.modules()],
    ]


def same_values(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


def test_every_method_is_among_the_tested_cures() -> None:
    elsewhere = {"shape_activations", "orthogonal_init"}
    # these refuse a network without their fault: tests/test_plan.py plants it and takes the cure back
    elsewhere |= {"redraw", "unclone", "zero_biases", "reset_norms", "scale_embeddings", "batch_statistics", "qk_norm"}
    assert set(METHODS) <= {*CURES, *elsewhere}


@pytest.mark.parametrize("name", CURES)
def test_undo_is_bit_for_bit(name: str) -> None:
    model = network()
    before, values = portrait(model), copy.deepcopy(model.state_dict())
    output = model(INPUTS)
    values = copy.deepcopy(model.state_dict())
    snapshot = take_snapshot(model)
    changes = CURES[name](model)
    assert changes.changed
    assert not (same_values(model, values) and portrait(model) == before)
    snapshot.restore()
    assert portrait(model) == before
    assert same_values(model, values)
    assert torch.equal(model(INPUTS), output)


@pytest.mark.parametrize("name", CURES)
def test_a_cure_leaves_modes_gradients_statistics_and_hooks_alone(name: str) -> None:
    model = network()
    model.register_forward_hook(lambda *_: None)
    modes = [module.training for module in model.modules()]
    gradients = [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    running = {key: value.clone() for key, value in model.named_buffers()}
    CURES[name](model)
    if name not in {"add_batchnorm", "swap_normalization"}:
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(value, running[key]) for key, value in model.named_buffers())
    for parameter, (identity, gradient) in zip(model.parameters(), gradients, strict=False):
        if name not in {"add_batchnorm", "swap_normalization"}:
            assert id(parameter.grad) == identity
            assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert len(model._forward_hooks) == 1


@pytest.mark.parametrize("name", ["lsuv", "orthogonalize", "raise_rank", "wrap", "tune_batchnorm", "add_batchnorm"])
def test_interrupted_in_the_middle_the_model_is_as_it_was(name: str) -> None:
    model = network()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[5].register_forward_pre_hook(interrupt)
    before, values = portrait(model), copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        CURES[name](model)
    assert portrait(model) == before
    assert same_values(model, values)
    handle.remove()
    assert not model[5]._forward_pre_hooks


def test_interrupted_by_its_progress_the_model_is_as_it_was() -> None:
    model = network()
    before, values = portrait(model), copy.deepcopy(model.state_dict())

    def interrupt(name: str, number: int, ratio: float) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raise_rank_(model, INPUTS, progress=interrupt)
    assert portrait(model) == before
    assert same_values(model, values)


def test_a_users_hook_handle_still_removes_its_hook_after_undo() -> None:
    model = network()
    handle = model[0].register_forward_hook(lambda *_: None)
    snapshot = take_snapshot(model)
    model[0].register_forward_hook(lambda *_: None)
    snapshot.restore()
    assert len(model[0]._forward_hooks) == 1
    handle.remove()
    assert not model[0]._forward_hooks


def test_all_or_nothing_keeps_a_change_that_succeeds() -> None:
    model = network()
    with all_or_nothing(model), torch.no_grad():
        model[0].weight.zero_()
    assert not model[0].weight.any()


@pytest.mark.parametrize("name", [name for name in CURES if name != "swap_normalization"])
def test_quantized_models_are_refused(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UsageError):
        CURES[name](quantized)


@pytest.mark.parametrize("name", ["haar", "he", "lsuv", "orthogonalize", "raise_rank", "add_batchnorm"])
def test_frozen_models_and_models_without_linear_layers_are_refused(name: str) -> None:
    frozen = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).requires_grad_(False)
    for model in (frozen, nn.Sequential(nn.Tanh(), nn.Flatten())):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError):
            CURES[name](model)
        assert same_values(model, before)


@pytest.mark.parametrize("name", ["lsuv", "orthogonalize", "raise_rank", "wrap", "tune_batchnorm", "add_batchnorm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused(name: str, value: float) -> None:
    model = network()
    bad = INPUTS.clone()
    bad[3, 2] = value
    function = METHODS["shape_activations" if name == "wrap" else name].function
    with pytest.raises(UsageError, match="expected finite inputs, got 1"):
        function(model, bad)


@pytest.mark.parametrize("name", CURES)
def test_compiled_and_parallel_wrappers_are_seen_through(name: str) -> None:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on its first compile
        wrappers = (nn.DataParallel(model), torch.compile(model, backend="eager"))
    for wrapper in wrappers:
        snapshot = take_snapshot(model)
        changes = CURES[name](wrapper)  # type: ignore[arg-type]
        assert changes.changed
        assert not any(change.name.startswith(("module.", "_orig_mod")) for change in changes.changed)
        snapshot.restore()
