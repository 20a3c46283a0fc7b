"""Factors of Gram matrices: exact on regular ones, and without invented directions on singular ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sounding import simulate
from sounding.chain.factor import factor_gram, factor_rows, whiten
from sounding.chain.law import make_law
from sounding.chain.step import Chains
from tolerance import TOLERANCE


def gram_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.double() @ rows.double().mT


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**31))
def test_the_factor_reproduces_matrices_of_every_rank(samples, width, seed):
    rows = torch.randn(3, samples, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gram = gram_of(rows)
    factor = factor_gram(gram)
    error = (factor @ factor.mT - gram).abs().amax() / gram.abs().amax()
    # beyond the rank, a sample's last 3e-7 (the root of the tolerance) may be dropped
    assert error < (TOLERANCE.exact if samples < width // 2 else 1e-6)
    assert torch.equal(factor, factor.tril())


@pytest.mark.parametrize("samples", [6, 40])
def test_repeated_samples_get_no_direction_of_their_own(samples):
    distinct = torch.randn(samples // 2, 64, generator=torch.Generator().manual_seed(0))
    rows = distinct[torch.arange(samples) % (samples // 2)]
    factor = factor_gram(gram_of(rows))
    assert int((torch.diagonal(factor) > 0).sum()) == samples // 2
    assert torch.allclose(factor[: samples // 2], factor[samples // 2 :], rtol=0, atol=TOLERANCE.two_routes)


def test_a_centred_batch_of_any_size_has_one_direction_less():
    for samples in (5, 60):
        rows = torch.randn(2, samples, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        rows -= rows.mean(dim=-2, keepdim=True)
        factor = factor_gram(gram_of(rows))
        assert torch.equal(factor[:, -1, -1], torch.zeros(2, dtype=torch.float64))
        assert torch.allclose(factor @ factor.mT, gram_of(rows))


def test_rows_resolve_what_the_gram_matrix_squares_away():
    """Samples 1e-10 apart: the Gram matrix sees one direction, the QR of the rows still two."""
    generator = torch.Generator().manual_seed(2)
    common = torch.randn(1, 50, generator=generator, dtype=torch.float64)
    rows = common + 1e-10 * torch.randn(3, 50, generator=generator, dtype=torch.float64)
    small = factor_rows(rows).diagonal().abs()[1:] / rows.norm(dim=1)[1:]
    assert bool((small > 1e-12).all())
    assert bool((small < TOLERANCE.two_routes).all())
    assert bool((factor_gram(gram_of(rows)).diagonal()[1:] == 0).all())


def test_rows_keep_repeated_samples_together():
    rows = torch.randn(2, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[[0, 1, 0]]
    factor = factor_rows(rows)
    assert factor[2, 2] == 0
    assert torch.allclose(factor @ factor.mT, rows @ rows.mT)


def test_whitened_normals_are_orthonormal():
    normals = torch.randn(4, 7, 30, generator=torch.Generator().manual_seed(4))
    frame = whiten(normals) @ normals.double()
    assert torch.allclose(
        frame @ frame.mT, torch.eye(7, dtype=torch.float64).expand(4, 7, 7), atol=TOLERANCE.two_routes
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("runs", [2, 100])
def test_rank_k_stays_rank_k_for_hundreds_of_layers(dtype, runs):
    """Batch norm pulls samples apart exponentially fast, so rounding must never make repeated samples differ."""
    result = simulate(
        width=24, batch_size=8, depth=400, burn_in=300, runs=runs, input="repeated:3", centring=False, dtype=dtype,
        measures=["numerical_rank", "effective_rank"], generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    assert result.averages["numerical_rank"].value == 3
    assert result.averages["effective_rank"].value < 3 + 1e-6


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("samples", [5, 21])
def test_repeated_samples_stay_equal_to_the_last_bit(explicit, samples):
    law = make_law(width=30, batch_size=samples, centring=False, activation="relu")
    generator = torch.Generator().manual_seed(7)
    state = torch.randn(20, 2, 30, generator=generator)[:, torch.arange(samples) % 2]
    route = "explicit" if explicit else "gram"
    chains = Chains([law] * 20, state, route=route, generator=generator)
    for _ in range(100):
        chains.step()
    assert torch.equal(chains.state[:, 0], chains.state[:, 2])
    assert torch.equal(chains.state[:, 1], chains.state[:, 3])
    assert not torch.equal(chains.state[:, 0], chains.state[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearly_collinear_samples_are_pulled_apart_at_the_same_pace_by_both_routes(dtype):
    """The way out of 1e-5 (float32) or 1e-9 (float64) takes equally many layers on average."""
    eps = 1e-5 if dtype == torch.float32 else 1e-9
    law = make_law(width=32, batch_size=3, centring=False)
    layers = {}
    for route in ("gram", "explicit"):
        generator = torch.Generator().manual_seed(6)
        common = torch.randn(300, 1, 32, generator=generator, dtype=dtype)
        state = common + eps * torch.randn(300, 3, 32, generator=generator, dtype=dtype)
        chains = Chains([law] * 300, state, route=route, generator=generator)
        steps = torch.zeros(300)
        for _ in range(80):
            chains.step()
            gram = chains.gram()
            steps += gram[:, 0, 1] / 32 > 0.5
        layers[route] = steps
    means = {route: float(steps.mean()) for route, steps in layers.items()}
    error = sum(float(steps.var()) / 300 for steps in layers.values()) ** 0.5
    assert 5 < means["explicit"] < 75
    assert abs(means["gram"] - means["explicit"]) < TOLERANCE.standard_errors * error
