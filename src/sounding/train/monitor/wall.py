"""The wall between a monitor and the training it looks at: what fails on one side never reaches the other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sounding.errors import clean

TOLD = 32  # errors told in a run: one whose words hold a changing number must not fill the log
log = logging.getLogger("sounding.monitor")


class Wall:
    """What failed in one step, each thing with its reason; the log hears of an error once in a run (`told`)."""

    def __init__(self, step: int = 0, told: set[str] | None = None) -> None:
        self.step = step
        self.failed: dict[str, str] = {}
        self._told = set() if told is None else told

    def at(self, step: int) -> Wall:
        """A wall for another step of the run."""
        return Wall(step, self._told)

    def note(self, subject: str, reason: str) -> None:
        """Remember why something was not measured; the first reason counts, which the others follow from."""
        self.failed.setdefault(subject, reason)

    def note_error(self, subject: str, error: Exception) -> str:
        """Remember that something failed, tell the log if it has not heard of the error, and give the reason."""
        told = describe(error)
        reason = f"it failed with {told}"
        self.note(subject, reason)
        if told not in self._told and len(self._told) < TOLD:
            self._told.add(told)
            with suppress(Exception):  # a filter or a handler of somebody's may fail as well
                text = "%s failed at step %d and is left out: %s; this is said once, and the training goes on"
                log.error(text, clean(subject), self.step, clean(told))
        return reason


class Walled(Protocol):
    """What has walled methods: it is told what failed in them."""

    def _fail(self, place: str, error: Exception, arguments: tuple[Any, ...]) -> None: ...


Owner = TypeVar("Owner", bound=Walled)
Result = TypeVar("Result")
P = ParamSpec("P")


def walled(method: Callable[Concatenate[Owner, P], Result]) -> Callable[Concatenate[Owner, P], Result | None]:
    """Let nothing that the method raises reach its caller: the owner is told, and None comes back.

    Ctrl-C and an exit pass, since they are no `Exception`. The code of the user is never called behind a wall.
    """

    @functools.wraps(method)
    def guarded(self: Owner, /, *arguments: P.args, **keywords: P.kwargs) -> Result | None:
        try:
            return method(self, *arguments, **keywords)
        except Exception as error:
            with suppress(Exception):
                self._fail(method.__name__, error, arguments)
            return None

    return guarded


def describe(error: Exception) -> str:
    """The class of an error and the first line of what it says, if it can say anything."""
    lines: list[str] = []
    with suppress(Exception):
        lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
