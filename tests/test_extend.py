"""Extending a description by its repeated block agrees with reading a network that is as deep."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import networks
import sounding
from sounding.errors import UsageError
from sounding.reader.extend import extend, find_blocks
from sounding.reader.prediction import predict
from test_reader import Llama, Residual


def residual(blocks: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), *(Residual(128) for _ in range(blocks)), nn.Linear(128, 9))


def transformer(blocks: int) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.LayerNorm(64), nn.Linear(64, 5))


NETWORKS = {
    "plain": (lambda blocks: networks.mlp(blocks + 2, 128, initialize=nn.init.kaiming_normal_), (24, 64)),
    "batch norm": (lambda blocks: networks.mlp(blocks + 2, 128, normalization=nn.BatchNorm1d), (24, 64)),
    "residual": (residual, (24, 64)),
    "transformer": (transformer, (3, 8, 64)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_four_blocks_extended_to_twelve_agree_with_twelve(name: str) -> None:
    build, shape = NETWORKS[name]
    with networks.drawn_from(0):
        inputs = torch.randn(shape)
        small, large = (
            sounding.read(build(blocks), inputs, loss="random", generator=torch.Generator().manual_seed(1))
            for blocks in (4, 12)
        )
    found = find_blocks(small.description)
    assert found is not None
    assert found.count in (4, 5)  # the first layer of a plain network may be as wide as the others
    extended = extend(small, found.count + 8)
    assert [(n.name, n.weight, n.inputs, n.features) for n in extended.description.nodes] == [
        (n.name, n.weight, n.inputs, n.features) for n in large.description.nodes
    ]
    assert extended.weight_layers[0] - small.weight_layers[0] >= 8
    expected = {(row.name, row.measure): row for row in predict(large).rows}
    rows = predict(extended).rows
    assert {(row.name, row.measure) for row in rows} == set(expected)
    outside = [
        (row.name, row.measure, row.value, other.value, other.stderr)
        for row in rows
        if abs(row.value - (other := expected[row.name, row.measure]).value) > 2 * math.hypot(row.stderr, other.stderr)
    ]
    assert len(outside) <= 0.05 * len(rows), outside[:5]


def test_a_block_has_the_median_of_the_laws() -> None:
    with networks.drawn_from(0):
        model = residual(5)
        nn.init.normal_(model[3].second.weight, std=7.0)  # one odd block must not become the typical one
        blueprint = extend(sounding.read(model, torch.randn(8, 64)), 9)
    nodes = {node.weight: node.rule for node in blueprint.description.nodes if node.weight}
    laws = [nodes[f"{at}.second.weight"].weight.variance for at in range(1, 6)]  # type: ignore[attr-defined]
    assert nodes["9.second.weight"].weight.variance == sorted(laws)[2]  # type: ignore[attr-defined]
    assert "10.weight" in nodes  # the readout stands behind the new blocks


def test_blocks_of_a_llama_are_found() -> None:
    with networks.drawn_from(0):
        description = sounding.read(Llama(fused=True, blocks=5), torch.randint(50, (3, 7))).description
    found = find_blocks(description)
    assert found is not None
    assert description.nodes[found.stop].name == "head"
    assert found.count >= 4  # the first starts from what is measured


def test_as_many_blocks_as_there_are_change_nothing() -> None:
    blueprint = sounding.read(residual(3), torch.randn(8, 64))
    same = extend(blueprint, 3).description
    assert same.outputs == blueprint.description.outputs
    assert [node.inputs for node in same.nodes] == [node.inputs for node in blueprint.description.nodes]


def test_what_cannot_be_extended_is_refused() -> None:
    with pytest.raises(UsageError, match="repeats"):
        extend(sounding.read(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.eye(4)), 9)
    with pytest.raises(UsageError, match="at least the 3"):
        extend(sounding.read(residual(3), torch.randn(8, 64)), 2)
