"""Weight laws: moments, invariance, and the errors of a user's own law."""

from __future__ import annotations

import math

import pytest
import torch

from sounding import simulate, weights
from sounding.errors import TargetError, UsageError
from tolerance import TOLERANCE, assert_within_standard_errors


def draw(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return weights.resolve(name).draw(shape, generator=generator, dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("name", weights.names())
def test_entries_have_unit_variance_and_the_stated_mean(name):
    entries = draw(name, (400, 20, 20))
    law = weights.resolve(name)
    count = entries.numel()
    assert_within_standard_errors(float(entries.mean()), law.mean, float(entries.std()) / math.sqrt(count))
    squares = (entries - law.mean).square()
    assert_within_standard_errors(float(squares.mean()), 1.0, float(squares.std()) / math.sqrt(count) + 1e-12)


def test_uniform_laws_stay_within_their_bounds():
    assert float(draw("uniform", (100, 100)).abs().max()) <= math.sqrt(3)
    one_sided = draw("one-sided", (100, 100))
    assert float(one_sided.min()) >= 0
    assert float(one_sided.max()) <= 2 * math.sqrt(3)


def test_orthogonal_matrices_are_orthogonal_and_haar():
    """Haar: the trace of Q has mean 0 and variance 1, and det is ±1 evenly; LAPACK's own signs fail this."""
    q = draw("orthogonal", (4000, 5, 5)) / math.sqrt(5)
    assert torch.allclose(q @ q.mT, torch.eye(5, dtype=torch.float64).expand_as(q), atol=TOLERANCE.closed_form)
    traces = torch.diagonal(q, dim1=-2, dim2=-1).sum(dim=-1)
    assert_within_standard_errors(float(traces.mean()), 0.0, 1 / math.sqrt(4000))
    assert_within_standard_errors(float(traces.square().mean()), 1.0, math.sqrt(2 / 4000))
    assert_within_standard_errors(float(torch.linalg.det(q).mean()), 0.0, 1 / math.sqrt(4000))


def test_draws_repeat_with_the_generator():
    for name in weights.names():
        assert torch.equal(draw(name, (3, 4, 4), seed=1), draw(name, (3, 4, 4), seed=1))
        assert not torch.equal(draw(name, (3, 4, 4), seed=1), draw(name, (3, 4, 4), seed=2))


def signs(shape, *, generator):
    return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0


def test_a_callable_is_a_law():
    """Random signs: mean 0, variance 1. The stationary gap at this width is close to the Gaussian one."""
    settings = {"width": 64, "batch_size": 4, "depth": 120, "burn_in": 20, "runs": 8, "centring": False}
    settings["measures"] = ["orthogonality_gap"]
    own = simulate(weights=signs, generator=torch.Generator().manual_seed(0), **settings)
    gaussian = simulate(generator=torch.Generator().manual_seed(1), **settings)
    assert own.settings["weights"] == "signs"
    assert own.settings["route"] == "explicit"
    ratio = own.averages["orthogonality_gap"].value / gaussian.averages["orthogonality_gap"].value
    assert 0.9 < ratio < 1.1


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (lambda shape, *, generator: torch.rand(shape, generator=generator) * 12**0.5, "mean 0"),
        (lambda shape, *, generator: 2 * torch.randn(shape, generator=generator), "unit variance"),
        (lambda shape, *, generator: torch.full(shape, torch.nan), "finite"),
        (lambda shape, *, generator: torch.zeros(3), "shape"),
    ],
)
def test_a_law_that_is_not_one_is_refused_before_any_work(law, message):
    with pytest.raises(UsageError, match=message):
        simulate(width=4, batch_size=2, depth=1, weights=law)


def test_what_a_law_raises_is_shown():
    def broken(shape, *, generator):
        raise ZeroDivisionError("no")

    with pytest.raises(TargetError, match="ZeroDivisionError: no"):
        simulate(width=4, batch_size=2, depth=1, weights=broken)


def test_unknown_laws():
    with pytest.raises(UsageError, match="unknown weight law 'cauchy'"):
        weights.resolve("cauchy")
    with pytest.raises(UsageError, match="name of a weight law"):
        weights.resolve(3)
