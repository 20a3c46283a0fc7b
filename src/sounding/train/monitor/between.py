"""What a monitor sees between modules in a measured step: attention, residual streams, gates, routers, ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from sounding.probe.calls import Pass, Spec
from sounding.probe.inside.judge import look_inside
from sounding.probe.inside.listen import Inside
from sounding.probe.inside.rows import HEADS
from sounding.probe.records import Finding, Unmeasured
from sounding.probe.state import all_modules, all_tensors
from sounding.profile import Row

# One of so many measured steps is listened to. To look at every operation of a GPT-2 takes some 90 ms of Python, two of
# its steps on a GPU; with this share of it a monitor of every 100th step stays below 2% of the training.
LISTENED = 10


class Between:
    """The guest in the first forward pass of measured steps.

    To look at every operation takes longer than a small step. So the first measured step is listened to, and after it
    one of LISTENED, or all with `always`; the others look at the sizes of outputs and gradients alone, and keep what
    was found. Where the first showed nothing between modules, as in a perceptron, none is listened to any more until
    the model changes.
    """

    def __init__(self, *, wanted: bool, always: bool = False) -> None:
        self._wanted = self._listens = wanted
        self._every = 1 if always else LISTENED
        self._judged = 0  # measured steps since the model changed
        self._found: tuple[Finding, ...] = ()
        self._seen: list[tuple[Pass, Inside]] = []
        self._inside: Inside | None = None
        self._active = False

    @property
    def _due(self) -> bool:
        return self._listens and self._judged % self._every == 0

    @property
    def modes(self) -> int:
        """How many dispatch modes are on for it."""
        return int(self._active)

    def clear(self) -> None:
        """Forget what a step showed that was not recorded."""
        self._seen, self._inside = [], None

    def listen(self, root: nn.Module, passes: Sequence[Pass], *, axis: int) -> AbstractContextManager[None]:
        """A block inside of which operations of a model are looked at, if this is the first pass of a step.

        `passes` are those of the step, the present one last; `axis` holds the samples.
        """
        if not self._wanted or len(passes) != 1 or self._seen:  # the first pass stands for the step
            return nullcontext()
        parameters, buffers = all_tensors(all_modules(root)) if self._due else ([], [])
        inside = Inside([*parameters, *buffers], passes, axis=axis)
        self._seen = [(passes[-1], inside)]
        return self._during(inside)

    @contextmanager
    def _during(self, inside: Inside) -> Iterator[None]:
        self._inside, self._active = inside, self._due
        try:
            with inside if self._due else nullcontext():
                yield
        finally:
            self._active, self._inside = False, None

    def observe(self, spec: Spec, args: Any, output: Any, record: Callable[[], Any]) -> Any:
        """Record a call; of one that multiplies by a weight, or recurs, the guest takes what it needs."""
        recurs = isinstance(spec.module, nn.RNNBase | nn.RNNCellBase)
        # what is measured is no operation of the model
        with _disable_current_modes() if self._active else nullcontext():
            if self._inside is not None and (spec.weighs or recurs):
                return self._inside.observe(spec.module, args, output, record)
            return record()

    def judge(
        self, passes: Sequence[Pass], *, source: str
    ) -> tuple[tuple[Row, ...], tuple[Finding, ...], tuple[Unmeasured, ...]]:
        """The rows of the step, without those of single heads, what was found when a step was last listened to, and
        what could not be looked at.

        What was seen in a pass that is none of `passes` is dropped.
        """
        due = self._due
        seen, self._seen = [pair for pair in self._seen if any(pair[0] is one for one in passes)], []
        if not seen:
            return (), (), ()
        rows, findings, gaps = look_inside(seen, source=source)
        if due:
            self._found = findings
        if passes[0].calls:  # a pass that was cut short decides nothing
            self._judged += 1
            if due:
                self._listens = any(inside.found or inside.reason for _, inside in seen)
        # there are hundreds of them in every step
        return tuple(row for row in rows if row.measure not in HEADS), self._found, gaps
