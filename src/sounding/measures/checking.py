"""Test a measure of your own: does it batch, is it defined on awkward inputs, does it keep what it claims?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sounding.errors import UsageError
from sounding.measures.of_features import gram

Measure = Callable[[Tensor], Tensor]
Bounds = tuple[float, float] | Callable[[int, int], tuple[float, float]]

SAME = 1e-8  # two float64 routes to one value
ROUNDED = 1e-4  # a float32 input against the same numbers in float64
STEP = 1e-6  # of differences in float64: rounding leaves 1e-10 of a slope, curvature 1e-12
SLOPE = 1e-5  # a derivative against central differences with that step


@dataclass(frozen=True)
class Check:
    """One property of a measure: whether it held, and if not, what came and on which input."""

    name: str
    passed: bool
    detail: str = ""
    example: Tensor | None = None


@dataclass(frozen=True)
class MeasureReport:
    """What `check_measure` found: all checks, in order."""

    measure: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check held."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not hold."""
        return tuple(check for check in self.checks if not check.passed)

    def __str__(self) -> str:
        head = f"{self.measure}: {len(self.checks) - len(self.failures)} of {len(self.checks)} checks passed"
        return "\n".join([head, *(f"  {check.name}: {check.detail}" for check in self.failures)])


class _Broken(Exception):
    def __init__(self, detail: str, example: Tensor) -> None:
        super().__init__(detail)
        self.example = example.detach().clone()


def check_measure(
    measure: Measure,
    *,
    takes: Literal["features", "gram"] = "features",
    bounds: Bounds | None = None,
    scale_invariant: bool = False,
    rotation_invariant: bool = True,
    permutation_invariant: bool = True,
    differentiable: bool = True,
    generator: torch.Generator | None = None,
) -> MeasureReport:
    """Check that a measure keeps the contract of `sounding.measures` and whatever else it claims.

    Always: it leaves its input alone, gives the same value twice, reduces (..., samples, features) to (...), one batch
    at a time, reads float32 as it reads float64, and is not NaN on degenerate batches.

    Args:
        measure: a function of one tensor.
        takes: "features" (..., samples, features) or "gram" (..., samples, samples).
        bounds: (least, greatest), or a function of (samples, features) that gives them.
        scale_invariant: claims f(cH) = f(H) for c > 0, from 1e-200 to 1e200.
        rotation_invariant: claims f(HQ) = f(H) for orthogonal Q.
        permutation_invariant: claims f(PH) = f(H) for permutations P.
        differentiable: claims a gradient that agrees with differences and is finite on degenerate batches.
        generator: source of the random batches; when None one of its own, which always starts alike.

    >>> from sounding.measures import participation_ratio
    >>> print(check_measure(participation_ratio, scale_invariant=True, bounds=lambda n, d: (0, min(n, d))))
    participation_ratio: 10 of 10 checks passed
    >>> print(check_measure(lambda h: h.square().sum(-1).mean(), rotation_invariant=True))
    <lambda>: 7 of 8 checks passed
      batches over leading axes: expected shape (2, 3) for leading axes (2, 3), got ()
    """
    if not callable(measure) or takes not in ("features", "gram"):
        raise UsageError(f"expected a function and takes='features' or 'gram', got {measure!r} and takes={takes!r}")
    trial = _Trial(measure, takes, generator or torch.Generator())
    plan: list[tuple[str, Callable[[], None], bool]] = [
        ("leaves its input alone", trial.check_purity, True),
        ("batches over leading axes", trial.check_batching, True),
        ("reads float32", trial.check_dtype, True),
        ("defined on degenerate batches", trial.check_defined, True),
        ("within its bounds", lambda: trial.check_bounds(bounds), bounds is not None),
        ("scale-invariant", trial.check_scale, scale_invariant),
        ("rotation-invariant", trial.check_rotation, rotation_invariant),
        ("permutation-invariant", trial.check_permutation, permutation_invariant),
        ("gradient agrees with differences", trial.check_gradient, differentiable),
        ("gradient finite on degenerate batches", trial.check_degenerate_gradient, differentiable),
    ]
    checks = []
    for name, check, claimed in plan:
        if not claimed:
            continue
        try:
            check()
            checks.append(Check(name, True))
        except _Broken as broken:
            checks.append(Check(name, False, str(broken), broken.example))
    return MeasureReport(getattr(measure, "__name__", type(measure).__name__), tuple(checks))


def _show(value: Tensor) -> str:
    return ", ".join(f"{number:.6g}" for number in value.flatten().tolist())


class _Trial:
    """A measure, the batches it is tried on, and one method per property."""

    def __init__(self, measure: Measure, takes: str, generator: torch.Generator) -> None:
        self.measure = measure
        self.takes = takes
        self.generator = generator
        shapes = {"wide": (4, 7), "tall": (7, 4), "square": (5, 5)}
        self.regular = {name: self._normal(*shape) for name, shape in shapes.items()}
        nearly = self._normal(5, 1) @ self._normal(1, 6) + 1e-6 * self._normal(5, 6)
        self.degenerate = {
            "zero": torch.zeros(4, 3, dtype=torch.float64),
            "rank-one": self._normal(4, 1) @ self._normal(1, 6),
            # eigenvalues that coincide: a decomposition's derivative divides by their difference
            "repeated samples": self._normal(1, 6).repeat(4, 1),
            "one repeated sample": self._normal(3, 6)[[0, 1, 2, 0]],
            "one sample": self._normal(1, 5),
            "one feature": self._normal(5, 1),
            "orthogonal": torch.eye(4, dtype=torch.float64),
            "nearly rank-one": nearly,
        }

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def _input(self, batch: Tensor) -> Tensor:
        return gram(batch) if self.takes == "gram" else batch

    def value(self, given: Tensor) -> Tensor:
        try:
            value = self.measure(given)
        except Exception as error:
            raise _Broken(f"raised {type(error).__name__}: {error}", given) from error
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise _Broken(f"expected a tensor of a floating dtype, got {got}", given)
        return value

    def expect_same(self, batch: Tensor, other: Tensor, what: str) -> None:
        left, right = self.value(self._input(batch)).double(), self.value(other).double()
        if left.shape != right.shape or not torch.allclose(left, right, rtol=SAME, atol=SAME, equal_nan=True):
            raise _Broken(f"{_show(left)} became {_show(right)} {what}", batch)

    def check_purity(self) -> None:
        for batch in self.regular.values():
            given = self._input(batch)
            before = given.clone()
            first, second = self.value(given), self.value(given)
            if not torch.equal(given, before):
                raise _Broken("the input was changed in place", batch)
            if not torch.equal(first, second):
                raise _Broken(f"{_show(first)} the first time, {_show(second)} the second", batch)

    def check_batching(self) -> None:
        stack = self._input(self._normal(2, 3, 4, 5))
        together = self.value(stack)
        if together.shape != (2, 3):
            raise _Broken(f"expected shape (2, 3) for leading axes (2, 3), got {tuple(together.shape)}", stack)
        alone = torch.stack([self.value(one) for one in stack.flatten(0, 1)]).reshape(2, 3)
        if not torch.allclose(together, alone, rtol=SAME, atol=SAME):
            raise _Broken(f"{_show(together)} together, {_show(alone)} one at a time", stack)

    def check_dtype(self) -> None:
        for batch in self.regular.values():
            narrow = self._input(batch).float()
            wide, value = self.value(narrow.double()), self.value(narrow)
            if not torch.allclose(wide.double(), value.double(), rtol=ROUNDED, atol=ROUNDED):
                raise _Broken(f"{_show(value)} in float32, {_show(wide)} in float64", batch)

    def check_defined(self) -> None:
        for name, batch in self.degenerate.items():
            if self.value(self._input(batch)).isnan().any():
                raise _Broken(f"NaN on a {name} batch", batch)

    def check_bounds(self, bounds: Bounds | None) -> None:
        for name, batch in {**self.regular, **self.degenerate}.items():
            least, greatest = bounds(*batch.shape) if callable(bounds) else bounds or (-torch.inf, torch.inf)
            value = self.value(self._input(batch)).double()
            slack = SAME * max(1.0, abs(least) if abs(least) < torch.inf else 1.0)
            if not bool(((value >= least - slack) & (value <= greatest + slack)).all()):
                raise _Broken(f"{_show(value)} is not in [{least}, {greatest}] on a {name} batch", batch)

    def check_scale(self) -> None:
        for batch in self.regular.values():
            # the last two overflow and underflow when squared: a measure that does not scale first is found out
            for factor in (1e-3, 7.0, 1e200, 1e-200):
                self.expect_same(batch, self._input(batch) * factor, f"when scaled by {factor:g}")

    def check_rotation(self) -> None:
        for batch in self.regular.values():
            rotation = torch.linalg.qr(self._normal(batch.shape[-1], batch.shape[-1])).Q
            self.expect_same(batch, self._input(batch @ rotation), "when the features were rotated")

    def check_permutation(self) -> None:
        for batch in self.regular.values():
            order = torch.randperm(len(batch), generator=self.generator)
            self.expect_same(batch, self._input(batch[order]), "when the samples were reordered")

    def check_gradient(self) -> None:
        for name, batch in self.regular.items():
            if not torch.isfinite(self.value(self._input(batch))).all():
                continue  # ∞ has no slope, as of an isometry gap with more samples than features
            direction = self._normal(*batch.shape)
            slope = (self._gradient(batch, name) * direction).sum()
            ahead, behind = (self.value(self._input(batch + sign * STEP * direction)) for sign in (1, -1))
            difference = (ahead - behind).double() / (2 * STEP)
            if not torch.allclose(slope, difference, rtol=SLOPE, atol=SLOPE):
                raise _Broken(f"slope {slope.item():g}, differences give {difference.item():g}", batch)

    def check_degenerate_gradient(self) -> None:
        for name, batch in self.degenerate.items():
            if not torch.isfinite(self._gradient(batch, name)).all():
                raise _Broken(f"gradient not finite on a {name} batch", batch)

    def _gradient(self, batch: Tensor, name: str) -> Tensor:
        leaf = batch.clone().requires_grad_()
        value = self.value(self._input(leaf))
        if not value.requires_grad:
            raise _Broken(f"no gradient on a {name} batch: the result is detached from the input", batch)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return gradient
