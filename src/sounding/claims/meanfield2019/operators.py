"""Theorems 1, B.25, B.63 to B.70, C.8, C.11 and C.12: operators on symmetric matrices, built whole and diagonalized."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, permutations

import numpy as np
from scipy.special import poch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.meanfield2019.crossbatch import Case, power, predicted
from sounding.claims.number import exact, fraction_of
from sounding.claims.picture import Series
from sounding.theory.homogeneous import homogeneous_batchnorm
from sounding.theory.integrals.arc_cosine import second_moment

Operator = Callable[[Array], Array]
SAME = 1e-7  # eigenvalues closer than this, over the largest, are one: those of a small dense matrix are good to 1e-12


def symmetric_basis(size: int) -> list[Array]:
    """An orthonormal basis of the symmetric matrices."""
    found = []
    for i, j in combinations_with_replacement(range(size), 2):
        matrix = np.zeros((size, size))
        matrix[i, j] = matrix[j, i] = 1.0 if i == j else math.sqrt(0.5)  # both entries count: of unit Frobenius norm
        found.append(matrix)
    return found


def centred_basis(size: int) -> list[Array]:
    """An orthonormal basis of the symmetric matrices whose rows sum to 0, GΣG for all Σ."""
    centre = np.eye(size) - 1 / size
    columns = np.array([(centre @ matrix @ centre).ravel() for matrix in symmetric_basis(size)]).T
    left, singular, _ = np.linalg.svd(columns, full_matrices=False)
    # centring leaves n(n − 1)/2 of n(n + 1)/2 directions: the others have singular values of 0
    return [column.reshape(size, size) for column in left.T[singular > 1e-9]]


def eigenvalues_on(operator: Operator, basis: list[Array]) -> Array:
    """The eigenvalues of an operator that keeps the span of an orthonormal basis."""
    images = [operator(matrix) for matrix in basis]
    return np.asarray(np.linalg.eigvals(np.array([[np.sum(a * b) for b in images] for a in basis])))


def multiplicities(found: Array) -> list[int]:
    """How often each distinct eigenvalue occurs, ascending."""
    left, counts = list(found), []
    scale = float(np.abs(found).max())
    while left:
        near = [value for value in left if abs(value - left[0]) <= SAME * scale]
        counts.append(len(near))
        left = [value for value in left if abs(value - left[0]) > SAME * scale]
    return sorted(counts)


def deviation(found: Array, wanted: list[tuple[float, int]]) -> float:
    """The largest distance of eigenvalues from those printed, with multiplicities and sorted, over the largest."""
    printed = np.sort(np.concatenate([[value] * count for value, count in wanted]))
    return float(np.abs(np.sort(found.real) - printed).max() / np.abs(printed).max())


def measure_theorem1(values: Values, context: Context) -> Outcome:
    """Eigenvalues of random operators averaged over permutations: how often each occurs, and whether all are real."""
    counted, real, trials = 0, 0, 0
    for size in values["sizes"]:
        random = np.random.default_rng(context.random_seed + size)
        # two, two and one invariant subspaces of the permutations
        wanted = sorted([1, 1, size - 1, size - 1, size * (size - 3) // 2])
        orders = [np.array(order) for order in permutations(range(size))]
        for _ in range(values["draws"]):
            raw = random.standard_normal((size,) * 4)
            raw = raw + raw.transpose(1, 0, 3, 2)  # symmetric in both pairs at once
            # the average over all permutations commutes with them
            tensor = sum(raw[np.ix_(o, o, o, o)] for o in orders) / len(orders)
            found = eigenvalues_on(partial(_apply, np.asarray(tensor)), symmetric_basis(size))
            counted += multiplicities(found) == wanted
            real += bool(np.abs(found.imag).max() <= SAME * np.abs(found).max())
            trials += 1
    numbers = {
        "operators_with_other_multiplicities": exact(trials - counted),
        "share_with_real_eigenvalues": fraction_of(real, trials),
        "operators_with_complex_eigenvalues": exact(trials - real),
    }
    return present(numbers, trials=trials)


def _apply(tensor: Array, matrix: Array) -> Array:
    image = np.einsum("ijkl,kl->ij", tensor, matrix)
    return np.asarray((image + image.T) / 2)


def _dos(u: float, v: float, w: float) -> Operator:
    """DOS_B(u, v, w): uΣ_ii on the diagonal, vΣ_ii + vΣ_jj + wΣ_ij off it."""

    def apply(matrix: Array) -> Array:
        own = np.diag(matrix)
        found = v * (own[:, None] + own[None, :]) + w * matrix
        np.fill_diagonal(found, u * own)  # the diagonal knows nothing of v and w
        return np.asarray(found)

    return apply


def _centred(operator: Operator, size: int) -> Operator:
    centre = np.eye(size) - 1 / size
    return lambda matrix: centre @ operator(matrix) @ centre


def _spaces(u: float, v: float, w: float, size: int) -> list[tuple[float, int]]:
    """Theorem B.63: the eigenvalues of G⊗² ∘ DOS on centred matrices."""
    return [
        (((size - 1) * (u - 2 * v) + w) / size, 1),
        (w, size * (size - 3) // 2),
        (((size - 2) * (u - 2 * v) + 2 * w) / size, size - 1),
    ]


def measure_theorem_b63(values: Values, context: Context) -> Outcome:
    """Eigenvalues of G⊗² ∘ DOS(u, v, w) on centred matrices for random u, v, w, against the printed ones."""
    random, off = np.random.default_rng(context.random_seed), []
    for size in values["sizes"]:
        for _ in range(values["draws"]):
            u, v, w = random.standard_normal(3)
            found = eigenvalues_on(_centred(_dos(u, v, w), size), centred_basis(size))
            off.append(deviation(found, _spaces(u, v, w, size)))
    return present({"largest_deviation": exact(max(off), error=1e-10)})


def _pair(phi: Callable[[Array], Array], a: float, b: float, c: float) -> float:
    """E φ(h)φ(k) of normals of variances a, b and covariance c, by Gauss–Hermite quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(60)
    w = w / w.sum()
    first = math.sqrt(a) * z
    # k given h is normal about (c/a)h
    second = c / math.sqrt(a) * z[:, None] + math.sqrt(max(b - c * c / a, 0.0)) * z[None, :]
    return float(np.sum(w[:, None] * w[None, :] * phi(first)[:, None] * phi(second)))


def measure_theorem_b64(values: Values, context: Context) -> Outcome:
    """The Jacobian of V_φ at BSB1(a, b) by central differences of every entry, against the formula from u, v, w."""
    off, step = [], 1e-4
    a, b = values["point"]
    functions: dict[str, Operator] = {"tanh": np.tanh, "sin": np.sin, "cubic": lambda x: x + 0.2 * x**3}
    for name in values["activations"]:
        phi = functions[name]

        def moved(i: int, j: int, matrix: Array, phi: Callable[[Array], Array] = phi) -> float:
            ends = [np.full(matrix.shape, b) + (a - b) * np.eye(len(matrix)) + s * step * matrix for s in (1, -1)]
            both = [
                _pair(phi, m[i, i], m[j, j], m[i, j]) if i != j else _pair(phi, m[i, i], m[i, i], m[i, i]) for m in ends
            ]
            return float(both[0] - both[1]) / (2 * step)

        for size in values["sizes"]:
            units = {key: np.zeros((size, size)) for key in ("own", "pair")}
            units["own"][0, 0] = 1.0
            units["pair"][0, 1] = units["pair"][1, 0] = 1.0
            u, v, w = moved(0, 0, units["own"]), moved(0, 1, units["own"]), moved(0, 1, units["pair"])

            def jacobian(matrix: Array, size: int = size, moved: Callable[[int, int, Array], float] = moved) -> Array:
                return np.array([[moved(i, j, matrix) for j in range(size)] for i in range(size)])

            found = eigenvalues_on(_centred(jacobian, size), centred_basis(size))
            off.append(deviation(found, _spaces(u, v, w, size)))
    return present({"largest_deviation": exact(max(off), error=1e-7)})


def _homogeneous(case: Case, p: float, c: float) -> tuple[float, float, float]:
    """∂V₁₁/∂Σ₁₁, ∂V₁₂/∂Σ₁₁ and ∂V₁₂/∂Σ₁₂ at BSB1(p, cp), by differences of V₁₂ = c_α (Σ₁₁Σ₂₂)^{α/2} J(correlation)."""
    scale, step = second_moment(case.alpha), 1e-5

    def entry(first: float, second: float, both: float) -> float:
        root = math.sqrt(first * second)
        return float(scale * root**case.alpha * case.kernel(max(-1.0, min(1.0, both / root))))

    u = (entry(p + step, p + step, p + step) - entry(p - step, p - step, p - step)) / (2 * step)
    v = (entry(p + step, p, c * p) - entry(p - step, p, c * p)) / (2 * step)  # one variance moves, so V₁₂ alone
    w = (entry(p, p, c * p + step) - entry(p, p, c * p - step)) / (2 * step)
    return u, v, w


def measure_homogeneous(values: Values, context: Context) -> Outcome:
    """Theorems B.65 to B.67: the printed eigenvalues for homogeneous φ against operators from differences of V."""
    found: dict[str, list[float]] = {"b65": [], "b66": [], "b67": []}
    for alpha, b in values["activations"]:
        for size in values["sizes"]:
            case, rho = Case(alpha, b, size), -1 / (size - 1)
            for name, p, c in (("b65", 0.7, 0.3), ("b66", (size - 1) / size, rho), ("b67", 0.7, 0.3)):
                top, low, slope = case.kernel(1.0), case.kernel(c), case.slope(c)
                part = second_moment(alpha) * p ** (alpha - 1)
                operator = _dos(*_homogeneous(case, p, c))
                if name == "b67":
                    printed = [(part * slope, size * (size - 1) // 2), (part * alpha * top, size)]
                    eigen = eigenvalues_on(operator, symmetric_basis(size))
                else:
                    fall = alpha * (top - low)
                    single = part / size * ((size - 2) * (fall + c * slope) + 2 * slope)
                    whole = part / size * ((size - 1) * (fall + c * slope) + slope)
                    if name == "b66":
                        single = part / size * ((size - 2) * fall + size / (size - 1) * slope)
                        whole = part * p * fall
                    printed = [(whole, 1), (part * slope, size * (size - 3) // 2), (single, size - 1)]
                    eigen = eigenvalues_on(_centred(operator, size), centred_basis(size))
                found[name].append(deviation(eigen, printed))
    return present({f"largest_deviation_{name}": exact(max(found[name]), error=1e-8) for name in values["shown"]})


def measure_theorem_b25(values: Values, context: Context) -> Outcome:
    """Theorem B.25: the closed fixed point K·J(1), K·J(−1/(B−1)) against quadrature that knows nothing of it."""
    off = []
    for alpha, b in values["activations"]:
        for size in values["sizes"]:
            case, half = Case(alpha, b, size), (size - 1) / 2
            front = second_moment(alpha) * half**alpha / poch(half, alpha)
            ends = [front * case.kernel(c) for c in (1.0, -1 / (size - 1))]
            point = predicted(case).fixed_point
            pairs = zip(ends, (point.variance, point.variance * point.correlation), strict=True)
            off.append(max(abs(x - y) for x, y in pairs) / ends[0])
    return present({"largest_deviation": exact(max(off), error=1e-8)})


def measure_order(values: Values, context: Context) -> Outcome:
    """Corollary B.70 and proposition C.12: least differences of eigenvalues over degrees, slopes and batch sizes."""
    which = values["direction"]
    least: dict[str, float] = {}
    for alpha in values["degrees"]:
        for b in values["slopes"]:
            for size in values["sizes"]:
                found = getattr(homogeneous_batchnorm(power(alpha, b), size), which)
                gaps = {"L_minus_M": found.L - found.M, "M_minus_G": found.M - found.G, "G_minus_L": found.G - found.L}
                if alpha >= 1:
                    gaps["L_minus_M_from_degree_1"] = gaps["L_minus_M"]
                if b == 0:
                    gaps["L_minus_M_one_sided"] = gaps["L_minus_M"]
                for name, gap in (gaps | {"G_minus_M": -gaps["M_minus_G"]}).items():
                    least[name] = min(least.get(name, math.inf), gap)
    return present({f"least_{name}": exact(least[name], error=1e-12) for name in values["shown"]})


def measure_proposition_b69(values: Values, context: Context) -> Outcome:
    """Proposition B.69: limits of λ_L and λ_M as B grows, and the coefficient of 1/B in λ_L, measured and printed."""
    limits, shares, corrected, series = [], [], [], []
    for alpha in values["degrees"]:
        phi = power(alpha, 0.0)
        infinite = Case(alpha, 0.0, values["sizes"][-1])
        ratio = infinite.slope(0.0) / (infinite.kernel(1.0) - infinite.kernel(0.0))
        wide = homogeneous_batchnorm(phi, values["sizes"][-1]).forward
        limits += [abs(wide.L - alpha), abs(wide.M - ratio)]
        measured = [size * (homogeneous_batchnorm(phi, size).forward.L - alpha) for size in values["sizes"]]
        # Richardson: B(λ_L − α) = k + O(1/B)
        first, last = values["sizes"][-2:]
        slope = (last * measured[-1] - first * measured[-2]) / (last - first)
        printed = 2 * alpha**3 - 4 * alpha**2 - alpha + ratio
        corrected.append(abs(slope - (ratio - 2 * alpha**2 - alpha)))
        shares.append(abs(slope - printed))
        series += [
            Series(f"α = {alpha:g}", values["sizes"], measured),
            Series(f"α = {alpha:g} (printed)", values["sizes"], [printed] * len(measured), role="paper"),
        ]
    numbers = {
        "largest_distance_from_limits": exact(max(limits)),
        "largest_error_of_printed_coefficient": exact(max(shares), error=1e-3),
        "largest_error_of_corrected_coefficient": exact(max(corrected), error=1e-3),
    }
    return present(numbers, series)


def measure_theorem_c11(values: Values, context: Context) -> Outcome:
    """Theorems C.8 and C.11: closed eigenvalues of gradients against quadrature, and the third printed form of λ_G."""
    off, third, parts = [], [], []
    for alpha, b in values["activations"]:
        odd = 2 * alpha - 1
        for size in values["sizes"]:
            case, rho, p = Case(alpha, b, size), -1 / (size - 1), (size - 1) / size
            top, low, slope = case.kernel(1.0), case.kernel(rho), case.slope(rho)
            direct = predicted(case).backward_eigenvalues
            closed = homogeneous_batchnorm(power(alpha, b), size).backward
            off.append(max(abs(getattr(closed, n) / getattr(direct, n) - 1) for n in "GLM"))
            inner = slope * (size - 3 + 2 * alpha) / (size - 1)
            below = odd * (size - 3) * (top - low)
            printed = (alpha**2 * ((size - 2) * top + odd * (top - low)) + inner * odd) / below
            third.append(abs(printed / direct.G - 1))
            # C.8 written out, and by theorem B.66
            common = (size - 3) * (size - 1) * (size - 1 + 2 * alpha)
            ratio = slope / (top - low)
            b_m = 2 * alpha**2 * size * ratio / common
            b_l = 2 * alpha**3 * (size - 2) / common + b_m / (size - 1)
            part = second_moment(alpha) * p ** (alpha - 1)
            g_m, g_l = part * slope, part / size * (alpha * (size - 2) * (top - low) + size / (size - 1) * slope)
            # μ = K (J(1) − J(ρ)), K = c_α ((B−1)/2)^α / P((B−1)/2, α)
            mu = second_moment(alpha) * ((size - 1) / 2) ** alpha / poch((size - 1) / 2, alpha) * (top - low)
            outer = size**alpha / poch((size - 3) / 2, alpha + 2) * 2 ** (-alpha - 2) / mu * 2 * alpha**2
            parts.append(float(max(abs(outer * g_m / b_m - 1), abs(outer * g_l / b_l - 1))))
    numbers = {
        "largest_deviation_of_first_form": exact(max(off), error=1e-7),
        "largest_deviation_of_third_form": exact(max(third), error=1e-7),
        "largest_deviation_between_forms_of_c8": exact(max(parts), error=1e-9),
    }
    return present({name: numbers[name] for name in values["shown"]})
