"""The costly operations of a stack of perceptrons with their derivatives written out, in as few passes as it takes.

Tensors are (runs, samples, features). What autograd would derive is the same; it would keep more, write the gradient of
a weight transposed, and take the variance by a reduction that is many times slower than the product itself on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Number = float | Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return _product_backward(gradients[0], x, weight, ctx.needs_input_grad)


class _Layer(torch.autograd.Function):
    """Linear map, batch norm and, if asked, ReLU as one node: no pre-activation is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        eps: Number, centred: bool, relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        output, normal, inverse, mean, variance = _normalize(_product(x, weight, bias), scale, shift, eps, centred)
        if relu:
            output = output.relu_()
        ctx.save_for_backward(x, weight, normal, inverse, scale, output if relu else None)
        ctx.centred = centred
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, normal, inverse, scale, output = ctx.saved_tensors
        # in either case a tensor of our own, which is then worked on in place
        delta = gradients[0].clone() if output is None else torch.ops.aten.threshold_backward(gradients[0], output, 0)
        needed = ctx.needs_input_grad
        delta, of_scale, of_shift = _normalize_backward_(delta, normal, inverse, scale, ctx.centred)
        back = _product_backward(delta, x, weight, needed[:3])
        return (*back, of_scale if needed[3] else None, of_shift if needed[4] else None, None, None, None)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: Number, centred: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, normal, inverse, mean, variance = _normalize(x.clone(), scale, shift, eps, centred)
        ctx.save_for_backward(normal, inverse, scale)
        ctx.centred = centred
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse, scale = ctx.saved_tensors
        delta, of_scale, of_shift = _normalize_backward_(gradients[0].clone(), normal, inverse, scale, ctx.centred)
        needed = ctx.needs_input_grad
        return (delta, of_scale if needed[1] else None, of_shift if needed[2] else None, None, None)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)


def _product_backward(
    delta: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (
        torch.bmm(delta, weight) if needed[0] else None,
        torch.bmm(delta.mT, x) if needed[1] else None,
        delta.sum(dim=1) if needed[2] else None,
    )


def _normalize(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: Number, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """γ x̂ + β, x̂ (in the place of x), 1/√(v + eps), m, v."""
    mean = x.mean(dim=1, keepdim=True) if centred else x.new_zeros(())
    normal = x.sub_(mean) if centred else x
    variance = normal.square().mean(dim=1, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    normal.mul_(inverse)
    if scale is None:
        output = normal.clone() if shift is None else normal + shift[:, None]
    else:
        factor = scale[:, None]
        output = normal * factor if shift is None else torch.addcmul(shift[:, None], normal, factor)
    return output, normal, inverse, mean, variance


def _normalize_backward_(
    delta: Tensor, normal: Tensor, inverse: Tensor, scale: Tensor | None, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂x in the place of ∂L/∂y, and ∂L/∂γ, ∂L/∂β."""
    count = delta.shape[1]
    along = (delta * normal).mean(dim=1, keepdim=True)
    mean = delta.mean(dim=1, keepdim=True)
    back = delta.sub_(mean) if centred else delta
    back.addcmul_(normal, along, value=-1.0).mul_(inverse if scale is None else inverse * scale[:, None])
    return back, along.squeeze(1) * count, mean.squeeze(1) * count


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b of every run.

    Args:
        x: (runs, samples, in).
        weight: (runs, out, in).
        bias: (runs, out).
    """
    output: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return output


def apply_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: Number,
    centred: bool,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`apply_linear`, `normalize_batch` and ReLU in one."""
    found: tuple[Tensor, Tensor, Tensor] = _Layer.apply(x, weight, bias, scale, shift, eps, centred, relu)  # type: ignore[no-untyped-call]
    return found


def normalize_batch(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, *, eps: Number, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y = γ x̂ + β with x̂ = (x − m)/√(v + eps) over the samples, and m and v, (runs, 1, features).

    Backward, with δ = ∂L/∂y and ⟨·⟩ the mean over the samples: ∂L/∂γ = n⟨δx̂⟩, ∂L/∂β = n⟨δ⟩ and
    ∂L/∂x = γ/√(v + eps) · (δ − ⟨δ⟩ − x̂⟨δx̂⟩). Uncentred has m = 0, v the mean square, and no ⟨δ⟩ in ∂L/∂x.

    Args:
        x: (runs, samples, features).
        scale: γ, (runs, features), or None for 1.
        shift: β, likewise, or None for 0.
        eps: one, or one a run as (runs, 1, 1).
        centred: whether the mean is taken off.
    """
    found: tuple[Tensor, Tensor, Tensor] = _BatchNorm.apply(x, scale, shift, eps, centred)  # type: ignore[no-untyped-call]
    return found
