"""What every command shares: JSON on stdout, tables and progress on stderr or a terminal, nothing else."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console


def to_plain(value: Any) -> Any:
    """JSON types only: tuples become lists, array scalars numbers, NaN and infinities the strings of `float`."""
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "to_dict"):
        return to_plain(value.to_dict())
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    return str(value)


def print_json(value: Any) -> None:
    """One strict JSON object on stdout."""
    click.echo(json.dumps(to_plain(value), indent=2, allow_nan=False))


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A rich console at most 100 columns wide; NO_COLOR and non-terminals get plain text."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # rich falls back to 80 columns where there is no terminal; tables are laid out for 100
    width = min(Console(file=stream).width, 100) if stream.isatty() else 100
    return Console(file=stream, width=width, quiet=quiet, no_color="NO_COLOR" in os.environ or None, highlight=False)
