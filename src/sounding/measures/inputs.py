"""What every measure does first: check what came, go to float64, and scale so that no square overflows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sounding.errors import UsageError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Scaled:
    """A matrix in float64 whose largest entry lies in [1, 2), and what it was multiplied from.

    The scale is a power of two, so that scaling rounds nothing. It is a constant to autograd: every measure here is
    either invariant under it or multiplies it back, so its derivative with respect to the scale vanishes.
    """

    matrix: Tensor  # (..., rows, columns), float64, finite; all zero where the input was zero or not finite
    scale: Tensor  # (...), the power of two with input = scale · matrix
    finite: Tensor  # (...), whether every entry of the input was finite

    def settle(self, value: Tensor) -> Tensor:
        """The value, NaN where the input held NaN or infinity."""
        return torch.where(self.finite, value, torch.nan)


def scale_features(features: Tensor, *, name: str = "features") -> Scaled:
    """Checked and scaled (..., samples, features)."""
    check_matrix(features, name=name, axes="(..., samples, features)")
    return _scale(features)


def scale_gram(gram: Tensor) -> Scaled:
    """Checked and scaled (..., samples, samples)."""
    check_matrix(gram, name="a Gram matrix", axes="(..., samples, samples)")
    if gram.shape[-1] != gram.shape[-2]:
        raise UsageError(
            f"expected a square Gram matrix (..., samples, samples), got shape {tuple(gram.shape)}",
            hint="gram(features), the inner products between samples",
        )
    return _scale(gram)


def check_matrix(matrix: Tensor, *, name: str, axes: str) -> None:
    """A real floating tensor with two non-empty last axes, or a sentence that says what came instead."""
    if not isinstance(matrix, Tensor):
        raise UsageError(f"expected {name} as a torch.Tensor {axes}, got {type(matrix).__name__}", hint="torch.tensor")
    if matrix.dtype not in FLOATS:
        kind = "complex" if matrix.is_complex() else "integer or boolean"
        raise UsageError(
            f"expected {name} of a real floating dtype, got {kind} {matrix.dtype}",
            hint="torch.view_as_real(x).flatten(-2)" if matrix.is_complex() else "x.double()",
        )
    if matrix.ndim < 2:
        raise UsageError(f"expected {name} of shape {axes}, got {tuple(matrix.shape)}", hint="x.reshape(samples, -1)")
    if 0 in matrix.shape[-2:]:
        raise UsageError(f"expected at least one row and one column in {name}, got shape {tuple(matrix.shape)}")


def as_float64(matrix: Tensor) -> Tensor:
    """In double precision, on the CPU where the device has none (Apple's)."""
    return matrix.cpu().double() if matrix.device.type == "mps" else matrix.double()


def _scale(matrix: Tensor) -> Scaled:
    wide = as_float64(matrix)
    with torch.no_grad():
        finite = torch.isfinite(wide).all(dim=-1).all(dim=-1)
        largest = wide.abs().amax(dim=(-2, -1))
        largest = torch.where(finite & (largest > 0), largest, 1.0)
        scale = power_of_two_below(largest)
    wide = torch.where(finite[..., None, None], wide, 0.0)
    return Scaled(wide / scale[..., None, None], scale, finite)


def power_of_two_below(values: Tensor) -> Tensor:
    """The largest powers of two that don't exceed the values (positive, float64)."""
    # x = m·2^e with m in [½, 1), so x/(2m) is 2^(e−1) without rounding; torch.ldexp may go through a float32 power
    return values / (2 * torch.frexp(values).mantissa)


def small_gram(rows: Tensor) -> Tensor:
    """HHᵀ or HᵀH, whichever is smaller: they share their trace, norm and non-zero eigenvalues."""
    wide = rows.shape[-2] <= rows.shape[-1]
    return rows @ rows.mT if wide else rows.mT @ rows


def divide(numerator: Tensor, denominator: Tensor, *, otherwise: float) -> Tensor:
    """The quotient where the denominator is positive, `otherwise` elsewhere, with finite gradients in both."""
    positive = denominator > 0
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), otherwise)
