"""A model's whole state, taken and put back bit for bit: values, gradients, modules, attributes, hooks, mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class _ModuleState:
    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    contents: dict[str, Any]

    def restore(self) -> None:
        """Class, attributes and what the containers among them held."""
        self.module.__class__ = self.kind
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        # the very same dictionaries are refilled: a hook handle points at its own and must still remove its hook
        for name, content in self.contents.items():
            self.attributes[name].clear()
            _refill(self.attributes[name], content)


@dataclass(frozen=True)
class Snapshot:
    """Everything `restore` needs. Holds one copy of every parameter and buffer."""

    modules: tuple[_ModuleState, ...]
    values: tuple[tuple[torch.Tensor, torch.Tensor, bool], ...]
    gradients: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]

    def restore(self) -> None:
        """Put every module, tensor, attribute and hook back as it was."""
        for state in self.modules:
            state.restore()
        with torch.no_grad():
            for tensor, value, requires_grad in self.values:
                if tensor.is_leaf:
                    tensor.requires_grad_(requires_grad)
                tensor.data.copy_(value)
        for tensor, gradient in self.gradients:
            tensor.grad = gradient


def take_snapshot(model: nn.Module) -> Snapshot:
    """The state of a model, copied."""
    modules = tuple(
        _ModuleState(
            module,
            type(module),
            dict(module.__dict__),
            {name: value.copy() for name, value in module.__dict__.items() if isinstance(value, dict | list | set)},
        )
        for module in model.modules()
    )
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if not _is_lazy(t)}
    values = tuple(
        (t, t.detach().clone(memory_format=torch.preserve_format), t.requires_grad) for t in tensors.values()
    )
    gradients = tuple((p, p.grad) for p in model.parameters() if not _is_lazy(p))
    return Snapshot(modules, values, gradients)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[Snapshot]:
    """Run a change on a model; if it raises or is interrupted, the model is as it was."""
    snapshot = take_snapshot(model)
    try:
        yield snapshot
    except BaseException:
        snapshot.restore()
        raise


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run passes through a model in training mode; its mode and buffers (running statistics) come back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)
