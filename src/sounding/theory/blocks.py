"""Residual blocks in closed form: what attention, perceptron and norm do to tokens that are all alike in law.

Every two tokens (or samples) have the same covariance, so two numbers tell the signal: q, the mean square of a token,
and p, the covariance of two; and two tell the gradients: t, the squared gradient at a token, and o, the product of two
tokens' gradients. A branch maps both pairs, a placement of the norm joins branch and stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from sounding.activations import Activation
from sounding.errors import UsageError
from sounding.theory.integrals.hermite import expand
from sounding.theory.integrals.softmax import SoftmaxMoments, softmax_moments
from sounding.theory.length import squared_slope
from sounding.theory.signal.description import Array
from sounding.theory.signal.gaussian import map_pairs

Placement = Literal["pre", "post", "branch", "deepnorm", "none"]
Init = Literal["lecun", "he", "xavier", "torch", "gpt2"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
INITS: tuple[Init, ...] = get_args(Init)

TERMS = 128  # of a kernel map's series; with its tail it is within 0.5% up to correlations of 0.999, 0.01% below 0.97
VANISHING = 1e-24  # stands for the limit of a variance of 0


class Pair(NamedTuple):
    """What a token has, and what two tokens share: mean square and covariance, or the same of gradients."""

    own: float
    cross: float

    def plus(self, other: Pair, factor: float) -> Pair:
        """The sum with a multiple of another pair."""
        return Pair(self.own + factor * other.own, self.cross + factor * other.cross)

    def times(self, factor: float) -> Pair:
        """The pair of signals times a factor."""
        return Pair(factor * self.own, factor * self.cross)

    @property
    def correlation(self) -> float:
        """The cosine of two tokens; 1 for tokens of size 0."""
        return min(self.cross / self.own, 1.0) if self.own > 0 else 1.0


class Gains(NamedTuple):
    """Fan-in times the variance of the weights, of each of a block's six matrices."""

    query: float
    key: float
    value: float
    output: float
    up: float
    down: float


def gains(
    init: Init,
    *,
    depth: int,
    width: int | None,
    expansion: float,
    placement: Placement,
    given: Mapping[str, float] | None = None,
) -> Gains:
    """The gains of an initialization, and those that a user gives by name in their place.

    "lecun" has variance 1/fan-in, "he" 2/fan-in, "xavier" 2/(fan-in + fan-out), "torch" (nn.Linear) 1/(3 fan-in).
    "gpt2" has standard deviation 0.02, over √(2 · depth) in the last matrix of each branch (Radford et al. 2019), so it
    needs the width. DeepNorm divides value, output and perceptron weights by (8 · depth)^¼ (Wang et al. 2022).
    """
    if init not in INITS:
        raise UsageError(f"expected an initialization among {', '.join(INITS)}, got {init!r}")
    if not (math.isfinite(expansion) and expansion > 0):
        raise UsageError(f"the expansion of a perceptron must be positive and finite, got {expansion}")
    if init == "gpt2":
        if width is None:
            raise UsageError("the initialization of GPT-2 has one standard deviation for all widths", hint="width=768")
        one, last = width * 0.02**2, width * 0.02**2 / (2 * depth)
        found = Gains(one, one, one, last, one, expansion * last)
    elif init == "xavier":
        found = Gains(1.0, 1.0, 1.0, 1.0, 2 / (1 + expansion), 2 * expansion / (1 + expansion))
    else:
        found = Gains(*[{"lecun": 1.0, "he": 2.0, "torch": 1 / 3}[init]] * 6)
    if placement == "deepnorm":
        less = (8 * depth) ** -0.5
        found = found._replace(**{name: less * getattr(found, name) for name in ("value", "output", "up", "down")})
    unknown = set(given or {}) - set(Gains._fields)
    if unknown:
        raise UsageError(f"expected gains among {', '.join(Gains._fields)}, got {', '.join(sorted(unknown))}")
    for name, value in (given or {}).items():
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"a gain must be finite and not negative, got {name}={value}")
    return found._replace(**(given or {}))


class Perceptron:
    """The branch W₂ φ(W₁ x): with v = g₁ q, own g₂ E φ(√v z)² and cross g₂ E φ(x)φ(y) at the tokens' correlation.

    Backwards t is multiplied by g₁ g₂ E φ′² and o by g₁ g₂ E φ′(x)φ′(y) (Schoenholz et al. 2017; with skip connections
    Yang and Schoenholz 2017).
    """

    def __init__(self, activation: Activation, *, up: float, down: float) -> None:
        self.activation, self.up, self.down = activation, up, down
        self._maps = cache(self._compute_maps)  # the way back asks for the signals of the way forth again

    def forward(self, entering: Pair) -> Pair:
        """Mean square and covariance of the branch's output."""
        return self._maps(entering)[0].times(self.down)

    def backward(self, gradient: Pair, entering: Pair) -> Pair:
        """Gradients at the branch's input."""
        slopes, factor = self._maps(entering)[1], self.up * self.down
        return Pair(factor * slopes.own * gradient.own, factor * slopes.cross * gradient.cross)

    def _compute_maps(self, entering: Pair) -> tuple[Pair, Pair]:
        """E φφ and E φ′φ′ of one token and of two."""
        variance, correlation = max(self.up * entering.own, VANISHING), max(entering.correlation, -1.0)
        if self.activation.degree is not None:
            matrix = variance * np.array([[[1.0, correlation], [correlation, 1.0]]])
            maps = (map_pairs(self.activation, matrix, np.zeros((1, 2)), slope=slope).matrix for slope in (False, True))
            values, slopes = (Pair(float(found[0, 0, 0]), float(found[0, 0, 1])) for found in maps)
            return values, slopes
        squares, second, slope = _expand(self.activation, variance)
        orders = np.arange(TERMS)
        # what lies beyond the series: its mass, its slope, and from both the order at which it sits
        mass, steep = max(second - squares.sum(), 1e-300), max(variance * slope - squares @ orders, 0.0)
        # 1.5 times the first order left out, an even number, stands for where the mass of the tail lies
        cross = float(squares @ correlation**orders) + mass * correlation ** int(1.5 * TERMS)
        falling = float((squares * orders)[1:] @ correlation ** orders[:-1])
        falling += steep * abs(correlation) ** max(steep / mass, 1.5 * TERMS)
        return Pair(second, cross), Pair(slope, falling / variance)


# networks of several depths meet the same signals in their first blocks
@lru_cache(maxsize=4096)
def _expand(activation: Activation, variance: float) -> tuple[Array, float, float]:
    """Squared Hermite coefficients of φ(√v z), E φ² and E φ′²."""
    series = expand(activation.scaled(math.sqrt(variance)), count=TERMS)
    return np.array(series.coefficients) ** 2, series.second_moment, squared_slope(activation, variance).value


class SelfAttention:
    """The branch W_o softmax(scale · q kᵀ) W_v x over n tokens that all see each other.

    With c the tokens' correlation, the scores of one row vary around their mean with variance (1−c) σ_s², σ_s² = scale²
    · head size · g_q g_k q². Writing Y, C for E Σ A² of a row and E Σ A A′ of two rows, and X for E tr J²,

        own g_v g_o q (c + (1−c) Y),  cross g_v g_o q (c + (1−c) C)

    For small scores Y = e^{(1−c)σ_s²}/n and C = e^{c(1−c)σ_s²}/n; Y stays of order 1 beyond σ_s = √(2 ln n/(1−c)),
    where attention condenses on few keys (Giorlandino and Goldt 2026). Where queries and keys are normed, σ_s² is
    scale² · head size (Henry et al. 2020). With a width, tokens are random vectors in that many dimensions, whose own
    correlations among the keys add (1−c)² σ_s²/width to Y's term and c times it to C's. Backwards the value path keeps
    the mean of the tokens' gradients and has the trace n (t Y + (n−1) o C). With X and X′ for E tr J² and E tr J J′,
    queries add (1−c)² σ_s² (X t, X′ o), keys add (1−c) σ_s² (X t + (n−1) c X′ o) to what differs between tokens: of
    tokens that are alike, queries lose their gradient first, keys next, values never.
    """

    def __init__(
        self, weights: Gains, *, tokens: int, scale: float, head_size: int, width: int | None, normed: bool
    ) -> None:
        self.weights, self.tokens, self.head_size, self.width = weights, tokens, head_size, width
        self.normed = normed
        self.strength = scale**2 * head_size * (1.0 if normed else weights.query * weights.key)

    def score_variance(self, entering: Pair) -> float:
        """σ_s² of all scores, the part that a row's scores have in common included."""
        return self.strength * (1.0 if self.normed else entering.own**2)

    def moments(self, entering: Pair) -> SoftmaxMoments:
        """Y, C, X and the entropy of the rows."""
        common = max(entering.correlation, 0.0)
        variance = (1 - common) * self.score_variance(entering)
        # rounded, so that blocks whose signals hardly differ share one look-up
        rounded = float(f"{variance:.4g}"), round(common, 3)
        return softmax_moments(*rounded, keys=self.tokens, head_size=self.head_size)

    def forward(self, entering: Pair) -> Pair:
        """Mean square and covariance of the branch's output."""
        common, found = entering.correlation, self.moments(entering)
        extra = self._random_keys(entering)
        own = common + min((1 - common) * found.own + extra, 1 - common)
        cross = common + min((1 - common) * found.shared + common * extra, 1 - common)
        return Pair(own, cross).times(self.weights.value * self.weights.output * entering.own)

    def backward(self, gradient: Pair, entering: Pair) -> Pair:
        """Gradients at the branch's input, over the paths of values, queries and keys."""
        n, common, found = self.tokens, max(entering.correlation, 0.0), self.moments(entering)
        t, o = gradient
        mean = t + (n - 1) * o
        value = _from_mean(mean, t * found.own * n + (n - 1) * n * o * found.shared, n)
        variance = (1 - common) * self.score_variance(entering)
        extra = 1 / self.width if self.width else 0.0
        query = Pair((found.slope + extra) * t, (found.shared_slope + extra) * o).times((1 - common) * variance)
        key = _from_mean(0.0, variance * n * (found.slope * t + (n - 1) * common * found.shared_slope * o), n)
        total = value.plus(query, 1.0).plus(key, 1.0)
        return total.times(self.weights.value * self.weights.output)

    def _random_keys(self, entering: Pair) -> float:
        if self.width is None:
            return 0.0
        return (1 - entering.correlation) ** 2 * self.score_variance(entering) / self.width


def _from_mean(mean: float, trace: float, tokens: int) -> Pair:
    """The pair whose n tokens have this squared gradient of their mean direction, t + (n−1) o, and this n t."""
    own = trace / tokens
    return Pair(own, (mean - own) / (tokens - 1) if tokens > 1 else 0.0)


Branch = Perceptron | SelfAttention


@dataclass(frozen=True)
class Stream:
    """How branches join the stream: where the norm stands, and what multiplies stream and branch."""

    # "pre" x + c f(norm x), "post" norm(x + c f(x)), "branch" x + c norm(f(x)) (OLMo 2), "deepnorm" norm(αx + c f(x))
    # with α = (2 · depth)^¼, "none" x + c f(x)
    placement: Placement
    scale: float  # c, as LayerScale, ReZero or CompleteP have it
    depth: int  # blocks, for α

    def forward(self, signal: Pair, branch: Branch) -> Pair:
        """Signal after a branch and its norm."""
        square = self.scale**2
        if self.placement == "pre":
            return signal.plus(branch.forward(_unit(signal)), square)
        out = branch.forward(signal)
        if self.placement == "branch":
            return signal.plus(_unit(out), square) if out.own > 0 else signal
        joined = signal.times(self._kept).plus(out, square)
        return joined if self.placement == "none" else _unit(joined)

    def backward(self, gradient: Pair, signal: Pair, branch: Branch) -> Pair:
        """Gradients before a branch, from those after it; `signal` is the one that entered."""
        square = self.scale**2
        if self.placement == "pre":
            return gradient.plus(branch.backward(gradient, _unit(signal)), square / signal.own)
        if self.placement == "branch":
            size = branch.forward(signal).own
            return gradient.plus(branch.backward(gradient, signal), square / size) if size > 0 else gradient
        if self.placement != "none":
            joined = self._kept * signal.own + square * branch.forward(signal).own
            gradient = gradient.times(1 / joined)
        return gradient.times(self._kept).plus(branch.backward(gradient, signal), square)

    @property
    def _kept(self) -> float:
        """The square of what the stream is multiplied by."""
        return math.sqrt(2 * self.depth) if self.placement == "deepnorm" else 1.0


def _unit(signal: Pair) -> Pair:
    return Pair(1.0, signal.correlation)
