"""The one way from Python's values to JSON's types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any


def to_plain(value: Any, *, other: Callable[[Any], Any] = str) -> Any:
    """JSON types only: tuples become lists, records mappings, array scalars numbers, NaN and infinities strings.

    Args:
        value: anything; `float` reads the strings of NaN and infinities back.
        other: what becomes of a value of any other type.

    >>> to_plain({1: (0.5, float("inf"))})
    {'1': [0.5, 'inf']}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, other=other) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, other=other) for item in value]
    if hasattr(value, "to_dict"):
        return to_plain(value.to_dict(), other=other)
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value), other=other)
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), other=other)
    return other(value)
