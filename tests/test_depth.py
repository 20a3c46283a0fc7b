"""The depth check as a ritual: known laws of growth come out, and nothing is left changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import networks
import sounding
from sounding.cli import cli
from sounding.errors import UsageError
from sounding.reader.depth import Depths, Trend
from test_extend import residual, transformer
from tolerance import TOLERANCE

FILE = """
from torch import nn

def make(depth):
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 4))
"""


def powers(found: Depths) -> dict[str, float]:
    return {trend.quantity: trend.power for trend in found.trends}


def gain(value: float, width: int = 256) -> Depths:
    """A linear network whose mean square is multiplied by `value` in every layer."""

    def make(depth: int) -> nn.Module:
        layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, gain=value**0.5)
        return nn.Sequential(*layers)

    with networks.drawn_from(0):
        return sounding.depth(make, torch.randn(6, width), to=16)


def test_a_factor_in_every_layer_compounds_and_isometry_is_steady() -> None:
    steady, growing = gain(1.0), gain(1.5)
    assert steady.depths == (4, 8, 16)
    assert steady.transfers is True
    assert powers(steady)["stream"] == pytest.approx(0, abs=TOLERANCE.four_digits)
    assert max(map(abs, powers(steady).values())) < TOLERANCE.three_digits, "orthogonal weights scatter nothing"
    assert growing.transfers is False
    # ln of the stream grows by 8 ln 1.5 from depth 8 to 16, that of the gradient norm by half
    assert powers(growing)["stream"] == pytest.approx(8 * 0.405465 / 0.693147, rel=TOLERANCE.four_digits)
    assert powers(growing)["gradient"] == pytest.approx(4 * 0.405465 / 0.693147, rel=TOLERANCE.four_digits)


def test_residual_networks_transfer_and_plain_ones_do_not() -> None:
    with networks.drawn_from(0):
        inputs = torch.randn(12, 64)
        state = torch.get_rng_state()
        branches = sounding.depth(lambda depth: residual(depth), inputs, to=32)
        plain = sounding.depth(lambda depth: networks.mlp(depth, 64, initialize=nn.init.kaiming_normal_), inputs, to=64)
        assert torch.equal(state, torch.get_rng_state())
    assert branches.transfers is True
    assert 0.5 < powers(branches)["stream"] < 1.1  # a sum of independent blocks
    assert plain.transfers is False
    # samples of a He network meet as 1/depth²
    assert powers(plain)["distance"] == pytest.approx(-2, abs=6 * TOLERANCE.rough)
    measured = [point for point in plain.points if point.quantity == "distance"]
    assert all(point.measured is not None for point in measured)


def test_a_model_alone_is_extended_by_theory_and_agrees_with_a_factory() -> None:
    with networks.drawn_from(0):
        inputs = torch.randn(3, 8, 64)
        alone = sounding.depth(transformer(4), inputs, to=16)
        made = sounding.depth(lambda depth: transformer(depth), inputs, to=16)
    assert alone.depths == made.depths == (4, 8, 16)
    assert alone.unit == "blocks"
    assert [point.depth for point in alone.points if point.measured is not None] == [4, 4]
    assert "tokens" in powers(alone)
    for name, power in powers(made).items():
        assert powers(alone)[name] == pytest.approx(power, abs=TOLERANCE.rough)


def test_what_repeats_nothing_or_goes_nowhere_is_refused() -> None:
    with pytest.raises(UsageError, match="repeats"):
        sounding.depth(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.eye(4), to=50)
    with pytest.raises(UsageError, match="at least 8"):
        sounding.depth(residual(4), torch.randn(4, 64), to=7)
    with pytest.raises(UsageError, match="Module"):
        sounding.depth(lambda depth: depth, torch.eye(4), to=8)  # type: ignore[arg-type,return-value]


def test_the_command_draws_a_picture_and_tells(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(FILE)
    words = ["depth", f"{tmp_path}/nets.py:make", "--to", "16", "--plot", str(tmp_path / "depth.svg"), "--json"]
    result = CliRunner().invoke(cli, words)
    told = json.loads(result.stdout)
    assert result.exit_code == {True: 0, False: 1, None: 4}[told["transfers"]]
    assert told["depths"] == [4, 8, 16]
    assert "measured" in (tmp_path / "depth.svg").read_text()
    told = CliRunner().invoke(cli, ["depth", "mlp,width=32,init=he", "--to", "8", "--from", "4", "--batch-size", "8"])
    assert "from 4 to 8 layers" in told.output


def test_a_verdict_names_what_changes_and_by_how_much_for_a_layer() -> None:
    gradient = Trend("gradient", 4.8, 0.1, "predicted", bounded=False)
    told = str(Depths("layers", (8, 16, 32), (), (gradient,)))
    assert "from 16 to 32 layers: the gradient norm changes faster than depth." in told
    assert "that is ×1.23 for each layer" in told
