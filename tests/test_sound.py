"""What a start keeps beside a sound start of its architecture: the description that is drawn soundly, and the words."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest
import torch
from torch import nn

import sounding
from sounding.reader.changes import gain
from sounding.reader.sound import Kept, draw_soundly, tell_kept
from sounding.theory.signal import Attention, Convolution, Linear, Normalize
from tolerance import assert_within_standard_errors


def stack(depth: int, *, weight_std: float, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    """A plain network of width 128 whose weights have this standard deviation times 1/√fan_in."""
    torch.manual_seed(seed)
    parts = [part for _ in range(depth) for part in (nn.Linear(128, 128), activation())]
    for part in parts:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=weight_std / math.sqrt(128))
            nn.init.zeros_(part.bias)
    return nn.Sequential(*parts)


@pytest.mark.parametrize(
    ("activation", "wanted"), [(nn.ReLU, 2.0), (nn.Tanh, 1.0), (nn.Identity, 1.0), (nn.LeakyReLU, 2 / (1 + 0.01**2))]
)
def test_a_sound_start_has_the_critical_gain(activation: type[nn.Module], wanted: float) -> None:
    network = stack(4, weight_std=0.3, activation=activation)
    description = draw_soundly(sounding.read(network, torch.randn(8, 128)).description)
    gains = [gain(node.rule) for node in description.nodes if isinstance(node.rule, Linear | Convolution)]
    assert gains == pytest.approx([1.0] + [wanted] * 3)  # the first layer reads the inputs themselves


def test_a_sound_transformer_has_usual_scores_norms_of_one_and_no_biases() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with torch.no_grad():
        for norm in (part for part in encoder.modules() if isinstance(part, nn.LayerNorm)):
            norm.weight.fill_(7.0)
    description = draw_soundly(sounding.read(encoder, torch.randn(4, 8, 32)).description)
    for node in description.nodes:
        if isinstance(node.rule, Attention):
            assert node.rule.scale == pytest.approx(8**-0.5)
        if isinstance(node.rule, Normalize):
            assert (node.rule.scale.mean, node.rule.shift.second_moment) == (1.0, 0.0)
        if isinstance(node.rule, Linear):
            assert node.rule.bias.second_moment == 0.0


def test_the_sound_figures_are_what_networks_drawn_by_that_law_have() -> None:
    """One number by two routes: theory's sound start of a sick network, and checks of networks that have this start."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 128)
    sound = sounding.check(stack(12, weight_std=0.6), inputs).profile.settings["theory"]["kept_soundly"]
    drawn = []
    for seed in range(12):
        network = stack(12, weight_std=math.sqrt(2), seed=seed)
        with torch.no_grad():
            network[0].weight.div_(math.sqrt(2))  # it reads the inputs themselves
        drawn.append(sounding.check(network, inputs).profile.settings["theory"]["kept"])
    for name in ("gradient", "apart"):
        values = [math.log(one[name]) for one in drawn]
        assert_within_standard_errors(mean(values), math.log(sound[name]), stdev(values) / math.sqrt(len(values)))


def test_the_verdict_says_what_is_left_and_whether_the_start_is_to_blame() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 128)
    verdict = sounding.check(stack(30, weight_std=0.6), inputs).verdict
    assert "of the last one's gradient" in verdict.summary
    assert " in a sound start of this architecture)" in verdict.summary
    assert "architecture is to blame" not in verdict.summary
    normed = nn.Sequential(
        *(part for _ in range(60) for part in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()))
    )
    verdict = sounding.check(normed, torch.randn(16, 32), theory=True).verdict
    assert "so the architecture is to blame more than the start" in verdict.summary


def test_nothing_is_said_where_theory_does_not_reach_from_end_to_end() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4))
    report = sounding.check(network, torch.randn(4, 3, 10, 10))
    assert "kept" not in report.profile.settings["theory"]
    assert "sound start" not in report.verdict.summary


def test_a_prescription_that_loses_more_is_no_example() -> None:
    """Where the usual law kills the gradient and the own one does not, the sentence ends with what was measured."""
    own, lost = Kept(gradient=0.5, apart=0.3), Kept(gradient=1e-4, apart=0.3)
    assert "a sound start" not in tell_kept(own, lost, 9)
    assert tell_kept(lost, lost, 9).endswith("so the architecture is to blame more than the start.")
    told = tell_kept(lost, own, 9)
    assert "; 50% in a sound start of this architecture)" in told
    assert told.endswith("tells samples apart (30% in a sound start).")
