"""The initializations people know, for comparison on equal terms: Xavier, He, LSUV."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import NumericalError
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.layers import (
    CONVOLUTIONS,
    NameFilter,
    fan_in,
    rms,
    select_layers,
    weight_of,
)
from sounding.repair.orthogonal import orthogonal_init_
from sounding.repair.passes import Inputs, call_model, check_inputs, hooked
from sounding.repair.snapshot import all_or_nothing, undisturbed


def xavier_(
    model: nn.Module,
    *,
    gain: float = 1.0,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Changes:
    """Gaussian weights of variance gain² · 2/(fan_in + fan_out), zero biases (Glorot and Bengio 2010)."""

    def deviation(layer: nn.Module) -> float:
        weight = weight_of(layer)
        fan_out = fan_in(layer) * weight.shape[0] / weight[0].numel() * weight[0, 0].numel()
        return gain * math.sqrt(2.0 / (fan_in(layer) + fan_out))

    return _gaussian("xavier", model, deviation, include, exclude, generator)


def he_(
    model: nn.Module,
    *,
    gain: float = math.sqrt(2.0),
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Changes:
    """Gaussian weights of variance gain²/fan_in, zero biases (He et al. 2015); gain √2 is ReLU's."""
    return _gaussian("he", model, lambda layer: gain / math.sqrt(fan_in(layer)), include, exclude, generator)


def lsuv_(
    model: nn.Module,
    inputs: Inputs,
    *,
    tolerance: float = 0.02,
    iterations: int = 10,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Changes:
    """Layer-sequential unit variance (Mishkin and Matas 2016): orthogonal weights rescaled to unit output variance.

    The published programs measure in evaluation mode, where batch norm is the identity at initialization; here the pass
    is in training mode, with batch statistics. One forward pass: each layer is set when the signal reaches it.

    Args:
        model: changed in place.
        inputs: a batch.
        tolerance: how far from 1 the variance may stay.
        iterations: rescalings per layer at most (one suffices for a linear map without bias).
        include, exclude: name filters.
        generator: source of randomness.
    """
    check_inputs(inputs)
    layers, untouched = select_layers(model, (nn.Linear, *CONVOLUTIONS), include=include, exclude=exclude)
    names = {id(module): name for name, module in layers}
    changed: dict[str, Change] = {}

    def set_weight(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        name = names[id(module)]
        if name in changed:
            return
        before = rms(weight_of(module))
        orthogonal_init_(module, generator=generator)
        for _ in range(iterations):
            variance = float(type(module).forward(module, arguments[0]).double().var(correction=0))
            if not math.isfinite(variance) or variance == 0:
                raise NumericalError(f"layer {name!r} has output variance {variance}: there is nothing to scale")
            if abs(variance - 1) <= tolerance:
                break
            weight_of(module).div_(math.sqrt(variance))
        changed[name] = Change(name, "weight", f"rms {before:.3g}", f"rms {rms(weight_of(module)):.3g}")

    with (
        all_or_nothing(model),
        undisturbed(model),
        torch.no_grad(),
        hooked([module.register_forward_pre_hook(set_weight) for _, module in layers]),
    ):
        call_model(model, inputs)
    untouched += [Untouched(name, "the forward pass did not call it") for name, _ in layers if name not in changed]
    return Changes("lsuv", tuple(changed.values()), tuple(untouched))


def _gaussian(
    method: str,
    model: nn.Module,
    deviation: Callable[[nn.Module], float],
    include: NameFilter,
    exclude: NameFilter,
    generator: torch.Generator | None,
) -> Changes:
    """Gaussian weights of these deviations and zero biases, in all layers or in none."""
    layers, untouched = select_layers(model, include=include, exclude=exclude)
    changed = []
    with all_or_nothing(model), torch.no_grad():
        for name, layer in layers:
            weight = weight_of(layer)
            before, std = rms(weight), deviation(layer)
            device = generator.device if generator is not None else weight.device
            weight.copy_(std * torch.randn(weight.shape, generator=generator, device=device))
            if isinstance(layer.bias, Tensor):
                layer.bias.zero_()
            changed.append(Change(name, "weight", f"rms {before:.3g}", f"Gaussian, deviation {std:.3g}"))
    return Changes(method, tuple(changed), tuple(untouched))
