"""A tap with a guest, who sees what happens between modules."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sounding.probe.calls import OpenCall, Pass, Spec, is_opaque, named_modules
from sounding.probe.hooks import Listener
from sounding.probe.inside.listen import Inside
from sounding.probe.tap import Tap


class GuestTap(Tap):
    """A tap for passes in which a guest, if there is one, sees what happens between modules."""

    guest: Inside | None = None

    def _attach_parts(self) -> None:
        """Hook the blocks too, modules that hold others and have a number in a list: the guest hears when they end."""
        super()._attach_parts()
        watched = {id(spec.module) for spec in self.specs}
        for name, module in named_modules(self.root):
            if _is_block(name, module) and id(module) not in watched:
                self._hooks.on_call(module, Listener(partial(self._end_block, name)))

    def _end_block(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.guest is not None:
            self.guest.trail.close(name, module, args, output, self.guest.calls())

    def observe(self, spec: Spec, args: Any, output: Any) -> Any:
        """Measure the call, and tell the guest of it."""
        record = partial(super().observe, spec, args, output)
        with _disable_current_modes():  # what is measured is no operation of the model
            seeded = record() if self.guest is None else self.guest.observe(spec.module, args, output, record)
            if spec.name.rpartition(".")[2].isdecimal():
                self._end_block(spec.name, spec.module, args, output)
            return seeded

    def take_gradient(self, one: Pass, call: OpenCall, gradient: Tensor | None) -> None:
        """A gradient came back to what a call returned."""
        with torch._C.DisableTorchFunction() if type(gradient) is Tensor else nullcontext():
            super().take_gradient(one, call, gradient)


def _is_block(name: str, module: nn.Module) -> bool:
    return name.rpartition(".")[2].isdecimal() and bool(module._modules) and not is_opaque(module)
