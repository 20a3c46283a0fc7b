"""What every measure promises: batching, dtypes, gradients, awkward inputs, sentences for bad ones; check_measure."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batches import batches
from sounding import measures
from sounding.errors import UsageError
from sounding.measures import check_measure, of_gram, of_spectrum
from sounding.measures.inputs import power_of_two_below
from test_measures import OF_FEATURES, SCALE_FREE, close, value_of
from tolerance import TOLERANCE

NAMES = sorted(measures.MEASURES)
TOLERANT = {"numerical_rank", "condition_number", "isometry", "isometry_gap"}
COUNTS = {"numerical_rank", "soft_rank"}
BOUNDS = {
    "numerical_rank": lambda n, d: (0, min(n, d)),
    "soft_rank": lambda n, d: (0, min(n, d)),
    "participation_ratio": lambda n, d: (0, min(n, d)),
    "effective_rank": lambda n, d: (0, min(n, d)),
    "orthogonality_gap": lambda n, d: (math.sqrt(max(1 / d - 1 / n, 0)), math.sqrt(1 - 1 / n)),
    "isometry": (0, 1),
    "isometry_gap": (0, math.inf),
    "mean_cosine": lambda n, d: (-1 / max(n - 1, 1), 1),
    "gradient_alignment": (0, 1),
    "distinct_share": (0, 1),
    "condition_number": (1, math.inf),
    "log_norm": None,
    "isotropy_distance": lambda n, d: (0, max(1, math.sqrt(2 - 2 / math.sqrt(n)))),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_measure_passes_the_public_check(name: str) -> None:
    report = check_measure(
        measures.MEASURES[name],
        takes="features" if name in OF_FEATURES else "gram",
        bounds=BOUNDS[name],
        scale_invariant=name in SCALE_FREE or name not in OF_FEATURES,
        differentiable=name not in COUNTS,
    )
    assert report.passed, str(report)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"log_norm"}))
def test_every_measure_of_a_gram_matrix_passes_the_public_check(name: str) -> None:
    """With one tolerance for both dtypes, as a float32 Gram matrix is otherwise taken for exact to float32 only."""
    scale_free = name in SCALE_FREE or name not in OF_FEATURES
    measure = getattr(of_gram, name)
    if name in TOLERANT:
        measure = functools.partial(measure, tolerance=1e-5)
    report = check_measure(measure, takes="gram", scale_invariant=scale_free, differentiable=name not in COUNTS)
    assert report.passed, str(report)


AWKWARD = {
    "zero": torch.zeros(3, 4, dtype=torch.float64),
    "rank one": torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, -1.0, 2.0])).double(),
    "repeated": torch.tensor([[1.0, 2.0, 2.0, 0.0]], dtype=torch.float64).repeat(3, 1),
    "one sample": torch.tensor([[3.0, 4.0, 0.0, 0.0]], dtype=torch.float64),
}
# zero, rank one with positive factors, repeated, one sample; 3 samples each but the last
DEFINED = {
    "numerical_rank": (0, 1, 1, 1),
    "soft_rank": (0, 1, 1, 1),
    "participation_ratio": (0, 1, 1, 1),
    "effective_rank": (0, 1, 1, 1),
    "orthogonality_gap": (math.sqrt(2 / 3), math.sqrt(2 / 3), math.sqrt(2 / 3), 0),
    "isometry": (0, 0, 0, 1),
    "isometry_gap": (math.inf, math.inf, math.inf, 0),
    "mean_cosine": (0, 1, 1, 0),
    "gradient_alignment": (0, 1, 1, 0),
    "distinct_share": (0, 1 - 4 / (14 / 3), 0, 0),
    "condition_number": (math.inf, math.inf, math.inf, 1),
    "log_norm": (-math.inf, math.log(math.sqrt(14 * 6)), math.log(math.sqrt(27)), math.log(5)),
    "isotropy_distance": (1, math.sqrt(2 - 2 / math.sqrt(3)), math.sqrt(2 - 2 / math.sqrt(3)), 0),
}


@pytest.mark.parametrize("name", NAMES)
def test_awkward_batches_have_the_documented_values(name: str) -> None:
    for (kind, batch), expected in zip(AWKWARD.items(), DEFINED[name], strict=True):
        assert close(value_of(name, batch), expected), kind


@pytest.mark.parametrize("name", NAMES)
def test_non_finite_batches_give_nan_and_leave_their_neighbours_alone(name: str) -> None:
    good = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nan, infinite = good.clone(), good.clone()
    nan[1, 2], infinite[0, 0] = math.nan, -math.inf
    stack = torch.stack([good, nan, infinite])
    values = measures.MEASURES[name](stack if name in OF_FEATURES else measures.gram(stack))
    assert close(values[0], value_of(name, good))
    assert values[1:].isnan().all()
    assert getattr(of_gram, name)(measures.gram(stack))[1:].isnan().all()


def test_a_spectrum_with_nan_gives_nan_not_rank_zero() -> None:
    gram = torch.full((2, 3, 3), math.nan)
    gram[0] = torch.eye(3)
    eigenvalues = of_gram.spectrum(gram)
    names = ["numerical_rank", "soft_rank", "participation_ratio", "effective_rank", "orthogonality_gap"]
    for name in [*names, "isometry", "isometry_gap", "condition_number", "isotropy_distance"]:
        values = getattr(of_spectrum, name)(eigenvalues)
        assert not values[0].isnan(), name
        assert values[1].isnan(), name
    assert measures.spectrum(torch.full((2, 2), math.inf)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_every_floating_dtype_is_read_and_float64_returned(name: str, dtype: torch.dtype) -> None:
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    measure = measures.MEASURES[name]
    given = batch if name in OF_FEATURES else measures.gram(batch).to(dtype)
    value = measure(given)
    assert value.dtype == torch.float64
    assert close(value, measure(given.double()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_full_rank_batch_in_16_bits_keeps_its_rank(dtype: torch.dtype) -> None:
    """max(samples, features) · eps is 2 here for bfloat16: torch's rule would find rank 0."""
    batch = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert measures.numerical_rank(batch) == 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_numerical_rank_is_that_of_torch(dtype: torch.dtype, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(8, rank, dtype=dtype, generator=generator) @ torch.randn(
        rank, 12, dtype=dtype, generator=generator
    )
    assert measures.numerical_rank(batch) == torch.linalg.matrix_rank(batch) == rank
    assert (measures.condition_number(batch) == math.inf) == (rank < 8)


def test_a_tolerance_is_relative_to_what_the_function_is_given() -> None:
    batch = torch.diag(torch.tensor([1.0, 1e-3], dtype=torch.float64))
    assert measures.numerical_rank(batch, tolerance=1e-2) == 1
    assert measures.numerical_rank(batch, tolerance=1e-4) == 2
    assert of_gram.numerical_rank(measures.gram(batch), tolerance=1e-4) == 1
    assert measures.isometry(measures.gram(batch), tolerance=1e-4) == 0
    assert measures.condition_number(batch, tolerance=1e-2) == math.inf
    tiny = torch.diag(torch.tensor([1.0, 1e-200], dtype=torch.float64))
    assert close(measures.condition_number(tiny, tolerance=0.0) / 1e200, 1)


def test_a_dependent_batch_is_degenerate_also_when_its_gram_matrix_came_in_float32() -> None:
    generator = torch.Generator().manual_seed(5)
    batch = torch.randn(12, 5, generator=generator) @ torch.randn(5, 40, generator=generator)
    assert measures.isometry_gap(batch @ batch.T) == math.inf
    assert of_gram.numerical_rank(batch @ batch.T) == 5
    assert (of_gram.spectrum(batch @ batch.T) > 0).sum() == 5


@given(batches(), st.sampled_from(sorted(set(OF_FEATURES) - COUNTS)))
def test_gradients_are_finite_on_batches_of_every_rank(batch: Tensor, name: str) -> None:
    leaf = batch.clone().requires_grad_()
    measures.MEASURES[name](leaf).backward()
    assert torch.isfinite(leaf.grad).all()


DIFFERENTIABLE = sorted(set(NAMES) - COUNTS)


@given(batches(full_rank=True, min_samples=2), st.sampled_from(DIFFERENTIABLE), st.integers(0, 2**31))
def test_gradients_agree_with_finite_differences(batch: Tensor, name: str, seed: int) -> None:
    """Along a random direction, where the measure is smooth: not at |cos| = 0 and not at the orthogonal batch."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(batch.shape, dtype=torch.float64, generator=generator)
    batch = batch / batch.norm() * 3 + 0.1 * torch.randn(batch.shape, dtype=torch.float64, generator=generator)
    measure = measures.MEASURES[name]

    def value(point: Tensor) -> Tensor:
        return measure(point if name in OF_FEATURES else measures.gram(point))

    leaf = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf), leaf)
    step = 1e-6
    difference = (value(batch + step * direction) - value(batch - step * direction)) / (2 * step)
    smooth = (value(batch + step * direction) + value(batch - step * direction) - 2 * value(batch)).abs() < 1e-8
    if smooth:
        scale = 1 + gradient.norm() * direction.norm()
        assert abs(float((gradient * direction).sum() - difference)) <= TOLERANCE.finite_difference * float(scale)


def test_gradients_flow_back_to_float32() -> None:
    leaf = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    measures.effective_rank(leaf).backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32


def test_climbing_the_participation_ratio_orthogonalizes() -> None:
    """The pre-training of rank2020 section 4 climbs this gradient: it must lead from nearly collinear to orthogonal."""
    generator = torch.Generator().manual_seed(0)
    batch = 1 + 0.1 * torch.randn(4, 6, dtype=torch.float64, generator=generator)
    batch.requires_grad_()
    for _ in range(200):
        (gradient,) = torch.autograd.grad(measures.participation_ratio(batch), batch)
        batch = (batch + 0.5 * gradient).detach().requires_grad_()
    assert measures.participation_ratio(batch) > 3.9


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[1.0, 2.0]], "torch.Tensor .* got list"),
        (torch.ones(3, 3, dtype=torch.int64), "integer .*int64"),
        (torch.ones(3, 3, dtype=torch.bool), "boolean .*bool"),
        (torch.ones(3, 3, dtype=torch.complex64), "complex .*complex64"),
        (torch.ones(3), r"got \(3,\)"),
        (torch.ones(0, 3), r"got shape \(0, 3\)"),
        (torch.ones(3, 0), r"got shape \(3, 0\)"),
    ],
)
@pytest.mark.parametrize("name", [*NAMES, "gram", "second_moment", "spectrum", "singular_values"])
def test_bad_input_is_answered_with_a_sentence(name: str, bad: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        getattr(measures, name)(bad)


def test_features_where_a_gram_matrix_is_due() -> None:
    with pytest.raises(UsageError, match=r"square Gram matrix.*got shape \(3, 4\).*gram\(features\)"):
        measures.isometry(torch.randn(3, 4))
    with pytest.raises(UsageError, match="symmetric"):
        measures.isometry_gap(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="threshold above 0, got 0"):
        measures.soft_rank(torch.eye(2), threshold=0)
    with pytest.raises(UsageError, match=r"tolerance .* got -1"):
        measures.numerical_rank(torch.eye(2), tolerance=-1)
    for function in (measures.effective_rank, of_spectrum.effective_rank):
        with pytest.raises(UsageError, match="got 'rows'"):
            function(torch.eye(2), of="rows")
    with pytest.raises(UsageError, match="takes='rows'"):
        check_measure(measures.log_norm, takes="rows")  # type: ignore[arg-type]


def test_an_empty_leading_axis_gives_an_empty_result() -> None:
    for name in OF_FEATURES:
        assert measures.MEASURES[name](torch.zeros(0, 3, 4)).shape == (0,)


FAULTY = {
    "leaves its input alone": lambda h: h.mul_(2).sum((-1, -2)),
    "batches over leading axes": lambda h: h.square().sum(),
    "reads float32": lambda h: h.sum((-1, -2)) if h.dtype == torch.float64 else h.sum((-1, -2)) + 1,
    "defined on degenerate batches": lambda h: (h / h.norm(dim=(-1, -2), keepdim=True)).square().sum((-1, -2)),
    "within its bounds": lambda h: h.square().sum((-1, -2)),
    "scale-invariant": lambda h: h.square().sum((-1, -2)),
    "rotation-invariant": lambda h: h.abs().sum((-1, -2)),
    "permutation-invariant": lambda h: h[..., 0, :].square().sum(-1),
    "gradient agrees with differences": lambda h: h.square().sum((-1, -2)) * h.detach().square().sum((-1, -2)),
    "gradient finite on degenerate batches": lambda h: h.square().sum((-1, -2)).sqrt(),
}


@pytest.mark.parametrize("name", sorted(FAULTY))
def test_check_measure_finds_each_fault(name: str) -> None:
    """Every check can fail, and the one that must does."""
    report = check_measure(FAULTY[name], bounds=(0, 1), scale_invariant=True)
    failed = {check.name: check for check in report.failures}
    assert name in failed, str(report)
    assert failed[name].detail
    assert isinstance(failed[name].example, Tensor)
    assert not report.passed


def test_check_measure_reports_what_the_measure_raised_or_returned() -> None:
    raising = check_measure(lambda h: h @ torch.ones(999))
    assert "raised RuntimeError" in str(raising)
    numbers = check_measure(lambda h: 1.0)  # type: ignore[arg-type, return-value]
    assert "expected a tensor of a floating dtype, got float" in str(numbers)
    with pytest.raises(dataclasses.FrozenInstanceError):
        numbers.measure = "other"  # type: ignore[misc]


def test_check_measure_takes_a_generator_and_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    assert check_measure(measures.log_norm, generator=torch.Generator().manual_seed(7)).passed
    assert torch.equal(before, torch.get_rng_state())


def test_powers_of_two_are_exact_over_the_whole_range() -> None:
    exponents = range(-1074, 1024)
    powers = torch.tensor([math.ldexp(1.0, exponent) for exponent in exponents], dtype=torch.float64)
    assert torch.equal(power_of_two_below(powers), powers)
    inside = powers[53:-1] * 1.75
    assert torch.equal(power_of_two_below(inside), powers[53:-1])
    assert power_of_two_below(torch.tensor([1.7976931348623157e308], dtype=torch.float64)) == 2.0**1023
