"""What is kept between measured steps: how the model is built, and blocks of memory. To make either anew costs much."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from sounding.probe.calls import named_parameters
from sounding.probe.moments import Moments
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
        modules = [one for one in all_modules(model) if not isinstance(one, torch.jit.ScriptModule)]
        self._parts = [
            _Part(
                one, type(one), [*one._modules, *one._parameters], [*one._modules.values(), *one._parameters.values()]
            )
            for one in modules
        ]

    def is_same(self) -> bool:
        """Whether nothing was replaced, added or taken away, anywhere in the model."""
        return all(part.is_same() for part in self._parts)


class KeptMoments(Moments):
    """Moments for the passes of many steps, one after another.

    To lay out a block takes as long as to measure a small network. A few megabytes of them stay where they are; on a
    GPU, where they are hundreds and memory is scarce, they go.
    """

    def release(self) -> None:
        """Let go of the matrices and of threads, and of memory that others may want."""
        self._digest_all()
        self.blocks = {key: block for key, block in self.blocks.items() if key[3].type == "cpu"}
        self.known = {}  # sequences of all lengths would fill it
        self.spectra.close()
