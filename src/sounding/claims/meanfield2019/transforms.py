"""The forward map of batch normalization as a Laplace and as a Fourier integral: Theorems 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.meanfield2019.sampled import draw_covariance, largest_deviation, sample_map, widest
from sounding.claims.number import DRAWN, GROUPS, Number, exact, extreme_of, fraction_of, mean_of
from sounding.claims.picture import Panel, Picture, Series
from sounding.predict import covariance_map
from sounding.theory.covariance_map import center

TRACE_TOLERANCE = 0.01  # relative: the integral leaves 1e-5, and the printed formula is off by a factor of ten


def measure_laplace(values: Mapping[str, Any], context: Context) -> Outcome:
    """Theorem 2 beside sampled batches, at covariances without symmetry."""
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


ComplexMap = Callable[[np.ndarray], np.ndarray]


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


_ANALYTIC: dict[str, ComplexMap] = {"identity": lambda s: s, "sin": _sine, "hermite:3": _hermite}


def _entries(label: str, computed: Array, measured: Array, error: Array) -> Series:
    upper = np.triu_indices(len(computed))
    return Series(label, computed[upper], measured[upper], error=DRAWN * error[upper])


def _diagonal(series: list[Series]) -> Series:
    every = np.concatenate([np.asarray(s.x, dtype=np.float64) for s in series])
    ends = [float(every.min()), float(every.max())]
    return Series("equal", ends, ends, role="theory")
