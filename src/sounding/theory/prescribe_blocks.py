"""The inverse problem with skip connections: which branch scale, initialization or placement of norms reaches a depth.

A network of L blocks reaches its depth when its squared gradients, and the distance of two tokens, change by at most
e^(16/margin) over all L blocks: the 16 depth scales of meanfield2019's training figures, with a margin. Every option is
judged by `residual` or `transformer`, with all laws that depend on the depth taken at this depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, get_args

import numpy as np

from sounding.activations import ActivationLike
from sounding.encoding import fields_of
from sounding.theory.batchnorm import DEPTH_SCALES
from sounding.theory.blocks import PLACEMENTS, Init, Placement
from sounding.theory.prescribe import MARGIN, allowed_scales
from sounding.theory.residual import Residual, Transformer, residual, transformer

Kind = Literal["none", "scores", "branch_scale", "init", "placement", "zero_branches"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEAST_SCALE = 1e-6  # of a branch; below it is called a start at zero
DIGITS = 2  # of a prescribed scale, rounded down

# what a block does to squared gradients, a = g₁g₂ E φ′² and b = g₂ E φ² of a perceptron, and who says so
FORMULAS: dict[Placement, tuple[str, str]] = {
    "pre": (
        "every block adds to the stream, and gradients grow as a power of it: a branch scale of about 1/√L stops both",
        "Xiong et al. 2020; De and Smith 2020",
    ),
    "post": (
        "squared gradients change by (1 + c²a)/(1 + c²b) per block for branches of scale c that multiply squares by b "
        "forwards and by a backwards, and every norm makes tokens more alike",
        "Xiong et al. 2020; Noci et al. 2022",
    ),
    "branch": ("a norm holds every branch to the mean square c², which the stream gains per block", "OLMo 2 (2025)"),
    "deepnorm": ("the skip connection is multiplied by (2L)^¼, and weights are divided by (8L)^¼", "Wang et al. 2022"),
    "none": (
        "squared gradients grow by 1 + c²a per block for branches of scale c that multiply them by a: c has to fall as "
        "1/√L",
        "Yang and Schoenholz 2017; Hanin and Rolnick 2018; Hayou et al. 2021",
    ),
}
INIT_SOURCES: dict[Init, str] = {
    "lecun": "variance 1/fan_in (LeCun et al. 1998)",
    "xavier": "variance 2/(fan_in + fan_out) (Glorot and Bengio 2010)",
    "torch": "variance 1/(3 fan_in), PyTorch's default",
    "gpt2": "0.02, over √(2L) at the end of each branch (Radford et al. 2019)",
    "he": "variance 2/fan_in (He et al. 2015)",
}


@dataclass(frozen=True)
class BlockOption:
    """One change that reaches the depth."""

    kind: Kind  # what is changed; "none" where the network reaches the depth as it is
    change: str  # in words, with its numbers
    settings: Mapping[str, Any]  # to pass to `predict.residual` or `predict.transformer`
    scales: float  # depth scales that it spans over the whole depth
    gradient_ratio: float  # squared gradient in front of the first block over that behind the last
    stream_growth: float  # mean square of the stream at the end over that at the start
    correlation: float  # of two tokens or samples at the end
    formula: str  # what decides, in words
    source: str  # who found it


@dataclass(frozen=True)
class BlockPrescription:
    """What reaches a depth, the smallest change first, and what does not.

    Args:
        network: "residual" or "transformer".
        depth: blocks.
        margin: times that the 16 depth scales must leave.
        now: the network as it is.
        scales: depth scales that it spans.
        options, unreachable: changes that reach the depth, and what else was tried, with its depth scales.
    """

    network: str
    depth: int
    margin: float
    now: Residual
    scales: float
    options: tuple[BlockOption, ...]
    unreachable: tuple[tuple[str, float], ...]

    @property
    def best(self) -> BlockOption | None:
        """The smallest change, None where nothing reaches the depth."""
        return self.options[0] if self.options else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        judged = {"allowed": DEPTH_SCALES / self.margin, "reachable": bool(self.options), **fields_of(self, "options")}
        failed = [{"change": change, "scales": scales} for change, scales in self.unreachable]
        return {**fields_of(self, "network depth margin scales"), **judged, "unreachable": failed}

    def __str__(self) -> str:
        lines = [
            f"{self.network}, {self.depth} blocks: squared gradients or distances between samples change by "
            f"e^{self.scales:.3g} over the depth ({self.scales:.3g} depth scales)",
            f"  allowed: {DEPTH_SCALES / self.margin:.3g} depth scales, the {DEPTH_SCALES:g} at which training fails "
            f"over a margin of {self.margin:g}",
        ]
        lines += [
            f"  {one.change}: {one.scales:.3g} depth scales, stream ×{one.stream_growth:.3g}, "
            f"two samples end at a correlation of {one.correlation:.3g}\n    {one.formula} ({one.source})"
            for one in self.options
        ]
        lines += [f"  not {change}: {scales:.3g} depth scales" for change, scales in self.unreachable]
        return "\n".join(lines)


def prescribe_residual(
    activation: ActivationLike, *, depth: int, margin: float = MARGIN, **options: Any
) -> BlockPrescription:
    """Which branch scale, initialization or placement of the norm takes a residual network to `depth` blocks.

    Args:
        activation: name, record or callable.
        depth: blocks.
        margin: 16 depth scales over this are allowed.
        options: what the network is now, as for `predict.residual`.

    >>> found = prescribe_residual("relu", depth=20, placement="none")
    >>> found.best.change
    'branches times 0.39'
    """
    return _prescribe("residual", residual, activation, depth, margin, options)


def prescribe_transformer(
    activation: ActivationLike, *, depth: int, tokens: int, margin: float = MARGIN, **options: Any
) -> BlockPrescription:
    """Which branch scale, initialization, placement of the norm or scale of scores takes a transformer to `depth`.

    Args:
        activation: of the perceptron; name, record or callable.
        depth: blocks of two branches.
        tokens: that see each other.
        margin, options: as for `prescribe_residual`, and `predict.transformer`.

    >>> prescribe_transformer("relu", depth=4, tokens=8, score_scale=1.0).best.change
    'scores divided by √(head size)'
    """
    return _prescribe("transformer", transformer, activation, depth, margin, {**options, "tokens": tokens})


def _prescribe(
    name: str, theory: Callable[..., Residual], activation: Any, depth: int, margin: float, given: dict[str, Any]
) -> BlockPrescription:
    """The changes of placement, branches and weights that take a network of blocks to the depth."""
    allowed = allowed_scales(margin)

    def look(**changed: Any) -> Residual:
        with np.errstate(all="ignore"):  # a network without norms may leave the range of a double
            return theory(activation, depth=depth, **{**given, **changed})

    now = look()
    options: list[BlockOption] = []
    unreachable: list[tuple[str, float]] = []

    def file(kind: Kind, words: str, formula: str, source: str, **changed: Any) -> None:
        found = look(**changed)
        if spanned(found) <= allowed and not _condenses(found):
            numbers = spanned(found), found.gradient_ratio, found.stream_growth, found.correlation[-1]
            options.append(BlockOption(kind, words, {**given, **changed}, *numbers, formula, source))
        else:
            unreachable.append((words, spanned(found)))

    placement = now.placement
    if spanned(now) <= allowed and not _condenses(now):
        file("none", "nothing: it reaches the depth as it is", *FORMULAS[placement])
        return BlockPrescription(name, now.depth, float(margin), now, spanned(now), tuple(options), ())
    fixed: dict[str, Any] = {}  # what every other change comes on top of: none of them heals attention that condenses
    if _condenses(now):
        fixed = {"score_scale": None}
        words = "attention needs scores of a standard deviation below √(2 ln n) for n tokens"
        file("scores", "scores divided by √(head size)", words, "Giorlandino and Goldt 2026", **fixed)
        file("scores", "queries and keys normed", words, "Henry et al. 2020", query_norm=True, **fixed)
    scale = _largest_scale(lambda c: spanned(look(branch_scale=c, **fixed)), now.branch_scale, allowed)
    if scale is not None:
        file("branch_scale", f"branches times {scale:g}", *FORMULAS[placement], branch_scale=scale, **fixed)
    else:
        unreachable.append(("a smaller branch scale", spanned(look(branch_scale=LEAST_SCALE, **fixed))))
    present = given.get("init", signature(theory).parameters["init"].default)
    for init, source in INIT_SOURCES.items():
        if init != present and (init != "gpt2" or given.get("width")):
            file("init", f"initialization {init}", FORMULAS[placement][0], source, init=init, **fixed)
    for other in PLACEMENTS:
        if other != placement:
            file("placement", f"norm placement {other}", *FORMULAS[other], placement=other, **fixed)
    formula = "the network is the identity at the start, whatever its depth"
    file("zero_branches", "branches that start at zero", formula, "Bachlechner et al. 2021", branch_scale=0.0, **fixed)
    options.sort(key=lambda option: KINDS.index(option.kind))
    return BlockPrescription(name, now.depth, float(margin), now, spanned(now), tuple(options), tuple(unreachable))


def spanned(found: Residual) -> float:
    """Depth scales over the whole depth: |ln| of the squared gradients' change, or of the tokens' squared distance."""
    apart = [max(1 - one, 1e-300) for one in (found.correlation[0], found.correlation[-1])]
    lost = math.log(apart[0] / apart[1]) if apart[0] > 1e-12 else 0.0
    return max(abs(found.gradient_log[0]), lost)


def _condenses(found: Residual) -> bool:
    return isinstance(found, Transformer) and found.collapsed


def _largest_scale(scales: Callable[[float], float], now: float, allowed: float) -> float | None:
    """The largest branch scale below the present one that spans no more than is allowed, rounded down."""
    low = now
    while not scales(low) <= allowed:
        low /= 4
        if low < LEAST_SCALE:
            return None
    high = min(4 * low, now)
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if scales(middle) <= allowed else (low, middle)
    step = 10.0 ** (math.floor(math.log10(low)) - DIGITS + 1)
    return round(math.floor(low / step + 1e-9) * step, 12)
