"""The monitor that a trainer's callback carries: opened on the trainer's model, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sounding.errors import UsageError, clean
from sounding.probe.sharded import find_shards
from sounding.train.monitor.monitor import Monitor
from sounding.train.monitor.sinks import Sink, Snapshot
from sounding.train.monitor.wall import log

DEEPSPEED = "DeepSpeed keeps weights and gradients in buffers of its own, which cannot be read from outside"


class OwnLogs:
    """The logs of a trainer as a sink: `add` gets each step; the trainer closes them itself."""

    def __init__(self, add: Callable[[Snapshot], None]) -> None:
        self._add = add

    def write(self, snapshot: Snapshot) -> None:
        self._add(snapshot)

    def close(self) -> None: ...


class Carried:
    """What the callbacks have in common.

    Attributes:
        monitor: the monitor of the training that runs or ran last; None where nothing is measured.
        refused: why nothing is measured, "" where something is. A callback does not end a training that it cannot see.
    """

    monitor: Monitor | None = None
    refused = ""

    def _open(self, model: nn.Module, wrapped: nn.Module, own: Sink | None, *, deepspeed: bool, **options: Any) -> None:
        """Start a monitor on the model unless what wraps it hides its weights; `own` takes the trainer's own logs."""
        self.stop()
        try:
            if deepspeed:
                raise UsageError(DEEPSPEED)
            find_shards(wrapped)
        except UsageError as error:
            self.monitor, self.refused = None, str(error)
            log.warning("nothing is measured: %s", clean(self.refused))
            return
        sinks = options.pop("sinks", ())  # those of the user, beside the trainer’s own
        several: list[Sink] = [sinks] if isinstance(sinks, Sink) else list(sinks)
        self.monitor = Monitor(model, sinks=[*several, *([own] if own is not None else [])], **options)
        self.refused = ""
        self.monitor.start()

    def stop(self) -> None:
        """Take the monitor off the model; its numbers stay. Stopping twice does nothing."""
        if self.monitor is not None:
            self.monitor.stop()
