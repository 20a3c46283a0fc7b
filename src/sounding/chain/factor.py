"""Factors of Gram matrices that survive dependent samples.

Given a batch H (n × d, rows are samples), the product H Wᵀ with a Gaussian W has independent columns, each normal with
covariance HHᵀ/d. Any L with LLᵀ = HHᵀ turns n × d standard normals Z into it: L Z. The factor must not invent
directions: batch norm pulls samples apart, so noise of 10⁻⁸ in a dependent sample grows to order one in a few dozen
layers, and repeated samples would drift apart.
"""

from __future__ import annotations

import torch

# a sample closer than this to the span of the samples before it (squared, relative to its own length) is in the span:
# float32 states resolve 6e-8, whose square is 4e-15, and the float64 sum of a Gram matrix adds 1e-16
DEPENDENT_FLOAT32 = 1e-13
DEPENDENT_FLOAT64 = 1e-14  # the same for float64 rows, not squared
LOOP_LIMIT = 32  # samples up to which a loop over columns, batched over chains, beats a library call per chain


def factor_gram(gram: torch.Tensor) -> torch.Tensor:
    """The lower triangular L with LLᵀ = gram (..., n, n), for positive semidefinite float64 matrices of any rank.

    Cholesky's recursion, column by column, except that a pivot below `DEPENDENT_FLOAT32` times its diagonal entry makes
    the column 0: the sample adds no direction. Batched over the leading axes, without branches on the values.
    """
    n = gram.shape[-1]
    if n > LOOP_LIMIT and gram.device.type == "cpu":
        factor = _factor_bordered(gram)
        if factor is not None:
            return factor
    remainder = gram.clone()
    threshold = torch.diagonal(gram, dim1=-2, dim2=-1) * DEPENDENT_FLOAT32
    factor = torch.zeros_like(gram)
    for k in range(n):
        pivot = remainder[..., k, k]
        keep = (pivot > threshold[..., k]) & (pivot > 0)
        inverse = torch.where(keep, pivot, torch.ones_like(pivot)).rsqrt() * keep
        column = remainder[..., k:, k] * inverse.unsqueeze(-1)
        factor[..., k:, k] = column
        if k + 1 < n:
            tail = column[..., 1:]
            remainder[..., k + 1 :, k + 1 :] -= tail.unsqueeze(-1) * tail.unsqueeze(-2)
    return factor


def _factor_bordered(gram: torch.Tensor) -> torch.Tensor | None:
    """The factor by LAPACK when at most the last sample depends on the others, as after centring; else None."""
    leading, info = torch.linalg.cholesky_ex(gram[..., :-1, :-1])
    least = DEPENDENT_FLOAT32 * torch.diagonal(gram, dim1=-2, dim2=-1)
    pivots = torch.diagonal(leading, dim1=-2, dim2=-1).square()
    if bool(info.any()) or not bool((pivots > least[..., :-1]).all()):
        return None
    row = torch.linalg.solve_triangular(leading, gram[..., :-1, -1:], upper=False).squeeze(-1)
    pivot = gram[..., -1, -1] - row.square().sum(dim=-1)
    factor = torch.zeros_like(gram)
    factor[..., :-1, :-1] = leading
    factor[..., -1, :-1] = row
    factor[..., -1, -1] = torch.where(pivot > least[..., -1], pivot, 0.0).sqrt()
    return factor


def factor_rows(rows: torch.Tensor) -> torch.Tensor:
    """The lower triangular L with LLᵀ = HHᵀ from the rows H themselves, for float64 chains.

    A QR decomposition of Hᵀ resolves directions of relative size 1e-15, where the Gram matrix, which squares them,
    stops at 1e-8. A sample within rounding of the span of the earlier ones gets an exact 0 on the diagonal.
    """
    r = torch.linalg.qr(rows.mT, mode="r").R
    factor = r.mT
    lengths = factor.square().sum(dim=-1, keepdim=True).sqrt()
    rounding = factor.abs() <= DEPENDENT_FLOAT64 * rows.shape[-1] ** 0.5 * lengths
    # the direction of a dependent sample is rounding, and so are the small parts of later samples along it
    dependent = torch.diagonal(rounding, dim1=-2, dim2=-1).unsqueeze(-2)
    cleaned: torch.Tensor = factor.masked_fill(rounding & dependent, 0.0)
    return cleaned


def find_repeats(rows: torch.Tensor) -> torch.Tensor | None:
    """For chains of rows (chains, n, d): the first equal row of each row, where that is one for all chains; else None.

    Equal samples stay equal in exact arithmetic. Rounding would part them, and batch norm would pull them apart.
    """
    if len(torch.unique(rows[0, :, 0])) == rows.shape[1]:
        return None  # quickly: rows that differ in their first feature
    _, groups = torch.unique(rows[0], dim=0, return_inverse=True)
    if int(groups.max()) + 1 == rows.shape[1]:
        return None
    first = torch.stack([(groups == group).nonzero()[0, 0] for group in groups])
    return first if bool((rows == rows[:, first]).all()) else None


def whiten(normals: torch.Tensor) -> torch.Tensor:
    """C⁻¹ for which C⁻¹Z is a uniformly random frame: n orthonormal rows in d ≥ n dimensions (C Cᵀ = Z Zᵀ)."""
    # Z with independent normal entries has a law invariant under rotations from the right, and so has C⁻¹Z
    wide = normals.double()
    cholesky = torch.linalg.cholesky_ex(wide @ wide.mT)[0]
    identity = torch.eye(cholesky.shape[-1], dtype=cholesky.dtype, device=cholesky.device)
    inverse: torch.Tensor = torch.linalg.solve_triangular(cholesky, identity.expand_as(cholesky), upper=False)
    return inverse
