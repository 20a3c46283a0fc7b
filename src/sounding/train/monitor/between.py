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


class Between:
    """The guest in the first forward pass of every measured step.

    To look at every operation takes longer than a small step. Where the first measured step showed nothing between
    modules, as in a perceptron, later ones look at the sizes of outputs and gradients alone, until the model changes.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = self._listens = wanted
        self._seen: list[tuple[Pass, Inside]] = []
        self._inside: Inside | None = None
        self._active = False

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
        parameters, buffers = all_tensors(all_modules(root)) if self._listens else ([], [])
        inside = Inside([*parameters, *buffers], passes, axis=axis)
        self._seen = [(passes[-1], inside)]
        return self._during(inside)

    @contextmanager
    def _during(self, inside: Inside) -> Iterator[None]:
        self._inside, self._active = inside, self._listens
        try:
            with inside if self._listens else nullcontext():
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
        """The rows of the step, without those of single heads, its findings, and what could not be looked at.

        What was seen in a pass that is none of `passes` is dropped.
        """
        seen, self._seen = [pair for pair in self._seen if any(pair[0] is one for one in passes)], []
        if not seen:
            return (), (), ()
        if self._listens and passes[0].calls:  # a pass that was cut short decides nothing
            self._listens = any(inside.found or inside.reason for _, inside in seen)
        rows, findings, gaps = look_inside(seen, source=source)
        # there are hundreds of them in every step
        return tuple(row for row in rows if row.measure not in HEADS), findings, gaps
