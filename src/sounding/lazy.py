"""Names and packages that are imported when they are first used, so that `import sounding` stays light."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sounding.errors import MissingExtraError


def lazily(package: str, held: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        held: module of the package → the names that it holds; "" → names that are modules themselves.
    """
    index = {name: module for module, names in held.items() for name in names}

    def find(name: str) -> Any:
        if name not in index:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not index[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{index[name]}"), name)

    return find, lambda: sorted(index)


def import_extra(module: str, *, extra: str, needed_for: str) -> Any:
    """A module of a package that an extra of ours installs; MissingExtraError, with the pip command, without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], extra=extra, needed_for=needed_for) from error
