"""The hooks of a measured step, which do nothing in a copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from sounding.probe.calls import Spec


class Observing(Protocol):
    """What is told of the calls of modules."""

    def _observe(self, spec: Spec, args: Any, output: Any) -> Any: ...


class Hook:
    """A hook that does nothing in a copy of the module, in memory or on disk: that must not report to this step."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def __reduce__(self) -> Any:
        return _make_rest, ()


class Observer(Hook):
    """The hook of one module; without a function in between, since there may be thousands."""

    __slots__ = ("spec", "window")

    def __init__(self, window: Observing, spec: Spec) -> None:
        self.window, self.spec = window, spec

    def __call__(self, _module: nn.Module, args: Any, output: Any) -> Any:
        return self.window._observe(self.spec, args, output)


def _make_rest() -> Callable[..., None]:
    return _rest


def _rest(*_: Any) -> None:
    """What stands in a copied module where the hook of a measured step stood."""
