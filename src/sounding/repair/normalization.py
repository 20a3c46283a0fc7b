"""Cures that change normalization: adding it, swapping its kind, and breaking it as a control."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.probe.state import unwrap
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure, on_copy
from sounding.repair.initializers import set_weights
from sounding.repair.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    NameFilter,
    fan_in,
    left_out,
    select_layers,
    sort_out,
    unfuse,
    weight_of,
    width_of,
)
from sounding.repair.norm_layers import (
    NORMALIZED,
    Axis,
    ChannelBatchNorm,
    ChannelRMSNorm,
    FeatureBatchNorm,
    Kind,
    make_norm,
    put_norm_after_,
)
from sounding.repair.passes import Inputs, call_layers, check_inputs
from sounding.repair.snapshot import undisturbed

CHANNEL_NORMS = (*BATCH_NORMS, nn.GroupNorm, ChannelRMSNorm)
LAST_AXIS_NORMS = (nn.LayerNorm, nn.RMSNorm, FeatureBatchNorm)
NORMS = (*CHANNEL_NORMS, *LAST_AXIS_NORMS)


@cure
def add_batchnorm_(
    model: nn.Module,
    inputs: Inputs,
    *,
    kind: Kind = "batch",
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> Steps:
    """Put a normalization between each linear map and what follows it, except the last and those that have one.

    Batch norm keeps the rank of representations at √width and more where plain networks collapse to rank one
    (rank2020, Theorem 2); it makes gradients grow in depth instead (meanfield2019), which `tune_batchnorm_` or Haar
    weights cure. The norm becomes a child of the layer it follows (`fc1.norm`): the layer's own parameters keep their
    names, and functional or shared activations need no change. Biases before a norm are left, though it cancels them.

    Args:
        inputs: a batch, for one forward pass that tells which layers run, in which order and on what shapes.
        kind: batch, layer or rms.
        include, exclude: name filters. The last layer to run is left alone unless it is included by name.
    """
    check_inputs(inputs)
    if kind == "none":
        raise UsageError(
            "add_batchnorm adds a normalization, got kind 'none'", hint="swap_normalization(model, kind='none')"
        )
    layers, untouched = select_layers(model, (nn.Linear, *CONVOLUTIONS), include=include, exclude=exclude)
    calls = call_layers(model, inputs)
    # every linear map counts, also those that the filters leave out: the last one must be known
    given = [one for one in calls if one.shape and isinstance(one.module, (nn.Linear, *CONVOLUTIONS))]
    axes = {id(one.module): len(one.shape or ()) for one in reversed(given)}  # of its first call
    normed = {id(one.giver) for one in calls if isinstance(one.module, NORMS)}
    last = None if include is not None or not given else given[-1].module
    chosen, others = sort_out(layers, lambda _, layer: _why_no_norm(layer, axes, normed, last))
    for name, layer in chosen:
        axis: Axis = "last" if isinstance(layer, nn.Linear) else "channel"
        norm = make_norm(kind, weight_of(layer).shape[0], axis=axis, dimensions=axes[id(layer)])
        put_norm_after_(layer, norm)
        unfuse(model, [layer])
        yield Change(name, "output", "not normalized", f"{type(norm).__name__}")
    yield from (*untouched, *others)


add_batchnorm = on_copy(add_batchnorm_)


@cure
def swap_normalization_(
    model: nn.Module, *, kind: Kind, include: NameFilter = None, exclude: NameFilter = None
) -> Steps:
    """Replace every normalization layer by another kind; scale and shift are kept where the new one has them.

    Args:
        kind: batch, layer, rms or none.
    """
    # a list, since children are replaced on the way
    norms = [
        (f"{above}.{key}" if above else key, parent, key, child)
        for above, parent in unwrap(model).named_modules()
        for key, child in parent.named_children()
        if isinstance(child, NORMS)
    ]
    if not norms:
        raise UsageError(
            f"expected a model with normalization layers, got {type(model).__name__} with none",
            hint="add_batchnorm(model, inputs)",
        )
    for name, parent, key, norm in norms:
        filtered = left_out(name, norm, include, exclude)
        swapped = None if filtered else _swapped(norm, kind)
        if swapped is None:
            why = filtered or f"it is {type(norm).__name__} already, or normalizes several axes"
            yield Untouched(name, why)
        else:
            setattr(parent, key, swapped)
            unfuse(model, [swapped])
            yield Change(name, "module", type(norm).__name__, type(swapped).__name__)


swap_normalization = on_copy(swap_normalization_)


@cure
def batch_statistics_(model: nn.Module, *, include: NameFilter = None, exclude: NameFilter = None) -> Steps:
    """Let batch norms that stay in evaluation mode while the model trains normalize by the batch again.

    Such a norm divides by running statistics that nobody has estimated: of a model whose `train` puts its norms into
    evaluation mode, or of a class that has no other mode (FrozenBatchNorm2d). The statistics are dropped, so that the
    batch's own are used in both modes; the latter classes are replaced by `nn.BatchNorm2d`.
    """
    root = unwrap(model)
    with undisturbed(model):
        still = [
            (name, module)
            for name, module in root.named_modules()
            if _is_frozen(module) or (isinstance(module, BATCH_NORMS) and not module.training)
        ]
    chosen, untouched = sort_out(still, lambda name, module: left_out(name, module, include, exclude))
    if not chosen:
        raise UsageError(
            f"expected batch norms that stay in evaluation mode while {type(root).__name__} trains, got none",
            hint="model.train(), which puts the others into training mode",
        )
    for name, module in chosen:
        norm: Any = module
        if _is_frozen(module):
            weight, eps = weight_of(module), getattr(module, "eps", 1e-5)
            norm = nn.BatchNorm2d(len(weight), eps=eps, device=weight.device, dtype=weight.dtype)
            norm.weight.copy_(weight)
            norm.bias.copy_(module.bias)
            parent, _, key = name.rpartition(".")
            setattr(root.get_submodule(parent), key, norm.train(module.training))
        norm.track_running_stats = False
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(norm, buffer, None)  # without them evaluation takes the batch’s own, too
        yield Change(name, "statistics", "running", "of the batch")
    yield from untouched


def _is_frozen(module: nn.Module) -> bool:
    """Whether a class of batch norm knows running statistics alone, as torchvision's and detectron's do."""
    return "FrozenBatchNorm" in type(module).__name__ and isinstance(getattr(module, "running_var", None), Tensor)


@cure
def break_batchnorm_(
    model: nn.Module,
    *,
    bound: float | None = None,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """One-sided weights, uniform on [0, 2a], which break what batch norm does (rank2020, section 4): a control.

    a = 1/√fan_in gives PyTorch's default law its own variance but a mean: all units see nearly the same sum, the rank
    collapses in spite of batch norm and training stalls.

    Args:
        bound: 2a; by default 2/√fan_in of each layer.
    """

    def fill(layer: nn.Module, _name: str, _index: int) -> str:
        weight = weight_of(layer)
        top = 2 / math.sqrt(fan_in(layer)) if bound is None else bound
        device = generator.device if generator is not None else weight.device
        weight.copy_(top * torch.rand(weight.shape, generator=generator, device=device))
        return f"uniform on [0, {top:.3g}]"

    return set_weights(model, fill, include=include, exclude=exclude)


def _why_no_norm(layer: nn.Module, axes: dict[int, int], normed: set[int], last: nn.Module | None) -> str | None:
    """Why a layer gets no norm behind it, None where it gets one."""
    if id(layer) not in axes:
        return "the forward pass did not call it"
    if id(layer) in normed or isinstance(layer, tuple(NORMALIZED.values())):
        return "a norm follows it already"
    if layer is last:
        return "it is the last layer to run: its output is the network's"
    if type(layer) not in NORMALIZED:
        return f"{type(layer).__name__} is a layer type of its own"
    if isinstance(layer, nn.Linear) and axes[id(layer)] < 2:
        return "its output is a single sample"  # of which batch norm has no variance
    return None


def _swapped(norm: nn.Module, kind: Kind) -> nn.Module | None:
    """A norm of another kind for the same tensors, or None when there is nothing to swap."""
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm) and len(norm.normalized_shape) != 1:
        return None
    weight = getattr(norm, "weight", None)
    width = width_of(norm)
    axis: Axis = "last" if isinstance(norm, LAST_AXIS_NORMS) else "channel"
    if axis == "channel" and kind == "batch":
        # a GroupNorm does not know how many axes its tensors have
        made: nn.Module = norm if isinstance(norm, BATCH_NORMS) else ChannelBatchNorm(width)
    else:
        # BatchNorm1d serves (samples, features) and (samples, channels, length) alike: so must what replaces it
        made = make_norm(kind, width, axis=axis, dimensions=3)
    if type(made) is type(norm):
        return None
    for part in ("weight", "bias"):
        old, new = getattr(norm, part, None), getattr(made, part, None)
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            new.copy_(old)
    made.train(norm.training)
    return made.to(weight) if isinstance(weight, Tensor) else made
