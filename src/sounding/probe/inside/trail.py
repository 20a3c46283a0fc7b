"""What each block computes, operation by operation, so that one that differs from its siblings stands out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

# Operations that rearrange or make tensors and compute nothing: they differ with layouts and caches.
QUIET = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"}
    | {"select", "alias", "as_strided", "clone", "copy", "_to_copy", "split", "split_with_sizes", "unbind", "unfold"}
    | {"empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones"}
    | {"full", "full_like", "new_full", "arange", "scalar_tensor", "lift_fresh", "detach", "_local_scalar_dense", ""}
)
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
    """The end of a block: its name, the module, the shape of what it returned, and how many operations and module calls
    there had been."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    operations: int
    calls: int


class Trail:
    """The operations of a pass in order, and where in this order each numbered block ended."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._ends: dict[str, list[End]] = {}

    def note(self, name: str) -> None:
        """An operation went by."""
        if name == "addmm":  # or the two, depending on how its inputs lie in memory
            self._names += ["mm", "add"]
        elif name not in QUIET:
            self._names.append(name.removeprefix("native").strip("_").replace("_", " "))

    def close(self, name: str, module: nn.Module, shape: tuple[int, ...], calls: int) -> None:
        """A block ended, and returned a tensor of this shape."""
        end = End(name, module, shape, len(self._names), calls)
        self._ends.setdefault(name.rpartition(".")[0], []).append(end)

    def odd_blocks(self) -> Iterator[Odd]:
        """Every block whose operations differ from those of all its siblings, which agree.

        What was computed since the sibling before it ended belongs to a block. The first block may do what the others
        find done (embeddings, masks): it votes, and is not judged. The last one may leave out what nobody reads, or an
        activation, and only a sum that is missing is told.
        """
        for ends in self._ends.values():
            if len({end.name for end in ends}) != len(ends) or len(ends) <= SIBLINGS:
                continue
            stops = [0, *(end.operations for end in ends)]
            parts = [tuple(self._names[start:stop]) for start, stop in itertools.pairwise(stops)]
            for index in range(1, len(ends)):
                others = {*parts[1:index], *parts[index + 1 :]}
                typical = others.pop()
                agree = len(ends) - 2 + (parts[0][-len(typical) :] == typical)
                if others or parts[index] == typical or agree < SIBLINGS:
                    continue
                usual, own = Counter(typical), Counter(parts[index])
                missing, extra = usual - own, own - usual
                if index == len(ends) - 1 and {*missing, *extra} != {"add"}:
                    continue
                if _is_meant_alike(ends[index], ends[index - 1], ends[index - 1 if index > 1 else index + 1].module):
                    yield Odd(ends[index].name, ends[index].calls, agree, missing, extra)


def _is_meant_alike(end: End, before: End, sibling: nn.Module) -> bool:
    """Whether a block is meant as its sibling is: of the same class, with no parameter that the sibling lacks or has in
    another shape, or with the same parameters; and without a change of width or resolution since the block before."""
    usual, own = ({name: one.shape for name, one in part.named_parameters()} for part in (sibling, end.module))
    fits = own == usual or (type(end.module) is type(sibling) and own.items() <= usual.items())
    return fits and end.shape == before.shape
