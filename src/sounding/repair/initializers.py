"""Weights drawn for every layer of a model: Haar-orthogonal ones, and the initializations people know to compare with.

Cures that set weights do it layer by layer (`set_weights`), or each layer when the signal of a batch reaches it
(`set_as_reached`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import NumericalError, UsageError
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure
from sounding.repair.layers import (
    CONVOLUTIONS,
    TRANSPOSED,
    WEIGHT_LAYERS,
    NameFilter,
    fan_in,
    rms,
    select_layers,
    weight_of,
)
from sounding.repair.passes import Inputs, call_model, check_inputs, hooked
from sounding.repair.snapshot import undisturbed
from sounding.weights import haar_frame

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Gain = float | Mapping[str, float] | Callable[[str, int], float]


def orthogonal_init_(layer: nn.Module, *, gain: float = 1.0, generator: torch.Generator | None = None) -> nn.Module:
    """Fill one Linear or convolution layer with Haar-orthogonal weights that keep the mean square; bias to zero.

    Linear (out × in): gain · √max(1, out/in) · Q with Q orthonormal, so that the output's mean square is gain² times
    the input's: exactly when out ≥ in, on average over inputs when out < in. Plain orthonormal columns would lose
    a factor out/in, 4 for Linear(64, 256).
    Convolution: delta-orthogonal, zero but for the central tap of each group. A transposed convolution with stride s
    gets one orthogonal tap for each of its s output phases, so that no output pixel is left empty.

    Args:
        layer: nn.Linear, nn.Conv*d or nn.ConvTranspose*d; changed in place and returned.
        gain: factor on the root mean square.

    >>> layer = orthogonal_init_(torch.nn.Linear(64, 256))
    >>> torch.allclose(layer.weight.T @ layer.weight, 4 * torch.eye(64), atol=1e-5)
    True
    """
    if not isinstance(layer, WEIGHT_LAYERS):
        raise UsageError(
            f"orthogonal_init_ fills a Linear or convolution layer, got {type(layer).__name__}",
            hint="haar_(model), which finds the layers of a model",
        )
    if not math.isfinite(gain):
        raise UsageError(f"gain must be finite, got {gain}")
    weight = layer.weight
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            weight.copy_(_square_kept(layer.out_features, layer.in_features, gain, generator))
        else:
            weight.copy_(_sparse_weight(layer, gain, generator))
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


@cure
def haar_(
    model: nn.Module,
    *,
    gain: Gain = 1.0,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Haar-orthogonal weights for every Linear and convolution layer (thesis2024, chapter 6).

    With batch norm and near-linear activations the gradient norm then stays bounded at any depth (Theorem 6.5), where
    Gaussian weights make it grow exponentially (meanfield2019).

    Args:
        gain: one number, one by layer name, or a function of layer name and index among the changed layers.

    >>> changes = haar_(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
    >>> [change.name for change in changes.changed]
    ['0']
    """

    def fill(layer: nn.Module, name: str, index: int) -> str:
        value = gain(name, index) if callable(gain) else gain.get(name, 1.0) if isinstance(gain, Mapping) else gain
        orthogonal_init_(layer, gain=float(value), generator=generator)
        return f"rms {rms(weight_of(layer)):.3g}, orthogonal, gain {value:g}"

    return set_weights(model, fill, include=include, exclude=exclude)


def _square_kept(rows: int, columns: int, gain: float, generator: torch.Generator | None) -> Tensor:
    # orthonormal columns keep a length, which more outputs share
    return gain * math.sqrt(max(1.0, rows / columns)) * haar_frame(rows, columns, generator=generator)


def _sparse_weight(layer: Convolution | Transposed, gain: float, generator: torch.Generator | None) -> Tensor:
    """Zeros but for the central tap, or for one tap for each output phase of a transposed convolution."""
    transposed = isinstance(layer, TRANSPOSED)
    first, second, *kernel = weight_of(layer).shape
    width = first // layer.groups
    # as frames are drawn: rounding to the layer's own type comes last
    weight = torch.zeros(first, second, *kernel, dtype=torch.float64)
    strides = layer.stride if transposed else [1] * len(kernel)  # with padding that keeps the size: the same pixel
    per_axis = [_phase_taps(*one) for one in zip(kernel, strides, layer.dilation, strict=True)]
    # phases that no tap reaches stay empty; the others make up for them so that the mean square over all pixels is kept
    filled = math.prod(len(taps) / stride for taps, stride in zip(per_axis, strides, strict=True))
    for group, tap in itertools.product(range(layer.groups), itertools.product(*per_axis)):
        taps = weight[group * width : (group + 1) * width].movedim((0, 1), (-2, -1))
        rows, columns = (second, width) if transposed else (width, second)
        frame = _square_kept(rows, columns, gain / math.sqrt(filled), generator)
        taps[tap] = frame.T if transposed else frame
    return weight


def _phase_taps(size: int, stride: int, dilation: int) -> list[int]:
    """One tap for each output phase modulo the stride, the most central first."""
    taps: dict[int, int] = {}
    for tap in sorted(range(size), key=lambda t: abs(t - (size - 1) / 2)):
        taps.setdefault(tap * dilation % stride, tap)  # the phase of the output pixels that the tap writes
    return list(taps.values())


@cure
def xavier_(
    model: nn.Module,
    *,
    gain: float = 1.0,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Gaussian weights of variance gain² · 2/(fan_in + fan_out), zero biases (Glorot and Bengio 2010)."""

    def deviation(layer: nn.Module) -> float:
        weight = weight_of(layer)
        # the taps of fan_in with the other channels
        fan_out = fan_in(layer) * weight.shape[0] / weight[0].numel() * weight[0, 0].numel()
        return gain * math.sqrt(2.0 / (fan_in(layer) + fan_out))

    return set_weights(model, _gaussian(deviation, generator), include=include, exclude=exclude)


@cure
def he_(
    model: nn.Module,
    *,
    gain: float = math.sqrt(2.0),
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Gaussian weights of variance gain²/fan_in, zero biases (He et al. 2015); gain √2 is ReLU's."""
    fill = _gaussian(lambda layer: gain / math.sqrt(fan_in(layer)), generator)
    return set_weights(model, fill, include=include, exclude=exclude)


@cure
def lsuv_(
    model: nn.Module,
    inputs: Inputs,
    *,
    tolerance: float = 0.02,
    iterations: int = 10,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Layer-sequential unit variance (Mishkin and Matas 2016): orthogonal weights rescaled to unit output variance.

    The published programs measure in evaluation mode, where batch norm is the identity at initialization; here the pass
    is in training mode, with batch statistics. One forward pass: each layer is set when the signal reaches it.

    Args:
        inputs: a batch.
        tolerance: how far from 1 the variance may stay.
        iterations: rescalings per layer at most (one suffices for a linear map without bias).
    """

    def fill(layer: nn.Module, x: Tensor, name: str) -> None:
        orthogonal_init_(layer, generator=generator)
        for _ in range(iterations):
            # past the hooks, of which the one that called us is one
            variance = float(type(layer).forward(layer, x).double().var(correction=0))
            if not math.isfinite(variance) or variance == 0:
                raise NumericalError(f"layer {name!r} has output variance {variance}: there is nothing to scale")
            if abs(variance - 1) <= tolerance:
                break
            weight_of(layer).div_(math.sqrt(variance))

    return set_as_reached(model, inputs, fill, include=include, exclude=exclude)


def _gaussian(
    deviation: Callable[[nn.Module], float], generator: torch.Generator | None
) -> Callable[[nn.Module, str, int], str]:
    """For `set_weights`: Gaussian weights of these deviations, and zero biases."""

    def fill(layer: nn.Module, _name: str, _index: int) -> str:
        weight, std = weight_of(layer), deviation(layer)
        device = generator.device if generator is not None else weight.device
        weight.copy_(std * torch.randn(weight.shape, generator=generator, device=device))
        if isinstance(layer.bias, Tensor):
            layer.bias.zero_()
        return f"Gaussian, deviation {std:.3g}"

    return fill


def set_weights(
    model: nn.Module, fill: Callable[[nn.Module, str, int], str], *, include: NameFilter, exclude: NameFilter
) -> Steps:
    """The steps of a cure that needs no signal: it sets the weight of every layer that it may change.

    `fill` sets a layer's weight, given its name and its place among the changed ones, and says what it has become.
    """
    layers, untouched = select_layers(model, include=include, exclude=exclude)
    for index, (name, layer) in enumerate(layers):
        before = f"rms {rms(weight_of(layer)):.3g}"
        yield Change(name, "weight", before, fill(layer, name, index))
    yield from untouched


def set_as_reached(
    model: nn.Module,
    inputs: Inputs,
    fill: Callable[[nn.Module, Tensor, str], None],
    *,
    include: NameFilter,
    exclude: NameFilter,
) -> Steps:
    """The steps of a cure that sets each layer by what reaches it, through the layers that are set already.

    One forward pass does it all, in training mode and without a trace but the weights. `fill` gets a layer, its input
    and its name.
    """
    check_inputs(inputs)
    layers, untouched = select_layers(model, (nn.Linear, *CONVOLUTIONS), include=include, exclude=exclude)
    names = {id(module): name for name, module in layers}
    changed: dict[str, Change] = {}

    def set_weight(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        name = names[id(module)]
        if name in changed:  # a layer that is called again keeps the weight that its first input gave it
            return
        before = f"rms {rms(weight_of(module)):.3g}"
        fill(module, arguments[0], name)
        changed[name] = Change(name, "weight", before, f"rms {rms(weight_of(module)):.3g}")

    with undisturbed(model), hooked([module.register_forward_pre_hook(set_weight) for _, module in layers]):
        call_model(model, inputs)
    yield from changed.values()
    yield from untouched
    yield from (Untouched(name, "the forward pass did not call it") for name, _ in layers if name not in changed)
