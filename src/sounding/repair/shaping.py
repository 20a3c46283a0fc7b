"""Activation shaping: per-layer gains that pull activations towards linear as depth grows (thesis2024, 6.4 and C.5)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sounding.activations import Activation, resolve
from sounding.chain import simulate
from sounding.errors import UsageError
from sounding.probe.state import unwrap
from sounding.probe.units import is_activation, name_activation
from sounding.profile import Estimate
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure, on_copy
from sounding.repair.layers import BATCH_NORMS, NameFilter, left_out
from sounding.repair.passes import Inputs, call_layers, check_inputs
from sounding.repair.snapshot import undisturbed

AFFINE_NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)
SMALLEST_GAIN = 2.0**-6  # where the search ends without a fall: tanh differs from a line by 3e-4 there
FALLEN = 20.0  # the window ends where the rate has fallen this far below its largest
SIGNIFICANT = 3.0  # standard errors above the linear network's rate
LEAST_POWER = 0.5  # of the law; below, the exponent of the gains exceeds 2 and leaves the second layer a quarter
MARGIN = 1.1  # k > 1 makes the sum over layers finite; closer to 1 activations stay less linear and the sum is larger


@dataclass(frozen=True)
class PreGain:
    """A forward pre-hook that multiplies a module's input: no parameter, no new name, and it pickles."""

    gain: float

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0] * self.gain, *arguments[1:])


def gains(depth: int, exponent: float) -> list[float]:
    """α_ℓ = ℓ^(−exponent) for ℓ = 1 … depth (thesis2024, C.5).

    >>> gains(3, 1.0)
    [1.0, 0.5, 0.3333333333333333]
    """
    return [layer**-exponent for layer in range(1, depth + 1)]


@cure
def shape_activations_(
    model: nn.Module,
    inputs: Inputs,
    *,
    exponent: float | None = None,
    law: ExplosionLaw | None = None,
    margin: float = MARGIN,
    how: Literal["wrap", "fold"] = "wrap",
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Replace σ(x) by σ(α_ℓ x) with α_ℓ = ℓ^(−exponent), ℓ counting activations in the order in which they run.

    With batch norm and Haar weights the gradient's growth over layer ℓ is about c₁ α_ℓ^c₂; an exponent above 1/c₂ makes
    the sum over layers finite, so that gradients stay bounded at any depth (thesis2024, C.5). By default c₂ is measured
    (`explosion_law`, a second or two) and the exponent is margin/c₂: for tanh about 0.4, as in thesis2024 figure 6.5.
    "wrap" multiplies the activation's input; "fold" multiplies scale and shift of the affine norm that feeds the
    activation, which computes the same function. Neither adds or renames an entry of the state_dict. A positively
    homogeneous activation (ReLU) is only rescaled by a gain, which the next norm undoes: it is left alone. A module of
    your own counts as an activation when it has no parameters and works value by value.

    Args:
        inputs: a batch, for one forward pass that tells the order.
        exponent: of the gains, instead of a measured one.
        law: an explosion law measured before, instead of measuring it now.
        margin: k > 1 in the exponent k/c₂.
        how: "wrap" or "fold".
        include, exclude: name filters on the activations.
        generator: source of randomness of the measured law.
    """
    check_inputs(inputs)
    if exponent is not None and not (math.isfinite(exponent) and exponent >= 0):
        raise UsageError(f"exponent must be finite and not negative, got {exponent}", hint="0.4")
    if how not in {"wrap", "fold"}:
        raise UsageError(f"how must be 'wrap' or 'fold', got {how!r}")
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    calls = _activation_calls(model, inputs)
    counts = Counter(id(activation) for activation, _ in calls)
    reasons = [
        left_out(names[id(activation)], activation, include, exclude)
        or _why_not(activation, norm, counts[id(activation)], how)
        for activation, norm in calls
    ]
    shaped = [activation for (activation, _), reason in zip(calls, reasons, strict=True) if reason is None]
    if not shaped:
        why = reasons[0] if reasons else "functional ones cannot be shaped from outside"
        raise UsageError(
            f"found no activation module to shape in {type(model).__name__}: {why}",
            hint="torch.nn.Tanh() in place of torch.tanh" if not reasons else "tune_batchnorm, or another name filter",
        )
    if exponent is None:
        exponent, note = _choose_exponent(shaped, law, margin, generator)
        yield note
    left: dict[str, str] = {}
    for (activation, norm), reason, gain in zip(calls, reasons, gains(len(calls), exponent), strict=True):
        if reason is None:
            yield _shape(activation, norm if how == "fold" else None, gain, names)
        else:
            left[names[id(activation)]] = reason
    yield from (Untouched(name, reason) for name, reason in left.items())
    yield {"exponent": exponent}


shape_activations = on_copy(shape_activations_)


def _choose_exponent(
    activations: list[nn.Module], law: ExplosionLaw | None, margin: float, generator: torch.Generator | None
) -> tuple[float, str]:
    """margin/c₂ of the given law, or of the measured law of each kind of activation, the largest."""
    if law is not None:
        return law.exponent(margin), f"given law: {law}"
    kinds: dict[str, str | nn.Module] = {}
    for activation in activations:
        known = name_activation(activation)
        # a module of the user's own is known by what it prints of itself
        kinds.setdefault(known or repr(activation), known or activation)
    laws = {kind: explosion_law(function, generator=generator) for kind, function in kinds.items()}
    slowest = min(laws, key=lambda kind: laws[kind].c2)  # the smallest c₂ needs the largest exponent
    chosen = laws[slowest].exponent(margin)
    return chosen, f"exponent {chosen:.3g} = {margin:g}/c₂ from the law measured for {slowest}: {laws[slowest]}"


def _shape(activation: nn.Module, norm: nn.Module | None, gain: float, names: dict[int, str]) -> Change:
    """Give one activation its gain, through the norm that feeds it where one is given."""
    if norm is None:
        activation.register_forward_pre_hook(PreGain(gain))
        return Change(names[id(activation)], "gain", "1", f"{gain:.4g}")
    for part in (norm.weight, norm.bias):
        if isinstance(part, Tensor):
            part.mul_(gain)  # scale and shift alike, as α(γx̂ + β) = (αγ)x̂ + αβ
    return Change(names[id(norm)], "scale and shift", "×1", f"×{gain:.4g}")


def _activation_calls(model: nn.Module, inputs: Inputs) -> list[tuple[nn.Module, nn.Module | None]]:
    """Activation calls in order, each with the affine norm whose output it takes directly, if any."""
    calls = [call for call in call_layers(model, inputs) if is_activation(call.module)]
    with undisturbed(model):
        elementwise = {module for module in dict.fromkeys(call.module for call in calls) if _is_elementwise(module)}
    return [
        (call.module, call.giver if isinstance(call.giver, AFFINE_NORMS) else None)
        for call in calls
        if call.module in elementwise
    ]


def _is_elementwise(module: nn.Module) -> bool:
    """Whether a module maps value by value: torch's activations do, others are tried."""
    if type(module).__module__ == nn.ReLU.__module__:
        return True
    values = torch.linspace(-3.0, 3.0, 64).view(8, 8)
    try:
        with torch.no_grad():
            straight, turned = module(values.clone()), module(values.flip(0, 1))
    except Exception:  # whatever a module of the user's raises on another shape, it is then no activation
        return False
    return isinstance(straight, Tensor) and straight.shape == values.shape and torch.equal(straight.flip(0, 1), turned)


def _why_not(activation: nn.Module, norm: nn.Module | None, count: int, how: str) -> str | None:
    """Why an activation cannot be shaped, None where it can."""
    if isinstance(activation, nn.PReLU | nn.RReLU) or is_homogeneous(activation):
        return "it is positively homogeneous: a gain changes its scale, not its shape"
    if how == "wrap" and count > 1:
        return f"one module serves {count} layers, so it cannot have a gain for each; how='fold' can"
    if how == "fold":
        if norm is None or getattr(norm, "weight", None) is None:
            return "no affine norm feeds it directly, so the gain cannot be folded"
        if not all(part.requires_grad for part in norm.parameters(recurse=False)):
            return "the norm that feeds it is frozen (requires_grad is False)"
    return None


@dataclass(frozen=True)
class ExplosionLaw:
    """R(α) ≈ floor + c₁ α^c₂ over a window of gains, R the growth of ln‖gradient‖ per layer.

    Args:
        c1: the prefactor.
        c2: the exponent.
        stderr: standard error of c2.
        floor: the rate of the linear network, which no gain changes.
        window: smallest and largest gain of the fit.
        rates: (gain, rate) pairs measured.
    """

    c1: float
    c2: float
    stderr: float
    floor: Estimate
    window: tuple[float, float]
    rates: tuple[tuple[float, Estimate], ...]

    def exponent(self, margin: float = 1.1) -> float:
        """k/c₂ with the margin k > 1: gains ℓ^(−k/c₂) make the growth over layer ℓ fall as ℓ^(−k), a finite sum."""
        if not (math.isfinite(margin) and margin > 1):
            raise UsageError(
                f"expected a margin above 1, got {margin}", hint="1.1; at 1 the growth over layers diverges"
            )
        return margin / self.c2

    def __str__(self) -> str:
        low, high = self.window
        return (
            f"R(α) = {self.floor} + {self.c1:.3g} α^c₂ per layer, c₂ = {Estimate(self.c2, self.stderr)} "
            f"for gains {low:.3g} to {high:.3g}"
        )


def explosion_law(
    activation: str | Activation | Callable[[Tensor], Tensor],
    *,
    width: int = 64,
    batch_size: int = 64,
    gains: Sequence[float] | None = None,
    depth: int = 48,
    generator: torch.Generator | None = None,
) -> ExplosionLaw:
    """Measure how the growth of gradients depends on the gain α in networks of Haar weights, batch norm and σ(αx).

    thesis2024 (C.5, figure C.1) fits R(α) = c₁ α^c₂. It is only roughly a power law: c₂ depends on the window of gains,
    which the result states, and at small gains R tends to the rate of the linear network, not to 0, because a batch of
    n samples in width d is isometric only to within n/d; that floor is measured with the identity and taken off first.
    (C.155) has R's sign reversed; here it is positive when gradients grow towards the input.

    Args:
        activation: a name, an Activation or a callable.
        width, batch_size: of the networks.
        gains: the gains to fit. By default 1, 2^(−½), 2^(−1), … until R has fallen twentyfold: past the plateau that
            GELU keeps down to 0.25. The plateau counts, as every layer of the network must cross it.
        depth: layers; growth is taken over the middle half.

    Raises:
        UsageError: the rate does not fall with the gain (a positively homogeneous activation), or too few gains.

    >>> law = explosion_law("tanh", width=32, batch_size=32, generator=torch.Generator().manual_seed(0))
    >>> law.c2 > 1.5 and law.window[0] < law.window[1]
    True
    """
    if gains is not None and (len(set(gains)) < 2 or min(gains) <= 0 or not all(map(math.isfinite, gains))):
        raise UsageError(f"expected at least 2 positive gains, got {list(gains)}", hint="gains=(1, 0.5, 0.25)")

    def measure(function: Any, gain: float) -> Estimate:
        simulation = simulate(
            width=width, batch_size=batch_size, depth=depth, burn_in=depth // 4, every=depth, measures=("log_norm",),
            weights="haar", activation=function, gain=gain, backward=True, generator=generator,
        )  # fmt: skip
        assert simulation.gradients is not None
        return simulation.gradients["log_rate"]

    if is_homogeneous(activation):
        raise UsageError(
            f"{activation} is positively homogeneous: a gain changes its scale, not the growth", hint="tune_batchnorm"
        )
    floor = measure("identity", 1.0)  # a gain changes nothing there: batch norm undoes it
    rates: list[tuple[float, Estimate]] = []
    halvings = int(-2 * math.log2(SMALLEST_GAIN))
    for gain in gains if gains is not None else [2.0 ** (-step / 2) for step in range(halvings + 1)]:
        rates.append((float(gain), measure(activation, float(gain))))
        excesses = [rate.value - floor.value for _, rate in rates]
        fallen = excesses[-1] < max(max(excesses) / FALLEN, SIGNIFICANT * _noise(rates[-1][1], floor))
        if gains is None and len(rates) > 2 and fallen:
            break
    return _fit(activation, rates, floor)


def is_homogeneous(activation: str | Activation | Callable[[Tensor], Tensor]) -> bool:
    """Whether f(αx) ∝ f(x) for α > 0, as for ReLU: what a gain does to it, the next norm undoes."""
    function = resolve(activation).torch() if isinstance(activation, str | Activation) else activation
    points = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64)
    with torch.no_grad():
        whole, part = function(points), function(points / 4)  # of a homogeneous one a multiple
    size = torch.linalg.vector_norm
    return torch.allclose(part * size(whole), whole * size(part), rtol=1e-6)  # their directions are compared


def _noise(rate: Estimate, floor: Estimate) -> float:
    return math.hypot(rate.stderr or 0.0, floor.stderr or 0.0)


def _fit(activation: Any, rates: list[tuple[float, Estimate]], floor: Estimate) -> ExplosionLaw:
    """Least squares of ln(R − floor) on ln α, weighted by the standard errors."""
    kept = [
        (gain, rate.value - floor.value, _noise(rate, floor))
        for gain, rate in rates
        if rate.value - floor.value > SIGNIFICANT * _noise(rate, floor)
    ]
    if len(kept) < 2:
        raise UsageError(
            f"gradients with {activation} grow hardly faster than those of the linear network at gains from "
            f"{rates[-1][0]:.3g} to {rates[0][0]:.3g}: there is no law to fit",
            hint="a larger width and depth, or larger gains",
        )
    log_gain, log_rate = np.log([k[0] for k in kept]), np.log([k[1] for k in kept])
    # the law bends: each point counts alike once its noise is below a tenth
    deviation = np.maximum([k[2] / k[1] for k in kept], 0.1)
    weight = deviation**-2
    centre = float(np.average(log_gain, weights=weight))
    spread = float(np.sum(weight * (log_gain - centre) ** 2))
    slope = float(np.sum(weight * (log_gain - centre) * log_rate) / spread)
    if slope < LEAST_POWER:
        raise UsageError(
            f"the growth of gradients with {activation} falls only as gain^{slope:.2g}, so no gain can hold them",
            hint="smaller gains, or tune_batchnorm",
        )
    level = float(np.average(log_rate, weights=weight)) - slope * centre
    window = (min(k[0] for k in kept), max(k[0] for k in kept))
    return ExplosionLaw(math.exp(level), slope, 1 / math.sqrt(spread), floor, window, tuple(rates))
