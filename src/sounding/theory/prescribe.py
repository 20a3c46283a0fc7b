"""The inverse problem: what must change for a batch norm network of this activation to train at a wanted depth?

Gradients of a random batch norm network grow by a factor λ per layer (squared norm) whatever the weights' variance, and
meanfield2019 finds it trainable to about 16/|ln λ| layers. `prescribe` searches eps, shift β, scale γ, their
combinations, per-layer gains α_ℓ = ℓ^{−k} (thesis2024 6.4) and Haar weights for the smallest change that gets there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq

from sounding.activations import ActivationLike, resolve
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.theory.batchnorm import DEPTH_SCALES
from sounding.theory.bounds.bound import check_integer
from sounding.theory.landscape import STEADY, Landscape, Point, Setting, round_up

Kind = Literal["none", "eps", "shift", "scale", "shift+eps", "scale+eps", "gains", "haar", "haar+gains"]
WeightLaw = Literal["gaussian", "haar"]

MEAN_FIELD = "mean field of batch norm: Gaussian weights, wide layers (meanfield2019)"


LINEAR_HAAR = "proved for linear activations with as many samples as features (thesis2024, Theorem 6.5)"
HAAR_EXCESS = (
    "estimate for as many samples as features: Haar weights remove the linear part of the growth (thesis2024, "
    "Theorem 6.5, section 6.4); of the rest, twice what mean field says is allowed for"
)
GAINS = MEAN_FIELD + "; gains of thesis2024, section 6.4"
ALLOWANCE = 2.0  # measured growth of Haar networks is 0.8 to 2 of what mean field leaves (a slow test)
# relative RMS distance of a square Gaussian matrix to the nearest orthogonal one, by the quarter circle law
HAAR_SIZE = math.sqrt(2 - 16 / (3 * math.pi))

# eps stays 10% below the collapse: there the batch variance is of order 0.1, beyond it noise decides
EPS_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
# Where the search brackets a root, which a root finder then refines: from a change that nobody would notice to one
# beyond which activations are linear or constant. Two settings at once get fewer: each costs a search for eps.
SHIFTS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
JOINT_SHIFTS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
JOINT_SCALES = (0.7, 0.4, 0.2, 0.1)
STEEPEST_GAINS = 4.0  # exponent; steeper ones leave nothing of an activation but in the first layers

Excess = Callable[[np.ndarray], np.ndarray]

DEEPEST = 10_000_000  # the gains of every layer are summed one by one
# times the depth: at the bare 16 depth scales of meanfield2019 networks train to 12 to 40% accuracy, at 3 to 56 to 84%
MARGIN = 3.0


@dataclass(frozen=True)
class Option:
    """One change that reaches the depth."""

    kind: Kind  # what is changed
    change: str  # in words, with its numbers
    growth: float  # predicted factor per layer of the squared gradient norm; its geometric mean where layers differ
    trainable_depth: float  # 16/|ln growth|
    size: float  # RMS change of the normalized pre-activation that the change makes, in its standard deviations
    # eps, scale and shift of every batch norm; at their defaults where the change does not touch them
    eps: float = 0.0
    scale: float = 1.0
    shift: float = 0.0
    gain_exponent: float | None = None  # k of the per-layer gains α_ℓ = ℓ^{−k}, or None
    weight_law: WeightLaw = "gaussian"
    rests_on: str = MEAN_FIELD  # which theory promises it


@dataclass(frozen=True)
class Unreachable:
    """A change that cannot reach the depth: the best it does (None where it does nothing), and why."""

    kind: Kind
    best_growth: float | None
    best_depth: float | None
    why: str


@dataclass(frozen=True)
class Prescription:
    """All options for a network, the smallest change first, and what cannot help.

    Args:
        activation, batch_size, depth, margin: what was asked.
        weight_std: σ_w of weights of variance σ_w²/fan_in, for which every eps is meant.
        wanted_growth: the largest growth with which `margin`·`depth` layers are trainable.
        growth, trainable_depth, attracting: of the network as it is, with eps 0, scale 1, shift 0, Gaussian weights.
        options, unreachable: what reaches the depth ("none" alone when nothing need change), and what does not.
    """

    activation: str
    batch_size: float
    depth: int
    margin: float
    weight_std: float
    wanted_growth: float
    growth: float
    trainable_depth: float
    attracting: bool
    options: tuple[Option, ...]
    unreachable: tuple[Unreachable, ...]

    @property
    def assumption(self) -> str:
        """Which law of the weights an eps is meant for, in words."""
        return (
            f"assumes weights of variance {self.weight_std**2:.4g}/fan_in; an eps must grow with their variance "
            "(nn.Linear starts with 1/(3 fan_in): weight_std 0.577)"
        )

    @property
    def best(self) -> Option | None:
        """The smallest change, or None when nothing reaches the depth."""
        return self.options[0] if self.options else None

    @property
    def batchnorm(self) -> Option | None:
        """The smallest change that sets nothing but the eps, scale and shift of every batch norm."""
        plain = (option for option in self.options if option.gain_exponent is None and option.weight_law == "gaussian")
        return next(plain, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        wanted = fields_of(self, "activation batch_size depth margin weight_std assumption wanted_growth")
        now = {"gradient_growth": self.growth, **fields_of(self, "trainable_depth attracting")}
        return {**wanted, **now, "reachable": bool(self.options), **fields_of(self, "options unreachable")}

    def __str__(self) -> str:
        state = "" if self.attracting else " (at a fixed point that deep batches leave)"
        lines = [
            f"{self.activation}, batch size {self.batch_size:g}: gradients grow ×{self.growth:.5g} per layer{state}, "
            f"trainable to about {self.trainable_depth:.4g} layers; wanted {self.depth}, {self.margin:g} times over",
            f"  {self.assumption}",
        ]
        lines += [
            f"  {option.change}: ×{option.growth:.5g}, {option.trainable_depth:.4g} layers (size {option.size:.2f})"
            for option in self.options
        ]
        lines += [f"  not {failure.kind}: {failure.why}" for failure in self.unreachable]
        return "\n".join(lines)


def prescribe(
    activation: ActivationLike, *, batch_size: float, depth: int, margin: float = MARGIN, weight_std: float = 1.0
) -> Prescription:
    """Which eps, shift, scale, gains or weight law make a batch norm network trainable by theory to `depth` layers.

    A setting reaches the depth when |ln λ| ≤ 16/(margin·depth) at an attracting fixed point of positive variance (above
    the critical eps gradients may be steady, but all samples are the same) whose forward eigenvalues G and L are at
    most 0.95. At eps = 0 no scale or shift beats a linear network, λ ≥ (B−2)/(B−3), the first term of meanfield2019's
    Theorem 9.

    Args:
        batch_size: at least 4; `math.inf` for the limit.
        depth: layers, at least 1.
        margin: how many times the depth theory should allow; training already suffers before 16/|ln λ| layers.
        weight_std: σ_w of weights of variance σ_w²/fan_in; every eps is meant for this variance.

    >>> prescribe("relu", batch_size=64, depth=10).best.kind
    'none'
    >>> [option.change for option in prescribe("tanh", batch_size=64, depth=200).options[:2]]
    ['eps 0.58', 'scale 0.34']
    """
    *_, found = prescriptions(activation, batch_size=batch_size, depth=depth, margin=margin, weight_std=weight_std)
    return found


def prescriptions(
    activation: ActivationLike, *, batch_size: float, depth: int, margin: float = MARGIN, weight_std: float = 1.0
) -> Iterator[Prescription]:
    """What `prescribe` has found after each part of its search, for pages that show it as it comes."""
    phi = resolve(activation)
    layers = check_integer(depth, name="depth", least=1)
    if layers > DEEPEST:
        raise UsageError(f"expected a depth of at most {DEEPEST:,} layers, got {layers:,}", hint="depth 1000")
    limit = allowed_scales(margin) / layers
    landscape = Landscape(phi, batch_size=batch_size, limit=limit, weight_std=weight_std)
    now = landscape.at(Setting())
    search = _Search(landscape, now, layers)

    def so_far() -> Prescription:
        return Prescription(
            activation=phi.name,
            batch_size=batch_size,
            depth=layers,
            margin=float(margin),
            weight_std=float(weight_std),
            wanted_growth=math.exp(limit),
            growth=now.growth,
            trainable_depth=now.trainable_depth,
            attracting=now.attracting,
            options=tuple(sorted(search.options, key=lambda option: option.size)),
            unreachable=tuple(search.unreachable),
        )

    # a network that is left as it is may be closer to losing its fixed point than one that is prescribed
    if now.attracting and abs(now.log_growth) <= limit:
        search.options.append(_option("none", "nothing: trainable as it is", now, landscape))
    else:
        for _ in search.run():
            yield so_far()
    yield so_far()


def allowed_scales(margin: float) -> float:
    """The depth scales that a network may span: 16 over the margin."""
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < math.inf:
        raise UsageError(f"expected margin to be a positive number, got {margin!r}", hint=f"margin {MARGIN:g}")
    return DEPTH_SCALES / margin


class _Search:
    """Every kind of change, filed as an option or with the reason why it cannot help."""

    def __init__(self, landscape: Landscape, now: Point, depth: int) -> None:
        self.landscape, self.now, self.depth = landscape, now, depth
        self.options: list[Option] = []
        self.unreachable: list[Unreachable] = []

    def run(self) -> Iterator[None]:
        """Search eps, shift and scale alone, then two of them, then gains and Haar weights; a yield after each step."""
        land = self.landscape
        eps, best_eps = yield from land.walk(*self._eps_path(Setting()))
        self._file("eps", "eps {eps:g}", eps, best_eps, _why_not_eps(land, best_eps))
        yield
        # the side on which a shift helps at all is told by one step to either
        up, down = (land.at(Setting(shift=shift)).growth for shift in (1.0, -1.0))
        sign = 1.0 if up <= down else -1.0
        shift, best_shift = yield from land.walk(lambda t: Setting(shift=sign * t), SHIFTS)
        self._file("shift", "shift {shift:+g}", shift, best_shift, _why_not_shift(land, self.now, best_shift))
        yield
        scale, best_scale = yield from land.walk(lambda t: Setting(scale=1 - t), [1 - s for s in SCALES])
        self._file("scale", "scale {scale:g}", scale, best_scale, _why_not_scale(land, best_scale))
        yield
        if (eps is None or shift is None) and best_shift is not None and best_shift.log_growth < self.now.log_growth:
            starts = [Setting(shift=sign * t) for t in JOINT_SHIFTS]
            yield from self._file_jointly("shift+eps", "shift {shift:+g} with eps {eps:g}", starts, (eps, shift))
        if (eps is None or scale is None) and land.activation.degree is None:
            starts = [Setting(scale=t) for t in JOINT_SCALES]
            yield from self._file_jointly("scale+eps", "scale {scale:g} with eps {eps:g}", starts, (eps, scale))
        yield
        excess = _excess_over_linear(land)
        self._file_gains(excess)
        self._file_haar(excess)

    def _eps_path(self, start: Setting) -> tuple[Callable[[float], Setting], list[float]]:
        """eps up to 0.9 of its critical value at this scale and shift."""
        top = min(self.landscape.collapse(start), 1e3)  # a power below 1 never collapses
        return lambda t: Setting(eps=t, scale=start.scale, shift=start.shift), [share * top for share in EPS_SHARES]

    def _file_jointly(
        self, kind: Kind, words: str, starts: list[Setting], singles: tuple[Point | None, Point | None]
    ) -> Iterator[None]:
        """The smallest change among eps on top of each of these settings; filed only if smaller than either alone."""
        land = self.landscape
        smallest = min((land.size(point) for point in singles if point is not None), default=math.inf)
        reached: Point | None = None
        nearest: Point | None = None
        for start in starts:
            if math.hypot(1 - start.scale, start.shift) >= smallest:
                break
            point, best = yield from land.walk(*self._eps_path(start))
            if point is not None and land.size(point) < smallest:
                smallest, reached = land.size(point), point
            if best is not None and (nearest is None or abs(best.log_growth) < abs(nearest.log_growth)):
                nearest = best
            yield
        if reached is not None or math.isinf(smallest):
            self._file(kind, words, reached, nearest, _WHY_NOT_JOINT)

    def _file(self, kind: Kind, words: str, point: Point | None, best: Point | None, why: str) -> None:
        """Add a point as an option, or what came nearest to the depth with the reason."""
        if point is not None:
            self.options.append(_option(kind, words.format(**vars(point.setting)), point, self.landscape))
        else:
            self._refuse(kind, why, *((None, None) if best is None else (best.growth, best.trainable_depth)))

    def _refuse(self, kind: Kind, why: str, growth: float | None = None, depth: float | None = None) -> None:
        self.unreachable.append(Unreachable(kind, growth, depth, why))

    def _file_gains(self, excess: Excess | None) -> None:
        """Gains α_ℓ = ℓ^{−k} with Gaussian weights: Σ_ℓ ln λ(α_ℓ) ≤ 16/margin; exact up to one factor."""
        land = self.landscape
        homogeneous = land.activation.degree is not None
        if homogeneous or excess is None or not land.at(Setting()).steady:
            return self._refuse("gains", _why_not_scale(land, None) if homogeneous else _NOT_ATTRACTING)
        exponent = _find_exponent(lambda gain: excess(gain) + land.linear_log_growth, self.depth, land.limit)
        if exponent is None:
            return self._refuse("gains", _linear_limit(land))
        # at eps = 0 the batch-normalized neurons have the same law after any layer, so the growth of layer ℓ is that of
        # a network with gain α_ℓ throughout, up to a ratio of variances that telescopes over the depth
        log_growth = float(np.mean(excess(_gains(exponent, self.depth)))) + land.linear_log_growth
        return self.options.append(_gain_option("gains", exponent, self.depth, log_growth, GAINS))

    def _file_haar(self, excess: Excess | None) -> None:
        """Haar weights, alone or with gains: they remove the linear part of the growth (thesis2024, Theorem 6.5)."""
        land = self.landscape
        if excess is None or not (land.at(Setting()).steady or land.activation.degree is not None):
            return self._refuse("haar", _NOT_ATTRACTING)
        # for a linear activation nothing is left but rounding
        linear = land.activation.name == "identity"
        rest = 0.0 if linear else ALLOWANCE * float(excess(np.ones(1))[0])
        reach = DEPTH_SCALES / rest if rest > 0 else math.inf
        if rest <= land.limit:
            basis = LINEAR_HAAR if linear else HAAR_EXCESS
            option = Option("haar", "Haar weights", math.exp(rest), reach, HAAR_SIZE, weight_law="haar", rests_on=basis)
            return self.options.append(option)
        why = "Haar weights remove only the linear part of the growth; what the nonlinearity adds stays"
        self._refuse("haar", why, math.exp(rest), reach)
        exponent = _find_exponent(lambda gain: ALLOWANCE * excess(gain), self.depth, land.limit)
        if exponent is None:
            return self._refuse("haar+gains", _why_not_scale(land, None))
        log_growth = ALLOWANCE * float(np.mean(excess(_gains(exponent, self.depth))))
        return self.options.append(_gain_option("haar+gains", exponent, self.depth, log_growth, HAAR_EXCESS))


def _option(kind: Kind, change: str, point: Point, landscape: Landscape) -> Option:
    """A point of the landscape as an option."""
    size = landscape.size(point)
    return Option(kind, change, point.growth, point.trainable_depth, size, **vars(point.setting))


_UNSTEADY = f"no fixed point is steady (forward eigenvalues G and L of {STEADY:g} or less)"
_WHY_NOT_JOINT = "no combination searched reaches it at 90% of the eps at which the batch collapses"
_NOT_ATTRACTING = (
    "near gain 1 deep batches leave the symmetric fixed point, or nearly so, and its growth says nothing about them"
)


def _why_not_eps(landscape: Landscape, best: Point | None) -> str:
    """Why no eps below the collapse reaches the depth."""
    top = landscape.collapse(Setting())
    seen = f"the growth stays at ×{best.growth:.4g} or more" if best is not None else _UNSTEADY
    return (
        f"{seen} up to {EPS_SHARES[-1]:.0%} of eps {top:.4g}, where the batch collapses: beyond that gradients may be "
        "steady, but all samples become equal and nothing is left to learn from"
    )


def _why_not_shift(landscape: Landscape, now: Point, best: Point | None) -> str:
    """Why no shift reaches the depth."""
    if landscape.activation.linear:
        return "a linear activation passes the shift on, and the next batch norm subtracts it"
    if best is None:
        return f"with a shift, {_UNSTEADY}"
    if best.log_growth >= now.log_growth - 1e-9:
        return "a shift moves the activation away from where it is closest to linear, and the growth rises"
    return _linear_limit(landscape)


def _why_not_scale(landscape: Landscape, best: Point | None) -> str:
    """Why no smaller scale reaches the depth."""
    if landscape.activation.degree is not None:
        return "a scale only multiplies a positively homogeneous activation, and the next batch norm divides it out"
    if best is None:
        return f"with a smaller scale, {_UNSTEADY}"
    return _linear_limit(landscape)


def _linear_limit(landscape: Landscape) -> str:
    """The growth of a linear network as the reason, and the batch size that would be enough."""
    rate = landscape.linear_log_growth
    if rate <= landscape.limit:
        return "the activation does not become linear enough on the way"
    needed = math.ceil(3 + 1 / math.expm1(landscape.limit))
    return (
        f"at eps 0 even a linear network grows ×{math.exp(rate):.5g} per layer, (B−2)/(B−3), trainable to "
        f"{DEPTH_SCALES / rate:.4g} layers: it takes eps above 0 or a batch of at least {needed}"
    )


def _excess_over_linear(landscape: Landscape) -> Excess | None:
    """ln λ(α) − ln((B−2)/(B−3)) as a function of the gain α ≤ 1 at eps = 0; None where a point is not attracting."""
    from scipy.interpolate import PchipInterpolator

    if landscape.activation.linear:
        return np.zeros_like
    points = [landscape.at(Setting(scale=scale)) for scale in (1.0, *SCALES)][::-1]
    if not all(point.alive and point.attracting for point in points):
        return None
    gains = np.log([point.setting.scale for point in points])
    values = [max(point.log_growth - landscape.linear_log_growth, 0.0) for point in points]
    curve = PchipInterpolator(gains, values)
    return lambda gain: np.asarray(np.where(gain < SCALES[-1], values[0], curve(np.log(np.maximum(gain, SCALES[-1])))))


def _gains(exponent: float, depth: int) -> np.ndarray:
    """α_ℓ = ℓ^−exponent of every layer."""
    return np.arange(1, depth + 1, dtype=np.float64) ** -exponent


def _find_exponent(rate: Excess, depth: int, limit: float) -> float | None:
    """The smallest k with mean over layers of rate(ℓ^{−k}) ≤ limit, to two digits upwards."""

    def excess(exponent: float) -> float:
        return float(np.mean(rate(_gains(exponent, depth)))) - limit

    if excess(STEEPEST_GAINS) > 0 or excess(0.0) <= 0:
        return None
    exponent = round_up(brentq(excess, 0.0, STEEPEST_GAINS, xtol=1e-4), 2)
    while excess(exponent) > 0:  # the root may lie on the far side of two digits, by what brentq leaves
        exponent = round_up(exponent * 1.005, 2)
    return exponent


def _gain_option(kind: Kind, exponent: float, depth: int, log_growth: float, rests_on: str) -> Option:
    """Gains as an option, with or without Haar weights."""
    haar = kind == "haar+gains"
    spread = float(np.sqrt(np.mean((1 - _gains(exponent, depth)) ** 2)))
    return Option(
        kind=kind,
        change=("Haar weights with " if haar else "") + f"gains ℓ^-{exponent:g}",
        growth=math.exp(log_growth),
        trainable_depth=DEPTH_SCALES / log_growth if log_growth > 0 else math.inf,
        size=math.hypot(spread, HAAR_SIZE if haar else 0.0),
        gain_exponent=exponent,
        weight_law="haar" if haar else "gaussian",
        rests_on=rests_on,
    )
