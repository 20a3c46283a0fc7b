"""The monitor as a callback of the transformers library's Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

from sounding.lazy import import_extra
from sounding.train.callbacks.carried import Carried, OwnLogs
from sounding.train.monitor.sinks import Snapshot

TrainerCallback: Any = import_extra("transformers", extra="hf", needed_for="TrainerMonitor").TrainerCallback


class TrainerMonitor(TrainerCallback, Carried):  # type: ignore[misc]  # its types are not read
    """`Trainer(..., callbacks=[TrainerMonitor(every=100)])`: a `sounding.Monitor` on the Trainer's model.

    Steps are those of the optimizer, so gradient accumulation counts once; evaluation is not measured; the scaler of
    fp16 is found; a resumed run goes on counting. The Trainer does not tell its callbacks of an error: `stop()` takes
    hooks off a model whose training raised in a measured step, and so does the next training.

    Args:
        log: whether to add the network's numbers and the kinds of its findings to the Trainer's log history, which its
            checkpoints hold. All numbers go to memory and to the sinks.
        **options: for `sounding.Monitor`, all but the optimizer and the scaler.
    """

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        self._log, self._options = log, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Put the monitor on the model, after what makes it parallel."""
        self._open(
            given["model"],
            given["model"],
            OwnLogs(partial(_add, state)) if self._log else None,
            deepspeed=bool(getattr(args, "deepspeed", None)),  # its configuration, None without
            scaler=getattr(given.get("optimizer"), "scaler", None),
            initial_step=state.global_step,  # above 0 where a training resumes
            **self._options,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """One update is done, of however many micro-batches."""
        if self.monitor is not None:
            self.monitor.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the monitor off."""
        self.stop()


def _add(state: Any, snapshot: Snapshot) -> None:
    """Add a line to the Trainer's log history: a short one, since every checkpoint writes the history whole."""
    numbers = {f"sounding/{tag}": value for tag, value in snapshot.scalars().items() if tag.startswith("network/")}
    kinds = [finding.kind for finding in snapshot.verdict.findings]
    state.log_history.append({"step": snapshot.step, **numbers, "sounding/findings": kinds})
