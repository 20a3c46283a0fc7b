"""Tools with which the faults change a healthy network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def swap(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Give one module these methods, by a class of the same name; its parameters stay."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)


def swap_all(model: nn.Module, kind: type[nn.Module], **methods: Callable[..., Any]) -> None:
    """Give all modules of this class these methods, by one class of the same name."""
    changed = type(kind.__name__, (kind,), methods)
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = changed


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]
