"""What theory is told about a network: a graph of nodes, each a rule with the law of its own weights.

Nothing here computes. `sounding.read` makes a description of a module, a user may write one by hand, and `propagate`
runs the rules. Changing one thing is `description.replace(index, rule=...)`, which costs no pass through the network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sounding.activations.activation import Activation

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """How the entries of a weight, a bias or a scale are distributed."""

    variance: float  # of the entries around their mean
    mean: float = 0.0  # of the entries
    shape: str = "gaussian"  # "gaussian", "uniform", "truncated", "orthogonal", "constant" or "other"
    kurtosis: float = 3.0  # E(w − mean)⁴ over the squared variance, 3 for a Gaussian; spreads at finite width use it
    balanced: bool = False  # whether the weights of every output sum to zero, as standardized weights do

    @property
    def second_moment(self) -> float:
        """E w², the mean square of the entries."""
        return self.variance + self.mean**2


ONE = Law(0.0, 1.0, "constant")  # the scale of a norm that does not scale
ZERO = Law(0.0, 0.0, "constant")  # a shift or bias that is not there


@dataclass(frozen=True)
class Points:
    """Where the signal lives: samples, and the grid of positions within each (() for vectors, (T,) for sequences).

    Points are numbered sample by sample, positions in row-major order within a sample.
    """

    samples: int
    grid: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        """How many positions a sample has."""
        return math.prod(self.grid)

    @property
    def size(self) -> int:
        """How many points there are."""
        return self.samples * self.positions


@dataclass(frozen=True)
class Rule:
    """The base of all rules: what one node does to the signal."""


@dataclass(frozen=True)
class Given(Rule):
    """The signal is measured here, not predicted: an input, or what stands behind a part that no rule covers."""

    reason: str = ""  # why, in words that follow "measured, because"; "" for an input of the network
    constant: bool = False  # whether the value is the same for every batch (position embeddings, a class token)
    own: bool = False  # whether the module's own parameters made it, as an embedding


@dataclass(frozen=True)
class Linear(Rule):
    """y = W x + b on the features of each point, with independent random entries of W and b."""

    fan_in: int
    fan_out: int
    weight: Law
    bias: Law = ZERO


@dataclass(frozen=True)
class Tied(Linear):
    """A linear map by the matrix that made the stream's own embedding: a tied output head.

    Its inputs are the stream, the measured embedding e that the stream began with, and e (WᵀW / (fan_out · v))^(1/2),
    measured too, v the mean square of the weights: what the map makes of the embedding itself.
    """


@dataclass(frozen=True)
class Convolution(Rule):
    """A convolution over the grid, in one to three dimensions; depthwise when `groups` is the number of channels."""

    channels_in: int  # of the input, all groups together
    channels_out: int  # of the output, all groups together
    kernel: tuple[int, ...]  # its size along each axis of the grid
    stride: tuple[int, ...]  # along each axis
    padding: tuple[tuple[int, int], ...]  # zeros added (before, after) along each axis
    dilation: tuple[int, ...]  # along each axis
    groups: int  # how many groups of channels do not mix
    weight: Law
    bias: Law = ZERO
    transposed: bool = False


@dataclass(frozen=True)
class Elementwise(Rule):
    """y = φ(x) for every feature on its own."""

    activation: Activation


@dataclass(frozen=True)
class Normalize(Rule):
    """A normalization with the moments of its own scale and shift."""

    # "rms" and "layer" act on the features of each point; "group" on groups of channels over all positions of a sample
    # (one group per channel is instance norm); "batch" on each channel over all points
    kind: Literal["rms", "layer", "group", "batch"]
    eps: float  # inside the root
    scale: Law = ONE  # the law of the weight γ
    shift: Law = ZERO  # the law of the bias β
    groups: int = 1  # of "group"
    # None for batch statistics; else the laws of a batch norm's running mean and running variance, which it uses in
    # evaluation mode
    running: tuple[Law, Law] | None = None


@dataclass(frozen=True)
class Add(Rule):
    """Σ c_i x_i of inputs that are independent given their Gram matrices; `coefficients` holds one c per input."""

    coefficients: tuple[float, ...]


@dataclass(frozen=True)
class Scale(Rule):
    """y = c ⊙ x + u with one c and one u per feature (LayerScale, a running batch norm) or for all (x / √2)."""

    factor: Law
    shift: Law = ZERO


@dataclass(frozen=True)
class Multiply(Rule):
    """The elementwise product of two independent inputs, as in gated perceptrons (SwiGLU, GEGLU)."""


@dataclass(frozen=True)
class Mix(Rule):
    """Positions of each sample mixed by fixed numbers: y_p = Σ_q A[p, q] x_q."""

    matrix: Array = field(repr=False)  # (positions out, positions in)


@dataclass(frozen=True)
class Pool(Rule):
    """Average pooling over windows of the grid; a window as large as the grid is global pooling."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    count_padding: bool = True


@dataclass(frozen=True)
class Attention(Rule):
    """Softmax attention; its three inputs are queries, keys and values as the projections leave them."""

    heads: int  # of the queries
    key_heads: int  # of keys and values; fewer than `heads` for grouped queries
    head_size: int  # features of one head
    scale: float  # what scores are multiplied by, usually head_size^(−1/2)
    causal: bool = False  # whether a position sees only itself and what came before
    # additive, (queries, keys) or (samples, queries, keys), −inf where hidden; None for none
    mask: Array | None = field(default=None, repr=False)
    # of rotary embeddings, (positions, pairs of features), None for none; a head has twice as many features as pairs,
    # and a pair that is not rotated has the angle 0
    angles: Array | None = field(default=None, repr=False)
    query_norm: Normalize | None = None  # the norm of each head's queries and keys (QK-norm), None for none
    # (heads, queries, keys), what each head adds to its scores besides (ALiBi, T5), None for none
    own_masks: Array | None = field(default=None, repr=False)
    # the numbers of the positions of each window, within which attention acts (Swin); None for one window. A mask is
    # then of (queries, keys) within a window, with one for each window or for each of every sample.
    windows: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Rotate(Rule):
    """Pairs of features turned by an angle that depends on the position (rotary embeddings)."""

    angles: Array = field(repr=False)  # (positions, pairs of one head's features)


@dataclass(frozen=True)
class Take(Rule):
    """Some positions of each sample (a class token, a cut), by their numbers."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Join(Rule):
    """Inputs side by side: their features ("features", as in U-Nets) or their positions ("positions", class tokens)."""

    axis: Literal["features", "positions"]


@dataclass(frozen=True)
class Part(Rule):
    """Some of the features of a random linear map's output, as a fused projection is cut into queries, keys, values.

    Parts of one output share its Gram matrix and are independent of each other.
    """

    start: int  # the first feature
    stop: int  # one past the last feature


@dataclass(frozen=True)
class Flatten(Rule):
    """All positions of a sample become features of one point."""


@dataclass(frozen=True)
class Regrid(Rule):
    """The features of each point stay; the positions get another grid of the same number (tokens of an image)."""

    grid: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One value of the network: the rule that makes it, from which values, under which name a check measures it."""

    rule: Rule
    inputs: tuple[int, ...]  # the numbers of the nodes it is made from
    points: Points
    features: int  # how many features each point has
    name: str = ""  # the call under which `check` measures the value ("blocks.0.fc#2"), "" where no module returns it
    weight: str = ""  # the name of the weight parameter, where the rule has one; its gradient is predicted under it
    label: str = ""  # what a person reads: "Linear 64 → 128"


@dataclass(frozen=True)
class Description:
    """A network as theory sees it: nodes in an order in which every input comes before its use."""

    nodes: tuple[Node, ...]  # the graph; the last one that is an output carries the loss
    outputs: tuple[int, ...]  # the nodes at which gradients arrive from outside, usually one
    notes: tuple[str, ...] = ()  # what was not covered, and what was assumed, in whole sentences

    def replace(self, index: int, *, rule: Rule) -> Description:
        """A description in which one node has another rule."""
        nodes = list(self.nodes)
        nodes[index] = dataclasses.replace(nodes[index], rule=rule)
        return dataclasses.replace(self, nodes=tuple(nodes))

    @property
    def names(self) -> Mapping[str, int]:
        """The number of the node behind each name that a check measures."""
        return {node.name: index for index, node in enumerate(self.nodes) if node.name}
