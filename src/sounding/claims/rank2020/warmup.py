"""Lemmas 5 and 6, proposition 8 and the full rank of small batches: appendix D and section 3.1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, charted
from sounding.claims.number import GROUPS, exact, extreme_of, over_runs
from sounding.claims.picture import Panel, Picture, points_of
from sounding.claims.walk import unit_features, walk
from sounding.weights import draw_uniform


def measure_lemma5(values: Mapping[str, Any], context: Context) -> Outcome:
    """The least rank over the layers of chains with γ = 1/(8d), with batch norm and without, float64."""
    least: dict[str, list[float]] = {"batch": [], "none": []}
    for index, width in enumerate(values["widths"]):
        for norm, found in least.items():
            profile = simulate(
                width=width, batch_size=width, depth=values["depth_over_square"] * width**2, runs=values["runs"],
                residual=1 / (8 * width), weights="uniform", norm=norm, centring=False, input="orthogonal",
                every=8 * width**2, measures=["numerical_rank"], profile=True, dtype="float64",
                generator=context.generator(index),
            ).profile  # fmt: skip
            found.append(min(profile.value("numerical_rank", layer=layer).value for layer in profile.layers if layer))
    numbers = {
        "least_rank_with_batch_norm": exact(min(least["batch"])),
        "least_rank_without_norm": exact(max(least["none"])),
    }
    series = [points_of(name, values["widths"], [exact(v) for v in least[key]])
              for key, name in (("batch", "batch norm"), ("none", "no norm"))]  # fmt: skip
    panel = Panel("width d", "least mean rank over the layers", series)
    return Outcome(
        numbers, Picture((panel,), "γ = 1/(8d): batch norm keeps two directions or more, a plain chain one.")
    )


def measure_lemma6(values: Mapping[str, Any], context: Context) -> Outcome:
    """How far M = HHᵀ/N of a batch of rank one moves in a network, and its entries are from ±1."""
    generator, changes, entries = context.generator(), [], []
    for width in values["widths"]:
        column = torch.randn(values["runs"], width, 1, generator=generator, dtype=torch.float64)
        start = unit_features(column @ torch.randn(values["runs"], 1, width, generator=generator, dtype=torch.float64))
        place: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        weights = (draw_uniform((values["runs"], width, width), **place) for _ in range(values["depth"]))
        first = start.mT @ start / width
        for state in walk(start, weights, norm=unit_features, skip=1 / (8 * width)):
            moment = state.mT @ state / width
            changes.append((moment - first).abs().amax(dim=(-2, -1)))
            entries.append((moment.abs() - 1).abs().amax(dim=(-2, -1)))
    numbers = {
        name: extreme_of([float(part.max()) for part in torch.cat(found).tensor_split(GROUPS)])
        for name, found in (("largest_change_of_M", changes), ("largest_distance_of_entries_from_1", entries))
    }
    return charted(numbers, "Once a batch has rank one, M stays as it is, with entries ±1.")


def measure_proposition8(values: Mapping[str, Any], context: Context) -> Outcome:
    """Two sides of eq. (44) and (45) for matrices whose rows have equal norms: circulant and positive, of trace d."""
    random, off = np.random.default_rng(context.random_seed), []
    for d in values["widths"]:
        for _ in range(values["draws"]):
            wanted = np.abs(np.fft.fft(random.standard_normal(d))) ** 2  # symmetric in frequency, so M is real
            row = np.fft.ifft(wanted / wanted.sum() * d).real
            matrix = np.array([np.roll(row, shift) for shift in range(d)])
            eigen = np.linalg.eigvalsh(matrix)
            square = matrix @ matrix
            sides = (
                (np.trace(square @ matrix), np.sum(eigen**3)),
                (np.sum(np.diag(square) ** 2), np.sum(eigen**2) ** 2 / d),
                (np.trace(square), np.sum(eigen**2)),
            )
            change = [2 * d**2 - 2 * norm - 8 * cubes + 8 * rows for cubes, rows, norm in zip(*sides, strict=True)]
            off.append(max(abs(a - b) / max(abs(b), 1.0) for a, b in (*sides, change)))
    numbers = {"largest_deviation": exact(max(off), error=1e-9)}
    return charted(numbers, "Relative distance between the two sides.")


def measure_full_rank(values: Mapping[str, Any], context: Context) -> Outcome:
    """The rank over the batch size for N = c√d samples and, as control, N = d, in deep chains, float64."""
    small: list[float] = []
    ends: list[float] = []
    for index, width in enumerate(values["widths"]):
        for place, size in enumerate((round(values["factor"] * math.sqrt(width)), width)):
            found = simulate(
                width=width, batch_size=size, depth=values["depth"], burn_in=values["depth"] // 2, runs=values["runs"],
                residual=values["residual"], centring=False, input="gaussian", every=100,
                measures=["numerical_rank:1e-5"], dtype="float64", generator=context.generator(10 * index + place),
            ).averages["numerical_rank:1e-5"]  # fmt: skip
            (ends if place else small).append(found.value / size)
    numbers = {
        "smallest_share_of_full_rank": exact(min(small)),
        "largest_share_at_as_many_samples_as_features": exact(max(ends)),
    }
    root = "N = √d" if values["factor"] == 1 else f"N = {values['factor']:g}√d"
    series = [
        points_of(name, values["widths"], [over_runs([v, v]) for v in found])
        for name, found in ((root, small), ("N = d", ends))
    ]
    panel = Panel("width d", "rank over the number of samples", series, x_scale="log")
    return Outcome(numbers, Picture((panel,), "Singular values above 1e-5 of the largest, second half of the depth."))
