"""Hypothesis strategies for batches of features: every rank, nearly degenerate, repeated, at any scale."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def batches(draw: st.DrawFn, *, min_samples: int = 1, max_size: int = 9, full_rank: bool = False) -> Tensor:
    """(samples, features) in float64 with a drawn rank and spread of singular values."""
    samples = draw(st.integers(min_samples, max_size))
    width = draw(st.integers(samples if full_rank else 1, max_size))
    rank = min(samples, width) if full_rank else draw(st.integers(1, min(samples, width)))
    decades = draw(st.sampled_from([0.0, 0.5, 2.0] if full_rank else [0.0, 0.5, 2.0, 5.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    left = _frame(samples, rank, generator)
    right = _frame(width, rank, generator)
    singular = 10.0 ** (-decades * torch.rand(rank, dtype=torch.float64, generator=generator))
    batch = (left * singular) @ right.mT
    if not full_rank and samples > 1 and draw(st.booleans()):
        batch[-1] = batch[0]
    return batch


def _frame(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=generator)).Q


def scales() -> st.SearchStrategy[float]:
    """Factors from 1e-150 to 1e150."""
    return st.floats(-150, 150).map(lambda exponent: 10.0**exponent)
