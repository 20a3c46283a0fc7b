"""What is written down while training: points of curves, divergence, measurements, progress; and when."""

from __future__ import annotations

import copy
import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sounding.errors import UsageError
from sounding.probe.losses import evaluate_loss
from sounding.probe.watch import Watched
from sounding.profile import Profile, Row
from sounding.train.evaluate import Scores, as_values
from sounding.train.history import History, Point, source_of
from sounding.train.recipe import Recipe, check_steps
from sounding.train.samples import Samples, Stream, Streams

TOLD_EVERY = 100  # steps between two calls of `progress`, besides those at evaluations


@dataclass(frozen=True)
class Progress:
    """Where training stands.

    Args:
        step: steps taken.
        steps: of the whole run.
        epoch: passes over the data so far.
        points: the newest point of every run; empty before the first evaluation.
        diverged: how many runs, as of that evaluation.
    """

    step: int
    steps: int
    epoch: float
    points: tuple[Point, ...]
    diverged: int


ProgressCall = Callable[[Progress], None]


class Journal:
    """The growing history of a training, and the steps after which to evaluate the runs and to measure over depth."""

    def __init__(
        self,
        recipe: Recipe,
        samples: Samples,
        stream: Stream | Streams,
        *,
        settings: Sequence[Mapping[str, Any]],
        measure_at: Sequence[int],
        progress: ProgressCall | None,
    ) -> None:
        self._recipe, self._samples, self._stream = recipe, samples, stream
        self._settings, self._progress = settings, progress
        self._points: list[Point] = []
        self._rows: list[Row] = []
        self.diverged: list[int | None] = [None] * len(settings)
        self.stopped = False
        if isinstance(recipe.evaluate, str):
            whole = range(stream.per_epoch, stream.steps + 1, stream.per_epoch) if recipe.evaluate == "epoch" else ()
            self.evaluate_at = frozenset([*whole, stream.steps])
        else:
            self.evaluate_at = frozenset(recipe.evaluate)
        self.measure_at = frozenset(check_steps("measure_at", measure_at))
        for name, steps in (("evaluate", self.evaluate_at), ("measure_at", self.measure_at)):
            if max(steps, default=0) > stream.steps:
                raise UsageError(f"{name} must be at most {stream.steps}, the last step, got {max(steps)}")

    def note(self, step: int, train: Scores, test: Scores | None) -> None:
        """A point of every run; those that have diverged have no numbers any more."""
        for run, gone in enumerate(self.diverged):
            scores = [train.loss, train.accuracy, *((None, None) if test is None else (test.loss, test.accuracy))]
            # what a diverged run would give is that of an older step
            values = [None if found is None else math.nan if gone is not None else found[run] for found in scores]
            self._points.append(Point(run, step / self._stream.per_epoch, step, *values))  # type: ignore[arg-type]

    def measure(self, step: int, run: int, network: nn.Module) -> None:
        """Ranks, gaps, gradient norms and alignment of one run over depth, on the first batch of the training part.

        The network is measured as in training (batch statistics) and left as it is.
        """
        if self.diverged[run] is not None:
            return
        scratch = copy.deepcopy(network).train()  # gradients and running statistics stay the training’s own
        inputs, targets = (part[: self._recipe.batch_size] for part in self._samples.train)
        watched = Watched(scratch, tier="full", source=source_of(run, step))
        with watched, torch.enable_grad():
            ready = self._samples.prepare(inputs).clone()
            # the input's own gradient is layer 0 of the profile
            outputs = scratch(ready.requires_grad_() if ready.is_floating_point() else ready)
            wanted = as_values(targets, outputs) if self._recipe.loss == "mse" else targets
            evaluate_loss(outputs, wanted, loss=self._recipe.loss).backward()  # type: ignore[no-untyped-call]
        self._rows += watched.profile.rows

    def tell(self, step: int) -> None:
        """Call back, if anybody listens; Ctrl-C in there ends the training after this step."""
        if self._progress is not None:
            newest = tuple(self._points[-len(self._settings) :])  # one of each run: `note` adds them together
            lost = sum(gone is not None for gone in self.diverged)
            told = Progress(step, self._stream.steps, step / self._stream.per_epoch, newest, lost)
            try:
                self._progress(told)
            except KeyboardInterrupt:
                self.stopped = True  # the loop ends behind the step, when all of it is kept

    def history(self, record: Mapping[str, Any], *, partial: bool = False) -> History:
        """The history up to the last step that was taken."""
        told = {**record, "partial": True} if partial else record
        profile = Profile(tuple(self._rows), {"partial": True} if partial else {})
        return History(tuple(self._points), tuple(self.diverged), profile, tuple(self._settings), told)

    def state(self) -> str:
        """What a checkpoint keeps of the journal."""
        return json.dumps(self.history({}).to_dict())

    def load_state(self, text: str) -> None:
        """Continue from `state`."""
        history = History.from_dict(json.loads(text))
        self._points, self._rows = list(history.curves), list(history.profile.rows)
        self.diverged = list(history.diverged)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C and SIGTERM back until the step that is running is whole; a second one strikes at once.

    Gives a function that says whether one came. A signal that someone else handles is left to them, and outside the
    main thread nothing is held back.
    """
    came = False

    def handle(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    inside = threading.current_thread() is threading.main_thread()
    ours = [number for number, handler in usual.items() if inside and signal.getsignal(number) is handler]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield lambda: came
    finally:
        for number in ours:
            signal.signal(number, usual[number])
