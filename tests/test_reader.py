"""Reading a module: every operation becomes a rule with the module's own laws, or is named; rows lie in their band."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import networks
import sounding
from signal_networks import assert_agrees
from sounding.reader.prediction import estimate_seconds, predict, start_of
from sounding.theory.signal import (
    Attention,
    Convolution,
    Description,
    Elementwise,
    Given,
    Join,
    Linear,
    Mix,
    Multiply,
    Node,
    Normalize,
    Pool,
    Signal,
    propagate,
)
from sounding.theory.signal import Tied as TiedRule
from tolerance import TOLERANCE

BAND = 2.0  # standard deviations over seeds, for 95%


class Rms(nn.Module):
    """An RMS norm as Llama writes it, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def turned(x: Tensor) -> Tensor:
    """Rotary embedding of (samples, heads, positions, size)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    cosines, sines = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cosines + torch.cat([-x[..., half:], x[..., :half]], -1) * sines


class Llama(nn.Module):
    """Blocks with grouped queries, rotary embeddings and a gated perceptron; attention fused or written out."""

    def __init__(self, *, fused: bool, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.fused, self.heads, self.size = fused, 4, width // 4
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            parts = {
                "first": Rms(width),
                "second": Rms(width),
                "q": nn.Linear(width, width),
                "o": nn.Linear(width, width),
            }
            parts |= {name: nn.Linear(width, width // 2) for name in ("k", "v")}
            parts |= {"gate": nn.Linear(width, 64), "up": nn.Linear(width, 64), "down": nn.Linear(64, width)}
            self.blocks.append(nn.ModuleDict(parts))
        self.head = nn.Linear(width, 50, bias=False)

    def attend(self, block: nn.ModuleDict, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = (block[n](x).view(samples, tokens, -1, self.size).transpose(1, 2) for n in "qkv")
        q, k = turned(q), turned(k)
        k, v = (one.repeat_interleave(2, 1) if not self.fused else one for one in (k, v))
        if self.fused:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            hidden = torch.triu(torch.full((tokens, tokens), -math.inf), 1)
            out = torch.softmax(q @ k.transpose(-1, -2) / self.size**0.5 + hidden, -1) @ v
        return block["o"](out.transpose(1, 2).reshape(samples, tokens, -1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + self.attend(block, block["first"](x))
            y = block["second"](x)
            x = x + block["down"](functional.silu(block["gate"](y)) * block["up"](y))
        return self.head(x)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


def kinds(model: nn.Module, inputs: Tensor) -> list[type]:
    return [type(node.rule) for node in sounding.read(model, inputs).description.nodes]


@pytest.mark.parametrize("fused", [True, False])
def test_a_llama_is_read_however_its_attention_is_written(fused: bool) -> None:
    with networks.drawn_from(0):
        blueprint = sounding.read(Llama(fused=fused), torch.randint(50, (3, 7)))
    rules = [node.rule for node in blueprint.description.nodes]
    attention = [rule for rule in rules if isinstance(rule, Attention)]
    assert len(attention) == 2
    assert all(one.heads == 4 and one.scale == pytest.approx(8**-0.5) for one in attention)
    assert all(one.angles is not None and np.allclose(one.angles[1, 0], 1.0) for one in attention)
    assert all(one.causal or one.mask is not None for one in attention)
    assert sum(isinstance(rule, Multiply) for rule in rules) == 2
    assert sum(isinstance(rule, Normalize) and rule.kind == "rms" for rule in rules) >= 3
    assert blueprint.weight_layers == (15, 15)
    assert not blueprint.description.notes
    assert "rotary" not in str(blueprint)  # it is a property of attention, not a node
    assert "15 of 15 weight layers have a rule." in str(blueprint)


def test_laws_are_those_of_the_modules_own_weights() -> None:
    with networks.drawn_from(0):
        model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 10))
        nn.init.normal_(model[0].weight, std=0.3)
        nn.init.orthogonal_(model[2].weight)
        nodes = sounding.read(model, torch.randn(8, 200)).description.nodes
    first, last = (node.rule for node in nodes if isinstance(node.rule, Linear))
    assert (first.weight.shape, last.weight.shape) == ("gaussian", "orthogonal")
    assert math.sqrt(first.weight.variance) == pytest.approx(0.3, rel=2 * TOLERANCE.percent)
    assert first.bias.shape == "uniform"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.LeakyReLU(0.1), "leaky_relu:0.1"),
        (nn.SiLU(), "silu"),
    ],
)
def test_activations_are_known_by_what_they_compute(module: nn.Module, name: str) -> None:
    nodes = sounding.read(nn.Sequential(nn.Linear(4, 8), module, nn.Linear(8, 2)), torch.randn(5, 4)).description.nodes
    assert [node.rule.activation.name for node in nodes if isinstance(node.rule, Elementwise)] == [name]


def test_a_gelu_written_out_is_one_function() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    nodes = sounding.read(
        nn.Sequential(nn.Linear(4, 8), Written(), nn.Linear(8, 2)), torch.randn(5, 4)
    ).description.nodes
    assert [node.rule.activation.name for node in nodes if isinstance(node.rule, Elementwise)] == ["gelu_tanh"]


def test_what_mixes_positions_is_the_modules_own_matrix() -> None:
    found = kinds(Mixer(), torch.randn(3, 3, 16, 16))
    assert found.count(Mix) == 2  # the maps over tokens
    assert found.count(Pool) == 1  # the mean
    assert found.count(Convolution) == 1
    assert found.count(Given) == 3  # the images and two biases over positions


def test_what_no_rule_covers_is_named_and_theory_goes_on_behind_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    blueprint = sounding.read(model, torch.randn(4, 3, 8, 8))
    assert len(blueprint.description.notes) == 1
    assert "max_pool2d" in blueprint.description.notes[0]
    assert "'1'" in blueprint.description.notes[0]
    names = {row.name for row in predict(blueprint).rows}
    assert {"0", "2", "4"} <= names
    gradients = {row.name for row in predict(blueprint).rows if row.measure == "gradient_log_norm"}
    assert gradients == {"2", "3", "4"}, "no gradient is predicted through what no rule covers"
    weights = {row.name for row in predict(blueprint).rows if row.measure == "weight_gradient_log_norm"}
    assert "0.weight" in weights, "in front of it theory goes on from the measured gradient"


def test_a_recurrent_layer_is_named() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rnn, self.head = nn.Linear(4, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(self.first(x))[0])

    notes = sounding.read(Last(), torch.randn(4, 5, 4)).description.notes
    assert any("rnn" in note for note in notes)


def test_theory_says_how_long_it_would_take() -> None:
    few, many = (sounding.read(networks.mlp(4, 32), torch.randn(n, 64)) for n in (8, 256))
    assert 0 < estimate_seconds(few) < estimate_seconds(many)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: networks.mlp(6, 128), (48, 64)),
    "batch norm": (lambda: networks.mlp(6, 128, normalization=nn.BatchNorm1d), (48, 64)),
    "residual": (
        lambda: nn.Sequential(nn.Linear(64, 128), *(Residual(128) for _ in range(4)), nn.Linear(128, 9)),
        (32, 64),
    ),
    "pre-norm transformer": (
        lambda: nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        ),
        (4, 12, 64),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_measurements_lie_in_the_band(name: str) -> None:
    """Of networks that match their description, 95% of the rows should; one in ten of few, correlated rows may not."""
    build, shape = NETWORKS[name]
    inside = []
    for seed in range(3):
        with networks.drawn_from(seed):
            profile = sounding.check(build(), torch.randn(shape), theory=True).profile
        measured = {(row.name, row.measure): row.value for row in profile if row.source == "check"}
        expected = [row for row in profile if row.source == "theory" and row.stderr and row.name != "network"]
        assert len(expected) > 40
        inside += [abs(measured[row.name, row.measure] - row.value) <= BAND * row.stderr for row in expected]
    assert np.mean(inside) >= 0.9


def test_a_function_that_two_layers_take_is_one_value() -> None:
    """A ReLU behind a sum feeds a convolution and the next sum: its gradient is what arrives from both."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.keep = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = functional.relu(self.first(x))
            return self.second(x) + self.keep(x)

    assert kinds(Blocks(), torch.randn(4, 3, 6, 6)).count(Elementwise) == 1


def test_theory_takes_the_loss_that_the_check_takes() -> None:
    """A language model without targets is asked for its next tokens; the gradient at the output is given."""
    with networks.drawn_from(0):
        profile = sounding.check(Llama(fused=True), torch.randint(50, (3, 7)), theory=True).profile
    found = {row.source: row.value for row in profile if row.name == "head" and row.measure == "gradient_log_norm"}
    assert found["theory"] == pytest.approx(found["check"], abs=TOLERANCE.four_digits)


def test_clones_leave_the_band() -> None:
    """`nn.TransformerEncoder` starts with equal layers: what it does no random network of its description does."""
    with networks.drawn_from(0):
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        profile = sounding.check(model, torch.randn(4, 12, 64), theory=True).profile
    measured = {(row.name, row.measure): row.value for row in profile if row.source == "check"}
    z = {
        row.name: abs(measured[row.name, row.measure] - row.value) / row.stderr
        for row in profile
        if row.source == "theory" and row.stderr and row.measure == "mean_cosine"
    }
    assert max(z.values()) > 2.5 * BAND
    assert all(value < 2 * BAND for name, value in z.items() if name.startswith("layers.0."))


class Sinkhorn(nn.Module):
    """A matrix per position made doubly stochastic by turns, as hyper-connections do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.softmax(-1) + 1e-6
        for _ in range(30):
            x = x / (x.sum(-2, keepdim=True) + 1e-6)
            x = x / (x.sum(-1, keepdim=True) + 1e-6)
        return x


def test_a_loop_over_one_value_does_not_double_what_is_kept_of_it() -> None:
    """Each of 60 divisions takes the same value twice; twice the numbers each time would be 10¹⁸ of them."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Unflatten(-1, (4, 4)), Sinkhorn(), nn.Flatten(), nn.Linear(16, 8))
    assert sounding.read(model, torch.randn(6, 8)).weight_layers[0] == 2


class Tied(nn.Module):
    """Embeddings, two residual blocks, a norm, and a head whose weight is the embedding's."""

    def __init__(self, width: int = 256, words: int = 100) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first, second in zip(self.maps[::2], self.maps[1::2], strict=True):
            x = 0.9 * x + second(functional.relu(first(x)))
        return self.head(self.norm(x))


def test_a_tied_head_meets_the_embedding_that_it_is_made_of() -> None:
    """K of the logits against networks with one embedding and fresh blocks; a head of its own would be far off."""
    with networks.drawn_from(0):
        model, tokens = Tied(), torch.randint(100, (4, 5))
        found = []
        for _ in range(32):
            for one in model.maps:
                nn.init.normal_(one.weight, std=(2 / 256) ** 0.5)
                nn.init.zeros_(one.bias)
            found.append(Signal.of_features(model(tokens).detach().double().numpy()).gram)
    blueprint = sounding.read(model, tokens)
    description, given, _ = start_of(blueprint)
    (head,) = description.outputs
    rule = description.nodes[head].rule
    assert isinstance(rule, TiedRule)
    stack = np.stack(found)
    measured = stack.mean(0), stack.std(0, ddof=1) / len(stack) ** 0.5
    signal = propagate(description, given=given).forward[head]
    assert signal is not None
    assert_agrees(signal.gram, measured, allowance=2 * TOLERANCE.finite_width)
    own = Node(Linear(rule.fan_in, rule.fan_out, rule.weight), description.nodes[head].inputs[:1], signal.points, 100)
    nodes = (*description.nodes[:head], own)
    untied = propagate(Description(nodes, (head,)), given=given).forward[head]
    assert untied is not None
    assert np.trace(untied.gram) < 0.9 * np.trace(measured[0])


class Windowed(nn.Module):
    """Attention within shifted windows of an image, with a bias for every head and a mask for every window."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.heads, self.maps = 8, nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(5))
        self.bias = nn.Parameter(torch.randn(1, self.heads, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maps[4](x)
        n, _, _, width = x.shape
        rolled = torch.roll(x, shifts=(-1, -1), dims=(1, 2))
        cut = rolled.view(n, 2, 2, 2, 2, width).transpose(2, 3).reshape(-1, 4, width)
        q, k, v = (one(cut).view(-1, 4, self.heads, width // self.heads).transpose(1, 2) for one in self.maps[:3])
        mask = self.bias + torch.tensor([0.0, -2.0, 0.0, -1.0]).repeat(n)[:, None, None, None] * torch.eye(4)
        made = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(-1, 4, width)
        back = self.maps[3](made).view(n, 2, 2, 2, 2, width).transpose(2, 3).reshape(n, 4, 4, width)
        y = x + torch.roll(back, shifts=(1, 1), dims=(1, 2))
        merged = torch.cat([y[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)  # as Swin joins neighbours
        return merged.flatten(1, 2)


class Widening(nn.Module):
    """Features of two sizes side by side, each normalized by a batch norm of its own."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width, bias=False), nn.Linear(width, width, bias=False)
        self.norm, self.last = nn.BatchNorm1d(2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(functional.relu(self.norm(torch.cat([x, 10 * self.second(functional.relu(x))], -1))))


@pytest.mark.parametrize(
    ("build", "shape", "rules"), [(Windowed, (2, 4, 4, 256), (Attention, Join)), (Widening, (6, 8), (Join,))]
)
def test_what_is_read_agrees_with_fresh_weights(
    build: Callable[[], nn.Module], shape: tuple[int, ...], rules: tuple[type, ...]
) -> None:
    """K at the output, from the description of one network, against the mean over networks with other weights."""
    with networks.drawn_from(0):
        model, inputs, found = build(), torch.randn(shape), []
        inputs = inputs + torch.randn(shape[-1])
        for _ in range(32):
            for one in model.modules():
                if isinstance(one, nn.Linear):
                    nn.init.normal_(one.weight, std=one.in_features**-0.5)
            found.append(Signal.of_features(model(inputs).detach().double().numpy()).gram)
    blueprint = sounding.read(model, inputs)
    description, given, _ = start_of(blueprint)
    assert not blueprint.description.notes
    assert all(any(isinstance(node.rule, rule) for node in description.nodes) for rule in rules)
    signal = propagate(description, given=given, draws=512, precision=0.002).forward[description.outputs[0]]
    assert signal is not None
    stack = np.stack(found)
    error = stack.std(0, ddof=1) / len(stack) ** 0.5
    assert_agrees(signal.gram, (stack.mean(0), error), allowance=2 * TOLERANCE.finite_width)


class Rounded(nn.Module):
    """A value that is divided and rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.div(self.layer(x), 0.5, rounding_mode="floor")


def test_a_division_that_rounds_is_no_scaling_and_a_divisor_of_its_own_no_average() -> None:
    rounded = sounding.read(Rounded(), torch.randn(4, 8)).description.nodes[-1]
    assert "rounding_mode=floor" in rounded.label
    assert isinstance(rounded.rule, Elementwise)
    pooled = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, divisor_override=1), nn.Conv2d(4, 4, 1))
    assert "divisor of its own" in sounding.read(pooled, torch.randn(4, 2, 8, 8)).description.notes[0]


def test_theory_is_left_out_where_it_would_take_longer_than_it_may() -> None:
    model, inputs = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(8, 6)
    told = sounding.check(model, inputs, theory=1e-9).profile.settings["theory"]
    assert not told["applied"]
    assert "theory was left out, it would take about" in told["reading"]
    assert sounding.check(model, inputs, theory=60.0).profile.settings["theory"]["applied"]
