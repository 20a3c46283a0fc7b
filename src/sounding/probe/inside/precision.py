"""How far outputs, gradients and weights are from the ends of narrow number formats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

ENTRIES = 2**9  # of which a median is taken: known to a tenth of a bit, and sorting more costs as much as a small layer
MEASURES = ("largest_log2", "gradient_largest_log2", "gradient_median_log2", "weight_largest_log2")
# log₂ of the smallest and the largest positive number of each format.
FORMATS = {
    "float16": (-24.0, math.log2(65504)),
    "bfloat16": (-133.0, math.log2(torch.finfo(torch.bfloat16).max)),
    "float8 e5m2": (-16.0, math.log2(57344)),
    "float8 e4m3": (-9.0, math.log2(448)),
}


@dataclass(eq=False)
class Range:
    """The sizes of one call's output and of the gradient that came back to it.

    Args:
        at: which call of the pass, from 0.
        largest: entry of the output, in absolute value.
        gradient: largest and median entry of the gradient that are not zero.
    """

    at: int
    largest: Tensor
    gradient: dict[str, Tensor] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """log₂ of every size that is positive and finite."""
        sizes = {"largest_log2": self.largest, **self.gradient}
        return {name: math.log2(size) for name, one in sizes.items() if 0 < (size := float(one)) < math.inf}


def largest_entry(tensor: Tensor) -> Tensor:
    """The largest absolute value."""
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(-low, high)


def note_gradient(sizes: dict[str, Tensor], gradient: Tensor | None) -> None:
    """Keep the largest and the median entry of a gradient; zeros, which no format loses, are left out."""
    if gradient is None or not gradient.numel() or gradient.is_sparse:
        return
    sizes["gradient_largest_log2"] = largest_entry(gradient)
    flat = gradient.detach().flatten()
    sample = flat[:: max(flat.numel() // ENTRIES, 1)].abs().float()
    sizes["gradient_median_log2"] = sample.masked_fill(sample == 0, math.nan).nanmedian()


def headroom(values: dict[str, float]) -> dict[str, float]:
    """Bits left in each format: to overflow above the largest size, or to underflow below the median gradient.

    Negative where the format does not hold it.

    >>> {name: round(bits, 1) for name, bits in headroom({"largest_log2": 4.0, "gradient_median_log2": -20.0}).items()}
    {'float16': 4.0, 'bfloat16': 113.0, 'float8 e5m2': -4.0, 'float8 e4m3': -11.0}
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
