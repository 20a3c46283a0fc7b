"""Blame: one change of the description that heals an ill prediction names the fault, at its layer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import networks
import sounding
from sounding.reader.blame import HEALTHY, ILL, blame


class Attention(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(self.q(x) @ self.k(x).mT * self.scale, -1) @ self.v(x)


class Branch(nn.Module):
    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(width, width), nn.Linear(width, width), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.second(torch.relu(self.first(x)))


def he(model: nn.Module, gain: float = 2.0) -> nn.Module:
    for one in model.modules():
        if isinstance(one, nn.Linear):
            nn.init.normal_(one.weight, std=math.sqrt(gain / one.in_features))
            if one.bias is not None:
                nn.init.zeros_(one.bias)
    return model


def accused(model: nn.Module, inputs: Tensor) -> tuple[str, str]:
    found = blame(sounding.read(model, inputs))
    if found is None:
        return "", ""
    change, before, after = found
    assert after.worst < HEALTHY
    assert before.worst >= ILL[change.size]
    return change.kind, change.layer


def test_a_healthy_network_is_not_accused() -> None:
    with networks.drawn_from(0):
        assert accused(he(networks.mlp(8, 64)), torch.randn(16, 64)) == ("", "")


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_one_wrong_gain_is_named_by_its_layer(factor: float) -> None:
    with networks.drawn_from(0):
        model = he(networks.mlp(8, 64))
        with torch.no_grad():
            model.get_submodule("6").weight.mul_(factor)  # type: ignore[operator]
        assert accused(model, torch.randn(16, 64)) == ("gain", "6")
        report = sounding.check(model, torch.randn(16, 64), theory=True)
    (finding,) = (one for one in report.verdict.findings if one.kind == "cause")
    assert finding.layer == "6"
    assert "the network is healthy" in finding.why


def test_a_bias_that_dominates_is_named_by_its_layer() -> None:
    with networks.drawn_from(0):
        model = he(networks.mlp(8, 64))
        nn.init.normal_(model.get_submodule("6").bias, std=100.0)  # type: ignore[arg-type]
        assert accused(model, torch.randn(16, 64)) == ("bias", "6")


def test_gains_that_are_too_small_everywhere_are_a_matter_of_all_layers() -> None:
    with networks.drawn_from(0):
        assert accused(he(networks.mlp(20, 64), 0.3), torch.randn(16, 64)) == ("gains", "")


def test_scores_without_their_root_are_named() -> None:
    with networks.drawn_from(0):
        kind, _ = accused(he(nn.Sequential(Attention(1.0), Attention(1.0)), 1.0), torch.randn(4, 8, 64))
        assert kind == "scores"
        assert accused(he(nn.Sequential(Attention(1 / 8), Attention(1 / 8)), 1.0), torch.randn(4, 8, 64))[0] == ""


def test_branches_at_full_size_are_too_many_and_one_that_is_too_large_is_named() -> None:
    with networks.drawn_from(0):
        inputs = torch.randn(12, 32)
        assert accused(he(nn.Sequential(*(Branch(32) for _ in range(24)))), inputs)[0] == "branches"
        blocks = [Branch(32, 100.0 if number == 3 else 0.3) for number in range(8)]
        kind, layer = accused(he(nn.Sequential(*blocks)), inputs)
    assert kind == "branch"
    assert layer.startswith("3.")


class Words(nn.Module):
    """Two embeddings, and branches behind norms."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(20, 64), nn.Embedding(8, 64)
        for one in (self.token, self.place):
            nn.init.normal_(one.weight, std=size)
        self.branches = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = self.token(x) + self.place(torch.arange(x.shape[1]))
        for branch in self.branches:
            x = x + branch(x)
        return x


def test_an_embedding_that_is_too_large_is_named_and_an_input_in_units_of_its_own_is_not() -> None:
    with networks.drawn_from(0):
        tokens = torch.randint(20, (4, 8))
        assert accused(Words(0.7), tokens) == ("", "")
        assert accused(Words(70.0), tokens) == ("embedding", "branches.0.0")
        assert accused(Words(0.7), 100 * torch.randn(4, 8, 64)) == ("", "")
