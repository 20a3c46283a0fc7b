"""How a model is built, remembered between measured steps: looking it through anew costs more than hooking it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from sounding.probe.calls import named_parameters
from sounding.probe.state import all_modules, unwrap


@dataclass(frozen=True, slots=True)
class _Part:
    """A module with its class, its children and its parameters as they were; held, so that no other takes its place."""

    module: nn.Module
    kind: type[nn.Module]
    names: list[str]
    held: list[Any]

    def is_same(self) -> bool:
        module = self.module
        if type(module) is not self.kind:  # a lazy module that was called, a parametrized one
            return False
        children, parameters = module._modules, module._parameters
        return (
            len(children) + len(parameters) == len(self.held)
            and [*children, *parameters] == self.names
            and all(map(is_, (*children.values(), *parameters.values()), self.held))
        )


class Structure:
    """The modules and parameters of a model; those inside a script cannot change."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(unwrap(model))
        self._parts = [_remember(module) for module in _changeable(all_modules(model))]

    def is_same(self) -> bool:
        """Whether nothing was replaced, added or taken away, anywhere in the model."""
        return all(part.is_same() for part in self._parts)


def _changeable(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _remember(module: nn.Module) -> _Part:
    children, parameters = module._modules, module._parameters
    return _Part(module, type(module), [*children, *parameters], [*children.values(), *parameters.values()])
