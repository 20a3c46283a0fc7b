"""The theorem and lemmas of orth2021 (thesis2024 chapter 2 and appendix A), tried on spectra of every shape.

The chain is H ↦ BN(WH)/√d without centring, ‖H‖_F = 1, so the eigenvalues σ_i² of HᵀH sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import GROUPS, Number, estimate, exact, extreme_of
from sounding.claims.orth2021.chains import linear_chain
from sounding.claims.picture import Panel, Picture, Role, Series, scattered
from sounding.theory.bounds import orth2021 as bounds
from sounding.theory.bounds.bound import Version

ROUNDING = 1e-9  # stated for what the quadrature of p leaves; its shares sum to 1 within 2e-14
SHOWN = 300  # spectra in a picture
LOGARITHMIC: dict[str, Any] = {"x_scale": "log", "y_scale": "log"}


def draw_spectra(trials: int, largest: int, *, seed: int) -> list[Array]:
    """Eigenvalues that sum to 1, from equal to nearly rank one, of 2 to `largest` samples, in falling order."""
    rng = np.random.default_rng(seed)
    spectra = []
    for _ in range(trials):
        n = int(rng.integers(2, largest + 1))
        eigenvalues = rng.gamma(10.0 ** rng.uniform(-1, 2), size=n) + 1e-12
        spectra.append(np.sort(eigenvalues / eigenvalues.sum())[::-1])
    return spectra


def largest_of_groups(values: Array) -> Number:
    """The largest of a group of drawn cases, over eight groups of them."""
    return extreme_of([part.max() for part in np.array_split(values, GROUPS)])


def gap(eigenvalues: Array) -> float:
    """V from eigenvalues that sum to 1."""
    return float(np.linalg.norm(eigenvalues - 1 / len(eigenvalues)))


def draw_layer(eigenvalues: Array, width: int, draws: int, generator: torch.Generator) -> Array:
    """HᵀH after one layer, `draws` times: the mean of d outer products of (w ⊙ σ)/‖w ⊙ σ‖ (appendix C.2)."""
    sigma = torch.from_numpy(np.sqrt(eigenvalues))
    rows = torch.randn(draws, width, len(eigenvalues), dtype=torch.float64, generator=generator) * sigma
    rows = rows / rows.norm(dim=-1, keepdim=True)
    return np.asarray((rows.mT @ rows / width).numpy())


def measure_lemma4(values: Mapping[str, Any], context: Context) -> Outcome:
    """V against V̂ = 1/n − σ_n²."""
    spectra = draw_spectra(values["trials"], values["largest"], seed=context.random_seed)
    sizes = np.array([len(s) for s in spectra])
    v, lyapunov = np.array([gap(s) for s in spectra]), np.array([1 / len(s) - s[-1] for s in spectra])
    numbers = {
        "largest_share_of_bound": largest_of_groups(v / (2 * sizes * lyapunov)),
        "largest_share_of_sharper": largest_of_groups(v / (np.sqrt(sizes * (sizes - 1)) * lyapunov)),
    }
    cases = Series("spectra", (2 * sizes * lyapunov)[:SHOWN], v[:SHOWN])
    panel = scattered("2n V̂, the bound", "orthogonality gap V", cases, ("V = 2n V̂", [1e-3, 2.0]), **LOGARITHMIC)
    caption = "Each point is a spectrum; none lies above the line. √(n(n−1)) V̂ is the sharp form, half as large."
    return Outcome(numbers, Picture((panel,), caption))


def _sharpness(n: int, delta: float) -> float:
    """c/(2n/(n + 2)) at distance delta/n from orthogonality; the error is of first order in delta."""
    delta = delta / n
    eigenvalues = np.append(np.full(n - 1, 1 / n + delta / (n - 1)), 1 / n - delta)
    share = bounds.expected_spectrum(np.sqrt(eigenvalues))[-1]
    return float(n * (1 - (1 / n - share) / delta) / (2 * n / (n + 2)))


def measure_lemma8(values: Mapping[str, Any], context: Context) -> Outcome:
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
    labels = ("the bound (1 − ⅔σ_n²)(1/n − σ_n²)", "1/n − p_n(σ), one expected layer")
    panel = scattered(*labels, Series("spectra", x, y), ("equal", [1e-4, 0.5]), **LOGARITHMIC)
    return Outcome(numbers, Picture((panel,), "Each point is a spectrum; none lies above the line."))


def measure_lemma10(values: Mapping[str, Any], context: Context) -> Outcome:
    """The second derivative of g(δ), in closed form, over θ, δ and n."""
    lowest, series = math.inf, []
    for n in values["sizes"]:
        delta = np.linspace(0, 1 / n, values["points"])[None, :]
        theta = np.logspace(-3, 4, values["points"])[:, None]
        a, b = 1 + 2 * theta * (1 / n - delta), 1 + 2 * theta * (1 / n + delta / (n - 1))
        # g = a^(−3/2) b^(−(n−1)/2), so (ln g)′ = 3θ/a − θ/b, and g″/g = ((ln g)′)² + (ln g)″
        first = 3 * theta / a - theta / b
        second = 6 * theta**2 / a**2 + 2 * theta**2 / ((n - 1) * b**2)
        curvature = (first**2 + second) / theta**2
        lowest = min(lowest, float(curvature.min()))
        series.append(Series(f"n = {n}", theta[:, 0], curvature.min(axis=1), role="theory"))
    panel = Panel("θ", "smallest g″/(g θ²) over δ", series, x_scale="log", y_scale="log")
    caption = "g″ is positive for every θ, δ and n: both terms of g″/g are squares or sums of squares."
    return Outcome({"lowest_curvature": exact(lowest, error=ROUNDING)}, Picture((panel,), caption))


def _layer_excess(values: Mapping[str, Any], context: Context, what: str) -> tuple[Number, list[tuple[float, ...]]]:
    """The largest measured/bound over a group of spectra and widths, and each spectrum's."""
    points: list[tuple[float, ...]] = []
    for index, eigenvalues in enumerate(draw_spectra(values["trials"], values["largest"], seed=context.random_seed)):
        n, width = len(eigenvalues), values["widths"][index % len(values["widths"])]
        layer = draw_layer(eigenvalues, width, values["draws"], context.generator(index))
        after = 1 / n - np.linalg.eigvalsh(layer)[:, 0]
        expected = np.sort(bounds.expected_spectrum(np.sqrt(eigenvalues)))[::-1]
        if what == "lemma6":
            sample, bound = ((layer - np.diag(expected)) ** 2).sum((1, 2)), 1 / width
        elif what == "lemma7":
            sample, bound = (after - (1 / n - expected[-1])) ** 2, 1 / width
        else:
            before = 1 / n - eigenvalues[-1]
            sample, bound = after, (1 - 2 / 3 * eigenvalues[-1]) * before + 1 / math.sqrt(width)
        ratio = sample / bound
        # a share of the family-wise error for each spectrum: an estimate's interval widened to all trials
        number = estimate(float(ratio.mean()), 1.6 * float(ratio.std(ddof=1)) / math.sqrt(len(ratio)))
        points.append((width, n, number.value, number.high - number.value))
        context.progress((index + 1) / values["trials"])
    array = np.array(points)
    middle, upper = largest_of_groups(array[:, 2]), float((array[:, 2] + array[:, 3]).max())
    return Number(middle.value, middle.low, max(middle.high, upper), middle.samples), points


def measure_layer(values: Mapping[str, Any], context: Context) -> Outcome:
    """One layer from many spectra, against a bound on its mean (Theorem 5, Lemmas 6 and 7)."""
    worst, points = _layer_excess(values, context, values["what"])
    array = np.array(points[:SHOWN])
    by_width = {width: array[array[:, 0] == width] for width in values["widths"]}
    series = [Series(f"width {width}", part[:, 1], part[:, 2], error=part[:, 3]) for width, part in by_width.items()]
    series.append(Series("the bound", [2, values["largest"]], [1, 1], role="bound"))
    panel = Panel("samples n", "measured / bound", series)
    return Outcome({"largest_share_of_bound": worst}, Picture((panel,), "No point reaches the bound at 1."))


def measure_theorem1(values: Mapping[str, Any], context: Context) -> Outcome:
    """The gap along the chain at finite width, and along the infinitely wide chain, against both bounds."""
    finite: dict[Version, list[list[float]]] = {"printed": [], "corrected": []}
    infinite: dict[Version, list[float]] = {"printed": [], "corrected": []}
    series = []
    for index, (n, width) in enumerate(values["shapes"] * GROUPS):
        depth = values["depth"]
        shape: dict[str, Any] = {"width": width, "batch_size": n, "depth": depth, "input": "collinear:0.1"}
        run = linear_chain(context, index, measures=("orthogonality_gap",), runs=values["runs"] // GROUPS, **shape)
        rows = run.profile.series("orthogonality_gap")
        sigma = _smallest_singular_value(context, 10_000 + index, shape)
        for version, shares in finite.items():
            bound = bounds.theorem_1(width, n, depth=depth - 1, smallest_singular_value=sigma, version=version)
            if index % len(values["shapes"]) == 0:
                shares.append([])
            shares[-1].append(float(np.max((rows.value[1:] + 3 * rows.stderr[1:]) / bound.curve)))
        if index >= len(values["shapes"]):
            continue
        series.append(Series(f"n = {n}, d = {width}", rows.layer[1:], rows.value[1:], error=rows.stderr[1:]))
    panels = [Panel("layer", "orthogonality gap V", series, title="finite width", y_scale="log")]
    for n, layers in values["infinite"]:
        series = []
        path, sigma = follow_wide(n, layers)
        v = np.array([gap(e) for e in path])
        for version, kept in infinite.items():
            # a width at which the floor is below everything drawn: the chain is its mean field to 1/√d
            bound = bounds.theorem_1(10**24, n, depth=layers, smallest_singular_value=sigma, version=version)
            kept.append(float(np.max(v / bound.curve)))
            role: Role = "paper" if version == "printed" else "bound"
            series.append(Series(f"{version} bound", np.arange(layers + 1), bound.curve, role=role))
        series.append(Series("mean field", np.arange(layers + 1), v, role="theory"))
        panels.append(Panel("layer", "orthogonality gap V", series, title=f"n = {n}, d → ∞", y_scale="log"))
    numbers = {
        f"largest_share_of_{version}_bound": extreme_of([max(*group, *infinite[version]) for group in groups])
        for version, groups in finite.items()
    }
    caption = (
        "The gap falls to a floor at finite width. In the infinitely wide chain of many samples it falls by n/(n + 2) "
        "per layer: slower than the printed bound with α = σ_n (dashed), below the bound with α = σ_n² (dotted)."
    )
    return Outcome(numbers, Picture(panels, caption))


def follow_wide(n: int, layers: int) -> tuple[list[Array], float]:
    """The spectra of HᵀH over the layers of an infinitely wide chain, and the least σ_n; it starts at σ_n² = 0.9/n."""
    path = [np.append(np.full(n - 1, (1 - 0.9 / n) / (n - 1)), 0.9 / n)]
    for _ in range(layers):
        path.append(np.sort(bounds.expected_spectrum(np.sqrt(path[-1])))[::-1])
    return path, math.sqrt(min(e[-1] for e in path))


def _smallest_singular_value(context: Context, offset: int, shape: Mapping[str, Any]) -> float:
    """min σ_n(H_k) over the layers of chains from the same kind of input: what Assumption A1 calls α."""
    n = shape["batch_size"]
    run = linear_chain(context, offset, measures=(f"top_eigenvalues:{n}",), runs=8, **shape)
    smallest = run.profile.series(f"eigenvalue_{n}").value[1:]
    total = sum(run.profile.series(f"eigenvalue_{i}").value[1:] for i in range(1, n + 1))
    return math.sqrt(float(np.min(smallest / total)))
