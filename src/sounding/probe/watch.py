"""Watching a model: hooks on every leaf, measured where they fire, gone when the block ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from sounding.errors import UsageError
from sounding.probe.meeting import Meeting
from sounding.probe.moments import Tier
from sounding.probe.reading import Reading
from sounding.probe.records import Report, Unmeasured
from sounding.probe.sharded import Shards, join_parts
from sounding.probe.state import plain_execution
from sounding.probe.tap import Tap, survey_model
from sounding.profile import Profile


class Watched:
    """A model under watch: enter it, run your own forward and backward passes, read `profile`.

    Every forward pass of the model is one repeat; the profile averages over them. Inside the block modules run one by
    one in Python: the fast path of attention is off and compiled modules run eagerly, because neither calls hooks. The
    options are those of `watch`.
    """

    def __init__(self, model: nn.Module, *, source: str = "watch", **options: Any) -> None:
        self._tap, self._source = Tap(survey_model(model, **options)), source
        self._block = ExitStack()
        self._meeting: Meeting | None = None

    def __enter__(self) -> Watched:
        if self._tap.attached:
            raise UsageError(
                "expected a watch that is not running, got one entered twice", hint="a second sounding.watch"
            )
        with ExitStack() as stack:
            stack.enter_context(plain_execution())
            stack.enter_context(self._tap)
            self._block = stack.pop_all()
        if self.shards is not None:
            self._meeting = Meeting(f"{self._source}/{self.shards.name}", self.shards.ranks)
            self._meeting.come()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.close()
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            join_parts(meeting, self._tap.passes, wait=error is None)

    @property
    def profile(self) -> Profile:
        """What was measured so far, averaged over the forward passes seen."""
        return self._collect({}).profile()

    @property
    def shards(self) -> Shards | None:
        """What lies in several processes, or None for a model that this one holds whole."""
        return self._tap.known.shards

    @property
    def unmeasured(self) -> tuple[Unmeasured, ...]:
        """What could not be measured, and why."""
        return self._tap.unmeasured

    @property
    def report(self) -> Report:
        """The profile and the verdict; theory is laid beside by `sounding.check`, which can run the batch again."""
        from sounding.probe.environment import describe_environment
        from sounding.probe.verdict import judge_reading

        reading = self._collect({})
        return Report(reading.profile(), judge_reading(reading), self.unmeasured, describe_environment(self._tap.root))

    def _collect(self, settings: Mapping[str, Any]) -> Reading:
        if self._meeting is not None:
            raise UsageError(
                "expected the block to be over, got a look inside it: processes put their parts together at its end",
                hint="watched.profile after the block",
            )
        return self._tap.collect(settings, source=self._source)


def watch(
    model: nn.Module,
    *,
    tier: Tier = "fast",
    only: str | Sequence[str] | None = None,
    types: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    samples: int | None = None,
    batch_axis: int | None = None,
) -> Watched:
    """Watch a model in a loop of your own: `with sounding.watch(model) as watched: loss(model(x), y).backward()`.

    Nothing is changed but hooks, which come off when the block ends, also by an error: mode, running statistics and
    gradients are yours. `watched.profile` holds, for every leaf module call in execution order, what
    `sounding.check` measures.

    Args:
        model: any module; torch.compile and data-parallel wrappers are looked through.
        tier: "fast" (norms of the Gram matrix, gradient norms) or "full" (spectral measures too).
        only: names or patterns ("features.*") of the modules to show; layer numbers stay those of the whole model.
        types: module classes to show.
        samples: at most this many samples of a batch enter the forward measures, the first ones; by default 64 for
            "fast", whose cost they bound, and 512 for "full". Gradients are always of the whole batch.
        batch_axis: the axis of the inputs that holds the samples; by default 0, or 1 for torch's own recurrent and
            transformer modules with batch_first=False.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with watch(model) as watched:
    ...     model(torch.eye(4)).sum().backward()
    >>> watched.profile.select("gradient_log_norm").layers
    (1, 2)
    """
    return Watched(model, tier=tier, only=only, types=types, samples=samples, batch_axis=batch_axis)
