"""Hooks on everything a watch listens to, at the cost of the hooks alone."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_call: Any = nn.Module._call_impl
_slow: Any = nn.Module._slow_forward
# The code from which torch calls `forward` once it has seen to the hooks; any other caller goes past the hooks.
CALLERS = {
    _call.__code__,
    _slow.__code__,
    *(c for c in _call.__code__.co_consts if isinstance(c, CodeType)),
}
Hook = Callable[..., Any]
_claims: Counter[int] = Counter()  # modules and weights that a check runs on, by identity
PLAIN = (Tensor, nn.Parameter)  # subclasses may store their hooks elsewhere


@contextmanager
def claim(parts: Iterable[nn.Module | Tensor]) -> Iterator[None]:
    """Modules and weights that run for a check meanwhile: a monitor that hooked them does not take it for training."""
    found = [id(part) for part in parts]
    _claims.update(found)  # counted, since checks of models that share a part may run at once
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
        self._number = RemovableHandle(OrderedDict()).id  # torch counts up: no hook of anybody has this number
        self._stores: list[dict[int, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._forwards: list[Forward] = []

    def on_call(self, module: nn.Module, hook: Hook) -> None:
        """Call it after the module's forward method; scripted modules refuse torch's method, and still run the hook."""
        store: dict[int, Any] = module._forward_hooks
        store[self._number] = hook
        self._stores.append(store)

    def on_forward(self, module: nn.Module, hook: Hook, *, before: Hook | None = None) -> None:
        """Call `hook(args, output)` when someone calls the module's forward method past its hooks.

        `before(args, kwargs)` is called first. What the hook returns, if anything, stands for the output.
        """
        if not isinstance(module, torch.jit.ScriptModule):
            self._forwards.append(Forward(module, hook, before))

    def around(self, module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the module's forward method inside a context, however it is called, and leave it however it ends."""
        if not isinstance(module, torch.jit.ScriptModule):
            self._forwards.append(Forward(module, _rest, None, context))

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
        node._register_hook_dict(output)  # as Tensor.register_hook does

    def remove(self) -> None:
        """Take off those on modules and weights; again does nothing."""
        for store in self._stores:
            store.pop(self._number, None)
        for handle in self._handles:
            handle.remove()
        for forward in reversed(self._forwards):  # a later one lies around an earlier one
            forward.remove()
        self._stores, self._handles, self._forwards = [], [], []


class Listener:
    """A hook that does nothing in a copy of what it hangs on, in memory or on disk: a copy has nothing to report."""

    __slots__ = ("_call",)

    def __init__(self, call: Hook) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> Any:
        return _itself, (_rest,)


class Observer(Listener):
    """The hook of one module, which passes on what went in and what came out.

    Modes that watch functions (dropout at rest, a default device) would look at each attribute that it reads.
    """

    __slots__ = ()

    def __call__(self, _module: nn.Module, args: Any, output: Any) -> Any:
        if type(output) is not Tensor:
            return self._call(args, output)
        with torch._C.DisableTorchFunction():
            return self._call(args, output)


class Forward:
    """A module's forward method for the time of a watch: the method itself, and a hook for calls that pass hooks by.

    A copy of the module, in memory or on disk, gets the method alone.
    """

    __slots__ = ("_before", "_context", "_hook", "_module", "_own", "_plain")

    def __init__(self, module: nn.Module, hook: Hook, before: Hook | None, context: Hook | None = None) -> None:
        self._module, self._hook, self._before, self._context = module, hook, before, context
        self._own = "forward" in vars(module)
        self._plain: Any = module.forward
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs, direct=sys._getframe(1).f_code not in CALLERS)

    def __reduce__(self) -> Any:
        # The copy has no attributes yet when this is looked up in it, so that its class answers.
        return (_itself, (self._plain,)) if self._own else (getattr, (self._module, "forward"))

    def remove(self) -> None:
        """Take it off, also from under that of another watch."""
        attributes = vars(self._module)
        above = attributes.get("forward")
        if above is self:
            if self._own:
                attributes["forward"] = self._plain
            else:
                del attributes["forward"]
            return
        while isinstance(above, Forward):
            if above._plain is self:
                above._plain, above._own = self._plain, self._own
                return
            above = above._plain

    def _run(self, args: Any, kwargs: Any, *, direct: bool) -> Any:
        """The output of the forward method that was there, and what the hook makes of it in a direct call."""
        if direct and self._before is not None:
            self._before(args, kwargs)
        plain = self._plain
        run = partial(plain._run, args, kwargs, direct=direct) if isinstance(plain, Forward) else None
        if self._context is None:
            output = plain(*args, **kwargs) if run is None else run()
        else:
            with self._context():
                output = plain(*args, **kwargs) if run is None else run()
        if not direct:
            return output
        replaced = self._hook(args, output)
        return output if replaced is None else replaced


def _rest(*_: Any) -> None:
    """What stands in a copy where a hook stood."""


def _itself(value: Any) -> Any:
    return value
