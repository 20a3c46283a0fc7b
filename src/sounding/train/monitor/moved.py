"""How far the optimizer moves the weights of each layer in a measured step, from a sample of their entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sounding.probe.calls import OpenCall, Pass
from sounding.probe.parts import is_distributed
from sounding.probe.table import owner_of

UPDATE_RATIO = "update_ratio"
# Entries of a matrix that are kept until the step is over. All of them would double the memory of the weights; these
# know a root mean square to about 1/√(2 · 16384), half a percent.
SAMPLE = 16_384
APART = "update ratio: the weights lie in several processes, and none of them sees a step of the whole"


class Moved:
    """The weights of a model before a step; `note_ratios` compares them with those after it.

    Vectors (biases, norms) are left out, as well as weights that lie in several processes (`apart`).
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        matrices = [
            (name, weight)
            for name, weight in parameters
            if weight.requires_grad and not is_lazy(weight) and weight.dim() > 1 and weight.is_floating_point()
        ]
        self._weights = [(name, weight) for name, weight in matrices if not is_distributed(weight)]
        self.apart = len(self._weights) < len(matrices)
        self._before = [_sample(weight) for _, weight in self._weights]

    def note_ratios(self, one: Pass) -> None:
        """Put ‖ΔW‖/‖W‖ of the matrices of each module beside what was measured at its last call.

        Weights that started the step at zero have no ratio.
        """
        owners: dict[str, OpenCall] = {name: one.calls[index] for name, index in one.entered.items()}
        owners |= {call.spec.name: call for call in one.calls}
        sums: dict[str, list[float]] = {}
        for (name, weight), change, size in zip(self._weights, *self._norms(), strict=True):
            owner = owner_of(name, owners)
            if owner is not None:
                total = sums.setdefault(owner, [0.0, 0.0])
                entries = weight.numel() / -(
                    -weight.numel() // _stride(weight.shape)
                )  # that one of the sample stands for
                total[0] += entries * change * change
                total[1] += entries * size * size
        for owner, (change, size) in sums.items():
            if size:
                owners[owner].values[UPDATE_RATIO] = math.sqrt(change / size)

    def _norms(self) -> tuple[list[float], list[float]]:
        """The norms of the sampled changes and of the sampled weights, read in one transfer."""
        if not self._weights:
            return [], []
        after = [_sample(weight) for _, weight in self._weights]
        changes = torch._foreach_sub(after, self._before)
        norms = (*torch._foreach_norm(changes), *torch._foreach_norm(self._before))
        numbers: list[float] = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).tolist()
        return numbers[: len(after)], numbers[len(after) :]


def _sample(weight: Tensor) -> Tensor:
    """A copy of evenly spread entries, wide enough to take differences."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().reshape(-1)[:: _stride(weight.shape)].to(wide, copy=True)


def _stride(shape: Sequence[int]) -> int:
    """The distance between sampled entries, without a common factor with an axis, so that all rows and columns count.

    >>> _stride((64, 64)), _stride((4096, 4096))
    (1, 1025)
    """
    stride = -(-math.prod(shape) // SAMPLE)
    while any(math.gcd(stride, size) > 1 for size in shape if size > 1 and stride > 1):
        stride += 1
    return stride
