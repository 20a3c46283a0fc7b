"""The one way from Python's values to JSON's types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any


def fields_of(record: object, names: str) -> dict[str, Any]:
    """What a record holds under some names, fields and properties alike, unpacked into plain types.

    Records become mappings, tuples and arrays lists; numbers stay as they are, NaN and infinities too.

    Args:
        record: any object with these attributes.
        names: separated by spaces, in the order of the mapping.

    >>> fields_of(3 + 4j, "real imag")
    {'real': 3.0, 'imag': 4.0}
    """
    return {name: _unpacked(getattr(record, name)) for name in names.split()}


def _unpacked(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _unpacked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_unpacked(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


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
