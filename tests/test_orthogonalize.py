"""Iterative orthogonalization through real layers: gaps that fall, scales that stay, and the illness it brings."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from sounding.data import load_batch
from sounding.errors import NumericalError, UsageError
from sounding.measures import mean_cosine, orthogonality_gap, participation_ratio
from sounding.models import Mlp
from sounding.repair import orthogonalize_
from sounding.repair.orthogonalize import _sample_matrices
from tolerance import TOLERANCE

CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(3, 12, 3),
    "stride": lambda: nn.Conv2d(3, 12, 3, stride=2, padding=1),
    "groups": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "dilation": lambda: nn.Conv2d(3, 12, 3, dilation=2, padding=2),
    "circular": lambda: nn.Conv2d(3, 12, 3, padding=1, padding_mode="circular"),
    "reflect": lambda: nn.Conv2d(3, 12, 3, padding="same", padding_mode="reflect"),
    "narrow": lambda: nn.Conv2d(3, 4, (3, 2), padding=(1, 0)),
    "conv1d": lambda: nn.Conv1d(3, 12, 5, stride=2),
    "conv3d": lambda: nn.Conv3d(2, 8, 2),
}


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(layer: nn.Module, samples: int = 24) -> Tensor:
    """Smooth fields plus a common part: patches that are far from orthogonal."""
    spatial = {nn.Conv1d: (33,), nn.Conv2d: (9, 9), nn.Conv3d: (5, 5, 5)}[type(layer)]
    noise = torch.randn(samples, layer.in_channels, *spatial, generator=draw(3))
    return noise.cumsum(-1) + 1


def hidden_pair(model: Mlp, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-activations and activations of the last hidden layer."""
    before: list[Tensor] = []
    last = list(model.children())[-2]
    handle = last.get_submodule("linear").register_forward_hook(lambda _, __, output: before.append(output))
    with torch.no_grad():
        after = nn.Sequential(*list(model.children())[:-1])(inputs)
    handle.remove()
    return before[0], after


def test_fifty_relu_layers_keep_the_rank_of_the_input_on_a_fresh_batch_and_their_gradients_explode() -> None:
    """One cure, and the illness it brings: the 50-layer ReLU network of width 128 on digits, over seeds."""
    pictures = load_batch("digits", batch_size=1200, generator=draw(0)).inputs
    seen, fresh = pictures[:1000], pictures[1000:1128]
    ratios, cosines, growth = [], [], []
    for seed in range(3):
        model = Mlp(64, 10, depth=50, width=128, generator=draw(seed))
        orthogonalize_(model, seen, generator=draw(seed + 10))
        before, after = hidden_pair(model, fresh)
        ratios.append(float(participation_ratio(before) / participation_ratio(fresh)))
        cosines.append(float(mean_cosine(after)))
        growth.append(gradient_growth(model, fresh))
    for values, bound, sign in ((ratios, 1.0, 1), (cosines, 0.5, -1), (growth, 1000.0, 1)):
        tensor = torch.tensor(values).log()
        margin = 2 * tensor.std() / math.sqrt(len(values))
        assert sign * (float(tensor.mean()) - math.log(bound)) > margin, values


def gradient_growth(model: Mlp, inputs: Tensor) -> float:
    """‖gradient at the first hidden layer‖ over that at the last."""
    found: list[Tensor] = []
    layers = list(model.children())
    handles = [
        layer.register_forward_hook(lambda _, __, output: found.append(output)) for layer in (layers[0], layers[-2])
    ]
    outputs = model(inputs)
    for handle in handles:
        handle.remove()
    first, last = torch.autograd.grad((outputs * torch.randn(outputs.shape, generator=draw(5))).sum(), found)
    return float(first.norm() / last.norm())


@pytest.mark.parametrize("exponent", [-0.5, -1.0])
@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 16)])
def test_a_linear_layer_gets_orthonormal_directions_times_a_power_of_the_singular_values(
    shape: tuple[int, int], exponent: float
) -> None:
    """W = s V′ Σ^p Qᵀ: W (XᵀX)^{-p} Wᵀ, or its other side, is a multiple of the identity, up to shrinkage."""
    inner, out = shape
    samples = 200_000
    inputs = torch.randn(samples, inner, generator=draw(0), dtype=torch.float64) * torch.linspace(0.5, 1.5, inner)
    layer = nn.Linear(inner, out).double()
    orthogonalize_(layer, inputs, exponent=exponent, rows=samples, generator=draw(1))
    squares, directions = torch.linalg.eigh(inputs.T @ inputs)
    frame = layer.weight.detach() @ directions * squares ** (-exponent / 2)
    product = frame.T @ frame if out >= inner else frame @ frame.T
    product = product / product.diagonal().mean()
    torch.testing.assert_close(product, torch.eye(len(product)).double(), rtol=0, atol=10 * inner / samples * inner)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_patch_matrix_is_what_the_convolution_multiplies(name: str) -> None:
    layer = CONVOLUTIONS[name]().double()
    inputs = images(layer).double()
    groups = _sample_matrices(layer, inputs, 10**6, None)
    weights = layer.weight.detach().flatten(1).chunk(len(groups))
    rows = torch.cat([patches @ weight.T for patches, weight in zip(groups, weights, strict=True)], dim=1)
    outputs = layer(inputs).detach().movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(rows + layer.bias.detach(), outputs, rtol=TOLERANCE.two_routes, atol=TOLERANCE.exact)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_make_patches_more_orthogonal_and_keep_unit_mean_square(name: str) -> None:
    layer = CONVOLUTIONS[name]()
    inputs = images(layer)
    patches = _sample_matrices(layer, inputs, 10**6, None)
    orthogonalize_(layer, inputs, generator=draw(1))
    outputs = layer(inputs).detach()
    assert float(outputs.square().mean()) == pytest.approx(1.0, rel=TOLERANCE.float32_forward)
    assert not layer.bias.any()
    for group, part in zip(patches, outputs.chunk(len(patches), dim=1), strict=True):
        rows = part.movedim(1, -1).flatten(0, -2)
        if rows.shape[1] >= group.shape[1]:
            assert float(orthogonality_gap(rows)) < float(orthogonality_gap(group))


def test_scale_is_set_after_a_relu_and_before_other_activations() -> None:
    inputs = torch.randn(256, 16, generator=draw(0)) + 1
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    orthogonalize_(model, inputs, gain=2.0, generator=draw(1))
    for stop in (2, 3, 5):
        assert float(model[:stop](inputs).detach().square().mean()) == pytest.approx(4, rel=TOLERANCE.float32_forward)


def test_dead_inputs_and_constant_pixels_stay_bounded() -> None:
    inputs = torch.randn(128, 16, generator=draw(0))
    inputs[:, :4] = 0.0
    inputs[:, 4] = 3.0
    layer = nn.Linear(16, 32)
    orthogonalize_(layer, inputs, floor=0.1, generator=draw(1))
    singular = torch.linalg.svdvals(layer.weight.detach().double())
    assert float(singular[0] / singular[-1]) <= 0.1**-0.5 * (1 + TOLERANCE.float32_forward)
    assert bool(torch.isfinite(layer(inputs)).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_keep_theirs(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(dtype)
    inputs = torch.randn(64, 8, generator=draw(0)).to(dtype)
    orthogonalize_(model, inputs, generator=draw(1))
    assert model[0].weight.dtype == dtype
    assert float(model(inputs).detach().double().square().mean()) == pytest.approx(1, rel=TOLERANCE.bfloat16_forward)


def test_a_shared_layer_is_set_once_and_uncalled_ones_are_named() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.shared(torch.relu(self.shared(x)))
            return result

    changes = orthogonalize_(Loop(), torch.randn(32, 8, generator=draw(0)))
    assert [change.name for change in changes.changed] == ["shared"]
    assert [(left.name, left.reason) for left in changes.untouched] == [("spare", "the forward pass did not call it")]


def test_memory_does_not_grow_with_depth() -> None:
    """No graph and no kept activation: at any layer, only a few earlier signals are alive."""
    depth, signals, alive = 12, [], []

    def count(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        signals.append(weakref.ref(arguments[0]))
        alive.append(sum(signal() is not None for signal in signals))

    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth)])
    for block in model:
        block[1].register_forward_pre_hook(count)  # type: ignore[index]
    orthogonalize_(model, torch.randn(97, 16, generator=draw(0)), generator=draw(1))
    assert alive[-1] <= 2


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (torch.randn(8, 16), {}, "needs at least 16 samples, got 8"),
        (torch.full((64, 16), math.nan), {}, "finite"),
        (torch.randn(1, 16), {}, "at least 2 samples"),
        (torch.randn(64, 16), {"exponent": 0.5}, "between −1 and 0"),
        (torch.randn(64, 16), {"floor": 0.0}, "between 0 and 1"),
        (torch.randn(64, 16), {"include": "nothing"}, "with none that may be changed"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(inputs: Tensor, options: dict[str, float], message: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        orthogonalize_(model, inputs, **options)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_signal_that_dies_on_the_way_is_an_error_and_earlier_layers_come_back() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0

    model = nn.Sequential(nn.Linear(8, 8), Nothing(), nn.Linear(8, 8))
    before = model[0].weight.detach().clone()
    with pytest.raises(NumericalError, match="no signal reaches layer '2'"):
        orthogonalize_(model, torch.randn(32, 8))
    assert torch.equal(model[0].weight, before)


def test_a_slice_is_the_formula_as_printed() -> None:
    """W ∝ V′ Σ^p Qᵀ with V′ the first rows of P, X = P Σ Qᵀ: many samples, so that shrinkage changes little."""
    features = torch.randn(4000, 6, dtype=torch.float64, generator=draw(0)) * torch.tensor([1.0, 1, 1, 2, 2, 3])
    layer = nn.Linear(6, 4, bias=False).double()
    orthogonalize_(layer, features, frame="slice")
    left, sigma, right = torch.linalg.svd(features, full_matrices=False)
    printed = (left[:4] * sigma**-0.5) @ right
    cosine = nn.functional.cosine_similarity(layer.weight.detach().flatten(), printed.flatten(), dim=0)
    assert float(cosine) > 1 - 1e-4


def test_a_slice_needs_as_many_samples_as_outputs_and_an_unknown_frame_is_named() -> None:
    features = torch.randn(5, 3, generator=draw(0))
    with pytest.raises(UsageError, match="8 outputs"):
        orthogonalize_(nn.Linear(3, 8), features, frame="slice")
    with pytest.raises(UsageError, match="unknown frame"):
        orthogonalize_(nn.Linear(3, 3), features, frame="wedge")  # type: ignore[arg-type]
