"""Adaptive gradient clipping as an optimizer wrapper (Brock et al. 2021; thesis2024, appendix A.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sounding.errors import UsageError


def clip_adaptively(gradient: Tensor, weight: Tensor, axes: Sequence[int], *, clipping: float, floor: float) -> Tensor:
    """The gradient with each unit cut to λ · max(‖w‖, floor), norms over these axes (Brock et al. 2021, eq. 3)."""

    def norm(tensor: Tensor) -> Tensor:  # of one number its size
        found: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(axes), keepdim=True) if axes else tensor.abs()
        return found

    limit = clipping * norm(weight).clamp_min(floor)  # weights that start at zero could never move
    # 1e-30 stands for the norm of a gradient of zero
    return gradient * (limit / norm(gradient).clamp_min(1e-30)).clamp_max(1.0)


class AdaptiveClipping(torch.optim.Optimizer):
    """Clip each unit's gradient to a fraction of its weight's norm before every step of an optimizer.

    For each output unit i (a row of a Linear weight, a filter of a convolution):
    g_i ← λ · max(‖w_i‖, floor)/‖g_i‖ · g_i wherever ‖g_i‖ > λ · max(‖w_i‖, floor). thesis2024 (A.5) clips a
    layer's whole matrix: `unitwise=False`. Everything else is the wrapped optimizer's: parameter groups, state and
    state_dict are its own objects, so that learning rate schedulers and gradient scalers work on either.

    Args:
        optimizer: any torch optimizer.
        clipping: λ.
        floor: the least norm a weight counts with, so that zero-initialized ones can move.
        unitwise: per output unit, or per parameter.

    >>> weight = torch.nn.Parameter(torch.ones(1, 4))
    >>> optimizer = AdaptiveClipping(torch.optim.SGD([weight], lr=1.0), clipping=0.1)
    >>> (100 * weight.sum()).backward(); _ = optimizer.step()
    >>> weight.detach()
    tensor([[0.9000, 0.9000, 0.9000, 0.9000]])
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, clipping: float = 0.1, floor: float = 1e-3, unitwise: bool = True
    ) -> None:
        if not (clipping > 0 and floor > 0):
            raise UsageError(f"clipping and floor must be positive, got {clipping} and {floor}")
        # torch's own constructor would make parameter groups of its own: these are the wrapped optimizer's
        self.optimizer = optimizer
        self.clipping = clipping
        self.floor = floor
        self.unitwise = unitwise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, then let the optimizer step; a closure is called first, as its gradients are what is clipped."""
        if closure is None:
            self.clip()
            return self.optimizer.step()

        def clipped() -> Any:
            loss = closure()
            self.clip()
            return loss

        return self.optimizer.step(clipped)

    @torch.no_grad()
    def clip(self) -> None:
        """Clip the gradients now."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None:
                    axes = range(1 if self.unitwise and grad.dim() > 1 else 0, grad.dim())
                    grad.copy_(clip_adaptively(grad, parameter, axes, clipping=self.clipping, floor=self.floor))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # not the wrapped one’s, to which `__getattr__` would lead

    def __repr__(self) -> str:
        return f"AdaptiveClipping({self.optimizer!r}, clipping={self.clipping:g}, floor={self.floor:g})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapped optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)
