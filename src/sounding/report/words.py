"""What the report calls things: measures, charts, findings, papers. The words stand in words.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SHARE_OUTSIDE = "share_outside"
Scale = Literal["linear", "log", "exponent"]


@dataclass(frozen=True)
class Chart:
    """One chart over depth; words.toml says what the fields are."""

    title: str
    reading: str
    measures: dict[str, str]
    scale: Scale = "linear"
    kinds: tuple[str, ...] = ()
    lower: float | None = None
    upper: float | None = None


_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CHARTS = tuple(Chart(**chart) for chart in _WORDS["charts"])
EVIDENCE: dict[str, str] = _WORDS["evidence"]
PAPERS: dict[str, str] = _WORDS["papers"]
