"""A check on a GPU gives the numbers of a check on the CPU, and reads nothing back before the pass is over."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sounding
from sounding.probe.on_device import multiply
from sounding.probe.product_kernels import can_fuse
from tolerance import TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
SPECTRAL = ("numerical_rank", "condition_number", "isometry_gap")  # they count what rounding leaves


def mlp(scale: float = 1.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(32, 10)), scale * torch.randn(24, 32)


def wide() -> tuple[nn.Module, Tensor]:
    """Outputs too large for a block: 6 samples of a million features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 61, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)), torch.randn(
        6, 3, 130, 131
    )


def tokens() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 10)), torch.randint(
        0, 50, (8, 12)
    )


class Overflow(nn.Module):
    """One entry of the first sample becomes infinite."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.zeros_like(x)
        first.view(-1)[0] = math.inf
        return x + first


def values_of(model: nn.Module, inputs: Tensor, *, device: str, tier: str) -> dict[tuple[str, str], float]:
    model, inputs = copy.deepcopy(model).to(device), inputs.to(device)
    targets = torch.arange(inputs.shape[0], device=device) % 10
    if not inputs.is_floating_point():
        targets = inputs % 10
    report = sounding.check(model, inputs, targets, tier=tier, theory=False)
    assert not any(row.value != row.value for row in report.profile if row.measure == "gradient_log_norm")
    return {(row.name, row.measure): row.value for row in report.profile}


@pytest.mark.parametrize("tier", ["fast", "full"])
@pytest.mark.parametrize("make", [mlp, wide, tokens, lambda: mlp(1e12), lambda: mlp(1e-12)])
def test_the_numbers_are_those_of_the_cpu(make: Callable[[], tuple[nn.Module, Tensor]], tier: str) -> None:
    model, inputs = make()
    if any(isinstance(part, nn.LazyLinear) for part in model.modules()):
        model(inputs)
    here = values_of(model, inputs, device="cpu", tier=tier)
    there = values_of(model, inputs, device="cuda", tier=tier)
    assert there.keys() == here.keys()
    kept = [key for key in here if key[1] not in SPECTRAL]
    close = TOLERANCE.float32_forward
    assert [there[key] for key in kept] == pytest.approx([here[key] for key in kept], rel=close, abs=close, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("samples", "features", "scale"), [(5, 40_000, 1.0), (40, 33_001, 1e-20), (128, 65_536, 1e15)])
def test_products_of_large_matrices_keep_the_digits_of_what_differs(
    samples: int, features: int, scale: float, dtype: torch.dtype
) -> None:
    """The kernel beside float64, for samples that differ by a hundredth of their mean, at any scale."""
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(0)
    mean = torch.randn(features, device="cuda", generator=generator)
    apart = torch.randn(samples, features, device="cuda", generator=generator)
    matrix = (scale * (mean + 0.01 * apart)).to(dtype)
    out, broken = torch.zeros(samples, samples, dtype=torch.float64, device="cuda"), torch.zeros((), device="cuda")
    assert can_fuse(matrix)
    means = multiply(matrix, out, broken, alive=True)
    wide = matrix.double()
    expected = wide @ wide.T
    centred = wide - wide.mean(0)
    close = TOLERANCE.float32_forward
    torch.testing.assert_close(out, expected, rtol=close, atol=0.0)
    level = out.mean(0)
    rest = out - level - level[:, None] + level.mean()
    assert (rest - centred @ centred.T).abs().max() <= close * (centred @ centred.T).abs().max()
    assert (means.double() - wide.mean(0)).abs().max() <= close * wide.abs().max()
    assert broken == 0
    matrix[1, 7], matrix[2, features - 1] = math.nan, math.inf
    multiply(matrix, out, broken)
    assert broken == 2
    assert out.isnan().all()


def test_products_are_exact_where_tf32_is_on() -> None:
    model, inputs = mlp()
    inputs = inputs[:1] + 1e-4 * inputs  # what differs is far below the ten bits of TF32
    expected = values_of(model, inputs, device="cuda", tier="fast")["input", "distinct_share"]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = values_of(model, inputs, device="cuda", tier="fast")["input", "distinct_share"]
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == pytest.approx(expected, rel=TOLERANCE.float32_forward)


@pytest.mark.parametrize("make", [mlp, wide])
def test_what_is_not_finite_is_said(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, inputs = make()
    if any(isinstance(part, nn.LazyLinear) for part in model.modules()):
        model(inputs)
    spoilt = nn.Sequential(model[0], Overflow(), *model[1:])
    reports = [
        sounding.check(copy.deepcopy(spoilt).to(device), inputs.to(device), tier="fast", theory=False)
        for device in ("cpu", "cuda")
    ]
    fractions = [
        {row.name: row.value for row in report.profile if row.measure == "non_finite_fraction"} for report in reports
    ]
    assert fractions[0] == pytest.approx(fractions[1])
    assert fractions[0]
    assert reports[0].verdict.status == reports[1].verdict.status


def test_nothing_is_read_before_the_pass_is_over() -> None:
    model, inputs = mlp()
    model, inputs = model.cuda(), inputs.cuda()
    targets = torch.arange(24, device="cuda") % 10
    with sounding.watch(model) as watched:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            cross_entropy(model(inputs), targets).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(row.value) for row in watched.profile.select("gradient_log_norm"))
