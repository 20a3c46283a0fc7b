"""Passes through a user's model: calling it, and learning in which order its layers run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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


def call_flow(
    model: nn.Module, inputs: Inputs, givers: Iterable[nn.Module], takers: Iterable[nn.Module]
) -> tuple[list[tuple[nn.Module, torch.Size]], list[tuple[nn.Module, nn.Module | None]]]:
    """One pass in training mode: each call of a giver with the shape of what it gave, and each call of a
    taker with the giver whose very output it took, if any.
    """
    given: list[tuple[nn.Module, torch.Size]] = []
    taken: list[tuple[nn.Module, nn.Module | None]] = []
    outputs: dict[int, nn.Module] = {}
    kept: list[Tensor] = []  # holds the outputs, so that an id is never reused within the pass

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        # tokens and masks are no signal that a norm could have given
        if len(arguments) == 1 and isinstance(arguments[0], Tensor) and arguments[0].is_floating_point():
            taken.append((module, outputs.get(id(arguments[0]))))

    def after(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            given.append((module, output.shape))
            outputs[id(output)] = module
            kept.append(output)

    handles = [module.register_forward_pre_hook(before) for module in takers]
    handles += [module.register_forward_hook(after) for module in givers]
    with hooked(handles), undisturbed(model), torch.no_grad():
        call_model(model, inputs)
    return given, taken


def call_order(model: nn.Module, inputs: Inputs) -> list[tuple[str, nn.Module]]:
    """The leaf modules in the order in which one forward pass calls them (a module called twice is listed twice).

    A weight layer that carries its own norm is listed too, before the norm.
    """
    order: list[tuple[str, nn.Module]] = []

    def record(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, _: order.append((name, module))

    leaves = [
        (name, m)
        for name, m in unwrap(model).named_modules()
        if isinstance(m, WEIGHT_LAYERS) or not any(True for _ in m.children())  # a module without children is a leaf
    ]
    with hooked([m.register_forward_pre_hook(record(name)) for name, m in leaves]), torch.no_grad():
        call_model(model, inputs)
    return order
