"""Two batches that share a network, φ positively homogeneous: theorems D.6, E.1 and F.2.

Each closed form is held against its integral, and against Gaussian batches that are drawn, normalized and activated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import beta, poch

from sounding.activations import Activation
from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.meanfield2019.transforms import widest
from sounding.claims.number import Number, distance_from, exact, jackknife_ratio, mean_of, scaled
from sounding.claims.picture import Series, level, points_of
from sounding.predict import batchnorm
from sounding.theory.batchnorm import BatchNormPrediction
from sounding.theory.homogeneous import kernel, kernel_slope
from sounding.theory.integrals.arc_cosine import second_moment


@dataclass(frozen=True)
class Case:
    """The degree α, the slope b of the negative side and the batch size."""

    alpha: float
    b: float
    size: int

    def kernel(self, c: float) -> float:
        """J_φ(c)."""
        return kernel(c, degree=self.alpha, slopes=(1.0, float(self.b)))

    def slope(self, c: float) -> float:
        """J_φ′(c)."""
        return kernel_slope(c, degree=self.alpha, slopes=(1.0, float(self.b)))


def power(alpha: float, b: float) -> Activation:
    """x^α for x > 0 and −b·|x|^α for x < 0: α-ReLU at b = 0, its leaky variant else."""

    def twin() -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.where(x > 0, 1.0, -b) * x.abs() ** alpha

    return Activation(
        f"power:{alpha:g},{b:g}",
        lambda x: np.where(x > 0, 1.0, -b) * np.abs(x) ** alpha,
        lambda x: np.where(x > 0, 1.0, b) * alpha * np.abs(x) ** (alpha - 1),
        kinks=(0.0,),
        degree=alpha,
        slopes=(1.0, b),
        twin=twin,
    )


@cache
def predicted(case: Case) -> BatchNormPrediction:
    """The fixed point by the product's quadrature, which knows nothing of closed forms."""
    return batchnorm(power(case.alpha, case.b), batch_size=case.size)


def covariance_by_kernel(case: Case) -> float:
    """D.6, first form: c_α ((B−1)/2)^α P((B−1)/2, α/2)⁻² J_φ(0)."""
    half = (case.size - 1) / 2
    return float(second_moment(case.alpha) * half**case.alpha * case.kernel(0.0) / poch(half, case.alpha / 2) ** 2)


def covariance_by_gamma(case: Case) -> float:
    """D.6, second form: (a − b)²/(4π) (B−1)^α [Γ((B−1)/2) Γ((α+1)/2)/Γ((α+B−1)/2)]²."""
    width, alpha = case.size - 1, case.alpha
    root = math.gamma((alpha + 1) / 2) * math.exp(math.lgamma(width / 2) - math.lgamma((alpha + width) / 2))
    return float((1 - case.b) ** 2 / (4 * math.pi) * width**alpha * root**2)


def eigenvalue_by_spread(case: Case) -> float:
    """E.1, first form: (B/2) ((B−1)/2)^(α−1) P(B/2, α/2)⁻² μ⁻¹ c_α J_φ′(0), μ by quadrature."""
    size, alpha = case.size, case.alpha
    front = size / 2 * ((size - 1) / 2) ** (alpha - 1) / poch(size / 2, alpha / 2) ** 2
    return float(front * second_moment(alpha) * case.slope(0.0) / predicted(case).fixed_point.mu)


def eigenvalue_by_kernel(case: Case) -> float:
    """E.1, second form: B P((B−1)/2, α)/((B−1) P(B/2, α/2)²) · J_φ′(0)/(J_φ(1) − J_φ(−1/(B−1)))."""
    size = case.size
    front = size * poch((size - 1) / 2, case.alpha) / ((size - 1) * poch(size / 2, case.alpha / 2) ** 2)
    return float(front * case.slope(0.0) / (case.kernel(1.0) - case.kernel(-1 / (size - 1))))


def eigenvalue_by_beta(case: Case) -> float:
    """F.2: (1/8π) B (B−1)^(α−1) μ⁻¹ α² (a + b)² Beta(α/2, B/2)², μ by quadrature."""
    size, alpha = case.size, case.alpha
    front = size * (size - 1) ** (alpha - 1) / (8 * math.pi * predicted(case).fixed_point.mu)
    return float(front * alpha**2 * (1 + case.b) ** 2 * beta(alpha / 2, size / 2) ** 2)


def over_angle(function: Callable[[Array], Array], size: int, *, power_of_sine: int) -> tuple[float, float]:
    """∫₀^π sin^k θ f(−√(B−1) cos θ) dθ, cut at the kink, and the bound of its error."""

    def integrand(theta: float) -> float:
        return float(math.sin(theta) ** power_of_sine * function(np.array(-math.sqrt(size - 1) * math.cos(theta))))

    parts = [quad(integrand, *ends, epsabs=0.0, epsrel=1e-11, limit=200)
             for ends in ((0.0, math.pi / 2), (math.pi / 2, math.pi))]  # fmt: skip
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def _front(size: int) -> float:
    """Γ((B−1)/2)/(√π Γ((B−2)/2)): sin^(B−3)θ times it is a density."""
    return math.exp(math.lgamma((size - 1) / 2) - math.lgamma((size - 2) / 2)) / math.sqrt(math.pi)


def covariance_integral(case: Case) -> tuple[float, float]:
    """(E φ(x₁))² by the integral of theorem D.3, and the bound of its relative error."""
    value, error = over_angle(power(case.alpha, case.b), case.size, power_of_sine=case.size - 3)
    return (_front(case.size) * value) ** 2, 2 * error / abs(value)  # the square doubles the relative error


def forward_integral(case: Case) -> tuple[float, float]:
    """(2B/μ) [Γ(B/2)/Γ((B−1)/2) · E x₁φ(x₁)/(B−1)]², and the bound of its relative error.

    The slope at zero of E φ(x)φ(x′)ᵀ in the covariance of h and h′ is (E φ(x)hᵀ/μ)⊗², by integration by parts; |h|
    and x are independent. No derivative of φ is taken.
    """
    phi, size, found = power(case.alpha, case.b), case.size, predicted(case)
    value, error = over_angle(lambda x: x * phi(x), size, power_of_sine=size - 3)
    radius = math.exp(math.lgamma(size / 2) - math.lgamma((size - 1) / 2))
    root = radius * _front(size) * value / (size - 1)
    mu = found.fixed_point.mu
    return 2 * size / mu * root**2, 2 * error / abs(value) + found.error * max(1.0, 1 / mu)


def backward_integral(case: Case) -> tuple[float, float]:
    """B/(2πμ) [∫ sin^(B−1)θ φ′(−√(B−1) cos θ) dθ]², theorem F.1, and the bound of its relative error."""
    size, found = case.size, predicted(case)
    value, error = over_angle(power(case.alpha, case.b).derivative, size, power_of_sine=size - 1)
    mu = found.fixed_point.mu
    return size / (2 * math.pi * mu) * value**2, 2 * error / abs(value) + found.error * max(1.0, 1 / mu)


GROUPS = 40  # independent groups of drawn batches, from which an interval is made

STEP = 0.02  # correlation of the two batches where the forward rate is a difference quotient


# relative deviation of drawn batches: B for B − 1 in a power or in a Beta function is 3% or more off at B = 16
ROOM = 0.02

_LINE = np.linspace(0.6, 2.2, 17)  # degrees at which theory is drawn as a curve


Drawn = tuple[Case, Number]  # what was drawn for a case: a value with its interval


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
    return widest([distance_from(scaled(number, 1 / closed(case)), 1.0) for case, number in drawn])


class _Batches:
    """Gaussian batches in groups, their normalization, and directions among the samples, for one case."""

    def __init__(self, case: Case, values: Values, context: Context, offset: int) -> None:
        self.case, self.phi = case, power(case.alpha, case.b).torch()
        self.count = values["batches"] // GROUPS
        self.place = {**context.place(offset), "dtype": torch.float64}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.case.size, **self.place)

    def activate(self, h: torch.Tensor) -> torch.Tensor:
        """φ(BN(h)), samples last."""
        centred = h - h.mean(-1, keepdim=True)
        return self.phi(centred * centred.square().mean(-1, keepdim=True).rsqrt())

    def turn(self) -> torch.Tensor:
        """Random T with TTᵀ = G, (GROUPS, B, B): a deviation of the block between two batches, of no symmetry."""
        size = self.case.size
        centring = torch.eye(size, dtype=torch.float64, device=self.place["device"]) - 1 / size
        basis = torch.linalg.qr(centring)[0][:, :-1]
        free = torch.randn(GROUPS, size - 1, size - 1, **self.place)
        turn: torch.Tensor = basis @ torch.linalg.qr(free)[0] @ basis.T
        return turn


def _spread(state: torch.Tensor) -> torch.Tensor:
    """μ of each group: the variance about the batch's mean, per direction."""
    return state.var(-1).mean(-1)


def draw_covariance_block(case: Case, values: Values, context: Context, offset: int) -> Array:
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
    return torch.stack([block.mean((-2, -1)), excess, _spread(first)], dim=1).cpu().numpy()


def draw_forward(case: Case, values: Values, context: Context, offset: int) -> Array:
    """Per group: the response of the block between two batches to a deviation T, per unit of it, and μ.

    h′ = ±ρTh + √(1 − ρ²)g has the covariance ±ρT with h. Mehler's series bounds what the difference quotient adds to
    the eigenvalue λ by ρ²(1 − λ), either way.
    """
    batches = _Batches(case, values, context, offset)
    h, other, turn = batches.draw(GROUPS, batches.count), batches.draw(GROUPS, batches.count), batches.turn()
    first, turned, rest = batches.activate(h), h @ turn.mT, math.sqrt(1 - STEP**2) * other
    change = (batches.activate(rest + STEP * turned) - batches.activate(rest - STEP * turned)) / (2 * STEP)
    response = ((first @ turn.mT) * change).sum(-1).mean(-1) / (case.size - 1)
    return torch.stack([response, _spread(first)], dim=1).cpu().numpy()


def draw_backward(case: Case, values: Values, context: Context, offset: int) -> Array:
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
    return torch.stack([left, _spread(state.detach()).mean((0, 1))], dim=1).cpu().numpy()


def _cases(values: Values, kind: str) -> list[Case]:
    slopes, sizes = values[f"{kind}_slopes"], values[f"{kind}_sizes"]
    return [Case(alpha, b, size) for b in slopes for size in sizes for alpha in values["degrees"]]


def _present(
    numbers: dict[str, Number], drawn: Sequence[Drawn], closed: Callable[[Case], float], theorem: str
) -> Outcome:
    """The numbers, the measured points on the theorem's lines, and beside them their ratio."""
    numbers["drawn_off_closed_form"] = deviation_of(drawn, closed)
    lines, ratios = [], []
    for place, (b, size) in enumerate(dict.fromkeys((case.b, case.size) for case, _ in drawn)):
        here = {case.alpha: number for case, number in drawn if (case.b, case.size) == (b, size)}
        alphas, name = np.array(list(here)), f"b = {b:g}, B = {size}"
        theory = [closed(Case(float(alpha), b, size)) for alpha in _LINE]
        lines.append(points_of(name, alphas, here.values()))
        lines.append(Series(f"{name} (theorem {theorem})", _LINE, theory, "theory"))
        over = [scaled(number, 1 / closed(Case(alpha, b, size))) for alpha, number in here.items()]
        ratios.append(points_of(name, alphas + 0.03 * (place - 1.5), over))  # side by side, for intervals overlap
    ratios += [level(f"bound ({ROOM:.0%} above)", _LINE, 1 + ROOM), level(f"bound ({ROOM:.0%} below)", _LINE, 1 - ROOM)]
    return present(numbers, lines, ratios)


def measure_covariance(values: Values, context: Context) -> Outcome:
    """The block between two batches after one layer, beside both forms of theorem D.6."""
    cases = _cases(values, "integrated")
    drawn, excess = [], []
    for place, case in enumerate(_cases(values, "drawn")):
        rows = draw_covariance_block(case, values, context, place)
        drawn.append((case, mean_of(rows[:, 0])))
        excess.append(distance_from(jackknife_ratio(*rows[:, 1:].T), 0.0))
    numbers = {
        "first_form_off_integral": compare(covariance_by_kernel, covariance_integral, cases),
        "second_form_off_integral": compare(covariance_by_gamma, covariance_integral, cases),
        "drawn_excess_of_like_samples": widest(excess),
    }
    return _present(numbers, drawn, covariance_by_gamma, "D.6")


def measure_forward(values: Values, context: Context) -> Outcome:
    """The response of the block between two batches to a deviation of it, beside both forms of theorem E.1."""
    cases = _cases(values, "integrated")
    drawn = []
    for place, case in enumerate(_cases(values, "drawn")):
        found = jackknife_ratio(*draw_forward(case, values, context, place).T)
        # what a difference quotient may add
        drawn.append((case, Number(found.value, found.low - STEP**2, found.high + STEP**2, found.samples)))
    numbers = {
        "first_form_off_integral": compare(eigenvalue_by_spread, forward_integral, cases),
        "second_form_off_integral": compare(eigenvalue_by_kernel, forward_integral, cases),
    }
    return _present(numbers, drawn, eigenvalue_by_kernel, "E.1")


def measure_backward(values: Values, context: Context) -> Outcome:
    """What gradients of two batches still share a layer below, beside theorem F.2."""
    cases = _cases(values, "integrated")
    drawn = [
        (case, jackknife_ratio(*draw_backward(case, values, context, place).T))
        for place, case in enumerate(_cases(values, "drawn"))
    ]
    numbers = {
        "closed_form_off_integral": compare(eigenvalue_by_beta, backward_integral, cases),
        "closed_form_off_forward": compare(eigenvalue_by_beta, forward_integral, cases),
    }
    return _present(numbers, drawn, eigenvalue_by_beta, "F.2")
