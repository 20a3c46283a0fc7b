"""Norms, rotations and activations that were written out operation by operation, recognized by their numbers.

A norm written as `x * rsqrt(mean(x²) + eps)` is five operations. Instead of the pattern, which every library writes in
its own way, the result is compared with what a norm of the same input would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sounding.activations import Activation, resolve
from sounding.reader.values import Function, Traced, Value, times
from sounding.theory.signal.description import Normalize, Rotate

if TYPE_CHECKING:
    from sounding.reader.trace import Trace

# how far two computations of one formula may differ, by the type of the numbers
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# Activations with closed forms or analytic derivatives, which a function that agrees with them is taken for.
NAMES = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "softplus", "elu", "selu", "erf", "hardtanh", "exp")
LARGEST_EPS = 0.1  # a larger number in a norm’s code is a scale; libraries use 1e-12 to 1e-3


def recognize(trace: Trace, function: Function) -> Value | None:
    """The node that a function of one value is, or None."""
    base, out = function.base, function.tensor
    x = trace.tensor_of(base)
    if x is None or x.shape != out.shape or out.dtype not in CLOSE or out.numel() < 2:
        return None
    close = max(CLOSE[out.dtype], CLOSE.get(x.dtype, 0.0))
    given, found = x.detach().double().cpu(), out.detach().double().cpu()
    if not bool(torch.isfinite(found).all()):
        return None
    return _as_norm(trace, function, given, found, close) or _as_rotation(trace, base, given, found, close)


def _as_norm(trace: Trace, function: Function, x: Tensor, y: Tensor, close: float) -> Traced | None:
    """The norm whose result y is, to the rounding of its type, or None where it is none."""
    layout = function.base.layout
    features = [axis for axis in range(len(layout)) if layout.roles(axis) == {"feature"}]
    if not features:
        return None
    # the largest first: without an eps a norm of large values fits as well
    small = sorted({n for n in function.numbers if 0 <= n <= LARGEST_EPS} | {0.0}, reverse=True)
    for axes in dict.fromkeys((tuple(features), (features[-1],))):
        for kind, centred in (("rms", x), ("layer", x - x.mean(axes, keepdim=True))):
            for eps in small:
                plain = centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt()
                factor = float((plain * y).sum() / plain.square().sum().clamp_min(1e-300))
                if factor > 0 and float((y - factor * plain).abs().max()) <= close * float(y.abs().max()):
                    label = "RMS norm" if kind == "rms" else "layer norm"
                    rule = Normalize(kind, eps)  # type: ignore[arg-type]
                    node = trace.add(rule, (function.base,), layout, label=label)
                    if abs(factor - 1) <= close:
                        return node
                    return trace.add(times(factor), (node,), layout, label=f"{factor:.4g} times")
    return None


def _as_rotation(trace: Trace, base: Traced, x: Tensor, y: Tensor, close: float) -> Traced | None:
    """Pairs of features turned by an angle per position, the same in every sample and head."""
    layout = base.layout
    places = [axis for axis in range(len(layout)) if layout.roles(axis) == {"position"}]
    last = len(layout) - 1
    if len(places) != 1 or layout.roles(last) != {"feature"} or x.shape[last] % 2:
        return None
    order = [places[0], *(axis for axis in range(last) if axis != places[0]), last]
    first = x.permute(order).reshape(x.shape[places[0]], -1, x.shape[last])
    second = y.permute(order).reshape(first.shape)
    changed = ((first - second).abs().amax((0, 1)) > close * first.abs().max()).nonzero().flatten()
    if len(changed) == 0:
        return None
    width = int(changed[-1]) + 1
    for rotated in dict.fromkeys((first.shape[-1], width + width % 2)):
        index = torch.arange(rotated)
        halves, neighbours = (index[: rotated // 2], index[rotated // 2 :]), (index[::2], index[1::2])
        for one, other in (halves, neighbours):  # which features are turned together
            angles = _angles(first, second, one, other, close)
            if angles is not None:
                whole = np.zeros((len(first), first.shape[-1] // 2))
                whole[:, : rotated // 2] = angles
                return trace.add(Rotate(whole), (base,), layout, label="rotary embedding")
    return None


def _angles(x: Tensor, y: Tensor, one: Tensor, other: Tensor, close: float) -> np.ndarray | None:
    """The angle of every (position, pair), or None where no rotation makes y of x.

    In numpy, because torch resolves conjugates above the level at which a trace sees operations.
    """
    before, after = (z[..., one].numpy() + 1j * z[..., other].numpy() for z in (x.cpu(), y.cpu()))
    turn = (after * before.conj()).sum(1)
    turn = turn / np.maximum(np.abs(turn), 1e-300)
    if np.abs(before * turn[:, None] - after).max() > close * np.abs(after).max():
        return None
    return np.asarray(np.angle(turn))


def as_activation(function: Callable[[Tensor], Tensor], label: str) -> Activation:
    """The activation that a function of numbers is, under its own name if theory knows it, else under `label`."""

    def named(x: Tensor) -> Tensor:
        return function(x)

    named.__name__ = label
    return _by_name(function) or resolve(named)


def _by_name(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """The named activation that a function of numbers agrees with: libraries write one GELU in six ways."""
    x = torch.linspace(-8, 8, 321, dtype=torch.float64)
    y = function(x).numpy()
    slope = -float(y[0]) / 8.0  # what a leaky ReLU has below zero
    names = [*NAMES, f"leaky_relu:{slope:.10g}"] if np.isfinite(slope) and slope else NAMES
    known = (resolve(name) for name in names)
    return next((one for one in known if np.allclose(one(x.numpy()), y, rtol=1e-7, atol=1e-9)), None)
