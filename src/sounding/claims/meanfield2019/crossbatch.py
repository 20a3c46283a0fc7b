"""Two batches that share a network, φ positively homogeneous: theorems D.6, E.1 and F.2.

Each closed form is held against its integral, and against Gaussian batches that are drawn, normalized and activated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.meanfield2019.closed_forms import (
    Case,
    backward_integral,
    covariance_by_gamma,
    covariance_by_kernel,
    covariance_integral,
    eigenvalue_by_beta,
    eigenvalue_by_kernel,
    eigenvalue_by_spread,
    forward_integral,
    power,
)
from sounding.claims.meanfield2019.sampled import widest
from sounding.claims.number import Number, exact, jackknife, mean_of, scaled
from sounding.claims.picture import Panel, Picture, Series

GROUPS = 40
"""Independent groups of drawn batches, from which an interval is made."""

STEP = 0.02
"""Correlation of the two batches where the forward rate is a difference quotient."""


ROOM = 0.02
"""Relative deviation of drawn batches: B for B − 1 in a power or in a Beta function is 3% or more off at B = 16."""

_LINE = np.linspace(0.6, 2.2, 17)  # degrees at which theory is drawn as a curve


@dataclass(frozen=True)
class Drawn:
    """What was drawn for a case: a value with its interval."""

    case: Case
    number: Number


def compare(
    closed: Callable[[Case], float], integral: Callable[[Case], tuple[float, float]], cases: Sequence[Case]
) -> Number:
    """The largest relative difference of a closed form from an integral over the cases, with the integrals' error."""
    worst = error = 0.0
    for case in cases:
        value, relative = integral(case)
        worst, error = max(worst, abs(closed(case) / value - 1)), max(error, relative)
    return exact(worst, error=error)


def deviation_of(drawn: Sequence[Drawn], closed: Callable[[Case], float]) -> Number:
    """The largest |drawn/closed − 1|: a single case that is off lifts the lower end of the interval above the bound."""
    found = []
    for each in drawn:
        ratio = scaled(each.number, 1 / closed(each.case))
        near = max(0.0, ratio.low - 1, 1 - ratio.high)
        found.append(Number(abs(ratio.value - 1), near, max(abs(ratio.low - 1), abs(ratio.high - 1))))
    return widest(found)


class _Batches:
    """Gaussian batches in groups, their normalization, and directions among the samples, for one case."""

    def __init__(self, case: Case, values: Mapping[str, Any], context: Context, offset: int) -> None:
        self.case, self.phi = case, power(case.alpha, case.b).torch()
        self.count = values["batches"] // GROUPS
        generator = context.generator(offset, device=context.device)
        self.place: dict[str, Any] = {"device": context.device, "generator": generator}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.case.size, dtype=torch.float64, **self.place)

    def activate(self, h: torch.Tensor) -> torch.Tensor:
        """φ(BN(h)), samples last."""
        centred = h - h.mean(-1, keepdim=True)
        return self.phi(centred * centred.square().mean(-1, keepdim=True).rsqrt())

    def turn(self) -> torch.Tensor:
        """Random T with TTᵀ = G, (GROUPS, B, B): a deviation of the block between two batches, of no symmetry."""
        size = self.case.size
        centring = torch.eye(size, dtype=torch.float64, device=self.place["device"]) - 1 / size
        basis = torch.linalg.qr(centring)[0][:, :-1]
        free = torch.randn(GROUPS, size - 1, size - 1, dtype=torch.float64, **self.place)
        turn: torch.Tensor = basis @ torch.linalg.qr(free)[0] @ basis.T
        return turn


def _spread(state: torch.Tensor) -> torch.Tensor:
    """μ of each group: the variance about the batch's mean, per direction."""
    return state.var(-1).mean(-1)


def draw_covariance_block(case: Case, values: Mapping[str, Any], context: Context, offset: int) -> Array:
    """Per group: the mean entry of the block between two batches after one layer, the excess of its diagonal, and μ.

    From a covariance of the form of definition D.2 (1 for a sample, 0.5 within, 0.25 between batches).
    """
    batches = _Batches(case, values, context, offset)
    shared, common = batches.draw(GROUPS, batches.count)[..., :1], batches.draw(2, GROUPS, batches.count)[..., :1]
    own = batches.draw(2, GROUPS, batches.count)
    first, second = batches.activate(math.sqrt(0.5) * own + 0.5 * common + 0.5 * shared)
    block = first.mT @ second / batches.count
    diagonal = block.diagonal(dim1=-2, dim2=-1).sum(-1)
    excess = (diagonal - block.sum((-2, -1)) / case.size) / (case.size - 1)
    columns = (block.mean((-2, -1)), excess, _spread(first))
    return np.stack([column.cpu().numpy() for column in columns], axis=1)


def draw_forward(case: Case, values: Mapping[str, Any], context: Context, offset: int) -> Array:
    """Per group: the response of the block between two batches to a deviation T, per unit of it, and μ.

    h′ = ±ρTh + √(1 − ρ²)g has the covariance ±ρT with h. Mehler's series bounds what the difference quotient adds to
    the eigenvalue λ by ρ²(1 − λ), either way.
    """
    batches = _Batches(case, values, context, offset)
    h, other, turn = batches.draw(GROUPS, batches.count), batches.draw(GROUPS, batches.count), batches.turn()
    first, turned, rest = batches.activate(h), h @ turn.mT, math.sqrt(1 - STEP**2) * other
    change = (batches.activate(rest + STEP * turned) - batches.activate(rest - STEP * turned)) / (2 * STEP)
    response = ((first @ turn.mT) * change).sum(-1).mean(-1) / (case.size - 1)
    return np.stack([response.cpu().numpy(), _spread(first).cpu().numpy()], axis=1)


def draw_backward(case: Case, values: Mapping[str, Any], context: Context, offset: int) -> Array:
    """Per group: what is left of a deviation T between the gradients of two batches a layer below, times μ, and μ.

    Gradients u and Tu are pulled back through φ(BN(h)) at four independent h each: 16 pairs of batches. At the fixed
    point h has the variance μ and not 1, which divides the product of two gradients by μ.
    """
    batches = _Batches(case, values, context, offset)
    turn = batches.turn()
    cotangent = batches.draw(GROUPS, batches.count // 4)
    cotangent = cotangent - cotangent.mean(-1, keepdim=True)
    # E uuᵀ = G, and the spread of |u| is out of the way
    cotangent = math.sqrt(case.size - 1) * cotangent / cotangent.norm(dim=-1, keepdim=True)
    inner = batches.draw(2, 4, GROUPS, batches.count // 4).requires_grad_()
    state = batches.activate(inner)
    above = torch.stack([cotangent, cotangent @ turn.mT])[:, None].expand_as(state)
    (pulled,) = torch.autograd.grad(state, inner, above)
    first, second = pulled.mean(1)
    left = ((first @ turn.mT) * second).sum(-1).mean(-1) / (case.size - 1)
    return np.stack([left.cpu().numpy(), _spread(state.detach()).mean((0, 1)).cpu().numpy()], axis=1)


def _rate(rows: Array) -> float:
    return float(rows[:, 0].mean() / rows[:, 1].mean())


def _cases(values: Mapping[str, Any], kind: str) -> list[Case]:
    slopes, sizes = values[f"{kind}_slopes"], values[f"{kind}_sizes"]
    return [Case(alpha, b, size) for b in slopes for size in sizes for alpha in values["degrees"]]


def _draw_picture(
    drawn: Sequence[Drawn], closed: Callable[[Case], float], *, theorem: str, label: str, points: str
) -> Picture:
    """Measured points on the theorem's lines, and beside them their ratio."""
    lines, ratios = [], []
    for place, (b, size) in enumerate(dict.fromkeys((each.case.b, each.case.size) for each in drawn)):
        here = [each for each in drawn if (each.case.b, each.case.size) == (b, size)]
        alphas, name = np.array([each.case.alpha for each in here]), f"b = {b:g}, B = {size}"
        ends = np.array([(each.number.value, each.number.low, each.number.high) for each in here])
        theory = [closed(Case(float(alpha), b, size)) for alpha in _LINE]
        lines.append(_points(name, alphas, ends))
        lines.append(Series(f"{name} (theorem {theorem})", _LINE, theory, "theory"))
        # side by side, for the intervals overlap
        unit = np.array([closed(each.case) for each in here])
        ratios.append(_points(name, alphas + 0.03 * (place - 1.5), ends / unit[:, None]))
    span = [float(_LINE[0]), float(_LINE[-1])]
    ratios += [
        Series(f"bound ({ROOM:.0%} {side})", span, [end, end], "bound")
        for side, end in (("above", 1 + ROOM), ("below", 1 - ROOM))
    ]
    panels = (Panel("degree α", label, lines), Panel("degree α", f"drawn over theorem {theorem}", ratios))
    caption = (
        f"Lines: theorem {theorem}. Points: {points}, with 99% intervals; right, points over lines. The theorem "
        "puts every point on its line, whatever the degree, the batch size B and the slope b of the negative side."
    )
    return Picture(panels, caption)


def _points(name: str, x: Array, ends: Array) -> Series:
    """Rows (value, low, high) as points with intervals."""
    value, low, high = ends.T
    return Series(name, x, value, error=(value - low, high - value))


def measure_covariance(values: Mapping[str, Any], context: Context) -> Outcome:
    """The block between two batches after one layer, beside both forms of theorem D.6."""
    cases = _cases(values, "integrated")
    drawn, excess = [], []
    for place, case in enumerate(_cases(values, "drawn")):
        rows = draw_covariance_block(case, values, context, place)
        drawn.append(Drawn(case, mean_of(rows[:, 0])))
        over = jackknife(_rate, rows[:, 1:])
        excess.append(Number(abs(over.value), max(0.0, over.low, -over.high), max(-over.low, over.high)))
    numbers = {
        "first_form_off_integral": compare(covariance_by_kernel, covariance_integral, cases),
        "second_form_off_integral": compare(covariance_by_gamma, covariance_integral, cases),
        "drawn_off_closed_form": deviation_of(drawn, covariance_by_gamma),
        "drawn_excess_of_like_samples": widest(excess),
    }
    points = "the covariance of samples of two batches that are each normalized by themselves, drawn"
    label = "covariance between two batches"
    return Outcome(numbers, _draw_picture(drawn, covariance_by_gamma, theorem="D.6", label=label, points=points))


def measure_forward(values: Mapping[str, Any], context: Context) -> Outcome:
    """The response of the block between two batches to a deviation of it, beside both forms of theorem E.1."""
    cases = _cases(values, "integrated")
    drawn = []
    for place, case in enumerate(_cases(values, "drawn")):
        found = jackknife(_rate, draw_forward(case, values, context, place))
        # what a difference quotient may add
        drawn.append(Drawn(case, Number(found.value, found.low - STEP**2, found.high + STEP**2, found.samples)))
    numbers = {
        "first_form_off_integral": compare(eigenvalue_by_spread, forward_integral, cases),
        "second_form_off_integral": compare(eigenvalue_by_kernel, forward_integral, cases),
        "drawn_off_closed_form": deviation_of(drawn, eigenvalue_by_kernel),
    }
    points = "a small covariance between two batches, in a random direction, after one layer over before, drawn"
    label = "forward eigenvalue between two batches"
    return Outcome(numbers, _draw_picture(drawn, eigenvalue_by_kernel, theorem="E.1", label=label, points=points))


def measure_backward(values: Mapping[str, Any], context: Context) -> Outcome:
    """What gradients of two batches still share a layer below, beside theorem F.2."""
    cases = _cases(values, "integrated")
    drawn = [
        Drawn(case, jackknife(_rate, draw_backward(case, values, context, place)))
        for place, case in enumerate(_cases(values, "drawn"))
    ]
    numbers = {
        "closed_form_off_integral": compare(eigenvalue_by_beta, backward_integral, cases),
        "closed_form_off_forward": compare(eigenvalue_by_beta, forward_integral, cases),
        "drawn_off_closed_form": deviation_of(drawn, eigenvalue_by_beta),
    }
    points = "what gradients of two batches share, in a random direction, a layer below over above, drawn"
    label = "backward eigenvalue between two batches"
    return Outcome(numbers, _draw_picture(drawn, eigenvalue_by_beta, theorem="F.2", label=label, points=points))
