"""What is measured on the way equals the reference measures; counts by pivots equal counts by eigenvalues."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from sounding import measures, simulate
from sounding.chain import measure_names
from sounding.chain.inertia import count_by_blocks, count_by_pivots
from sounding.chain.law import make_law
from sounding.chain.observe import View, make_observer, observe
from sounding.chain.record import BatchMeans
from sounding.errors import UsageError
from tolerance import TOLERANCE

OWN = ("orthogonality_gap_squared", "frobenius_squared", "mean_absolute_cosine")


def measured(state: torch.Tensor, names: tuple[str, ...], *, route: str = "explicit") -> dict[str, torch.Tensor]:
    law = make_law(width=state.shape[-1], batch_size=state.shape[-2], centring=False)
    observer = make_observer(names, law)
    values = observe(View(state, torch.zeros(len(state), dtype=torch.float64), route), observer)
    return {column.name: values[:, index] for index, column in enumerate(observer.columns)}


@pytest.mark.parametrize(("samples", "width"), [(4, 20), (20, 20), (30, 8), (1, 5), (60, 70), (90, 60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_measure_equals_its_reference(samples, width, dtype):
    state = torch.randn(3, samples, width, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = measured(state, tuple(measures.MEASURES))
    for name, reference in measures.MEASURES.items():
        on_gram = name in ("isometry", "isometry_gap")
        expected = reference(measures.gram(state.double()) if on_gram else state)
        tolerance = TOLERANCE.two_routes if dtype == torch.float64 else TOLERANCE.float32_forward
        assert torch.allclose(found[name], expected, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("name", tuple(measures.MEASURES))
def test_each_measure_alone_equals_its_reference(name):
    """Alone, large soft ranks go by pivots and large Gram matrices by float32 slices."""
    state = torch.randn(2, 64, 80, generator=torch.Generator().manual_seed(1))
    on_gram = name in ("isometry", "isometry_gap")
    expected = measures.MEASURES[name](measures.gram(state.double()) if on_gram else state)
    assert torch.allclose(measured(state, (name,))[name], expected, rtol=TOLERANCE.float32_forward), name


def test_the_chains_own_measures():
    state = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moment = state.mT @ state / 6
    found = measured(state, (*OWN, "top_eigenvalues:4"))
    assert torch.allclose(found["orthogonality_gap_squared"], measures.orthogonality_gap(state).square())
    assert torch.allclose(found["frobenius_squared"], moment.square().sum(dim=(-2, -1)))
    assert torch.allclose(found["mean_absolute_cosine"], measures.gradient_alignment(state))
    top = torch.linalg.eigvalsh(moment).flip(-1)
    for k in range(4):
        assert torch.allclose(found[f"eigenvalue_{k + 1}"], top[:, k])
    parts = measured(state, ("regularity",))
    cube = torch.diagonal(moment @ moment @ moment, dim1=-2, dim2=-1).sum(-1)
    rows = torch.diagonal(moment @ moment, dim1=-2, dim2=-1).square().sum(-1)
    assert torch.allclose(parts["cubes"], cube)
    assert torch.allclose(parts["squared_row_norms"], rows)


def test_regularity_is_a_ratio_of_averages():
    """rank2020 Definition 3 divides expectations; the average of ratios is another number."""
    settings = {"width": 6, "batch_size": 6, "depth": 400, "centring": False, "residual": 0.5}
    result = simulate(**settings, measures=["regularity"], generator=torch.Generator().manual_seed(3), profile=True)
    assert 0 < result.averages["regularity"].stderr < 0.05
    first = result.profile.value("regularity", layer=1)
    assert first.stderr is None
    assert 0 < first.value <= 1.000001


def test_infinite_measures_stay_infinite_when_runs_are_merged():
    result = simulate(
        width=8, batch_size=4, depth=5, runs=2, profile=True, measures=["isometry_gap"],
        generator=torch.Generator().manual_seed(7),
    )  # fmt: skip
    assert result.averages["isometry_gap"].value == math.inf
    assert np.all(result.profile.series("isometry_gap").value[1:] == math.inf)


@given(st.integers(1, 90), st.floats(0.05, 3.0), st.integers(0, 2**31))
def test_pivots_and_blocks_count_eigenvalues(size, threshold, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, size, size + 3, generator=generator, dtype=torch.float64)
    matrix = rows @ rows.mT / size
    shifted = matrix - threshold * torch.eye(size, dtype=torch.float64)
    expected = (torch.linalg.eigvalsh(matrix) >= threshold).sum(dim=-1).double()
    assert torch.equal(count_by_pivots(shifted), expected)
    assert torch.equal(count_by_blocks(shifted), expected)


def test_counting_survives_degenerate_blocks():
    """A leading block of zeros, and a matrix that is a multiple of the identity."""
    pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    swap = torch.kron(pair, torch.eye(40, dtype=torch.float64))[None]
    assert count_by_pivots(swap) == count_by_blocks(swap) == 40
    flat = -0.5 * torch.eye(70, dtype=torch.float64)[None]
    assert count_by_pivots(flat) == count_by_blocks(flat) == 0


def test_unknown_measures_are_named_with_the_known_ones():
    with pytest.raises(UsageError, match=r"unknown measure 'rank'.*orthogonality_gap"):
        simulate(width=4, batch_size=2, depth=1, measures=["rank"])
    with pytest.raises(UsageError, match="positive number"):
        simulate(width=4, batch_size=2, depth=1, measures=["soft_rank:x"])
    assert set(measures.MEASURES) <= set(measure_names())


def autoregressive(correlation: float, *, runs: int, layers: int, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal((runs, layers))
    first = correlation * rng.standard_normal((runs, 1)) / math.sqrt(1 - correlation**2)
    return lfilter([1.0], [1.0, -correlation], noise, axis=1, zi=first)[0]


def batch_means(values: np.ndarray, batches: int) -> BatchMeans:
    index = np.arange(values.shape[1]) * batches // values.shape[1]
    sums = np.stack([np.bincount(index, weights=row, minlength=batches) for row in values])
    counts = np.tile(np.bincount(index, minlength=batches).astype(float), (len(values), 1))
    return BatchMeans(sums[..., None], counts)


@pytest.mark.parametrize("correlation", [0.0, 0.9, 0.97])
@pytest.mark.parametrize(("runs", "layers", "batches"), [(1, 6400, 64), (8, 1600, 64), (80, 200, 1)])
def test_standard_errors_respect_autocorrelation(correlation, runs, layers, batches):
    """Over repetitions, mean/stderr of a correlated sequence of mean 0 has a spread of about 1, not √((1+ρ)/(1−ρ))."""
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(200):
        means = batch_means(autoregressive(correlation, runs=runs, layers=layers, rng=rng), batches)
        scores.append(means.mean(0) / means.standard_error(0))
    assert 0.8 < np.std(scores) < 1.35


def test_the_reported_depth_reaches_the_wanted_error():
    settings = {"width": 16, "batch_size": 4, "centring": False, "burn_in": 20, "measures": ["orthogonality_gap"]}
    first = simulate(depth=2000, generator=torch.Generator().manual_seed(4), **settings)
    error = first.averages["orthogonality_gap"].stderr / 2
    depth = first.needed_depth("orthogonality_gap", error=error)
    assert abs(depth - (20 + 4 * 1980)) <= 2
    second = simulate(depth=depth, generator=torch.Generator().manual_seed(5), **settings)
    assert second.averages["orthogonality_gap"].stderr == pytest.approx(error, rel=3.5 * TOLERANCE.rough)


def test_reported_errors_cover_the_truth():
    """Forty short runs against one long run: their z-scores spread like a standard normal's."""
    settings = {"width": 12, "batch_size": 4, "centring": False, "burn_in": 20, "measures": ["orthogonality_gap"]}
    truth = simulate(depth=400, runs=400, generator=torch.Generator().manual_seed(6), **settings)
    scores = []
    for seed in range(40):
        short = simulate(depth=300, generator=torch.Generator().manual_seed(100 + seed), **settings)
        estimate = short.averages["orthogonality_gap"]
        scores.append((estimate.value - truth.averages["orthogonality_gap"].value) / estimate.stderr)
    assert 0.7 < np.std(scores) < 1.4
    assert abs(np.mean(scores)) < TOLERANCE.standard_errors / math.sqrt(40)
