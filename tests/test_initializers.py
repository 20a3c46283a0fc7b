"""Initializers through real forward passes of layers of every shape, so that no wrong idea of the layout is shared."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sounding.errors import UsageError
from sounding.repair import haar_, he_, orthogonal_init_, xavier_
from sounding.weights import haar_frame
from tolerance import TOLERANCE, assert_within_standard_errors

# (layer, input shape): no padding, so that every output meets a full kernel
LAYERS = {
    "wide": (lambda: nn.Linear(64, 256), (64,)),
    "narrow": (lambda: nn.Linear(256, 64), (256,)),
    "tokens": (lambda: nn.Linear(32, 48), (7, 32)),
    "conv1d": (lambda: nn.Conv1d(8, 24, 4), (8, 40)),
    "stride": (lambda: nn.Conv2d(16, 32, 3, stride=2), (16, 17, 17)),
    "groups": (lambda: nn.Conv2d(16, 32, 3, groups=4), (16, 12, 12)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16), (16, 12, 12)),
    "dilation": (lambda: nn.Conv2d(16, 8, 3, dilation=2), (16, 14, 14)),
    "conv3d": (lambda: nn.Conv3d(6, 12, 3), (6, 7, 7, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 8, 4, stride=2), (16, 12, 12)),
    "transposed groups": (lambda: nn.ConvTranspose2d(16, 32, 2, stride=2, groups=4), (16, 10, 10)),
}
FULL_COVER = [name for name in LAYERS if "transposed" not in name]


def mean_square(
    layer: nn.Module, shape: tuple[int, ...], samples: int = 400, generator: torch.Generator | None = None
) -> tuple[float, float]:
    """Mean square of the output on Gaussian inputs of unit mean square, with its standard error over samples."""
    with torch.no_grad():
        output = layer(torch.randn(samples, *shape, generator=generator or torch.Generator().manual_seed(1)))
    crop = output[..., 2:-2, 2:-2] if isinstance(layer, nn.ConvTranspose2d) else output
    per_sample = crop.double().square().flatten(1).mean(1)
    return float(per_sample.mean()), float(per_sample.std() / math.sqrt(samples))


@pytest.mark.parametrize("name", LAYERS)
def test_haar_keeps_the_mean_square(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make()
    haar_(layer, generator=torch.Generator().manual_seed(0))
    value, stderr = mean_square(layer, shape)
    assert_within_standard_errors(value, 1.0, stderr)


@pytest.mark.parametrize("name", LAYERS)
def test_haar_gain_multiplies_the_root_mean_square(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make()
    orthogonal_init_(layer, gain=0.5, generator=torch.Generator().manual_seed(0))
    value, stderr = mean_square(layer, shape)
    assert_within_standard_errors(value, 0.25, stderr)


@pytest.mark.parametrize("name", FULL_COVER)
def test_he_doubles_the_mean_square(name: str) -> None:
    """Gain √2 for the half that ReLU takes away; over 60 draws of the weights."""
    make, shape = LAYERS[name]
    layer = make()
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(60):
        he_(layer, generator=generator)
        values.append(mean_square(layer, shape, samples=40, generator=generator)[0])
    drawn = torch.tensor(values)
    assert_within_standard_errors(float(drawn.mean()), 2.0, float(drawn.std() / math.sqrt(60)))


def test_xavier_variance_is_torchs() -> None:
    for layer in (nn.Linear(64, 256), nn.Conv2d(16, 32, 3), nn.Conv2d(16, 32, 3, groups=4)):
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(layer.weight)
        xavier_(layer, generator=torch.Generator().manual_seed(0))
        spread = 1 / math.sqrt(2 * layer.weight.numel())
        ratio = float(layer.weight.detach().double().var()) * (fan_in + fan_out) / 2
        assert_within_standard_errors(ratio, 1.0, 2 * spread)


def test_wide_linear_is_an_isometry_up_to_the_scale() -> None:
    """Linear(64, 256): every single input keeps its mean square, not only the average one."""
    layer = nn.Linear(64, 256).double()
    orthogonal_init_(layer)
    x = torch.randn(5, 64, dtype=torch.float64)
    ratio = layer(x).square().mean(1) / x.square().mean(1)
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=TOLERANCE.closed_form)


def test_delta_convolution_is_pointwise_orthogonal() -> None:
    """With equal channels and padding the norm of an image is kept exactly, borders included."""
    layer = nn.Conv2d(8, 8, 3, padding=1).double()
    orthogonal_init_(layer)
    x = torch.randn(3, 8, 6, 6, dtype=torch.float64)
    assert torch.allclose(layer(x).square().sum((1, 2, 3)), x.square().sum((1, 2, 3)), rtol=TOLERANCE.closed_form)


def test_haar_frame_has_the_haar_law() -> None:
    """First entry of a Haar matrix: mean 0, variance 1/d, fourth moment 3/(d(d+2)). Plain QR fails the first."""
    d, draws = 5, 4000
    generator = torch.Generator().manual_seed(0)
    first = torch.stack([haar_frame(d, d, generator=generator)[0, 0] for _ in range(draws)])
    for power, expected in ((1, 0.0), (2, 1 / d), (4, 3 / (d * (d + 2)))):
        sample = first**power
        assert_within_standard_errors(float(sample.mean()), expected, float(sample.std() / math.sqrt(draws)))


def test_haar_says_what_it_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    changes = haar_(model, exclude="3")
    assert [change.name for change in changes.changed] == ["0"]
    reasons = {item.name: item.reason for item in changes.untouched}
    assert "tied to 0" in reasons["1"]
    assert "frozen" in reasons["2"]
    assert "name filter" in reasons["3"]


def test_gain_by_name_and_by_function() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    haar_(model, gain={"1": 3.0})
    assert torch.linalg.matrix_norm(model[0].weight, 2).item() == pytest.approx(1.0, rel=TOLERANCE.float32_forward)
    assert torch.linalg.matrix_norm(model[1].weight, 2).item() == pytest.approx(3.0, rel=TOLERANCE.float32_forward)
    haar_(model, gain=lambda name, index: 1.0 + index)
    assert torch.linalg.matrix_norm(model[1].weight, 2).item() == pytest.approx(2.0, rel=TOLERANCE.float32_forward)


def test_the_generator_decides() -> None:
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    state = torch.random.get_rng_state()
    haar_(one, generator=torch.Generator().manual_seed(7))
    haar_(two, generator=torch.Generator().manual_seed(7))
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("cure", [haar_, he_, xavier_])
def test_a_model_without_layers_is_an_error(cure: object) -> None:
    with pytest.raises(UsageError, match="expected a model with a"):
        cure(nn.Sequential(nn.ReLU()))  # type: ignore[operator]
    frozen = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(UsageError, match="frozen"):
        cure(frozen)  # type: ignore[operator]


def test_orthogonal_init_refuses_what_is_no_layer() -> None:
    with pytest.raises(UsageError, match="haar_"):
        orthogonal_init_(nn.ReLU())
    with pytest.raises(UsageError, match="finite"):
        orthogonal_init_(nn.Linear(2, 2), gain=math.nan)
