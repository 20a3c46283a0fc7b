"""How far outputs, gradients and weights are from the ends of narrow number formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ENTRIES = 2**9  # of which a median is taken: known to a tenth of a bit, and sorting more costs as much as a small layer
HEADROOM = "headroom_bits"
MEASURES = ("largest_log2", "gradient_largest_log2", "gradient_median_log2", "weight_largest_log2", HEADROOM)
# log₂ of the smallest and the largest positive number of each format.
FORMATS = {
    "float32": (-149.0, 128.0),
    "float16": (-24.0, math.log2(65504)),
    "bfloat16": (-133.0, math.log2(torch.finfo(torch.bfloat16).max)),
    "float8 e5m2": (-16.0, math.log2(57344)),
    "float8 e4m3": (-9.0, math.log2(448)),
}
# What table and report call the bits that are left in a narrow format; they are computed from the sizes, not stored.
HEADROOMS = {"headroom_float16": "float16", "headroom_bfloat16": "bfloat16", "headroom_float8": "float8 e4m3"}


@dataclass(eq=False)
class Range:
    """The sizes of one call's output and of the gradient that came back to it.

    Args:
        at: which call of the pass, from 0.
        kind: the type of the output's numbers.
        ends: the least and the largest entry of the output.
        gradient_ends: the least and the largest entry of the gradient.
        sample: some entries of the gradient.
    """

    at: int
    kind: torch.dtype
    ends: tuple[Tensor, Tensor]
    gradient_ends: tuple[Tensor, Tensor] | None = None
    sample: Tensor | None = None

    def take_gradient(self, gradient: Tensor | None) -> None:
        """Keep what tells the largest and the median entry of a gradient."""
        if gradient is None or not gradient.numel() or gradient.is_sparse:
            return
        gradient = gradient.detach()
        flat = gradient.reshape(-1)
        self.gradient_ends = ends_of(gradient)
        self.sample = flat[:: max(flat.numel() // ENTRIES, 1)].clone()


def sizes_of(ranges: Sequence[Range], weights: Sequence[Sequence[Tensor]]) -> list[dict[str, float]]:
    """log₂ of every size of some calls that is positive and finite; one transfer for each kind of size.

    The median is of the gradient's entries that are not zero: no format loses a zero.

    Args:
        ranges: the calls.
        weights: those of each call.
    """
    found: list[dict[str, float]] = [{} for _ in ranges]
    with_gradient = [(sizes, one) for sizes, one in zip(found, ranges, strict=True) if one.gradient_ends is not None]
    _put(found, "largest_log2", _largest([one.ends for one in ranges]))
    back = [sizes for sizes, _ in with_gradient]
    _put(back, "gradient_largest_log2", _largest([one.gradient_ends for _, one in with_gradient if one.gradient_ends]))
    groups: dict[int, list[tuple[dict[str, float], Tensor]]] = {}
    for sizes, one in with_gradient:
        if one.sample is not None:
            groups.setdefault(len(one.sample), []).append((sizes, one.sample))
    for group in groups.values():
        samples = _stack([sample for _, sample in group]).double().abs()
        medians = samples.masked_fill_(samples == 0, math.nan).nanmedian(dim=1).values
        _put([sizes for sizes, _ in group], "gradient_median_log2", medians.tolist())
    owners = [sizes for sizes, held in zip(found, weights, strict=True) for _ in held]
    _put(owners, "weight_largest_log2", _largest([ends_of(weight) for held in weights for weight in held]))
    return found


def _put(found: Sequence[dict[str, float]], name: str, numbers: Sequence[float]) -> None:
    for values, size in zip(found, numbers, strict=True):
        if 0 < size < math.inf:
            values[name] = max(math.log2(size), values.get(name, -math.inf))


def _largest(ends: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """The largest absolute values of tensors with these ends, in one transfer."""
    if not ends:
        return []
    lows, highs = _stack([one for pair in ends for one in pair]).view(-1, 2).double().unbind(1)
    numbers: list[float] = max_of(lows, highs).tolist()
    return numbers


def _stack(tensors: list[Tensor]) -> Tensor:
    """The tensors as one, also those of a model that lies on several devices and in several types."""
    alike = all((one.device, one.dtype) == (tensors[0].device, tensors[0].dtype) for one in tensors)
    return torch.stack(tensors if alike else [one.double().to(tensors[0].device) for one in tensors])


def ends_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest entry."""
    low, high = torch.aminmax(tensor.detach())
    return low, high


def max_of(low: Tensor, high: Tensor) -> Tensor:
    """The largest absolute value of numbers with these ends."""
    return torch.maximum(-low, high)


def own_headroom(values: Mapping[str, float], kind: torch.dtype) -> dict[str, float]:
    """Bits left in the format that the numbers are stored in; nothing for a type without a name in `FORMATS`."""
    left = headroom(values).get(str(kind).removeprefix("torch."))
    return {} if left is None else {HEADROOM: left}


def headroom(values: Mapping[str, float]) -> dict[str, float]:
    """Bits left in each format: to overflow above the largest size, or to underflow below the median gradient.

    Negative where the format does not hold it.

    >>> {name: round(bits, 1) for name, bits in headroom({"largest_log2": 4.0, "gradient_median_log2": -20.0}).items()}
    {'float32': 124.0, 'float16': 4.0, 'bfloat16': 113.0, 'float8 e5m2': -4.0, 'float8 e4m3': -11.0}
    """
    above = [values[name] for name in MEASURES if "largest" in name and name in values]
    below = values.get("gradient_median_log2")
    found = {}
    for name, (low, high) in FORMATS.items():
        sides = [high - max(above)] if above else []
        sides += [] if below is None else [below - low]
        if sides:
            found[name] = min(sides)
    return found


def find_headroom(values: Mapping[str, float], measure: str) -> float:
    """The bits left in the format of one of `HEADROOMS`, NaN where no size is known.

    >>> find_headroom({"largest_log2": 4.0}, "headroom_float16").__round__()
    12
    """
    return headroom(values).get(HEADROOMS[measure], math.nan)
