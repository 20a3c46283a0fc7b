"""Activations as mathematical objects: function, derivative, where they are not smooth, growth, torch twin.

One object serves theory (numpy, float64), chains and probes (torch). `resolve` turns a name ("relu", "leaky_relu:0.1"),
a "module:function" address or any Python callable into an `Activation`.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from sounding.activations.activation import Activation, ActivationLike, has_second_moment
from sounding.activations.custom import from_callable
from sounding.activations.table import EXAMPLES, PARAMETERS, REGISTRY, REQUIRED
from sounding.errors import UsageError

__all__ = ["Activation", "ActivationLike", "from_callable", "has_second_moment", "names", "resolve"]


def names() -> tuple[str, ...]:
    """The registered names; those with a parameter show it, as in "leaky_relu:SLOPE"."""
    return tuple(f"{name}:{PARAMETERS[name]}" if name in PARAMETERS else name for name in REGISTRY)


# what others call activations that are here
OTHER_NAMES = {"swish": "silu", "logistic": "sigmoid", "linear": "identity"}


def resolve(spec: ActivationLike) -> Activation:
    """The activation called `spec`: a registered name, "name:parameter", "module:function", or a callable.

    >>> resolve("leaky_relu:0.2").slopes
    (1.0, 0.2)
    >>> resolve("swish")
    Traceback (most recent call last):
    ...
    sounding.errors.UsageError: unknown activation 'swish'. Try silu.
    """
    if isinstance(spec, Activation):
        return spec
    if callable(spec):
        return from_callable(spec)
    if not isinstance(spec, str):
        raise UsageError(f"expected an activation name, Activation or callable, got {type(spec).__name__}")
    name, _, parameter = spec.partition(":")
    entry = REGISTRY.get(name)
    if entry is None:
        if parameter:
            found = _import_callable(spec)
            return found if isinstance(found, Activation) else from_callable(found, name=spec)
        other = OTHER_NAMES.get(name)
        hint = other or f"one of {', '.join(names())}, or module:function"
        raise UsageError(f"unknown activation {spec!r}", hint=hint)
    if spec == name and name not in REQUIRED:
        return entry if isinstance(entry, Activation) else entry()
    if isinstance(entry, Activation):
        raise UsageError(f"activation {name!r} takes no parameter, got {spec!r}", hint=name)
    try:
        value = float(parameter)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"activation {name!r} needs a number, as in {name}:{EXAMPLES[name]}, got {spec!r}")
    return entry(value)


def _import_callable(spec: str) -> Activation | Callable[..., Any]:
    """The object at "module:function"; modules next to the user, in the current directory, count."""
    module_name, _, attribute = spec.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # the command line starts without the current directory on the path
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # one that it imports is missing
            raise UsageError(f"module {module_name!r} could not be imported: {error}") from error
        raise UsageError(
            f"unknown activation {spec!r}: no activation and no importable module is called {module_name!r}",
            hint=f"one of {', '.join(names())}, or module:function",
        ) from error
    except Exception as error:
        raise UsageError(f"module {module_name!r} could not be imported: {type(error).__name__}: {error}") from error
    finally:
        if here in sys.path:  # the module may have taken it off
            sys.path.remove(here)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        try:
            found = found()  # "torch.nn:Mish" names a class whose instances are the function
        except Exception as error:
            raise UsageError(f"{spec!r} is a class that cannot be made without arguments: {error}") from error
    if not isinstance(found, Activation) and not callable(found):
        raise UsageError(f"module {module_name!r} has no callable {attribute!r}")
    return found  # type: ignore[no-any-return]
