"""Standard normals on a CPU, into memory that is used again.

Box–Muller over the words of SFC64: (r cos θ, r sin θ) with r = √(−2 ln u), and 32 random bits for each of u and θ.
NumPy takes float32 logarithms, sines and cosines eight or sixteen at a time, and two 32-bit words cost less than one of
PyTorch's Mersenne twister. u = (k + ½)·2⁻³² keeps all of its bits where it is small, so that the tails reach 6.7
standard deviations. A float64 chain draws from PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Normals = Callable[[tuple[int, ...]], torch.Tensor]

CHUNK = 1 << 16  # normals per pass: the passes' memory stays in a core's cache, and their calls cost little
STEP, HALF_STEP = np.float32(2.0**-32), np.float32(2.0**-33)  # from 32 bits to a number between 0 and 1, never 0 itself
TURN = np.float32(2 * math.pi * 2.0**-32)  # from 32 bits to an angle


class NormalStream:
    """A stream of float32 standard normals; what a call returns stays valid for `kept` calls, that one included.

    >>> draw = NormalStream(0)
    >>> draw((3, 5)).shape, draw((2, 2)).dtype
    (torch.Size([3, 5]), torch.float32)
    """

    def __init__(self, seed: int, *, kept: int = 1) -> None:
        self._words = np.random.SFC64(seed)
        self._buffers = [np.empty(0, dtype=np.float32)] * kept
        self._turn = 0
        self._scratch = np.empty((3, CHUNK // 2), dtype=np.float32)

    def __call__(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._buffers[self._turn].size < size:
            self._buffers[self._turn] = np.empty(size, dtype=np.float32)
        numbers = self._buffers[self._turn][:size]
        for begin in range(0, size, CHUNK):
            self._fill(numbers[begin : begin + CHUNK])
        return torch.from_numpy(numbers).view(shape)

    def _fill(self, numbers: NDArray[np.float32]) -> None:
        """Fill up to a chunk: cosines in the first half, sines in the second."""
        pairs = (numbers.size + 1) // 2
        words: NDArray[Any] = self._words.random_raw(pairs).view(np.uint32)
        radius, angle, turned = self._scratch[:, :pairs]
        np.copyto(radius, words[:pairs], casting="unsafe")
        radius *= STEP
        radius += HALF_STEP
        np.log(radius, out=radius)
        radius *= np.float32(-2)
        np.sqrt(radius, out=radius)
        np.copyto(angle, words[pairs:].view(np.int32), casting="unsafe")
        angle *= TURN
        np.multiply(radius, np.cos(angle, out=turned), out=numbers[:pairs])
        rest = numbers.size - pairs
        np.multiply(radius[:rest], np.sin(angle, out=turned)[:rest], out=numbers[pairs:])


def make_normals(seed: int, *, generator: torch.Generator, dtype: torch.dtype, kept: int = 1) -> Normals:
    """Normals of a dtype: a stream of its own from `seed` in float32, from `generator` in float64."""
    if dtype == torch.float32:
        return NormalStream(seed, kept=kept)
    return lambda shape: torch.randn(shape, generator=generator, dtype=dtype)
