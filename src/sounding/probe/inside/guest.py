"""A tap with a guest, who sees what happens between modules."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sounding.probe.calls import OpenCall, Pass, Spec
from sounding.probe.inside.listen import Inside
from sounding.probe.tap import Tap


class GuestTap(Tap):
    """A tap for passes in which a guest, if there is one, sees what happens between modules."""

    guest: Inside | None = None

    def observe(self, spec: Spec, args: Any, output: Any) -> Any:
        """Measure the call, and tell the guest of it."""
        record = partial(super().observe, spec, args, output)
        with _disable_current_modes():  # what is measured is no operation of the model
            return record() if self.guest is None else self.guest.observe(spec.module, args, output, record)

    def take_gradient(self, one: Pass, call: OpenCall, gradient: Tensor | None) -> None:
        """A gradient came back to what a call returned."""
        with torch._C.DisableTorchFunction() if type(gradient) is Tensor else nullcontext():
            super().take_gradient(one, call, gradient)
