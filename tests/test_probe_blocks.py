"""Sample matrices are measured in blocks: neighbours, shapes, scales and threads must not show in the numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import sounding
from sounding import measures
from sounding.probe import moments
from sounding.probe.moments import FAST, FULL, Moments
from sounding.probe.spectra import Spectra
from tolerance import TOLERANCE

OF_ROWS = {
    "mean_square": lambda rows: rows.double().square().mean(),
    "participation_ratio": measures.participation_ratio,
    "orthogonality_gap": measures.orthogonality_gap,
    "mean_cosine": measures.mean_cosine,
    "distinct_share": measures.distinct_share,
    "numerical_rank": measures.numerical_rank,
    "soft_rank": measures.soft_rank,
    "effective_rank": measures.effective_rank,
    "condition_number": measures.condition_number,
}


def matrices(count: int, shapes: list[tuple[int, int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shapes[index % len(shapes)], generator=generator) + 0.3 for index in range(count)]


def measure(given: list[Tensor], tier: moments.Tier = "full") -> list[dict[str, float]]:
    collected, found = Moments(tier), [dict[str, float]() for _ in given]
    for rows, values in zip(given, found, strict=True):
        collected.add(rows, values)
    collected.finish()
    return found


@pytest.mark.parametrize("tier", ["fast", "full"])
@pytest.mark.parametrize(
    "shapes", [[(8, 5), (8, 12), (6, 30), (8, 8), (3, 4), (8, 40)], [(8, 12)], [(8, 12), (8, 7), (8, 2), (8, 12)]]
)
@pytest.mark.parametrize("limit", [2**8, 2**10, 2**17])
def test_blocks_of_any_size_and_shape_give_what_each_matrix_gives(
    limit: int, shapes: list[tuple[int, int]], tier: moments.Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small limits send the larger matrices past the blocks, or their products through them in pieces; more shapes than
    are filled at a time empty them early."""
    monkeypatch.setitem(moments.BLOCK, "cpu", limit)
    given = matrices(23, shapes)
    for rows, values in zip(given, measure(given, tier), strict=True):
        assert set(values) == {*FAST, *(FULL if tier == "full" else ())}
        for name in values.keys() & OF_ROWS.keys():
            expected = float(OF_ROWS[name](rows))
            assert values[name] == pytest.approx(expected, rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32), (
                name,
                rows.shape,
            )


@pytest.mark.parametrize("tier", ["fast", "full"])
@pytest.mark.parametrize("shapes", [[(8, 6)], [(8, 9), (8, 6)]])
def test_what_is_not_finite_or_far_off_scale_spoils_nothing_beside_it(
    shapes: list[tuple[int, int]], tier: moments.Tier
) -> None:
    """A narrow matrix in a block of wider ones counts its own entries."""
    given = matrices(9, shapes)
    alone = measure(given, tier)
    spoiled = [rows.clone() for rows in given]
    spoiled[3][2, 1] = math.nan
    spoiled[4] *= 1e30
    spoiled[5] *= 0.0
    together = measure(spoiled, tier)
    assert together[3] == {"non_finite_fraction": 1 / 48}
    assert together[4]["mean_cosine"] == pytest.approx(alone[4]["mean_cosine"], rel=TOLERANCE.float32_forward)
    assert together[4]["mean_square"] == pytest.approx(alone[4]["mean_square"] * 1e60, rel=TOLERANCE.float32_forward)
    assert together[5]["participation_ratio"] == 0
    for index in (0, 1, 2, 6, 7, 8):
        assert together[index] == pytest.approx(alone[index], rel=TOLERANCE.float32_forward)


def test_a_layer_changed_in_place_is_measured_as_it_was() -> None:
    """A block is reduced later; what it holds must be a copy."""
    rows = matrices(1, [(8, 6)])[0]
    collected, values = Moments("fast"), dict[str, float]()
    expected = float(rows.double().square().mean())
    collected.add(rows, values)
    rows.zero_()
    collected.finish()
    assert values["mean_square"] == pytest.approx(expected, rel=TOLERANCE.float32_forward)


def test_an_unfinished_watch_knows_of_what_is_not_finite() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias[0] = math.nan
    with sounding.watch(model) as watched:
        model(torch.ones(3, 4))
        assert ("1", "its output is not finite") in {(item.name, item.reason) for item in watched.unmeasured}
    assert "dead_fraction" not in watched.profile.measures


def test_threads_change_neither_eigenvalues_nor_torchs_own_number() -> None:
    before = torch.get_num_threads()
    rows = torch.randn(12, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grams = rows @ rows.mT
    try:
        torch.set_num_threads(2)
        spectra = Spectra()
        found = spectra.decompose(grams)
        assert torch.get_num_threads() == 2
        torch.testing.assert_close(found, torch.linalg.eigvalsh(grams), rtol=TOLERANCE.exact, atol=0)
        with pytest.raises(RuntimeError):
            spectra.decompose(grams.to(torch.int64))
        assert torch.get_num_threads() == 2
        spectra.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tier", ["fast", "full"])
@pytest.mark.parametrize("width", [12, 9000])
def test_samples_of_zero_have_no_direction(width: int, tier: moments.Tier) -> None:
    """Centred they are as long as the mean sample, and rounding must not leave them a length of their own."""
    generator = torch.Generator().manual_seed(2)
    for level in (0.1, 1.0, 3.0, 5.0, 8.0):
        rows = torch.randn(16, width, generator=generator) + level * torch.randn(width, generator=generator)
        rows[3] = rows[10] = 0.0
        (values,) = measure([rows], tier)
        assert values["mean_cosine"] == pytest.approx(float(measures.mean_cosine(rows.double())), abs=TOLERANCE.float32)
