"""The lemmas of rank2020, tried on batches of every kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Expectation, Outcome, Setting
from sounding.claims.number import exact
from sounding.claims.picture import Panel, Picture, Series


def measure_lemma1(values: Mapping[str, Any], context: Context) -> Outcome:
    """The participation ratio beside the rank and the soft rank, on batches of unit mean square features."""
    import torch

    from sounding.measures import numerical_rank, participation_ratio, soft_rank

    generator = context.generator()
    ratio, rank, soft = [], [], []
    for _ in range(values["trials"]):
        size = int(torch.randint(2, values["largest"] + 1, (), generator=generator))
        inner = int(torch.randint(1, size + 1, (), generator=generator))
        decay = float(torch.rand((), generator=generator)) * 3
        left = torch.randn(size, inner, dtype=torch.float64, generator=generator)
        right = torch.randn(inner, size, dtype=torch.float64, generator=generator)
        features = (left * torch.arange(1, inner + 1) ** -decay) @ right
        features = features / features.square().mean(0, keepdim=True).sqrt()
        ratio.append(float(participation_ratio(features)))
        rank.append(float(numerical_rank(features)))
        soft.append(float(soft_rank(features)))
    r = np.array(ratio)
    numbers = {
        "largest_r_over_rank": exact(float(np.max(r / rank)), error=1e-9),
        "smallest_soft_rank_minus_bound": exact(float(np.min(np.array(soft) - 0.25 * r)), error=1e-9),
    }
    top = [0.0, max(rank)]
    panel = Panel(
        "participation ratio r(H)",
        "rank of H",
        (Series("batches", r, rank), Series("r = rank", top, top, role="bound")),
    )
    return Outcome(numbers, Picture((panel,), "Each point is a batch; none lies below the line rank = r."))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="rank2020-lemma1",
        seed="rank2020",
        place="lemma 1",
        kind="theorem",
        statement="rank(H) and, for features of unit mean square, the soft rank are bounded below by r(H): "
        "rank(H) ≥ r(H) and rank_τ(H) ≥ (1 − τ)² r(H).",
        expectations=(
            Expectation("largest_r_over_rank", "rank ≥ r on every batch", high=1.0 + 1e-8),
            Expectation("smallest_soft_rank_minus_bound", "soft rank at ½ ≥ r/4 on every batch", low=-1e-8),
        ),
        settings={
            "quick": Setting({"trials": 2000, "largest": 24}),
            "standard": Setting({"trials": 20000, "largest": 64}),
        },
        measure=measure_lemma1,
        paper="a lemma; no experiment",
    ),
)
