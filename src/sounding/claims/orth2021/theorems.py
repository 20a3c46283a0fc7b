"""The theorems and lemmas of orth2021 (thesis2024 chapter 2 and appendix A), tried on spectra of every shape.

The chain is H ↦ BN(WH)/√d without centring, ‖H‖_F = 1, so the eigenvalues σ_i² of HᵀH sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import (
    DRAWN,
    GROUPS,
    Number,
    estimate,
    exact,
    extreme_of,
    fraction_of,
    highest,
    slope_of,
    worst,
)
from sounding.claims.orth2021.chains import linear_chain
from sounding.claims.picture import Panel, Role, Series, level, scattered
from sounding.claims.walk import draw_normals
from sounding.measures import orthogonality_gap
from sounding.theory.bounds import orth2021 as bounds
from sounding.theory.bounds.bound import Bound, Version

ROUNDING = 1e-9  # stated for what the quadrature of p leaves; its shares sum to 1 within 2e-14
SHOWN = 300  # spectra in a picture


def draw_spectra(trials: int, largest: int, *, seed: int) -> list[Array]:
    """Eigenvalues that sum to 1, from equal to nearly rank one, of 2 to `largest` samples, in falling order."""
    rng = np.random.default_rng(seed)
    spectra = []
    for _ in range(trials):
        n = int(rng.integers(2, largest + 1))
        # a large shape gives equal eigenvalues, a small one nearly rank one
        eigenvalues = rng.gamma(10.0 ** rng.uniform(-1, 2), size=n) + 1e-12
        spectra.append(np.sort(eigenvalues / eigenvalues.sum())[::-1])
    return spectra


def gap(eigenvalues: Array) -> float:
    """V from eigenvalues that sum to 1."""
    return float(np.linalg.norm(eigenvalues - 1 / len(eigenvalues)))


def measure_lemma4(values: Values, context: Context) -> Outcome:
    """V against V̂ = 1/n − σ_n²."""
    spectra = draw_spectra(values["trials"], values["largest"], seed=context.random_seed)
    sizes = np.array([len(s) for s in spectra])
    v, lyapunov = np.array([gap(s) for s in spectra]), np.array([1 / len(s) - s[-1] for s in spectra])
    numbers = {
        "largest_share_of_bound": worst(v / (2 * sizes * lyapunov)),
        "largest_share_of_sharper": worst(v / (np.sqrt(sizes * (sizes - 1)) * lyapunov)),
    }
    cases = Series("spectra", (2 * sizes * lyapunov)[:SHOWN], v[:SHOWN])
    return present(numbers, scattered(cases, ("V = 2n V̂", [1e-3, 2.0])))


def _sharpness(n: int, delta: float) -> float:
    """c/(2n/(n + 2)) at distance delta/n from orthogonality; the error is of first order in delta."""
    delta = delta / n
    eigenvalues = np.append(np.full(n - 1, 1 / n + delta / (n - 1)), 1 / n - delta)
    share = bounds.expected_spectrum(np.sqrt(eigenvalues))[-1]  # p_n, the expected least share
    return float(n * (1 - (1 / n - share) / delta) / (2 * n / (n + 2)))


def measure_lemma8(values: Values, context: Context) -> Outcome:
    """One expected layer against its bound, by quadrature; which constant in the contraction is true and sharp."""
    spectra = draw_spectra(values["trials"], values["largest"], seed=context.random_seed)
    printed, sharp, shown = [], [], []
    for eigenvalues in spectra:
        bound = bounds.lemma_8(np.sqrt(eigenvalues), version="printed")
        corrected = bounds.lemma_8(np.sqrt(eigenvalues), version="corrected")
        assert bound.actual is not None
        printed.append(bound.actual - bound.value)
        sharp.append(bound.actual - corrected.value)
        shown.append((bound.value, bound.actual))
    # to first order at orthogonality 1/n − p_n = (1 − c/n)(1/n − σ_n²) with c = 2n/(n + 2): no larger c is possible
    near, nearer = (np.mean([_sharpness(n, delta) for n in (2, 4, 16, 64)]) for delta in (2e-4, 1e-4))
    numbers = {
        "largest_excess_printed": exact(max(printed), error=ROUNDING),
        "largest_excess_sharper": exact(max(sharp), error=ROUNDING),
        "sharpness": exact(float(nearer), error=2 * abs(float(near - nearer))),
    }
    x, y = np.array(shown[:SHOWN]).T
    return present(numbers, scattered(Series("spectra", x, y), ("equal", [1e-4, 0.5])))


def measure_lemma10(values: Values, context: Context) -> Outcome:
    """The second derivative of g(δ), in closed form, over θ, δ and n."""
    lowest, series = math.inf, []
    for n in values["sizes"]:
        delta = np.linspace(0, 1 / n, values["points"])[None, :]
        theta = np.logspace(-3, 4, values["points"])[:, None]
        # one eigenvalue is 1/n − δ, the others are 1/n + δ/(n − 1)
        a, b = 1 + 2 * theta * (1 / n - delta), 1 + 2 * theta * (1 / n + delta / (n - 1))
        # g = a^(−3/2) b^(−(n−1)/2), so (ln g)′ = 3θ/a − θ/b, and g″/g = ((ln g)′)² + (ln g)″
        first = 3 * theta / a - theta / b
        second = 6 * theta**2 / a**2 + 2 * theta**2 / ((n - 1) * b**2)
        curvature = (first**2 + second) / theta**2
        lowest = min(lowest, float(curvature.min()))
        series.append(Series(f"n = {n}", theta[:, 0], curvature.min(axis=1), role="theory"))
    return present({"lowest_curvature": exact(lowest, error=ROUNDING)}, series)


def measure_layer(values: Values, context: Context) -> Outcome:
    """One layer from many spectra, against a bound on its mean (Theorem 5, Lemmas 6 and 7)."""
    points = []
    spectra = draw_spectra(values["trials"], values["largest"], seed=context.random_seed)
    for index, eigenvalues in context.each(spectra):
        n, width = len(eigenvalues), values["widths"][index % len(values["widths"])]
        # HᵀH is the mean of d outer products of (w ⊙ σ)/‖w ⊙ σ‖ (appendix C.2); by rotation invariance H is diagonal
        rows = draw_normals(context.generator(index), values["draws"], width, n) * torch.from_numpy(
            np.sqrt(eigenvalues)
        )
        rows = rows / rows.norm(dim=-1, keepdim=True)
        layer = (rows.mT @ rows / width).numpy()
        after = 1 / n - np.linalg.eigvalsh(layer)[:, 0]  # V̂ of the layer
        expected = np.sort(bounds.expected_spectrum(np.sqrt(eigenvalues)))[::-1]
        if values["what"] == "lemma6":
            sample, bound = ((layer - np.diag(expected)) ** 2).sum((1, 2)), 1 / width
        elif values["what"] == "lemma7":
            sample, bound = (after - (1 / n - expected[-1])) ** 2, 1 / width
        else:
            before = 1 / n - eigenvalues[-1]
            sample, bound = after, (1 - 2 / 3 * eigenvalues[-1]) * before + 1 / math.sqrt(width)
        ratio = sample / bound
        # a share of the family-wise error for each spectrum: an estimate's interval widened to all trials
        number = estimate(float(ratio.mean()), 1.6 * float(ratio.std(ddof=1)) / math.sqrt(len(ratio)))
        points.append((width, n, number.value, number.high - number.value))
    array = np.array(points)
    middle, upper = worst(array[:, 2]), float((array[:, 2] + array[:, 3]).max())
    largest = Number(middle.value, middle.low, max(middle.high, upper), middle.samples)
    array = array[:SHOWN]
    by_width = {width: array[array[:, 0] == width] for width in values["widths"]}
    series = [Series(f"width {width}", part[:, 1], part[:, 2], error=part[:, 3]) for width, part in by_width.items()]
    series.append(level("the bound", [2, values["largest"]], 1))
    return present({"largest_share_of_bound": largest}, series)


def measure_theorem1(values: Values, context: Context) -> Outcome:
    """The gap along the chain at finite width, and along the infinitely wide chain, against both bounds."""
    finite: dict[Version, list[list[float]]] = {"printed": [], "corrected": []}
    series = []
    for index, (n, width) in enumerate(values["shapes"] * GROUPS):  # each shape once in every group
        depth = values["depth"]
        shape: dict[str, Any] = {"width": width, "batch_size": n, "depth": depth, "input": "collinear:0.1"}
        run = linear_chain(context, index, measures=("orthogonality_gap",), runs=values["runs"] // GROUPS, **shape)
        rows = run.profile.series("orthogonality_gap")
        # min σ_n(H_k) over the layers of chains from the same kind of input: what Assumption A1 calls α
        tops = linear_chain(context, 10_000 + index, measures=(f"top_eigenvalues:{n}",), runs=8, **shape).profile
        eigenvalues = [tops.series(f"eigenvalue_{i}").value[1:] for i in range(1, n + 1)]
        sigma = math.sqrt(float(np.min(eigenvalues[-1] / sum(eigenvalues))))  # over their sum: ‖H‖_F = 1
        for version, shares in finite.items():
            bound = bounds.theorem_1(width, n, depth=depth - 1, smallest_singular_value=sigma, version=version)
            if index % len(values["shapes"]) == 0:
                shares.append([])
            shares[-1].append(float(np.max((rows.value[1:] + 3 * rows.stderr[1:]) / bound.curve)))
        if index >= len(values["shapes"]):  # one group is drawn
            continue
        series.append(Series(f"n = {n}, d = {width}", rows.layer[1:], rows.value[1:], error=rows.stderr[1:]))
    # a width at which the floor is below everything drawn: the chain is its mean field to 1/√d
    infinite, panels = along_wide(values, gap, partial(bounds.theorem_1, 10**24))
    numbers = {
        f"largest_share_of_{version}_bound": extreme_of([max(*group, *infinite[version]) for group in groups])
        for version, groups in finite.items()
    }
    return present(numbers, Panel(series=series, title="finite width"), *panels)


def follow_wide(n: int, layers: int) -> tuple[list[Array], float]:
    """The spectra of HᵀH over the layers of an infinitely wide chain, and the least σ_n; it starts at σ_n² = 0.9/n."""
    path = [np.append(np.full(n - 1, (1 - 0.9 / n) / (n - 1)), 0.9 / n)]
    for _ in range(layers):
        path.append(np.sort(bounds.expected_spectrum(np.sqrt(path[-1])))[::-1])
    return path, math.sqrt(min(e[-1] for e in path))


def along_wide(
    values: Values, measure: Callable[[Array], float], bound: Callable[..., Bound]
) -> tuple[dict[Version, list[float]], list[Panel]]:
    """The largest share of both versions of a bound along each infinitely wide chain of a row, and its panel."""
    shares: dict[Version, list[float]] = {"printed": [], "corrected": []}
    panels = []
    for n, layers in values["infinite"]:
        path, sigma = follow_wide(n, layers)
        found, places = np.array([measure(eigenvalues) for eigenvalues in path]), np.arange(layers + 1)
        series = []
        for version, kept in shares.items():
            curve = bound(n, depth=layers, smallest_singular_value=sigma, version=version).curve
            kept.append(float(np.max(found / curve)))
            role: Role = "paper" if version == "printed" else "bound"
            series.append(Series(f"{version} bound", places, curve, role=role))
        series.append(Series("mean field", places, found, role="theory"))
        panels.append(Panel(series=series, title=f"n = {n}, d → ∞"))
    return shares, panels


def measure_lemma2(values: Values, context: Context) -> Outcome:
    """W₂² of two Gaussian laws, in closed form, against 2n V and n V²."""
    drawn = draw_spectra(values["trials"], values["largest"], seed=context.random_seed)
    sizes = np.array([len(s) for s in drawn])
    distance = np.array([_squared_distance(s) for s in drawn])
    gaps = np.array([gap(s) for s in drawn])
    numbers = {
        "largest_share_of_bound": worst(distance / (2 * sizes * gaps)),
        "largest_share_of_second_order": worst(distance / (sizes * gaps**2)),
    }
    cases = Series("spectra", (2 * sizes * gaps)[:SHOWN], distance[:SHOWN])
    return present(numbers, scattered(cases, ("equal", [1e-4, 60.0])))


def measure_corollary3(values: Values, context: Context) -> Outcome:
    """W₂² of chains at depth and of infinitely wide chains at every layer against the bounds; its fall with width."""
    shares: dict[Version, list[Number]] = {"printed": [], "corrected": []}
    radii, errors = [], []
    n, depth = values["batch_size"], values["depth"]
    for index, width in enumerate(values["widths"]):
        run = simulate(
            **pick(values, "batch_size depth runs"), width=width, burn_in=depth // 3, centring=False,
            measures=("isotropy_distance", f"top_eigenvalues:{n}"), device=context.device,
            generator=context.generator(index),
        )  # fmt: skip
        radius = run.averages["isotropy_distance"]
        eigenvalues = [run.averages[f"eigenvalue_{i + 1}"].value for i in range(n)]
        sigma = math.sqrt(min(eigenvalues) / sum(eigenvalues))  # the bound is for ‖H‖_F = 1
        for version, kept in shares.items():
            bound = bounds.corollary_3(width, n, depth=depth, smallest_singular_value=sigma, version=version).value
            # the error of a square is 2r·dr
            kept.append(estimate(radius.value**2 / bound, 2 * radius.value * (radius.stderr or 0.0) / bound))
        radii.append(radius.value)
        errors.append(radius.stderr or 0.0)
    # a width at which the floor is below everything shown
    infinite, panels = along_wide(values, _squared_distance, partial(bounds.corollary_3, 10**60))
    for version, kept in shares.items():
        kept += map(exact, infinite[version])
    widths = np.array(values["widths"])
    slope = slope_of(np.log(widths), np.log(radii), stderr=list(np.array(errors) / np.array(radii)))
    numbers = {**{f"largest_share_of_{v}_bound": highest(kept) for v, kept in shares.items()}, "slope_of_radius": slope}
    drawn = (
        Series("measured", widths, radii, error=DRAWN * np.array(errors)),
        Series("d^(−1/2)", widths, radii[0] * (widths / widths[0]) ** -0.5, role="theory"),
        Series("d^(−1/4), table 1", widths, radii[0] * (widths / widths[0]) ** -0.25, role="paper"),
    )
    return present(numbers, drawn, *panels)


def _squared_distance(eigenvalues: Array) -> float:
    """W₂² of WH to the isotropic Gaussian for a given H, from the eigenvalues of HᵀH, which sum to 1."""
    return float(np.sum((np.sqrt(eigenvalues) - len(eigenvalues) ** -0.5) ** 2))


def measure_appendix_e(values: Values, context: Context) -> Outcome:
    """The gap before and after W = V′ Σ^(−1/2) Uᵀ, with V′ a slice of V or a matrix of orthonormal columns."""
    generator = context.generator()
    before, after = [], []
    d = values["width"]
    for _ in range(values["trials"]):
        n = int(torch.randint(values["least"], values["most"] + 1, (), generator=generator))
        scales = torch.rand(d, dtype=torch.float64, generator=generator) * values["spread"] + 0.1
        features = scales[:, None] * draw_normals(generator, d, n)
        _, sigma, right = torch.linalg.svd(features, full_matrices=False)  # H = U Σ Vᵀ, so W H = V′ Σ^(1/2) Vᵀ
        count = len(sigma)
        inner = right.mT[:count] if values["slice"] else torch.linalg.qr(draw_normals(generator, d, count))[0]
        mapped = inner @ torch.diag(sigma.sqrt()) @ right
        before.append(float(orthogonality_gap(features.mT)))  # columns are samples here
        after.append(float(orthogonality_gap(mapped.mT)))
    x, y = np.array(before), np.array(after)
    numbers = {"share_with_smaller_gap": fraction_of(int(np.sum(y < x)), len(x))}
    line = [0.9 * min(x.min(), y.min()), 1.1 * max(x.max(), y.max())]
    return present(numbers, scattered(Series("batches", x[:SHOWN], y[:SHOWN]), ("equal", line), "paper"))
