"""Dead and saturated units, read from what an activation module returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sounding.probe.late import number_of

NEGLIGIBLE = 0.01  # a unit is saturated where its slope is below 1% of the largest slope of its activation
# Outputs at or beyond these bounds have a slope below NEGLIGIBLE: tanh′ = 1 − y², σ′ = y(1 − y) against 1/4,
# softsign′ = (1 − |y|)². The piecewise linear ones are flat exactly at their bounds.
_TANH = (1 - NEGLIGIBLE) ** 0.5
_SIGMOID = (1 + (1 - NEGLIGIBLE) ** 0.5) / 2
_SOFTSIGN = 1 - NEGLIGIBLE**0.5
BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-_TANH, _TANH),
    nn.Sigmoid: (1 - _SIGMOID, _SIGMOID),
    nn.Softsign: (-_SOFTSIGN, _SOFTSIGN),
    nn.Hardsigmoid: (0.0, 1.0),
}
NON_NEGATIVE = (nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid, nn.Softplus)
NOT_UNITS = (
    nn.MultiheadAttention,
    nn.Softmax,
    nn.Softmin,
    nn.LogSoftmax,
    nn.Softmax2d,
    nn.GLU,
)


def is_activation(module: nn.Module) -> bool:
    """Whether dead and saturated units mean something: torch's elementwise activations, and foreign ones that have no
    parameters and no children (which read as activations when they return exact zeros)."""
    home = type(module).__module__
    if home == nn.ReLU.__module__:
        return not isinstance(module, NOT_UNITS)
    return not home.startswith("torch.") and not module._modules and not module._parameters


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Outputs at or beyond which the module saturates, or None if it does not."""
    if type(module).__module__ != nn.ReLU.__module__:
        return None
    if isinstance(module, nn.Hardtanh):  # also ReLU6, whose lower bound is death, not saturation
        lowest = -float("inf") if isinstance(module, nn.ReLU6) else float(module.min_val)
        return lowest, float(module.max_val)
    return next((bounds for kind, bounds in BOUNDS.items() if isinstance(module, kind)), None)


def dead_fraction(samples: Tensor, mean: Tensor | None, *, units: int, trailing: bool) -> float:
    """The fraction of units that return exactly zero for every sample and position.

    Args:
        samples: the sample matrix (n, d).
        mean: its mean sample (d,) where the activation cannot return negative values and it is at hand.
        units: how many units the d features hold: channels of an image, features of a token.
        trailing: whether the units are the last axis of a sample (tokens) or the first (channels).
    """
    # of numbers that are not negative the mean is zero where all are: no pass over the samples
    silent = mean == 0 if mean is not None else ~samples.any(dim=0)
    silent = silent.reshape(-1, units).all(dim=0) if trailing else silent.reshape(units, -1).all(dim=1)
    return number_of(silent.double().mean())


def saturated_fraction(samples: Tensor, bounds: tuple[float, float]) -> float:
    """The fraction of outputs at or beyond the bounds."""
    low, high = bounds
    return number_of(torch.logical_or(samples <= low, samples >= high).double().mean())


def name_activation(module: nn.Module) -> str | None:
    """The name under which theory knows a module's activation, None when it does not.

    >>> name_activation(nn.LeakyReLU(0.2)), name_activation(nn.GELU()), name_activation(nn.PReLU())
    ('leaky_relu:0.2', 'gelu', 'leaky_relu:0.25')
    """
    match module:
        case nn.PReLU():
            slopes = module.weight.detach()
            return f"leaky_relu:{float(slopes[0]):g}" if bool((slopes == slopes[0]).all()) else None
        case nn.LeakyReLU():
            return f"leaky_relu:{module.negative_slope:g}"
        case nn.ELU() if not isinstance(module, nn.CELU):
            return f"elu:{module.alpha:g}"
        case nn.GELU():
            return "gelu" if module.approximate == "none" else "gelu_tanh"
        case nn.Softplus() if module.beta != 1:
            return None
        case nn.Hardtanh() if (module.min_val, module.max_val) != (-1.0, 1.0):
            return None
    known: dict[type[nn.Module], str] = {
        nn.ReLU: "relu",
        nn.Tanh: "tanh",
        nn.Sigmoid: "sigmoid",
        nn.Softplus: "softplus",
        nn.SiLU: "silu",
        nn.SELU: "selu",
        nn.Hardtanh: "hardtanh",
    }
    return known.get(type(module))
