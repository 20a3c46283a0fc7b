"""The forward map of infinitely wide ReLU networks with batch norm, for many covariances at once."""

from __future__ import annotations

import math

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context

LOWEST, STEP = -16.0, 0.5
"""In ln s the integrand falls as s to the left and as s^(−(B−1)/2) to the right, and is analytic in a strip: the cut
ends and the step leave some 1e-7."""


def map_relu(covariances: torch.Tensor) -> torch.Tensor:
    """V(Σ) of each of (starts, B, B), float64: Theorem 2 at α = 1, the trapezoid rule in ln s.

    B ∫ ds V_φ(S(I + 2sS)⁻¹)/√det(I + 2sS), S = GΣG, V_φ the Gaussian map of ReLU with the kernel
    (√(1 − c²) + (π − arccos c)c)/(2π). `theory.covariance_map` has the same for one
    covariance, of full or low rank, to rounding.
    """
    size = covariances.shape[-1]
    rows = covariances.mean(-1, keepdim=True)
    values, vectors = torch.linalg.eigh(covariances - rows - rows.mT + rows.mean(-2, keepdim=True))
    # the constant vector has no variance; what rounding leaves of it must not become negative
    values = (values / values.mean(-1, keepdim=True)).clamp_min(1e-14)
    highest = 32.0 / (size - 1) - math.log(float(values[:, 1:].min()))
    total = torch.zeros_like(covariances)
    for log in np.arange(LOWEST - math.log(size * float(values.max())), highest, STEP):
        shrunk = values / (1 + 2 * math.exp(log) * values)
        weight = torch.exp(log - 0.5 * torch.log1p(2 * math.exp(log) * values).sum(-1))
        gaussian = (vectors * shrunk[:, None]) @ vectors.mT
        std = torch.diagonal(gaussian, dim1=-2, dim2=-1).sqrt()
        outer = std[:, :, None] * std[:, None, :]
        c = (gaussian / outer).clamp(-1.0, 1.0)
        kernel = torch.sqrt(1 - c * c) + (math.pi - torch.acos(c)) * c
        total += weight[:, None, None] * outer * kernel
    return total * (STEP * size / (2 * math.pi))


def spread_paths(size: int, *, sigma: float, starts: int, layers: int, context: Context, offset: int) -> Array:
    """Standard deviation over mean of the samples' variances, (starts, layers + 1).

    A start has uncorrelated samples whose variances are log-normal, exp(σ·normal).
    """
    normals = torch.randn(starts, size, dtype=torch.float64, generator=context.generator(offset))
    covariances = torch.diag_embed(torch.exp(sigma * normals)).to(context.device)
    path = []
    for layer in range(layers + 1):
        own = torch.diagonal(covariances, dim1=-2, dim2=-1)
        path.append(own.std(-1) / own.mean(-1))
        if layer < layers:
            covariances = map_relu(covariances)
    return np.asarray(torch.stack(path, dim=1).cpu().numpy())
