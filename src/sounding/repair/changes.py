"""What a cure did: which parts of the model changed, and which it left alone and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sounding.encoding import fields_of


@dataclass(frozen=True)
class Change:
    """One thing that changed: a parameter, a module or an attribute, before and after in a few words."""

    name: str
    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Untouched:
    """A layer the cure did not touch, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Changes:
    """The result of a cure.

    Args:
        method: its name.
        changed: what it changed.
        untouched: what it left alone, and why.
        notes: what else is worth saying.
        settings: the options it chose by itself: given to the function, they make the same choice again.

    >>> print(Changes("haar", (Change("fc1", "weight", "rms 0.051", "rms 0.088, orthogonal"),), ()))
    haar: 1 change, 0 layers untouched
      fc1  weight: rms 0.051 → rms 0.088, orthogonal
    """

    method: str
    changed: tuple[Change, ...]
    untouched: tuple[Untouched, ...]
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        plural = "" if len(self.changed) == 1 else "s"
        left = "" if len(self.untouched) == 1 else "s"
        lines = [f"{self.method}: {len(self.changed)} change{plural}, {len(self.untouched)} layer{left} untouched"]
        lines += [f"  {c.name}  {c.what}: {c.before} → {c.after}" for c in self.changed]
        lines += [f"  {u.name}  untouched: {u.reason}" for u in self.untouched]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    @property
    def why_nothing(self) -> str:
        """In an error's words, that nothing was changed and why."""
        reasons = [*(f"{one.name}: {one.reason}" for one in self.untouched[:3]), *self.notes]
        return "; ".join([f"{self.method} finds nothing to change", *reasons])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return fields_of(self, "method changed untouched notes settings")
