"""The attention rule of the Gram calculus against explicit layers of width 1024, and its two routes to one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sounding.errors import UsageError
from sounding.theory.signal.attention import attend, attend_backward, attend_signals, attend_signals_backward
from sounding.theory.signal.description import Array, Attention, Law, Normalize, Points
from sounding.theory.signal.heads import Projections, rotary_angles
from sounding.theory.signal.signal import Signal
from tolerance import TOLERANCE, assert_within_standard_errors

SAMPLES, POSITIONS, SIZE, WIDTH = 2, 6, 16, 1024
HEADS = WIDTH // SIZE
SEEDS = 16
LAWS = {"queries": 1.0, "keys": 0.8, "values": 1.3}  # gains of the three projections
HIDDEN = np.where(np.tri(POSITIONS) + np.eye(POSITIONS, k=2) > 0, 0.0, -np.inf)
SLOPE = -np.abs(np.subtract.outer(np.arange(POSITIONS), np.arange(POSITIONS))).astype(np.float64)  # of ALiBi
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "masked": {"mask": HIDDEN},
    "mask per sample": {"mask": np.stack([HIDDEN, np.linspace(-1, 1, 36).reshape(6, 6)])},
    "no division by the root of the head size": {"causal": True, "scale": 1.0},
    "grouped queries": {"causal": True, "key_heads": HEADS // 4},
    "rotary": {"angles": rotary_angles(POSITIONS, SIZE, base=100.0), "causal": True},
    "rotary in part": {"angles": rotary_angles(POSITIONS, SIZE, base=100.0, share=0.5)},
    "normed queries": {
        "query_norm": Normalize("rms", 1e-6, Law(0.1, 1.2)),
        "angles": rotary_angles(POSITIONS, SIZE, base=100.0),
    },
    "a bias of its own for every head": {"own_masks": np.linspace(0, 3, HEADS)[:, None, None] * SLOPE, "causal": True},
    "layer norm of queries": {"query_norm": Normalize("layer", 1e-6, Law(0.1, 1.0), Law(0.2, 0.3)), "causal": True},
}


def make_rule(**options: Any) -> Attention:
    defaults = {"heads": HEADS, "key_heads": HEADS, "head_size": SIZE, "scale": SIZE**-0.5}
    return Attention(**{**defaults, **options})


def make_points(generator: np.random.Generator) -> tuple[Array, Array]:
    """Features of correlated points, and a root of D at the output that correlates points of different samples."""
    count = SAMPLES * POSITIONS
    inputs = generator.normal(size=(count, 24)) + 0.7 * generator.normal(size=24)
    return inputs, (generator.normal(size=(count, 3)) + 1.0) / 7


def turned(x: torch.Tensor, rule: Attention) -> torch.Tensor:
    """Rotary embedding by complex numbers on neighbouring features, as Llama's paper writes it."""
    if rule.angles is None:
        return x
    size = 2 * rule.angles.shape[1]
    angles = torch.from_numpy(rule.angles).to(x.dtype)
    pairs = torch.view_as_complex(x[..., :size].reshape(*x.shape[:-1], size // 2, 2).contiguous())
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([rotated, x[..., size:]], dim=-1)


def normed(x: torch.Tensor, rule: Attention) -> torch.Tensor:
    norm = rule.query_norm
    if norm is None:
        return x
    scale, shift = (law.mean + math.sqrt(law.variance) * torch.randn(x.shape[1], 1, x.shape[3]).double()
                    for law in (norm.scale, norm.shift))  # fmt: skip
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return scale * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) + shift


def explicit(rule: Attention, inputs: Array, root: Array, seed: int) -> dict[str, Array]:
    """One layer with drawn weights: Gram matrices of output and of gradients at queries, keys and values."""
    torch.manual_seed(seed)
    x = torch.from_numpy(inputs).reshape(SAMPLES, POSITIONS, -1)
    counts = {"queries": rule.heads, "keys": rule.key_heads, "values": rule.key_heads}
    projected = {}
    for name, count in counts.items():
        weight = torch.randn(x.shape[-1], count * SIZE, dtype=torch.float64) * math.sqrt(LAWS[name] / x.shape[-1])
        projected[name] = (x @ weight).requires_grad_()
    parts = {name: y.unflatten(-1, (counts[name], SIZE)).transpose(1, 2) for name, y in projected.items()}
    queries, keys = (turned(normed(parts[name], rule), rule) for name in ("queries", "keys"))
    repeat = rule.heads // rule.key_heads
    mask = torch.zeros(POSITIONS, POSITIONS, dtype=torch.float64)
    if rule.mask is not None:
        mask = torch.from_numpy(rule.mask).reshape(-1, 1, POSITIONS, POSITIONS)
    if rule.own_masks is not None:
        mask = mask + torch.from_numpy(rule.own_masks)
    if rule.causal:
        mask = mask + torch.full((POSITIONS, POSITIONS), -math.inf, dtype=torch.float64).triu(1)
    answer = torch.nn.functional.scaled_dot_product_attention(
        queries,
        keys.repeat_interleave(repeat, dim=1),
        parts["values"].repeat_interleave(repeat, dim=1),
        attn_mask=mask,
        scale=rule.scale,
    )
    output = answer.transpose(1, 2).reshape(len(inputs), -1)
    sent = torch.from_numpy(root) @ torch.randn(root.shape[1], output.shape[1], dtype=torch.float64)
    (output * sent / math.sqrt(output.shape[1])).sum().backward()
    found = {"output": (output @ output.T / output.shape[1]).detach().numpy()}
    for name, y in projected.items():
        gradient = y.grad.reshape(len(inputs), -1)
        found[name] = (gradient @ gradient.T).numpy()
    return found


def predict(rule: Attention, inputs: Array, root: Array, seed: int, **options: Any) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    gram = inputs @ inputs.T / inputs.shape[1]
    grams = Projections(**{name: gain * gram for name, gain in LAWS.items()}, samples=SAMPLES)
    there = attend(rule, grams, generator=generator, **options)
    back = attend_backward(rule, grams, gradient=root @ root.T, generator=generator, **options)
    return {"output": there.gram, "queries": back.queries, "keys": back.keys, "values": back.values}


def summaries(matrix: Array) -> Array:
    """Numbers that tell a Gram matrix apart: its trace, and weighted sums within and between samples."""
    own = np.kron(np.eye(SAMPLES), np.ones((POSITIONS, POSITIONS)))
    slope = np.outer(*[np.arange(len(matrix)) - 3.0] * 2)
    return np.array([np.trace(matrix), (matrix * own).sum(), (matrix * (1 - own)).sum(), (matrix * slope).sum()])


@pytest.mark.parametrize("case", CASES)
def test_the_rule_agrees_with_explicit_layers(case: str) -> None:
    """Forwards and backwards, over 16 layers of width 1024 and 16 × 64 predicted heads, in standard errors.

    Queries of given inputs are Gaussian at any width of the inputs, so that no allowance for finite width is due.
    """
    rule = make_rule(**CASES[case])
    inputs, root = make_points(np.random.default_rng(5))
    measured = [explicit(rule, inputs, root, seed) for seed in range(SEEDS)]
    options = {"draws": 64, "precision": 0.0, "route": "heads"}
    predicted = [predict(rule, inputs, root, 100 + seed, **options) for seed in range(SEEDS)]
    for name in measured[0]:
        left, right = (np.array([summaries(found[name]) for found in series]) for series in (measured, predicted))
        errors = np.hypot(left.std(axis=0, ddof=1), right.std(axis=0, ddof=1)) / math.sqrt(SEEDS)
        # gradients at the keys of a sample add up to zero, which single precision, that of heads, leaves as rounding
        rounding = TOLERANCE.six_digits * float(np.abs(left).max())
        for value, expected, error in zip(right.mean(axis=0), left.mean(axis=0), errors, strict=True):
            assert_within_standard_errors(float(value), float(expected), float(error), rounding)
        # so that gradients of half the size would be seen
        assert TOLERANCE.standard_errors * errors[0] < 0.5 * abs(right.mean(axis=0)[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": HIDDEN}])
def test_two_routes_to_small_scores(options: dict[str, Any]) -> None:
    """Heads drawn at random and the closed form differ by less than their two stated errors together."""
    rule = make_rule(scale=0.2 * SIZE**-0.5, **options)
    inputs, root = make_points(np.random.default_rng(6))
    closed = predict(rule, inputs, root, 0, route="small scores")
    drawn = [predict(rule, inputs, root, seed, route="heads", draws=128, precision=0.0) for seed in range(8)]
    spread = attend(rule, Projections(*[inputs @ inputs.T / 24] * 3, SAMPLES), generator=np.random.default_rng(0))
    assert spread.draws == 0
    gains = {"output": 1.0, "queries": LAWS["queries"], "keys": LAWS["keys"], "values": LAWS["values"]}
    whole = sum(gains[name] * np.trace(closed[name]) for name in ("queries", "keys", "values"))
    for name in closed:
        size = np.trace(closed["output"]) if name == "output" else whole / gains[name]
        values = np.array([summaries(found[name]) for found in drawn])
        errors = values.std(axis=0, ddof=1) / math.sqrt(len(values))
        for value, expected, error in zip(summaries(closed[name])[:1], values.mean(axis=0), errors, strict=False):
            assert_within_standard_errors(value, expected, error, allowance=spread.stderr * size)


def test_scores_are_described() -> None:
    """Score sizes, entropy and one-hot rows of 1024 explicit heads, at scores without the division by √size."""
    rule = make_rule(causal=True, scale=1.0)
    inputs, _ = make_points(np.random.default_rng(7))
    gram = inputs @ inputs.T / 24
    found = attend(
        rule, Projections(gram, gram, gram, SAMPLES), generator=np.random.default_rng(0), draws=1024, precision=0.0
    )
    torch.manual_seed(0)
    x = torch.from_numpy(inputs).reshape(SAMPLES, 1, POSITIONS, -1)
    queries, keys = (x @ torch.randn(1024, 24, SIZE, dtype=torch.float64) / math.sqrt(24) for _ in range(2))
    scores = queries @ keys.transpose(2, 3)
    seen = torch.ones(POSITIONS, POSITIONS).tril().bool()
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)[:, :, 1:]
    entropy = torch.special.entr(weights).sum(-1) / torch.arange(2, POSITIONS + 1).log()
    per_head = {
        "largest_score": scores[..., seen].abs().amax((0, 2)),
        "entropy": entropy.mean((0, 2)),
        "one_hot": (weights.amax(-1) > 0.9).double().mean((0, 2)),
    }
    square = scores[..., seen].pow(2).mean((0, 2))
    assert_within_standard_errors(found.score_std**2, square.mean().item(), math.sqrt(2) * square.std().item() / 32)
    for name, heads in per_head.items():
        assert_within_standard_errors(getattr(found, name), heads.mean().item(), math.sqrt(2) * heads.std().item() / 32)


def test_equal_tokens_and_single_keys_are_exact() -> None:
    """Tokens that are all equal stay so, and a sequence of one token passes values and gradients on unchanged."""
    rule, generator = make_rule(scale=3.0), np.random.default_rng(0)
    ones = np.ones((8, 8))
    equal = attend(rule, Projections(ones, ones, 2 * ones, 2), generator=generator)
    np.testing.assert_allclose(equal.gram, 2 * ones, rtol=TOLERANCE.float32_forward)
    single = Projections(np.eye(3), np.eye(3), np.diag([1.0, 2.0, 3.0]), 3)
    back = attend_backward(rule, single, gradient=ones[:3, :3], generator=generator)
    np.testing.assert_allclose(back.values, ones[:3, :3], rtol=TOLERANCE.float32_forward)
    assert abs(back.queries).max() + abs(back.keys).max() < TOLERANCE.closed_form
    assert attend(rule, single, generator=generator).entropy == 1.0


def test_query_gradients_of_tokens_that_are_almost_equal() -> None:
    """Queries carry (1 − ρ)², keys 1 − ρ, and no digits are lost although 1 − ρ is 1e-6: uniform J has tr J² = 7/64."""
    apart, generator = 1e-6, np.random.default_rng(0)
    gram = np.kron(np.eye(2), apart * np.eye(8)) + (1 - apart)
    rule = make_rule(scale=0.5)
    back = attend_backward(rule, Projections(gram, gram, gram, 2), gradient=np.eye(16), generator=generator)
    assert back.draws == 0
    expected = 0.25 * SIZE * 7 / 64
    np.testing.assert_allclose(np.diag(back.queries), expected * apart**2, rtol=TOLERANCE.float32_forward)
    np.testing.assert_allclose(np.diag(back.keys), expected * apart, rtol=TOLERANCE.float32_forward)


@pytest.mark.parametrize("hidden", [-10_000.0, float(np.finfo(np.float32).min)])
def test_a_finite_number_hides_as_infinity_does(hidden: float) -> None:
    """Networks mask with −10 000 or float32's smallest number; entropy counts the keys that are seen."""
    inputs = Projections(np.eye(12), np.eye(12), np.eye(12), 2)
    finite = np.where(np.isinf(HIDDEN), hidden, 0.0) - 3.0  # softmax ignores what a whole row has in common
    for route in ("heads", "small scores"):
        one, other = (
            attend(make_rule(mask=mask), inputs, generator=np.random.default_rng(0), route=route)
            for mask in (HIDDEN, finite)
        )
        np.testing.assert_allclose(one.gram, other.gram, rtol=TOLERANCE.float32_forward)
        assert one.entropy == pytest.approx(other.entropy, rel=TOLERANCE.float32_forward)
        assert one.score_std == pytest.approx(other.score_std, rel=TOLERANCE.float32_forward)


def test_values_of_another_sequence() -> None:
    """Cross-attention: 3 query positions read 2 key positions, in each of 2 samples."""
    rule, generator = make_rule(scale=0.0), np.random.default_rng(0)
    inputs = Projections(np.eye(6), np.eye(4), np.eye(4), 2)
    expected = np.kron(np.eye(2), np.full((3, 3), 0.5))
    for route in ("heads", "small scores"):
        np.testing.assert_allclose(
            attend(rule, inputs, generator=generator, route=route).gram, expected, rtol=TOLERANCE.float32_forward
        )
        assert attend_backward(rule, inputs, gradient=np.eye(6), generator=generator, route=route).keys.shape == (4, 4)


def test_sizes_beyond_single_precision() -> None:
    """Gradients of 1e-60 and values of 1e50 keep their digits, although heads are drawn in single precision."""
    rule = make_rule(causal=True)
    small = Projections(np.eye(6), np.eye(6), 1e50 * np.eye(6), 1)
    plain = Projections(np.eye(6), np.eye(6), np.eye(6), 1)
    seeds = [np.random.default_rng(0) for _ in range(4)]
    far = attend_backward(rule, small, gradient=1e-60 * np.eye(6), generator=seeds[0])
    near = attend_backward(rule, plain, gradient=np.eye(6), generator=seeds[1])
    np.testing.assert_allclose(far.values * 1e60, near.values, rtol=TOLERANCE.float32_forward)
    np.testing.assert_allclose(far.queries * 1e10, near.queries, rtol=TOLERANCE.float32_forward)
    np.testing.assert_allclose(
        attend(rule, small, generator=seeds[2]).gram / 1e50,
        attend(rule, plain, generator=seeds[3]).gram,
        rtol=TOLERANCE.float32_forward,
    )


def test_bad_input_is_refused() -> None:
    generator = np.random.default_rng(0)
    good = Projections(np.eye(4), np.eye(4), np.eye(4), 2)
    with pytest.raises(UsageError, match="square Gram matrix of queries"):
        Projections(np.eye(5), np.eye(4), np.eye(4), 2)
    with pytest.raises(UsageError, match="finite numbers in the Gram matrix of values"):
        Projections(np.eye(4), np.eye(4), np.full((4, 4), np.nan), 2)
    with pytest.raises(UsageError, match="keys and values of the same points"):
        Projections(np.eye(4), np.eye(4), np.eye(2), 2)
    with pytest.raises(UsageError, match="hides them all"):
        attend(make_rule(mask=np.full((2, 2), -np.inf)), good, generator=generator)
    with pytest.raises(UsageError, match="attention mask of shape"):
        attend(make_rule(mask=np.zeros((3, 3))), good, generator=generator)
    with pytest.raises(UsageError, match="covers no rotary"):
        attend(make_rule(angles=rotary_angles(POSITIONS, SIZE)), good, generator=generator, route="small scores")
    with pytest.raises(UsageError, match="at least 8 draws"):
        attend(make_rule(), good, generator=generator, draws=2, route="heads")
    with pytest.raises(UsageError, match="gradients at 4 points"):
        attend_backward(make_rule(), good, gradient=np.eye(3), generator=generator)
    with pytest.raises(UsageError, match="rms or layer norm"):
        attend(make_rule(query_norm=Normalize("batch", 0.0)), good, generator=generator)


@pytest.mark.parametrize("scale", [0.2, 2.0])
def test_windows_are_a_mask(scale: float) -> None:
    """Attention within windows, and over all positions with what lies outside the window hidden: one number."""
    windows = ((0, 3, 4), (5, 1, 2))
    own = np.random.default_rng(1).normal(size=(2, 3, 3))  # what each window adds to its scores
    mask = np.full((POSITIONS, POSITIONS), -np.inf)
    for window, added in zip(windows, own, strict=True):
        mask[np.ix_(window, window)] = added
    inputs, root = make_points(np.random.default_rng(6))
    points = Points(SAMPLES, (POSITIONS,))
    signals = tuple(Signal.full(gain * inputs @ inputs.T / 24, points) for gain in LAWS.values())
    gradient = Signal.full(root @ root.T, points)
    found = []
    for rule in (
        make_rule(scale=scale * SIZE**-0.5, mask=own, windows=windows),
        make_rule(scale=scale * SIZE**-0.5, mask=mask),
    ):
        settings: Any = {"draws": 512, "precision": 0.0, "generator": np.random.default_rng(0)}
        there = attend_signals(rule, signals, **settings)[1]
        found.append([there, *attend_signals_backward(rule, signals, gradient=gradient, **settings)])
    for one, other in zip(*found, strict=True):
        rounding = TOLERANCE.six_digits if scale < 1 else 0.2  # 512 heads drawn in another order
        assert np.abs(one.gram - other.gram).max() <= rounding * np.abs(other.gram).max()


@pytest.mark.parametrize(("route", "scale"), [("heads", 1.0), ("small scores", 0.2)])
def test_features_that_keys_and_values_share(route: Any, scale: float) -> None:
    """Query gradients where tokens are as many as features: a third to twice more than of infinitely many features."""
    rule, features, tokens = make_rule(scale=scale * SIZE**-0.5), 24, 24
    sizes = 0.5 + np.random.default_rng(2).random(tokens)
    found = []
    for seed in range(2 * SEEDS):
        generator = np.random.default_rng(seed)
        x = torch.from_numpy(sizes[:, None] * generator.normal(size=(tokens, features)))
        gains = torch.randn(3, features, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        q, k, v = ((x @ one / features**0.5).unflatten(-1, (HEADS, SIZE)).transpose(0, 1) for one in gains)
        q.requires_grad_()
        answer = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=rule.scale)
        sent = torch.from_numpy(generator.normal(size=answer.shape)) / math.sqrt(WIDTH)
        (gradient,) = torch.autograd.grad((answer * sent).sum(), q)
        found.append(float(gradient.square().sum()))
    grams = [np.diag(sizes**2)] * 3
    predicted = []
    for width in (features, math.inf):
        back = attend_backward(
            rule,
            Projections(*grams, samples=1, width=width),
            gradient=np.eye(tokens),
            generator=np.random.default_rng(0),
            draws=512,
            precision=0.0,
            route=route,
        )
        predicted.append(float(np.trace(back.queries)))
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    allowance = 0.1 * predicted[0]  # of higher orders in scores and 1/features
    assert_within_standard_errors(predicted[0], float(np.mean(found)), error, allowance)
    assert predicted[1] < 0.8 * float(np.mean(found))
