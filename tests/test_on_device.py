"""What is computed on a GPU in few kernels, on the CPU: products, norms that wait for each other, and their reading."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from generators import seeded
from sounding.probe.late import Late, read_back, read_now, wide_norms
from sounding.probe.on_device import PIECE, count_broken, fetch, gather, multiply
from sounding.probe.repeats import digests, repeated_fraction
from tolerance import TOLERANCE


@pytest.mark.parametrize(("samples", "features"), [(3, 2 * PIECE + 17), (3, 5), (70, PIECE + 1), (64, 9)])
def test_inner_products_are_those_of_float64(samples: int, features: int) -> None:
    matrix = torch.randn(samples, features, generator=seeded())
    out, broken = torch.zeros(samples, samples, dtype=torch.float64), torch.zeros(())
    assert multiply(matrix, out, broken) is None
    assert broken == 0
    torch.testing.assert_close(out, matrix.double() @ matrix.double().T, rtol=TOLERANCE.closed_form, atol=0.0)


@pytest.mark.parametrize("samples", [4, 80])
def test_entries_that_are_not_finite_are_counted(samples: int) -> None:
    matrix = torch.randn(samples, 33, generator=seeded())
    matrix[1, 2], matrix[1, 3], matrix[3, 0] = math.inf, math.nan, -math.inf
    out, broken = torch.zeros(samples, samples, dtype=torch.float64), torch.zeros(())
    multiply(matrix, out, broken)
    assert broken == 3
    assert count_broken(matrix.bfloat16()) == 3
    assert not out.diagonal()[[1, 3]].isfinite().any()


def test_norms_have_the_range_of_float64_and_come_in_one_reading() -> None:
    sizes = (1e-30, 1.0, 1e30)
    tensors = [torch.full((4, 9), size) for size in sizes] + [torch.full((4,), 3.0, dtype=torch.bfloat16)]
    expected = [6 * torch.tensor(size).item() for size in sizes] + [6.0]
    assert [norm.item() for norm in wide_norms(tensors)] == pytest.approx(expected, rel=TOLERANCE.closed_form)
    held: dict[str, Any] = {str(at): Late(tensor, math.log, normed=True) for at, tensor in enumerate(tensors)}
    held |= {"number": Late(torch.tensor(2.5).double()), "array": Late(torch.ones(3), lambda found: found.sum())}
    assert read_now(held["1"]) == pytest.approx(math.log(6), rel=TOLERANCE.closed_form)
    read_back([held])
    assert [held[str(at)] for at in range(4)] == pytest.approx(list(map(math.log, expected)))
    assert (held["number"], held["array"]) == (2.5, 3.0)


def test_copies_on_the_cpu_are_copies() -> None:
    parts = [torch.ones(2, 3), torch.zeros(4, dtype=torch.float64)]
    copies = fetch(parts)
    parts[0].fill_(7.0)
    assert copies[0].tolist() == [[1.0] * 3] * 2
    assert copies[1].dtype == torch.float64
    assert fetch([]) == []


def test_what_lies_on_the_host_is_gathered_as_it_is() -> None:
    parts = [torch.ones(2), torch.zeros(4, dtype=torch.float64)]
    assert all(one is other for one, other in zip(gather(parts), parts, strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
def test_digests_tell_the_samples_apart_that_their_bits_tell_apart(kind: torch.dtype) -> None:
    rows = torch.randn(64, 40, generator=seeded())
    rows = rows > 0 if kind is torch.bool else (100 * rows).to(kind)
    rows[1], rows[5], rows[7], rows[9] = rows[0], rows[0], 0, 1
    rows[8] = rows[7]
    found = digests(rows)
    assert len({tuple(row) for row in found.tolist()}) == 64 * (1 - repeated_fraction([rows], 64))
    assert torch.equal(found, digests(rows.clone()))
    assert not torch.equal(digests(rows), digests(rows.flip(1)))


def test_a_gradient_that_a_hook_keeps_is_not_the_one_that_becomes_grad() -> None:
    """`Tap.take_weight_gradient` relies on it: `.grad` is clipped and added to in place."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    kept: list[torch.Tensor] = []
    weight.register_hook(kept.append)
    for _ in range(2):
        weight.sin().sum().backward()
        assert weight.grad is not None
        weight.grad.mul_(7.0)
    assert [one.tolist() for one in kept] == [torch.ones(3, 2).cos().tolist()] * 2
