"""The initializations people know, for comparison on equal terms: Xavier, He, LSUV, zero residual branches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import NumericalError, UsageError
from sounding.probe.state import unwrap
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    WEIGHT_LAYERS,
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


def zero_residual_(
    model: nn.Module,
    *,
    branches: Callable[[nn.Module], nn.Module | None] | None = None,
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> Changes:
    """Zero the last layer of every residual branch and scale the branch's other weights by L^(−1/(2m−2)) (Fixup).

    L is the number of branches and m the number of weight layers in one; a branch that ends in an affine batch norm has
    that norm's scale and shift zeroed instead (Goyal et al. 2017) and its weights left alone. Each block then starts as
    the identity.

    Args:
        model: changed in place.
        branches: gives a block's branch, or None when the module is no residual block; by default the attributes
            `branch`, `residual`, `residual_function` or `body`, and torchvision's BasicBlock and Bottleneck, are known.
        include, exclude: name filters on the blocks.
    """
    find = branches or _known_branch
    blocks = [(name, branch) for name, module in unwrap(model).named_modules() if (branch := find(module)) is not None]
    if not blocks:
        raise UsageError(
            f"found no residual block in {type(model).__name__}",
            hint="branches=lambda module: getattr(module, 'my_branch', None), which says where a block's branch is",
        )
    changed: list[Change] = []
    untouched: list[Untouched] = []
    with all_or_nothing(model), torch.no_grad():
        for name, branch in blocks:
            layers = [m for m in branch.modules() if isinstance(m, WEIGHT_LAYERS)]
            norms = [m for m in branch.modules() if isinstance(m, BATCH_NORMS) and m.affine]
            last = [m for m in branch.modules() if isinstance(m, (*WEIGHT_LAYERS, *BATCH_NORMS))][-1:]
            if not layers:
                untouched.append(Untouched(name, "its branch has no weight layer"))
            elif norms and last == norms[-1:]:
                changed.append(Change(name, "scale of the last norm", f"rms {rms(norms[-1].weight):.3g}", "0"))
                norms[-1].weight.zero_()
                norms[-1].bias.zero_()
            else:
                factor = len(blocks) ** (-1 / (2 * len(layers) - 2)) if len(layers) > 1 else 1.0
                for layer in layers[:-1]:
                    layer.weight.mul_(factor)
                changed.append(
                    Change(name, "last weight", f"rms {rms(layers[-1].weight):.3g}", f"0, others ×{factor:.3g}")
                )
                layers[-1].weight.zero_()
                if layers[-1].bias is not None:
                    layers[-1].bias.zero_()
    return Changes("zero_residual", tuple(changed), tuple(untouched))


def _known_branch(module: nn.Module) -> nn.Module | None:
    if type(module).__name__ in {"BasicBlock", "Bottleneck"}:
        parts = [child for name, child in module.named_children() if name not in {"downsample", "shortcut"}]
        return nn.ModuleList(parts)
    for attribute in ("branch", "residual", "residual_function", "body"):
        found = getattr(module, attribute, None)
        if isinstance(found, nn.Module):
            return found
    return None


def _gaussian(
    method: str,
    model: nn.Module,
    deviation: Callable[[nn.Module], float],
    include: NameFilter,
    exclude: NameFilter,
    generator: torch.Generator | None,
) -> Changes:
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
