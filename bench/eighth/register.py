"""The register of faults and what a fault may change: the network, the loss and each batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class Case:
    model: Any
    loss: Callable[..., Any]
    feeds: list = field(default_factory=list)
    batch: Any = None

    def feed(self, x, y):
        for change in self.feeds:
            x, y = change(x, y)
        return x, y


class Fault(NamedTuple):
    body: str
    plant: Callable[[Case], None]
    kinds: list
    places: list
    done: str
    later: str
    judge: str


FAULTS: dict[str, Fault] = {}


def split(words):
    return [word.strip() for word in words.split(",")]


def fault(body, kinds, places, done, later="", judge="own"):
    """`kinds` starts with the closest name; `later` says why a short run need not show the harm.

    `judge` tells how harm.py measures: "own" sends the validation batch through the same changes, "clean" does not.
    """

    def register(plant):
        FAULTS[plant.__name__] = Fault(body, plant, split(kinds), split(places), done, later, judge)
        return plant

    return register


def instead(module, **methods):
    """Gives the module other code, as if its class had been written so."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), methods)
