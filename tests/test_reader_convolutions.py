"""Reading convolutions: weights that are standardized at every pass, and grids of one position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.probe.reading import count_in_band
from sounding.reader.prediction import predict


class Standardized(nn.Conv2d):
    """A convolution whose weights are standardized at every pass, as those of BiT."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.flatten(1)
        rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True) / rows.shape[1] ** 0.5
        return functional.conv2d(x, rows.view_as(self.weight), padding=1)


def test_standardized_weights_do_not_see_what_their_inputs_share() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), Standardized(64, 64, 3), nn.ReLU(),
                          Standardized(64, 64, 3), nn.Flatten(), nn.Linear(64 * 16, 4))  # fmt: skip
    inputs = torch.randn(8, 3, 4, 4)
    laws = [node.rule.weight for node in sounding.read(model, inputs).description.nodes if hasattr(node.rule, "weight")]
    assert [law.balanced for law in laws] == [False, True, True, False]
    profile = sounding.check(model, inputs, theory=True).profile
    inside, banded = count_in_band(profile)
    assert banded > 40
    assert inside >= 0.9 * banded


class Dropped(nn.Module):
    """A convolution that leaves one position, which a view drops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).flatten(2).permute(0, 2, 1)[:, 0])


def test_a_gradient_finds_its_way_to_a_grid_of_one_position() -> None:
    found = predict(sounding.read(Dropped(), torch.randn(4, 3, 7, 7)))
    assert sum(row.measure == "weight_gradient_log_norm" for row in found.rows) == 3
