"""Forward hooks on every module of a model at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Hook = Callable[[nn.Module, Any, Any], Any]


class ForwardHooks:
    """A forward hook on each of many modules, under one number that torch hands out, and one way to take them off.

    `register_forward_hook` makes a handle for each, which takes as long as the call that the hook sees. What it stores
    is the same; scripted modules refuse the method, though their call runs the hooks.
    """

    def __init__(self, hooks: Iterable[tuple[nn.Module, Hook]]) -> None:
        self._number = RemovableHandle(OrderedDict()).id
        self._stores: list[dict[int, Any]] = []
        try:
            for module, hook in hooks:
                self._stores.append(module._forward_hooks)
                module._forward_hooks[self._number] = hook
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take them off; again does nothing."""
        for store in self._stores:
            store.pop(self._number, None)
        self._stores = []
