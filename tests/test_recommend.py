"""Recommendations: they follow the evidence, leave the model alone, and say why a cure could not be tried."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import sounding
from sounding.errors import UsageError
from sounding.models import Mlp
from sounding.profile import Estimate
from sounding.repair.evidence import Vitals, _share
from sounding.repair.recommend import score
from tolerance import TOLERANCE

VITALS = Vitals(
    depth=51,
    growth=Estimate(1.1, 0.01),
    growth_interval=(1.08, 1.12),
    depth_scales=4.77,
    trainable_depth=168,
    trainable_interval=(141, 208),
    participation_ratio=Estimate(5.0, 0.1),
    mean_cosine=Estimate(0.3, 0.01),
    alignment=Estimate(0.3),
    spread=0.5,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits(count: int = 128, seed: int = 0) -> tuple[Tensor, Tensor]:
    from sounding.data import load_batch

    batch = load_batch("digits", batch_size=count, generator=generator(seed))
    assert batch.targets is not None
    return batch.inputs, batch.targets


@pytest.mark.slow
def test_a_deep_relu_network_with_batch_norm_is_tuned() -> None:
    """Explosion is what is wrong, so tuning comes first, nothing unhealthy before it; the model is untouched."""
    model = Mlp(64, 10, depth=50, width=64, norm="batch", generator=generator())
    kept = copy.deepcopy(model.state_dict())
    eps = {name: module.eps for name, module in model.named_modules() if isinstance(module, nn.BatchNorm1d)}
    inputs, targets = digits()
    found = sounding.recommend(model, inputs, targets, generator=generator(1))
    assert "tune_batchnorm" in found.best.methods
    assert found.best.healthy
    names = [item.methods for item in found.tried]
    assert names.index(()) > names.index(found.best.methods)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(module.eps == eps[name] for name, module in model.named_modules() if isinstance(module, nn.BatchNorm1d))
    health = [item.healthy for item in found.tried]
    assert health == sorted(health, reverse=True)
    plan = sounding.plan(model, inputs, targets, method=found.best.methods, options=found.best.options)
    assert plan.evidence.healthy


@pytest.mark.slow
def test_orthogonalize_is_not_chosen_where_it_makes_gradients_explode() -> None:
    """A plain 50-layer ReLU network: orthogonalize cures the collapse, and is ranked below what trains."""
    model = Mlp(64, 10, depth=50, width=128, generator=generator(2))
    inputs, targets = digits(256)
    found = sounding.recommend(model, inputs, targets, generator=generator(1), exclude=("raise_rank",))
    by_name = {item.methods: item for item in found.tried}
    orthogonal = by_name[("orthogonalize",)]
    assert orthogonal.caused == ("gradient_explosion",)
    assert orthogonal.score == 0
    assert set(found.best.methods) >= {"add_batchnorm", "tune_batchnorm"}
    assert "orthogonalize" in str(found)
    assert "Recommended: add_batchnorm" in str(found)


def test_a_healthy_network_is_left_alone() -> None:
    model = Mlp(64, 10, depth=4, width=64, norm="batch", generator=generator(3))
    inputs, targets = digits()
    assert sounding.recommend(model, inputs, targets, generator=generator()).best.methods == ()


def test_what_cannot_be_tried_is_told() -> None:
    """Too few samples for orthogonalize: a reason, not an error; a functional activation hides the rest."""
    model = Mlp(64, 10, depth=3, width=32, generator=generator(3))
    found = sounding.recommend(model, digits(16)[0], generator=generator(), exclude=("raise_rank",))
    reasons = dict(found.failed)
    assert "needs at least 64 samples, got 16" in reasons["orthogonalize"]
    told = json.loads(json.dumps(found.to_dict(), default=str))
    assert told["best"]["methods"] == list(found.best.methods)
    assert {item["methods"] for item in told["failed"]} == set(reasons)


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="finite"):
        sounding.recommend(nn.Linear(4, 4), torch.full((8, 4), math.inf))
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
        sounding.recommend("model", torch.zeros(8, 4))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown method 'hair'"):
        sounding.recommend(nn.Linear(4, 4), torch.randn(8, 4), exclude=("hair",))


@given(st.floats(0, 40), st.floats(0, 40), st.floats(0, 1))
def test_a_score_falls_with_depth_scales_and_rises_with_spread(first: float, second: float, spread: float) -> None:
    low, high = sorted((first, second))
    near = score(dataclasses.replace(VITALS, depth_scales=low, spread=spread))
    far = score(dataclasses.replace(VITALS, depth_scales=high, spread=spread))
    assert 0 <= far <= near <= spread
    assert score(dataclasses.replace(VITALS, depth_scales=16.0)) == 0
    assert score(dataclasses.replace(VITALS, depth_scales=math.nan)) == 0
    assert score(dataclasses.replace(VITALS, depth_scales=math.inf)) == 0


def test_a_share_by_hand() -> None:
    """Two orthogonal directions of equal size around a mean: half lies outside one; the mean takes its own share."""
    rows = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]]).double()
    outside = 1 - 2**-0.5
    assert _share(rows @ rows.T, alone=False) == pytest.approx(outside, rel=TOLERANCE.closed_form)
    moved = rows + torch.tensor([0.0, 0, 3.0])
    assert _share(moved @ moved.T, alone=False) == pytest.approx(outside / 10, rel=TOLERANCE.closed_form)
    assert _share(moved @ moved.T, alone=True) == pytest.approx(outside, rel=TOLERANCE.closed_form)
    same = torch.ones(4, 3).double()
    assert _share(same @ same.T, alone=True) == pytest.approx(0, abs=TOLERANCE.closed_form)


@pytest.mark.parametrize(("fault", "cure"), [("gain", "redraw"), ("bias", "zero_biases")])
def test_what_theory_blames_is_cured_alone(fault: str, cure: str) -> None:
    """One bad layer is drawn anew, or its bias set to zero; the other layers keep what they have."""
    with networks.drawn_from(0):
        model = networks.mlp(12, 64, initialize=nn.init.kaiming_normal_)
        with torch.no_grad():
            if fault == "gain":
                model[8].weight.mul_(3000)
            else:
                model[8].bias.normal_(0, 1000)
        inputs = torch.randn(64, 64)
        found = sounding.recommend(model, inputs, exclude=["raise_rank"], generator=generator())
    assert "'8'" in found.cause
    assert found.best.methods == (cure,)
    assert found.best.healthy
    assert found.best.options[cure] == {"include": ["8"]}
    assert found.to_dict()["cause"] == found.cause
