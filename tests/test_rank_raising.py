"""Rank-raising pre-training: the ratio rises on fresh batches, targets are honoured, failures leave no trace."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import networks
from sounding.data import load_batch
from sounding.errors import NumericalError, UsageError
from sounding.measures import participation_ratio
from sounding.models import Mlp
from sounding.repair import he_, raise_rank_
from tolerance import TOLERANCE


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits(samples: int, seed: int = 0) -> Tensor:
    return load_batch("digits", batch_size=samples, generator=draw(seed)).inputs


def trunk(model: Mlp) -> nn.Sequential:
    return nn.Sequential(*list(model.children())[:-1])


def last_hidden(model: Mlp, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        features: Tensor = trunk(model)(inputs)
    return features


def spread(model: Mlp, inputs: Tensor) -> float:
    return float(participation_ratio(last_hidden(model, inputs)))


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_what_is_collapsed_to_rounding_is_refused_before_the_work() -> None:
    """PyTorch's default start, 20 layers: r is 1 to 13 digits, and the hint that is given helps."""
    with networks.drawn_from(0):
        model, inputs = networks.mlp(20, 32, features=16), torch.randn(64, 16)
        before = [weight.clone() for weight in model.parameters()]
        seen: list[int] = []
        with pytest.raises(NumericalError, match=r"too near 1 .*Try he or haar first"):
            raise_rank_(model, inputs, progress=lambda name, number, ratio: seen.append(number))
        assert not seen
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        he_(model)
        (change,) = raise_rank_(model, inputs, batches=3).changed
    assert float(change.before) > 1.001


def test_a_collapsed_network_gets_rank_on_fresh_samples_and_is_not_cancelled() -> None:
    pictures = digits(640)
    seen, fresh = pictures[:512], pictures[512:]
    model = Mlp(64, 10, depth=20, width=48, generator=draw(0))
    before, size = spread(model, fresh), last_hidden(model, fresh).square().mean()
    changes = raise_rank_(model, seen, generator=draw(1))
    assert before < 1.2
    assert spread(model, fresh) > 4 * before
    assert "reached" in changes.notes[0]
    assert 0.1 < float(last_hidden(model, fresh).square().mean() / size) ** 0.5 < 3


@pytest.mark.slow
def test_fifty_relu_layers_get_four_times_their_participation_ratio() -> None:
    """The network of the plain trial: width 128, He weights, digits; on samples the descent has not seen."""
    pictures = digits(1128)
    seen, fresh = pictures[:1000], pictures[1000:]
    factors = []
    for seed in range(3):
        model = Mlp(64, 10, depth=50, width=128, generator=draw(seed))
        before = spread(model, fresh)
        raise_rank_(model, seen, generator=draw(seed + 10))
        factors.append(spread(model, fresh) / before)
    values = torch.tensor(factors)
    assert float(values.min()) > 4
    assert float(values.mean() - 2 * values.std() / math.sqrt(len(factors))) > 4


def test_one_fixed_step_is_the_gradient_of_the_released_loss() -> None:
    model = Mlp(6, 3, depth=2, width=5, activation="tanh", generator=draw(0)).double()
    inputs = torch.randn(8, 6, generator=draw(1), dtype=torch.float64)
    twin = copy.deepcopy(model)
    raise_rank_(model, inputs, rate=0.01, batch_size=4, batches=1, steps=1, generator=draw(2))
    batch = inputs[torch.randperm(8, generator=draw(2))[:4]]
    features = trunk(twin)(batch)
    gram = features @ features.T
    (torch.linalg.matrix_norm(gram) / torch.trace(gram)).backward()
    for moved, weight in zip(trunk(model).parameters(), trunk(twin).parameters(), strict=True):
        expected = weight.detach() - 0.01 * weight.grad  # type: ignore[operator]
        torch.testing.assert_close(moved.detach(), expected, rtol=TOLERANCE.two_routes, atol=TOLERANCE.rounding)
    assert all(
        torch.equal(moved, weight) for moved, weight in zip(model[-1].parameters(), twin[-1].parameters(), strict=True)
    )


def test_layers_are_raised_one_after_the_other() -> None:
    model = Mlp(16, 3, depth=6, width=16, generator=draw(0))
    seen: list[str] = []
    inputs = torch.randn(64, 16, generator=draw(1)) + 2
    changes = raise_rank_(
        model,
        inputs,
        layers=["2.activation", "4.activation"],
        target=3.0,
        generator=draw(2),
        progress=lambda name, number, ratio: seen.append(name),
    )
    assert [change.name for change in changes.changed] == ["2.activation", "4.activation"]
    assert list(dict.fromkeys(seen)) == ["2.activation", "4.activation"]


def test_it_stops_at_once_where_the_target_is_reached_already() -> None:
    model = Mlp(16, 3, depth=1, width=16, generator=draw(0))
    numbers: list[int] = []
    raise_rank_(
        model,
        torch.randn(64, 16, generator=draw(1)),
        target=1.5,
        progress=lambda name, number, ratio: numbers.append(number),
    )
    assert numbers == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 40.0}, "from 1 to 32"),
        ({"target": 16.0}, "below 16"),
        ({"target": 0.5}, "from 1 to"),
        ({"rate": -1.0}, "rate must be positive"),
        ({"batches": 0}, "at least 1 minibatch"),
        ({"layers": "nowhere"}, "no module called"),
        ({"include": "nowhere"}, "trainable"),
        ({"include": "readout"}, "no trainable parameter stands before"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(options: dict[str, object], message: str) -> None:
    model = Mlp(16, 3, depth=3, width=16, generator=draw(0))
    before = state(model)
    with pytest.raises(UsageError, match=message):
        raise_rank_(model, torch.randn(64, 16, generator=draw(1)), **options)  # type: ignore[arg-type]
    assert unchanged(model, before)


def test_frozen_layers_stay_and_are_named() -> None:
    model = Mlp(16, 3, depth=3, width=16, generator=draw(0))
    model.get_submodule("1.linear").requires_grad_(False)
    before = state(model)
    changes = raise_rank_(model, torch.randn(64, 16, generator=draw(1)), batches=4, generator=draw(2))
    after = model.state_dict()
    assert torch.equal(after["1.linear.weight"], before["1.linear.weight"])
    assert not torch.equal(after["2.linear.weight"], before["2.linear.weight"])
    assert [left.name for left in changes.untouched] == ["1.linear"]


def test_a_diverging_descent_and_a_dead_network_leave_the_model_as_it_was() -> None:
    model = Mlp(16, 3, depth=3, width=16, generator=draw(0))
    inputs = torch.randn(64, 16, generator=draw(1))
    before = state(model)
    with pytest.raises(NumericalError):
        raise_rank_(model, inputs, rate=1e30, batches=5, generator=draw(2))
    assert unchanged(model, before)
    with torch.no_grad():
        model.get_submodule("2.linear").weight.zero_()  # type: ignore[operator, union-attr]
    with pytest.raises(NumericalError, match="no signal"):
        raise_rank_(model, inputs)


def test_batch_norm_statistics_and_mode_stay() -> None:
    model = Mlp(16, 3, depth=3, width=16, norm="batch", generator=draw(0)).eval()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    raise_rank_(model, torch.randn(64, 16, generator=draw(1)), batches=4, generator=draw(2))
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert not any(module.training for module in model.modules())


def test_tokens_and_several_arguments_are_drawn_alike() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            assert torch.equal(x[:, 0, 0], gate)
            result: Tensor = self.last(torch.relu(self.first(x)) * gate[:, None, None])
            return result

    x = torch.randn(40, 5, 6, generator=draw(0)) + 1
    for inputs in ((x, x[:, 0, 0]), {"x": x, "gate": x[:, 0, 0]}):
        changes = raise_rank_(Gated(), inputs, batches=3, generator=draw(1))  # type: ignore[arg-type]
        assert [change.name for change in changes.changed] == ["input of last"]
