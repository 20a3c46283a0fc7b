"""How far the optimizer moves the weights of each layer in a measured step, from a sample of their entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sounding.probe.calls import OpenCall, Pass
from sounding.probe.parts import is_distributed
from sounding.probe.table import owner_of

UPDATE_RATIO = "update_ratio"
# Entries of a matrix that are kept until the step is over. All of them would double the memory of the weights and make
# a measured step of a small network noticeably longer; these know a root mean square to about 1/√(2 · 4096), 1.1%.
SAMPLE = 4096
APART = "update ratio: the weights lie in several processes, and none of them sees a step of the whole"


class _Sampled(NamedTuple):
    """A matrix by its name, and the distance between the entries that are sampled."""

    name: str
    weight: nn.Parameter
    stride: int


class Moved:
    """The weights of a model before a step; `note_ratios` compares them with those after it.

    Vectors (biases, norms) are left out, as well as weights that lie in several processes (`apart`).
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.apart = False
        self._matrices: dict[torch.device, list[_Sampled]] = {}
        for name, weight in parameters:
            if weight.requires_grad and not is_lazy(weight) and weight.dim() > 1 and weight.is_floating_point():
                if is_distributed(weight):
                    self.apart = True
                else:
                    found = self._matrices.setdefault(weight.device, [])
                    found.append(_Sampled(name, weight, _stride(weight.shape)))
        self._before = [_sample(matrices) for matrices in self._matrices.values()]

    def note_ratios(self, one: Pass) -> None:
        """Put ‖ΔW‖/‖W‖ of the matrices of each module beside what was measured at its last call.

        Weights that started the step at zero have no ratio.
        """
        owners: dict[str, OpenCall] = {name: one.calls[index] for name, index in one.entered.items()}
        # by the last call, where a module is called several times
        owners |= {call.spec.name: call for call in one.calls}
        sums: dict[str, list[float]] = {}
        for matrices, before in zip(self._matrices.values(), self._before, strict=True):
            for (name, _, stride), change, size in zip(matrices, *_norms(matrices, before), strict=True):
                owner = owner_of(name, owners)
                if owner is not None:
                    total = sums.setdefault(owner, [0.0, 0.0])
                    total[0] += stride * change * change  # an entry of the sample stands for `stride` of the matrix
                    total[1] += stride * size * size
        for owner, (change, size) in sums.items():
            if size:  # of a weight that was zero every change is infinitely large
                owners[owner].values[UPDATE_RATIO] = math.sqrt(change / size)


def _sample(matrices: Sequence[_Sampled]) -> Tensor:
    """A copy of evenly spread entries of the matrices of one device, wide enough to take differences."""
    joined = torch.cat([weight.detach().reshape(-1)[::stride] for _, weight, stride in matrices])
    return joined.to(torch.promote_types(joined.dtype, torch.float32))


def _norms(matrices: Sequence[_Sampled], before: Tensor) -> tuple[list[float], list[float]]:
    """The norms of the sampled changes and of the sampled weights, read in one transfer."""
    sizes = [-(-weight.numel() // stride) for _, weight, stride in matrices]
    parts = [*torch.split(_sample(matrices) - before, sizes), *torch.split(before, sizes)]
    numbers: list[float] = torch.stack(torch._foreach_norm(parts)).tolist()
    return numbers[: len(sizes)], numbers[len(sizes) :]


def _stride(shape: Sequence[int]) -> int:
    """The distance between sampled entries, without a common factor with an axis, so that all rows and columns count.

    >>> _stride((64, 64)), _stride((4096, 4096))
    (1, 4097)
    """
    stride = -(-math.prod(shape) // SAMPLE)
    while any(math.gcd(stride, size) > 1 for size in shape if size > 1 and stride > 1):
        stride += 1
    return stride
