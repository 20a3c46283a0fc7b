"""The exact band: weights drawn anew from their own laws, measured each time, and nothing left changed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import networks
import sounding
from sounding.cli import cli
from sounding.errors import InterruptedRun, UsageError
from sounding.reader.laws import survey_law
from sounding.reader.redraw import draw, draw_weights_, survey_weights
from tolerance import TOLERANCE


@pytest.mark.parametrize(
    ("initialize", "shape"),
    [
        (lambda w: nn.init.normal_(w, std=0.3), "gaussian"),
        (lambda w: nn.init.uniform_(w, -0.2, 0.2), "uniform"),
        (lambda w: nn.init.trunc_normal_(w, std=0.1, a=-0.2, b=0.2), "truncated"),
        (lambda w: nn.init.orthogonal_(w, gain=1.7), "orthogonal"),
        (lambda w: w.data.copy_(torch.randn(w.shape) ** 3), "other"),
    ],
)
def test_a_drawn_weight_has_the_law_of_the_old_one(initialize: object, shape: str) -> None:
    with networks.drawn_from(0):
        weight = torch.empty(300, 200)
        initialize(weight)  # type: ignore[operator]
    law = survey_law(weight)
    assert law.shape == shape
    new = draw(weight, law, generator=torch.Generator().manual_seed(1))
    assert abs(torch.corrcoef(torch.stack([new.flatten(), weight.double().flatten()]))[0, 1]) < 5 / math.sqrt(60_000)
    again = survey_law(new)
    assert again.shape == shape
    error = math.sqrt((law.kurtosis - 1) / weight.numel())
    assert again.variance == pytest.approx(law.variance, rel=TOLERANCE.standard_errors * error)


class Tied(nn.Module):
    """An embedding with a padding row that is also the readout, a norm, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.norm, self.frozen, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 30)
        self.frozen.requires_grad_(requires_grad=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(16))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.frozen(self.norm(self.embed(tokens) + self.table))))
        return out


def test_what_is_tied_constant_frozen_or_zero_stays_so() -> None:
    with networks.drawn_from(0):
        model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    laws = survey_weights(model)
    assert set(laws) == {"embed.weight", "head.bias"}
    draw_weights_(model, laws, generator=torch.Generator().manual_seed(0))
    after = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"embed.weight", "head.weight", "head.bias"}
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight[0].any()


def test_the_model_and_the_random_states_are_left_as_they_were() -> None:
    with networks.drawn_from(3):
        model = networks.mlp(4, 32, normalization=nn.BatchNorm1d)
        inputs = torch.randn(16, 64)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        versions = [weight._version for weight in model.parameters()]
        state = torch.get_rng_state()
        profile = sounding.check(model, inputs, redraw=4).profile
        assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert versions == [weight._version for weight in model.parameters()]
    assert profile.settings["redraw"] == {"draws": 4}


@pytest.mark.parametrize("norm", [None, nn.LayerNorm])
def test_the_spread_over_draws_is_the_spread_over_seeds(norm: type[nn.Module] | None) -> None:
    """Two routes to one number: one network drawn anew, and as many networks from their own code."""
    draws = 48
    inputs = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))

    def check(seed: int, redraw: int = 0) -> sounding.Profile:
        with networks.drawn_from(seed):
            model = networks.mlp(5, 64, normalization=norm, initialize=nn.init.kaiming_normal_)
        # one direction for all: what differs between networks is their weights
        generator = torch.Generator().manual_seed(7)
        return sounding.check(model, inputs, tier="fast", redraw=redraw, generator=generator).profile

    redrawn = {(row.name, row.measure): row for row in check(0, draws) if row.source == "redraw"}
    seeds = [{(row.name, row.measure): row.value for row in check(seed)} for seed in range(1, draws + 1)]
    ratios, shifts = [], []
    for key, row in redrawn.items():
        if row.measure in ("mean_square", "mean_cosine", "gradient_log_norm", "weight_gradient_log_norm"):
            values = [one[key] for one in seeds]
            assert row.stderr is not None
            ratios.append(math.log(row.stderr / np.std(values, ddof=1)))
            shifts.append((row.value - np.mean(values)) / math.hypot(row.stderr, np.std(values, ddof=1)))
    assert len(ratios) > 20
    # ln of a ratio of two deviations scatters by 1/√draws, shifts by the same; the rows of one network move together
    assert max(map(abs, ratios)) < TOLERANCE.standard_errors / math.sqrt(draws)
    assert max(map(abs, shifts)) < TOLERANCE.standard_errors / math.sqrt(draws)


def test_the_band_of_theory_is_replaced_and_what_theory_lacks_gets_rows() -> None:
    with networks.drawn_from(0):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)
        )
        inputs = torch.randn(8, 3, 8, 8)
        plain = sounding.check(model, inputs, theory=True).profile
        profile = sounding.check(model, inputs, theory=True, redraw=8).profile

    def keys(one: sounding.Profile, source: str) -> set[tuple[str, str]]:
        return {(row.name, row.measure) for row in one if row.source == source}

    old = {(row.name, row.measure): row for row in plain if row.source == "theory"}
    assert keys(profile, "theory") == set(old)
    for row in profile.select(source="theory"):
        assert row.value == old[row.name, row.measure].value
        # the gradient at the output is the loss's own direction, which no weight moves
        assert row.stderr != old[row.name, row.measure].stderr or (row.name, row.measure) == ("5", "gradient_log_norm")
    assert ("0", "gradient_log_norm") in keys(profile, "redraw")  # no rule leads through max pooling
    assert not keys(profile, "redraw") & keys(profile, "theory")
    assert not profile.select("mean_square", layer=0, source="redraw").rows, "no draw moves the input"
    measured = [row for row in profile if row.source == "check"]
    assert [row.value for row in measured] == [row.value for row in plain if row.source == "check"]


def test_ctrl_c_keeps_the_measurement_and_the_draws() -> None:
    class Impatient(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(0)
            if len(counts) == 5:
                raise KeyboardInterrupt
            return super().forward(x)

    counts: list[int] = []
    model = nn.Sequential(Impatient(8, 8), nn.ReLU(), nn.Linear(8, 4))
    before = model[0].weight.detach().clone()
    with pytest.raises(InterruptedRun) as stop:
        sounding.check(model, torch.randn(6, 8), theory=False, redraw=16)
    partial = stop.value.partial
    assert partial is not None
    assert partial.profile.settings["partial"] is True
    assert partial.profile.settings["redraw"] == {"draws": 3}
    assert "redraw" in partial.profile.sources
    assert torch.equal(before, model[0].weight)


@pytest.mark.parametrize("redraw", [1, -2, 2.0, True])
def test_a_wrong_number_of_draws_is_refused(redraw: object) -> None:
    with pytest.raises(UsageError, match="redraw"):
        sounding.check(nn.Linear(2, 2), torch.randn(4, 2), redraw=redraw)  # type: ignore[arg-type]


def test_the_command_line_draws_again() -> None:
    words = ["check", "mlp,depth=3,width=16", "--batch-size", "8", "--redraw", "3", "--json"]
    result = CliRunner().invoke(cli, words)
    told = json.loads(result.stdout)
    assert told["profile"]["settings"]["redraw"] == {"draws": 3}
