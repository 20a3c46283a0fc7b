"""Batch norm without activation: where it takes any batch, and how fast (Theorem B.11, Corollary B.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Expectation, Outcome, Setting
from sounding.claims.meanfield2019.sampled import Array, draw_covariance
from sounding.claims.number import Number, exact, slope_of
from sounding.claims.picture import Panel, Picture, Series


def measure_unit_vectors(values: Mapping[str, Any], context: Context) -> Outcome:
    """The eigenvalues of E[(h/|h|)^⊗2] layer by layer, from spectra of several ranks."""
    trajectories = {}
    for rank in values["ranks"]:
        start = np.exp(1.5 * _normals(rank, context))
        path = [start]
        for _ in range(values["layers"]):
            path.append(project_spectrum(path[-1]))
        trajectories[rank] = np.sort(np.array(path), axis=1)[:, ::-1]
    distance = {rank: float(np.abs(path[-1] * rank - 1).max()) for rank, path in trajectories.items()}
    return _judge_spreads(trajectories, distance)


def measure_centred(values: Mapping[str, Any], context: Context) -> Outcome:
    """The same for batch norm, from covariances of full and of low rank."""
    from sounding.predict import identity_convergence

    size = values["batch_size"]
    trajectories, distance = {}, {}
    for rank in values["ranks"]:
        sigma = draw_covariance(size, context.generator(rank), rank=rank)
        found = identity_convergence(sigma, depth=values["layers"])
        trajectories[found.rank] = found.eigenvalues
        distance[found.rank] = float(np.abs(found.eigenvalues[-1] * found.rank / size - 1).max())
    return _judge_spreads(trajectories, distance)


def project_spectrum(eigenvalues: Array, *, nodes: int = 400) -> Array:
    """E[h_i²/|h|²] for independent h_i of the given variances: ∫₀^∞ dᵢ/(1+2sdᵢ) Π(1+2sdⱼ)^(−1/2) ds, in ln s."""
    logs, step = np.linspace(-40.0, 60.0, nodes, retstep=True)
    s = np.exp(logs - math.log(float(eigenvalues.max())))
    shrunk = eigenvalues / (1 + 2 * s[:, None] * eigenvalues)
    weight = np.exp(-0.5 * np.log1p(2 * s[:, None] * eigenvalues).sum(axis=1)) * s * step
    return np.asarray(weight @ shrunk)


def _normals(count: int, context: Context) -> Array:
    import torch

    return np.asarray(torch.randn(count, dtype=torch.float64, generator=context.generator(count)).numpy())


def _judge_spreads(trajectories: Mapping[int, Array], distance: Mapping[int, float]) -> Outcome:
    numbers: dict[str, Number] = {"largest_distance_from_limit": exact(max(distance.values()), error=1e-9)}
    series, worst = [], 0.0
    for rank, path in trajectories.items():
        spread = path[:, 0] - path[:, -1]
        layers = np.arange(len(spread))
        kept = spread > 1e-9 * spread[0]
        ratios = spread[2:][kept[2:]] / spread[1:-1][kept[2:]]
        worst = max(worst, float(ratios.max()))
        late = kept & (spread < 1e-3 * spread[0])
        late[:3] = False
        rate = slope_of(layers[late], np.log(spread[late]))
        unit = math.log(rank / (rank + 2))
        numbers[f"rate_over_claim_C{rank}"] = exact(rate.value / unit, error=(rate.high - rate.value) / abs(unit))
        shown = kept & (layers % max(1, len(layers) // 40) == 0)
        series.append(Series(f"C = {rank}", layers[shown], spread[shown]))
        line = spread[late][0] * (rank / (rank + 2)) ** (layers[late] - layers[late][0])
        series.append(Series(f"C = {rank} (C/(C+2) per layer)", layers[late], line, role="theory"))
    numbers["largest_ratio_of_spreads"] = exact(worst, error=1e-9)
    panel = Panel("layer", "largest minus smallest eigenvalue", series, y_scale="log")
    caption = "The nonzero eigenvalues approach each other: the spread falls at every layer, in the end by C/(C + 2)."
    return Outcome(numbers, Picture((panel,), caption))


def _expectations(ranks: tuple[int, ...]) -> tuple[Expectation, ...]:
    return (
        Expectation("largest_distance_from_limit", "every nonzero eigenvalue reaches the common limit", high=1e-6),
        Expectation(
            "largest_ratio_of_spreads", "the spread contracts at every layer from the second on", high=1 - 1e-6
        ),
        *(
            Expectation(f"rate_over_claim_C{rank}", "ln of the factor per layer over ln(C/(C+2))", low=0.98, high=1.02)
            for rank in ranks
        ),
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="meanfield2019-thmB.11",
        seed="meanfield2019",
        place="theorem B.11",
        kind="theorem",
        statement="Under Σ → E[(h/|h|)^⊗2], h ~ N(0, Σ), a covariance of rank C keeps its eigenvectors and goes to 1/C "
        "times the projector on its range; λ₁ − λ_C contracts at every layer and in the end as (1 − 2/(C+2))^ℓ.",
        expectations=_expectations((2, 4, 16)),
        settings={"quick": Setting({"ranks": [2, 4, 16], "layers": 220})},
        measure=measure_unit_vectors,
        paper="a theorem; no experiment",
    ),
    Claim(
        id="meanfield2019-corB.12",
        seed="meanfield2019",
        place="corollary B.12",
        kind="theorem",
        statement="In a linear batch-normalized network a batch with GΣG of rank C goes to B/C times the projector on "
        "its range, from any start, and λ₁ − λ_C falls in the end as (1 − 2/(C+2))^ℓ.",
        expectations=_expectations((3, 6, 11)),
        settings={"quick": Setting({"batch_size": 12, "ranks": [3, 6, 24], "layers": 160})},
        measure=measure_centred,
        paper="a theorem; no experiment",
    ),
)
