"""Batch normalization by its definition: Gaussian batches drawn, normalized, activated and averaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.claims.claim import Context
from sounding.claims.number import Number, estimate


def draw_covariance(size: int, generator: torch.Generator, *, rank: int | None = None) -> Array:
    """AAᵀ/rank for a size × rank Gaussian A, times unequal variances: a covariance without any symmetry."""
    rank = rank or 2 * size
    factor = torch.randn(size, rank, dtype=torch.float64, generator=generator)
    scale = torch.exp(0.5 * torch.randn(size, 1, dtype=torch.float64, generator=generator))
    rows = (scale * factor).numpy()
    return np.asarray(rows @ rows.T / rank)


def normalized_batches(covariance: Array, *, samples: int, context: Context, offset: int) -> torch.Tensor:
    """x = √B·Gh/|Gh| for h ~ N(0, Σ), (samples, B), float64 on the device."""
    values, vectors = np.linalg.eigh(covariance)
    root = torch.from_numpy(vectors * np.sqrt(np.maximum(values, 0.0))).to(context.device)
    generator = context.generator(offset, device=context.device)
    normals = torch.randn(samples, len(root), dtype=torch.float64, device=context.device, generator=generator)
    centred = normals @ root.T
    centred = centred - centred.mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).sqrt()


def sample_map(
    activation: str, covariance: Array, *, samples: int, context: Context, offset: int
) -> tuple[Array, Array]:
    """V(Σ) = E[φ(x)φ(x)ᵀ] by Monte Carlo, and the standard error of each entry, both (B, B)."""
    x = normalized_batches(covariance, samples=samples, context=context, offset=offset)
    phi = resolve(activation).torch()(x)
    mean = phi.mT @ phi / samples
    square = (phi * phi).mT @ (phi * phi) / samples
    error = ((square - mean * mean).clamp_min(0) / samples).sqrt()
    return mean.cpu().numpy(), error.cpu().numpy()


def largest_deviation(computed: Array, measured: Array, error: Array) -> Number:
    """The largest |computed − measured| over all entries, relative to the largest entry, with the interval of that one.

    The maximum over many entries of pure noise is some three standard errors, so its interval reaches down to 0 and
    its upper end is what a bound is held against.
    """
    unit = float(np.abs(measured).max())
    gap = np.abs(computed - measured)
    at = int(gap.argmax())
    return estimate(float(gap.flat[at]) / unit, float(error.flat[at]) / unit)


def widest(deviations: Sequence[Number]) -> Number:
    """The largest of some deviations; each end of its interval is the largest of theirs."""
    return Number(*(max(getattr(each, end) for each in deviations) for end in ("value", "low", "high")))
