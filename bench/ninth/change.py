"""How faults and variants change a network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class Case:
    model: nn.Module
    x: Any
    y: Tensor
    loss: Callable[[Any, Tensor], Tensor]


def instead(module: nn.Module, **methods: Any) -> None:
    """Give one module other methods, by a class made for it."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})
