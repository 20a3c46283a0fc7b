"""Hooks on everything a watch listens to, at the cost of the hooks alone."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Hook = Callable[..., Any]
_claims: Counter[int] = Counter()  # modules and weights that a check runs on, by identity
PLAIN = (Tensor, nn.Parameter)  # subclasses may store their hooks elsewhere


@contextmanager
def claim(parts: Iterable[nn.Module | Tensor]) -> Iterator[None]:
    """Modules and weights that run for a check meanwhile: a monitor that hooked them does not take it for training."""
    found = [id(part) for part in parts]
    _claims.update(found)
    try:
        yield
    finally:
        _claims.subtract(found)
        for key in found:
            if not _claims[key]:
                del _claims[key]


def is_claimed(part: nn.Module | Tensor) -> bool:
    """Whether a check runs on a module or a weight."""
    return bool(_claims) and id(part) in _claims


class Hooks:
    """Hooks on modules and tensors under one number that torch hands out, and one way to take them off.

    Torch's own methods make a handle for each hook, which takes longer than the hook. What they store is stored here,
    where they store it.
    """

    def __init__(self) -> None:
        self._number = RemovableHandle(OrderedDict()).id
        self._stores: list[dict[int, Any]] = []
        self._handles: list[RemovableHandle] = []

    def on_call(self, module: nn.Module, hook: Hook) -> None:
        """Call it after the module's forward method; scripted modules refuse torch's method, and still run the hook."""
        store: dict[int, Any] = module._forward_hooks
        store[self._number] = hook
        self._stores.append(store)

    def on_weight(self, weight: Tensor, hook: Hook) -> None:
        """Call it with the gradient of a tensor where gradients end."""
        held: Any = weight
        if type(weight) not in PLAIN:
            self._handles.append(held.register_hook(hook))
            return
        if held._backward_hooks is None:
            held._backward_hooks = OrderedDict()
        store: dict[int, Any] = held._backward_hooks
        store[self._number] = hook
        self._stores.append(store)

    def on_output(self, output: Tensor, hook: Hook) -> None:
        """Call it with the gradient of what an operation gave, as it is now; it goes with the graph it hangs on."""
        held: Any = output
        node = held.grad_fn
        if held._backward_hooks is not None or node is None or type(output) not in PLAIN:
            held.register_hook(hook)
            return
        store = held._backward_hooks = OrderedDict()
        store[self._number] = hook
        node._register_hook_dict(output)

    def remove(self) -> None:
        """Take off those on modules and weights; again does nothing."""
        for store in self._stores:
            store.pop(self._number, None)
        for handle in self._handles:
            handle.remove()
        self._stores, self._handles = [], []
