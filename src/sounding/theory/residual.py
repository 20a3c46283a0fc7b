"""Residual networks and transformers in closed form: growth of stream and gradients with depth, token correlation.

The verbs `predict.residual` and `predict.transformer`; `sounding.theory.blocks` has the formulas of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sounding.activations import Activation, ActivationLike, resolve
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.theory.batchnorm import DEPTH_SCALES
from sounding.theory.blocks import (
    PLACEMENTS,
    Branch,
    Gains,
    Init,
    Pair,
    Perceptron,
    Placement,
    SelfAttention,
    Stream,
    gains,
)
from sounding.theory.bounds.bound import check_integer
from sounding.theory.kernel import check_correlation

SETTLED = 200  # steps in which the shares of mean and differences in the gradients settle


@dataclass(frozen=True)
class Residual:
    """Two samples through a stack of residual blocks with random weights, in the limit of large width.

    Args:
        activation, placement, branch_scale, depth: what it belongs to; see `residual`.
        gains: fan-in times variance of each weight matrix.
        mean_square: q of the stream after 0, 1, … depth blocks.
        correlation: cosine of two samples (tokens) there.
        gradient_log: natural logarithm of the squared gradient there, relative to the last block's output.
        trainable_depth: how many blocks, with the same law of weights, change squared gradients by e^16 or let the
            distance of two tokens, squared and relative to their size, fall by e^16; infinite if none do.
    """

    activation: str
    placement: Placement
    branch_scale: float
    depth: int
    gains: Gains
    mean_square: tuple[float, ...] = field(repr=False)
    correlation: tuple[float, ...] = field(repr=False)
    gradient_log: tuple[float, ...] = field(repr=False)
    trainable_depth: float

    @property
    def stream_growth(self) -> float:
        """Mean square of the stream at the end over that at the start."""
        return self.mean_square[-1] / self.mean_square[0]

    @property
    def gradient_ratio(self) -> float:
        """Squared gradient in front of the first block over that behind the last."""
        return math.exp(min(self.gradient_log[0], 709.0))

    @property
    def gradient_growth(self) -> float:
        """Growth of the squared gradient per block, towards the input, in the geometric mean."""
        return math.exp(self.gradient_log[0] / self.depth)

    def profile(self) -> Profile:
        """`mean_square`, `mean_cosine` and `gradient_log_norm` after each block; layer 0 is the input."""
        log_norms = [log / 2 for log in self.gradient_log]
        columns = {"mean_square": self.mean_square, "mean_cosine": self.correlation, "gradient_log_norm": log_norms}
        return Profile.over_depth(columns, self._settings())

    def to_dict(self) -> dict[str, Any]:
        """Plain types under the names of `sounding predict residual --json`."""
        numbers = fields_of(self, "stream_growth gradient_ratio gradient_growth correlation trainable_depth")
        numbers["correlation"] = self.correlation[-1]
        return {**self._settings(), **numbers, "profile": self.profile().to_dict()}

    def _settings(self) -> dict[str, Any]:
        used = fields_of(self.gains, "up down")
        return {**fields_of(self, "activation placement branch_scale depth"), "gains": used}

    def __str__(self) -> str:
        far = f"{self.trainable_depth:.4g}" if math.isfinite(self.trainable_depth) else "any number of"
        scale = f", branches × {self.branch_scale:g}" if self.branch_scale != 1 else ""
        return (
            f"{type(self).__name__}({self.activation}, {self.placement}{scale}, {self.depth} blocks): "
            f"squared gradients grow ×{self.gradient_ratio:.6g} in all, trainable to about {far} blocks\n"
            f"  stream: mean square {self.mean_square[0]:.4g} → {self.mean_square[-1]:.4g}, "
            f"correlation {self.correlation[0]:.4g} → {self.correlation[-1]:.4g}"
        )


@dataclass(frozen=True)
class Transformer(Residual):
    """Tokens of one sequence through transformer blocks with random weights, every token seeing all others.

    Args:
        tokens, head_size, score_scale: what it belongs to; see `transformer`.
        score_std: σ_s of each block's scores.
        entropy: of each block's attention rows, over that of uniform attention.
        condensation: β/β_c of each block: above 1 attention collapses on few keys.
    """

    tokens: int
    head_size: int
    score_scale: float
    score_std: tuple[float, ...] = field(repr=False)
    entropy: tuple[float, ...] = field(repr=False)
    condensation: tuple[float, ...] = field(repr=False)

    @property
    def collapsed(self) -> bool:
        """Whether some block's attention condenses: β above β_c = √(2/(1−ρ)), β = σ_s/√(ln n)."""
        return max(self.condensation) > 1

    def profile(self) -> Profile:
        """The profile of `Residual`, and `score_std`, `attention_entropy` and `condensation` of block 1, 2, …"""
        columns = {"score_std": self.score_std, "attention_entropy": self.entropy, "condensation": self.condensation}
        return super().profile() + Profile.over_depth(columns, {}, first=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain types under the names of `sounding predict transformer --json`."""
        worst = {"score_std": max(self.score_std), "entropy": min(self.entropy), "collapsed": self.collapsed}
        return {**super().to_dict(), **worst, "condensation": max(self.condensation)}

    def _settings(self) -> dict[str, Any]:
        own = fields_of(self, "tokens head_size score_scale")
        return {**super()._settings(), **own, "gains": self.gains._asdict()}

    def __str__(self) -> str:
        word = "condenses on few keys" if self.collapsed else "does not condense"
        return (
            f"{super().__str__()}\n  attention: {self.tokens} tokens, score standard deviation up to "
            f"{max(self.score_std):.4g}, entropy at least {min(self.entropy):.4g} of uniform, "
            f"β/β_c up to {max(self.condensation):.4g}: it {word}"
        )


def residual(
    activation: ActivationLike,
    *,
    depth: int,
    placement: Placement = "pre",
    branch_scale: float = 1.0,
    init: Init = "he",
    gain: Mapping[str, float] | None = None,
    width: int | None = None,
    expansion: float = 1.0,
    mean_square: float | None = None,
    correlation: float = 0.5,
) -> Residual:
    """Stream, correlation and gradients of depth blocks x + c W₂ φ(W₁ x), with the norm where `placement` says.

    Pre-norm adds c²g₂Eφ² to q in every block, so the stream grows linearly and gradients as a power of depth; without
    norms both grow exponentially (Yang and Schoenholz 2017; Hanin and Rolnick 2018); c² ∝ 1/depth keeps both finite
    (Hayou et al. 2021).

    Args:
        activation: name, record or callable.
        depth: blocks.
        placement: "pre", "post", "branch" (norm behind the branch, inside the residual: OLMo 2), "deepnorm", "none".
        branch_scale: c (LayerScale, ReZero, CompleteP).
        init: "he", "lecun", "xavier", "torch" or "gpt2"; see `sounding.theory.blocks.gains`.
        gain: gains (fan-in times variance) that replace those of `init`, by name: up, down.
        width: features of the stream, which "gpt2" needs.
        expansion: features of the branch over those of the stream.
        mean_square: of the samples that enter, 1 unless given; 2 · 0.02² for "gpt2", whose embeddings have it.
        correlation: of the two samples that enter.

    >>> found = residual("relu", depth=16)
    >>> round(found.mean_square[-1], 9), round(found.gradient_ratio, 9)
    (33.0, 33.0)
    """
    phi, layers, start = _checked(activation, depth, placement, branch_scale, init, mean_square, correlation)
    weights = gains(init, depth=layers, width=width, expansion=expansion, placement=placement, given=gain)
    stack = _Stack(Stream(placement, branch_scale, layers), (Perceptron(phi, up=weights.up, down=weights.down),))
    told = stack.describe(stack.signals(start, layers), layers)
    return Residual(phi.name, placement, branch_scale, layers, weights, **told)


def transformer(
    activation: ActivationLike,
    *,
    depth: int,
    tokens: int,
    placement: Placement = "pre",
    branch_scale: float = 1.0,
    init: Init = "xavier",
    gain: Mapping[str, float] | None = None,
    width: int | None = None,
    expansion: float = 4.0,
    head_size: int = 64,
    score_scale: float | None = None,
    query_norm: bool = False,
    mean_square: float | None = None,
    correlation: float = 0.0,
) -> Transformer:
    """Stream, token correlation, attention and gradients of depth blocks of self-attention and perceptron.

    Uniform attention adds to q and p alike, g_v g_o (q + (n−1)p)/(n q) in pre-norm, so that tokens become alike (Dong
    et al. 2021; Noci et al. 2022); backwards the mean of the tokens' gradients is multiplied by 1 + g_v g_o/q, what
    differs between tokens is not. `sounding.theory.blocks.SelfAttention` covers scores of any size; beyond β_c =
    √(2/(1−ρ)) attention condenses (Giorlandino and Goldt 2026).

    Args:
        activation: of the perceptron; name, record or callable.
        depth: blocks of two branches.
        tokens: n, all of which see each other.
        placement, branch_scale, init, mean_square: as for `residual`; "deepnorm" is Wang et al. 2022.
        gain: gains that replace those of `init`, by name: query, key, value, output, up, down.
        width: features of the stream; "gpt2" needs it, and tokens are then random vectors in so many dimensions.
        expansion: features of the perceptron over those of the stream.
        head_size: features of one head.
        score_scale: what scores are multiplied by, head_size^(−1/2) unless given; 1 for the missing division.
        query_norm: whether each head's queries and keys are normed (QK-norm).
        correlation: of the tokens that enter.

    >>> found = transformer("gelu", depth=12, tokens=64, init="gpt2", width=768)
    >>> round(found.gradient_growth, 3), found.collapsed
    (1.455, False)
    """
    phi, layers, start = _checked(activation, depth, placement, branch_scale, init, mean_square, correlation)
    tokens, head_size = (
        check_integer(number, name=name, least=2) for name, number in (("tokens", tokens), ("head_size", head_size))
    )
    if start.cross < 0:
        raise UsageError(f"the correlation of tokens must lie in [0, 1], got {correlation}")
    weights = gains(init, depth=layers, width=width, expansion=expansion, placement=placement, given=gain)
    scale = head_size**-0.5 if score_scale is None else score_scale
    if not math.isfinite(scale):
        raise UsageError(f"the scale of the scores must be finite, got {scale}")
    attention = SelfAttention(weights, tokens=tokens, scale=scale, head_size=head_size, width=width, normed=query_norm)
    perceptron = Perceptron(phi, up=weights.up, down=weights.down)
    stack = _Stack(Stream(placement, branch_scale, layers), (attention, perceptron))
    signals = stack.signals(start, layers)
    entering = [Pair(1.0, signal.correlation) if placement == "pre" else signal for signal in signals[:-1:2]]
    variances = [attention.score_variance(signal) for signal in entering]
    return Transformer(
        phi.name, placement, branch_scale, layers, weights, **stack.describe(signals, layers),
        tokens=tokens, head_size=head_size, score_scale=scale,
        score_std=tuple(math.sqrt(variance) for variance in variances),
        entropy=tuple(attention.moments(signal).entropy for signal in entering),
        condensation=tuple(
            math.sqrt(variance * (1 - signal.correlation) / (2 * math.log(tokens)))
            for variance, signal in zip(variances, entering, strict=True)
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class _Stack:
    """Blocks of the same branches, one after the other."""

    stream: Stream
    branches: tuple[Branch, ...]

    def signals(self, start: Pair, depth: int) -> list[Pair]:
        """The signal in front of every branch, and behind the last."""
        found = [start]
        for _ in range(depth):
            for branch in self.branches:
                found.append(self.stream.forward(found[-1], branch))
        return found

    def gradients(self, signals: Sequence[Pair], blocks: Sequence[int]) -> list[float]:
        """ln t in front of each of these blocks, from gradients that are independent at the tokens, and 0 for those."""
        gradient, count, found = Pair(1.0, 0.0), len(self.branches), [0.0]
        for block in blocks:
            for index in range(count - 1, -1, -1):
                gradient = self.stream.backward(gradient, signals[block * count + index], self.branches[index])
            found.append(found[-1] + math.log(gradient.own))
            # scaled to t = 1: over a hundred blocks it may leave float64
            gradient = gradient.times(1 / gradient.own)
        return found[::-1]

    def describe(self, signals: Sequence[Pair], depth: int) -> dict[str, Any]:
        """What `Residual` says of the stream and the gradients."""
        ends = signals[:: len(self.branches)]
        return {
            "mean_square": tuple(signal.own for signal in ends),
            "correlation": tuple(signal.correlation for signal in ends),
            "gradient_log": tuple(self.gradients(signals, range(depth - 1, -1, -1))),
            "trainable_depth": self._trainable_depth(signals, depth),
        }

    def _trainable_depth(self, signals: Sequence[Pair], depth: int) -> float:
        """Blocks until |ln t| reaches 16, or −ln of the tokens' squared distance over their size, 2(1 − ρ), has."""
        count = len(self.branches)
        apart = [max(1 - signal.correlation, 1e-300) for signal in signals[::count]]
        falls = [math.log(apart[0] / one) for one in apart]
        # the last block over and over: how steep gradients are once the shares of mean and differences have settled
        last, before, *_ = self.gradients(signals, [depth - 1] * SETTLED)
        by_gradients = self._reach(
            lambda blocks: abs(self.gradients(signals, range(blocks - 1, -1, -1))[0]),
            abs(last - before),
            signals,
            depth,
        )
        # tokens that start alike have no distance to lose
        by_distance = self._reach(lambda blocks: falls[blocks], falls[-1] - falls[-2], signals, depth)
        return min(by_gradients, by_distance if apart[0] > 1e-12 else math.inf)

    def _reach(self, change: Callable[[int], float], rate: float, signals: Sequence[Pair], depth: int) -> float:
        """Blocks until `change` reaches 16: by bisection up to `depth`, beyond it by the last block's rate."""
        if change(depth) >= DEPTH_SCALES:
            low, high = 0, depth
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if change(middle) < DEPTH_SCALES else (low, middle)
            return float(high)
        if rate < 1e-9:  # 16 depth scales would take more blocks than anybody builds
            return math.inf
        missing = (DEPTH_SCALES - change(depth)) / rate
        rise = 1 - signals[-1 - len(self.branches)].own / signals[-1].own
        if self.stream.placement in ("pre", "branch") and rise > 0:
            # The stream grows linearly, and what changes by `rate` while ln q changes by `rise` is a power of q.
            return depth + (math.exp(missing * rise) - 1) / rise if missing * rise < 709 else math.inf
        return depth + missing


def _checked(
    activation: ActivationLike,
    depth: int,
    placement: Placement,
    branch_scale: float,
    init: Init,
    mean_square: float | None,
    correlation: float,
) -> tuple[Activation, int, Pair]:
    """The activation, the depth and the input's products, once all settings are known to make sense."""
    if placement not in PLACEMENTS:
        raise UsageError(f"expected a placement among {', '.join(PLACEMENTS)}, got {placement!r}")
    if not (math.isfinite(branch_scale) and branch_scale >= 0):
        raise UsageError(f"the scale of a branch must be finite and not negative, got {branch_scale}")
    if mean_square is None:
        # token and position embeddings of GPT-2 add up to 2 · 0.02²
        mean_square = 2 * 0.02**2 if init == "gpt2" else 1.0
    if not (math.isfinite(mean_square) and mean_square > 0):
        raise UsageError(f"the mean square of the input must be positive and finite, got {mean_square}")
    layers = check_integer(depth, name="depth", least=1)
    return resolve(activation), layers, Pair(mean_square, mean_square * check_correlation(correlation))
