"""How many eigenvalues reach a threshold, without computing one.

By Sylvester's law of inertia, the number of eigenvalues of S at or above τ is the number of non-negative pivots in any
factorization S − τI = P D Pᵀ. On the CPU that is LAPACK's Bunch–Kaufman LDLᵀ, about seven times cheaper than the
eigenvalues at size 256. On a GPU, where it would run matrix by matrix, Haynsworth's additivity is used instead: the
inertia of a matrix is that of its leading block plus that of the Schur complement, so blocks of 32 and batched products
suffice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 32  # cuSOLVER's batched symmetric eigensolver stops at this size
AT_ONCE = 4096  # matrices: its workspace is half a megabyte for each
DOUBTFUL = 1e-2  # a pivot below this share of the largest diagonal entry makes a count in float32 doubtful


def count_at_least(matrices: torch.Tensor, threshold: float) -> torch.Tensor:
    """#{λ(S) ≥ threshold} for symmetric matrices (batch, m, m), as float64; float32 is taken for exact."""
    shifted = matrices.clone()
    torch.diagonal(shifted, dim1=-2, dim2=-1).sub_(threshold)
    return count_by_pivots(shifted) if matrices.device.type == "cpu" else count_by_blocks(shifted.double())


def eigenvalues(matrices: torch.Tensor) -> torch.Tensor:
    """The eigenvalues of symmetric matrices (batch, m, m), descending; in pieces on a GPU."""
    return _in_pieces(torch.linalg.eigvalsh, matrices).flip(-1)


def singular_values(matrices: torch.Tensor) -> torch.Tensor:
    """The singular values of matrices (batch, n, d), descending; in pieces on a GPU."""
    return _in_pieces(torch.linalg.svdvals, matrices)


def _in_pieces(function: Callable[[torch.Tensor], torch.Tensor], matrices: torch.Tensor) -> torch.Tensor:
    if matrices.device.type == "cpu":
        return function(matrices)
    return torch.cat([function(piece) for piece in torch.split(matrices, AT_ONCE)])


def _decompose(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pieces = torch.split(matrices, AT_ONCE) if matrices.ndim == 3 else (matrices,)
    values, vectors = zip(*(torch.linalg.eigh(piece) for piece in pieces), strict=True)
    return torch.cat(values), torch.cat(vectors)


def count_by_pivots(shifted: torch.Tensor) -> torch.Tensor:
    """Non-negative eigenvalues from LDLᵀ of (batch, m, m): in float32, and in float64 where a pivot is small."""
    count, least = _count_pivots(shifted.float())
    # rounding moves an eigenvalue across 0 only if it is within rounding of it; the last pivots then are small, too
    doubtful = least < DOUBTFUL * torch.diagonal(shifted, dim1=-2, dim2=-1).abs().amax(dim=-1)
    if bool(doubtful.any()):
        count[doubtful] = _count_pivots(shifted[doubtful].double())[0]
    return count


def _count_pivots(shifted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The count of non-negative pivots, and the smallest |pivot|."""
    factor, pivots, _ = torch.linalg.ldl_factor_ex(shifted)
    single = pivots > 0
    diagonal = torch.diagonal(factor, dim1=-2, dim2=-1)
    # a 2 × 2 pivot of Bunch–Kaufman is indefinite, one eigenvalue of either sign: its two rows count half each
    count = ((diagonal >= 0) & single).sum(dim=-1) + 0.5 * (~single).sum(dim=-1)
    least = torch.where(single, diagonal.abs(), torch.inf).amin(dim=-1)
    return count.double(), least.double()


def count_by_blocks(shifted: torch.Tensor) -> torch.Tensor:
    """Non-negative eigenvalues block by block: In(S) = In(A) + In(C − BᵀA⁻¹B) for S = [[A, B], [Bᵀ, C]]."""
    count = torch.zeros(shifted.shape[:-2], dtype=torch.float64, device=shifted.device)
    rest = shifted
    floor = torch.finfo(shifted.dtype).eps * shifted.abs().amax(dim=(-2, -1))[..., None].clamp_min(1e-300)
    while rest.shape[-1] > 0:
        size = min(BLOCK, rest.shape[-1])
        values, vectors = _decompose(rest[..., :size, :size])
        count += (values >= 0).sum(dim=-1)
        if rest.shape[-1] == size:
            break
        # one that rounding cannot tell from 0 is moved to the edge of what it can, so that the Schur complement stays
        # finite: the count is right for a matrix within rounding of S
        safe = torch.where(values.abs() > floor, values, torch.where(values >= 0, floor, -floor))
        coupling = vectors.mT @ rest[..., :size, size:]
        rest = rest[..., size:, size:] - coupling.mT @ (coupling / safe[..., None])
    return count
