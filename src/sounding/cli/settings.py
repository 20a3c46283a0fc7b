"""`--set KEY=VALUE` options as Python values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from sounding.errors import UsageError
from sounding.limits import UNREADABLE, require_arrays, require_memory


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE pairs: integers, numbers, comma lists of numbers, @FILE.npy or @FILE.npz, anything else as text.

    >>> parse_settings(["width=64", "regularity=0.5", "singular_values=1,0.5", "norm=post-ln"])
    {'width': 64, 'regularity': 0.5, 'singular_values': [1, 0.5], 'norm': 'post-ln'}
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        key = key.strip().replace("-", "_")  # as options are written on a command line
        if not separator or not key.isidentifier():
            raise UsageError(f"expected --set KEY=VALUE, got {setting!r}", hint="--set width=64")
        if key in parsed:
            raise UsageError(f"expected one value for {key}, got two")
        parsed[key] = parse_value(text.strip())
    return parsed


def parse_value(text: str) -> Any:
    """One value, see `parse_settings`."""
    if text.startswith("@"):
        return load_array(Path(text[1:]))
    if "," in text:
        return [parse_value(part) for part in text.split(",") if part.strip()]
    # int first, so that 64 stays a whole number
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def load_array(path: Path, *, key: str | None = None) -> Any:
    """The array of an .npy file, or the one (or the one called `key`) of an .npz file."""
    import numpy as np

    if not path.is_file():
        raise UsageError(f"expected a file of numbers, got {str(path)!r}, which does not exist")
    try:
        with path.open("rb") as stream:
            require_arrays(stream, path)  # numpy would allocate whatever the header says
            loaded = np.load(stream, allow_pickle=False)  # a pickle could run code of its own
            if isinstance(loaded, np.ndarray):
                return loaded
            names = list(loaded)
            if key not in names and len(names) != 1:
                held = f"one array{f' or one called {key!r}' if key else ''}"
                raise UsageError(f"expected {str(path)!r} to hold {held}, got {names}")
            return loaded[key if key in names else names[0]]
    except UsageError:
        raise
    except UNREADABLE as error:
        raise UsageError(f"expected an .npy or .npz file, got {str(path)!r} ({error})") from error


def input_gram(file: Path | None, *, batch_size: int | None, correlation: float | None, decaying: bool = False) -> Any:
    """The input's Gram matrix: from a file, or of unit samples with one correlation (or C^k for samples k apart)."""
    from sounding.theory.gram import decaying_gram, even_gram

    if file is not None:
        if batch_size is not None or correlation is not None:
            raise UsageError("expected either --gram or --batch-size with --correlation, got both")
        return load_array(file, key="gram")
    if batch_size is None or correlation is None:
        raise UsageError("expected an input batch, got none", hint="--batch-size 8 --correlation 0.9, or --gram FILE")
    if not -1 <= correlation <= 1:
        raise UsageError(f"expected a correlation between -1 and 1, got {correlation:g}")
    # the matrix and its copy of 8 bytes an entry
    require_memory(16 * batch_size**2, what=f"the Gram matrix of {batch_size} samples")
    return (decaying_gram if decaying else even_gram)(batch_size, correlation)


def parse_numbers(option: str, text: str, *, kind: type) -> list[Any]:
    """Comma-separated numbers of a kind, at least one, as `--lr 0.01,0.1` or `--residual 1,inf`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} takes {words}, comma-separated, got {text!r}") from None


def take_old_names(options: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """The options under their present names; one that was given under its old name is told on stderr."""
    found = dict(options)
    for old, name in names.items():
        value = found.pop(old)
        if value is not None:
            found[name] = value
            click.echo(f"sounding: --{old} is now --{name}", err=True)
    return found
