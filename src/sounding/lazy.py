"""Names and packages that are imported when they are first used, so that `import sounding` stays light."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from sounding.errors import MissingExtraError


def lazily(package: str, index: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        index: name → the module that holds it; `package.name` for a name that is a module itself.
    """

    def find(name: str) -> Any:
        if name not in index:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(index[name])
        # a name that is itself a module of the package stands for that module
        return module if index[name] == f"{package}.{name}" else getattr(module, name)

    return find, lambda: sorted(index)


def import_extra(module: str, *, extra: str, needed_for: str) -> Any:
    """A module of a package that an extra of ours installs; MissingExtraError, with the pip command, without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], extra=extra, needed_for=needed_for) from error
