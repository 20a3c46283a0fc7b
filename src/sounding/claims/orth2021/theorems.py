"""Rows for the theorems and lemmas of orth2021, which thesis2024 repeats in chapter 2 and appendix A."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Setting
from sounding.claims.number import DRAWN, Number, estimate, exact, fraction_of, slope_of
from sounding.claims.orth2021 import spectra
from sounding.claims.picture import Panel, Picture, Role, Series
from sounding.theory.bounds import orth2021 as bounds
from sounding.theory.bounds.bound import Version

NO_EXPERIMENT = "a proof; no experiment"
SPECTRA = Setting({"trials": 3000, "largest": 32})
RADIUS = Expectation("slope_of_radius", "the radius falls as d^(−1/2), not as d^(−1/4)", high=-0.45)


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
    line = np.array([1e-4, 60.0])
    panel = Panel(
        "the bound 2n V",
        "W₂² to the isotropic Gaussian",
        (
            Series("spectra", (2 * sizes * gaps)[: spectra.SHOWN], distance[: spectra.SHOWN]),
            Series("equal", line, line, role="bound"),
        ),
        x_scale="log",
        y_scale="log",
    )
    caption = "Each point is a spectrum. W₂² falls with the square of the gap: the bound is far away for small gaps."
    return Outcome(numbers, Picture((panel,), caption))


def measure_corollary3(values: Mapping[str, Any], context: Context) -> Outcome:
    """W₂² of chains at depth and of infinitely wide chains at every layer against the bounds; its fall with width."""
    from sounding.chain import simulate

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
            center=False,
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
            assert limit.profile is not None
            curve = limit.profile.series("squared_wasserstein").value
            kept.append(exact(float(np.max(distances / curve))))
            role: Role = "paper" if version == "printed" else "bound"
            series.append(Series(f"{version} bound", np.arange(layers + 1), curve, role=role))
        panels.append(Panel("layer", "W₂² to the Gaussian", series, title=f"n = {samples}, d → ∞", y_scale="log"))
    widths = np.array(values["widths"])
    slope = slope_of(np.log(widths), np.log(radii), stderr=list(np.array(errors) / np.array(radii)))
    numbers = {
        **{f"largest_share_of_{v}_bound": max(kept, key=lambda share: share.high) for v, kept in shares.items()},
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
    import torch

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
    panel = Panel(
        "V(H)",
        "V(WH)",
        (Series("batches", x[: spectra.SHOWN], y[: spectra.SHOWN]), Series("equal", line, line, role="paper")),
    )
    caption = "Each point is a batch of samples; the appendix says that all lie below the line."
    return Outcome(numbers, Picture((panel,), caption))


def _gap_of(features: Any) -> float:
    """V of a (features, samples) matrix."""
    from sounding.measures import orthogonality_gap

    return float(orthogonality_gap(features.mT))


def _layer_claim(name: str, place: str, statement: str, *, what: str, why: str) -> Claim:
    return Claim(
        id=f"orth2021-{name}",
        seed="orth2021",
        place=place,
        kind="theorem",
        statement=statement,
        expectations=(Expectation("largest_share_of_bound", why, high=1.0),),
        settings={
            "quick": Setting({"what": what, "trials": 120, "largest": 12, "widths": [16, 64, 256], "draws": 300}),
            "standard": Setting({"what": what, "trials": 600, "largest": 24, "widths": [32, 128, 512], "draws": 1000}),
        },
        measure=spectra.measure_layer,
        paper=NO_EXPERIMENT,
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="orth2021-thm1",
        seed="orth2021",
        place="theorem 1 (thesis2024 theorem 2.1)",
        kind="theorem",
        statement="If no layer's smallest singular value falls below α, the expected orthogonality gap is at most "
        "2(1 − 2α/3)^ℓ + 3n/(α√d).",
        expectations=(
            Expectation("largest_share_of_printed_bound", "the gap never exceeds the bound", high=1.0 + 1e-6),
        ),
        correction=Correction(
            "α must bound σ_n², which is what the proof uses: E V ≤ √(n(n−1))[(1 − cα)^ℓ/n + 1/(cα√d)], c = 2n/(n+2).",
            (Expectation("largest_share_of_corrected_bound", "the gap never exceeds the bound", high=1.0 + 1e-6),),
        ),
        settings={
            "quick": Setting(
                {
                    "shapes": [[4, 32], [4, 512], [8, 256]],
                    "depth": 60,
                    "runs": 64,
                    "infinite": [[4, 40], [64, 200]],
                }
            ),
            "standard": Setting(
                {
                    "shapes": [[2, 32], [4, 32], [4, 512], [8, 256], [16, 1024]],
                    "depth": 200,
                    "runs": 200,
                    "infinite": [[4, 40], [16, 200], [64, 400], [128, 400]],
                }
            ),
        },
        measure=spectra.measure_theorem1,
        paper=NO_EXPERIMENT,
        note="at widths one can build both bounds lie far above the gap; the printed one fails for many samples "
        "once the width is so large that its floor is below the decay",
    ),
    Claim(
        id="orth2021-lemma2",
        seed="orth2021",
        place="lemma 2 (thesis2024 lemma 2.2)",
        kind="theorem",
        statement="The law of W H is within 2n E V(H) of an isotropic Gaussian in squared Wasserstein-2 distance.",
        expectations=(Expectation("largest_share_of_bound", "the distance never exceeds the bound", high=1.0),),
        settings={"quick": SPECTRA},
        measure=measure_lemma2,
        paper=NO_EXPERIMENT,
        note="for a fixed H the distance is Σ(σ_i − n^(−1/2))² exactly, at most n V²: of second order in the gap",
    ),
    Claim(
        id="orth2021-cor3",
        seed="orth2021",
        place="corollary 3 and table 1 (thesis2024 corollary 2.3)",
        kind="theorem",
        statement="If no layer's smallest singular value falls below α, the squared Wasserstein-2 distance to an "
        "isotropic Gaussian is at most 4n(1 − 2α/3)^ℓ + 6n²/(α√d); the radius of this ball is of order d^(−1/2).",
        expectations=(
            Expectation("largest_share_of_printed_bound", "the distance never exceeds the bound", high=1.0 + 1e-6),
            RADIUS,
        ),
        correction=Correction(
            "α must bound σ_n², as in theorem 1: W₂² ≤ n(n(n−1))[(1 − cα)^ℓ/n + 1/(cα√d)]², c = 2n/(n+2). The radius "
            "is of order d^(−1/2), as the text says; the printed bound gives the d^(−1/4) of table 1.",
            (
                Expectation(
                    "largest_share_of_corrected_bound", "the distance never exceeds the bound", high=1.0 + 1e-6
                ),
                RADIUS,
            ),
        ),
        settings={
            "quick": Setting(
                {
                    "widths": [16, 32, 64, 128, 256, 512],
                    "batch_size": 4,
                    "depth": 150,
                    "runs": 64,
                    "infinite": [[4, 40], [256, 1000]],
                }
            ),
            "standard": Setting(
                {
                    "widths": [16, 32, 64, 128, 256, 512, 1024],
                    "batch_size": 4,
                    "depth": 1000,
                    "runs": 200,
                    "infinite": [[4, 40], [256, 1000], [512, 1200]],
                }
            ),
        },
        measure=measure_corollary3,
        paper=NO_EXPERIMENT,
        note="the step from V² to V in the proof loses half of the exponent: W₂² is of the order of V²",
    ),
    _layer_claim(
        "thm5",
        "theorem 5 (thesis2024 theorem A.2)",
        "One layer brings the smallest eigenvalue towards 1/n: E V̂₊ ≤ (1 − ⅔(1/n − V̂)) V̂ + 1/√d.",
        what="theorem5",
        why="the mean after one layer never exceeds the bound",
    ),
    Claim(
        id="orth2021-lemma4",
        seed="orth2021",
        place="lemma 4",
        kind="theorem",
        statement="The orthogonality gap is at most 2n V̂, V̂ = 1/n − σ_n².",
        expectations=(
            Expectation("largest_share_of_bound", "V ≤ 2n V̂ on every spectrum", high=1.0),
            Expectation("largest_share_of_sharper", "even V ≤ √(n(n−1)) V̂, the sharp form", high=1.0 + 1e-6),
        ),
        settings={"quick": SPECTRA},
        measure=spectra.measure_lemma4,
        paper=NO_EXPERIMENT,
    ),
    _layer_claim(
        "lemma6",
        "lemma 6",
        "HᵀH after a layer concentrates about diag(p_1 … p_n): the expected squared distance is at most 1/d.",
        what="lemma6",
        why="the mean squared distance never exceeds 1/d",
    ),
    _layer_claim(
        "lemma7",
        "lemma 7",
        "V̂ after a layer concentrates about 1/n − p_n: the expected squared distance is at most 1/d.",
        what="lemma7",
        why="the mean squared distance never exceeds 1/d",
    ),
    Claim(
        id="orth2021-lemma8",
        seed="orth2021",
        place="lemma 8 (thesis2024 lemma A.5)",
        kind="theorem",
        statement="1/n − p_n(σ) ≤ (1 − ⅔σ_n²)(1/n − σ_n²).",
        expectations=(
            Expectation("largest_excess_printed", "never above the bound", high=1e-8),
            Expectation("largest_excess_sharper", "nor above the one with 2n/(n + 2) that the proof gives", high=1e-8),
            Expectation("sharpness", "2n/(n + 2) is attained at orthogonality", low=0.95, high=1.05),
        ),
        settings={
            "quick": Setting({"trials": 800, "largest": 32}),
            "standard": Setting({"trials": 5000, "largest": 64}),
        },
        measure=spectra.measure_lemma8,
        paper=NO_EXPERIMENT,
        note="⅔ is the constant at n = 1; 2n/(n + 2) holds for every n and is the best possible",
    ),
    Claim(
        id="orth2021-lemma10",
        seed="orth2021",
        place="lemma 10",
        kind="theorem",
        statement="The function g(δ) of eq. (16) is convex on [0, 1/n].",
        expectations=(Expectation("lowest_curvature", "g″ > 0 for every θ, δ and n", low=1e-12),),
        settings={"quick": Setting({"sizes": [2, 3, 4, 8, 32, 256], "points": 200})},
        measure=spectra.measure_lemma10,
        paper=NO_EXPERIMENT,
        note="the printed h₄ has slips (its constant is (4n − 2)/(n − 1) only for the first term), the sign is right",
    ),
    Claim(
        id="orth2021-appE-orthonormal",
        seed="orth2021",
        place="appendix E, V′ with orthonormal columns",
        kind="theorem",
        statement="Initializing W = V′Σ^(−1/2)Uᵀ from the singular value decomposition of H, V′ with orthonormal "
        "columns, lowers the orthogonality gap of WH below that of H.",
        expectations=(Expectation("share_with_smaller_gap", "the gap falls for every batch", low=0.99),),
        settings={
            "quick": Setting(
                {"trials": 2000, "width": 16, "least": 2, "most": 48, "spread": 3.0, "slice": False},
            )
        },
        measure=measure_appendix_e,
        paper=NO_EXPERIMENT,
    ),
    Claim(
        id="orth2021-appE-slice",
        seed="orth2021",
        place="eq. (6) and appendix E, V′ a slice of V",
        kind="theorem",
        statement="The same with V′ obtained by slicing V, of a batch larger than the width, as eq. (6) says.",
        expectations=(Expectation("share_with_smaller_gap", "the gap falls for every batch", low=0.99),),
        settings={
            "quick": Setting({"trials": 2000, "width": 16, "least": 24, "most": 128, "spread": 1.0, "slice": True})
        },
        measure=measure_appendix_e,
        paper="batches of n ≥ d samples",
        released="Σ^(−1) in place of Σ^(−1/2) for MLPs",
        note="a square slice of a matrix with orthonormal columns is not orthogonal when n > d; with orthonormal V′ "
        "the statement is true (row orth2021-appE-orthonormal)",
    ),
)
