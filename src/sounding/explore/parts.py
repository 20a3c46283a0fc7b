"""Results that come in parts, so that a page has an answer at once and the rest of it soon after."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

from sounding import predict
from sounding.activations.activation import Activation
from sounding.encoding import fields_of
from sounding.errors import SoundingError
from sounding.explore.state import State
from sounding.theory.prescribe import prescriptions

# seconds of work, not of a clock: a machine that is busy otherwise must not make many small parts
ANSWER = 0.05  # after which an answer starts no further part; with the part that runs then it stays below 0.15
PART = 0.04  # that the next part of a prediction may take
FIRST_BLOCKS, MOST_BLOCKS = 4, 24  # in the first part of a prediction, and in any later one


class Growing:
    """The newest of several results, each more complete than the one before."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._parts, self._lock = parts, threading.Lock()
        self._found: Any = None
        self._error: SoundingError | None = None
        self._done = False

    def go_on(self) -> tuple[Any, bool]:
        """What there is after some more work, and whether more will come."""
        busy = self._lock.locked()  # another panel of the page works on the same
        with self._lock:
            began = time.thread_time()
            while not self._done and not (busy and self._found is not None):
                try:
                    self._found = next(self._parts)
                except StopIteration:
                    self._done = True
                except SoundingError as error:
                    self._done, self._error = True, error
                if time.thread_time() - began > ANSWER:
                    break
            if self._error is not None:
                raise self._error
            return self._found, not self._done


@functools.lru_cache(maxsize=64)
def prescribed(activation: Activation, batch_size: int, depth: int, weight_std: float) -> Growing:
    """The prescription of a batch norm network, kind of change by kind of change."""
    return Growing(prescriptions(activation, batch_size=batch_size, depth=depth, weight_std=weight_std))


@functools.lru_cache(maxsize=64)
def predicted_blocks(state: State) -> Growing:
    """The prediction of a network of blocks, of more of its blocks each time."""
    return Growing(_predict_blocks(state))


def block_options(state: State) -> dict[str, Any]:
    """What the prediction of blocks is asked with."""
    names = "depth placement branch_scale correlation" + (" tokens" if state.network == "transformer" else "")
    return fields_of(state, names)


def _predict_blocks(state: State) -> Iterator[Any]:
    """Predictions of the first blocks, then of more: no placement of the page makes a block depend on those behind."""
    known, depth, pace = 0, min(FIRST_BLOCKS, state.depth), 0.0
    while known < state.depth:
        began = time.thread_time()
        yield getattr(predict, state.network)(state.phi, **block_options(state) | {"depth": depth})
        # blocks that an earlier answer met are looked up, and say little of the pace of those behind them
        pace = max(pace / 2, (time.thread_time() - began) / (depth - known))
        more = max(1, min(int(PART / pace), MOST_BLOCKS, depth))
        known, depth = depth, min(state.depth, depth + more)
