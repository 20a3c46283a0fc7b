"""Faults of structure: a block that differs from its siblings, a norm over places, a gate that is shut, a loss that
broadcasts; and what looks like them and is meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from generators import seeded

WIDTH, PLACES, SAMPLES = 16, 6, 24


def kinds(model: nn.Module, inputs: Any, targets: Any = None, *, loss: Any = None) -> dict[str, str]:
    """Kind → severity of what a check finds, the most severe of a kind."""
    found = sounding.check(model, inputs, targets, loss=loss, theory=False).verdict.findings
    return {one.kind: one.severity for one in reversed(found)}


def tokens() -> Tensor:
    return torch.randn(SAMPLES, PLACES, WIDTH, generator=seeded(3))


class Block(nn.Module):
    """A residual block whose parts can be left out."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.fault == "norm" else self.norm(x)
        y = self.wide(y)
        y = y if self.fault == "activation" else functional.gelu(y)
        y = self.narrow(y)
        if self.fault == "behind":
            return self.norm(x + self.narrow(functional.gelu(self.wide(x))))
        return y if self.fault == "sum" else x + x + y if self.fault == "twice" else x + y


class Stack(nn.Module):
    """Blocks in a row and a head."""

    def __init__(self, faults: dict[int, str], depth: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(faults.get(index, "")) for index in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("sum", "odd_branch", "lacks the operation “add”"),
        ("norm", "odd_branch", "lacks the operation “layer norm”"),
        ("activation", "activation", "lacks the operation “gelu”"),
        ("behind", "odd_branch", "also has"),
        ("twice", "odd_branch", "also has the operation “add”"),
    ],
)
def test_a_block_that_differs_from_its_siblings_is_named(fault: str, kind: str, word: str) -> None:
    found = sounding.check(Stack({2: fault}), tokens(), theory=False).verdict.findings
    named = [one for one in found if one.layer == "blocks.2" and one.kind == kind]
    assert len(named) == 1
    assert word in named[0].why


@pytest.mark.parametrize("faults", [{}, dict.fromkeys(range(5), "norm"), {1: "norm", 3: "norm"}, {0: "sum"}])
def test_blocks_that_agree_or_alternate_or_stand_first_are_not_judged(faults: dict[int, str]) -> None:
    found = sounding.check(Stack(faults), tokens(), theory=False).verdict.findings
    assert not [one for one in found if (one.layer or "").startswith("blocks.") and "siblings, which" in one.why]


def test_a_block_that_changes_the_resolution_is_meant() -> None:
    class Pooling(nn.Module):
        def __init__(self, pool: bool) -> None:
            super().__init__()
            self.layer, self.pool = nn.Linear(WIDTH, WIDTH), pool

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, ::2] + 0 if self.pool else x
            return x + functional.relu(self.layer(x))

    model = nn.Sequential(*(Pooling(index == 2) for index in range(6)))
    assert "odd_branch" not in kinds(model, tokens())


def test_shortcuts_that_double_the_stream_are_seen() -> None:
    found = sounding.check(Stack(dict.fromkeys(range(8), "twice"), 8), tokens(), theory=False).verdict.findings
    assert [one.severity for one in found if one.kind == "odd_branch" and "by 2" in one.why] == ["medium"]


class Across(nn.Module):
    """A layer, and a norm over its features or over its places."""

    def __init__(self, places: bool, *, own: bool = False) -> None:
        super().__init__()
        self.layer, self.places, self.own = nn.Linear(WIDTH, WIDTH), places, own
        self.norm, self.out = nn.LayerNorm(PLACES if places else WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.layer(x))
        return self.out(self.norm(x.transpose(1, 2)).transpose(1, 2) if self.places else self.norm(x))


@pytest.mark.parametrize("places", [False, True])
def test_a_norm_over_places_is_told_from_one_over_features(places: bool) -> None:
    assert ("wrong_axis" in kinds(Across(places), tokens())) is places


@pytest.mark.parametrize("moved", [False, True])
def test_channels_that_are_moved_to_the_last_axis_are_features(moved: bool) -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return self.norm(x.permute(0, 2, 3, 1) if moved else x)

    images = torch.randn(SAMPLES, 3, 8, 8, generator=seeded(1))
    assert ("wrong_axis" in kinds(Image(), images)) is not moved


@pytest.mark.parametrize(("widths", "found"), [((16, 64, 16), True), ((16, 4, 16), False), ((16, 64, 64), False)])
def test_a_wide_layer_without_activation_is_told_from_a_factor(widths: tuple[int, ...], found: bool) -> None:
    first, inner, last = widths
    layers = [nn.Linear(first, inner), nn.Linear(inner, last), nn.ReLU(), nn.Linear(last, 4)]
    assert (kinds(nn.Sequential(*layers), tokens()).get("activation") == "low") is found


@pytest.mark.parametrize(("scale", "found"), [(30.0, True), (0.5, False)])
def test_positions_that_drown_the_tokens_are_seen(scale: float, found: bool) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH)
            self.place = nn.Parameter(scale * torch.randn(1, PLACES, WIDTH, generator=seeded(4)))
            self.out = nn.Linear(WIDTH, 3)
            nn.init.normal_(self.words.weight, std=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.words(x) + self.place))

    words = torch.randint(0, 50, (SAMPLES, PLACES), generator=seeded(5))
    assert (kinds(Placed(), words).get("large_bias") == "medium") is found


@pytest.mark.parametrize(("bias", "found"), [(-12.0, True), (0.0, False), (-math.inf, False)])
def test_a_gate_that_is_shut_is_told_from_one_that_starts_at_zero(bias: float, found: bool) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            nn.init.constant_(self.gate.bias, bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.sigmoid(self.gate(x)) * self.value(x)) + x

    assert (kinds(Gated(), tokens()).get("shut_gates") == "medium") is found


Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda out, wanted: (out - wanted).square().mean(), True),
        (lambda out, wanted: functional.mse_loss(out, wanted), True),
        (lambda out, wanted: functional.smooth_l1_loss(out, wanted), True),
        (lambda out, wanted: (out.squeeze(-1) - wanted).square().mean(), False),
        (lambda out, wanted: (out - wanted[:, None]).square().mean(), False),
        # pairs of outputs, ranked by the pairs of their targets
        (lambda out, wanted: functional.relu((out - out.T) * (wanted - wanted[:, None]).sign()).mean(), False),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_are_broadcast_over_the_samples_are_seen(loss: Loss, found: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
    rows, wanted = torch.randn(SAMPLES, WIDTH, generator=seeded(0)), torch.randn(SAMPLES, generator=seeded(1))
    assert (kinds(model, rows, wanted, loss=loss).get("mixed_samples") == "medium") is found


def test_a_softmax_over_the_samples_in_a_loss_is_told_from_a_contrastive_one() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 5))
    rows, labels = torch.randn(SAMPLES, WIDTH, generator=seeded(0)), torch.arange(SAMPLES) % 5
    wrong = kinds(model, rows, labels, loss=lambda out, y: functional.nll_loss(functional.log_softmax(out, 0), y))
    pairs = kinds(model, rows, loss=lambda out: functional.cross_entropy((out @ out.T).T, torch.arange(SAMPLES)))
    assert wrong["mixed_samples"] == "medium"
    assert "mixed_samples" not in pairs


@pytest.mark.parametrize(("last", "found"), [(nn.Softmax(-1), True), (nn.Identity(), False)])
def test_probabilities_that_pass_for_logits_are_seen_in_any_loss(last: nn.Module, found: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 5), last)
    rows, actions = torch.randn(SAMPLES, WIDTH, generator=seeded(0)), torch.arange(SAMPLES) % 5

    def policy(out: Tensor, taken: Tensor) -> Tensor:
        return -torch.distributions.Categorical(logits=out).log_prob(taken).mean()

    assert ("softmax_twice" in kinds(model, rows, actions, loss=policy)) is found


def test_a_loss_that_is_no_number_is_said() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
    rows = torch.randn(SAMPLES, WIDTH, generator=seeded(0))
    assert kinds(model, rows, loss=lambda out: (out.half() * 1000).square().mean() + math.inf)["non_finite"] == "high"


class Reader(nn.Module):
    """Reads the first token after one attention that hides padding, or everything else."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inverted = nn.Embedding(40, WIDTH), inverted
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x != 0 if self.inverted else x == 0
        hidden[:, 0] = False
        y = self.words(x)
        return self.out((y + self.attention(y, y, y, key_padding_mask=hidden)[0])[:, 0])


@pytest.mark.parametrize("inverted", [False, True])
def test_a_padding_mask_that_is_turned_around_is_seen(inverted: bool) -> None:
    words = torch.randint(1, 40, (SAMPLES, 12), generator=seeded(2))
    words[:, 8:] = 0
    assert ("unused_input" in kinds(Reader(inverted), words)) is inverted


@pytest.mark.parametrize(("trained", "severity"), [("head", "medium"), ("adapters", "low")])
def test_a_frozen_random_body_is_told_from_adapters(trained: str, severity: str) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64)

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(self.layer(x) + self.up(self.down(x)))

    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(4)), nn.Linear(64, 3))
    for name, one in model.named_parameters():
        one.requires_grad_(name.startswith("4") or (trained == "adapters" and "layer" not in name))
    assert kinds(model, torch.randn(SAMPLES, 64, generator=seeded(0)))["frozen"] == severity


class Heads(nn.Module):
    """A trunk with a head for classes and one for a value."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())))
        for layer in self.trunk[::2]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        self.first = nn.Linear(64, 5)
        self.second = self.first if shared else nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return 0.01 * self.first(x), self.second(x)


def both(out: tuple[Tensor, Tensor], _targets: Tensor) -> Tensor:
    return out[0].square().mean() + 5 * (out[1] - 1).square().mean()


def test_theory_starts_from_every_output_that_the_loss_sees() -> None:
    """The gradient behind both heads is that of the value; the classes alone would send back a hundredth of it."""
    rows = torch.randn(128, 64, generator=seeded(0))
    report = sounding.check(Heads(), rows, rows, loss=both, theory=True)
    cells = {(row.name, row.source): row for row in report.profile.rows if row.measure == "gradient_log_norm"}
    for layer in range(0, 8, 2):
        measured, expected = cells[f"trunk.{layer}", "check"].value, cells[f"trunk.{layer}", "theory"]
        assert abs(measured - expected.value) < 3 * (expected.stderr or 0.0)
        assert (expected.stderr or 0.0) < 0.5


def test_two_outputs_of_one_module_are_said() -> None:
    class Twice(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.trunk(x)
            return self.first(x), self.second(x)

    rows = torch.randn(SAMPLES, 64, generator=seeded(0))
    assert kinds(Twice(shared=True), rows, rows, loss=both)["cloned_weights"] == "medium"
    assert "cloned_weights" not in kinds(Heads(), rows, rows, loss=both)


@pytest.mark.parametrize(("unit", "found"), [(1000.0, True), (1.0, False)])
def test_a_side_input_in_the_unit_it_was_counted_in_is_seen(unit: float, found: bool) -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.body, self.norm = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.norm(self.body(x) + self.time(time[:, None]))

    rows, time = torch.randn(SAMPLES, WIDTH, generator=seeded(0)), torch.rand(SAMPLES, generator=seeded(1))
    assert (kinds(Timed(), (rows, unit * time)).get("huge_signal") == "low") is found


class Causal(nn.Module):
    """Convolutions over time that are padded in front, or in front and behind."""

    def __init__(self, behind: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv1d(3, 3, 3) for _ in range(3))
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.relu(layer(functional.pad(x, (2 - self.behind, self.behind))))
        return x


@pytest.mark.parametrize("behind", [0, 1])
def test_a_series_that_sees_what_it_forecasts_is_named(behind: int) -> None:
    series = torch.randn(SAMPLES, 3, 21, generator=seeded(6)).cumsum(-1) / 5
    report = sounding.check(Causal(behind), series[..., :-1], series[..., 1:], theory=True)
    leaks = [one.layer for one in report.verdict.findings if one.kind == "target_leak"]
    assert leaks == (["layers.0"] if behind else [])


@pytest.mark.parametrize("axis", [-1, -2])
def test_weights_of_scores_that_are_sums_are_followed_to_what_they_sum_over(axis: int) -> None:
    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.of, self.value = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            scores = functional.leaky_relu(self.into(x) + self.of(x).mT)
            return x + scores.softmax(axis) @ self.value(x)

    assert ("wrong_axis" in kinds(Neighbours(), tokens())) is (axis == -2)


def test_one_module_that_stands_in_a_list_many_times_is_told() -> None:
    torch.manual_seed(0)
    block = nn.Linear(WIDTH, WIDTH)
    inputs = torch.randn(SAMPLES, WIDTH, generator=seeded(0))
    assert kinds(nn.Sequential(*[block] * 3), inputs).get("cloned_weights") == "low"
    assert "cloned_weights" not in kinds(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), inputs)


@pytest.mark.parametrize(("pooled", "found"), [(True, True), (False, False)])
def test_positions_that_are_replaced_by_their_mean_are_said(pooled: bool, found: bool) -> None:
    class Merging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = functional.gelu(self.first(x))
            x = x.mean(1, keepdim=True).expand_as(x) if pooled else x
            return self.out(functional.gelu(self.second(x)))  # one feature each says nothing of directions

    assert (kinds(Merging(), tokens()).get("token_collapse") == "medium") is found
