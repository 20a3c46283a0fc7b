"""Mistakes in the optimizer. No kind of finding speaks of them, so they stand outside the count."""

from __future__ import annotations

from bench.promised.registry import fault
from torch import nn


@fault("rotary_optimizer_of_head", "rotary", "frozen unused", "blocks", edits="optimizer", promised=False)
def _(model: nn.Module) -> list[nn.Parameter]:
    """The optimizer was given the parameters of the head only."""
    return list(model.head.parameters())


@fault("resnet1_optimizer_of_norms", "resnet1", "frozen unused", "blocks", edits="optimizer", promised=False)
def _(model: nn.Module) -> list[nn.Parameter]:
    """The two groups for weight decay were made, and only the one without decay was handed on."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 1]
