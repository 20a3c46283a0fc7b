"""The registered activations, one maker each."""

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


def _number(value: float) -> str:
    """The shortest text that reads back as the same number: 0.1, 2, 0.3333333333333333."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _identity() -> Activation:
    return Activation(
        "identity", lambda x: x * 1.0, np.ones_like, degree=1.0, slopes=(1.0, 1.0), twin=_twin(lambda t: lambda x: x)
    )


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


def _relu() -> Activation:
    return replace(_leaky_relu(0.0), name="relu", function=lambda x: np.maximum(x, 0.0), twin=_twin(lambda t: t.relu))


def _relu_power(alpha: float) -> Activation:
    """max(x, 0)^α for any α above 0; below 1 its slope at 0 is infinite."""
    if alpha <= 0:
        raise UsageError(f"relu_power needs a positive exponent, got {alpha:g}", hint="relu_power:1.5")

    def derivative(x: Array) -> Array:
        positive = np.where(x > 0, x, 1.0)
        return np.where(x > 0, alpha * positive ** (alpha - 1.0), 0.0)

    return Activation(
        f"relu_power:{_number(alpha)}",
        lambda x: np.maximum(x, 0.0) ** alpha,
        derivative,
        kinks=(0.0,),
        degree=alpha,
        slopes=(1.0, 0.0),
        # where, then power: the gradient of relu(x)**alpha at 0 is infinite for alpha < 1
        twin=_twin(lambda t: lambda x: t.where(x > 0, t.where(x > 0, x, t.ones_like(x)) ** alpha, t.zeros_like(x))),
    )


def _tanh() -> Activation:
    return Activation(
        "tanh",
        np.tanh,
        lambda x: 1.0 / np.cosh(np.clip(x, -350, 350)) ** 2,
        growth="bounded",
        twin=_twin(lambda t: t.tanh),
    )


def _erf() -> Activation:
    from scipy.special import erf

    return Activation(
        "erf", erf, lambda x: 2.0 / math.sqrt(math.pi) * np.exp(-(x**2)), growth="bounded", twin=_twin(lambda t: t.erf)
    )


def _sin() -> Activation:
    return Activation("sin", np.sin, np.cos, growth="bounded", twin=_twin(lambda t: t.sin))


def _sigmoid() -> Activation:
    from scipy.special import expit

    return Activation(
        "sigmoid", expit, lambda x: expit(x) * expit(-x), growth="bounded", twin=_twin(lambda t: t.sigmoid)
    )


def _softplus() -> Activation:
    from scipy.special import expit

    return Activation("softplus", lambda x: np.logaddexp(0.0, x), expit, twin=_twin(lambda t: t.nn.functional.softplus))


def _exp() -> Activation:
    return Activation("exp", np.exp, np.exp, growth="exponential", twin=_twin(lambda t: t.exp))


def _gelu() -> Activation:
    from scipy.special import ndtr

    def density(x: Array) -> Array:
        return np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)

    return Activation(
        "gelu", lambda x: x * ndtr(x), lambda x: ndtr(x) + x * density(x), twin=_twin(lambda t: t.nn.functional.gelu)
    )


def _gelu_tanh() -> Activation:
    """GELU by its formula with tanh, as GPT-2 computes it."""
    root, cubic = math.sqrt(2 / math.pi), 0.044715

    def derivative(x: Array) -> Array:
        t: Array = np.tanh(root * (x + cubic * x * x * x))
        slope: Array = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * root * (1 + 3 * cubic * x**2)
        return slope

    return Activation(
        "gelu_tanh",
        lambda x: 0.5 * x * (1 + np.tanh(root * (x + cubic * x * x * x))),  # x**3 takes longer than the tanh
        derivative,
        twin=_twin(lambda t: lambda x: t.nn.functional.gelu(x, approximate="tanh")),
    )


def _silu() -> Activation:
    from scipy.special import expit

    return Activation(
        "silu",
        lambda x: x * expit(x),
        lambda x: expit(x) * (1 + x * expit(-x)),
        twin=_twin(lambda t: t.nn.functional.silu),
    )


def _elu(alpha: float = 1.0) -> Activation:
    return Activation(
        "elu" if alpha == 1.0 else f"elu:{_number(alpha)}",
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        twin=_twin(lambda t: lambda x: t.nn.functional.elu(x, alpha)),
    )


def _selu() -> Activation:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return Activation(
        "selu",
        lambda x: scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
        lambda x: scale * np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        twin=_twin(lambda t: t.nn.functional.selu),
    )


def _hardtanh() -> Activation:
    return Activation(
        "hardtanh",
        lambda x: np.clip(x, -1.0, 1.0),
        lambda x: np.where(np.abs(x) < 1.0, 1.0, 0.0),
        kinks=(-1.0, 1.0),
        growth="bounded",
        twin=_twin(lambda t: t.nn.functional.hardtanh),
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


_MAKERS: tuple[Callable[..., Activation], ...] = (
    *(_identity, _relu, _leaky_relu, _relu_power, _tanh, _erf, _sin, _sigmoid, _softplus, _exp, _gelu, _gelu_tanh),
    *(_silu, _elu, _selu, _hardtanh, _hermite),
)
REGISTRY = {maker.__name__.removeprefix("_"): maker for maker in _MAKERS}
PARAMETERS = {"leaky_relu": "SLOPE", "relu_power": "ALPHA", "hermite": "K", "elu": "ALPHA"}
EXAMPLES = {"leaky_relu": "0.1", "relu_power": "1.5", "hermite": "2", "elu": "1"}
REQUIRED = {"relu_power", "hermite"}
