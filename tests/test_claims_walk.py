"""The walkers over depth: one layer by hand, the same law by both routes, and the options that rows take."""

from __future__ import annotations

import math

import torch

from sounding.claims.walk import batch_norm, measure_at, unit_features, unit_matrix, walk, walk_in_law
from sounding.measures import participation_ratio
from tolerance import TOLERANCE, assert_within_standard_errors


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_two_layers_are_the_formula() -> None:
    state, first, second = draw(5, 4), draw(4, 4, seed=1), draw(4, 4, seed=2)
    products: list[torch.Tensor] = []
    found = list(
        walk(
            state,
            [first, second],
            norm=batch_norm,
            activation=torch.relu,
            inside=torch.tanh,
            skip=0.3,
            products=products,
        )
    )
    inner = state + 0.3 * torch.tanh(state) @ first.T
    assert torch.allclose(products[0], inner)
    centred = inner - inner.mean(0)
    after = torch.relu(centred / centred.std(0, correction=0))
    assert torch.allclose(found[0], after)
    assert torch.allclose(products[1], after + 0.3 * torch.tanh(after) @ second.T)
    assert len(found) == 2


def test_without_a_skip_the_weights_stand_alone() -> None:
    state, weight = draw(3, 4), draw(4, 4, seed=1)
    (found,) = walk(state, [weight])
    assert torch.equal(found, state @ weight.T)


def test_norms_do_what_they_say() -> None:
    state = draw(2, 6, 4) + 3
    assert float(batch_norm(state).mean(-2).abs().max()) < TOLERANCE.exact
    for normed in (batch_norm(state), unit_features(state), unit_features(state, centring=True)):
        assert torch.allclose(normed.square().mean(-2), torch.ones(2, 4, dtype=torch.float64))
    assert torch.allclose(unit_features(state, centring=True), batch_norm(state))
    square = (state - state.mean(-2, keepdim=True)).square().mean(-2)
    assert torch.allclose(batch_norm(state, eps=0.5).square().mean(-2), square / (square + 0.5))
    assert torch.allclose(torch.linalg.matrix_norm(unit_matrix(state)), torch.ones(2, dtype=torch.float64))
    assert torch.equal(unit_matrix(torch.zeros(1, 2, 2)), torch.zeros(1, 2, 2))


def test_a_measure_is_taken_at_the_wanted_layers() -> None:
    weights = [draw(3, 3, seed=seed) for seed in range(5)]
    every = list(walk(draw(2, 3), weights))
    found = measure_at(walk(draw(2, 3), weights), {2, 5}, lambda state: state.sum())
    assert torch.equal(found, torch.stack([every[1].sum(), every[4].sum()]))


def test_both_walkers_have_one_law() -> None:
    """The mean participation ratio after 6 layers of 4 samples at width 12, within 5 standard errors."""
    runs, generator = 4000, torch.Generator().manual_seed(3)
    start = torch.randn(1, 4, 12, generator=generator).expand(runs, 4, 12).clone()
    *_, chains = walk_in_law(start.clone(), depth=6, generator=generator, activation="tanh")
    weights = (torch.randn(runs, 12, 12, generator=generator) / math.sqrt(12) for _ in range(6))
    *_, state = walk(start, weights, norm=batch_norm, activation=torch.tanh)
    ours, theirs = participation_ratio(state), participation_ratio(chains.state)
    error = math.sqrt(float(ours.var() + theirs.var()) / runs)
    assert_within_standard_errors(float(ours.mean()), float(theirs.mean()), error)
