"""Passes through a user's model: calling it, and learning in which order its layers run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import SoundingError, TargetError, UsageError
from sounding.probe.batches import check_finite
from sounding.probe.state import unwrap
from sounding.repair.layers import WEIGHT_LAYERS
from sounding.repair.snapshot import undisturbed

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Run a model on a tensor, a tuple of arguments or a mapping of keyword arguments; its failure becomes ours."""
    inner = unwrap(model)  # a compiled graph or a parallel wrapper would pass hooks by
    try:
        if isinstance(inputs, Mapping):
            return inner(**inputs)
        if isinstance(inputs, tuple | list):
            return inner(*inputs)
        return inner(inputs)
    except SoundingError:
        raise
    except Exception as error:
        raise TargetError(
            f"the model raised {type(error).__name__} on the inputs given: {error}",
            hint="inputs of the shape the model was built for",
        ) from error


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors of a batch, in the order in which it holds them."""
    if isinstance(inputs, Tensor):
        return [inputs]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return [value for value in values if isinstance(value, Tensor)]


def map_tensors(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """A batch in the form that it had, with each of its tensors changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: change(value) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    return tuple(change(value) if isinstance(value, Tensor) else value for value in inputs)


def check_inputs(inputs: Inputs) -> None:
    """Floating point inputs must be finite and there must be at least two samples."""
    tensors = tensors_of(inputs)
    if not tensors:
        raise UsageError(f"expected inputs as a tensor, a tuple or a mapping of tensors, got {type(inputs).__name__}")
    if tensors[0].dim() == 0 or len(tensors[0]) < 2:
        got = len(tensors[0]) if tensors[0].dim() else "a single number"
        raise UsageError(f"expected at least 2 samples, got {got}", hint="a batch of 128 or more")
    check_finite(tensors)


def sample_count(inputs: Inputs) -> int:
    """The length of the first tensor's first axis."""
    return len(tensors_of(inputs)[0])


@contextmanager
def hooked(handles: list[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    """Remove the hooks whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(eq=False)
class Call:
    """One call of a layer in a forward pass."""

    name: str
    module: nn.Module
    giver: nn.Module | None  # the layer whose very output it took as its only argument
    shape: torch.Size | None = None  # of its output, where that is one tensor


def call_layers(model: nn.Module, inputs: Inputs) -> list[Call]:
    """The calls of leaf modules in the order in which one forward pass in training mode makes them.

    A weight layer that carries its own norm is listed too, before the norm.
    """
    calls: list[Call] = []
    givers: dict[int, nn.Module] = {}
    kept: list[Tensor] = []  # holds the outputs, so that an id is never reused within the pass

    def enter(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        calls.append(Call(name, module, givers.get(id(arguments[0])) if len(arguments) == 1 else None))

    def leave(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            next(call for call in reversed(calls) if call.module is module).shape = output.shape
            givers.setdefault(id(output), module)  # what only hands a tensor on did not make it
            kept.append(output)

    handles = []
    for name, module in unwrap(model).named_modules():
        if isinstance(module, WEIGHT_LAYERS) or not any(True for _ in module.children()):
            handles.append(module.register_forward_pre_hook(functools.partial(enter, name)))
            handles.append(module.register_forward_hook(leave))
    with hooked(handles), undisturbed(model), torch.no_grad():
        call_model(model, inputs)
    return calls
