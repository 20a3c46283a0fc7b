"""Numbers that a GPU still computes: hooks put them down, and all are read in one transfer when the pass is over.

To ask a GPU for one number makes Python wait for everything before it, and the GPU then waits for Python. A check of a
transformer has hundreds of such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Late(float):
    """A number that is NaN until `read_back` puts the value that was computed in its place.

    Args:
        tensor: what the device computes: a float64 number, or an array for `finish` to make a number of.
        finish: what makes the value from it, on the CPU: of a float for a number, of an array otherwise.
    """

    __slots__ = ("finish", "tensor")

    def __new__(cls, tensor: Tensor, finish: Callable[[Any], Any] = float) -> Late:
        number = super().__new__(cls, math.nan)
        number.tensor, number.finish = tensor, finish
        return number

    tensor: Tensor
    finish: Callable[[Any], Any]


def number_of(tensor: Tensor) -> float:
    """The value of a tensor of one number: later on a GPU of CUDA, at once elsewhere."""
    return Late(tensor.double()) if tensor.is_cuda else tensor.item()


def read_now(number: float) -> float:
    """The value of a number, waited for if it comes late."""
    return number.finish(number.tensor.item()) if type(number) is Late else number


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
            if value.tensor.dim():
                _put(owner, key, value.finish(value.tensor.cpu().numpy()))
            else:
                numbers.setdefault(value.tensor.device, []).append((owner, key, value))
    for found in numbers.values():
        values = torch.stack([late.tensor for _, _, late in found]).tolist()
        for (owner, key, late), value in zip(found, values, strict=True):
            _put(owner, key, late.finish(value))


def _put(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[key] = value
    else:
        setattr(owner, key, value)
