"""Compiled code calls no hooks: while a step is measured everything runs eagerly, whoever compiled it."""

from __future__ import annotations

import sys
from typing import Any

import torch


class EagerExecution:
    """Holds torch's compiler off for as long as somebody measures.

    The compiler has one stance per process, and monitors of several models (a generator and its critic) open and close
    their steps in any order: restoring what each one found would leave the last one's finding behind. So the first
    holder sets the stance and the last puts it back.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._stance: Any = None

    def hold(self) -> None:
        """One more measures."""
        self._holders += 1
        set_stance = getattr(torch.compiler, "set_stance", None)
        if self._stance is None and set_stance is not None and "torch._dynamo" in sys.modules:
            self._stance = set_stance("force_eager")

    def release(self) -> None:
        """One less."""
        self._holders -= 1
        if self._holders == 0 and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


eager_execution = EagerExecution()
