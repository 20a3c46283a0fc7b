"""The costly operations of a stack of perceptrons with their derivatives written out, in as few passes as it takes.

Tensors are (runs, samples, features). What autograd would derive is the same; it would keep more, write the gradient of
a weight transposed, and take the variance by a reduction that is many times slower than the product itself on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sounding.train.kernels import can_fuse, normalize_backward_fused, normalize_fused_

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
        # a kernel adds the bias on its way; baddbmm would fill the output with it first
        product = _product(x, weight, None if can_fuse(x) else bias)
        found = _normalize_(product, bias if can_fuse(x) else None, scale, shift, eps, centred, relu)
        output, normal, inverse, mean, variance = found
        ctx.save_for_backward(x, weight, normal, inverse, scale, output if relu else None)
        ctx.centred = centred
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, normal, inverse, scale, output = ctx.saved_tensors
        needed = ctx.needs_input_grad
        delta, *rest = _normalize_backward(gradients[0], output, normal, inverse, scale, ctx.centred)
        of_scale, of_shift, of_bias = rest
        back = _product_backward(delta, x, weight, (*needed[:2], False))
        return (
            *back[:2],
            of_bias if needed[2] else None,
            of_scale if needed[3] else None,
            of_shift if needed[4] else None,
            *[None] * 3,
        )


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: Number, centred: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        copied = x.clone(memory_format=torch.contiguous_format)
        output, normal, inverse, mean, variance = _normalize_(copied, None, scale, shift, eps, centred, False)
        ctx.save_for_backward(normal, inverse, scale)
        ctx.centred = centred
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse, scale = ctx.saved_tensors
        found = _normalize_backward(gradients[0], None, normal, inverse, scale, ctx.centred)
        needed = ctx.needs_input_grad
        return (found[0], found[1] if needed[1] else None, found[2] if needed[2] else None, None, None)


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


def _normalize_(
    x: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: Number, centred: bool, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch norm of x + bias: γ x̂ + β (through a ReLU if asked), x̂ (in the place of x), 1/√(v + eps), m, v."""
    if can_fuse(x):
        return normalize_fused_(x, bias, scale, shift, eps=eps, centred=centred, relu=relu)
    x = x if bias is None else x.add_(bias[:, None])
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
    return output.relu_() if relu else output, normal, inverse, mean, variance


def _normalize_backward(
    gradient: Tensor, output: Tensor | None, normal: Tensor, inverse: Tensor, scale: Tensor | None, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂L/∂x, ∂L/∂γ, ∂L/∂β and the sum of ∂L/∂x over the samples; `output` is that of a ReLU behind the norm, if any."""
    if can_fuse(normal):
        return normalize_backward_fused(gradient, output, normal, inverse, scale, centred)
    # in either case a tensor of our own, which is then worked on in place
    delta = gradient.clone() if output is None else torch.ops.aten.threshold_backward(gradient, output, 0)
    count = delta.shape[1]
    along = (delta * normal).mean(dim=1, keepdim=True)
    mean = delta.mean(dim=1, keepdim=True)
    back = delta.sub_(mean) if centred else delta
    back.addcmul_(normal, along, value=-1.0).mul_(inverse if scale is None else inverse * scale[:, None])
    return back, along.squeeze(1) * count, mean.squeeze(1) * count, back.sum(dim=1)


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b of every run, of x (runs, samples, in), weights (runs, out, in) and biases (runs, out)."""
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
