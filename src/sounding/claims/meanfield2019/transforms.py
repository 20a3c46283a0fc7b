"""The forward map of batch normalization: as integrals (theorems 2 and 3), and without activation (B.11 and B.12)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import DRAWN, Number, counted, estimate, exact, mean_of, slope_of, worst
from sounding.claims.picture import Series
from sounding.claims.walk import draw_normals
from sounding.predict import covariance_map, identity_convergence
from sounding.theory.covariance_map import center


def draw_covariance(size: int, generator: torch.Generator, *, rank: int | None = None) -> Array:
    """AAᵀ/rank for a size × rank Gaussian A, times unequal variances: a covariance without any symmetry."""
    rank = rank or 2 * size
    factor = draw_normals(generator, size, rank)
    scale = torch.exp(0.5 * draw_normals(generator, size, 1))
    rows = (scale * factor).numpy()
    return np.asarray(rows @ rows.T / rank)


def normalized_batches(covariance: Array, *, samples: int, context: Context, offset: int) -> torch.Tensor:
    """x = √B·Gh/|Gh| for h ~ N(0, Σ), (samples, B), float64 on the device."""
    values, vectors = np.linalg.eigh(covariance)
    root = torch.from_numpy(vectors * np.sqrt(np.maximum(values, 0.0))).to(context.device)
    generator = context.generator(offset, device=context.device)
    normals = draw_normals(generator, samples, len(root))
    centred = normals @ root.T
    centred = centred - centred.mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).sqrt()


def sample_map(
    activation: str, covariance: Array, *, samples: int, context: Context, offset: int
) -> tuple[Array, Array]:
    """V(Σ) = E[φ(x)φ(x)ᵀ] by Monte Carlo, and the standard error of each entry, both (B, B)."""
    x = normalized_batches(covariance, samples=samples, context=context, offset=offset)
    phi = resolve(activation).torch()(x)
    mean = phi.mT @ phi / samples
    square = (phi * phi).mT @ (phi * phi) / samples
    error = ((square - mean * mean).clamp_min(0) / samples).sqrt()
    return mean.cpu().numpy(), error.cpu().numpy()


def largest_deviation(computed: Array, measured: Array, error: Array) -> Number:
    """The largest |computed − measured| over all entries, relative to the largest entry, with the interval of that one.

    The maximum over many entries of pure noise is some three standard errors, so its interval reaches down to 0 and
    its upper end is what a bound is held against.
    """
    unit = float(np.abs(measured).max())
    gap = np.abs(computed - measured)
    at = int(gap.argmax())
    return estimate(float(gap.flat[at]) / unit, float(error.flat[at]) / unit)


def widest(deviations: Sequence[Number]) -> Number:
    """The largest of some deviations; each end of its interval is the largest of theirs."""
    return Number(*(max(getattr(each, end) for each in deviations) for end in ("value", "low", "high")))


TRACE_TOLERANCE = 0.01  # relative: the integral leaves 1e-5, and the printed formula is off by a factor of ten


def measure_laplace(values: Values, context: Context) -> Outcome:
    """Theorem 2 beside sampled batches, at covariances without symmetry."""
    numbers, series = {}, []
    for place, (name, size) in enumerate(values["cases"]):
        sigma = draw_covariance(size, context.generator(place))
        computed = covariance_map(name, sigma).covariance
        measured, error = sample_map(name, sigma, samples=values["samples"], context=context, offset=100 + place)
        numbers[f"largest_deviation_{name}"] = largest_deviation(computed, measured, error)
        series.append(_entries(f"{name}, B = {size}", computed, measured, error))
    return present(numbers, (*series, _diagonal(series)))


def measure_fourier(values: Values, context: Context) -> Outcome:
    """Theorem 3 with and without the inverse, by contour integration, beside sampled batches."""
    size = values["batch_size"]
    numbers, series = {}, []
    sigmas = [draw_covariance(size, context.generator(draw)) for draw in range(values["maps"])]
    for place, (name, gaussian_map) in enumerate(_ANALYTIC.items()):
        deviations = []
        for draw, sigma in enumerate(sigmas):
            computed = fourier_map(gaussian_map, sigma, steps=401)
            offset = 100 + 10_000 * draw + place
            measured, error = sample_map(name, sigma, samples=values["samples"], context=context, offset=offset)
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
    series.append(_diagonal(series))
    least, largest = (size * float(end(traces["printed"])) for end in (np.min, np.max))
    return present(numbers, series, least_trace=least, largest_trace=largest)


def count_wrong_traces(reading: str, ratios: Array) -> dict[str, Number]:
    """How many of the traces, given over B, are not 1, and their share among fresh covariances."""
    errors = np.abs(ratios - 1)
    numbers = counted(f"wrong_traces_{reading}", errors > TRACE_TOLERANCE)
    return numbers | {f"largest_error_of_trace_{reading}": worst(errors)}


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
        values, self.vectors = values[1:], vectors[:, 1:]  # without the constant vector, whose eigenvalue is 0
        # lifted nine tenths of the way to the nearest singularity, at B/(2s) on the imaginary axis
        self._centre, height = float(values.sum()) / size, 0.45 * size / float(values[-1])
        places, step = np.linspace(0.0, 9.0, steps, retstep=True)
        u, bend = np.sinh(places), np.cosh(places)
        self._lambdas = u / self._centre + 1j * height * (1 - 1 / bend)
        jacobian = bend / self._centre + 1j * height * u / bend**2
        jacobian[0] *= 0.5  # the trapezoid rule begins at λ = 0, the middle of the whole line
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


# a spread that falls by less than this share, or an eigenvalue that stays this far from the limit, is a failure
ROUNDING = 1e-6


def measure_unit_vectors(values: Values, context: Context) -> Outcome:
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


def measure_centred(values: Values, context: Context) -> Outcome:
    """The eigenvalues under batch norm layer by layer, from random covariances of full and of low rank.

    One start of each rank is also followed by `identity_convergence`, which shares no code with `follow`.
    """
    size = values["batch_size"]
    paths: dict[int, Array] = {}
    deviations: list[Number] = []
    apart = 0.0
    for rank in values["ranks"]:
        kept = min(rank, size - 1)  # centring takes a direction from a covariance of full rank
        sources = [context.generator(1000 * start + rank) for start in range(values["starts"])]
        drawn = [draw_covariance(size, source, rank=rank) for source in sources]
        spectra: Array = np.linalg.eigvalsh(np.array([center(sigma) for sigma in drawn]))[:, -kept:].astype(np.float64)
        paths[kept] = follow(spectra, layers=values["layers"], total=size)
        own = identity_convergence(drawn[0], depth=values["layers"]).eigenvalues
        apart = max(apart, float(np.abs(own[1:] - paths[kept][1:, 0]).max()))
        _, vectors = np.linalg.eigh(center(drawn[0]))
        range_of = vectors[:, -kept:]
        rows = normalized_batches(drawn[0], samples=values["samples"], context=context, offset=2000 + rank).numpy()
        deviations.append(_deviate(range_of * (size * project_spectrum(spectra[0])) @ range_of.T, rows))
    return _judge_spreads(paths, deviations, total=size, largest_difference_of_maps=exact(apart, error=1e-9))


def follow(starts: Array, *, layers: int, total: float = 1.0) -> Array:
    """The spectra (layers + 1, starts, C) under `total` times `project_spectrum`, descending."""
    path = [starts]
    for _ in range(layers):
        path.append(total * project_spectrum(path[-1]))
    return np.sort(np.array(path), axis=2)[:, :, ::-1]


def project_spectrum(eigenvalues: Array) -> Array:
    """E[h_i²/|h|²] for independent h_i of the given variances: ∫₀^∞ dᵢ/(1+2sdᵢ) Π(1+2sdⱼ)^(−1/2) ds, in ln s.

    The last axis counts the variances, the ones before it different h.
    """
    logs, step = np.linspace(-34.0, 46.0, 200, retstep=True)
    logs = logs - np.log(eigenvalues.max(axis=-1))[..., None]
    shrinks = 1 + 2 * np.exp(logs)[..., None] * eigenvalues[..., None, :]
    weight = np.exp(logs - 0.5 * np.log(shrinks).sum(axis=-1)) * step
    return np.asarray(eigenvalues * (weight[..., None, :] @ (1 / shrinks))[..., 0, :])


def _normals(shape: tuple[int, ...], context: Context, *, offset: int) -> Array:
    return np.asarray(draw_normals(context.generator(offset), *shape).numpy())


def _deviate(computed: Array, rows: Array) -> Number:
    """The mean of xxᵀ over the rows x beside `computed`, in every entry: its eigenvectors are those computed."""
    mean, square = (part.T @ part / len(rows) for part in (rows, rows**2))
    return largest_deviation(computed, mean, np.sqrt(np.maximum(square - mean**2, 0.0) / len(rows)))


def _judge_spreads(paths: Mapping[int, Array], deviations: list[Number], *, total: int, **more: Number) -> Outcome:
    """Numbers over all starts, and `more`; of each rank the first one is drawn. The eigenvalues sum to `total`."""
    numbers: dict[str, Number] = {}
    series: list[Series] = []
    worst, distances = [], []
    for rank, path in paths.items():
        spreads = (path[:, :, 0] - path[:, :, -1]).T
        layers = np.arange(spreads.shape[1])
        rates = []
        for spread in spreads:
            kept = spread > 1e-9 * spread[0]  # below, rounding
            worst.append(float((spread[2:][kept[2:]] / spread[1:-1][kept[2:]]).max()))
            late = kept & (spread < 1e-5 * spread[0])  # where the fall is that of the last mode
            late[:3] = False
            if late.sum() < 3:  # it does not contract as far as to have a rate
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
    return present(numbers | more, series)


def count_failures(ratios: Array, distances: Array) -> dict[str, Number]:
    """How many starts break the statement, their share among fresh ones, and the extremes.

    Of each start: the largest ratio of a spread to that before, the relative distance of its end from the limit.
    """
    return counted("starts_that_fail", (ratios >= 1 - ROUNDING) | (distances > ROUNDING)) | {
        "largest_ratio_of_spreads": worst(ratios, dealt=True),  # starts come by rank
        "largest_distance_from_limit": worst(distances, dealt=True),
    }
