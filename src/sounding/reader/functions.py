"""Functions of single numbers as activations of theory: known ones by what they compute, others as callables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sounding.activations import Activation, resolve

# Activations with closed forms or analytic derivatives, which a function that agrees with them is taken for.
NAMES = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "softplus", "elu", "selu", "erf", "hardtanh", "exp")


def as_activation(function: Callable[[Tensor], Tensor], label: str) -> Activation:
    """The activation that a function of numbers is, under its own name if theory knows it, else under `label`."""
    return _by_name(function) or resolve(_named(function, label))


def _by_name(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """The named activation that a function of numbers agrees with: libraries write one GELU in six ways."""
    x = torch.linspace(-8, 8, 321, dtype=torch.float64)
    y = function(x).numpy()
    for name in NAMES:
        known = resolve(name)
        if np.allclose(known(x.numpy()), y, rtol=1e-7, atol=1e-9):
            return known
    slope = -float(y[0]) / 8.0
    leaky = resolve(f"leaky_relu:{slope:.10g}") if np.isfinite(slope) and slope else None
    return leaky if leaky is not None and np.allclose(leaky(x.numpy()), y, rtol=1e-7, atol=1e-9) else None


def _named(function: Callable[[Tensor], Tensor], label: str) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        return function(x)

    apply.__name__ = label
    return apply
