"""The live monitor: what `sounding.watch` measures, at chosen steps of any training loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from sounding.errors import UsageError, clean
from sounding.probe.environment import describe_environment
from sounding.probe.meeting import count_meetings
from sounding.probe.pipeline import pipelining
from sounding.probe.reading import Reading
from sounding.probe.records import Report, Unmeasured
from sounding.probe.thresholds import THRESHOLDS, Thresholds
from sounding.probe.verdict import conclude, judge_reading
from sounding.profile import Profile, Row
from sounding.train.monitor.changes import Changes, Event, Limits
from sounding.train.monitor.selection import Modules, Pick, Schedule, as_picks, as_schedule, choose_measures
from sounding.train.monitor.sinks import Memory, Sink, Snapshot
from sounding.train.monitor.wall import Wall, log, walled
from sounding.train.monitor.window import MonitorOptions, Scaler, Vantage, Window

EVENTS = 1000  # news held in memory; a finding that comes and goes for ever must not fill it


class Monitor:
    """Watch a model while it trains, in any loop: `with sounding.Monitor(model) as monitor: ...; monitor.step()`.

    A monitor does not end a training: what fails in it is logged once and named in `unmeasured`, and the loop goes on.
    Hooks are on the model for the steps that are measured and gone between them. A step is one update by the optimizer,
    however many forward and backward passes it takes; step 0 is measured on the weights as they start. Call `step()`
    once per update, or give the optimizer and call nothing. Numbers are those of `sounding.watch` for the same passes.

    Args:
        model: any module; torch.compile and data-parallel wrappers are looked through. A compiled model runs eagerly
            in the steps that are measured.
        every: measure steps 0, n, 2n, …; 100 where no schedule is given.
        schedule: instead of `every`: the steps themselves, a function of the step number, or "log" for ten per factor
            of ten.
        measures: "fast" (norms of the Gram matrix, gradient norms), "full" (spectral measures too), or the names of the
            measures to keep.
        include: names, patterns ("features.*") or classes of the modules to show; all by default.
        exclude: the same, for those to leave out.
        samples: at most this many samples of a batch enter the forward measures; 64 for "fast", 512 for "full".
        batch_axis: the axis of the inputs that holds the samples, as in `sounding.watch`.
        inside: look between modules too, at attention, residual streams, gates, routers and the range of numbers: in
            the first measured step and every tenth after it, since it takes as long as some steps; or "always".
        optimizer: whose steps are counted; without it, call `step()`.
        scaler: the torch.amp.GradScaler in use; its scale is divided out of gradients.
        sinks: where measured steps go besides memory: `JsonLines`, `TensorBoard`, `WeightsAndBiases`, or any object
            with `write` and `close`. A sink that fails is logged and left out; it does not stop the training.
        on_finding: called with each `Event`; what it raises reaches your loop.
        limits: lines of your own, {"participation_ratio": (2, None)}; crossing one is an event. An update that moves a
            layer's weights by more than 0.3 of their size is one too, unless you give a line for "update_ratio".
        thresholds: where the verdict draws its lines.
        keep: at most this many profiles are held in memory, evenly spread over the run.
        initial_step: the number of steps taken before, for a run that resumes.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with Monitor(model, every=10, optimizer=optimizer) as monitor:
    ...     for _ in range(25):
    ...         optimizer.zero_grad()
    ...         model(torch.eye(4)).square().mean().backward()
    ...         _ = optimizer.step()
    >>> monitor.profile.sources
    ('step 0', 'step 10', 'step 20')
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | None = None,
        schedule: Schedule | Iterable[int] | Literal["log"] | None = None,
        measures: str | Sequence[str] = "fast",
        include: Pick | Sequence[Pick] | None = None,
        exclude: Pick | Sequence[Pick] | None = None,
        samples: int | None = None,
        batch_axis: int | None = None,
        inside: bool | Literal["always"] = True,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Scaler | None = None,
        sinks: Sink | Sequence[Sink] = (),
        on_finding: Callable[[Event], object] | None = None,
        limits: Limits | None = None,
        thresholds: Thresholds = THRESHOLDS,
        keep: int = 64,
        initial_step: int = 0,
    ) -> None:
        self._schedule = as_schedule(every, schedule)
        tier, self._measures = choose_measures(measures)
        self._optimizer, self._on_finding, self._thresholds = optimizer, on_finding, thresholds
        if optimizer is not None and not hasattr(optimizer, "register_step_post_hook"):
            raise UsageError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}", hint="step()")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise UsageError(f"expected a torch.amp.GradScaler, got {type(scaler).__name__}")
        if inside not in (True, False, "always"):
            raise UsageError(f"expected inside to be True, False or 'always', got {inside!r}")
        given: list[Any] = [sinks] if isinstance(sinks, Sink) else list(sinks)
        for sink in given:
            if not isinstance(sink, Sink):
                told = f"expected sinks with write and close, got {type(sink).__name__}"
                raise UsageError(told, hint="JsonLines('run.jsonl')")
        self._sinks: list[Sink] = given
        self._model = model
        # a trainer may give the module inside of DistributedDataParallel: averaged or not, .grad has it at the end
        reduced = torch.distributed.is_available() and torch.distributed.is_initialized()
        modules = Modules(as_picks("include", include), as_picks("exclude", exclude))
        self._options = MonitorOptions(tier, modules, samples, batch_axis, scaler, reduced, inside)
        self._vantage = Vantage(model, self._options)  # a wrong model, filter or option is found here, not in the loop
        if self._vantage.known.shards is not None:
            # the same in all processes, which make their monitors in one order
            number = count_meetings(f"monitors/{self._vantage.known.shards.name}")
            self._vantage.options = self._options = replace(self._options, number=number)
        self._memory, self._changes = Memory(keep), Changes(limits)
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._step = initial_step
        self._window: Window | None = None
        self._last: Window | None = None
        self._wall = self._shown = Wall(initial_step)
        self._handle: Any = None
        self._running = self._again = self._warned = self._stale = False

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Monitor:
        """Begin; the next pass of the model belongs to step `initial_step`, or to the one where `stop` left off."""
        if self._running:
            raise UsageError("expected a monitor that is not running, got one started twice", hint="stop() first")
        self._running = True
        if self._optimizer is not None:
            self._handle = self._optimizer.register_step_post_hook(lambda *_: self._advance())
        self._open_if_due()
        return self

    def step(self) -> None:
        """One update of the optimizer is done: record it if it was measured, and get ready for the next."""
        if self._optimizer is not None:
            raise UsageError(
                "expected the optimizer's steps to be counted, got a call of step() as well",
                hint="Monitor(model) without optimizer=, or no call",
            )
        self._advance()

    def stop(self) -> None:
        """End: hooks come off, sinks are closed; an unfinished step is not recorded. Stopping twice does nothing."""
        self._running = False
        window = self._close_window()
        if window is not None:
            self._abandon(window)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._tell_sinks("close")

    @property
    def steps(self) -> int:
        """How many steps have been taken."""
        return self._step

    @property
    def profile(self) -> Profile:
        """The steps held in memory as one table; the source of a row is its step ("step 400")."""
        return self._memory.profile

    @property
    def profiles(self) -> Mapping[int, Profile]:
        """Step → profile, for the steps held in memory."""
        return self._memory.profiles

    @property
    def findings(self) -> tuple[Event, ...]:
        """What appeared, changed and went, in order; the last 1000."""
        return tuple(self._events)

    @property
    def unmeasured(self) -> tuple[Unmeasured, ...]:
        """What the last step that was due could not measure, and why."""
        found = self._list_unmeasured() or ()
        named = {item.name for item in found}
        failed = self._shown.failed.items()  # also where no window came to be
        return (*found, *(Unmeasured(name, reason) for name, reason in failed if name not in named))

    @property
    def report(self) -> Report:
        """The last measured step with its verdict, for `sounding.write_html`."""
        latest = self._memory.latest
        if latest is None:
            raise UsageError("expected a measured step, got none so far", hint="monitor.step() after each update")
        return Report(latest.profile, latest.verdict, self.unmeasured, describe_environment(self._model))

    def _advance(self) -> None:
        """End a step: record it if it was measured, tell its news, and open the next if it is due."""
        if self._window is None and self._running:  # most steps by far
            self._step += 1
            self._open_if_due()
            return
        if not self._running:
            raise UsageError(
                "expected a monitor that is running, got a step before start() or after stop()",
                hint="with sounding.Monitor(model) as monitor: ...",
            )
        window = self._close_window()
        try:
            events = self._record(window) if window is not None else ()
            if window is not None and events is None:
                self._abandon(window)
            if events and self._on_finding is not None:
                for event in events:
                    self._on_finding(event)  # in front of the wall: what it raises reaches the loop
        finally:
            self._step += 1
            self._open_if_due()

    def _fail(self, place: str, error: Exception, arguments: tuple[Any, ...]) -> None:
        """Name the step that was not measured, or the sink that did not take it; the next step begins afresh."""
        if place == "_open_if_due":
            self._last, self._wall = None, self._wall.at(self._step)
        sink = type(arguments[0]).__name__ if place == "_hand_over" else None
        self._wall.note_error(sink or "the measurement", error)
        self._shown, self._stale = self._wall, True  # the model may not be as it was known

    @walled
    def _open_if_due(self) -> None:
        if self._again or self._schedule(self._step):  # an overflow showed no gradients: the next step makes up for it
            self._wall = self._wall.at(self._step)
            if self._stale or not self._vantage.structure.is_same():
                self._vantage, self._stale = Vantage(self._model, self._options), False
            window = Window(self._vantage, self._wall)
            # each process has a part that no other sees
            if _is_first_process() or window.shards is not None or pipelining():
                window.__enter__()
                self._window = window

    def _close_window(self) -> Window | None:
        window, self._window = self._window, None
        if window is not None:
            self._leave(window)
        return window

    @walled
    def _leave(self, window: Window) -> None:
        window.__exit__()

    @walled
    def _abandon(self, window: Window) -> None:
        window.abandon()

    @walled
    def _list_unmeasured(self) -> tuple[Unmeasured, ...]:
        return self._last.unmeasured if self._last is not None else ()

    @walled
    def _record(self, window: Window) -> tuple[Event, ...]:
        """The news of a measured step, written to memory, sinks and log."""
        self._last, self._shown = window, window.wall
        seen = window.settle()
        if not _is_first_process() and window.stage is None:
            self._again = window.overflowed  # a part of the first process's measurement
            return ()
        if not seen:
            why = next(iter(window.wall.failed.values()), "no forward pass of the model was seen")
            if not self._warned:
                log.warning("step %d: %s, so nothing was measured", window.step, clean(why))
            self._warned = True  # once in a run
            return ()
        self._again = window.overflowed
        reading = window.reading
        rows, inside = window.look_between() or ((), ())
        verdict = judge_reading(reading, thresholds=self._thresholds, beside=inside)
        held = self._changes.hold(verdict.findings)
        if held != list(verdict.findings):
            verdict = conclude(reading, held)
        events = self._changes.since(window.step, verdict.findings, reading, rows=rows)
        snapshot = Snapshot(window.step, partial(_make_profile, reading, rows, self._measures), verdict, events)
        self._memory.write(snapshot)
        self._events.extend(events)
        self._tell_sinks("write", snapshot)
        for event in events:
            # what eases or goes is no reason to worry
            loud = event.severity == "high" and event.change in ("appeared", "worsened")
            log.log(logging.WARNING if loud else logging.INFO, "%s", clean(event.text))
        return events

    def _tell_sinks(self, method: str, *arguments: Any) -> None:
        """Call all sinks; one that fails is left out from then on."""
        self._sinks = [sink for sink in self._sinks if self._hand_over(sink, method, *arguments)]

    @walled
    def _hand_over(self, sink: Sink, method: str, *arguments: Any) -> bool:
        getattr(sink, method)(*arguments)
        return True


def _make_profile(reading: Reading, rows: tuple[Row, ...], chosen: Container[str] | None) -> Profile:
    """The chosen measures of a step, None for all: those at modules, and `rows`, those between them."""
    made: Profile = reading.profile(chosen)
    return replace(made, rows=made.rows + tuple(row for row in rows if chosen is None or row.measure in chosen))


def _is_first_process() -> bool:
    """Whether this process measures: of several that train one model the first, its shard and everyone's gradient."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
