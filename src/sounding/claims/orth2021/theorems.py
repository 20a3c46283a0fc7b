"""Rows for the theorems and lemmas of orth2021, which thesis2024 repeats in chapter 2 and appendix A."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import DRAWN, Number, estimate, exact, fraction_of, highest, slope_of
from sounding.claims.orth2021 import spectra
from sounding.claims.picture import Panel, Picture, Role, Series, scattered
from sounding.measures import orthogonality_gap
from sounding.theory.bounds import orth2021 as bounds
from sounding.theory.bounds.bound import Version


def measure_lemma2(values: Mapping[str, Any], context: Context) -> Outcome:
    """W₂² of two Gaussian laws, in closed form, against 2n V and n V²."""
    drawn = spectra.draw_spectra(values["trials"], values["largest"], seed=context.random_seed)
    sizes = np.array([len(s) for s in drawn])
    distance = np.array([_squared_distance(s) for s in drawn])
    gaps = np.array([spectra.gap(s) for s in drawn])
    numbers = {
        "largest_share_of_bound": spectra.largest_of_groups(distance / (2 * sizes * gaps)),
        "largest_share_of_second_order": spectra.largest_of_groups(distance / (sizes * gaps**2)),
    }
    cases = Series("spectra", (2 * sizes * gaps)[: spectra.SHOWN], distance[: spectra.SHOWN])
    labels = ("the bound 2n V", "W₂² to the isotropic Gaussian")
    panel = scattered(*labels, cases, ("equal", [1e-4, 60.0]), **spectra.LOGARITHMIC)
    caption = "Each point is a spectrum. W₂² falls with the square of the gap: the bound is far away for small gaps."
    return Outcome(numbers, Picture((panel,), caption))


def measure_corollary3(values: Mapping[str, Any], context: Context) -> Outcome:
    """W₂² of chains at depth and of infinitely wide chains at every layer against the bounds; its fall with width."""
    shares: dict[Version, list[Number]] = {"printed": [], "corrected": []}
    radii, errors, panels = [], [], []
    n, depth = values["batch_size"], values["depth"]
    for index, width in enumerate(values["widths"]):
        run = simulate(
            width=width,
            batch_size=n,
            depth=depth,
            runs=values["runs"],
            burn_in=depth // 3,
            measures=("isotropy_distance", f"top_eigenvalues:{n}"),
            centring=False,
            device=context.device,
            generator=context.generator(index),
        )
        radius = run.averages["isotropy_distance"]
        eigenvalues = [run.averages[f"eigenvalue_{i + 1}"].value for i in range(n)]
        sigma = math.sqrt(min(eigenvalues) / sum(eigenvalues))
        for version, kept in shares.items():
            bound = bounds.corollary_3(width, n, depth=depth, smallest_singular_value=sigma, version=version).value
            kept.append(estimate(radius.value**2 / bound, 2 * radius.value * (radius.stderr or 0.0) / bound))
        radii.append(radius.value)
        errors.append(radius.stderr or 0.0)
    for samples, layers in values["infinite"]:
        path, sigma = spectra.follow_wide(samples, layers)
        distances = np.array([_squared_distance(eigenvalues) for eigenvalues in path])
        series = [Series("mean field", np.arange(layers + 1), distances, role="theory")]
        for version, kept in shares.items():
            # a width at which the floor is below everything shown
            limit = bounds.corollary_3(10**60, samples, depth=layers, smallest_singular_value=sigma, version=version)
            kept.append(exact(float(np.max(distances / limit.curve))))
            role: Role = "paper" if version == "printed" else "bound"
            series.append(Series(f"{version} bound", np.arange(layers + 1), limit.curve, role=role))
        panels.append(Panel("layer", "W₂² to the Gaussian", series, title=f"n = {samples}, d → ∞", y_scale="log"))
    widths = np.array(values["widths"])
    slope = slope_of(np.log(widths), np.log(radii), stderr=list(np.array(errors) / np.array(radii)))
    numbers = {
        **{f"largest_share_of_{v}_bound": highest(kept) for v, kept in shares.items()},
        "slope_of_radius": slope,
    }
    panel = Panel(
        "width d",
        "stationary W₂ to the isotropic Gaussian",
        (
            Series("measured", widths, radii, error=DRAWN * np.array(errors)),
            Series("d^(−1/2)", widths, radii[0] * (widths / widths[0]) ** -0.5, role="theory"),
            Series("d^(−1/4), table 1", widths, radii[0] * (widths / widths[0]) ** -0.25, role="paper"),
        ),
        title=f"n = {n}",
        x_scale="log",
        y_scale="log",
    )
    caption = (
        "Left: the radius falls as d^(−1/2). Right: in wide networks of many samples W₂² falls more slowly than the "
        "printed bound with α = σ_n, and passes it; it stays below the bound with α = σ_n²."
    )
    return Outcome(numbers, Picture((panel, *panels), caption))


def _squared_distance(eigenvalues: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """W₂² of WH to the isotropic Gaussian for a given H, from the eigenvalues of HᵀH, which sum to 1."""
    return float(np.sum((np.sqrt(eigenvalues) - len(eigenvalues) ** -0.5) ** 2))


def measure_appendix_e(values: Mapping[str, Any], context: Context) -> Outcome:
    """The gap before and after W = V′ Σ^(−1/2) Uᵀ, with V′ a slice of V or a matrix of orthonormal columns."""
    generator = context.generator()
    before, after = [], []
    d = values["width"]
    for _ in range(values["trials"]):
        n = int(torch.randint(values["least"], values["most"] + 1, (), generator=generator))
        scales = torch.rand(d, dtype=torch.float64, generator=generator) * values["spread"] + 0.1
        features = scales[:, None] * torch.randn(d, n, dtype=torch.float64, generator=generator)
        _, sigma, right = torch.linalg.svd(features, full_matrices=False)
        if values["slice"]:
            inner = right.mT[: len(sigma)]
        else:
            inner = torch.linalg.qr(torch.randn(d, len(sigma), dtype=torch.float64, generator=generator))[0]
        mapped = inner @ torch.diag(sigma.sqrt()) @ right
        before.append(_gap_of(features))
        after.append(_gap_of(mapped))
    x, y = np.array(before), np.array(after)
    numbers = {"share_with_smaller_gap": fraction_of(int(np.sum(y < x)), len(x))}
    line = [0.9 * min(x.min(), y.min()), 1.1 * max(x.max(), y.max())]
    cases = Series("batches", x[: spectra.SHOWN], y[: spectra.SHOWN])
    panel = scattered("V(H)", "V(WH)", cases, ("equal", line), "paper")
    caption = "Each point is a batch of samples; the appendix says that all lie below the line."
    return Outcome(numbers, Picture((panel,), caption))


def _gap_of(features: Any) -> float:
    """V of a (features, samples) matrix."""
    return float(orthogonality_gap(features.mT))
