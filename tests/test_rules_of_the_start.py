"""Rules that a second set of planted faults asked for: each fault beside its sound twin, which has no finding of the
kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.probe.records import Finding
from tolerance import TOLERANCE


def look(network: nn.Module, inputs: Any, targets: Any = None, **options: Any) -> dict[str, Finding]:
    found = sounding.check(network, inputs, targets, **options).verdict.findings
    return {finding.kind: finding for finding in found}


def plain(*parts: nn.Module, width: int = 16, classes: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), *parts, nn.Linear(32, classes))


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(40, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def labels() -> Tensor:
    return torch.arange(40) % 5


def test_a_loss_of_the_users_own_is_read_off_its_graph(inputs: Tensor, labels: Tensor) -> None:
    def contrast(output: Tensor, targets: Tensor) -> Tensor:
        return (functional.cross_entropy(1e3 * output, targets) + output.square().mean()) / 2

    found = look(plain(), inputs, labels, loss=contrast)["start_loss"]
    assert found.severity == "high"
    assert "ln 5" in found.why
    assert "start_loss" not in look(plain(), inputs, labels, loss=lambda y, t: contrast(y / 1e3, t))


def test_binary_labels_may_be_floating_point_numbers(inputs: Tensor, labels: Tensor) -> None:
    model, targets = plain(classes=1), (labels > 2).float()[:, None]
    loss = functional.binary_cross_entropy_with_logits
    assert "start_loss" not in look(model, inputs, targets, loss=loss)
    nn.init.normal_(model[-1].weight, std=20.0)  # type: ignore[arg-type]
    assert look(model, inputs, targets, loss=loss)["start_loss"].severity == "high"


@pytest.mark.parametrize(("last", "low"), [(nn.Sigmoid, 0.0), (nn.Tanh, -1.0)])
def test_targets_that_the_last_activation_cannot_give_are_named(
    last: Callable[[], nn.Module], low: float, inputs: Tensor
) -> None:
    model, targets = nn.Sequential(plain(), last()), low + (1 - low) * torch.rand(40, 5)
    assert "start_loss" not in look(model, inputs, targets)
    found = look(model, inputs, 255 * targets, loss=lambda y, t: functional.mse_loss(y, t))["start_loss"]
    assert found.evidence["share_outside_range"] > 0.9
    assert "start_loss" not in look(plain(), inputs, 2 * torch.randn(40, 5))


class Meeting(nn.Module):
    """A way of mixing samples, behind a batch norm, which mixes them by design."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.norm, self.head = way, nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.rnn = nn.GRU(16, 16, batch_first=way != "steps")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        if self.way == "softmax":
            x = x * x.mean(-1, keepdim=True).softmax(0)
        if self.way == "reshaped":
            x = x.transpose(0, 1).reshape(x.shape)
        if self.way == "centred":
            x = x - 0.1 * x.mean((0, 1))
        return self.head(self.rnn(x)[0].mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["steps", "softmax", "reshaped"])
def test_samples_that_have_their_say_in_others_are_a_warning(way: str) -> None:
    torch.manual_seed(0)
    assert look(Meeting(way), torch.randn(12, 6, 4))["mixed_samples"].severity == "medium"


def test_a_little_of_the_others_is_a_note_and_batch_norm_none() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 6, 4)
    assert "mixed_samples" not in look(Meeting(""), x)
    assert look(Meeting("centred"), x)["mixed_samples"].severity == "low"


def test_samples_that_meet_in_a_second_input_are_found() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Embedding(9, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.one(x) + self.other(y).sum((0, 1))

    torch.manual_seed(0)
    assert "mixed_samples" in look(Two(), (torch.randn(8, 4), torch.randint(9, (8, 5))))


def test_a_network_that_asks_for_no_gradient_is_frozen(inputs: Tensor, labels: Tensor) -> None:
    found = look(plain().requires_grad_(False), inputs, labels)["frozen"]
    assert (found.severity, found.evidence["parameters"]) == ("medium", 4)


def test_four_layers_in_a_row_compute_what_one_could(inputs: Tensor) -> None:
    row = plain(*(nn.Linear(32, 32) for _ in range(3)))
    assert look(row, inputs)["activation"].severity == "medium"
    assert "activation" not in look(plain(nn.Linear(32, 8), nn.Linear(8, 32)), inputs)  # a factored matrix
    bent = plain(*(part for _ in range(3) for part in (nn.Linear(32, 32), nn.ReLU(inplace=True))))
    assert "activation" not in look(bent, inputs)


class Scaled(nn.Module):
    """A norm by the root of the mean square, or of the sum."""

    def __init__(self, *, summed: bool) -> None:
        super().__init__()
        self.weight, self.summed = nn.Parameter(torch.ones(32)), summed

    def forward(self, x: Tensor) -> Tensor:
        squares = x.square().sum(-1, keepdim=True) if self.summed else x.square().mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(squares + 1e-6)


class ScaledNorm(Scaled):
    """A norm by its name."""


def test_a_norm_that_sums_is_found_at_what_leaves_it(inputs: Tensor) -> None:
    found = look(plain(ScaledNorm(summed=True)), inputs)["norm_weight"]
    assert found.layer == "2"
    assert found.evidence["root_mean_square"] == pytest.approx(32**-0.5, rel=TOLERANCE.percent)
    for norm in (ScaledNorm(summed=False), nn.LayerNorm(32), nn.BatchNorm1d(32), Scaled(summed=True)):
        assert "norm_weight" not in look(plain(norm), inputs)


class GatedNorm(Scaled):
    """A norm whose result a gate makes smaller, as linear attention has it."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * torch.sigmoid(gate)


class Gating(nn.Module):
    """A gated norm whose gate is nearly shut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = GatedNorm(summed=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, x - 6)  # type: ignore[no-any-return]


class NoNorm(nn.Module):
    """A scale in the place of a norm, as MobileBERT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def test_norms_that_are_small_by_design_are_not_accused(inputs: Tensor) -> None:
    """A scale alone passes on small signals, and a norm divides by its eps where signals are smaller still."""
    tiny = nn.Linear(32, 32)
    nn.init.normal_(tiny.weight, std=1e-5)
    nn.init.zeros_(tiny.bias)
    for parts in ([tiny, NoNorm()], [tiny, ScaledNorm(summed=False)], [Gating()]):
        assert "norm_weight" not in look(plain(*parts), inputs)


@pytest.mark.parametrize("functionally", [True, False])
def test_dropout_that_leaves_nothing_is_named_though_it_rests(functionally: bool, inputs: Tensor) -> None:
    class Dropping(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, self.share, self.training)

    kind = Dropping if functionally else nn.Dropout
    found = look(plain(kind(0.95)), inputs)["dead_units"]
    assert found.evidence["dropped"] == 0.95
    assert found.layer == ("1" if functionally else "2")  # of a function, the layer before it
    assert "dead_units" not in look(plain(kind(0.5)), inputs)


def test_raw_pixels_are_a_warning_where_no_norm_stands_in_front(inputs: Tensor) -> None:
    assert look(plain(), 100 * inputs)["huge_signal"].severity == "medium"
    assert "huge_signal" not in look(plain(), 10 * inputs)
    assert "huge_signal" not in look(nn.Sequential(nn.BatchNorm1d(16), plain()), 100 * inputs)


def test_an_update_gate_that_never_shuts_reads_nothing() -> None:
    class Last(nn.Module):
        def __init__(self, bias: float) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 3)
            nn.init.constant_(self.rnn.bias_ih_l0[16:32], bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    x = torch.randn(12, 6, 4)
    assert "reads nothing" in look(Last(10.0), x)["shut_gates"].why
    assert "shut_gates" not in look(Last(3.0), x)


def test_a_decoder_that_is_given_its_target_is_found() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target, self.head = nn.Embedding(9, 16), nn.Embedding(9, 16), nn.Linear(16, 9)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return self.head(self.target(target) + self.source(source).mean(1, keepdim=True))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    source, target = torch.randint(9, (12, 7)), torch.randint(9, (12, 6))
    assert look(Pair(), (source, target), target)["target_leak"].severity == "medium"
    assert "target_leak" not in look(Pair(), (source, target.roll(1, 1)), target)


def test_two_images_are_few_for_batch_norm_however_large() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    assert look(model, torch.randn(2, 1, 8, 8))["batch_too_small"].severity == "low"
    assert "batch_too_small" not in look(model, torch.randn(8, 1, 8, 8))


def test_one_of_two_siblings_may_have_a_large_bias(inputs: Tensor) -> None:
    model = plain(nn.Linear(32, 32), nn.ReLU())
    nn.init.constant_(model[2].bias, 50.0)  # type: ignore[arg-type]
    assert look(model, inputs)["large_bias"].severity == "medium"


class Drawing(nn.Module):
    """An encoder whose answer is drawn at random and decoded, and a second output."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.encoder, self.decoder = way, nn.Linear(16, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.encoder(x)
        law = torch.distributions.Normal(mean, 1.0)
        code = law.sample() if self.way == "drawn" else law.rsample()
        beside = self.encoder(torch.ones_like(x)) if self.way == "alike" else mean
        return self.decoder(code), beside.detach() if self.way == "detached" else beside


def together(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean() + output[1].square().mean()


@pytest.mark.parametrize(("way", "kind"), [("drawn", "detached"), ("detached", "detached"), ("alike", "unused_input")])
def test_ways_without_a_gradient_and_outputs_without_samples_are_named(way: str, kind: str, inputs: Tensor) -> None:
    torch.manual_seed(0)
    assert kind in look(Drawing(way), inputs, loss=together)
    assert kind not in look(Drawing(), inputs, loss=together)


class Padded(nn.Module):
    """A recurrent layer of which one step is read, over sequences that end in zeros."""

    def __init__(self, step: int, *, blank: bool = False) -> None:
        super().__init__()
        self.step, self.lstm, self.head = step, nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)
        if blank:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, self.step])  # type: ignore[no-any-return]


def test_an_only_output_that_is_the_same_for_every_sample_makes_a_network_unhealthy() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(12, 5, 8), torch.zeros(12, 80, 8)], 1)
    found = look(Padded(-1), x)["unused_input"]
    assert (found.severity, found.layer) == ("high", "head")
    assert "padded" in found.remedies[0]
    assert "unused_input" not in look(Padded(4), x)
    # a head of zeros gives every sample its bias, which is a practice; equal samples have equal outputs
    assert "unused_input" not in look(Padded(4, blank=True), x)
    assert "unused_input" not in look(Padded(4), x[:1].expand(12, -1, -1))


def test_a_signal_that_a_flat_activation_hides_is_huge_all_the_same() -> None:
    torch.manual_seed(0)
    loud, still = nn.Linear(16, 32), nn.Linear(32, 8)
    with torch.no_grad():
        loud.weight.mul_(1e6)
    found = look(nn.Sequential(loud, nn.ReLU(), still, nn.Sigmoid()), torch.randn(20, 16))["huge_signal"]
    assert (found.severity, found.layer) == ("high", "2")
    assert "from '0' on" in found.why
    assert "huge_signal" not in look(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), still, nn.Sigmoid()), torch.randn(20, 16)
    )


class Mixing(nn.Module):
    """Blocks of attention, with ways around them or without."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(4))
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(16) for _ in range(4)), nn.Linear(16, 3)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            mixed = block(x, x, x, need_weights=False)[0]
            x = norm(x + mixed if self.around else mixed)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def test_attention_without_any_way_around_is_named() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 6, 16)
    assert "around" in look(Mixing(around=False), x)["odd_branch"].why
    assert "odd_branch" not in look(Mixing(around=True), x)


def test_a_network_without_any_rule_is_read_as_an_empty_page() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(20, 8), nn.Embedding(20, 8)

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            return (self.user(user) * self.item(item)).sum(-1)

    who = torch.arange(12)
    page = str(sounding.read(Rows(), (who, who), torch.randn(12)))
    assert "0 of 0 weight layers have a rule" in page
    theory = sounding.check(Rows(), (who, who), torch.randn(12), theory=True).profile.settings["theory"]
    assert theory["reading"].startswith("nothing that a module")


@pytest.mark.parametrize("gain", [1.0, 0.25])
def test_one_matrix_off_the_law_of_all_others_is_said_though_it_has_a_law(gain: float) -> None:
    """Xavier's law of 8 inputs and 512 outputs is He's law of the transpose."""
    torch.manual_seed(0)
    sizes = [(8, 512), *[(512, 64)] * 3, (64, 8), (8, 8)]
    model = nn.Sequential(*(nn.Linear(*pair) for pair in sizes))
    with torch.no_grad():
        model[0].weight.mul_(gain)
    found = [one for one in sounding.audit(model).findings if one.kind == "odd_scale"]
    assert [(one.parameter, one.severity) for one in found] == ([] if gain == 1 else [("0.weight", "low")])
