"""All faults, one each in a sound network."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import bodies, signal_faults, text_faults
from .change import Case
from .plant import FAULTS

__all__ = ["FAULTS", "build", "signal_faults", "text_faults"]


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any, Tensor, Callable[[Any, Tensor], Tensor]]:
    planted = FAULTS[name]
    case = Case(*bodies.build(planted.body, seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1000)
        planted.change(case)
    return case.model, case.x, case.y, case.loss
