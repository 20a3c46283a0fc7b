"""Any Python callable as an activation: checked, its kinks found, differentiated with a known error."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sounding.activations.activation import Activation, Array, Growth, growth_of
from sounding.activations.kinks import find_kinks
from sounding.errors import UsageError

PROBE = 8.0  # a callable must be finite on [−PROBE, PROBE]
MANY_KINKS, MANY_JUMPS = 1000, 64  # rounding in float32 makes jumps
SEARCHED = 12.0  # kinks are searched for on [−SEARCHED, SEARCHED]
NODES = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
# each function takes the step that serves it best: wide ones miss fast changes, narrow ones drown in rounding
STEPS = (1.6e-2, 8e-3, 4e-3, 2e-3, 1e-3, 5e-4, 2.5e-4)
CENTRAL = (-1 / 60, 3 / 20, -3 / 4, 0.0, 3 / 4, -3 / 20, 1 / 60)  # the weights where the stencil is not moved
MARGIN = 3.01  # the outermost node stays a hair off the kink, where a jump has either value


def from_callable(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    derivative: Callable[..., Any] | None = None,
    kinks: Sequence[float] | None = None,
    growth: Growth | None = None,
) -> Activation:
    """Any vectorized Python function as an activation.

    It sees one-dimensional float64 arrays and returns arrays of the same shape; a torch function or module that refuses
    numpy arrays is given float64 tensors, and then autograd is its derivative. `derivative` and `kinks` may also be
    attributes of the function, which is how "module:function" passes them.

    Args:
        function: φ, elementwise.
        name: how to call it; its `__name__` when None.
        derivative: φ′, elementwise. When None, a seven-point difference that never reaches across a kink; the record's
            `derivative_error` states its error relative to the largest slope on [−8, 8].
        kinks: where φ, φ′, φ″ or φ‴ jumps. When None they are searched for on [−12, 12].
        growth: how φ grows at infinity; judged from its values when None.

    Raises:
        UsageError: it raises, is not elementwise, or is not finite on [−8, 8]; with the reason.

    >>> square = from_callable(lambda x: x**2, name="square")
    >>> bool(abs(square.derivative(np.array([3.0]))[0] - 6.0) < 1e-9)
    True
    """
    label = str(name or getattr(function, "__name__", type(function).__name__))
    f, from_torch = _accepted(function, label)
    _require_elementwise(f, label)
    given = derivative if derivative is not None else getattr(function, "derivative", None)
    known = kinks if kinks is not None else getattr(function, "kinks", None)
    places = _places(f, known, label)
    error = 0.0
    if from_torch:
        slope = _autograd(function)
    elif callable(given):
        slope = _checked(given, f"derivative of {label}")
    else:
        slope, error = difference(f, places)
    return Activation(
        label,
        f,
        slope,
        places,
        growth=growth or growth_of(f),
        derivative_error=error,
        twin=(lambda: function) if from_torch else None,
        kinks_within=math.inf if known is not None else SEARCHED,
    )


def widened(activation: Activation, reach: float) -> Activation:
    """The activation with its kinks known on [−reach, reach]: searched for where they were not given.

    >>> ramp = from_callable(lambda x: np.clip(x, -20.0, 20.0), name="ramp")
    >>> ramp.kinks, [round(kink, 9) for kink in widened(ramp, 30.0).kinks]
    ((), [-20.0, 20.0])
    """
    if reach <= activation.kinks_within:
        return activation
    known = activation.kinks_within
    further = (kink.place for kink in find_kinks(activation.function, reach=reach, beyond=known))
    places = tuple(sorted({*activation.kinks, *further}))
    if places == activation.kinks:
        return replace(activation, kinks_within=reach)
    slope, error = activation.derivative, activation.derivative_error
    if error > 0:
        slope, error = difference(activation.function, places)
    return replace(activation, kinks=places, derivative=slope, derivative_error=error, kinks_within=reach)


def _accepted(function: Callable[..., Any], label: str) -> tuple[Callable[[Array], Array], bool]:
    """The function on float64 arrays, and whether it wants torch tensors."""
    sample = np.linspace(-PROBE, PROBE, 2001)
    checked = _checked(function, label)
    try:
        checked(sample)
    except UsageError:
        # torch is never imported for this: a torch function cannot exist without its module being loaded
        if "torch" in sys.modules:
            on_tensors = _checked(_through_tensors(function), label)
            with contextlib.suppress(UsageError):  # the first refusal says more to whoever meant numpy
                on_tensors(sample)
                return on_tensors, True
        raise
    return checked, False


def _checked(function: Callable[..., Any], label: str) -> Callable[[Array], Array]:
    """`function` on arrays of any shape; a refusal, a wrong shape or a NaN becomes an error that says so."""

    def f(x: Array) -> Array:
        """The callable's values in float64; a UsageError says what is wrong with those that are no real numbers."""
        x = np.asarray(x, dtype=np.float64)
        flat = x.ravel().copy()  # a copy: the callable may work in place
        try:
            with np.errstate(all="ignore"):
                returned = np.asarray(function(flat))
                y = returned.astype(np.float64)
        except Exception as error:
            raise UsageError(
                f"activation {label!r} must accept a float64 numpy array, but raised {type(error).__name__}: {error}",
                hint="numpy functions in its body, or numpy.vectorize around it",
            ) from error
        if y.shape != (x.size,):
            raise UsageError(
                f"activation {label!r} must return an array of its input's shape {(x.size,)}, got {y.shape}",
                hint="a function that acts on each element",
            )
        if returned.dtype in (np.float16, np.float32):
            raise UsageError(f"activation {label!r} must compute in float64, got {returned.dtype}")
        if np.iscomplexobj(returned):
            raise UsageError(f"activation {label!r} must return real numbers, got {returned.dtype}")
        if np.isnan(y).any():
            raise UsageError(
                f"activation {label!r} must be a number everywhere, got NaN at x = {_first(x, np.isnan(y))}"
            )
        return y.reshape(x.shape)

    return f


def _first(x: Array, where: Any) -> str:
    return f"{x.ravel()[np.flatnonzero(where)[0]]:.4g}"


def _require_elementwise(f: Callable[[Array], Array], label: str) -> None:
    sample = np.linspace(-PROBE, PROBE, 2001)
    y = f(sample)
    if not np.isfinite(y).all():
        bad = _first(sample, ~np.isfinite(y))
        raise UsageError(f"activation {label!r} must be finite on [−8, 8], got infinity at x = {bad}")
    # other neighbours and another length: what depends on them, as softmax or dropout do, gives other values
    shuffled = np.roll(sample, 700)[:1500]
    if not np.allclose(f(shuffled), np.roll(y, 700)[:1500], rtol=1e-12, atol=1e-12 * (1 + np.abs(y).max())):
        raise UsageError(
            f"activation {label!r} must act on each element alone, but a value depends on the others or on chance",
            hint="an elementwise, deterministic function",
        )


def _places(f: Callable[[Array], Array], given: Any, label: str) -> tuple[float, ...]:
    """The kinks that were given, or those that a search finds; an error where there are too many to be real."""
    if given is not None:
        try:
            places = tuple(sorted(float(kink) for kink in given))
        except (TypeError, ValueError):
            places = (np.nan,)
        if not np.isfinite(places).all():
            raise UsageError(f"kinks of activation {label!r} must be finite numbers, got {given!r}")
        return places
    found = find_kinks(f, reach=SEARCHED)
    jumps = sum(kink.exponent < 0.3 for kink in found)
    if len(found) > MANY_KINKS or jumps > MANY_JUMPS:
        raise UsageError(
            f"activation {label!r} has {len(found)} places on [−12, 12] where it is not smooth, {jumps} of them jumps, "
            f"expected at most {MANY_KINKS} and {MANY_JUMPS}",
            hint="computing it in float64 throughout, or giving its kinks",
        )
    return tuple(kink.place for kink in found)


def _through_tensors(function: Callable[..., Any]) -> Callable[[Array], Any]:
    import torch

    def on_arrays(x: Array) -> Any:
        with torch.no_grad():
            return function(torch.from_numpy(x)).detach().cpu().numpy()

    return on_arrays


def _autograd(function: Callable[..., Any]) -> Callable[[Array], Array]:
    def derivative(x: Array) -> Array:
        import torch

        with torch.enable_grad():
            point = torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True)
            (slope,) = torch.autograd.grad(function(point).sum(), point)
        return np.asarray(slope.numpy(), dtype=np.float64)

    return derivative


def difference(function: Callable[[Array], Array], kinks: tuple[float, ...]) -> tuple[Callable[[Array], Array], float]:
    """φ′ by seven-point differences, and its error relative to the largest slope on [−8, 8].

    The stencil never reaches across a kink: next to one it is moved aside and the interpolating polynomial is
    differentiated off its centre. The step is the one whose result changes least when it is halved; half of it is
    used, and that change is the stated error.
    """
    gaps = np.diff([-math.inf, *kinks, math.inf])
    widest = min(STEPS[0], gaps.min() / 16)
    steps = [step for step in STEPS if step <= widest] or [widest]
    sample = np.linspace(-8.0, 8.0, 803)
    for kink in kinks:
        sample = sample[np.abs(sample - kink) > 1e-3]  # roots have no slope at their kink
    trials = [_stencil(function, kinks, step)(sample) for step in [*steps, steps[-1] / 2]]
    # relative to the largest slope, or to the values where a function is flat between its jumps
    scale = max(float(np.abs(trials[-1]).max()), 1e-6 * float(np.abs(function(sample)).max()), 1e-300)
    errors = [float(np.abs(a - b).max()) / scale for a, b in itertools.pairwise(trials)]
    best = int(np.argmin(errors))
    return _stencil(function, kinks, steps[best] / 2), max(errors[best], np.finfo(np.float64).eps)


def _stencil(function: Callable[[Array], Array], kinks: tuple[float, ...], step: float) -> Callable[[Array], Array]:
    """The derivative by seven points around x with this step, moved aside where a kink is near."""
    edges = np.array([-math.inf, *kinks, math.inf])
    room = np.diff(edges) / (2 * MARGIN + 1)

    def derivative(x: Array) -> Array:
        x = np.asarray(x, dtype=np.float64)
        piece = np.searchsorted(edges, x, side="right") - 1
        # far out, a fixed step would drown in the rounding of x; between kinks, a wider one would reach across
        h = np.minimum(step * np.maximum(1.0, np.abs(x) / 16), room[piece])
        centre = np.minimum(np.maximum(x, edges[piece] + MARGIN * h), edges[piece + 1] - MARGIN * h)
        offset = (x - centre) / h
        moved = np.flatnonzero(offset)
        total = np.zeros_like(x)
        for node, weight in zip(NODES, CENTRAL, strict=True):
            share = np.full_like(x, weight)
            share.flat[moved] = _slope(node, offset.flat[moved])
            total += share * function(centre + node * h)
        return total / h

    return derivative


def _slope(node: float, at: Array) -> Array:
    """The derivative at `at` of the polynomial that is 1 at this node and 0 at the others."""
    others = [m for m in NODES if m != node]
    slope = np.zeros_like(at)
    for left_out in others:
        slope += np.prod([at - m for m in others if m != left_out], axis=0)
    return slope / math.prod(node - m for m in others)
