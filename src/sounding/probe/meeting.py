"""How processes put their parts of a measurement together without a collective, which hangs all where one stays away.

Everyone leaves a message in the store through which the processes found each other, and reads those of the others up
to a time limit. Nobody waits for a process that does not measure.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sounding.errors import UsageError

Message = Mapping[str, np.ndarray]
PATIENCE = 30.0  # seconds for the others to reach the end of a step that they measure too: a slow disk, not a dead one
ARRIVAL = 60.0  # seconds for the others to call `check`: they may load a checkpoint first
PAUSE = 0.002  # seconds between two looks at the store: short beside a step that is measured
ALONE = "the other processes did not measure at the same time, so their parts are missing"
LATE = f"the other processes did not finish within {PATIENCE:g} s, so their parts are missing"
ENDED = "the measurement ended by an error"
NO_STORE = "the processes share no store to put their parts together"
_met: Counter[str] = Counter()  # how often this process met the others under a name; nothing else tells rounds apart


def count_meetings(name: str) -> int:
    """How often this was called with the name before: the same in all processes that do the same."""
    _met[name] += 1
    return _met[name] - 1


class Meeting:
    """One measurement that several processes take part in: say `come`, measure, then `exchange`."""

    def __init__(self, name: str, ranks: Sequence[int], *, step: int | None = None) -> None:
        self.ranks, self.rank = tuple(ranks), torch.distributed.get_rank()
        self._store = _find_store()
        self._name, self._key = name, f"sounding/{name}/{_met.get(name, 0) if step is None else step}"
        self._counts = step is None

    def come(self) -> None:
        """Let the others know that this process measures."""
        try:
            if self._store is not None:
                self._store.delete_key(f"{self._key}/said/{self.rank}")  # of a round that ended by an error
                self._store.set(f"{self._key}/here/{self.rank}", "1")
        except RuntimeError:  # a store that is gone: `exchange` says so
            self._store = None

    def gather(self, seed: int) -> int:
        """Wait until every process has come, or let none begin: a pass that one process enters alone never ends.

        Returns:
            The seed that one of the processes brought, the same in all.
        """
        store = self._store
        if store is None:
            raise UsageError(f"expected processes that can meet, got none: {NO_STORE}", hint="init_process_group")
        while store.check([f"{self._key}/decision"]) and store.get(f"{self._key}/decision") == b"no":
            _met[self._name] += 1  # a round that some of the others gave up before
            self._key = f"sounding/{self._name}/{_met[self._name]}"
        self.come()
        came = self._wait([f"{self._key}/here/{rank}" for rank in self.ranks], ARRIVAL)
        store.compare_set(f"{self._key}/decision", "", str(seed) if came else "no")
        decision: bytes = store.get(f"{self._key}/decision")
        if decision == b"no":
            raise UsageError(
                f"expected all processes {list(self.ranks)} of the sharded model to check it, "
                f"got {self.rank} alone after {ARRIVAL:g} s",
                hint="calling check in every process",
            )
        _met[self._name] += 1
        return int(decision)

    def exchange(self, message: Message, *, wait: bool = True) -> dict[int, Message] | str:
        """The messages of all processes, or why they could not be had; without `wait` only leave one's own."""
        store = self._store
        if store is None:
            return NO_STORE
        try:
            store.set(f"{self._key}/said/{self.rank}", _pack(message))
            if not store.check([f"{self._key}/here/{rank}" for rank in self.ranks]):
                self._withdraw([self.rank])
                return ALONE
            if not wait:
                self._count()
                return ENDED
            said = {rank: f"{self._key}/said/{rank}" for rank in self.ranks}
            if not self._wait(list(said.values()), PATIENCE):
                self._withdraw([self.rank])  # who comes later must not take this message for one of another round
                return LATE
            found = {rank: _unpack(store.get(key)) for rank, key in said.items()}
            self._count()
            if store.add(f"{self._key}/read", 1) == len(self.ranks):  # the last reader clears up
                self._withdraw(self.ranks)
        except RuntimeError as error:
            return f"the store of the processes failed ({error})"
        return found

    def _count(self) -> None:
        if self._counts:
            _met[self._name] += 1

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether the keys appear in time. Looking again and again leaves the store to torch's own threads meanwhile,
        which one long wait would lock out."""
        end = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(PAUSE)
        return True

    def _withdraw(self, ranks: Sequence[int]) -> None:
        keys = [f"{self._key}/{kind}/{rank}" for rank in ranks for kind in ("here", "said")]
        for key in [*keys, f"{self._key}/read"] if len(ranks) > 1 else keys:
            self._store.delete_key(key)


def _find_store() -> Any:
    """The store of the default process group; None under MPI, which has none."""
    try:
        return torch.distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None


def _pack(message: Message) -> bytes:
    """Names and sizes as JSON, then the numbers: nothing that runs when it is read."""
    head = json.dumps({key: value.size for key, value in message.items()}).encode()
    body = b"".join(value.astype(np.float64).tobytes() for value in message.values())  # exact, NaN included
    return len(head).to_bytes(8, "big") + head + body


def _unpack(data: bytes) -> Message:
    size = int.from_bytes(data[:8], "big")
    sizes: dict[str, int] = json.loads(data[8 : 8 + size])
    numbers = np.frombuffer(data[8 + size :], dtype=np.float64)
    ends = np.cumsum(list(sizes.values()), dtype=int)
    return dict(zip(sizes, np.split(numbers, ends[:-1]), strict=True)) if sizes else {}
