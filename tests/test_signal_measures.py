"""Measures read off a signal: the definitions of a check, and what a finite width makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sounding
from sounding.probe.moments import FAST, FULL
from sounding.theory.signal import Points, Signal, measures
from tolerance import TOLERANCE, assert_within_standard_errors


class Pass(torch.nn.Module):
    """A module whose output is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(6, 40), (5, 4, 30), (4, 3, 2, 20)])
def test_measures_of_measured_features_are_those_of_a_check(shape: tuple[int, ...]) -> None:
    """The Gram matrix of measured values holds all that a check says of them; channels come first there."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5
    report = sounding.check(Pass(), values, tier="full")
    rows = {row.measure: row.value for row in report.profile.rows if row.name == "inner"}
    found = measures(Signal.of_features(values.numpy()), shape[-1], finite_width=False)
    shared = [name for name in (*FAST, *FULL, "token_participation_ratio") if name in rows]
    assert len(shared) >= len(FAST)
    for name in shared:
        assert found[name] == pytest.approx(rows[name], rel=TOLERANCE.two_routes), name


@pytest.mark.parametrize("points", [Points(12), Points(6, (5,))])
def test_finite_width_is_that_of_drawn_features(points: Points) -> None:
    """Gaussian features with a given K: means of their measures against the Wishart draws."""
    rng = np.random.default_rng(0)
    root = rng.standard_normal((points.size, points.size)) / points.size**0.5 + 0.3
    gram, features = root @ root.T, 24
    predicted = measures(Signal.full(gram, points), features, generator=rng)
    drawn = []
    for _ in range(400):
        values = (root @ rng.standard_normal((points.size, features))).reshape(points.samples, *points.grid, features)
        drawn.append(measures(Signal.of_features(values), features, finite_width=False))
    for name in ("participation_ratio", "mean_cosine", "effective_rank", "orthogonality_gap"):
        seen = np.array([one[name] for one in drawn])
        # the mean of 16 Wishart draws scatters as that of 16 of these
        assert_within_standard_errors(predicted[name], float(seen.mean()), float(seen.std()) / 4)


def test_a_zero_signal_has_measures() -> None:
    found = measures(Signal.full(np.zeros((3, 3)), Points(3)), 8)
    assert found["participation_ratio"] == 0
    assert found["numerical_rank"] == 0
    assert found["mean_square"] == 0
