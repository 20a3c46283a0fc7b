"""Known initializations on equal terms: LSUV in training mode, residual branches that start at zero, clipping."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from sounding.errors import NumericalError, UsageError
from sounding.repair import AdaptiveClipping, lsuv_, zero_residual_
from tolerance import TOLERANCE


class Block(nn.Module):
    """x + branch(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.branch(x)
        return result


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("norm", [False, True])
def test_lsuv_gives_every_layer_unit_variance_in_training_mode(norm: bool) -> None:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(16, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU()]
    model = nn.Sequential(*layers).eval()
    inputs = 3 * torch.randn(128, 16, generator=draw(0)) + 1
    lsuv_(model, inputs, tolerance=0.01, generator=draw(1))
    assert not any(module.training for module in model.modules())
    model.train()
    for index, module in enumerate(model):
        if isinstance(module, nn.Linear):
            variance = float(model[: index + 1](inputs).detach().var(correction=0))
            assert variance == pytest.approx(1, abs=TOLERANCE.percent)


def test_lsuv_of_a_dead_signal_is_an_error_and_the_model_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NumericalError, match="variance"):
        lsuv_(model, torch.zeros(16, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ends_in_norm", [False, True])
def test_residual_blocks_start_as_the_identity(ends_in_norm: bool) -> None:
    def branch() -> nn.Module:
        tail = [nn.BatchNorm1d(8)] if ends_in_norm else []
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), *tail)

    model = nn.Sequential(*[Block(branch()) for _ in range(4)])
    first = model[0].branch[0].weight.detach().clone()  # type: ignore[index, union-attr]
    inputs = torch.randn(16, 8, generator=draw(0))
    zero_residual_(model, inputs)
    torch.testing.assert_close(model(inputs), inputs)
    # Fixup with 4 branches of 3 layers: 4^(−1/4); a norm makes the scale of weights moot
    factor = 1.0 if ends_in_norm else 4**-0.25
    torch.testing.assert_close(model[0].branch[0].weight.detach(), factor * first)  # type: ignore[index, union-attr]


def test_models_without_residual_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="no residual branch"):
        zero_residual_(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4))


def clip_by_hand(weight: Tensor, gradient: Tensor, clipping: float, floor: float) -> Tensor:
    rows = []
    for unit, slope in zip(weight, gradient, strict=True):
        limit = clipping * max(math.sqrt(float((unit**2).sum())), floor)
        size = math.sqrt(float((slope**2).sum()))
        rows.append(slope * min(1.0, limit / size) if size else slope)
    return torch.stack(rows)


def test_clipping_is_the_formula_unit_by_unit() -> None:
    weight = nn.Parameter(torch.randn(5, 3, 2, 2, generator=draw(0), dtype=torch.float64))
    with torch.no_grad():
        weight[0].zero_()
    gradient = torch.randn(weight.shape, generator=draw(1), dtype=torch.float64) * torch.tensor(
        [1.0, 1e-3, 10.0, 0.0, 0.1], dtype=torch.float64
    ).view(5, 1, 1, 1)
    optimizer = AdaptiveClipping(torch.optim.SGD([weight], lr=0.5), clipping=0.02, floor=1e-3)
    before, weight.grad = weight.detach().clone(), gradient.clone()
    optimizer.step()
    expected = before - 0.5 * clip_by_hand(before, gradient, 0.02, 1e-3)
    torch.testing.assert_close(weight.detach(), expected, rtol=TOLERANCE.closed_form, atol=0)


def test_clipping_works_with_closures_schedulers_and_state() -> None:
    model = nn.Linear(4, 2)
    optimizer = AdaptiveClipping(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), clipping=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    inputs = torch.randn(8, 4, generator=draw(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(inputs).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert float(optimizer.step(closure).detach()) < float(first.detach())
    saved = copy.deepcopy(optimizer.state_dict())
    twin = AdaptiveClipping(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    twin.load_state_dict(saved)
    assert twin.param_groups[0]["lr"] == 0.5
    assert twin.state_dict()["state"].keys() == saved["state"].keys()
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("options", [{"clipping": 0.0}, {"floor": -1.0}, {"clipping": math.nan}])
def test_clipping_without_a_meaning_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="positive"):
        AdaptiveClipping(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), **options)
