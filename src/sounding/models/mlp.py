"""The plain network of the theory: linear, normalization, activation, and again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from sounding.activations import Activation, resolve
from sounding.errors import UsageError

Norm = Literal["none", "batch", "layer"]
Init = Literal["he", "lecun", "xavier", "orthogonal", "torch"]
NORMS: tuple[Norm, ...] = ("none", "batch", "layer")
INITS: tuple[Init, ...] = ("he", "lecun", "xavier", "orthogonal", "torch")


class Mlp(nn.Sequential):
    """A multilayer perceptron: `depth` hidden layers of one width, then a linear readout.

    Hidden layer ℓ is h_ℓ = f(norm(W_ℓ h_{ℓ−1} + b_ℓ)), the order of rank2020 and meanfield2019. The modules are called
    `1.linear`, `1.norm`, `1.activation`, `2.linear`, …, `readout`.

    Args:
        in_features: values of a sample; more than one axis is flattened.
        out_features: values of the readout, for example classes.
        depth: number of hidden layers.
        width: units of a hidden layer.
        activation: a name such as "relu" or "leaky_relu:0.1", an Activation, or a callable.
        norm: "none", "batch" or "layer".
        bias: whether the linear layers have a bias (zero at the start).
        init: variance of a weight: "he" 2/fan_in, "lecun" 1/fan_in, "xavier" 2/(fan_in + fan_out); "orthogonal" is a
            random (semi-)orthogonal matrix; "torch" leaves what nn.Linear draws, a uniform of variance 1/(3 fan_in).
        generator: where the weights come from; None is torch's default generator.

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
        activation: str | Activation | Callable[[Tensor], Tensor] = "relu",
        norm: Norm = "none",
        bias: bool = True,
        init: Init = "he",
        generator: torch.Generator | None = None,
    ) -> None:
        _require(in_features=in_features, out_features=out_features, depth=depth, width=width)
        if norm not in NORMS:
            raise UsageError(f"unknown norm {norm!r}", hint=f"one of {', '.join(NORMS)}")
        if init not in INITS:
            raise UsageError(f"unknown init {init!r}", hint=f"one of {', '.join(INITS)}")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        fan_in = in_features
        for index in range(1, depth + 1):
            layers[str(index)] = _make_hidden_layer(fan_in, width, activation, norm, bias)
            fan_in = width
        layers["readout"] = _make_linear(fan_in, out_features, bias)
        super().__init__(layers)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _initialize_(module, init, generator)

    def forward(self, input: Tensor) -> Tensor:
        """Logits of a batch whose first axis is the samples."""
        hidden = input.flatten(start_dim=1)
        for layer in self:
            hidden = layer(hidden)
        return hidden


class Elementwise(nn.Module):
    """An activation that torch.nn has no module for."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, name: str) -> None:
        super().__init__()
        self.function = function
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """The function of every value."""
        return self.function(input)

    def extra_repr(self) -> str:
        return self.name


MODULES: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "selu": nn.SELU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}


def _make_hidden_layer(
    fan_in: int, width: int, activation: str | Activation | Callable[[Tensor], Tensor], norm: Norm, bias: bool
) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict(linear=_make_linear(fan_in, width, bias))
    if norm == "batch":
        parts["norm"] = nn.BatchNorm1d(width)
    elif norm == "layer":
        parts["norm"] = nn.LayerNorm(width)
    parts["activation"] = _make_activation(activation)
    return nn.Sequential(parts)


def _make_linear(fan_in: int, fan_out: int, bias: bool) -> nn.Linear:
    """Without drawing weights, so that a network with a generator of its own leaves torch's default one alone."""
    linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out, bias=bias)  # type: ignore[no-untyped-call]
    assert isinstance(linear, nn.Linear)
    return linear


def _make_activation(activation: str | Activation | Callable[[Tensor], Tensor]) -> nn.Module:
    if isinstance(activation, nn.Module):
        raise UsageError(
            "expected an activation's name or function, got a module, which all layers would share", hint="'relu'"
        )
    if isinstance(activation, str) and activation in MODULES:
        return MODULES[activation]()
    found = resolve(activation)
    return Elementwise(found.torch(), name=found.name)


def _initialize_(linear: nn.Linear, init: Init, generator: torch.Generator | None) -> None:
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    if init == "orthogonal":
        nn.init.orthogonal_(linear.weight, generator=generator)
    elif init == "torch":
        bound = 1 / math.sqrt(linear.in_features)
        nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    else:
        fan_in, fan_out = linear.in_features, linear.out_features
        variance = {"he": 2 / fan_in, "lecun": 1 / fan_in, "xavier": 2 / (fan_in + fan_out)}[init]
        nn.init.normal_(linear.weight, std=math.sqrt(variance), generator=generator)


def _require(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} must be at least 1, got {size}")
