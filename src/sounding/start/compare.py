"""One network built in two ways, eagerly and through the meta device, and whether both start by the same laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sounding.errors import TargetError, UsageError
from sounding.probe.records import Finding
from sounding.probe.sentences import tell
from sounding.start.audit import Audit, audit
from sounding.start.parameters import SURE, Parameter, take_stock

OFF = 0.05  # a scale may differ by this beside the sampling errors of both


def compare_paths(factory: Callable[[], nn.Module]) -> Audit:
    """The audit of the network that the meta device gives, with a finding for each law that differs from the eager one.

    The second network is built on the meta device, gets its memory by `to_empty`, which is filled with NaN so that
    nothing unwritten can hide, and then its own initialization: `init_weights` where it has one (transformers), else
    `reset_parameters` of every module that has it.

    Raises:
        UsageError: the factory makes no module.
        TargetError: the factory or the initialization raised.
    """
    eager = _make(factory)
    with torch.device("meta"):
        late = _make(factory)
    try:
        late = late.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in [*late.parameters(), *late.buffers()]:
                if tensor.is_floating_point():
                    tensor.fill_(math.nan)
        _initialize(late)
    except Exception as error:
        raise TargetError(
            f"building the network through the meta device raised {type(error).__name__}: {error}"
        ) from error
    found = audit(late)
    expected = {one.name: one for one in take_stock(eager).parameters}
    told = {finding.parameter for finding in found.findings}
    laws = [
        _law_differs(one, expected[one.name])
        for one in take_stock(late).parameters
        if one.name in expected and one.name not in told and not _agree(one, expected[one.name])
    ]
    return Audit(found.places, (*found.findings, *laws, *_buffers(eager, late)), found.parameters)


def _make(factory: Callable[[], nn.Module]) -> nn.Module:
    try:
        made = factory()
    except Exception as error:
        raise TargetError(f"the factory raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"expected the factory to make a torch.nn.Module, got {type(made).__name__}")
    return made


def _initialize(model: nn.Module) -> None:
    own: Any = getattr(model, "init_weights", None)
    if callable(own):
        own()
        return
    for module in reversed(list(model.modules())):  # a module overwrites what its parts drew, as its __init__ does
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()


def _agree(one: Parameter, other: Parameter) -> bool:
    if not one.finite or not other.finite:
        return one.finite == other.finite
    if one.constant or other.constant:
        return one.constant == other.constant and one.low == other.low
    line = SURE * math.hypot(one.error, other.error) + OFF
    means = abs(one.law.mean - other.law.mean) <= line * max(one.scale, other.scale)
    return means and abs(math.log(one.scale / other.scale)) <= line


def _law_differs(one: Parameter, other: Parameter) -> Finding:
    return tell(
        "meta_law", "medium" if one.finite else "high", layer=one.layer, parameter=one.name,
        evidence={"eager": other.scale, "through_meta": one.scale}, eager_mean=other.law.mean, mean=one.law.mean,
    )  # fmt: skip


def _buffers(eager: nn.Module, late: nn.Module) -> list[Finding]:
    """Buffers (rotary frequencies, masks, running statistics) are no draws: they must be equal."""
    expected = dict(eager.named_buffers())
    return [
        tell("meta_buffer", layer=name.rpartition(".")[0], parameter=name)
        for name, tensor in late.named_buffers()
        if (other := expected.get(name)) is not None
        and not (tensor.shape == other.shape and torch.equal(tensor, other))
    ]
