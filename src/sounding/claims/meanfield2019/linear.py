"""Batch norm without activation: where it takes any batch, and how fast (Theorem B.11, Corollary B.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Expectation, Outcome, Setting
from sounding.claims.meanfield2019.sampled import Array, draw_covariance
from sounding.claims.number import Number, exact, fraction_of, mean_of, slope_of
from sounding.claims.picture import Panel, Picture, Series


def measure_unit_vectors(values: Mapping[str, Any], context: Context) -> Outcome:
    """The eigenvalues of E[(h/|h|)^⊗2] layer by layer, from random spectra of several ranks."""
    paths: dict[int, list[Array]] = {}
    for rank in values["ranks"]:
        for start in range(values["starts"]):
            path = [np.exp(1.5 * _normals(rank, context, offset=1000 * start + rank))]
            for _ in range(values["layers"]):
                path.append(project_spectrum(path[-1]))
            paths.setdefault(rank, []).append(np.sort(np.array(path), axis=1)[:, ::-1])
    return _judge_spreads(paths, total=1)


def measure_centred(values: Mapping[str, Any], context: Context) -> Outcome:
    """The same for batch norm, from random covariances of full and of low rank."""
    from sounding.predict import identity_convergence

    size = values["batch_size"]
    paths: dict[int, list[Array]] = {}
    for rank in values["ranks"]:
        for start in range(values["starts"]):
            sigma = draw_covariance(size, context.generator(1000 * start + rank), rank=rank)
            found = identity_convergence(sigma, depth=values["layers"])
            paths.setdefault(found.rank, []).append(found.eigenvalues)
    return _judge_spreads(paths, total=size)


def project_spectrum(eigenvalues: Array, *, nodes: int = 400) -> Array:
    """E[h_i²/|h|²] for independent h_i of the given variances: ∫₀^∞ dᵢ/(1+2sdᵢ) Π(1+2sdⱼ)^(−1/2) ds, in ln s."""
    logs, step = np.linspace(-40.0, 60.0, nodes, retstep=True)
    s = np.exp(logs - math.log(float(eigenvalues.max())))
    shrunk = eigenvalues / (1 + 2 * s[:, None] * eigenvalues)
    weight = np.exp(-0.5 * np.log1p(2 * s[:, None] * eigenvalues).sum(axis=1)) * s * step
    return np.asarray(weight @ shrunk)


def _normals(count: int, context: Context, *, offset: int) -> Array:
    import torch

    return np.asarray(torch.randn(count, dtype=torch.float64, generator=context.generator(offset)).numpy())


def _judge_spreads(paths: Mapping[int, list[Array]], *, total: int) -> Outcome:
    """Numbers over all starts; of each rank the first one is drawn. The eigenvalues sum to `total`."""
    numbers: dict[str, Number] = {}
    series: list[Series] = []
    worst, distances = [], []
    for rank, starts in paths.items():
        rates = []
        for path in starts:
            spread = path[:, 0] - path[:, -1]
            layers = np.arange(len(spread))
            kept = spread > 1e-9 * spread[0]
            worst.append(float((spread[2:][kept[2:]] / spread[1:-1][kept[2:]]).max()))
            distances.append(float(np.abs(path[-1] * rank / total - 1).max()))
            late = kept & (spread < 1e-3 * spread[0])
            late[:3] = False
            rates.append(slope_of(layers[late], np.log(spread[late])).value / math.log(rank / (rank + 2)))
            if len(rates) == 1:
                shown = kept & (layers % max(1, len(layers) // 40) == 0)
                series.append(Series(f"C = {rank}", layers[shown], spread[shown]))
                line = spread[late][0] * (rank / (rank + 2)) ** (layers[late] - layers[late][0])
                series.append(Series(f"C = {rank} (C/(C+2) per layer)", layers[late], line, role="theory"))
        numbers[f"rate_over_claim_C{rank}"] = mean_of(rates)
    numbers["largest_distance_from_limit"] = exact(max(distances), error=1e-9)
    numbers["largest_ratio_of_spreads"] = mean_of(worst)
    numbers["share_of_starts_that_contract"] = fraction_of(sum(ratio < 1 - 1e-6 for ratio in worst), len(worst))
    panel = Panel("layer", "largest minus smallest eigenvalue", series, y_scale="log")
    caption = "The nonzero eigenvalues approach each other: the spread falls at every layer, in the end by C/(C + 2)."
    return Outcome(numbers, Picture((panel,), caption))


def _expectations(ranks: tuple[int, ...]) -> tuple[Expectation, ...]:
    return (
        Expectation("largest_distance_from_limit", "every nonzero eigenvalue reaches the common limit", high=1e-6),
        Expectation(
            "largest_ratio_of_spreads", "the spread contracts at every layer from the second on", high=1 - 1e-6
        ),
        Expectation("share_of_starts_that_contract", "and does so from every start", low=0.8),
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
        settings={"quick": Setting({"ranks": [2, 4, 16], "layers": 220, "starts": 40})},
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
        settings={"quick": Setting({"batch_size": 12, "ranks": [3, 6, 24], "layers": 160, "starts": 8})},
        measure=measure_centred,
        paper="a theorem; no experiment",
    ),
)
