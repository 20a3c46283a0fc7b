"""Cures that change normalization: adding it, swapping its kind, and breaking it as a control."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.probe.state import unwrap
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    NameFilter,
    fan_in,
    left_out,
    rms,
    select_layers,
    weight_of,
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
from sounding.repair.passes import Inputs, call_model, check_inputs, hooked
from sounding.repair.snapshot import all_or_nothing, on_copy, undisturbed

CHANNEL_NORMS = (*BATCH_NORMS, nn.GroupNorm, ChannelRMSNorm)
LAST_AXIS_NORMS = (nn.LayerNorm, nn.RMSNorm, FeatureBatchNorm)
NORMS = (*CHANNEL_NORMS, *LAST_AXIS_NORMS)


def add_batchnorm_(
    model: nn.Module,
    inputs: Inputs,
    *,
    kind: Kind = "batch",
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> Changes:
    """Put a normalization between each linear map and what follows it, except the last and those that have one.

    Batch norm keeps the rank of representations at √width and more where plain networks collapse to rank one
    (rank2020, Theorem 2); it makes gradients grow in depth instead (meanfield2019), which `tune_batchnorm_` or Haar
    weights cure. The norm becomes a child of the layer it follows (`fc1.norm`): the layer's own parameters keep their
    names, and functional or shared activations need no change. Biases before a norm are left, though it cancels them.

    Args:
        model: changed in place.
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
    shapes, normed, order = _observe(model, inputs)
    changed = []
    with all_or_nothing(model):
        for name, layer in layers:
            reason = _why_no_norm(name, layer, shapes, normed, order, explicit=include is not None)
            if reason is not None:
                untouched.append(Untouched(name, reason))
                continue
            dimensions = shapes[id(layer)]
            axis: Axis = "last" if isinstance(layer, nn.Linear) else "channel"
            norm = make_norm(kind, weight_of(layer).shape[0], axis=axis, dimensions=dimensions)
            put_norm_after_(layer, norm)
            changed.append(Change(name, "output", "not normalized", f"{type(norm).__name__}"))
    return Changes("add_batchnorm", tuple(changed), tuple(untouched))


add_batchnorm = on_copy(add_batchnorm_)


def swap_normalization_(
    model: nn.Module, *, kind: Kind, include: NameFilter = None, exclude: NameFilter = None
) -> Changes:
    """Replace every normalization layer by another kind; scale and shift are kept where the new one has them.

    Args:
        model: changed in place.
        kind: batch, layer, rms or none.
        include, exclude: name filters.
    """
    changed: list[Change] = []
    untouched: list[Untouched] = []
    with all_or_nothing(model):
        for parent_name, parent in list(unwrap(model).named_modules()):
            for child_name, child in list(parent.named_children()):
                name = f"{parent_name}.{child_name}" if parent_name else child_name
                if not isinstance(child, NORMS):
                    continue
                if left_out(name, child, include, exclude):
                    untouched.append(Untouched(name, "left out by the name filter"))
                    continue
                swapped = _swapped(child, kind)
                if swapped is None:
                    untouched.append(
                        Untouched(name, f"it is {type(child).__name__} already, or normalizes several axes")
                    )
                    continue
                setattr(parent, child_name, swapped)
                changed.append(Change(name, "module", type(child).__name__, type(swapped).__name__))
    if not changed and not untouched:
        raise UsageError(
            f"expected a model with normalization layers, got {type(model).__name__} with none",
            hint="add_batchnorm(model, inputs)",
        )
    return Changes("swap_normalization", tuple(changed), tuple(untouched))


swap_normalization = on_copy(swap_normalization_)


def batch_statistics_(model: nn.Module, *, include: NameFilter = None, exclude: NameFilter = None) -> Changes:
    """Let batch norms that stay in evaluation mode while the model trains normalize by the batch again.

    Such a norm divides by running statistics that nobody has estimated: of a model whose `train` puts its norms into
    evaluation mode, or of a class that has no other mode (FrozenBatchNorm2d). The statistics are dropped, so that the
    batch's own are used in both modes; the latter classes are replaced by `nn.BatchNorm2d`.

    Args:
        model: changed in place.
        include, exclude: name filters.
    """
    root = unwrap(model)
    with undisturbed(model):
        still = [
            (name, module)
            for name, module in root.named_modules()
            if _is_frozen(module) or (isinstance(module, BATCH_NORMS) and not module.training)
        ]
    changed: list[Change] = []
    untouched: list[Untouched] = []
    with all_or_nothing(model), torch.no_grad():
        for name, module in still:
            if left_out(name, module, include, exclude):
                untouched.append(Untouched(name, "left out by the name filter"))
                continue
            if _is_frozen(module):
                parent, _, key = name.rpartition(".")
                norm: nn.Module = _thawed(module)
                setattr(root.get_submodule(parent), key, norm)
            else:
                norm = module
            norm.track_running_stats = False  # type: ignore[assignment]
            for buffer in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(norm, buffer, None)
            changed.append(Change(name, "statistics", "running", "of the batch"))
    if not changed:
        raise UsageError(
            f"expected batch norms that stay in evaluation mode while {type(root).__name__} trains, got none",
            hint="model.train(), which puts the others into training mode",
        )
    return Changes("batch_statistics", tuple(changed), tuple(untouched))


def _is_frozen(module: nn.Module) -> bool:
    """Whether a class of batch norm knows running statistics alone, as torchvision's and detectron's do."""
    return "FrozenBatchNorm" in type(module).__name__ and isinstance(getattr(module, "running_var", None), Tensor)


def _thawed(frozen: nn.Module) -> nn.BatchNorm2d:
    weight, bias, eps = frozen.weight, frozen.bias, getattr(frozen, "eps", 1e-5)
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    norm = nn.BatchNorm2d(len(weight), eps=eps, device=weight.device, dtype=weight.dtype)
    assert isinstance(norm.weight, Tensor)
    norm.weight.copy_(weight)
    norm.bias.copy_(bias)
    return norm.train(frozen.training)


def break_batchnorm_(
    model: nn.Module,
    *,
    bound: float | None = None,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Changes:
    """One-sided weights, uniform on [0, 2a], which break what batch norm does (rank2020, section 4): a control.

    a = 1/√fan_in gives PyTorch's default law its own variance but a mean: all units see nearly the same sum, the rank
    collapses in spite of batch norm and training stalls.

    Args:
        model: changed in place.
        bound: 2a; by default 2/√fan_in of each layer.
        include, exclude: name filters.
        generator: source of randomness.
    """
    layers, untouched = select_layers(model, include=include, exclude=exclude)
    changed = []
    with all_or_nothing(model), torch.no_grad():
        for name, layer in layers:
            weight = weight_of(layer)
            top = 2 / math.sqrt(fan_in(layer)) if bound is None else bound
            before = rms(weight)
            device = generator.device if generator is not None else weight.device
            weight.copy_(top * torch.rand(weight.shape, generator=generator, device=device))
            changed.append(Change(name, "weight", f"rms {before:.3g}", f"uniform on [0, {top:.3g}]"))
    return Changes("break_batchnorm", tuple(changed), tuple(untouched))


def _observe(model: nn.Module, inputs: Inputs) -> tuple[dict[int, int], set[int], list[int]]:
    """One pass: each layer's number of output dimensions, the layers that a norm follows, the order of layers."""
    shapes: dict[int, int] = {}
    order: list[int] = []
    outputs: dict[int, int] = {}
    normed: set[int] = set()

    def after(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            shapes.setdefault(id(module), output.dim())
            order.append(id(module))
            outputs[id(output)] = id(module)
            kept.append(output)

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and id(arguments[0]) in outputs:
            normed.add(outputs[id(arguments[0])])

    kept: list[Tensor] = []  # holds the outputs, so that an id is never reused within the pass
    handles = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            handles.append(module.register_forward_hook(after))
        elif isinstance(module, NORMS):
            handles.append(module.register_forward_pre_hook(before))
    with hooked(handles), undisturbed(model), torch.no_grad():
        call_model(model, inputs)
    return shapes, normed, order


def _why_no_norm(
    name: str, layer: nn.Module, shapes: dict[int, int], normed: set[int], order: list[int], *, explicit: bool
) -> str | None:
    """Why a layer gets no norm behind it, None where it gets one."""
    if id(layer) not in shapes:
        return "the forward pass did not call it"
    if id(layer) in normed or isinstance(layer, tuple(NORMALIZED.values())):
        return "a norm follows it already"
    if id(layer) == order[-1] and not explicit:
        return "it is the last layer to run: its output is the network's"
    if type(layer) not in NORMALIZED:
        return f"{type(layer).__name__} is a layer type of its own"
    if isinstance(layer, nn.Linear) and shapes[id(layer)] < 2:
        return "its output is a single sample"
    return None


def _swapped(norm: nn.Module, kind: Kind) -> nn.Module | None:
    """A norm of another kind for the same tensors, or None when there is nothing to swap."""
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm) and len(norm.normalized_shape) != 1:
        return None
    weight = getattr(norm, "weight", None)
    width = _width(norm)
    axis: Axis = "last" if isinstance(norm, LAST_AXIS_NORMS) else "channel"
    if axis == "channel" and kind == "batch":
        # a GroupNorm does not know how many axes its tensors have
        made: nn.Module = norm if isinstance(norm, BATCH_NORMS) else ChannelBatchNorm(width)
    else:
        # BatchNorm1d serves (samples, features) and (samples, channels, length) alike: so must what replaces it
        made = make_norm(kind, width, axis=axis, dimensions=3)
    if type(made) is type(norm):
        return None
    with torch.no_grad():
        for part in ("weight", "bias"):
            old, new = getattr(norm, part, None), getattr(made, part, None)
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                new.copy_(old)
    made.train(norm.training)
    return made.to(weight) if isinstance(weight, Tensor) else made


def _width(norm: nn.Module) -> int:
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        return int(norm.normalized_shape[0])
    if isinstance(norm, nn.GroupNorm):
        return norm.num_channels
    if isinstance(norm, ChannelRMSNorm):
        return len(norm.weight)
    assert isinstance(norm, nn.modules.batchnorm._NormBase)
    return norm.num_features
