"""Networks without centring train the same or lag: what is measured can meet one of the two only."""

from __future__ import annotations

import pytest

from sounding.claims.claim import judge
from sounding.claims.number import Number
from sounding.claims.registry import find_claim


@pytest.mark.parametrize("row", ["rank2020-fig5", "rank2020-fig7", "rank2020v1-fig11"])
@pytest.mark.parametrize(
    ("lag", "half", "verdict"),
    [
        (0.0, 0.02, "holds"),
        (0.1, 0.02, "holds with correction"),
        (0.05, 0.02, "not decided at this scale"),
        (-0.2, 0.02, "does not hold"),
        (0.0, 0.2, "not decided at this scale"),
    ],
)
def test_same_and_lagging_exclude_each_other(row: str, lag: float, half: float, verdict: str) -> None:
    claim = find_claim(row)
    fine = {"accuracy_uncentred": 0.8, "log2_r_standard_over_uncentred": 0.0, "accuracy_one_sided": 0.1}
    fine |= {"accuracy_standard_minus_one_sided": 0.6, "rank_standard_minus_one_sided_at_start": 400.0}
    numbers = {name: Number(value, value - 1e-3, value + 1e-3, 5) for name, value in fine.items()}
    numbers["accuracy_standard_minus_uncentred"] = Number(lag, lag - half, lag + half, 5)
    assert judge(claim, numbers) == verdict
