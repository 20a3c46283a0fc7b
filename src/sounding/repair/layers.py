"""Which layers of a model a cure may touch, and why it leaves the others alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from sounding.errors import UsageError
from sounding.probe.state import unwrap
from sounding.repair.changes import Untouched

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Weights that cures know how to draw; which modules count as depth says `probe.calls.multiplies`.
WEIGHT_LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

NameFilter = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
FROZEN = "it is frozen (requires_grad is False)"
T = TypeVar("T")


def left_out(name: str, module: nn.Module, include: NameFilter, exclude: NameFilter) -> str | None:
    """Why the filters of a cure leave a module alone, None where they take it."""

    def takes(pattern: NameFilter) -> bool:
        if pattern is None or callable(pattern):
            return pattern is not None and bool(pattern(name, module))
        globs = [pattern] if isinstance(pattern, str) else pattern  # a string is a sequence of letters otherwise
        return any(fnmatch.fnmatchcase(name, glob) for glob in globs)

    taken = include is None or takes(include)
    return None if taken and not takes(exclude) else "left out by the name filter"


def sort_out(
    named: Iterable[tuple[str, T]], why: Callable[[str, T], str | None]
) -> tuple[list[tuple[str, T]], list[Untouched]]:
    """What a cure may change, where `why` gives no reason against it, and the others with theirs."""
    found = [(name, one, why(name, one)) for name, one in named]
    chosen = [(name, one) for name, one, reason in found if reason is None]
    return chosen, [Untouched(name, reason) for name, _, reason in found if reason is not None]


def why_not(module: nn.Module) -> str | None:
    """The reason a weight layer's weight cannot be set, or None."""
    if parametrize.is_parametrized(module, "weight"):  # first: to read its weight would compute it
        return "its weight is computed by a parametrization; remove it first (torch.nn.utils.parametrize)"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return "it has no weight tensor"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "it is lazy and has not seen an input yet; run the model once first"
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed by a hook (weight norm, spectral norm or pruning)"
    if not weight.dtype.is_floating_point:
        return f"its weight is {weight.dtype}, not floating point"
    if not weight.requires_grad:
        return FROZEN
    if weight.is_meta:
        return "it is on the meta device and has no values"
    return None


def select_layers(
    model: nn.Module,
    kinds: tuple[type[nn.Module], ...] = WEIGHT_LAYERS,
    *,
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> tuple[list[tuple[str, nn.Module]], list[Untouched]]:
    """The layers of these kinds that a cure may change, in registration order, and those it leaves, with reasons.

    Args:
        model: any module; a bare layer is its own only layer.
        kinds: the layer types the cure knows.
        include: only layers that match (glob such as "features.*", several, or a predicate of name and module).
        exclude: never these.
    """
    seen: dict[int, str] = {}

    def reason(name: str, module: nn.Module) -> str | None:
        filtered = left_out(name, module, include, exclude)
        if filtered or not isinstance(module, WEIGHT_LAYERS):  # a norm without a weight can be changed, too
            return filtered
        weight = getattr(module, "weight", None)
        why = why_not(module) or (f"its weight is tied to {seen[id(weight)]}" if id(weight) in seen else None)
        if why is None:
            seen[id(weight)] = name
        return why

    # a bare layer has no name in itself
    leaves = [(name or type(model).__name__, module) for name, module in unwrap(model).named_modules()]
    # a quantized layer has a method in place of the tensor
    untouched = [
        Untouched(name, "its weights are quantized")
        for name, module in leaves
        if "quantized" in type(module).__module__ and callable(getattr(module, "weight", None))
    ]
    chosen, others = sort_out([one for one in leaves if isinstance(one[1], kinds)], reason)
    untouched += others
    if not chosen:
        wanted = " or ".join(sorted({kind.__name__ for kind in kinds}))
        why = "; ".join(f"{u.name}: {u.reason}" for u in untouched[:3])
        raise UsageError(
            f"expected a model with a {wanted} layer to change, got {type(model).__name__} with none"
            + (f" that may be changed ({why})" if why else ""),
            hint="unfreezing a layer, another name filter, or another method",
        )
    return chosen, untouched


def unfuse(model: nn.Module, changed: Iterable[nn.Module]) -> None:
    """Let torch's encoder layers call the parts that have changed: their fused path knows plain ones alone."""
    parts = set(changed)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and parts & set(module.modules()):
            module.activation_relu_or_gelu = 0  # what that path asks for


def fan_in(module: nn.Module) -> int:
    """How many inputs one output of a Linear or convolution layer sums."""
    if isinstance(module, TRANSPOSED):
        # each output pixel meets kernel/stride taps of every input channel of its group
        taps = 1
        for size, stride in zip(module.kernel_size, module.stride, strict=True):
            taps *= max(1, size // stride)
        return module.in_channels // module.groups * taps
    return weight_of(module)[0].numel()


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of a layer that `select_layers` chose."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def width_of(module: nn.Module) -> int:
    """How many features a layer gives out."""
    for name in ("out_features", "out_channels", "num_features", "num_channels", "nf", "embed_dim"):
        found = getattr(module, name, None)  # `nf` is GPT-2's, whose weight lies transposed
        if isinstance(found, int):
            return found
    shape = getattr(module, "normalized_shape", None)
    return int(shape[0]) if shape else len(weight_of(module))


def rms(tensor: torch.Tensor) -> float:
    """Root mean square, in float64."""
    # squares of half precision overflow
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0
