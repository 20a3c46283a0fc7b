"""The signal at one place of a network: second moments over pairs of points, and the measures read off them.

K[a, b] is the mean over features of h_a h_b; D[a, b] the sum over features of the gradients' products g_a g_b. One
record holds either. Where all pairs of points would be too many, positions are dealt to sub-grids of every r-th
position, and pairs within a sub-grid are followed: a stride of 2 maps a spacing of r to one of r/2, and the sub-grids
stay closed under convolution, functions and sums. Spacing 1 is one block with all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np

from sounding.errors import UsageError
from sounding.theory.signal.description import Array, Points

# points up to which all pairs are followed: 32 MiB for each node; above, memory and time grow as the square
FULL = 2048


@dataclass(frozen=True)
class Signal:
    """Second moments over the followed pairs of points."""

    matrix: Array  # (blocks, size, size); a block holds the points of one sub-grid, sample by sample
    points: Points
    mean: Array  # (blocks, size), the mean over features of h_a; for gradients, their sum over features
    spacing: tuple[int, ...]  # of the sub-grids along each axis; 1 everywhere for all pairs
    # what gives `shape` where somebody asks for it, which most nodes' readers do not
    make_shape: Callable[[], Array | None] | None = field(default=None, repr=False, compare=False)
    # how far neighbours that are not followed are like the position itself rather than like the followed positions: 0
    # for noise, 1 where values change little from one followed position to the next
    blur: float = 0.0
    # what the rule that reads the values leaves here for the gradient that comes back to it
    kept: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def full(cls, matrix: Array, points: Points, mean: Array | None = None) -> Signal:
        """A signal with all pairs of points, from an n × n matrix and the feature means (n,), 0 unless given.

        >>> Signal.full(np.eye(2), Points(2)).sample_gram.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        matrix = np.asarray(matrix, dtype=np.float64)
        if matrix.shape != (points.size, points.size):
            raise UsageError(f"expected a matrix over {points.size} points, got the shape {matrix.shape}")
        level = np.zeros(points.size) if mean is None else np.asarray(mean, dtype=np.float64).reshape(points.size)
        return cls(matrix[None], points, level[None], (1,) * len(points.grid))

    @classmethod
    def of_features(
        cls,
        array: Any,
        *,
        points: Points | None = None,
        spacing: tuple[int, ...] | None = None,
        reduce: Literal["mean", "sum"] = "mean",
    ) -> Signal:
        """The signal of measured values (samples, *grid, features): the mean over features for K, the sum for D.

        Args:
            array: the values; a torch tensor on the CPU is taken too.
            points: where they live, if their shape is not that of the grid, as (samples, positions, features).
            spacing: of the sub-grids to follow, as `spacings` plans it; all pairs unless given.
            reduce: "mean" for values, "sum" for gradients.

        >>> Signal.of_features(np.array([[1.0, 1.0], [2.0, 0.0]])).matrix.tolist()
        [[[1.0, 1.0], [1.0, 2.0]]]
        """
        values = np.asarray(array, dtype=np.float64)
        if values.ndim < 2 or values.size == 0:
            raise UsageError(f"expected values of shape (samples, *grid, features), got {values.shape}")
        points = Points(values.shape[0], values.shape[1:-1]) if points is None else points
        if values.size != points.size * values.shape[-1]:
            raise UsageError(f"expected values at {points.size} points, got the shape {values.shape}")
        chosen = (1,) * len(points.grid) if spacing is None else spacing
        rows = values.reshape(points.size, -1)[block_points(points, chosen)]
        divisor = values.shape[-1] if reduce == "mean" else 1
        found = cls(rows @ np.swapaxes(rows, 1, 2) / divisor, points, rows.sum(axis=2) / divisor, chosen)
        if found.is_full:
            return found
        over = values.reshape(points.samples, points.positions, -1).sum(axis=1)
        return replace(found, blur=found._blur(float(np.sum(over**2)) / divisor))

    @property
    def gram(self) -> Array:
        """The n × n matrix of all pairs; refused where only sub-grids are followed."""
        if not self.is_full:
            raise UsageError(f"only pairs on every {self.spacing} positions are followed, not all pairs")
        whole: Array = self.matrix[0]
        return whole

    @property
    def is_full(self) -> bool:
        """Whether all pairs of points are followed."""
        return len(self.matrix) == 1

    @cached_property
    def shape(self) -> Array | None:
        """The law of the values over features, as `shapes` has it, None for Gaussian ones.

        Of a gradient, how large it is at each place of that law; None where it does not depend on the value.
        """
        return None if self.make_shape is None else self.make_shape()

    @cached_property
    def diagonal(self) -> Array:
        """The second moment of every point, (blocks, size)."""
        return np.ascontiguousarray(np.diagonal(self.matrix, axis1=1, axis2=2))

    @property
    def lattice(self) -> tuple[int, ...]:
        """How many positions a sub-grid has along each axis."""
        return tuple(size // step for size, step in zip(self.points.grid, self.spacing, strict=True))

    @property
    def std(self) -> Array:
        """The standard deviation over features of every point, (blocks, size)."""
        return np.asarray(np.sqrt(np.maximum(self.diagonal - self.mean**2, 0.0)))

    @property
    def typical(self) -> tuple[float, float]:
        """The feature mean and the standard deviation over features of all points together."""
        mean = float(self.mean.mean())
        return mean, math.sqrt(max(float((self.diagonal - self.mean**2).mean()), 0.0))

    @cached_property
    def total(self) -> float:
        """The sum of the second moments of all points: the squared norm of a gradient."""
        return float(np.einsum("bii->", self.matrix))

    @cached_property
    def sample_gram(self) -> Array:
        """Second moments of samples, (samples, samples): pairs at the same position, in the mean over positions."""
        if self.points.positions == 1:
            return np.asarray(self.matrix[0])
        return np.asarray(np.einsum("bsptp->st", self.by_sample(self.matrix)) / self.points.positions)

    @cached_property
    def mean_square(self) -> float:
        """The mean over points of their second moments."""
        return float(np.mean(self.diagonal))

    @cached_property
    def cosine(self) -> float:
        """The typical correlation between samples; 0 of one sample."""
        gram, samples = self.sample_gram, self.points.samples
        if samples < 2:
            return 0.0
        inverse = 1 / np.sqrt(np.maximum(np.diagonal(gram), 1e-300))
        whole = float(inverse @ np.einsum("ij,j->i", gram, inverse))
        return min(max((whole - samples) / (samples * (samples - 1)), -1.0), 1.0)

    @cached_property
    def alike(self) -> float:
        """Σ K_ab² / (Σ K_aa)²: 1 where all points are one direction, 1/n where they are orthogonal."""
        return min(1.0, self.inner(self.matrix, self.matrix) / self.total**2) if self.total > 0 else 1.0

    def _blur(self, within: float) -> float:
        """`blur`, from the sum of second moments over all pairs of positions within samples, which it reproduces."""
        positions, places = self.points.positions, math.prod(self.lattice)
        same, followed = self.total, float(np.einsum("bspsq->", self.by_sample(self.matrix)))
        apart = (followed - same) / max(places - 1, 1)
        near = (within - positions * apart) / (same - apart) if same > apart else 1.0
        return min(max((near - 1) / max(len(self.matrix) - 1, 1), 0.0), 1.0)

    @property
    def near(self) -> float:
        """How many positions, itself among them, a pair at one position stands for; 1 for all pairs."""
        return 1.0 + self.blur * (len(self.matrix) - 1)

    @property
    def repeat(self) -> float:
        """How many pairs of different positions stand behind each followed one; 1 for all pairs."""
        followed = math.prod(self.lattice)
        if self.is_full or followed == 1:
            return 1.0
        return (self.points.positions - self.near) / (followed - 1)

    def by_sample(self, matrix: Array) -> Array:
        """A matrix over the pairs with samples and their followed positions apart, (blocks, s, p, s, p)."""
        samples, rest = self.points.samples, matrix.shape[1] // self.points.samples
        return matrix.reshape(-1, samples, rest, samples, rest)

    def apart(self, matrix: Array) -> Array:
        """The entries of pairs at different positions, those at one position set to 0."""
        result = matrix.copy()
        self._at_one_position(result)[:] = 0.0
        return result

    def _at_one_position(self, matrix: Array) -> Array:
        """A view of the entries of pairs of samples at one position, (blocks, s, t, p)."""
        view: Array = np.einsum("bsptp->bstp", self.by_sample(matrix))
        return view

    def row_sums(self, matrix: Array) -> Array:
        """Σ_b M_ab over all points b, (blocks, size), each followed pair counted for those it stands for."""
        sums = matrix.sum(axis=2)
        if self.is_full:
            return np.asarray(sums)
        own = self._at_one_position(matrix).sum(axis=2).reshape(sums.shape)
        return np.asarray(self.repeat * sums + (self.near - self.repeat) * own)

    def inner(self, left: Array, right: Array) -> float:
        """Σ_ab L_ab R_ab over all pairs, each followed one counted for those it stands for."""
        whole = float(np.vdot(left, right))
        if self.is_full:
            return whole
        own = np.einsum("bstp,bstp->", self._at_one_position(left), self._at_one_position(right))
        return self.repeat * whole + (self.near - self.repeat) * float(own)

    def weigh(self, matrix: Array) -> Array:
        """A matrix whose sum over a block is the sum over all pairs: entries times the pairs that they stand for."""
        if self.is_full:
            return matrix
        result = self.repeat * matrix
        self._at_one_position(result)[:] = self.near * self._at_one_position(matrix)
        return result

    def position_sums(self) -> tuple[Array, Array]:
        """Sums over all pairs of positions, (samples, samples), and of the means over positions, (samples,)."""
        pairs = self.by_sample(self.weigh(self.matrix)).sum(axis=(0, 2, 4))
        return 0.5 * (pairs + pairs.T), self.mean.reshape(len(self.mean), len(pairs), -1).sum(axis=(0, 2))

    def multiply(self, left: Array, right: Array) -> Array:
        """The product Σ_c L_ac R_cb over all points c, at the followed pairs."""
        if self.is_full:
            return np.asarray(left @ right)
        return np.asarray(left @ right + (self.repeat - 1) * (self.apart(left) @ self.apart(right)))

    def like(
        self, matrix: Array, mean: Array | None = None, make_shape: Callable[[], Array | None] | None = None
    ) -> Signal:
        """A signal over the same pairs with other numbers; means of 0 and Gaussian unless given."""
        level = np.zeros(matrix.shape[:2]) if mean is None else mean
        return Signal(matrix, self.points, level, self.spacing, make_shape, self.blur)

    def plus(self, other: Signal) -> Signal:
        """The sum of two independent signals of mean 0: gradients that arrive from two sides."""
        known = self.make_shape or other.make_shape
        return self.like(
            self.matrix + other.matrix, self.mean + other.mean, (lambda: self._shape_with(other)) if known else None
        )

    def _shape_with(self, other: Signal) -> Array | None:
        if self.shape is None and other.shape is None:
            return None
        squares = [(one.total, 1.0 if one.shape is None else one.shape**2) for one in (self, other)]
        whole = max(sum(size for size, _ in squares), 1e-300)
        return np.asarray(np.sqrt(sum(size / whole * square for size, square in squares)))

    def tokens(self) -> Iterator[Array]:
        """The positions × positions matrix of each sample, of the followed pairs, block by block."""
        for block in self.by_sample(self.matrix):
            yield from (block[sample, :, sample] for sample in range(len(block)))


def block_points(points: Points, spacing: tuple[int, ...]) -> Any:
    """The numbers of the points of every block, (blocks, size), sample by sample."""
    if len(spacing) != len(points.grid) or any(
        size % step or step < 1 for size, step in zip(points.grid, spacing, strict=True)
    ):
        raise UsageError(f"expected a spacing that divides the grid {points.grid} along every axis, got {spacing}")
    numbers = np.arange(points.size).reshape(points.samples, *points.grid)
    starts = product(*(range(step) for step in spacing))
    return np.stack([
        numbers[(slice(None), *(slice(at, None, step) for at, step in zip(start, spacing, strict=True)))].ravel()
        for start in starts
    ])  # fmt: skip
