"""A pass through a stranger's model, whose failure is told with the layer and the shapes it happened at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sounding.errors import SoundingError, TargetError, UsageError
from sounding.probe.batches import Batch
from sounding.probe.calls import named_modules

ONE_VALUE = "more than 1 value per channel"  # what torch says when batch norm has nothing to take a variance over


def run_model(root: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], batch: Batch) -> Any:
    """What the model returns; a failure of its own becomes a TargetError, a batch of one a UsageError."""
    try:
        return root(*arguments, **keywords)
    except (KeyboardInterrupt, SoundingError):
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.tensors())
        where = _where(root, error)
        if isinstance(error, ValueError) and ONE_VALUE in str(error):
            raise UsageError(
                f"batch norm needs at least 2 samples to have a variance, got a batch of 1 (layer {where!r})",
                hint="a batch of 32, or layer normalization for single samples",
            ) from error
        place = f" in layer {where!r}" if where else ""
        raise TargetError(
            f"the model raised {type(error).__name__}{place} on inputs of shape {shapes}: {_sentence(error)}",
            hint="inputs of the shape and type the model expects",
        ) from error


def _where(root: nn.Module, error: BaseException) -> str | None:
    """The innermost module whose forward method was running."""
    names = {id(module): name for name, module in named_modules(root)}
    found, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = names[id(owner)]
        trace = trace.tb_next
    return found


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if isinstance(error, torch.jit.Error) and lines else " ".join(lines) or type(error).__name__
