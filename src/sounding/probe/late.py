"""Numbers that a GPU still computes: hooks put them down, and all are read in one transfer when the pass is over.

To ask a GPU for one number makes Python wait for everything before it, and the GPU then waits for Python. A check of a
transformer has hundreds of such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Late(float):
    """A number that is NaN until `read_back` puts the value that was computed in its place."""

    __slots__ = ("finish", "normed", "tensor")

    def __new__(cls, tensor: Tensor, finish: Callable[[Any], Any] = float, *, normed: bool = False) -> Late:
        number = super().__new__(cls, math.nan)
        number.tensor, number.finish, number.normed = tensor, finish, normed
        return number

    tensor: Tensor  # what the device computes: a float64 number, or an array for `finish` to make a number of
    finish: Callable[[Any], Any]  # what makes the value from it, on the CPU: of a float for a number, else of an array
    normed: bool  # whether the number is the norm of the tensor, which is computed with all others when they are read


def number_of(tensor: Tensor) -> float:
    """The value of a tensor of one number: later on a GPU of CUDA, at once elsewhere."""
    return Late(tensor.double()) if tensor.is_cuda else tensor.item()


def wide_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norms of tensors of one device, in float64, where no square of a narrower type overflows or vanishes.

    One pass over memory, whatever their number: torch's norm of one tensor would first copy it to float64.
    """
    return list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)) if tensors else []


def read_now(number: float) -> float:
    """The value of a number, waited for if it comes late."""
    if type(number) is not Late:
        return number
    value: float = number.finish((wide_norms([number.tensor])[0] if number.normed else number.tensor).item())
    return value


def read_back(owners: Iterable[Any]) -> None:
    """Put values in the places of all numbers that come late, in one transfer per device.

    Args:
        owners: dictionaries, whose values may come late, and records, which name such attributes in LATE.
    """
    numbers: dict[torch.device, list[tuple[Any, str, Late]]] = {}
    for owner in owners:
        held = owner if isinstance(owner, dict) else {name: getattr(owner, name) for name in owner.LATE}
        for key, value in list(held.items()):
            if type(value) is not Late:
                continue
            if value.tensor.dim() and not value.normed:
                _put(owner, key, value.finish(value.tensor.cpu().numpy()))
            else:
                numbers.setdefault(value.tensor.device, []).append((owner, key, value))
    for found in numbers.values():
        norms = iter(wide_norms([late.tensor for _, _, late in found if late.normed]))
        values = torch.stack([next(norms) if late.normed else late.tensor for _, _, late in found]).tolist()
        for (owner, key, late), value in zip(found, values, strict=True):
            _put(owner, key, late.finish(value))


def _put(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[key] = value
    else:
        setattr(owner, key, value)
