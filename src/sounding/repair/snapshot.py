"""Changes to a model that succeed or leave no trace, and passes that leave none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sounding.probe.snapshot import Snapshot


def take_snapshot(model: nn.Module) -> Snapshot:
    """The state of a model, copied: modules, classes, attributes, hooks, parameters and buffers.

    Objects that are neither modules nor containers are not followed: a model may hold its trainer, which `undo` must
    not take back to where it was.
    """
    return Snapshot(("", model), objects=False)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[Snapshot]:
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
    snapshot = Snapshot(("", model), parameters=False)
    model.train()
    try:
        yield
    finally:
        snapshot.restore()
