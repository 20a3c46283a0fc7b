"""Where measured steps go: the shape of a sink, and the one in memory."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.probe.reading import NETWORK, Reading
from sounding.probe.records import Verdict
from sounding.profile import Profile, Row
from sounding.train.monitor.changes import Event

# What a tracker plots of every weight layer: size, directions, gradients and the optimizer's step. All measures of all
# calls are more than a thousand curves for 24 layers, in which nobody finds anything.
TRACKED = ("mean_square", "participation_ratio", "gradient_log_norm", "update_ratio")


@dataclass(frozen=True)
class Snapshot:
    """One measured step: its number, the profile, the verdict, and what is new since the last one."""

    step: int
    profile: Profile
    verdict: Verdict
    events: tuple[Event, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return fields_of(self, "step profile verdict events")

    def scalars(self, measures: Collection[str] | None = TRACKED) -> dict[str, float]:
        """The network's numbers and these measures of its weight layers, under tags that sort by depth for trackers.

        The layer is part of the tag, with leading zeros: `mean_square/0031.features.3`, `network/gradient_growth`.
        With None, every measure of every call.
        """
        layers = self.profile.settings.get("weight_layers")
        found: dict[str, float] = {}
        for row in self.profile.rows:
            if row.name == NETWORK:
                found[f"network/{row.measure}"] = row.value
            elif measures is None or (row.measure in measures and (layers is None or row.layer in layers)):
                found[f"{row.measure}/{row.layer:04d}.{row.name}"] = row.value
        return found


class Measured(Snapshot):
    """A snapshot that makes its profile when it is first asked for: most steps are looked at by nobody.

    The profile holds the `chosen` measures, None for all, of the reading and of `rows`, what was seen between modules.
    """

    def __init__(
        self,
        step: int,
        reading: Reading,
        verdict: Verdict,
        events: tuple[Event, ...],
        *,
        rows: tuple[Row, ...] = (),
        chosen: Container[str] | None,
    ) -> None:
        vars(self).update(step=step, verdict=verdict, events=events, _made_of=(reading, rows, chosen))

    @cached_property
    def profile(self) -> Profile:
        reading, rows, chosen = vars(self).pop("_made_of")
        made: Profile = reading.profile(chosen)
        kept = tuple(row for row in rows if chosen is None or row.measure in chosen)
        return replace(made, rows=made.rows + kept)


@runtime_checkable
class Sink(Protocol):
    """Anything that takes snapshots. `close` ends a run; a later `write` may open it again."""

    def write(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class Memory:
    """The measured steps as profiles, in bounded memory.

    Args:
        keep: at most this many steps are held. When it is full every second one is dropped, and from then on every
            second (fourth, eighth, …) measurement is kept: the whole run at even spacing, the first step and the
            latest always among them.

    >>> memory = Memory(keep=4)
    >>> for step in range(0, 1000, 10):
    ...     memory.write(Snapshot(step, Profile(), Verdict("healthy", (), "")))
    >>> list(memory.profiles)
    [0, 320, 640, 960, 990]
    """

    def __init__(self, keep: int = 64) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 2:
            raise UsageError(f"expected keep= a whole number of at least 2 steps, got {keep!r}")
        self._keep, self._stride, self._seen = keep, 1, 0
        self._kept: list[tuple[int, Snapshot]] = []
        self._latest: Snapshot | None = None

    @property
    def latest(self) -> Snapshot | None:
        """The last step measured."""
        return self._latest

    @property
    def profiles(self) -> Mapping[int, Profile]:
        """Step → profile, in order."""
        found = {snapshot.step: snapshot.profile for _, snapshot in self._kept}
        if self._latest is not None:
            found[self._latest.step] = self._latest.profile
        return found

    @property
    def profile(self) -> Profile:
        """All steps held in one table; the source of a row is its step, "step 400"."""
        profiles = self.profiles
        rows = tuple(row for profile in profiles.values() for row in profile.rows)
        latest = self._latest.profile.settings if self._latest is not None else {}
        return Profile(rows, {**latest, "steps": list(profiles)})

    def write(self, snapshot: Snapshot) -> None:
        """Take a step."""
        self._latest = snapshot
        if self._seen % self._stride == 0:
            self._kept.append((self._seen, snapshot))
            if len(self._kept) > self._keep:
                self._stride *= 2
                self._kept = [(index, held) for index, held in self._kept if index % self._stride == 0]
        self._seen += 1

    def close(self) -> None:
        """Nothing to close."""
