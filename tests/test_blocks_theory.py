"""`predict.residual` and `predict.transformer`: closed forms, two routes to attention, and drawn networks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sounding import predict
from sounding.activations import resolve
from sounding.errors import UsageError
from sounding.theory.blocks import Gains, Pair, Perceptron, SelfAttention
from sounding.theory.integrals.softmax import softmax_moments
from sounding.theory.kernel import kappa, normalized, slope_at
from sounding.theory.signal.attention import attend, attend_backward
from sounding.theory.signal.description import Attention
from sounding.theory.signal.heads import Projections
from tolerance import TOLERANCE, assert_within_standard_errors

ONES = Gains(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("variance", [0.3, 3.0, 20.0])
@pytest.mark.parametrize("keys", [4, 100])
def test_softmax_moments_agree_with_drawn_scores(variance: float, keys: int) -> None:
    generator, rho, draws = np.random.default_rng(1), 0.4, 4000
    common = generator.normal(size=(draws, keys))
    rows = []
    for _ in range(2):
        scores = math.sqrt(rho) * common + math.sqrt(1 - rho) * generator.normal(size=(draws, keys))
        weights = np.exp(math.sqrt(variance) * scores)
        rows.append(weights / weights.sum(axis=1, keepdims=True))
    first, second = rows
    overlap, own = (first * second).sum(axis=1), (first**2).sum(axis=1)
    drawn = {
        "own": own,
        "shared": overlap,
        "slope": own - 2 * (first**3).sum(axis=1) + own**2,
        "shared_slope": overlap - (first**2 * second + first * second**2).sum(axis=1) + overlap**2,
        "entropy": -(first * np.log(first)).sum(axis=1) / math.log(keys),
    }
    found = softmax_moments(variance, rho, keys=keys)
    for name, values in drawn.items():
        assert_within_standard_errors(getattr(found, name), values.mean(), values.std() / math.sqrt(draws))


def test_softmax_moments_at_their_ends() -> None:
    """Equal rows share what one has; few keys make small scores e^v/n; many keys condense beyond √(2 ln n)."""
    equal = softmax_moments(2.0, 1.0, keys=50)
    assert equal.shared == pytest.approx(equal.own, rel=TOLERANCE.finite_difference)
    assert equal.shared_slope == pytest.approx(equal.slope, rel=TOLERANCE.finite_width)
    small, many = softmax_moments(0.01, 0.5, keys=10**6), 10**6  # corrections are of the order of 1/n
    assert small.own == pytest.approx(math.exp(0.01) / many, rel=TOLERANCE.finite_difference)
    assert small.shared == pytest.approx(math.exp(0.005) / many, rel=TOLERANCE.finite_difference)
    # Giorlandino and Goldt's 1 − β_c/β is approached like 1/ln n
    gaps = [softmax_moments(2 * math.log(n) * 9, 0.0, keys=n).own - 2 / 3 for n in (10**2, 10**4, 10**8)]
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] * math.log(10**8) == pytest.approx(gaps[1] * math.log(10**4), rel=2 * TOLERANCE.rough)
    # beyond the largest variance that is integrated, what lacks of one-hot goes on as 1/√v
    far = softmax_moments(400.0, 0.3, keys=8).own
    scores = 20 * np.random.default_rng(0).normal(size=(4000, 8))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    squares = ((weights / weights.sum(axis=1, keepdims=True)) ** 2).sum(axis=1)
    assert_within_standard_errors(far, squares.mean(), squares.std() / math.sqrt(4000))


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh", "hardtanh"])
@pytest.mark.parametrize("rho", [-0.5, 0.3, 0.95])
def test_a_perceptron_maps_as_the_kernel_map_says(name: str, rho: float) -> None:
    """Quadrature in the plane, by `sounding.theory.kernel`, against series and closed forms."""
    phi = resolve(name)
    branch, entering = Perceptron(phi, up=2.0, down=3.0), Pair(1.25, 1.25 * rho)
    neuron = normalized(phi.scaled(math.sqrt(2.5)))
    out = branch.forward(entering)
    assert out.correlation == pytest.approx(kappa(neuron, rho).value, abs=TOLERANCE.finite_difference)
    assert out.own == pytest.approx(3 * neuron.second_moment, rel=TOLERANCE.closed_form)
    back = branch.backward(Pair(1.0, 1.0), entering)
    scale = 3 * neuron.second_moment / 1.25
    assert back.cross == pytest.approx(scale * slope_at(neuron, rho).value, rel=TOLERANCE.finite_width)
    assert back.own == pytest.approx(scale * slope_at(neuron, 1.0).value, rel=TOLERANCE.two_routes)


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("scale", [0.1, 0.25, 1.0])
def test_two_routes_to_self_attention(rho: float, scale: float) -> None:
    """Integrals over independent scores against heads drawn by the attention rule, score path included.

    Heads of 64 features add up to 5% that the integrals leave out: queries of different rows overlap by chance, and
    keys are not independent of the weights they get.
    """
    n, size, generator = 12, 64, np.random.default_rng(2)
    gram = (1 - rho) * np.eye(n) + rho
    gradient = 0.7 * np.eye(n) + 0.3
    inputs, rule = Projections(gram, gram, gram, 1), Attention(1, 1, size, scale)
    branch = SelfAttention(ONES, tokens=n, scale=scale, head_size=size, width=None, normed=False)
    there = attend(rule, inputs, generator=generator, draws=600, precision=0.0, route="heads")
    back = attend_backward(
        rule, inputs, gradient=gradient, generator=generator, draws=600, precision=0.0, route="heads"
    )
    out = branch.forward(Pair(1.0, rho))
    assert out.own == pytest.approx(float(np.trace(there.gram)) / n, rel=3 * TOLERANCE.percent)
    assert out.cross == pytest.approx((there.gram.sum() - np.trace(there.gram)) / n / (n - 1), rel=TOLERANCE.drawn)
    assert branch.moments(Pair(1.0, rho)).entropy == pytest.approx(there.entropy, abs=2 * TOLERANCE.percent)
    total = back.queries + back.keys + back.values
    found = branch.backward(Pair(1.0, 0.3), Pair(1.0, rho))
    own, mean = float(np.trace(total)) / n, float(total.sum()) / n
    assert_within_standard_errors(found.own, own, back.stderr * own, allowance=0.05 * own)
    assert_within_standard_errors(found.own + (n - 1) * found.cross, mean, back.stderr * mean, allowance=0.05 * mean)


def test_closed_forms_of_residual_networks() -> None:
    pre = predict.residual("relu", depth=9, mean_square=2.0)
    assert pre.mean_square[-1] == pytest.approx(2 + 2 * 9)  # He weights add 2 to q in each block
    assert pre.gradient_ratio == pytest.approx(pre.stream_growth)  # Π (1 + 2/q) telescopes
    none = predict.residual("relu", depth=9, placement="none", init="lecun", branch_scale=0.5)
    assert none.stream_growth == pytest.approx(1.125**9)
    assert none.gradient_ratio == pytest.approx(1.125**9)
    assert none.trainable_depth == pytest.approx(16 / math.log(1.125))
    after = predict.residual("relu", depth=9, placement="branch")
    assert after.mean_square == pytest.approx(np.arange(10.0) + 1)
    frozen = predict.residual("relu", depth=9, gain={"down": 0.0})
    assert frozen.gradient_ratio == 1.0
    assert math.isinf(frozen.trainable_depth)


def test_closed_forms_of_transformers() -> None:
    options: dict[str, Any] = {"depth": 6, "tokens": 8, "score_scale": 0.0}
    silent = {"down": 0.0}
    olmo = predict.transformer("relu", **options, placement="branch")
    assert olmo.mean_square == pytest.approx(1 + 2 * np.arange(7.0))
    # uniform attention adds the mean of the tokens to all of them, q and p alike
    uniform = predict.transformer("relu", **options, gain=silent, correlation=0.5)
    q, p = 1.0, 0.5
    for block in range(6):
        q, p = q + (q + 7 * p) / (8 * q), p + (q + 7 * p) / (8 * q)
        assert uniform.mean_square[block + 1] == pytest.approx(q)
        assert uniform.correlation[block + 1] == pytest.approx(p / q)
    # without norms, 1 − ρ falls as (1 + α²)^−L once tokens are alike (Noci et al. 2022)
    bare = predict.transformer("relu", depth=40, tokens=8, score_scale=0.0, placement="none", gain=silent)
    fall = (1 - bare.correlation[-1]) / (1 - bare.correlation[-2])
    assert fall == pytest.approx(0.5, rel=TOLERANCE.finite_difference)
    assert not uniform.collapsed
    assert uniform.entropy == (1.0,) * 6


def draw(prediction: predict.Transformer, seed: int, *, width: int, correlation: float) -> tuple[float, float, float]:
    """Mean square, token correlation and gradient ratio of a network with drawn weights, 2 sequences."""
    torch.manual_seed(seed)
    depth, n, size, g = prediction.depth, prediction.tokens, prediction.head_size, prediction.gains
    placement, kept = prediction.placement, (2 * depth) ** 0.25 if prediction.placement == "deepnorm" else 1.0
    first = math.sqrt(correlation) * torch.randn(2, 1, width) + math.sqrt(1 - correlation) * torch.randn(2, n, width)
    x = start = first.requires_grad_()

    def linear(y: torch.Tensor, fan_out: int, gain: float) -> torch.Tensor:
        return y @ (torch.randn(y.shape[-1], fan_out) * math.sqrt(gain / y.shape[-1]))

    def norm(y: torch.Tensor) -> torch.Tensor:
        return y / y.pow(2).mean(-1, keepdim=True).sqrt()

    def attention(y: torch.Tensor) -> torch.Tensor:
        parts = [linear(y, width, gain).unflatten(-1, (-1, size)).transpose(1, 2) for gain in g[:3]]
        answer = torch.nn.functional.scaled_dot_product_attention(*parts, scale=prediction.score_scale)
        return linear(answer.transpose(1, 2).flatten(2), width, g.output)

    def perceptron(y: torch.Tensor) -> torch.Tensor:
        return linear(torch.relu(linear(y, 4 * width, g.up)), width, g.down)

    for _ in range(depth):
        for branch in (attention, perceptron):
            if placement == "pre":
                x = x + prediction.branch_scale * branch(norm(x))
            elif placement == "branch":
                x = x + prediction.branch_scale * norm(branch(x))
            else:
                x = kept * x + prediction.branch_scale * branch(x)
                x = x if placement == "none" else norm(x)
    x.retain_grad()
    (x * torch.randn_like(x)).sum().backward()
    gram = (x @ x.transpose(1, 2) / width).detach()
    own = gram.diagonal(dim1=1, dim2=2).mean().item()
    cross = (gram.sum((1, 2)).mean().item() - n * own) / (n * (n - 1))
    assert start.grad is not None
    assert x.grad is not None
    return own, cross / own, float(start.grad.pow(2).sum() / x.grad.pow(2).sum())


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post", "branch", "deepnorm", "none"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_drawn_transformers_agree(placement: Any, scale: float | None) -> None:
    """Four blocks of width 512 with 16 tokens, 8 seeds: within five standard errors and 6%, scores small and large."""
    prediction = predict.transformer(
        "relu", depth=4, tokens=16, placement=placement, init="lecun", head_size=32, score_scale=scale,
        correlation=0.2, width=512, branch_scale=0.7,
    )  # fmt: skip
    drawn = np.array([draw(prediction, seed, width=512, correlation=0.2) for seed in range(8)])
    expected = prediction.mean_square[-1], prediction.correlation[-1], prediction.gradient_ratio
    for value, values in zip(expected, drawn.T, strict=True):
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert_within_standard_errors(value, values.mean(), error, allowance=0.06 * abs(values.mean()))


def test_a_prediction_is_a_profile_and_json() -> None:
    found = predict.transformer("gelu", depth=3, tokens=8, init="gpt2", width=64)
    path = found.profile()
    assert path.layers == (0, 1, 2, 3)
    assert set(path.measures) == {
        "mean_square", "mean_cosine", "gradient_log_norm", "score_std", "attention_entropy", "condensation"
    }  # fmt: skip
    assert path.series("gradient_log_norm").value[-1] == 0.0
    assert path.series("mean_square").value[0] == pytest.approx(0.0008)
    data = found.to_dict()
    assert data["gradient_growth"] ** 3 == pytest.approx(data["gradient_ratio"])
    assert data["gains"]["output"] == pytest.approx(64 * 0.0004 / 6)
    assert "squared gradients grow" in str(found)


def test_collapse_and_its_cure() -> None:
    """Scores without the division by √(head size) condense; a norm of queries and keys has no such scores."""
    wild = predict.transformer("relu", depth=2, tokens=32, score_scale=1.0)
    assert wild.collapsed
    assert wild.score_std[0] == pytest.approx(8.0)
    assert wild.gradient_ratio > 10 * predict.transformer("relu", depth=2, tokens=32).gradient_ratio
    grown = predict.transformer("relu", depth=20, tokens=32, placement="branch", init="he")
    assert grown.collapsed
    assert not predict.transformer(
        "relu", depth=20, tokens=32, placement="branch", init="he", query_norm=True
    ).collapsed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "sandwich"}, "placement among pre, post"),
        ({"depth": 0}, "depth"),
        ({"tokens": 1}, "tokens to be an integer"),
        ({"correlation": -0.1}, "must lie in \\[0, 1\\]"),
        ({"init": "gpt2"}, "one standard deviation for all widths"),
        ({"init": "orthogonal"}, "initialization among"),
        ({"gain": {"middle": 1.0}}, "gains among"),
        ({"gain": {"up": -1.0}}, "not negative"),
        ({"mean_square": 0.0}, "positive and finite"),
        ({"branch_scale": math.inf}, "scale of a branch"),
        ({"score_scale": math.nan}, "scale of the scores"),
        ({"expansion": 0.0}, "expansion"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        predict.transformer("relu", **{"depth": 2, "tokens": 4, **options})
