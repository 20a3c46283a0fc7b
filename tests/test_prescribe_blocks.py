"""`prescribe` with skip connections: closed forms of the branch scale, options that keep their word, drawn networks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sounding import predict
from sounding.cli import cli
from sounding.errors import UsageError
from sounding.predict import prescribe_residual, prescribe_transformer
from sounding.theory.prescribe_blocks import spanned
from test_blocks_theory import draw
from tolerance import TOLERANCE, assert_within_standard_errors

ALLOWED = 16 / 3


def rounded_down(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.floor(value / step) * step


def test_the_branch_scale_has_closed_forms() -> None:
    """He weights and ReLU have a = b = 2: without norms 1 + 2c² a block, with pre-norm a stream of 1 + 2c²L."""
    plain = prescribe_residual("relu", depth=30, placement="none").best
    normed = prescribe_residual("relu", depth=120, placement="pre").best
    assert plain is not None
    assert normed is not None
    assert plain.kind == normed.kind == "branch_scale"
    wanted = math.sqrt((math.exp(ALLOWED / 30) - 1) / 2), math.sqrt((math.exp(ALLOWED) - 1) / 240)
    for option, exact in zip((plain, normed), wanted, strict=True):
        assert option.settings["branch_scale"] == pytest.approx(rounded_down(exact), rel=TOLERANCE.two_routes)
        assert option.source


def test_every_option_keeps_its_word() -> None:
    found = prescribe_transformer("relu", depth=12, tokens=8, placement="post", width=256, margin=4)
    assert found.scales > 4
    assert {"branch_scale", "placement", "zero_branches"} <= {option.kind for option in found.options}
    for option in found.options:
        again = predict.transformer("relu", depth=12, **option.settings)
        assert spanned(again) == option.scales <= 4
        assert again.gradient_ratio == option.gradient_ratio
    assert all(scales > 4 for _, scales in found.unreachable)
    assert json.loads(json.dumps(found.to_dict()))["reachable"] is True


def test_a_network_that_reaches_its_depth_is_left_alone_and_frozen_scores_are_cured() -> None:
    assert [option.kind for option in prescribe_residual("relu", depth=8).options] == ["none"]
    frozen = prescribe_transformer("relu", depth=4, tokens=8, score_scale=1.0)
    assert frozen.best is not None
    assert frozen.best.kind == "scores"
    assert frozen.best.settings["score_scale"] is None
    with pytest.raises(UsageError, match="margin"):
        prescribe_residual("relu", depth=8, margin=0)


def gradient_log(scale: float, depth: int, seed: int, *, width: int = 256) -> float:
    """ln of the squared gradient at the input over that at the output of a drawn network without norms."""
    source = torch.Generator().manual_seed(seed)
    start = torch.randn(4, width, generator=source, requires_grad=True)
    x = start
    for _ in range(depth):
        up, down = (torch.randn(width, width, generator=source) * (2 / width) ** 0.5 for _ in range(2))
        x = x + scale * torch.relu(x @ up.T) @ down.T
    direction = torch.randn(x.shape, generator=source)
    (gradient,) = torch.autograd.grad((x * direction).sum(), start)
    return math.log(float(gradient.square().sum() / direction.square().sum()))


def test_drawn_residual_networks_span_what_is_prescribed() -> None:
    option = prescribe_residual("relu", depth=40, placement="none").best
    assert option is not None
    drawn = np.array([gradient_log(option.settings["branch_scale"], 40, seed) for seed in range(12)])
    error = drawn.std(ddof=1) / math.sqrt(len(drawn))
    # the mean of a logarithm lies below the logarithm of the mean by half its variance
    assert_within_standard_errors(option.scales, drawn.mean() + drawn.var(ddof=1) / 2, error, allowance=0.03)
    assert gradient_log(1.0, 40, 0) > 16


@pytest.mark.slow
def test_drawn_transformers_span_what_is_prescribed() -> None:
    """Eight post-norm blocks at a narrow margin: the prescribed branch scale halves what tokens lose."""
    found = prescribe_transformer(
        "relu", depth=8, tokens=16, placement="post", init="lecun", head_size=32, correlation=0.2, width=512, margin=8
    )
    option = next(one for one in found.options if one.kind == "branch_scale")
    prediction = predict.transformer("relu", depth=8, **option.settings)
    drawn = np.array([draw(prediction, seed, width=512, correlation=0.2) for seed in range(6)])
    for value, values in zip((option.correlation, option.gradient_ratio), drawn.T[1:], strict=True):
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert_within_standard_errors(value, values.mean(), error, allowance=0.06 * abs(values.mean()))


def test_the_command_tells_formula_and_source() -> None:
    told = CliRunner().invoke(cli, ["prescribe", "residual", "-a", "relu", "-d", "20", "--placement", "none"])
    assert told.exit_code == 0
    assert "branches times 0.39" in told.output
    assert "Yang and Schoenholz 2017" in told.output
    words = ["prescribe", "transformer", "-a", "relu", "-d", "4", "-n", "8", "--score-scale", "1", "--json"]
    data = json.loads(CliRunner().invoke(cli, words).stdout)
    assert data["options"][0]["kind"] == "scores"
