"""From inner products between samples to measures, for many calls at once.

With h̄ the mean sample and c_i = h_i − h̄, every inner product is ⟨h_i, h_j⟩ = ⟨c_i, c_j⟩ + b_i + b_j + M, where
b_i = ⟨c_i, h̄⟩ and M = ‖h̄‖². Keeping the centred matrix C and (b, M) apart is what lets a collapsed layer be read: at
a mean cosine of 1 − 1e-7 a float32 Gram matrix holds nothing but rounding, while C keeps seven digits of what differs.
Since the rows of C and b sum to zero, ‖G‖_F² = ‖C‖_F² + 2n‖b‖² + n²M².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sounding.measures import of_spectrum
from sounding.measures.inputs import small_gram
from sounding.probe.late import number_of

TINY = 5e-324  # the smallest float64, so that only a division by 0 is changed
TOKENS = 256  # positions of a sequence whose inner products are taken; their cost grows with the square
ROUNDINGS = 16  # a sum of squares this many times the rounding of its parts is not told from zero


class Summary(NamedTuple):
    """What is kept of some centred Gram matrices (calls, n, n): vectors and numbers, never a matrix."""

    distinct: Tensor  # ‖c_i‖², (calls, n)
    cross: Tensor  # b_i, (calls, n)
    squared_mean: Tensor  # M, (calls,)
    norm: Tensor  # ‖C‖_F, (calls,)
    turned: Tensor  # ‖Σ_i c_i/‖h_i‖‖ over the samples that have a length, (calls,)


def summarize_rows(rows: Tensor, mean: Tensor, lengths: Tensor, gram: Tensor) -> Summary:
    """Summarize centred sample matrices (calls, n, d), and put their Gram matrices (calls, n, n) into `gram`.

    `mean` holds the mean samples (calls, d), `lengths` the ‖h_i‖ (calls, n). Nothing that is returned refers to `gram`.
    """
    turned_rows, mean_row = rows.mT, mean[:, None]
    torch.bmm(rows, turned_rows, out=gram)
    distinct = gram.diagonal(dim1=1, dim2=2).clone()
    cross = torch.bmm(mean_row, turned_rows)[:, 0]
    squared_mean = torch.linalg.vector_norm(mean, dim=1).square_()
    inverse = lengths.reciprocal()
    if lengths.is_cuda or not lengths.all():  # to ask a GPU takes longer than to do it
        # A sample of zero has c_i = −h̄; rounding would leave it a length.
        zero = lengths == 0
        inverse.masked_fill_(zero, 0.0)
        distinct = torch.where(zero, squared_mean[:, None], distinct)
        cross = torch.where(zero, -squared_mean[:, None], cross)
    turned = torch.linalg.vector_norm(torch.bmm(inverse[:, None], rows), dim=(1, 2))
    return Summary(distinct, cross, squared_mean, torch.linalg.vector_norm(gram, dim=(1, 2)), turned)


def summarize_gram(gram: Tensor, cross: Tensor, squared_mean: Tensor) -> Summary:
    """Summarize centred Gram matrices (calls, n, n) whose samples are not at hand."""
    distinct = gram.diagonal(dim1=1, dim2=2).to(torch.float64, copy=True)  # the matrix may be overwritten
    squared_mean, level = squared_mean.double(), squared_mean.double()[:, None]
    cross = cross.double()
    # A sample of zero has c_i = −h̄; rounding would leave it a length.
    zero = distinct + 2 * cross + level <= ROUNDINGS * torch.finfo(gram.dtype).eps * (distinct + level)
    distinct, cross = torch.where(zero, level, distinct), torch.where(zero, -level, cross)
    squares = (distinct + 2 * cross + level).clamp(min=0)
    inverse = torch.where(squares > 0, squares.clamp(min=TINY).rsqrt(), 0.0)
    # The largest is taken out first: in float32 the inverse of a small length would overflow.
    unit = inverse.amax(1, keepdim=True).clamp(min=TINY)
    shares = (inverse / unit).to(gram.dtype)
    # A batched matrix-vector product is slower on a CPU.
    turned = ((gram * shares[:, None]).sum(2).double() * shares).sum(1).clamp(min=0).sqrt() * unit[:, 0]
    return Summary(distinct, cross, squared_mean, torch.linalg.vector_norm(gram, dim=(1, 2)), turned)


class Sums(NamedTuple):
    """A summary in float64, as numpy has it: from here to the measures there are some fifty operations on a few hundred
    numbers, which take numpy a quarter of torch's time."""

    distinct: np.ndarray
    cross: np.ndarray
    squared_mean: np.ndarray
    norm: np.ndarray
    turned: np.ndarray


def join(summaries: Sequence[Summary]) -> Sums:
    """One summary, in float64, of the calls of several."""

    def joined(parts: Sequence[Tensor]) -> np.ndarray:
        if parts[0].is_cuda:
            return np.asarray(torch.cat(list(parts)).double().cpu().numpy())  # one transfer
        return np.concatenate([part.numpy() for part in parts], dtype=np.float64)

    return Sums(*map(joined, zip(*summaries, strict=True)))


@np.errstate(over="ignore", invalid="ignore")  # a call that is not finite has measures that are not
def reduce_fast(sums: Sums) -> dict[str, np.ndarray]:
    """The measures that need no spectrum; `mean_square` is that of a row."""
    n = sums.distinct.shape[1]
    squares = np.maximum(sums.distinct + 2 * sums.cross + sums.squared_mean[:, None], 0.0)
    trace = squares.sum(axis=1)
    norm = sums.norm**2 + 2 * n * (sums.cross**2).sum(axis=1) + (n * sums.squared_mean) ** 2
    alive = trace > 0
    length = np.where(alive, trace, 1.0)
    ratio = np.minimum(np.maximum(length**2 / np.where(alive, np.maximum(norm, TINY), 1.0), 1.0), n)
    gap = np.sqrt(np.maximum(1 / ratio - 1 / n, 0.0))
    share = np.minimum(sums.distinct.sum(axis=1) / length, 1.0)
    return {
        "mean_square": trace / n,
        "participation_ratio": np.where(alive, ratio, 0.0),
        "orthogonality_gap": np.where(alive, gap, math.sqrt(1 - 1 / n)),
        "mean_cosine": _mean_cosines(sums, squares),
        "distinct_share": np.where(alive, share, 0.0),
    }


def _mean_cosines(sums: Sums, squares: np.ndarray) -> np.ndarray:
    """(Σ_ij ⟨h_i, h_j⟩/(‖h_i‖‖h_j‖) − k)/(k(k − 1)) over the k samples that have a length."""
    present = squares > 0
    inverse = present / np.sqrt(np.where(present, squares, 1.0))
    total = inverse.sum(axis=1)
    whole = sums.turned**2 + 2 * total * (inverse * sums.cross).sum(axis=1) + total**2 * sums.squared_mean
    count = present.sum(axis=1)
    cosines = (whole - count) / np.maximum(count * (count - 1), 1)
    return np.where(count > 1, np.minimum(np.maximum(cosines, -1.0), 1.0), 0.0)


def whole_gram_(gram: Tensor, cross: Tensor, squared_mean: Tensor) -> Tensor:
    """The Gram matrix of the samples in the place of the centred one: temporaries cost more than the arithmetic."""
    gram += cross[:, :, None]
    gram += (cross + squared_mean[:, None])[:, None, :]
    return gram


def reduce_spectrum(spectrum: Tensor, *, features: int, eps: float) -> dict[str, Tensor]:
    """The spectral measures from the eigenvalues of G/n, (calls, n) descending, of features rounded to `eps`.

    A singular value counts as zero below max(n, d)·eps of the largest, numpy's convention for the features' own
    precision, and an eigenvalue below that squared, or below what float64 resolves in a Gram matrix.
    """
    n = spectrum.shape[-1]
    size = max(n, features) if eps < 1e-4 else math.sqrt(min(n, features))
    share = min(max((size * eps) ** 2, of_spectrum.resolution(n)), 0.5)
    small = spectrum[:, : min(n, features)]
    return {
        "numerical_rank": of_spectrum.numerical_rank(spectrum, tolerance=share),
        "soft_rank": of_spectrum.soft_rank(spectrum),
        "effective_rank": of_spectrum.effective_rank(spectrum),
        "isometry_gap": of_spectrum.isometry_gap(small, samples=n, tolerance=share),
        "condition_number": of_spectrum.condition_number(small, tolerance=share),
    }


def token_ratio(tokens: Tensor) -> float:
    """The participation ratio across positions, mean over the samples of a (samples, positions, features) stack.

    How many directions the positions of one sequence span; 1 when every position carries the same vector, 0 for zeros.
    Of sequences longer than TOKENS, positions at equal distances are taken, at most that many.
    """
    step = -(-tokens.shape[1] // TOKENS)
    chosen = tokens[:, ::step].double()
    # (tr S)²/‖S‖² in few operations, which a GPU is told one by one
    trace = torch.linalg.vector_norm(chosen, dim=(1, 2)).square_()
    shares = torch.linalg.vector_norm(small_gram(chosen), dim=(1, 2)).div_(trace)
    return number_of(shares.square_().reciprocal_().nan_to_num_(0.0).mean())
