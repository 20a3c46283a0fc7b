"""`--set KEY=VALUE` options as Python values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sounding.errors import UsageError


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE pairs: integers, numbers, comma lists of numbers, @FILE.npy or @FILE.npz, anything else as text.

    >>> parse_settings(["width=64", "regularity=0.5", "singular_values=1,0.5", "norm=post-ln"])
    {'width': 64, 'regularity': 0.5, 'singular_values': [1, 0.5], 'norm': 'post-ln'}
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        key = key.strip().replace("-", "_")
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
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"expected an .npy or .npz file, got {str(path)!r} ({error})") from error
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        names = list(loaded)
        chosen = key if key in names else names[0] if len(names) == 1 else None
        if chosen is None:
            raise UsageError(
                f"expected {str(path)!r} to hold one array{f' or one called {key!r}' if key else ''}, got {names}"
            )
        return loaded[chosen]
