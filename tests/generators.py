"""Random streams for tests."""

from __future__ import annotations

import torch


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of this seed."""
    return torch.Generator().manual_seed(seed)
