"""The register of the faults."""

from collections.abc import Callable
from typing import NamedTuple

from .change import Case


class Fault(NamedTuple):
    body: str
    change: Callable[[Case], None]
    kinds: list[str]
    places: list[str]
    done: str
    own: bool
    later: str


FAULTS: dict[str, Fault] = {}


def fault(kinds: str, places: str, done: str, own: bool = False, later: str = "") -> Callable:
    """Kinds and places are split at spaces, and `*` is any place; `own` measures harm by the fault's own loss."""

    def keep(change: Callable[[Case], None]) -> Callable[[Case], None]:
        where = ["" if place == "*" else place for place in places.split()]
        FAULTS[change.__name__] = Fault(change.__name__.split("_")[0], change, kinds.split(), where, done, own, later)
        return change

    return keep
