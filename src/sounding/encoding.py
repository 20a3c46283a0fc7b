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
    if isinstance(value, Mapping):
        return {key: _unpacked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_unpacked(item) for item in value]
    return _opened(value)


def _opened(value: Any) -> Any:
    """A record as a mapping, an array as lists; anything else as it is."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.tolist() if hasattr(value, "tolist") else value


def to_plain(value: Any, *, other: Callable[[Any], Any] = str) -> Any:
    """JSON types only: tuples become lists, records mappings, array scalars numbers, NaN and infinities strings.

    Args:
        value: anything; `float` reads the strings of NaN and infinities back.
        other: what becomes of a value of any other type.

    >>> to_plain({1: (0.5, float("inf"))})
    {'1': [0.5, 'inf']}
    """
    # bool and int before float: numpy integers are none of these
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))  # JSON has no NaN and no infinity
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, other=other) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, other=other) for item in value]
    opened = _opened(value)
    # what cannot be opened is left to the caller, or there would be no end
    return other(value) if opened is value else to_plain(opened, other=other)
