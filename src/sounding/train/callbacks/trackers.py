"""Measured steps in TensorBoard and in Weights & Biases."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sounding.lazy import import_extra
from sounding.train.monitor.sinks import TRACKED, Snapshot


class TensorBoard:
    """Writes numbers as scalars under `sounding/<measure>/<layer>.<name>`, and news as text.

    Args:
        target: a directory for event files, or a SummaryWriter of yours, which is flushed and left open.
        measures: which measures of the weight layers; None for every measure of every call, a thousand curves or more.
    """

    def __init__(self, target: Any = "runs", *, measures: Collection[str] | None = TRACKED) -> None:
        self._measures = measures
        self._own = isinstance(target, str | Path)  # what we open, we close
        self._writer = target
        if self._own:
            import_extra("tensorboard", extra="tensorboard", needed_for="the TensorBoard sink")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(target))

    def write(self, snapshot: Snapshot) -> None:
        """Add the scalars of a step, and its news."""
        tags = {f"sounding/{tag}": value for tag, value in snapshot.scalars(self._measures).items()}
        if not _add_together(self._writer, tags, snapshot.step):
            for tag, value in tags.items():
                self._writer.add_scalar(tag, value, snapshot.step)
        for event in snapshot.events:
            self._writer.add_text(f"sounding/{event.kind}", event.text, snapshot.step)

    def close(self) -> None:
        """Flush, and close the writer if it is ours; a later `write` opens a new event file."""
        self._writer.flush()
        if self._own:
            self._writer.close()


def _add_together(writer: Any, tags: dict[str, float], step: int) -> bool:
    """All scalars as one record, in a tenth of the time of a thousand; False where the writer is not torch's own."""
    try:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    if not isinstance(writer, SummaryWriter):
        return False
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
    # there is no public way to write several scalars at once
    writer._get_file_writer().add_summary(Summary(value=values), step)
    return True


class WeightsAndBiases:
    """Logs numbers under `sounding/<measure>/<layer>.<name>`, over the axis `sounding/step`.

    The axis is its own because a run's built-in step counts calls of `log`, yours included.

    Args:
        run: a run of yours, which is left open; without it one is started, and finished when the monitor stops.
        measures: which measures of the weight layers; None for every measure of every call, a thousand curves or more.
        **options: for `wandb.init` where a run is started, such as `project="..."`, `mode="offline"`.
    """

    def __init__(self, run: Any = None, *, measures: Collection[str] | None = TRACKED, **options: Any) -> None:
        self._own, self._options, self._measures = run is None, options, measures
        self._run = _start(options) if run is None else _prepare(run)

    def write(self, snapshot: Snapshot) -> None:
        """Log the numbers of a step, and its news as alerts in the log."""
        if self._run is None:
            self._run = _start(self._options)
        data: dict[str, Any] = {f"sounding/{tag}": value for tag, value in snapshot.scalars(self._measures).items()}
        data["sounding/step"] = snapshot.step
        if snapshot.verdict.status != "not known":  # a gap in the curve, where a 0 would accuse
            data["sounding/healthy"] = int(snapshot.verdict.healthy)
        if snapshot.events:
            data["sounding/news"] = "\n".join(event.text for event in snapshot.events)
        self._run.log(data)

    def close(self) -> None:
        """Finish the run if it is ours; a later `write` starts another."""
        if self._own and self._run is not None:
            self._run.finish()
            self._run = None  # a finished run takes nothing more


def _start(options: dict[str, Any]) -> Any:
    wandb = import_extra("wandb", extra="wandb", needed_for="the Weights & Biases sink")
    return _prepare(wandb.init(**options))


def _prepare(run: Any) -> Any:
    run.define_metric("sounding/step", hidden=True)  # an axis, no curve
    run.define_metric("sounding/*", step_metric="sounding/step")
    return run
