"""Lemmas of appendix C and chapters 3 to 5 that are statements of their own, on drawn matrices and by quadrature."""

from __future__ import annotations

import math

import numpy as np
import torch

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import DRAWN, Number, exact, fraction_of, mean_of, slope_of, worst
from sounding.claims.picture import Series, points_of
from sounding.claims.walk import batch_norm, draw_normals, unit_matrix, walk, walk_in_law
from sounding.measures import of_gram, orthogonality_gap
from sounding.theory.integrals.hermite import expand, hermite_values
from sounding.theory.kernel import kappa, normalized

NODES = 80  # Gauss–Hermite nodes a side: exact for the polynomials of Lemma 5.6, and to 1e-13 for smooth activations


def measure_lemma4_2(values: Values, context: Context) -> Outcome:
    """The isometry of drawn positive matrices, of multiples of the identity and of degenerate ones."""
    generator, found, moved = context.generator(), [], []
    for size in values["sizes"]:
        factor = draw_normals(generator, values["draws"], size, size)
        gram = factor @ factor.mT
        found.append(of_gram.isometry(gram))
        moved.append((of_gram.isometry(7.3 * gram) - found[-1]).abs())  # by any factor but a power of 2, which is exact
    every, unit = torch.cat(found), torch.eye(3, dtype=torch.float64)
    numbers = {
        "largest_change_by_scaling": worst(torch.cat(moved)),
        "smallest_isometry_of_positive_matrices": worst(every, np.min),
        "largest_isometry": worst(every),
        "isometry_of_the_identity": exact(float(of_gram.isometry(unit)), error=1e-12),
        "isometry_of_twice_the_identity": exact(float(of_gram.isometry(2 * unit)), error=1e-12),
        "isometry_of_a_degenerate_matrix": exact(float(of_gram.isometry(torch.ones_like(unit)))),
    }
    return present(numbers)


def _hermite(x: Array, count: int) -> Array:
    """he_0 to he_{count−1} at x, (count, *x.shape)."""
    return hermite_values(x, 0, count) * np.exp(0.25 * x**2)  # they come with the root of the density


def _gauss() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum()  # of the standard normal law


def measure_lemma5_6(values: Values, context: Context) -> Outcome:
    """E he_n(X) he_k(Y) by quadrature against ρⁿδ_nk, over degrees and correlations."""
    z, w = _gauss()
    count, curves = values["degrees"], []
    for rho in values["correlations"]:
        y = rho * z[:, None] + math.sqrt(1 - rho**2) * z[None, :]  # a pair of normals of correlation ρ
        first = _hermite(z, count)
        second = _hermite(y, count)
        found = np.einsum("a,na,kab,b->nk", w, first, second, w)
        curves.append(float(np.abs(found - np.diag(rho ** np.arange(count))).max()))
    numbers = {"largest_deviation": exact(max(curves), error=1e-11)}
    return present(numbers, [Series("by quadrature", values["correlations"], curves)], highest=count - 1)


def measure_corollary5_7(values: Values, context: Context) -> Outcome:
    """The series Σ c_k² ρᵏ against E φ(X)φ(Y), which is meant, and against E φ(X)φ(X), which is printed."""
    printed, meant = [], []
    for name in values["activations"]:
        neuron = normalized(name)
        found = expand(neuron.activation, count=200, tolerance=1e-9).coefficients
        coefficients = np.array(found) / neuron.std
        for rho in values["correlations"]:
            series = float(np.sum(np.square(coefficients) * rho ** np.arange(len(coefficients))))
            meant.append(abs(series - kappa(neuron, rho).value))
            printed.append(abs(series - kappa(neuron, 1.0).value))
    numbers = {
        "largest_deviation_from_phi_x_phi_x": exact(max(printed), error=1e-6),
        "largest_deviation_from_phi_x_phi_y": exact(max(meant), error=1e-6),
    }
    return present(numbers)


def measure_table5_2(values: Values, context: Context) -> Outcome:
    """Each row of the table for several activations: what φ, its coefficients and its kernel map say must agree."""
    z, w = _gauss()
    agree, linear = [], []
    for name in values["activations"]:
        phi = resolve(name)
        f = np.asarray(phi(z), dtype=np.float64)
        c = _hermite(z, values["degrees"]) @ (w * f)
        mean, square = float(w @ f), float(w @ f**2)
        zero = float(np.einsum("a,a,b,b->", w, f, w, f))  # κ(0), from independent samples
        agree.append(max(abs(mean - c[0]), abs(zero - c[0] ** 2), abs(square - np.sum(c**2))))
        beyond = float(np.sum(c[2:] ** 2))
        # where κ is a straight line, its middle value is the mean of those at 0 and 1
        bent = kappa(normalized(name), 0.5).value - 0.5 * (kappa(normalized(name), 0.0).value + 1.0)
        linear.append((beyond > 1e-9) == (abs(bent) > 1e-9))
    numbers = {
        "largest_disagreement": exact(max(agree), error=1e-9),
        "share_that_agree_on_linearity": fraction_of(sum(linear), len(linear)),
        "activations_that_disagree_on_linearity": exact(len(linear) - sum(linear)),
    }
    return present(numbers)


def follow_correlation(law: str, width: int, values: Values, generator: torch.Generator) -> Array:
    """(runs, layers) of ⟨h(x), h(y)⟩/d of two inputs of unit mean square and correlation `start`, E φ² = 1."""
    neuron = normalized(values["activation"])
    phi, runs, start = neuron.activation.torch(), values["runs"], values["start"]
    noise = draw_normals(generator, runs, 2, width)
    # two orthogonal unit vectors, by Gram and Schmidt
    first = noise[:, 0] / torch.linalg.vector_norm(noise[:, 0], dim=-1, keepdim=True)
    other = noise[:, 1] - (noise[:, 1] * first).sum(-1, keepdim=True) * first
    other = other / torch.linalg.vector_norm(other, dim=-1, keepdim=True)
    pair = torch.stack([first, start * first + math.sqrt(1 - start**2) * other], dim=1) * math.sqrt(width)
    drawn = (_draw_weights(law, runs, width, generator) for _ in range(values["depth"]))
    states = walk(pair, drawn, activation=lambda x: (phi(x) - neuron.mean) / neuron.std)
    return torch.stack([(h[:, 0] * h[:, 1]).mean(-1) for h in states], dim=1).numpy()


def measure_kernel_sequence(values: Values, context: Context) -> Outcome:
    """Propositions 5.1 and 5.2: the distance of finite networks from the kernel sequence, by width and law."""
    neuron, rho, path = normalized(values["activation"]), values["start"], []
    for _ in range(values["depth"]):
        rho = kappa(neuron, rho).value
        path.append(rho)
    numbers: dict[str, Number] = {}
    series = []
    for place, law in enumerate(values["laws"]):
        squares = []
        for index, width in enumerate(values["widths"]):
            generator = context.generator(100 * place + index)
            found = follow_correlation(law, width, values, generator)
            squares.append(np.square(found - np.array(path)).mean(axis=1))
        errors = [mean_of(part) for part in squares]
        logs = [math.log(number.value) / 2 for number in errors]  # of the root
        spread = [part.std(ddof=1) / math.sqrt(len(part)) / part.mean() / 2 for part in squares]
        numbers[f"exponent_{law}"] = slope_of(np.log(values["widths"]), logs, stderr=spread, straight=False)
        numbers[f"squared_error_at_widest_{law}"] = errors[-1]
        series.append(points_of(law, values["widths"], errors))
    return present(numbers, series)


def _draw_weights(law: str, runs: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """(runs, d, d) weights of mean 0 and variance 1/d: Gaussian, uniform, or ±1 with probability 1/d and else 0."""
    if law == "gaussian":
        return draw_normals(generator, runs, width, width) / math.sqrt(width)
    drawn = torch.rand(runs, width, width, generator=generator, dtype=torch.float64)
    if law == "uniform":
        return (drawn - 0.5) * math.sqrt(12 / width)  # a uniform law on a unit interval has the variance 1/12
    return (width * drawn < 0.5).double() - ((width * drawn >= 0.5) & (width * drawn < 1.0)).double()


def measure_lemmaA_8(values: Values, context: Context) -> Outcome:
    """The gap of a product of Gaussian matrices on its way to √((n−1)/n), layer by layer, and the rate."""
    width, runs, depth = values["width"], values["runs"], values["depth"]
    generator = context.generator()
    # the product of the matrices itself
    start = torch.eye(width, dtype=torch.float64).expand(runs, width, width).clone()
    weights = (draw_normals(generator, runs, width, width) for _ in range(depth))
    limit = math.sqrt((width - 1) / width)
    left = [(orthogonality_gap(h) - limit).abs().numpy() for h in walk(start, weights, norm=unit_matrix)]
    logs = np.log(np.maximum(np.stack(left, axis=1), 1e-300))
    half = depth // 2
    rates = (logs[:, -1] - logs[:, half]) / (depth - 1 - half) / 2  # the gap falls with the square of σ₂/σ₁
    numbers = {"half_rate": mean_of(rates), "distance_at_the_end": mean_of(np.exp(logs[:, -1]))}
    layers = np.arange(1, depth + 1)
    return present(numbers, (points_of("measured", layers[::4], [mean_of(np.exp(c)) for c in logs.T[::4]]),))


def measure_lemma3_3(values: Values, context: Context) -> Outcome:
    """A lower bound of the total variation between μ̂ and T(μ̂) by one event, over widths, beside the printed rate."""
    n, draws, phi = values["batch_size"], values["draws"], resolve(values["activation"]).torch()

    def activate(batch: torch.Tensor) -> torch.Tensor:
        return phi(batch_norm(batch.mT).mT)  # features are rows here, as in chapter 3

    # G* of Gram matrices after the activation: batch norm takes a batch of equal correlations there in one step
    active = activate(draw_normals(context.generator(), 2_000_000, n))
    square = float(active.square().mean())  # diagonal and off-diagonal entries, by symmetry of the samples
    product = float(((active.sum(-1) ** 2 - active.square().sum(-1)) / (n * (n - 1))).mean())
    root = torch.linalg.cholesky(torch.from_numpy(np.full((n, n), product) + (square - product) * np.eye(n)))
    series, logs, errors = [], [], []
    for index, width in enumerate(values["widths"]):
        generator = context.generator(10 + index)
        entries: list[list[torch.Tensor]] = [[], []]
        for _ in range(values["parts"]):
            normal = draw_normals(generator, 2, draws, width, n)
            first = normal[0] @ root.mT
            active = activate(first)
            inner = torch.linalg.cholesky(active.mT @ active / width)
            for place, batch in enumerate((first, normal[1] @ inner.mT)):
                entries[place].append((batch[..., 0] * batch[..., 1]).mean(-1))
        before, after = (torch.cat(part).numpy() for part in entries)
        reach = 1.5 * before.std()  # any event bounds the distance from below; this one tells the spreads apart
        outside = [np.abs(part - before.mean()) > reach for part in (before, after)]
        gap = float(outside[1].mean() - outside[0].mean())
        error = math.sqrt(sum(float(part.var()) / len(part) for part in outside))
        series.append((gap, error))
        logs.append(math.log(max(gap, 1e-6)))
        errors.append(error / max(gap, 1e-6))
    widths = values["widths"]
    numbers = {
        f"distance_at_least_{d}": Number(g, g - DRAWN * e, g + DRAWN * e, draws * values["parts"])
        for d, (g, e) in zip(widths, series, strict=True)
    }
    numbers["exponent_in_width"] = slope_of(np.log(widths), logs, stderr=errors, straight=False)
    bound = np.log(np.array(widths) / n) / np.array(widths)
    shown = [
        points_of("lower bound of the distance, measured", widths, list(numbers.values())[:-1]),
        Series(
            "rate ln(d/n)/d of the lemma, scaled to the first", widths, series[0][0] * bound / bound[0], role="paper"
        ),
    ]
    return present(numbers, shown)


def measure_figure2_3(values: Values, context: Context) -> Outcome:
    """Whether the least singular value stays above a tenth of its start for every layer and run, over (n, d)."""
    kept: dict[str, list[bool]] = {"line": [], "above": []}
    points: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    cells = [("line", n, round((n - 28) ** 1.8)) for n in values["line"]] + [
        ("above", n, round(values["factor"] * n**2)) for n in values["above"]
    ]
    for index, (name, n, d) in context.each(cells):
        generator = context.generator(index)
        start = torch.randn(values["runs"], n, d, generator=generator)
        walked = enumerate(walk_in_law(start, depth=values["depth"], generator=generator, centring=False))
        eigen = [torch.linalg.eigvalsh(c.gram())[:, 0] / d for layer, c in walked if layer % values["every"] == 0]
        least = torch.stack(eigen).clamp_min(0).sqrt()
        holds = bool((least >= 0.1 * least[0]).all())  # A₁(0.1α₀) of the chapter
        kept[name].append(holds)
        points[holds].append((n, d))
    numbers = {
        "share_of_the_line_that_holds": exact(float(np.mean(kept["line"]))),
        "share_above_that_holds": exact(float(np.mean(kept["above"]))),
    }
    ns = np.arange(30, 1 + max(n for _, n, _ in cells))
    series = [
        Series("holds in all runs" if ok else "fails in a run", [p[0] for p in rows], [p[1] for p in rows])
        for ok, rows in points.items()
        if rows
    ]
    series.append(Series("d = (n − 28)^1.8 (the paper's line)", ns, (ns - 28.0) ** 1.8, role="paper"))
    return present(numbers, series)
