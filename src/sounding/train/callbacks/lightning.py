"""The monitor as a Lightning callback."""

from __future__ import annotations

from functools import partial
from typing import Any

from sounding.lazy import import_extra
from sounding.train.callbacks.carried import Carried, OwnLogs
from sounding.train.monitor.sinks import Snapshot

Callback: Any = import_extra("lightning.pytorch.callbacks", extra="lightning", needed_for="MonitorCallback").Callback


class MonitorCallback(Callback, Carried):  # type: ignore[misc]  # its types are not read
    """`Trainer(callbacks=[MonitorCallback(every=100)])`: a `sounding.Monitor` on the LightningModule.

    Steps are those of the optimizer, so gradient accumulation counts once; validation is not measured; the scaler of
    16-bit training is found. Numbers also go to the trainer's loggers, under `sounding/`.

    Args:
        log: whether to pass numbers on to the trainer's loggers.
        **options: for `sounding.Monitor`, all but the optimizer and the scaler.
    """

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        super().__init__()
        self._log, self._options = log, options
        self._taken = 0  # steps of the optimizer, as of the last batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the monitor on the module."""
        self._taken = trainer.global_step
        self._open(
            pl_module,
            trainer.strategy.model or pl_module,  # what the strategy wraps it in, which may cut it in shards
            OwnLogs(partial(_log, trainer)) if self._log else None,
            deepspeed="DeepSpeed" in type(trainer.strategy).__name__,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            initial_step=trainer.global_step,
            **self._options,
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is one micro-batch: the step is over when the trainer has counted it."""
        if self.monitor is not None and trainer.global_step > self._taken:
            self._taken = trainer.global_step
            self.monitor.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the monitor off."""
        self.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the monitor off, also when training ends by an error."""
        self.stop()


def _log(trainer: Any, snapshot: Snapshot) -> None:
    """Pass the numbers on to whatever loggers the trainer has."""
    metrics = {f"sounding/{tag}": value for tag, value in snapshot.scalars().items()}
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=snapshot.step)
