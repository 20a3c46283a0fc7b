"""Which experts a router sends its tokens to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MEASURES = ("expert_load_max", "dead_expert_fraction", "router_entropy")


@dataclass(eq=False)
class Router:
    """The choices of one router.

    Args:
        at: how many module calls had ended before it.
        counts: how often each expert was chosen.
        each: how many experts a token goes to.
    """

    at: int
    counts: Tensor
    each: int

    def values(self) -> dict[str, float]:
        """The largest load over an even one, the share of experts without a token, and the entropy over ln E."""
        counts = self.counts.double()
        shares = counts / counts.sum()
        used = shares[shares > 0]
        entropy = float(-(used * used.log()).sum()) / math.log(len(shares))
        dead = float((counts == 0).double().mean())
        return dict(zip(MEASURES, (float(shares.max()) * len(shares), dead, entropy), strict=True))

    @property
    def favoured(self) -> float:
        """The share of choices that fall on the most chosen experts, as many as one token goes to."""
        return float(self.counts.double().sort(descending=True).values[: self.each].sum() / self.counts.sum())


def count_choices(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen."""
    return torch.bincount(chosen.detach().flatten(), minlength=experts)
