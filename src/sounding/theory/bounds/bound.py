"""The record every theorem returns: a number, what it bounds, and whether the theorem speaks about the input."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sounding.activations.activation import Array
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.profile import Profile

Version = Literal["corrected", "printed"]
Sense = Literal["upper", "lower", "equal"]

_SIGN = {"upper": "≤", "lower": "≥", "equal": "="}


@dataclass(frozen=True)
class Assumption:
    """One condition of a theorem and whether it is met."""

    text: str  # the condition, as a phrase
    holds: bool | None  # True or False where the given numbers decide it, None where only the user can know
    detail: str = ""  # the numbers that decided it, or how to find out


@dataclass(frozen=True)
class Bound:
    """One theorem, evaluated."""

    name: str  # how the command line and `theorems.toml` call it, "rank2020-theorem2"
    source: str  # key of the paper, theorem and equation
    statement: str  # the inequality in one line
    quantity: str  # what is bounded
    sense: Sense  # whether `value` bounds it from above, from below, or equals it
    value: float  # the bound
    assumptions: tuple[Assumption, ...] = ()  # the conditions, each with whether it is met
    version: Version = "corrected"
    erratum: str = ""  # how the printed statement differs; empty where the two agree
    actual: float | None = None  # the bounded quantity itself, where the input determines it
    values: Mapping[str, float] = field(default_factory=dict)  # further numbers of the theorem (rate, floor, …)
    profile: Profile | None = None  # the bound layer by layer, where there is a depth

    def __post_init__(self) -> None:
        check_version(self.version)

    @property
    def holds_for_input(self) -> bool | None:
        """Whether the theorem speaks about this input: False if a condition fails, None if one is undecided."""
        verdicts = [assumption.holds for assumption in self.assumptions]
        if False in verdicts:
            return False
        return None if None in verdicts else True

    @property
    def respected(self) -> bool | None:
        """Whether `actual` lies on the promised side of `value` (to rounding); None where there is no `actual`."""
        if self.actual is None or math.isnan(self.actual):
            return None
        # quadrature is good to 1e-9 relative, and to 1e-12 where the quantity itself vanishes
        slack = 1e-9 * max(abs(self.value), abs(self.actual), 1e-3)
        if self.sense == "upper":
            return self.actual <= self.value + slack
        if self.sense == "lower":
            return self.actual >= self.value - slack
        return abs(self.actual - self.value) <= slack

    @property
    def curve(self) -> Array:
        """The bound layer by layer; empty where there is no depth."""
        return np.array([row.value for row in self.profile] if self.profile else [])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the profile's rows."""
        words = "name source version statement quantity sense"
        return fields_of(self, f"{words} value actual respected holds_for_input assumptions erratum values")

    def __str__(self) -> str:
        holds = {True: "holds for this input", False: "does not apply", None: "if its assumptions hold"}
        lines = [f"{self.quantity} {_SIGN[self.sense]} {self.value:.6g}  ({self.source}, {self.version})"]
        lines.append(f"  {self.statement}; {holds[self.holds_for_input]}")
        if self.actual is not None:
            lines.append(f"  actual {self.actual:.6g}")
        mark = {True: "yes", False: "no ", None: "?  "}
        lines += [f"  {mark[a.holds]} {a.text}" + (f" ({a.detail})" if a.detail else "") for a in self.assumptions]
        return "\n".join(lines)


def state(
    name: str,
    value: float | NDArray[np.floating[Any]],
    *,
    version: Version = "corrected",
    case: int = 0,
    tau: float = math.nan,
    **numbers: Any,
) -> Bound:
    """The bound called `name`, with its words from `theorems.toml`; of a value for each layer the last one counts."""
    words = dict(_theorems()[name])
    words |= words.pop("case", {}).get(str(case), {})
    printed, measure, layer = words.pop("printed", ""), words.pop("measure", ""), words.pop("first_layer", 0)
    if version == "printed" and printed:
        words["statement"] = printed
    if isinstance(value, np.ndarray):
        settings = {"bound": name}
        numbers["profile"] = Profile.over_depth({measure: value}, settings, first=layer, name=name, source="bound")
        layer += len(value) - 1
        value = float(value[-1])
    words["quantity"] = words["quantity"].format(layer=layer, tau=tau)
    return Bound(name=name, value=value, version=version, **words, **numbers)


@cache
def _theorems() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("theorems.toml").read_text("utf-8"))


def check_version(version: str) -> None:
    """UsageError unless `version` is "corrected" or "printed"."""
    if version not in ("corrected", "printed"):
        raise UsageError(f"expected version 'corrected' or 'printed', got {version!r}")


def check_integer(value: Any, *, name: str, least: int) -> int:
    """`value` as an int of at least `least`, or a UsageError that names it."""
    whole = isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < least:
        raise UsageError(f"expected {name} to be an integer of at least {least}, got {value!r}")
    return int(value)


def check_number(
    value: Any, *, name: str, least: float = -math.inf, most: float = math.inf, open_ends: bool = False
) -> float:
    """`value` as a float between `least` and `most`, or a UsageError that names it."""
    numeric = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    inside = numeric and ((least < value < most) if open_ends else (least <= value <= most))
    if not inside:
        ends = "()" if open_ends else "[]"
        raise UsageError(f"expected {name} to be a number in {ends[0]}{least:g}, {most:g}{ends[1]}, got {value!r}")
    return float(value)


def check_matrix(value: ArrayLike, *, name: str, square: bool = False) -> Array:
    """`value` as a finite float64 matrix, or a UsageError that names it."""
    try:
        matrix = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected {name} to be a matrix of numbers, got {type(value).__name__}") from error
    if matrix.ndim != 2 or 0 in matrix.shape or (square and matrix.shape[0] != matrix.shape[1]):
        raise UsageError(f"expected {name} to be a {'square ' if square else ''}matrix, got the shape {matrix.shape}")
    if not np.all(np.isfinite(matrix)):
        raise UsageError(f"expected {name} to be finite, got NaN or infinity in it")
    return matrix
