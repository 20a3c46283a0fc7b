"""Roles of layers in repeated blocks: in the records, in the terminal and on the page."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sounding
from sounding.cli.table import group_calls
from sounding.probe.inside.roles import block_of, find_roles
from sounding.report.charts import to_columns

WIDTH = 16


def check(model: nn.Module) -> sounding.Report:
    return sounding.check(model, torch.randn(4, 6, WIDTH), theory=False)


def encoder(blocks: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


def test_every_layer_of_torchs_encoder_has_its_role() -> None:
    reading = check(encoder(3)).reading
    found = {call.name: role for call in reading.calls if (role := find_roles(reading).get(call.depth))}
    for block in range(3):
        assert found[f"layers.{block}.self_attn"] == "attention"
        assert found[f"layers.{block}.linear1"] == "MLP in"
        assert found[f"layers.{block}.linear2"] == "MLP out"
        assert found[f"layers.{block}.norm1"] == "norm 1"
        assert found[f"layers.{block}.norm2"] == "norm 2"


def test_siblings_are_rows_and_the_page_knows_roles() -> None:
    """A stack of 12 blocks: role by role the first block, those between and the last, and every layer once."""
    report = check(encoder(12))
    groups, _ = group_calls(report.reading)
    names = [group.write_name(40) for group in groups]
    assert "layers.0 attention" in names
    assert "layers.1–10 MLP out" in names
    assert "layers.11 norm 2" in names
    depths = [call.depth for group in groups for call in group.calls]
    assert len(depths) == len(set(depths))
    columns = to_columns(report, "")
    assert set(columns["roles"]) == {"", "attention", "MLP in", "MLP out", "norm 1", "norm 2"}
    assert len(columns["roles"]) == len(columns["depth"])


@pytest.mark.parametrize("depth", [3, 30])
def test_networks_without_attention_have_no_roles(depth: int) -> None:
    model = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    assert not find_roles(check(model).reading)


def test_a_block_is_the_name_up_to_its_first_number() -> None:
    assert block_of("12.attn.q") == "12"
    assert block_of("body.layers.3") == "body.layers.3"
    assert block_of("stage2.blocks.10.fc") == "stage2.blocks.10"
