"""What a cure changed in a model, as a difference between two snapshots that can be made again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sounding.repair.snapshot import Snapshot

ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """From one snapshot of a model to a later one: only what differs is set.

    What both snapshots agree on (running statistics, a hook of yours, the mode, gradients) may have moved since, and is
    left as it is now.
    """

    before: Snapshot
    after: Snapshot

    def make(self) -> None:
        """Bring the model from the state before to the state after."""
        known = {id(state.module): state for state in self.before.modules}
        for state in self.after.modules:
            old = known.get(id(state.module))
            if old is None:  # a module the cure brought in: it is wholly the cure's
                state.restore()
                continue
            state.module.__class__ = state.kind
            for name in {**old.attributes, **state.attributes}:
                if name in state.contents and name in old.contents:
                    _change_container(state.module.__dict__, name, old.contents[name], state.contents[name])
                elif not _same(old.attributes.get(name, ABSENT), state.attributes.get(name, ABSENT)):
                    _set(state.module.__dict__, name, state.attributes.get(name, ABSENT))
        held = {id(tensor): value for tensor, value, _ in self.before.values}
        with torch.no_grad():
            for tensor, value, requires_grad in self.after.values:
                if id(tensor) not in held or not equal_bits(held[id(tensor)], value):
                    tensor.data.copy_(value)
                if id(tensor) not in held and tensor.is_leaf:
                    tensor.requires_grad_(requires_grad)

    def changed_values(self) -> list[Tensor]:
        """The tensors whose values differ or that are new."""
        held = {id(tensor): value for tensor, value, _ in self.before.values}
        return [
            tensor
            for tensor, value, _ in self.after.values
            if id(tensor) not in held or not equal_bits(held[id(tensor)], value)
        ]


def find_moved(snapshot: Snapshot, model: nn.Module) -> str | None:
    """The first parameter, or the structure, that is no longer as in the snapshot; None when all is."""
    if [id(module) for module in model.modules()] != [id(state.module) for state in snapshot.modules]:
        return "its modules"
    if any(type(state.module) is not state.kind for state in snapshot.modules):
        return "its modules"
    held = {id(tensor): value for tensor, value, _ in snapshot.values}
    for name, parameter in model.named_parameters():
        value = held.get(id(parameter))
        if value is None or not equal_bits(parameter.detach(), value):
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
