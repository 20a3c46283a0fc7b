"""How tensors are told apart between modules: by the storage that they lie in, which views of them share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def key_of(tensor: Tensor) -> int:
    """What tells the storage of a tensor apart."""
    return int(tensor.untyped_storage()._cdata)


def keys_of(tensors: Iterable[Tensor]) -> list[int]:
    """What tells the storages of tensors apart, one for each that has a plain one."""
    found = []
    for tensor in tensors:
        try:
            found.append(key_of(tensor))
        except (RuntimeError, NotImplementedError, ValueError):  # no storage, or none yet
            continue
    return found


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of nested arguments, in order; numbers, of which shapes are lists, are passed over at once."""
    for part in value if isinstance(value, tuple | list) else (value,):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, tuple | list):
            yield from tensors_of(part)
        elif isinstance(part, dict):
            yield from tensors_of(list(part.values()))
