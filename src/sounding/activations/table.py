"""The registered activations: those without a parameter as they are, the others by the function that makes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sounding.activations.activation import Activation, Array
from sounding.errors import UsageError


def _twin(expression: Callable[[Any], Callable[[Any], Any]]) -> Callable[[], Callable[[Any], Any]]:
    """Delay the import of torch until the twin is asked for."""

    def make() -> Callable[[Any], Any]:
        import torch

        return expression(torch)

    return make


def _special(name: str) -> Callable[[Array], Array]:
    """A function of scipy.special, imported when it is first called: the import takes longer than numpy's."""

    def call(x: Array) -> Array:
        from scipy import special

        values: Array = getattr(special, name)(x)
        return values

    return call


_expit, _erf, _ndtr = _special("expit"), _special("erf"), _special("ndtr")


def _number(value: float) -> str:
    """The shortest text that reads back as the same number: 0.1, 2, 0.3333333333333333."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _leaky_relu(slope: float = 0.01) -> Activation:
    return Activation(
        f"leaky_relu:{_number(slope)}",
        lambda x: np.where(x > 0, x, slope * x),
        lambda x: np.where(x > 0, 1.0, slope),
        kinks=(0.0,),
        degree=1.0,
        slopes=(1.0, slope),
        twin=_twin(lambda t: lambda x: t.nn.functional.leaky_relu(x, slope)),
    )


def _relu_power(alpha: float) -> Activation:
    """max(x, 0)^α for any α above 0; below 1 its slope at 0 is infinite."""
    if alpha <= 0:
        raise UsageError(f"relu_power needs a positive exponent, got {alpha:g}", hint="relu_power:1.5")

    return Activation(
        f"relu_power:{_number(alpha)}",
        lambda x: np.maximum(x, 0.0) ** alpha,
        # where, then power, here and in torch: 0 to a negative power is infinite
        lambda x: np.where(x > 0, alpha * np.where(x > 0, x, 1.0) ** (alpha - 1.0), 0.0),
        kinks=(0.0,),
        degree=alpha,
        slopes=(1.0, 0.0),
        twin=_twin(lambda t: lambda x: t.where(x > 0, t.where(x > 0, x, t.ones_like(x)) ** alpha, t.zeros_like(x))),
    )


def _elu(alpha: float = 1.0) -> Activation:
    return Activation(
        "elu" if alpha == 1.0 else f"elu:{_number(alpha)}",
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        twin=_twin(lambda t: lambda x: t.nn.functional.elu(x, alpha)),
    )


def _hermite(order: float) -> Activation:
    """The probabilists' Hermite polynomial scaled to E h(z)² = 1, so that κ(ρ) = ρ^k exactly (thesis2024, ch. 5)."""
    k = int(order)
    if k != order or not 0 <= k <= 60:
        raise UsageError(f"hermite needs a whole order from 0 to 60, got {order:g}", hint="hermite:2")
    roots = np.sqrt(np.arange(1, k + 1))

    def recurrence(x: Any, ones: Any, degree: int) -> Any:
        # orthonormal three-term recurrence: stable where the expanded polynomial is not
        previous, current = ones * 0.0, ones
        for j in range(degree):
            previous, current = current, (x * current - (roots[j - 1] if j else 0.0) * previous) / float(roots[j])
        return current

    def derivative(x: Array) -> Array:
        return math.sqrt(k) * recurrence(x, np.ones_like(x), k - 1) if k else np.zeros_like(x)

    return Activation(
        f"hermite:{k}",
        lambda x: recurrence(x, np.ones_like(x), k),
        derivative,
        length=1.0 / math.sqrt(max(k, 1)),  # the zeros lie about π/√k apart
        twin=_twin(lambda t: lambda x: recurrence(x, t.ones_like(x), k)),
    )


GELU_ROOT, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715  # Hendrycks and Gimpel (2016): a fit of tanh to the erf in it
SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717  # Klambauer et al. (2017)


def _gelu_tanh_slope(x: Array) -> Array:
    t: Array = np.tanh(GELU_ROOT * (x + GELU_CUBIC * x * x * x))
    slope: Array = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * GELU_ROOT * (1 + 3 * GELU_CUBIC * x**2)
    return slope


_ENTRIES: tuple[Activation | Callable[..., Activation], ...] = (
    Activation(
        "identity", lambda x: x * 1.0, np.ones_like, degree=1.0, slopes=(1.0, 1.0), twin=_twin(lambda t: lambda x: x)
    ),
    replace(_leaky_relu(0.0), name="relu", function=lambda x: np.maximum(x, 0.0), twin=_twin(lambda t: t.relu)),
    _leaky_relu,
    _relu_power,
    Activation(
        "tanh",
        np.tanh,
        lambda x: 1.0 / np.cosh(np.clip(x, -350, 350)) ** 2,  # cosh² overflows beyond
        growth="bounded",
        twin=_twin(lambda t: t.tanh),
    ),
    Activation(
        "erf",
        _erf,
        lambda x: 2.0 / math.sqrt(math.pi) * np.exp(-(x**2)),
        growth="bounded",
        twin=_twin(lambda t: t.erf),
    ),
    Activation("sin", np.sin, np.cos, growth="bounded", twin=_twin(lambda t: t.sin)),
    Activation("sigmoid", _expit, lambda x: _expit(x) * _expit(-x), growth="bounded", twin=_twin(lambda t: t.sigmoid)),
    Activation("softplus", lambda x: np.logaddexp(0.0, x), _expit, twin=_twin(lambda t: t.nn.functional.softplus)),
    Activation("exp", np.exp, np.exp, growth="exponential", twin=_twin(lambda t: t.exp)),
    Activation(
        "gelu",
        lambda x: x * _ndtr(x),
        lambda x: _ndtr(x) + x * (np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)),
        twin=_twin(lambda t: t.nn.functional.gelu),
    ),
    Activation(  # GELU by its formula with tanh, as GPT-2 computes it
        "gelu_tanh",
        lambda x: 0.5 * x * (1 + np.tanh(GELU_ROOT * (x + GELU_CUBIC * x * x * x))),  # x**3 takes longer than the tanh
        _gelu_tanh_slope,
        twin=_twin(lambda t: lambda x: t.nn.functional.gelu(x, approximate="tanh")),
    ),
    Activation(
        "silu",
        lambda x: x * _expit(x),
        lambda x: _expit(x) * (1 + x * _expit(-x)),
        twin=_twin(lambda t: t.nn.functional.silu),
    ),
    _elu,
    Activation(
        "selu",
        lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(np.minimum(x, 0.0))),
        lambda x: SELU_SCALE * np.where(x > 0, 1.0, SELU_ALPHA * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        twin=_twin(lambda t: t.nn.functional.selu),
    ),
    Activation(
        "hardtanh",
        lambda x: np.clip(x, -1.0, 1.0),
        lambda x: np.where(np.abs(x) < 1.0, 1.0, 0.0),
        kinks=(-1.0, 1.0),
        growth="bounded",
        twin=_twin(lambda t: t.nn.functional.hardtanh),
    ),
    _hermite,
)
# name → the activation, or what makes one of a parameter
REGISTRY = {entry.name if isinstance(entry, Activation) else entry.__name__[1:]: entry for entry in _ENTRIES}
PARAMETERS = {"leaky_relu": "SLOPE", "relu_power": "ALPHA", "hermite": "K", "elu": "ALPHA"}
EXAMPLES = {"leaky_relu": "0.1", "relu_power": "1.5", "hermite": "2", "elu": "1"}
REQUIRED = {"relu_power", "hermite"}
