"""The normals of float32 chains: their law, their independence, and the memory they come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sounding import simulate
from sounding.chain.normals import CHUNK, NormalStream, make_normals
from tolerance import TOLERANCE


def draw(seed: int, size: int) -> np.ndarray:
    return NormalStream(seed)((size,)).numpy().astype(np.float64)


def test_the_law_is_standard_normal():
    numbers = draw(0, 1_000_001)
    assert stats.kstest(numbers, "norm").pvalue > 2 * stats.norm.sf(TOLERANCE.standard_errors)
    for order, moment, square in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105), (6, 15, 10395)):
        error = np.sqrt((square - moment**2) / numbers.size)
        assert abs((numbers**order).mean() - moment) < TOLERANCE.standard_errors * error, order


@pytest.mark.parametrize("bound", [3.0, 4.0, 4.5])
def test_tails_have_their_weight(bound):
    size = 8_000_000
    expected = 2 * stats.norm.sf(bound) * size
    found = int((np.abs(draw(1, size)) > bound).sum())
    assert abs(found - expected) < TOLERANCE.standard_errors * np.sqrt(expected)


def test_the_smallest_word_reaches_beyond_six_standard_deviations():
    stream = NormalStream(0)

    class Zeros:
        def random_raw(self, size):
            return np.zeros(size, dtype=np.uint64)

    class Ones(Zeros):
        def random_raw(self, size):
            return np.full(size, 2**64 - 1, dtype=np.uint64)

    stream._words = Zeros()
    assert 6.7 < float(stream((4,))[0]) < 6.8
    stream._words = Ones()
    assert stream((4,)).abs().max() == 0


def test_partners_and_neighbours_are_independent():
    numbers = draw(2, CHUNK)
    pairs = CHUNK // 2
    for one, other in ((numbers[:pairs], numbers[pairs:]), (numbers[:-1], numbers[1:])):
        for f in (lambda x: x, np.square, np.abs):
            correlation = np.corrcoef(f(one), f(other))[0, 1]
            assert abs(correlation) < TOLERANCE.standard_errors / np.sqrt(len(one))


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1))
def test_any_size_is_filled_and_repeats(size, seed):
    numbers = draw(seed, size)
    assert np.isfinite(numbers).all()
    assert np.array_equal(numbers, draw(seed, size))
    assert len(np.unique(numbers)) >= size - 1


def test_sizes_around_a_chunk():
    for size in (CHUNK - 1, CHUNK, CHUNK + 1):
        numbers = draw(3, size)
        assert abs(numbers[-50:].std() - 1) < 0.6
        assert np.isfinite(numbers).all()


def test_kept_results_survive_the_next_call_and_no_more():
    stream = NormalStream(4, kept=2)
    first = stream((8, 8))
    copy = first.clone()
    stream((8, 8))
    assert torch.equal(first, copy)
    stream((8, 8))
    assert not torch.equal(first, copy)


def test_float64_normals_come_from_the_generator():
    generator = torch.Generator().manual_seed(5)
    numbers = make_normals(0, generator=generator, dtype=torch.float64)((3, 4))
    assert torch.equal(numbers, torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))


def test_a_single_large_chain_is_the_same_drawn_ahead_or_not():
    settings = {"width": 160, "batch_size": 160, "depth": 6, "residual": 0.2, "measures": ["orthogonality_gap"]}
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(simulate(generator=torch.Generator().manual_seed(6), **settings).averages)
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_set_up_is_told_apart_and_the_rate_is_of_the_rest():
    result = simulate(width=64, batch_size=8, depth=50, runs=40, generator=torch.Generator().manual_seed(7))
    assert result.setup_seconds > 0
    assert result.chain_layers_per_second == pytest.approx(2000 / result.seconds)
    plain = result.to_dict()
    assert (plain["seconds"], plain["setup_seconds"]) == (result.seconds, result.setup_seconds)
