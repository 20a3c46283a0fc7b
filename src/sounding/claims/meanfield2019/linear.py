"""Batch norm without activation: where it takes any batch, and how fast (Theorem B.11, Corollary B.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.meanfield2019.sampled import draw_covariance, largest_deviation, normalized_batches, widest
from sounding.claims.number import GROUPS, Number, exact, extreme_of, fraction_of, slope_of
from sounding.claims.picture import Panel, Picture, Series
from sounding.predict import identity_convergence
from sounding.theory.covariance_map import center

ROUNDING = 1e-6
"""A spread that falls by less than this share, or an eigenvalue that stays this far from the limit, is a failure."""


def measure_unit_vectors(values: Mapping[str, Any], context: Context) -> Outcome:
    """The eigenvalues of E[(h/|h|)^⊗2] layer by layer, from random spectra of several ranks."""
    paths: dict[int, Array] = {}
    deviations: list[Number] = []
    for rank in values["ranks"]:
        starts = np.exp(1.5 * _normals((values["starts"], rank), context, offset=rank))
        paths[rank] = follow(starts, layers=values["layers"])
        turned, _ = np.linalg.qr(_normals((rank + 2, rank), context, offset=1000 + rank))
        root = turned * np.sqrt(starts[0])
        rows = _normals((values["samples"], rank), context, offset=2000 + rank) @ root.T
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        deviations.append(_deviate(turned * project_spectrum(starts[0]) @ turned.T, rows))
    return _judge_spreads(paths, deviations, total=1)


def measure_centred(values: Mapping[str, Any], context: Context) -> Outcome:
    """The eigenvalues under batch norm layer by layer, from random covariances of full and of low rank.

    One start of each rank is also followed by `identity_convergence`, which shares no code with `follow`.
    """
    size = values["batch_size"]
    paths: dict[int, Array] = {}
    deviations: list[Number] = []
    apart = 0.0
    for rank in values["ranks"]:
        kept = min(rank, size - 1)
        drawn = [
            draw_covariance(size, context.generator(1000 * start + rank), rank=rank)
            for start in range(values["starts"])
        ]
        spectra: Array = np.linalg.eigvalsh(np.array([center(sigma) for sigma in drawn]))[:, -kept:].astype(np.float64)
        paths[kept] = follow(spectra, layers=values["layers"], total=size)
        own = identity_convergence(drawn[0], depth=values["layers"]).eigenvalues
        apart = max(apart, float(np.abs(own[1:] - paths[kept][1:, 0]).max()))
        _, vectors = np.linalg.eigh(center(drawn[0]))
        range_of = vectors[:, -kept:]
        rows = normalized_batches(drawn[0], samples=values["samples"], context=context, offset=2000 + rank).numpy()
        deviations.append(_deviate(range_of * (size * project_spectrum(spectra[0])) @ range_of.T, rows))
    found = _judge_spreads(paths, deviations, total=size)
    return Outcome({**found.numbers, "largest_difference_of_maps": exact(apart, error=1e-9)}, found.picture)


def follow(starts: Array, *, layers: int, total: float = 1.0) -> Array:
    """The spectra (layers + 1, starts, C) under `total` times `project_spectrum`, descending."""
    path = [starts]
    for _ in range(layers):
        path.append(total * project_spectrum(path[-1]))
    return np.sort(np.array(path), axis=2)[:, :, ::-1]


def project_spectrum(eigenvalues: Array, *, nodes: int = 200) -> Array:
    """E[h_i²/|h|²] for independent h_i of the given variances: ∫₀^∞ dᵢ/(1+2sdᵢ) Π(1+2sdⱼ)^(−1/2) ds, in ln s.

    The last axis counts the variances, the ones before it different h.
    """
    logs, step = np.linspace(-34.0, 46.0, nodes, retstep=True)
    logs = logs - np.log(eigenvalues.max(axis=-1))[..., None]
    shrinks = 1 + 2 * np.exp(logs)[..., None] * eigenvalues[..., None, :]
    weight = np.exp(logs - 0.5 * np.log(shrinks).sum(axis=-1)) * step
    return np.asarray(eigenvalues * (weight[..., None, :] @ (1 / shrinks))[..., 0, :])


def _normals(shape: tuple[int, ...], context: Context, *, offset: int) -> Array:
    return np.asarray(torch.randn(shape, dtype=torch.float64, generator=context.generator(offset)).numpy())


def _deviate(computed: Array, rows: Array) -> Number:
    """The mean of xxᵀ over the rows x beside `computed`, in every entry: its eigenvectors are those computed."""
    mean, square = (part.T @ part / len(rows) for part in (rows, rows**2))
    return largest_deviation(computed, mean, np.sqrt(np.maximum(square - mean**2, 0.0) / len(rows)))


def _judge_spreads(paths: Mapping[int, Array], deviations: list[Number], *, total: int) -> Outcome:
    """Numbers over all starts; of each rank the first one is drawn. The eigenvalues sum to `total`."""
    numbers: dict[str, Number] = {}
    series: list[Series] = []
    worst, distances = [], []
    for rank, path in paths.items():
        spreads = (path[:, :, 0] - path[:, :, -1]).T
        layers = np.arange(spreads.shape[1])
        rates = []
        for spread in spreads:
            kept = spread > 1e-9 * spread[0]
            worst.append(float((spread[2:][kept[2:]] / spread[1:-1][kept[2:]]).max()))
            late = kept & (spread < 1e-5 * spread[0])
            late[:3] = False
            if late.sum() < 3:
                # it does not contract as far as to have a rate
                rates.append(0.0)
                continue
            rates.append(slope_of(layers[late], np.log(spread[late])).value / math.log(rank / (rank + 2)))
            if len(rates) == 1:
                shown = kept & (layers % max(1, len(layers) // 40) == 0)
                series.append(Series(f"C = {rank}", layers[shown], spread[shown]))
                line = spread[late][0] * (rank / (rank + 2)) ** (layers[late] - layers[late][0])
                series.append(Series(f"C = {rank} (C/(C+2) per layer)", layers[late], line, role="theory"))
        distances += list(np.abs(path[-1] * rank / total - 1).max(axis=1))
        # of all starts: whatever lies outside a bound is seen
        numbers[f"rate_over_claim_C{rank}"] = Number(float(np.median(rates)), min(rates), max(rates), len(rates))
    numbers |= count_failures(np.array(worst), np.array(distances))
    numbers["largest_deviation_from_sampled_layer"] = widest(deviations)
    panel = Panel("layer", "largest minus smallest eigenvalue", series, y_scale="log")
    caption = "The nonzero eigenvalues approach each other: the spread falls at every layer, in the end by C/(C + 2)."
    return Outcome(numbers, Picture((panel,), caption))


def count_failures(ratios: Array, distances: Array) -> dict[str, Number]:
    """How many starts break the statement, their share among fresh ones, and the extremes.

    Args:
        ratios: of each start the largest ratio of the spread to that of the layer before.
        distances: of each start that of its last eigenvalues from the limit, relative.
    """
    failed = int(((ratios >= 1 - ROUNDING) | (distances > ROUNDING)).sum())
    # starts come by rank; every eighth makes groups that hold all ranks
    groups = [slice(first, None, GROUPS) for first in range(GROUPS)]
    return {
        "starts_that_fail": exact(failed),
        "share_of_starts_that_fail": fraction_of(failed, len(ratios)),
        "largest_ratio_of_spreads": extreme_of([ratios[group].max() for group in groups]),
        "largest_distance_from_limit": extreme_of([distances[group].max() for group in groups]),
    }
