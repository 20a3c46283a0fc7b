"""The plain network: the architecture it says, the variance it says, the generator it was given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from generators import seeded
from sounding.errors import UsageError
from sounding.models import Mlp
from tolerance import TOLERANCE, assert_within_standard_errors


@pytest.mark.parametrize(("norm", "kind"), [("none", None), ("batch", nn.BatchNorm1d), ("layer", nn.LayerNorm)])
def test_architecture(norm, kind):
    network = Mlp(12, 5, depth=3, width=7, norm=norm)
    order = [type(module) for module in network.modules() if not list(module.children())]
    hidden = [nn.Linear, *([kind] if kind else []), nn.ReLU]
    assert order == hidden * 3 + [nn.Linear]
    assert network(torch.randn(4, 3, 4)).shape == (4, 5)


def test_forward_is_the_formula():
    network = Mlp(6, 3, depth=2, width=5, norm="batch", activation="tanh", generator=seeded()).double()
    inputs = torch.randn(8, 6, dtype=torch.float64, generator=seeded(1))
    hidden = inputs
    for layer in (network[0], network[1]):
        pre = hidden @ layer.linear.weight.T
        hidden = torch.tanh((pre - pre.mean(0)) / torch.sqrt(pre.var(0, correction=0) + layer.norm.eps))
    torch.testing.assert_close(network(inputs), hidden @ network.readout.weight.T, rtol=TOLERANCE.closed_form, atol=0)


@pytest.mark.parametrize(
    ("init", "variance"), [("he", 2 / 150), ("lecun", 1 / 150), ("xavier", 2 / 350), ("torch", 1 / 450)]
)
def test_weights_have_the_stated_variance(init, variance):
    weight = Mlp(150, 2, depth=1, width=200, init=init, generator=seeded())[0].linear.weight.detach().double()
    kurtosis = 1.8 if init == "torch" else 3.0
    stderr = variance * ((kurtosis - 1) / weight.numel()) ** 0.5
    assert_within_standard_errors(weight.var().item(), variance, stderr)


@pytest.mark.parametrize(("fan_in", "width"), [(20, 30), (30, 20)])
def test_orthogonal_weights_of_both_shapes(fan_in, width):
    weight = Mlp(fan_in, 2, depth=1, width=width, init="orthogonal", generator=seeded())[0].linear.weight.detach()
    small = weight.T @ weight if width > fan_in else weight @ weight.T
    torch.testing.assert_close(small, torch.eye(20), rtol=0, atol=TOLERANCE.float32_forward)


def test_a_generator_decides_everything_and_the_default_one_is_left_alone():
    before = torch.get_rng_state()
    one, two, other = (Mlp(4, 2, depth=2, width=3, generator=seeded(seed)).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["1.linear.weight"], other["1.linear.weight"])
    assert all(not value.any() for key, value in one.items() if key.endswith("bias"))


def test_any_activation():
    for activation in ("leaky_relu:0.2", torch.sin, "gelu", "identity"):
        network = Mlp(4, 2, depth=2, width=3, activation=activation)
        network(torch.randn(5, 4)).sum().backward()
        assert network[0].linear.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"depth": 0, "width": 3}, "depth must be at least 1"),
        ({"depth": 1, "width": 0}, "width must be at least 1"),
        ({"depth": 1, "width": 3, "norm": "group"}, "unknown norm 'group'"),
        ({"depth": 1, "width": 3, "init": "magic"}, "unknown init 'magic'"),
        ({"depth": 1, "width": 3, "activation": "swishy"}, "unknown activation"),
        ({"depth": 1, "width": 3, "activation": nn.ReLU()}, "share"),
    ],
)
def test_bad_settings_end_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        Mlp(4, 2, **options)
