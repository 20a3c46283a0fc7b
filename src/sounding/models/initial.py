"""Layers without weights yet, and the weights they start with: every number from the generator that was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sounding.activations import Activation, resolve
from sounding.errors import UsageError, require_known
from sounding.limits import require_memory

Init = Literal["he", "lecun", "xavier", "orthogonal", "haar", "torch"]
INITS: tuple[Init, ...] = get_args(Init)
ActivationLike = str | Activation | Callable[[Tensor], Tensor]

LAYER_BYTES = 4096  # what the Python objects of a layer take at the least, beside its weights


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
        """What the printed model shows."""
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


def make_activation(activation: ActivationLike) -> nn.Module:
    """torch's own module where there is one."""
    if isinstance(activation, nn.Module):
        raise UsageError(
            "expected an activation's name or function, got a module, which all layers would share", hint="'relu'"
        )
    if isinstance(activation, str) and activation in MODULES:
        return MODULES[activation]()
    found = resolve(activation)
    return Elementwise(found.torch(), name=found.name)


def make_linear(fan_in: int, fan_out: int, *, bias: bool = True) -> nn.Linear:
    """Without drawing weights, so that a network with a generator of its own leaves torch's default one alone."""
    linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out, bias=bias)  # type: ignore[no-untyped-call]
    assert isinstance(linear, nn.Linear)
    return linear


def make_classifier(features: int, hidden: int, classes: int, *, dropout: float) -> nn.Sequential:
    """Three linear layers behind the convolutions of VGG and AlexNet, with dropout in front of the first two."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in in (features, hidden):
        layers += [nn.Dropout(dropout), make_linear(fan_in, hidden), nn.ReLU()]
    return nn.Sequential(*layers, make_linear(hidden, classes))


def make_convolution(
    channels: int, filters: int, *, kernel: int = 3, stride: int = 1, padding: int | None = None, bias: bool = True
) -> nn.Conv2d:
    """A convolution without weights drawn; the default padding keeps the image's size at stride 1."""
    border = (kernel - 1) // 2 if padding is None else padding
    convolution = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Conv2d, channels, filters, kernel, stride=stride, padding=border, bias=bias
    )
    assert isinstance(convolution, nn.Conv2d)
    return convolution


def initialize_(model: nn.Module, init: Init, generator: torch.Generator | None) -> None:
    """Draw the weights of every linear layer and convolution, in the order of `modules()`.

    The variance of a weight is 2/fan_in for "he", 1/fan_in for "lecun", 2/(fan_in + fan_out) for "xavier", all
    Gaussian with zero biases; "orthogonal", or "haar", is a random (semi-)orthogonal matrix of fan_out rows; "torch"
    is what torch's layers draw by default, weights and biases uniform within ±1/√fan_in. The fans of a convolution
    count its window.
    """
    require_known("init", init, INITS)
    for layer in model.modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        window = layer.weight[0, 0].numel()
        fan_in, fan_out = layer.weight.shape[1] * window, layer.weight.shape[0] * window
        bound = 1 / math.sqrt(fan_in)
        if init in ("orthogonal", "haar"):
            nn.init.orthogonal_(layer.weight, generator=generator)
        elif init == "torch":
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
        else:
            variance = {"he": 2 / fan_in, "lecun": 1 / fan_in, "xavier": 2 / (fan_in + fan_out)}[init]
            nn.init.normal_(layer.weight, std=math.sqrt(variance), generator=generator)
        if layer.bias is not None and init == "torch":
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        elif layer.bias is not None:
            nn.init.zeros_(layer.bias)


def require_sizes(**sizes: int) -> None:
    """Every size at least 1, and a network of these sizes one that the memory can hold."""
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} must be at least 1, got {size}")
    width, depth = sizes.get("width", 1), sizes.get("depth", 2)
    ends = sum(sizes.get(name, 0) for name in ("in_features", "out_features", "classes", "vocabulary"))
    values = (depth - 1) * width**2 + ends * width  # at the least: a hidden matrix per layer, and the two ends
    told = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())
    require_memory(4 * values + LAYER_BYTES * depth, what=f"a network with {told}")
