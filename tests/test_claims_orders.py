"""Rows that train stacks give every seed an order of the samples: an interval over seeds of one order is too narrow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sounding.train
from sounding.claims.claim import Context
from sounding.claims.registry import find_claim

ROWS = {
    "orth2021-fig3a": "seeds",
    "orth2021-fig3b": "seeds",
    "orth2021-fig7": "seeds",
    "rank2020-fig1": "runs",
    "rank2020-fig4": "runs",
    "rank2020-fig6": "runs",
    "thesis2024-fig6.4": "seeds",
    "thesis2024-fig6.6": "seeds",
}


class Asked(Exception):
    """A training was asked for."""

    def __init__(self, networks: list[torch.nn.Module], generator: Any) -> None:
        super().__init__()
        self.networks, self.generator = networks, generator


@pytest.mark.parametrize("row", ROWS)
def test_every_seed_has_an_order_of_its_own(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(networks: list[torch.nn.Module], *args: Any, generator: Any, **options: Any) -> None:
        raise Asked(networks, generator)

    monkeypatch.setattr(sounding.train, "train_together_", ask)
    values = {**find_claim(row).settings["quick"].values, ROWS[row]: 3}
    if row == "rank2020-fig4":
        values |= {"depths": [2, 4], "pretraining": 2}
    with pytest.raises(Asked) as asked:
        find_claim(row).measure(values, Context())
    orders = asked.value.generator
    assert len(orders) == len(asked.value.networks)
    first = [torch.randperm(100, generator=order).tolist() for order in {id(order): order for order in orders}.values()]
    assert len({tuple(order) for order in first}) == len(first) == 3
