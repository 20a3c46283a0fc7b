"""The plain network of the theory: linear, normalization, activation, and again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from sounding.errors import require_known
from sounding.models.initial import ActivationLike, Init, initialize_, make_activation, make_linear, require_sizes
from sounding.models.norms import Norm, NormOptions, make_norm

Placement = Literal["before", "after"]


class Mlp(nn.Sequential):
    """A multilayer perceptron: `depth` hidden layers of one width, then a linear readout.

    Hidden layer ℓ is h_ℓ = f(α_ℓ norm(W_ℓ h_{ℓ−1} + b_ℓ)), the order of rank2020 and meanfield2019, or, with the norm
    after the activation, norm(f(α_ℓ (W_ℓ h_{ℓ−1} + b_ℓ))). With a residual strength γ the linear map becomes
    h_{ℓ−1} + γ (W_ℓ h_{ℓ−1} + b_ℓ) from the second layer on (rank2020, eq. 1). The modules are called `1.linear`,
    `1.norm`, `1.gain`, `1.activation`, `2.linear`, …, `readout`.

    Args:
        in_features: values of a sample; more than one axis is flattened.
        out_features: values of the readout, for example classes.
        depth: number of hidden layers.
        width: units of a hidden layer.
        activation: a name such as "relu" or "leaky_relu:0.1", an Activation, or a callable.
        norm: "none", "batch", "layer" or "rms".
        placement: of the norm, "before" or "after" the activation.
        residual: γ; None is no skip connection.
        gain_exponent: k of the gains α_ℓ = ℓ^−k in front of the activation (thesis2024, Section 6.4); 0 is none.
        bias: whether the linear layers have a bias (zero at the start, but for init="torch").
        init: variance of a weight: "he" 2/fan_in, "lecun" 1/fan_in, "xavier" 2/(fan_in + fan_out); "orthogonal" (or
            "haar") is a random (semi-)orthogonal matrix; "torch" is what nn.Linear draws, uniform of variance
            1/(3 fan_in), biases too.
        generator: where the weights come from; None is torch's default generator.
        options: centring, eps, momentum, scale, shift, affine, running of the norm; see `NormOptions`.

    >>> network = Mlp(64, 10, depth=2, width=16, norm="batch")
    >>> [name for name, module in network.named_modules() if not list(module.children())]
    ['1.linear', '1.norm', '1.activation', '2.linear', '2.norm', '2.activation', 'readout']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        depth: int,
        width: int,
        activation: ActivationLike = "relu",
        norm: Norm = "none",
        placement: Placement = "before",
        residual: float | None = None,
        gain_exponent: float = 0.0,
        bias: bool = True,
        init: Init = "he",
        generator: torch.Generator | None = None,
        **options: Unpack[NormOptions],
    ) -> None:
        require_sizes(in_features=in_features, out_features=out_features, depth=depth, width=width)
        require_known("placement", placement, get_args(Placement))
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index in range(1, depth + 1):
            parts: dict[str, nn.Module | None] = {
                "linear": make_linear(in_features if index == 1 else width, width, bias=bias),
                "norm": make_norm(norm, width, images=False, options=options),
                "gain": Gain(index**-gain_exponent) if gain_exponent else None,
                "activation": make_activation(activation),
            }
            if placement == "after":
                parts["norm"] = parts.pop("norm")
            chosen = OrderedDict((name, part) for name, part in parts.items() if part is not None)
            skips = residual is not None and index > 1
            layers[str(index)] = ResidualLayer(chosen, strength=residual or 0.0) if skips else nn.Sequential(chosen)
        layers["readout"] = make_linear(width, out_features, bias=bias)
        super().__init__(layers)
        initialize_(self, init, generator)

    def forward(self, input: Tensor) -> Tensor:
        """Logits of a batch whose first axis is the samples."""
        hidden = input.flatten(start_dim=1)
        for layer in self:
            hidden = layer(hidden)
        return hidden


class ResidualLayer(nn.Sequential):
    """The first module as a branch of strength γ beside a skip connection, then the others: rest(x + γ first(x))."""

    def __init__(self, modules: OrderedDict[str, nn.Module], *, strength: float) -> None:
        super().__init__(modules)
        self.strength = strength

    def forward(self, input: Tensor) -> Tensor:
        """The sum, and what follows it."""
        first, *rest = self
        hidden: Tensor = input + self.strength * first(input)
        for module in rest:
            hidden = module(hidden)
        return hidden

    def extra_repr(self) -> str:
        """What the printed model shows."""
        return f"strength={self.strength}"


class Gain(nn.Module):
    """Multiply by a fixed number α."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        """α x."""
        return input * self.value

    def extra_repr(self) -> str:
        """What the printed model shows."""
        return f"{self.value:g}"
