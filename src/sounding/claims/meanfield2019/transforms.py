"""The forward map of batch normalization as a Laplace and as a Fourier integral: Theorems 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Setting
from sounding.claims.meanfield2019.sampled import Array, draw_covariance, largest_deviation, sample_map, widest
from sounding.claims.number import DRAWN, GROUPS, Number, exact, extreme_of, fraction_of, mean_of
from sounding.claims.picture import Panel, Picture, Series

TRACE_TOLERANCE = 0.01
_CASES = [["relu", 6], ["leaky_relu:0.2", 5], ["relu_power:2", 6], ["identity", 8]]


def measure_laplace(values: Mapping[str, Any], context: Context) -> Outcome:
    """Theorem 2 beside sampled batches, at covariances without symmetry."""
    from sounding.predict import covariance_map

    numbers, series = {}, []
    for place, (name, size) in enumerate(values["cases"]):
        sigma = draw_covariance(size, context.generator(place))
        computed = covariance_map(name, sigma).covariance
        measured, error = sample_map(name, sigma, samples=values["samples"], context=context, offset=100 + place)
        numbers[f"largest_deviation_{name}"] = largest_deviation(computed, measured, error)
        series.append(_entries(f"{name}, B = {size}", computed, measured, error))
    panel = Panel(
        "entry of V(Σ), one Laplace integral (Theorem 2)", "entry of V(Σ), sampled", (*series, _diagonal(series))
    )
    caption = (
        "Every entry of the covariance after one layer, from covariances without symmetry: all lie on the diagonal."
    )
    return Outcome(numbers, Picture((panel,), caption))


def measure_fourier(values: Mapping[str, Any], context: Context) -> Outcome:
    """Theorem 3 with and without the inverse, by contour integration, beside sampled batches."""
    size = values["batch_size"]
    numbers, series = {}, []
    sigmas = [draw_covariance(size, context.generator(draw)) for draw in range(values["maps"])]
    for place, (name, gaussian_map) in enumerate(_ANALYTIC.items()):
        deviations = []
        for draw, sigma in enumerate(sigmas):
            computed = fourier_map(gaussian_map, sigma, steps=401)
            measured, error = sample_map(
                name, sigma, samples=values["samples"], context=context, offset=100 + 10_000 * draw + place
            )
            deviations.append(largest_deviation(computed, measured, error))
            if draw == 0:
                series.append(_entries(name, computed, measured, error))
        numbers[f"largest_deviation_{name}"] = widest(deviations)
    draws = [draw_covariance(size, context.generator(1000 + draw)) for draw in range(values["draws"])]
    traces = {
        reading: np.array([linear_trace(drawn, inverted=reading == "inverted", steps=1001) / size for drawn in draws])
        for reading in ("printed", "inverted")
    }
    for reading, found in traces.items():
        numbers |= count_wrong_traces(reading, found)
    numbers["log_printed_trace_over_batch_size"] = mean_of(np.log(traces["printed"]))
    panel = Panel(
        "entry of V(Σ), Fourier integral with the inverse", "entry of V(Σ), sampled", (*series, _diagonal(series))
    )
    caption = (
        f"B = {size}: the double integral of Theorem 3 with (Σ⁻¹ + 2iλG/B)⁻¹ gives every entry. As printed, without "
        f"the inverse, a linear network would have a trace of {size * float(traces['printed'].min()):.3g} to "
        f"{size * float(traces['printed'].max()):.3g} where batch norm gives {size}."
    )
    return Outcome(numbers, Picture((panel,), caption))


def count_wrong_traces(reading: str, ratios: Array) -> dict[str, Number]:
    """How many of the traces, given over B, are not 1, and their share among fresh covariances."""
    wrong = int((np.abs(ratios - 1) > TRACE_TOLERANCE).sum())
    return {
        f"wrong_traces_{reading}": exact(wrong),
        f"share_of_wrong_traces_{reading}": fraction_of(wrong, len(ratios)),
        f"largest_error_of_trace_{reading}": extreme_of(
            [np.abs(part - 1).max() for part in np.array_split(ratios, GROUPS)]
        ),
    }


def _right_traces(reading: str) -> tuple[Expectation, ...]:
    return (
        Expectation(f"wrong_traces_{reading}", "without activation the trace is B at every covariance: 1%", high=0),
        Expectation(f"share_of_wrong_traces_{reading}", "nor would it be wrong at more than 5% of others", high=0.05),
        Expectation(f"largest_error_of_trace_{reading}", "nor by more than 1%", high=TRACE_TOLERANCE),
    )


ComplexMap = Callable[[np.ndarray], np.ndarray]
_ANALYTIC: dict[str, ComplexMap] = {}


def fourier_map(gaussian_map: ComplexMap, sigma: Array, *, inverted: bool = True, steps: int = 2001) -> Array:
    """(12): ∫dr² ∫dλ/2π e^{iλr²} V_φ(C(λ)/r²)/√det(I + 2iλGΣ/B), C = G(Σ⁻¹ + 2iλG/B)⁻¹G or, as printed, its inverse.

    The singularities in λ lie on the imaginary axis from iB/(2s) on, s the largest eigenvalue of GΣG. The contour is
    lifted towards them away from 0, where e^{iλr²} then decays; the half with Re λ < 0 is the complex conjugate.
    """
    contour = _Contour(sigma, inverted=inverted, steps=steps)
    matrices = np.einsum("ik,lk,jk->lij", contour.vectors, contour.spectrum, contour.vectors)
    total = np.zeros_like(sigma)
    for square, weight, amount in contour.radii():
        total += weight * np.einsum("l,lij->ij", amount, gaussian_map(matrices / square)).real
    return total


def linear_trace(sigma: Array, *, inverted: bool = True, steps: int = 4001) -> float:
    """The trace of `fourier_map` without activation, where V_φ(C) = C: B if the formula is right."""
    contour = _Contour(sigma, inverted=inverted, steps=steps)
    sums = contour.spectrum.sum(1)
    return float(sum(weight * (amount @ sums).real / square for square, weight, amount in contour.radii()))


class _Contour:
    """The eigenvectors of GΣG, the eigenvalues of C(λ) along the contour, and the nodes in r²."""

    def __init__(self, sigma: Array, *, inverted: bool, steps: int) -> None:
        from sounding.theory.covariance_map import center

        size = len(sigma)
        values, vectors = np.linalg.eigh(center(sigma))
        values, self.vectors = values[1:], vectors[:, 1:]
        self._centre, height = float(values.sum()) / size, 0.45 * size / float(values[-1])
        places, step = np.linspace(0.0, 9.0, steps, retstep=True)
        u, bend = np.sinh(places), np.cosh(places)
        self._lambdas = u / self._centre + 1j * height * (1 - 1 / bend)
        jacobian = bend / self._centre + 1j * height * u / bend**2
        jacobian[0] *= 0.5
        factors = 1 + 2j * self._lambdas[:, None] * values / size
        self._amount = np.prod(factors**-0.5, axis=1) * jacobian * step / math.pi
        self.spectrum = values / factors if inverted else 1 / values + 2j * self._lambdas[:, None] / size

    def radii(self) -> Iterator[tuple[float, float, np.ndarray]]:
        """r², its weight, and the weights along the contour."""
        grid, weights = np.polynomial.legendre.leggauss(40)
        for low, high in ((-6.0, -2.0), (-2.0, 0.0), (0.0, 1.2), (1.2, 2.7)):
            for x, w in zip(0.5 * (high - low) * (grid + 1) + low, 0.5 * (high - low) * weights, strict=True):
                square = self._centre * math.exp(x)
                yield square, w * square, self._amount * np.exp(1j * self._lambdas * square)


def _sine(s: np.ndarray) -> np.ndarray:
    own = np.einsum("lii->li", s)
    both = own[:, :, None] + own[:, None, :]
    return np.asarray(0.5 * (np.exp(s - both / 2) - np.exp(-s - both / 2)))


def _hermite(s: np.ndarray) -> np.ndarray:
    """E[φφ] for the normalized third Hermite polynomial (x³ − 3x)/√6."""
    own = np.einsum("lii->li", s)
    left, right = own[:, :, None], own[:, None, :]
    return np.asarray((6 * s**3 + 9 * s * left * right - 9 * s * (left + right) + 9 * s) / 6)


_ANALYTIC.update({"identity": lambda s: s, "sin": _sine, "hermite:3": _hermite})


def _entries(label: str, computed: Array, measured: Array, error: Array) -> Series:
    upper = np.triu_indices(len(computed))
    return Series(label, computed[upper], measured[upper], error=DRAWN * error[upper])


def _diagonal(series: list[Series]) -> Series:
    every = np.concatenate([np.asarray(s.x, dtype=np.float64) for s in series])
    ends = [float(every.min()), float(every.max())]
    return Series("equal", ends, ends, role="theory")


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="meanfield2019-thm2",
        seed="meanfield2019",
        place="theorem 2 (B.8)",
        kind="theorem",
        statement="For a positively homogeneous activation of degree α, the covariance after batch norm and activation "
        "is one Laplace integral over the Gaussian map: V(Σ) = B^α/Γ(α) ∫ ds s^(α−1) V_φ(S(I + 2sS)⁻¹)/√det(I + 2sS), "
        "S = GΣG, at any covariance Σ.",
        expectations=tuple(
            Expectation(f"largest_deviation_{name}", "the integral equals the sampled map within 2%", high=0.02)
            for name in ("relu", "leaky_relu:0.2", "relu_power:2", "identity")
        ),
        settings={
            "quick": Setting({"cases": _CASES, "samples": 400_000}),
            "standard": Setting({"cases": _CASES, "samples": 4_000_000}),
        },
        measure=measure_laplace,
        paper="a theorem; no experiment",
    ),
    Claim(
        id="meanfield2019-thm3",
        seed="meanfield2019",
        place="theorem 3 (B.9), eq. 12",
        kind="theorem",
        statement="For a general activation with finite Gaussian moments V(Σ) is a double Fourier integral of the "
        "Gaussian map at the complex covariance G(Σ⁻¹ + 2iλG/B)G/r² (as printed, without an inverse).",
        expectations=_right_traces("printed"),
        correction=Correction(
            "The argument of the Gaussian map is G(Σ⁻¹ + 2iλG/B)⁻¹G/r²; eq. 36 of the appendix has the inverse.",
            (
                *(
                    Expectation(f"largest_deviation_{name}", "the integral equals the sampled map within 2%", high=0.02)
                    for name in _ANALYTIC
                ),
                *_right_traces("inverted"),
            ),
        ),
        settings={
            "quick": Setting({"batch_size": 8, "samples": 400_000, "maps": 8, "draws": 160}),
            "standard": Setting({"batch_size": 8, "samples": 1_000_000, "maps": 24, "draws": 400}),
        },
        measure=measure_fourier,
        paper="a theorem; no experiment",
        note="Eq. 12 and eq. 35 lack the inverse, eq. 36 has it.",
    ),
)
