"""Measures on the way: from the state of a batch of chains to one row of numbers per chain.

Everything that needs inner products alone comes from one Gram matrix, everything spectral from one decomposition, and
the soft rank from neither where a count of pivots is cheaper. Each value agrees with the function of
`sounding.measures` of the same name applied to the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from sounding.chain.factor import DEPENDENT_FLOAT32
from sounding.chain.inertia import count_at_least, eigenvalues, singular_values
from sounding.chain.law import ChainLaw
from sounding.chain.step import Chains, Route, multiply_each
from sounding.errors import UsageError
from sounding.measures import MEASURES, of_gram, of_spectrum

OWN = ("orthogonality_gap_squared", "frobenius_squared", "mean_absolute_cosine", "regularity", "top_eigenvalues")
PARAMETRIZED = {"soft_rank": 0.5, "top_eigenvalues": 3.0, "numerical_rank": 0.0}  # 0: at the rounding of the state
LARGE = 48  # from this size on counting pivots beats eigenvalues, and float32 slices beat a float64 product


def measure_names() -> tuple[str, ...]:
    """What `simulate` can measure: the measures of `sounding.measures`, and a chain's own."""
    return (*MEASURES, *OWN)


@dataclass(frozen=True)
class Column:
    """One number that is accumulated: a measure and its parameter."""

    name: str
    measure: str
    parameter: float = 0.0


@dataclass(frozen=True)
class Observer:
    """Which numbers are taken from a state, and how each reported measure follows from them."""

    columns: tuple[Column, ...]
    # reported measures that are ratios of two averages: name → (numerator, denominator) columns
    ratios: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def reported(self) -> dict[str, int | tuple[int, int]]:
        """Every reported measure with its column, or its two columns."""
        inner = {index for pair in self.ratios.values() for index in pair}
        plain = {column.name: i for i, column in enumerate(self.columns) if i not in inner}
        return {**plain, **self.ratios}

    @property
    def needs_spectrum(self) -> bool:
        """Whether eigenvalues must be computed."""
        return any(column.measure in SPECTRAL for column in self.columns)


def make_observer(measures: tuple[str, ...], law: ChainLaw) -> Observer:
    """The observer for measure names, each possibly with a parameter: "soft_rank:0.3", "top_eigenvalues:5"."""
    if not measures:
        raise UsageError("expected at least one measure, got none", hint=f"one of {', '.join(measure_names())}")
    columns: list[Column] = []
    ratios: dict[str, tuple[int, int]] = {}
    for spec in dict.fromkeys(measures):
        name, _, text = spec.strip().partition(":")
        if name not in measure_names() or (text and name not in PARAMETRIZED):
            raise UsageError(f"unknown measure {spec!r}", hint=f"one of {', '.join(measure_names())}")
        parameter = _parse(spec, text, default=PARAMETRIZED.get(name, 0.0))
        if name == "regularity":
            ratios[name] = (len(columns), len(columns) + 1)
            columns += [Column("squared_row_norms", "regularity_numerator"), Column("cubes", "regularity_denominator")]
        elif name == "top_eigenvalues":
            last = min(int(parameter), law.batch_size, law.width)  # there are no more
            columns += [Column(f"eigenvalue_{k}", name, k) for k in range(1, last + 1)]
        else:
            columns.append(Column(spec.strip(), name, parameter))
    return Observer(tuple(columns), ratios)


@dataclass
class View:
    """States (chains, samples, features), and what is measured of them, each computed when first asked for."""

    state: torch.Tensor
    log_scale: torch.Tensor
    route: Route
    known_gram: Callable[[], torch.Tensor] | None = None  # of chains that need their Gram matrix for the next layer too
    spectral: bool = False  # whether the spectrum is computed anyway

    @property
    def samples(self) -> int:
        return self.state.shape[-2]

    @property
    def width(self) -> int:
        return self.state.shape[-1]

    @cached_property
    def gram(self) -> torch.Tensor:
        """HHᵀ in float64."""
        return _product(self.state) if self.known_gram is None else self.known_gram()

    @cached_property
    def moment(self) -> torch.Tensor:
        """HHᵀ/n or HᵀH/n, whichever is smaller: they share their eigenvalues up to zeros."""
        state, size = self.state, min(self.samples, self.width)
        if self.samples <= self.width and (self.spectral or size <= LARGE or self.route == "gram"):
            return self.gram / self.samples
        rows = state if self.samples <= self.width else state.mT
        exact = self.spectral or size <= LARGE or state.dtype == torch.float64
        return (_product(rows) if exact else _sliced_product(rows)) / self.samples

    @property
    def coarse_moment(self) -> torch.Tensor:
        """The moment as the state's own precision gives it, where nothing finer is at hand: for counting."""
        state = self.state
        if "moment" in vars(self) or state.dtype == torch.float64 or self.route == "gram":
            return self.moment
        rows = state if self.samples <= self.width else state.mT.contiguous()
        return multiply_each(rows, rows).div_(self.samples)

    @cached_property
    def amplitudes(self) -> torch.Tensor:
        """Singular values of H/√n, descending: of the rows for float64, where the Gram matrix would lose digits."""
        found: torch.Tensor
        if self.state.dtype == torch.float64:
            found = singular_values(self.state) / self.samples**0.5
        else:
            found = eigenvalues(self.moment).clamp_min(0).sqrt()
        return found

    @property
    def eigenvalues(self) -> torch.Tensor:
        return self.amplitudes.square()

    @property
    def resolution(self) -> float:
        """Singular values below this share of the largest are rounding of the state's own numbers."""
        return of_spectrum.resolution(max(self.samples, self.width), dtype=self.state.dtype)

    @property
    def degenerate(self) -> float | None:
        """Eigenvalues below this share of the largest make a batch degenerate; None is the measures' default."""
        return None if self.state.dtype == torch.float64 else DEPENDENT_FLOAT32


def _soft_rank(view: View, threshold: float) -> torch.Tensor:
    """#{λ ≥ threshold}, by pivots where nothing else asks for the spectrum and the matrix is large."""
    if view.spectral or min(view.samples, view.width) <= LARGE:
        return of_spectrum.soft_rank(view.eigenvalues, threshold=threshold)
    return count_at_least(view.coarse_moment, threshold * (1 - of_spectrum.TIE))


def _squared_row_norms(view: View) -> torch.Tensor:
    """Tr(diag(M²)²) of M = HᵀH/n."""
    features = view.state.double()
    # with G = HHᵀ and h_j the features, (M²)_jj = h_jᵀ G h_j / n²
    rows = (features * (view.gram @ features)).sum(dim=-2) / view.samples**2
    return rows.square().sum(dim=-1)


# those that need the eigenvalues: measure → its number for every chain, from a view and the measure's parameter
SPECTRAL: dict[str, Callable[[View, float], torch.Tensor]] = {
    "numerical_rank": lambda v, share: of_spectrum.numerical_rank(v.amplitudes, tolerance=share or v.resolution),
    "condition_number": lambda v, _: of_spectrum.ratio_of_extremes(v.amplitudes, tolerance=v.resolution),
    "effective_rank": lambda v, _: of_spectrum.effective_rank(v.eigenvalues),
    "isotropy_distance": lambda v, _: of_spectrum.isotropy_distance(v.eigenvalues, samples=v.samples),
    "isometry": lambda v, _: of_spectrum.isometry(v.eigenvalues, samples=v.samples, tolerance=v.degenerate),
    "isometry_gap": lambda v, _: of_spectrum.isometry_gap(v.eigenvalues, samples=v.samples, tolerance=v.degenerate),
    "top_eigenvalues": lambda v, place: v.eigenvalues[..., int(place) - 1],
}
VALUES: dict[str, Callable[[View, float], torch.Tensor]] = {
    **SPECTRAL,
    "mean_cosine": lambda v, _: of_gram.mean_cosine(v.gram),
    "gradient_alignment": lambda v, _: of_gram.gradient_alignment(v.gram),
    "mean_absolute_cosine": lambda v, _: of_gram.gradient_alignment(v.gram),
    "distinct_share": lambda v, _: of_gram.distinct_share(v.gram),
    "soft_rank": _soft_rank,
    "participation_ratio": lambda v, _: of_gram.ratio_of(v.moment),
    "orthogonality_gap": lambda v, _: of_gram.gap_of(v.moment, samples=v.samples),
    "orthogonality_gap_squared": lambda v, _: of_gram.gap_of(v.moment, samples=v.samples).square(),
    "frobenius_squared": lambda v, _: v.moment.square().sum(dim=(-2, -1)),
    "log_norm": lambda v, _: (
        of_gram.half_log(torch.diagonal(v.moment, dim1=-2, dim2=-1).sum(dim=-1) * v.samples) + v.log_scale
    ),
    # rank2020 Definition 3 divides the average of the numerator by that of the denominator, Tr(M³)
    "regularity_numerator": lambda v, _: _squared_row_norms(v),
    "regularity_denominator": lambda v, _: (v.moment @ v.moment * v.moment).sum(dim=(-2, -1)),
}


def observe(chains: Chains | View, observer: Observer) -> torch.Tensor:
    """(chains, columns) in float64."""
    view = chains if isinstance(chains, View) else View(chains.state, chains.log_scale, chains.route, chains.gram)
    view.spectral = observer.needs_spectrum
    return torch.stack([VALUES[column.measure](view, column.parameter) for column in observer.columns], dim=-1)


def _product(rows: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return wide @ wide.mT


def _sliced_product(rows: torch.Tensor) -> torch.Tensor:
    """HHᵀ from float32 products over 128 columns each, summed in float64: as exact as a float32 state deserves."""
    total = torch.zeros((*rows.shape[:-1], rows.shape[-2]), dtype=torch.float64, device=rows.device)
    for begin in range(0, rows.shape[-1], 128):
        part = rows[..., begin : begin + 128]
        total += part @ part.mT
    return total


def _parse(spec: str, text: str, *, default: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if text and not 0 < value < float("inf"):
        raise UsageError(f"expected a positive number after the colon, got {spec!r}", hint="soft_rank:0.5")
    if spec.strip().startswith("top_eigenvalues") and value != int(value):
        raise UsageError(f"expected a whole number after the colon, got {spec!r}", hint="top_eigenvalues:3")
    return value
