"""The batches of a check: what may be given as inputs, cut into repeats, made ready for a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sounding.errors import TargetError, UsageError
from sounding.probe.outputs import leading_tensor, tensors_in
from sounding.probe.parts import is_distributed


@dataclass(frozen=True)
class Batch:
    """One batch: arguments and keyword arguments of the model, and targets."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    targets: Any

    def tensors(self) -> list[Tensor]:
        """Every tensor among the inputs, in order."""
        return [tensor for _, tensor in tensors_in((self.arguments, dict(self.keywords)))]

    def size(self, axis: int = 0) -> int | None:
        """The number of samples: of the tensor that speaks for them."""
        first = leading_tensor(self.tensors())
        return None if first is None else int(first.shape[axis if axis < first.dim() else 0])

    def name_largest(self) -> str:
        """Which of the inputs, and which of its columns, has the largest values, as a clause; "" for a single one."""
        best, told = 0.0, ""
        named = {**{str(index): one for index, one in enumerate(self.arguments)}, **self.keywords}
        for name, value in named.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 2:
                continue
            if value.layout is not torch.strided:  # a sparse tensor knows no mean over rows
                continue
            sizes = value.detach().double().square().mean(0).sqrt()
            column, size = int(sizes.argmax()), float(sizes.max())
            if size > best:
                which = f" of {name!r}" if len(named) > 1 else ""
                best, told = (
                    size,
                    f"column {column}{which} has the largest values, up to {float(value.abs().max()):.3g}",
                )
        return told

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor of its arguments changed, and without targets."""
        return Batch(_map(self.arguments, change), _map(dict(self.keywords), change), None)

    def prepare(self, *, plain: bool = False) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Copies to send through the model, floating-point ones asking for a gradient, and the leaves that get it.

        The gradient reaches the outputs of layers before the first trainable weight this way. What the model receives
        is no leaf, so it may work in place, and no part of the caller's tensors. With `plain` it receives leaves that
        ask for nothing, which it may turn into numpy arrays and ask for gradients itself.
        """
        leaves: list[Tensor] = []

        def ready(value: Tensor) -> Tensor:
            if plain or not value.is_floating_point() or value.layout is not torch.strided:
                return value.detach().clone()
            leaf = value.detach().clone().requires_grad_()
            leaves.append(leaf)
            return leaf.clone()

        copied = self.mapped(ready)
        return copied.arguments, dict(copied.keywords), leaves

    def uncopied(self) -> list[tuple[str, Any]]:
        """What the model and the loss receive as it is, by name: caches and other objects, and the targets."""
        found: list[tuple[str, Any]] = [("targets", self.targets)]

        def look(name: str, value: Any) -> None:
            if type(value) is dict:
                for key, item in value.items():
                    look(f"{name}.{key}", item)
            elif type(value) in (tuple, list):
                for index, item in enumerate(value):
                    look(f"{name}.{index}", item)
            elif not isinstance(value, Tensor):
                found.append((name, value))

        look("inputs", self.arguments or dict(self.keywords))
        return found


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What was given with every tensor changed that lies in plain tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return type(value)(_map(item, change) for item in value) if type(value) in (tuple, list) else value


def batches_of(inputs: Any, targets: Any, repeats: int, *, axis: int) -> Iterator[Batch]:
    """One checked batch per repeat."""
    # a data set's loader has no __next__ of its own
    loads = hasattr(inputs, "__iter__") and hasattr(inputs, "dataset")
    if callable(inputs) or hasattr(inputs, "__next__") or loads:
        yield from _fresh(inputs, targets, repeats)
        return
    whole = make_batch(inputs, targets)
    if repeats == 1:
        yield whole
        return
    size = whole.size(axis) or 0
    if size < 2 * repeats:
        raise UsageError(
            f"{repeats} repeats need at least {2 * repeats} samples, got {size}",
            hint="inputs as a callable that gives a fresh batch, or fewer repeats",
        )
    given = (whole.arguments, dict(whole.keywords))
    beside = axis if isinstance(whole.targets, Tensor) and axis < whole.targets.dim() else 0
    for index in range(repeats):
        part = slice(index * (size // repeats), (index + 1) * (size // repeats))
        arguments, keywords = cut(given, part, size, axis)
        yield Batch(arguments, keywords, cut(whole.targets, part, size, beside))


def make_batch(inputs: Any, targets: Any) -> Batch:
    """Check what was given and make tensors of arrays."""
    targets = _as_tensor(targets) if isinstance(targets, np.ndarray | list) else targets
    if isinstance(inputs, Mapping):
        batch = Batch((), {str(key): _as_tensor(item) for key, item in inputs.items()}, targets)
    elif isinstance(inputs, tuple):
        batch = Batch(tuple(_as_tensor(item) for item in inputs), {}, targets)
    else:
        item = _as_tensor(inputs)
        if not isinstance(item, Tensor):
            raise UsageError(
                f"expected inputs as a tensor, a tuple or mapping of them, or a callable, got {type(inputs).__name__}"
            )
        batch = Batch((item,), {}, targets)
    for tensor in batch.tensors():
        if is_distributed(tensor):
            raise UsageError("expected inputs as plain tensors, got a DTensor", hint="inputs.full_tensor()")
        if tensor.is_nested:
            raise UsageError("expected inputs as dense arrays, got a nested tensor", hint="to_padded_tensor(0.0)")
        if tensor.dim() > 0 and tensor.shape[0] == 0:
            raise UsageError(f"expected at least one sample, got an empty batch of shape {tuple(tensor.shape)}")
    check_finite(batch.tensors())
    return batch


def check_finite(tensors: Sequence[Tensor]) -> None:
    """Refuse NaN and infinity in floating-point inputs; −∞ is allowed beside other inputs, where it is a mask."""
    for tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        values = tensor.detach()
        if tensor.layout is not torch.strided:  # of a sparse tensor what is stored, one by one
            values = values.coalesce().values() if tensor.is_sparse else values.values()
        fine = torch.isfinite(values)
        if len(tensors) > 1:
            fine |= torch.isneginf(values)
        bad = int((~fine).sum())
        if bad:
            raise UsageError(
                f"expected finite inputs, got {bad} NaN or infinite values of {tensor.numel()}",
                hint="cleaning the data first",
            )


def _fresh(inputs: Any, targets: Any, repeats: int) -> Iterator[Batch]:
    """One batch for each repeat, from a function or an iterator that gives pairs."""
    if targets is not None:
        raise UsageError("inputs that give batches bring their own targets, got targets too", hint="targets=None")
    source: Callable[[], Any] = inputs if callable(inputs) else iter(inputs).__next__
    for index in range(repeats):
        try:
            pair = source()
        except StopIteration:
            raise UsageError(f"expected {repeats} batches, got {index}", hint=f"repeats={index}") from None
        except Exception as error:
            raise TargetError(f"the inputs raised {type(error).__name__}: {error}") from error
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(
                f"expected (inputs, targets) from the inputs, got {type(pair).__name__}",
                hint="returning (inputs, None) where there are no targets",
            )
        yield make_batch(*pair)


def _as_tensor(item: Any) -> Any:
    """Arrays and lists of numbers as tensors; everything else as it is."""
    if isinstance(item, Tensor):
        return item
    if isinstance(item, np.ndarray):
        try:
            return torch.as_tensor(item)
        except TypeError as error:
            raise UsageError(f"expected an array of numbers, got one of {item.dtype}") from error
    if isinstance(item, list) and item and not any(isinstance(part, Tensor) for part in item):
        try:
            return torch.as_tensor(item)
        except (TypeError, ValueError) as error:
            raise UsageError(f"expected a list of numbers, got one that is no array ({error})") from error
    return item


def cut(item: Any, part: slice, size: int, axis: int) -> Any:
    """The samples of one repeat; what is not about samples (a mask over positions, a number) stays whole."""
    if isinstance(item, Tensor) and axis < item.dim() and item.shape[axis] == size:
        if item.layout is not torch.strided:
            chosen = torch.arange(size, device=item.device)[part]
            return item.to_sparse(layout=torch.sparse_coo).index_select(axis, chosen).to_sparse(layout=item.layout)
        return item[part] if axis == 0 else item[(slice(None),) * axis + (part,)]
    if isinstance(item, dict):
        return {key: cut(value, part, size, axis) for key, value in item.items()}
    if type(item) in (tuple, list):
        return type(item)(cut(value, part, size, axis) for value in item)
    return item
