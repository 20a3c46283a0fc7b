"""Changes to a model that succeed or leave no trace, and passes that leave none."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec

from torch import nn

from sounding.probe.snapshot import ModelState
from sounding.repair.changes import Changes

P = ParamSpec("P")


def on_copy(cure: Callable[Concatenate[nn.Module, P], Changes]) -> Callable[Concatenate[nn.Module, P], nn.Module]:
    """The cure as a function that changes and returns a copy of the model, and leaves the model alone."""

    @functools.wraps(cure)
    def cured(model: nn.Module, *args: P.args, **options: P.kwargs) -> nn.Module:
        changed = copy.deepcopy(model)
        cure(changed, *args, **options)
        return changed

    cured.__name__ = cure.__name__.removesuffix("_")
    cured.__doc__ = f"A changed copy of the model; see `{cure.__name__}`.\n\n{cure.__doc__}"
    return cured  # type: ignore[return-value]  # the model may be given by its name, too


def take_snapshot(model: nn.Module) -> ModelState:
    """The state of a model, copied: modules, classes, attributes, hooks, parameters and buffers.

    Objects that are neither modules nor containers are not followed: a model may hold its trainer, which `undo` must
    not take back to where it was.
    """
    return ModelState(("", model), objects=False)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[ModelState]:
    """Run a change on a model; if it raises or is interrupted, the model is as it was."""
    snapshot = take_snapshot(model)
    try:
        yield snapshot
    except BaseException:
        snapshot.restore()
        raise


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run passes through a model in training mode; all but its parameters, which a cure may set, is as it was after."""
    snapshot = ModelState(("", model), parameters=False)
    model.train()
    try:
        yield
    finally:
        snapshot.restore()
