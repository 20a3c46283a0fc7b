"""Tensors taken and put back: their memory byte for byte, their flags, their gradients and their version counters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# The share of a GPU's free memory that copies may take; beyond it they go to the host, which is slower and has room.
# The rest is left to the pass that follows, whose activations and gradients must find a place.
SHARE = 0.5


class HeldTensor:
    """A tensor, where it hangs, and what does not lie in its memory: shape, flags, gradient, hooks, version."""

    __slots__ = (
        "_function",
        "_hooks",
        "_keeper",
        "_leaf",
        "_version",
        "alias",
        "gradient",
        "name",
        "requires_grad",
        "tensor",
    )

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        with torch._C.DisableTorchFunctionSubclass():  # a class of the user's may answer with something else
            self.alias = tensor.detach()  # keeps the memory, the shape and the strides of now
        self._leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.gradient = tensor.grad if self._leaf else None
        self._function = tensor.grad_fn
        self._version = None if tensor.is_inference() else tensor._version
        self._hooks = [None if store is None else dict(store) for store in self._stores()]

    def restore(self) -> bool:
        """Everything but the memory and the version; False where the graph it hung on has gone on."""
        tensor = self.tensor
        if not _same_place(tensor, self.alias):
            tensor.data = self.alias  # it points at other memory: somebody has set .data
        if self._leaf:
            if not tensor.is_leaf:
                tensor.detach_()  # a constant that was written with something that asks for a gradient
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.gradient:
                tensor.grad = self.gradient
        for name, store, before in zip(HOOKS, self._stores(), self._hooks, strict=True):
            if before is None and store is not None:
                setattr(tensor, name, None)
            elif before is not None and store != before:
                store.clear()
                store.update(before)
        return tensor.grad_fn is self._function

    def rewind(self) -> None:
        """Set the version counter back, so that a graph that saved the tensor before takes it for unchanged."""
        if self._version is None or self.tensor._version == self._version:
            return
        set_versions: Any = torch._C._autograd._unsafe_set_version_counter
        try:
            set_versions((self.tensor,), (self._version,))
        except TypeError:  # before torch 2.6 it took one tensor
            set_versions(self.tensor, self._version)

    def _stores(self) -> list[Any]:
        return [getattr(self.tensor, name, None) for name in HOOKS]


class Storages:
    """The memory that tensors lie in, each piece once: tensors that share it, views and expanded ones are one piece."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self._copies: dict[int, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Remember to copy what the tensor lies in."""
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if storage.device.type != "meta":
                self._held.setdefault(storage._cdata, (name, storage))

    def copy(self) -> list[tuple[str, str]]:
        """Copy all memory: on the device it is on, or on the host where the device has too little room.

        Returns name and reason of what could not be copied.
        """
        sizes: dict[torch.device, int] = {}
        for _, storage in self._held.values():
            sizes[storage.device] = sizes.get(storage.device, 0) + storage.nbytes()
        crowded = {device for device, size in sizes.items() if device.type == "cuda" and size > SHARE * _free(device)}
        failed = []
        for key, (name, storage) in self._held.items():
            try:
                now = _bytes(storage)
                self._copies[key] = now.cpu() if storage.device in crowded else now.clone()
            except (RuntimeError, NotImplementedError) as error:  # a tensor that only looks as if it had memory
                failed.append((name, f"its values cannot be copied, nor be put back ({error})"))
        return failed

    def ways_back(self) -> list[tuple[str, Callable[[], None]]]:
        """How to put every piece back, by the name of a tensor in it."""
        return [(self._held[key][0], partial(_write, self._held[key][1], copy)) for key, copy in self._copies.items()]

    def value(self, like: Tensor) -> Tensor:
        """What a tensor's place held, in the shape of that tensor."""
        copied = self._copies[like.untyped_storage()._cdata]
        whole = torch.empty(0, dtype=like.dtype, device=copied.device)
        return whole.set_(copied.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def _write(storage: torch.UntypedStorage, before: Tensor) -> None:
    """Write back what differs. What is equal is not written: it may be a file that is mapped for reading only.

    A GPU has no such files, and to wait for what a comparison says takes longer than to write.
    """
    if storage.nbytes() != before.nbytes:
        storage.resize_(before.nbytes)
    now = _bytes(storage)
    if storage.device.type == "cuda" or not torch.equal(_wide(now), _wide(before.to(now.device))):
        now.copy_(before)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory of their own that a tensor is made of: itself, or those of a sparse or wrapping one."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, Tensor):  # of a distributed tensor, whose own list of parts not every version can give
        return _parts(local)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _same_place(tensor: Tensor, alias: Tensor) -> bool:
    if tensor.layout is not torch.strided or alias.layout is not torch.strided or tensor.is_nested:
        return hasattr(tensor, "__tensor_flatten__")
    return (
        tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        == (alias.shape, alias.stride(), alias.storage_offset(), alias.dtype)
    )  # fmt: skip


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wide(raw: Tensor) -> Tensor:
    """The bytes eight at a time where that fits, which compares faster."""
    return raw.view(torch.int64) if raw.numel() % 8 == 0 and raw.numel() else raw


def _free(device: torch.device) -> int:
    """What a GPU has left, and what torch holds there without using it."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + idle)
