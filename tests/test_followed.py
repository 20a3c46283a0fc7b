"""What a reading follows: padding, tied heads, and networks with parts of more points than theory can hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import networks
import sounding
from sounding.reader.prediction import predict
from sounding.theory.signal import Convolution

BAND = 2.0  # standard deviations over seeds, for 95%


class Echo(nn.Module):
    """Words embedded, one map, a norm, and a head by the embedding’s own matrix."""

    def __init__(self, *, width: int = 64, words: int = 512) -> None:
        super().__init__()
        self.embed, self.map = nn.Embedding(words, width), nn.Linear(width, width, bias=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.map(self.embed(tokens))))


def test_a_tied_head_sends_back_embeddings_that_the_stream_holds() -> None:
    """Words that are to be told again have gradients as alike as their values: the weights’ gradients add up."""
    away = []
    for seed in range(4):
        with networks.drawn_from(seed):
            model, tokens = Echo(), torch.randint(512, (16, 32))
        profile = sounding.check(model, tokens, tokens, theory=True).profile
        asked = ("map.weight", "weight_gradient_log_norm")
        found = {row.source: row for row in profile if (row.name, row.measure) == asked}
        away.append((found["check"].value - found["theory"].value) / (found["theory"].stderr or 0.0))
    assert max(map(abs, away)) < 2 * BAND


@pytest.mark.parametrize("sides", [(0, 1, 0, 1), (2, 1, 1, 0)])
def test_zeros_around_a_grid_belong_to_the_convolution_behind_them(sides: tuple[int, ...]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 16, 3, 2), nn.Conv2d(16, 16, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(functional.pad(x, sides)))
            return self.second(functional.pad(x, sides))

    blueprint = sounding.read(Net(), torch.randn(2, 3, 8, 8))
    rules = [node.rule for node in blueprint.description.nodes if isinstance(node.rule, Convolution)]
    assert [rule.padding for rule in rules] == [(sides[2:], sides[:2])] * 2
    assert blueprint.weight_layers == (2, 2)


def test_theory_begins_behind_what_has_too_many_points() -> None:
    """Sound as wav2vec reads it: odd lengths have no sub-grids, and the short sequence behind them is followed."""
    body = [part for _ in range(5) for part in (nn.Conv1d(16, 16, 3, 2), nn.GELU())]
    model = nn.Sequential(nn.Conv1d(1, 16, 10, 5), *body, nn.Conv1d(16, 16, 1), nn.Flatten(), nn.Linear(384, 4))
    blueprint = sounding.read(model, torch.randn(4, 1, 4000))
    layers, predicted = blueprint.weight_layers
    assert layers == 8
    assert 3 <= predicted < 8
    assert any("too many to follow" in note for note in blueprint.description.notes)
    assert predict(blueprint).rows
