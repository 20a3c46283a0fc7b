"""Who influences whom, and operations in the wrong place: each fault is found, and its sound twin is not accused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.probe.records import Finding

WIDTH, TOKENS, STEPS = 16, 24, 12


class Blocks(nn.Module):
    """Two blocks of attention on tokens, with one thing done wrong."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(STEPS, WIDTH) / 4)
        self.joint = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        hidden = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)
        hidden = {"transposed": hidden.T, "bare": torch.zeros_like(hidden)}.get(self.fault, hidden)
        for joint, out in zip(self.joint, self.out, strict=True):
            q, k, v = joint(x).chunk(3, -1)
            scores = (q @ k.transpose(-1, -2) / WIDTH**0.5).masked_fill(hidden, -1e9)
            x = x + out(scores.softmax(-2 if self.fault == "queries" else -1) @ v)
            if self.fault == "batch":
                x = x - x.mean(0)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool = True, step: int = -1) -> None:
        super().__init__()
        self.lstm, self.head, self.step = nn.LSTM(4, WIDTH, batch_first=batch_first), nn.Linear(WIDTH, 3), step

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, self.step])


class Image(nn.Module):
    """A convolution and a layer norm, on an image with as many channels as it is wide."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 3)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.norm(x.permute(0, 2, 3, 1)) if self.turned else self.norm(x).permute(0, 2, 3, 1)
        return self.head(x.relu().mean((1, 2)))


class Averaged(nn.Module):
    """A head that reads the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu().mean(0, keepdim=True).expand(len(x), -1))


def look(model: nn.Module, inputs: Any, targets: Any = None, **options: Any) -> dict[str, Finding]:
    report = sounding.check(model, inputs, targets, **options)
    return {finding.kind: finding for finding in report.verdict.findings}


def tokens() -> Tensor:
    return torch.randint(TOKENS, (6, STEPS + 1), generator=torch.Generator().manual_seed(1))


NEW = {"mixed_samples", "target_leak", "unused_input", "wrong_axis", "activation", "softmax_twice"}


@pytest.mark.parametrize("targets", [True, False])
def test_a_causal_network_with_the_next_tokens_as_targets_is_not_accused(targets: bool) -> None:
    text = tokens()
    assert not NEW & set(look(Blocks(), text[:, :-1], text[:, 1:] if targets else None))


def test_a_network_that_sees_the_next_token_is_found_where_that_is_the_target() -> None:
    text = tokens()
    assert look(Blocks("bare"), text[:, :-1], text[:, 1:])["target_leak"].severity == "medium"
    # without targets it may be an encoder, of which only this check thinks that it predicts the next token
    assert "target_leak" not in look(Blocks("bare"), text[:, :-1])
    labels = torch.randint(TOKENS, (6, STEPS))
    assert "target_leak" not in look(Blocks("bare"), text[:, :-1], labels)


def test_a_mask_that_was_transposed_is_found_without_targets() -> None:
    assert "none before" in look(Blocks("transposed"), tokens()[:, :-1])["target_leak"].why


@pytest.mark.parametrize("callable_loss", [True, False])
def test_targets_that_are_the_inputs_are_found(callable_loss: bool) -> None:
    text = tokens()[:, :-1]

    def plain(output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def moved(output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    options = {"loss": plain} if callable_loss else {}
    assert "are the inputs" in look(Blocks(), text, text, **options)["target_leak"].found
    assert "target_leak" not in look(Blocks(), text, text, loss=moved)


def test_samples_that_meet_are_found_with_their_layer() -> None:
    images = torch.randn(8, STEPS, 4)
    assert look(Recurrent(batch_first=False), images)["mixed_samples"].layer == "lstm"
    assert "mixed_samples" not in look(Recurrent(), images)
    assert look(Blocks("batch"), tokens()[:, :-1])["mixed_samples"].layer == "joint.1"
    found = look(Averaged(), torch.randn(8, 4))["mixed_samples"]
    assert (found.layer, found.severity) == ("head", "medium")
    assert "same output" in found.why


def test_batch_norm_and_random_networks_are_not_said_to_mix_samples() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), self.out_features)

    for model in (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), Noisy(4, 3)):
        assert "mixed_samples" not in look(model, torch.randn(8, 4))


def test_a_step_that_was_taken_too_early_leaves_most_of_the_input_unused() -> None:
    found = look(Recurrent(step=1), torch.randn(8, STEPS, 4))["unused_input"]
    assert found.evidence["share"] == pytest.approx((STEPS - 2) / STEPS)
    assert "unused_input" not in look(Recurrent(), torch.randn(8, STEPS, 4))


def test_softmax_and_norms_over_the_wrong_axis_are_found() -> None:
    assert "queries" in look(Blocks("queries"), tokens()[:, :-1])["wrong_axis"].why
    images = torch.randn(6, 1, 8, 8)
    assert look(Image(turned=False), images)["wrong_axis"].layer == "norm"
    assert "wrong_axis" not in look(Image(turned=True), images)
    shrunk = nn.Sequential(nn.Conv2d(1, 4, 8), nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))
    assert look(shrunk, images)["wrong_axis"].found == "a norm over one value"


def stack(*activations: Callable[[], nn.Module]) -> nn.Sequential:
    parts = [part for _ in range(3) for part in (nn.Linear(4, 4), *(one() for one in activations))]
    return nn.Sequential(*parts, nn.Linear(4, 3))


def test_activations_that_stand_twice_or_nowhere_are_found() -> None:
    x = torch.randn(8, 4)
    assert look(stack(nn.GELU, nn.GELU), x)["activation"].evidence["places"] == 3
    assert look(stack(), x)["activation"].found == "none"
    assert "activation" not in look(stack(nn.GELU), x)
    assert "activation" not in look(stack(nn.ReLU, nn.ReLU), x)  # which changes nothing
    assert "activation" not in look(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)), x)  # a factored matrix


def test_a_network_of_which_nothing_would_move_is_unhealthy() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.ReLU())
    nn.init.constant_(model[2].bias, -50.0)
    report = sounding.check(model, torch.randn(8, 4), torch.randint(3, (8,)))
    assert report.verdict.status == "unhealthy"
    assert {one.kind: one.severity for one in report.verdict.findings}["behind_zeros"] == "high"


@pytest.mark.parametrize("last", [nn.Sigmoid, nn.ReLU, nn.Identity])
def test_what_stands_between_logits_and_their_loss_is_read_off_the_graph(last: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), last())
    targets = torch.rand(8, 1).round()
    found = look(model, torch.randn(8, 4), targets, loss=functional.binary_cross_entropy_with_logits)
    assert ("softmax_twice" in found) == (last is nn.Sigmoid)
    assert ("activation" in found) == (last is nn.ReLU)
    own = look(model, torch.randn(8, 4), targets, loss=lambda y, t: functional.binary_cross_entropy(y.clamp(0, 1), t))
    assert "softmax_twice" not in own


class Translator(nn.Module):
    """An encoder whose memory a decoder reads, with or without the decoder's mask."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked, self.embed, self.head = masked, nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.places = nn.Parameter(torch.randn(STEPS, WIDTH) / 4)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0)

    def forward(self, source: Tensor, answer: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source) + self.places)
        mask = nn.Transformer.generate_square_subsequent_mask(STEPS) if self.masked else None
        return self.head(self.decoder(self.embed(answer) + self.places, memory, tgt_mask=mask))


@pytest.mark.parametrize("masked", [True, False])
def test_a_decoder_may_see_the_whole_source_and_no_later_word_of_its_answer(*, masked: bool) -> None:
    torch.manual_seed(0)
    source, answer = torch.randint(TOKENS, (16, STEPS)), torch.randint(TOKENS, (16, STEPS + 1))
    report = sounding.check(
        Translator(masked=masked), (source, answer[:, :-1]), answer[:, 1:],
        loss=lambda out, wanted: functional.cross_entropy(out.flatten(0, 1), wanted.flatten()),
    )  # fmt: skip
    leaks = [one.severity for one in report.verdict.findings if one.kind == "target_leak"]
    assert leaks == ([] if masked else ["medium"])
