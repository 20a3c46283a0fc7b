"""Compiled code and attention's fast path call no hooks: both are off while somebody measures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


class Switch:
    """Something of the whole process that is off for as long as somebody measures.

    Watches and monitors of several models (a generator and its critic) open and close in any order: restoring what each
    one found would leave the last one's finding behind. So the first holder turns it off and the last turns it back.
    """

    def __init__(self, turn_off: Callable[[], Callable[[], None] | None]) -> None:
        self._turn_off = turn_off
        self._holders = 0
        self._back: Callable[[], None] | None = None

    def hold(self) -> None:
        """Note that one more measurement runs; the first turns compiled modules off."""
        self._holders += 1
        if self._back is None:
            self._back = self._turn_off()

    def release(self) -> None:
        """Note that a measurement has ended; the last turns compiled modules on again."""
        self._holders -= 1
        if self._holders == 0 and self._back is not None:
            self._back()
            self._back = None


def _hold_compiler_off() -> Callable[[], None] | None:
    """Let compiled code run eagerly; nothing is to do while nobody has loaded the compiler."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None or "torch._dynamo" not in sys.modules:
        return None
    stance: Any = set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _leave_fast_path() -> Callable[[], None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


eager_execution = Switch(_hold_compiler_off)
slow_attention = Switch(_leave_fast_path)
