"""Snapshots of a model: changes that succeed or leave no trace, passes that leave none, differences made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sounding.probe.snapshot import ModelState, refill

ABSENT = object()


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
    # Ctrl-C in the middle of a cure must not leave half of it
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


@dataclass(frozen=True)
class Difference:
    """From one snapshot of a model to a later one: only what differs is set.

    What both snapshots agree on (running statistics, a hook of yours, the mode, gradients) may have moved since, and is
    left as it is now.
    """

    before: ModelState
    after: ModelState

    def make(self) -> None:
        """Bring the model from the state before to the state after."""
        known = {id(module) for module, _ in self.before.modules}
        for module, kind in self.after.modules:
            attributes = vars(module)
            new = self.after.content(attributes)
            if id(module) not in known:  # a module the cure brought in: it is wholly the cure's
                attributes.clear()
                attributes.update(new)
                for value in new.values():
                    if (held := self.after.content(value)) is not None:
                        refill(value, held)
                continue
            module.__class__ = kind
            old = self.before.content(attributes)
            for name in {**old, **new}:
                was, now = old.get(name, ABSENT), new.get(name, ABSENT)
                contents = self.before.content(was), self.after.content(now)
                if None not in contents:
                    _change_container(attributes, name, *contents)
                elif not _same(was, now):
                    _set(attributes, name, now)
        held = {id(one.tensor): one for one in self.before.tensors}
        with torch.no_grad():
            for one in self.after.tensors:
                value, before = self.after.value(one), held.get(id(one.tensor))
                if before is None or not equal_bits(self.before.value(before), value):
                    one.tensor.data.copy_(value)
                if before is None and one.tensor.is_leaf:  # only leaves can be told whether they ask for a gradient
                    one.tensor.requires_grad_(one.requires_grad)


def find_moved(snapshot: ModelState, model: nn.Module) -> str | None:
    """The first parameter, or the structure, that is no longer as in the snapshot; None when all is."""
    if {id(module) for module in model.modules()} != {id(module) for module, _ in snapshot.modules}:
        return "its modules"
    if any(type(module) is not kind for module, kind in snapshot.modules):
        return "its modules"
    held = {id(one.tensor): one for one in snapshot.tensors}
    for name, parameter in model.named_parameters():
        one = held.get(id(parameter))
        if one is None or not equal_bits(parameter.detach(), snapshot.value(one)):
            return name
    return None


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Equal in shape, type and every value; NaN equals NaN, which `torch.equal` denies."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    second = second.to(first.device)
    if torch.equal(first, second):
        return True
    return first.is_floating_point() and bool(((first == second) | (first.isnan() & second.isnan())).all())


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    return type(first) is type(second) and isinstance(first, bool | int | float | str | tuple) and first == second


def _change_container(attributes: dict[str, Any], name: str, old: Any, new: Any) -> None:
    """Make the change from `old` to `new` in the container that is there now."""
    if isinstance(new, dict) and isinstance(old, dict):
        for key in {**old, **new}:
            if not _same(old.get(key, ABSENT), new.get(key, ABSENT)):
                _set(attributes[name], key, new.get(key, ABSENT))
    elif type(old) is not type(new) or len(old) != len(new) or not all(map(_same, old, new)):
        container = attributes[name]
        container.clear()
        container.extend(new) if isinstance(container, list) else container.update(new)


def _set(attributes: dict[Any, Any], name: Any, value: Any) -> None:
    if value is ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value
