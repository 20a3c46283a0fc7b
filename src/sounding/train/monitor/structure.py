"""What is kept between measured steps: how the model is built, and blocks of memory. To make either anew costs much."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import nn

from sounding.probe.calls import named_parameters
from sounding.probe.moments import Moments
from sounding.probe.state import all_modules, unwrap


class Structure:
    """The modules and parameters of a model, held, so that no other takes their place; a script's cannot change."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(unwrap(model))
        self._parts = [
            (one, type(one), *_children(one))
            for one in all_modules(model)
            if not isinstance(one, torch.jit.ScriptModule)
        ]

    def is_same(self) -> bool:
        """Whether nothing was replaced, added or taken away, anywhere in the model."""
        for module, kind, names, held in self._parts:
            if type(module) is not kind:  # a lazy module that was called, a parametrized one
                return False
            names_now, held_now = _children(module)
            if names_now != names or not all(map(is_, held_now, held)):
                return False
        return True


def _children(module: nn.Module) -> tuple[list[str], list[Any]]:
    """The names of a module's own children and parameters, and they."""
    children, parameters = module._modules, module._parameters
    return [*children, *parameters], [*children.values(), *parameters.values()]


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
