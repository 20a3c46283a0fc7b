"""What each block computes, operation by operation, so that one that differs from its siblings stands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from sounding.probe.calls import is_opaque
from sounding.probe.inside.oddities import BENDS
from sounding.probe.outputs import main_tensor

# Operations that rearrange or make tensors and compute nothing: they differ with layouts and caches.
QUIET = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"}
    | {"select", "alias", "as_strided", "clone", "copy", "_to_copy", "split", "split_with_sizes", "unbind", "unfold"}
    | {"empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones"}
    | {"full", "full_like", "new_full", "arange", "scalar_tensor", "lift_fresh", "detach", "_local_scalar_dense", ""}
)
ACTIVATIONS = {"relu", *(name.replace("_", " ") for name in BENDS)}
SIBLINGS = 3  # blocks that agree with each other, from which on another one is the odd one


@dataclass(frozen=True)
class Odd:
    """A block that computes something else than its siblings; without missing and extra operations in another order.

    Args:
        block: its name.
        at: how many module calls had ended when it ended.
        siblings: how many blocks agree with each other.
        missing: operations that they have and it does not, with how often.
        extra: operations that it has and they do not, with how often.
    """

    block: str
    at: int
    siblings: int
    missing: Counter[str]
    extra: Counter[str]


class End(NamedTuple):
    """The end of a block: its name, the module, the shapes of what it was given and returned, whether it was given the
    shape that the one before it returned, its operations, and how many module calls there had been."""

    name: str
    module: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    follows: bool
    part: tuple[str, ...]
    calls: int


class Trail:
    """The operations of a pass in order, and which of them each numbered block consists of."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._stops: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._ends: dict[str, list[End]] = {}

    def note(self, name: str) -> None:
        """An operation went by."""
        if name == "addmm":  # or the two, depending on how its inputs lie in memory
            self._names += ["mm", "add"]
        elif name not in QUIET:
            self._names.append(name.removeprefix("native").strip("_").replace("_", " "))

    def close(self, name: str, module: nn.Module, given: Any, output: Any, calls: int) -> None:
        """A numbered module ended: a block if it holds others, else what stands between blocks."""
        place = name.rpartition(".")[0]
        start, last = self._stops.get(place, (0, ()))
        tensors = (next((one for one in given if isinstance(one, Tensor)), None), main_tensor(output))
        before, behind = (() if one is None else tuple(one.shape) for one in tensors)
        self._stops[place] = len(self._names), behind
        if module._modules and not is_opaque(module):
            # where the shape has changed on the way, as in front of a stage, so has what is computed there
            end = End(name, module, (before, behind), before == last, tuple(self._names[start:]), calls)
            self._ends.setdefault(place, []).append(end)

    def _families(self) -> Iterator[list[End]]:
        """Blocks that are siblings: those of one list or, where each list has few, those of one class in all lists."""
        few: dict[tuple[object, ...], list[End]] = {}
        for ends in self._ends.values():
            if len({end.name for end in ends}) == len(ends) > 1:
                if len(ends) > SIBLINGS:
                    yield ends
                else:
                    for end in ends:
                        kind = (type(end.module), *(name for name, _ in end.module.named_parameters()))
                        few.setdefault(kind, []).append(end)
        yield from few.values()

    def odd_blocks(self) -> Iterator[Odd]:
        """Every block whose operations differ from those of all its siblings, which agree.

        What was computed since the sibling before it ended belongs to a block. The first block of a list may do what
        the others find done (embeddings, masks): it votes, and is not judged. The last one may leave out what nobody
        reads, or an activation, and only a sum that is missing or added is told.
        """
        for ends in self._families():
            firsts = {self._ends[end.name.rpartition(".")[0]][0].name for end in ends}
            lasts = {self._ends[end.name.rpartition(".")[0]][-1].name for end in ends}
            later = [end for end in ends if end.name not in firsts]
            for end in (one for one in later if one.follows):
                others = {one.part for one in later if one is not end}
                if len(others) != 1 or end.part in others:
                    continue
                (typical,) = others
                agree = [one for one in ends if one is not end and one.part[-len(typical) :] == typical]
                usual, own = Counter(typical), Counter(end.part)
                missing, extra = usual - own, own - usual
                # two siblings are enough for one thing: that a block forgets to bend has no other explanation
                bends = bool(missing) and not extra and set(missing) <= ACTIVATIONS
                if len(agree) < (2 if bends else SIBLINGS):
                    continue
                if end.name in lasts and {*missing, *extra} != {"add"}:
                    continue
                if any(_is_meant_alike(end, one) for one in agree):
                    yield Odd(end.name, end.calls, len(agree), missing, extra)


def _is_meant_alike(end: End, sibling: End) -> bool:
    """Whether a block is meant as a sibling is: given and returning the same shapes, of the same class with no
    parameter that the sibling lacks or has in another shape, or with the same parameters."""
    usual, own = ({name: one.shape for name, one in part.module.named_parameters()} for part in (sibling, end))
    fits = own == usual or (type(end.module) is type(sibling.module) and own.items() <= usual.items())
    return fits and end.shapes == sibling.shapes
