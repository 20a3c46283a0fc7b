"""How what a module returns becomes a sample matrix: which tensor of a structure, which axis holds the samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sounding.probe.parts import is_distributed

MEASURABLE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
PREFERRED = ("logits", "last_hidden_state", "output", "out")
EMPTY = "its output is empty"
STACKED = 16  # samples whose positions are compared: their products grow with the square of the positions


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested tuple, list, mapping or dataclass with its path, in order."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{names[index]}" if names else f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{path}.{field.name}")


def main_tensor(value: Any) -> Tensor | None:
    """The tensor that speaks for a structure: the first real floating-point one with an axis, else the first one."""
    if isinstance(value, Tensor):
        return value
    found = [tensor for _, tensor in tensors_in(value)]
    return next(
        (tensor for tensor in found if tensor.is_floating_point() and tensor.dim() > 0), found[0] if found else None
    )


def answer_tensor(value: Any) -> Tensor | None:
    """The tensor of a model's output that a loss compares with targets: "logits" if it has that, else the main one."""
    for name in PREFERRED:
        item = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if isinstance(item, Tensor) and not isinstance(value, Tensor):
            return item
    return main_tensor(value)


def leading_tensor(tensors: Iterable[Tensor]) -> Tensor | None:
    """The tensor of a model's inputs that speaks for the samples: the first floating-point one that is no mask.

    Where there is none it is the first one that is no mask, such as tokens, else the first one.
    """
    found = [tensor for tensor in tensors if tensor.dim() > 0]
    if len(found) > 1:
        found = [tensor for tensor in found if not is_mask(tensor)] or found
    return next((tensor for tensor in found if tensor.is_floating_point()), found[0] if found else None)


def is_mask(tensor: Tensor) -> bool:
    """Whether a tensor says by −∞ where attention must not look."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    try:
        return bool(torch.isneginf(tensor.detach()).any())
    except RuntimeError:  # inside vmap there is no single answer
        return False


def why_unmeasurable(tensor: Tensor) -> str | None:
    """Why a tensor has no features to measure, or None."""
    if type(tensor) is not Tensor and is_distributed(tensor):
        return "its output is a DTensor, of which this process holds a part"
    if tensor.dtype in MEASURABLE and tensor.layout is torch.strided and tensor.numel() and not tensor.is_nested:
        return None if not tensor.is_meta else "its output lives on the meta device and has no values"
    if tensor.is_complex():
        return f"its output is complex ({tensor.dtype}), the measures are of real features: try .real, .imag or .abs()"
    if not tensor.is_floating_point():
        return f"its output has the type {tensor.dtype}, which carries no signal to measure"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"its output is stored as {'nested' if tensor.is_nested else tensor.layout}, not as one dense array"
    return f"{EMPTY} (shape {tuple(tensor.shape)})" if tensor.numel() == 0 else f"its type is {tensor.dtype}"


def sample_axis(tensor: Tensor, batch_size: int, *, first: int = 0) -> int | None:
    """The axis that holds the samples: the preferred one if its size fits, else axis 0, else 1; None if none fits.

    Axis 1 is a guess only where a third one holds the features: in the (17, 64) output of an expert that 17 of 64
    samples were sent to, the 64 are features.
    """
    for axis in dict.fromkeys((first, 0, 1) if tensor.dim() > 2 else (first, 0)):
        if axis < tensor.dim() and tensor.shape[axis] == batch_size:
            return axis
    return None


def sample_matrix(tensor: Tensor, batch_size: int, *, first: int = 0, limit: int | None = None) -> Tensor | None:
    """Rows are samples, everything else is flattened: (N, C, H, W) → (N, C·H·W), (N, T, D) → (N, T·D).

    (T, N, D) is recognized by the size of axis 1 (or by `first=1`). Where axis 0 is a multiple of the batch size, as in
    (N·T, D), consecutive rows belong to one sample. None where no axis fits: the output is not about samples. At most
    `limit` samples are taken, the first ones.

    >>> sample_matrix(torch.zeros(5, 4, 2), 4).shape
    torch.Size([4, 10])
    """
    axis = sample_axis(tensor, batch_size, first=first)
    if axis is None:
        if tensor.dim() < 2 or batch_size == 0 or tensor.shape[0] % batch_size:
            return None
        tensor = tensor.reshape(batch_size, -1)
    elif axis == 1:
        tensor = tensor.transpose(0, 1)
    if limit is not None and batch_size > limit:
        tensor = tensor[:limit]
    return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[0], -1)


def token_stack(tensor: Tensor, batch_size: int, *, first: int = 0) -> Tensor | None:
    """A 3-D output as (samples, positions, features), the first samples; None for any other shape."""
    axis = sample_axis(tensor, batch_size, first=first) if tensor.dim() == 3 else None
    return None if axis is None else (tensor.transpose(0, 1) if axis == 1 else tensor)[:STACKED]


def positions_per_sample(tensor: Tensor, batch_size: int, *, first: int = 0, channels_first: bool = False) -> int:
    """How many places of one sample share a unit: H·W of an image, T of a sequence, 1 of a vector."""
    axis = sample_axis(tensor, batch_size, first=first)
    if axis is None:
        return max(1, tensor.shape[0] // max(batch_size, 1)) if tensor.dim() > 1 else 1
    if tensor.dim() <= 2:
        return 1
    rest = [size for place, size in enumerate(tensor.shape) if place != axis]
    units = rest[0] if tensor.dim() > 3 or channels_first else rest[-1]
    return math.prod(rest) // max(units, 1)


def guess_axis(root: nn.Module) -> int:
    """The axis of the samples in the inputs: 1 for torch's own sequence modules with batch_first=False, else 0."""
    if not type(root).__module__.startswith("torch.nn"):
        return 0
    for module in root.modules():
        batch_first = getattr(module, "batch_first", None)
        if batch_first is not None:
            return int(not batch_first)
        if isinstance(module, nn.Sequential):
            return 0
    return 0
