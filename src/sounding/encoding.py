"""The one way from Python's values to JSON's types, and from records to files of JSON and back."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from sounding.errors import UsageError
from sounding.files import place


class JsonRecord(ABC):
    """A record that is written as JSON and read back; `noun` is what errors call it."""

    noun: ClassVar[str]

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""

    def to_json(self, path: str | Path | None = None) -> str:
        """The record as strict JSON; also written to `path` when given, whole or not at all."""
        text = json.dumps(self.to_dict(), allow_nan=False)
        if path is not None:
            place(Path(path), text.encode("utf-8"))
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Self:
        """Read what `to_json` wrote: a path, or the text itself."""
        text = source
        if not (isinstance(source, str) and source.lstrip().startswith("{")):
            try:
                text = Path(source).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                told = f"expected the path of a JSON {cls.noun}, got {str(source)[:200]!r} ({error})"
                raise UsageError(told) from error
        try:
            data = json.loads(str(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"expected a JSON {cls.noun}, got text that is no JSON ({error})") from error
        return cls.from_dict(data)


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
