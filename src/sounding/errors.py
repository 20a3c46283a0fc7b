"""The error family and the exit codes, and the checks that every edge needs.

Every error a user can cause is a `SoundingError`: it says what was expected, what came, and what to try. The command
line prints it as one sentence and ends with its `exit_code`; anything else that escapes is a defect of ours.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


class ExitCode(IntEnum):
    """What the process tells its caller."""

    HEALTHY = 0
    UNHEALTHY = 1
    USAGE = 2
    NUMERICAL = 3
    NOT_KNOWN = 4
    INTERRUPTED = 130
    TERMINATED = 143

    @classmethod
    def of(cls, status: str) -> ExitCode:
        """The code that tells the status of a verdict.

        >>> ExitCode.of("not known").value
        4
        """
        return cls[status.replace(" ", "_").upper()]


class SoundingError(Exception):
    """The root of the family: a message, and what to try.

    Args:
        message: what was expected and what came, one sentence.
        hint: what to try, one sentence; shown after "Try".

    >>> print(UsageError("batch size must be at least 2, got 1", hint="--batch-size 32"))
    batch size must be at least 2, got 1. Try --batch-size 32.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message.rstrip(".")  # whoever prints it ends the sentence
        self.hint = hint.rstrip(".") if hint else None
        super().__init__(f"{self.message}." + (f" Try {self.hint}." if self.hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process boundaries; the default would call `__init__` with the finished sentence."""
        return _restore, (type(self), self.args, self.__dict__)


class UsageError(SoundingError, ValueError):
    """Bad input, found at the public edge before any work."""


class NumericalError(SoundingError, ArithmeticError):
    """The numerics failed; `state` holds the last state reached."""

    exit_code = ExitCode.NUMERICAL

    def __init__(self, message: str, *, hint: str | None = None, state: Any = None) -> None:
        super().__init__(message, hint=hint)
        self.state = state


class TargetError(SoundingError, RuntimeError):
    """The user's model, loss or callable raised; the original is the `__cause__`."""


class DataError(SoundingError, RuntimeError):
    """A file cannot be had or written: no network, damage, no room, no permission; `partial` is what was computed."""

    def __init__(self, message: str, *, hint: str | None = None, partial: Any = None) -> None:
        super().__init__(message, hint=hint)
        self.partial = partial


class MissingExtraError(SoundingError, ImportError):
    """An optional package is not installed; the hint is the pip command."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed",
            hint=f"pip install 'sounding[{extra}]'",
        )


class InterruptedRun(SoundingError, KeyboardInterrupt):
    """Ctrl-C during a run; `partial` holds what was measured, marked partial."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, message: str, *, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


def require_device(name: str) -> str:
    """The name of a device that is here; found out before the work."""
    import torch

    try:
        if torch.empty(0, device=name).is_meta:  # torch finds the device only when it is used
            raise RuntimeError("the meta device holds no values")
    except (RuntimeError, AssertionError) as error:
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise UsageError(f"no device {name!r} here", hint=" or ".join(there)) from error
    return name


def require_known(kind: str, name: Any, known: Iterable[str]) -> None:
    """UsageError unless a name is among those that are known.

    >>> require_known("weight law", "cauchy", ["gaussian", "uniform"])
    Traceback (most recent call last):
    ...
    sounding.errors.UsageError: unknown weight law 'cauchy'. Try one of gaussian, uniform.
    """
    if name not in (names := list(known)):
        raise UsageError(f"unknown {kind} {name!r}", hint=f"one of {', '.join(names)}")


def require_whole(name: str, value: Any, *, least: int = 1) -> None:
    """UsageError unless a value is a whole number of at least `least`; True is none.

    >>> require_whole("threads", 0)
    Traceback (most recent call last):
    ...
    sounding.errors.UsageError: threads must be a whole number of at least 1, got 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _restore(kind: type[SoundingError], args: tuple[Any, ...], state: dict[str, Any]) -> SoundingError:
    error = kind.__new__(kind, *args)  # without __init__, whose arguments differ from class to class
    error.__dict__.update(state)
    return error


def clean(text: str) -> str:
    """Text that cannot steer a terminal: control bytes, direction marks and lone surrogates become visible signs.

    Names of modules, files and parameters are a stranger's; only line ends and tabs pass.

    >>> clean("red\\x1b[31m")
    'red␛[31m'
    """
    # U+2400 and the following are pictures of control bytes
    return CONTROLS.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else "�", text)


def renamed(**names: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Let a function take arguments under their old names too, after a warning: `@renamed(center="centring")`."""

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def take_old_names(*arguments: P.args, **keywords: P.kwargs) -> Result:
            for old in names.keys() & keywords.keys():
                text = f"the argument {old} of {function.__name__} is now {names[old]}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                keywords[names[old]] = keywords.pop(old)
            return function(*arguments, **keywords)

        return take_old_names

    return decorate
