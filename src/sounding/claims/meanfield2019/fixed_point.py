"""The batch-symmetric fixed point and its forward eigenvalues: Theorems 4, 5 and 6."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from scipy.special import gammaln

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.meanfield2019.batches import map_relu, settle
from sounding.claims.meanfield2019.transforms import draw_covariance, largest_deviation, normalized_batches, widest
from sounding.claims.number import DRAWN, Number, counted, estimate, exact, worst
from sounding.claims.picture import Series
from sounding.predict import batchnorm
from sounding.theory.covariance_map import center, laplace_covariance_map

NODES = 240  # of Gauss–Legendre on each smooth piece of an angle
SAME = 1e-4  # two covariances of unit size that differ by less are the same limit


def measure_fixed_point(values: Values, context: Context) -> Outcome:
    """The integrals (13) to (15) as they stand, beside sampled batches at a batch-symmetric covariance.

    Their error is how much they change from 160 to 240 nodes.
    """
    numbers, panels = {}, []
    worst = error = 0.0
    sizes, found = values["batch_sizes"], {}
    for place, name in enumerate(values["activations"]):
        rows, deviations = [], []
        for size in sizes:
            point = batchnorm(name, batch_size=size).fixed_point
            q, qc = spherical_integrals(name, size)
            coarse = spherical_integrals(name, size, nodes=160)
            error = max(error, abs(q - coarse[0]), abs(qc - coarse[1]))
            worst = max(worst, abs(q - point.variance), abs(qc - point.variance * point.correlation))
            # any batch-symmetric covariance is mapped to the fixed point in one layer
            x = normalized_batches(
                np.eye(size) + 0.5, samples=values["samples"], context=context, offset=100 * place + size
            )
            phi = resolve(name).torch()(x)
            own = phi.square().sum(1)
            samples = (own / size, (phi.sum(1).square() - own) / (size * (size - 1)))
            measured = np.array([float(sample.mean()) for sample in samples])
            stderr = np.array([float(sample.std()) / math.sqrt(len(sample)) for sample in samples])
            deviations.append(largest_deviation(np.array([q, qc]), measured, stderr))
            rows.append(((q, measured[0], stderr[0]), (qc, measured[1], stderr[1])))
        found[name] = np.array(rows)  # (batch sizes, variance or covariance, formula, mean and error)
        numbers[f"largest_deviation_{name}"] = widest(deviations)
    numbers["largest_difference_from_quadrature"] = exact(worst, error=error)
    for part in range(2):
        series = []
        for name, table in found.items():
            formula, mean, stderr = table[:, part].T
            series.append(Series(name, sizes, mean, error=DRAWN * stderr))
            series.append(Series(f"{name} (Theorem 4)", sizes, formula, role="theory"))
        panels.append(series)
    return present(numbers, *panels)


def measure_relu_point(values: Values, context: Context) -> Outcome:
    """Variance and correlation in wide random ReLU networks, and the limits of the map from different starts."""
    rows = []
    for place, size in enumerate(values["batch_sizes"]):
        state = settle("relu", size, values, context, offset=place)
        gram = (state @ state.mT / state.shape[-1]).double()
        variance = torch.diagonal(gram, dim1=-2, dim2=-1).mean(-1)
        covariance = (gram.sum((-2, -1)) - size * variance) / (size * (size - 1))
        q, c = variance.cpu().numpy(), (covariance / variance).cpu().numpy()
        root = math.sqrt(len(q))
        rows.append((size, q.mean(), q.std(ddof=1) / root, c.mean(), c.std(ddof=1) / root, relu_correlation(size)))
    sizes, q, dq, c, dc, theory = (np.array(column) for column in zip(*rows, strict=True))
    size = values["unique_at"]
    # ranks from B on, to nearly isotropic
    starts = [
        draw_covariance(size, context.generator(1000 + start), rank=size + 3 * (start % 12))
        for start in range(values["starts"])
    ]
    limits = torch.from_numpy(np.array(starts))
    for _ in range(values["layers"]):
        limits = map_relu(limits)
    exact_point = 0.5 * ((1 - relu_correlation(size)) * np.eye(size) + relu_correlation(size))
    distances = np.abs(limits.numpy() - exact_point).max(axis=(1, 2))
    at_q, at_c = int(np.abs(q - 0.5).argmax()), int(np.abs(c - theory).argmax())
    numbers = {
        "largest_deviation_variance": estimate(abs(q[at_q] - 0.5), dq[at_q], samples=values["runs"]),
        "largest_deviation_correlation": estimate(abs(c[at_c] - theory[at_c]), dc[at_c], samples=values["runs"]),
        **count_other_limits(distances),
    }
    return present(
        numbers,
        (
            Series("networks", sizes, q, error=DRAWN * dq),
            Series("networks (Theorem 5: ½)", sizes, 0 * q + 0.5, role="theory"),
        ),
        (
            Series("networks", sizes, c, error=DRAWN * dc),
            Series("networks (Theorem 5: J(−1/(B−1)))", sizes, theory, role="theory"),
        ),
    )


def count_other_limits(distances: Array) -> dict[str, Number]:
    """How many starts end elsewhere, their share among fresh ones, and the largest distance from the fixed point."""
    numbers = counted("starts_that_end_elsewhere", distances > SAME)
    return numbers | {"largest_distance_of_limits": worst(distances, dealt=True)}


def measure_relu_eigenvalues(values: Values, context: Context) -> Outcome:
    """Differences of the map at its fixed point in the directions G, L and M, beside Theorem 6 in both readings."""
    relu = resolve("relu")
    sizes = values["batch_sizes"]
    found: dict[str, list[float]] = {"G": [], "L": [], "M": []}
    for size in sizes:
        c = relu_correlation(size)
        point = 0.5 * ((1 - c) * np.eye(size) + c)
        weights = np.where(np.arange(size) % 2, -1.0, 1.0)
        weights -= weights.mean()  # L: diagonals that sum to 0
        pair = np.zeros((size, size))
        # zero rows, columns and diagonal: samples 0, 1 against 2, 3
        for i, j, sign in ((0, 2, 1.0), (1, 3, 1.0), (0, 3, -1.0), (1, 2, -1.0)):
            pair[i, j] = pair[j, i] = sign
        for part, direction in (("G", center(np.eye(size))), ("L", center(np.diag(weights))), ("M", pair)):
            step = values["step"]
            up, down = (laplace_covariance_map(relu, point + sign * step * direction).covariance for sign in (1, -1))
            moved = center(up - down) / (2 * step)  # a central difference
            found[part].append(float((moved * direction).sum() / (direction * direction).sum()))
    c, j0 = np.array([(relu_correlation(s), 1 - math.acos(-1 / (s - 1)) / math.pi) for s in sizes]).T
    size = np.array(sizes)
    both: dict[str, Array] = {}
    for reading in ("printed", "corrected"):
        # the scan loses 1/√π in front of Γ(3/2); Γ((B+1)/2)/Γ((B+3)/2) = 2/(B+1)
        front = 0.5 * 0.5 * 2 / (size + 1) / (0.5 * c if reading == "printed" else 0.5 * (1 - c))
        both[f"M_{reading}"] = front * size * j0
        both[f"L_{reading}"] = front * ((size - 2) * (1 - c) + size / (size - 1) * j0)
    numbers = {"largest_G": exact(float(np.abs(found["G"]).max()), error=1e-6)}
    for name, line in both.items():
        ratio = np.abs(line / np.array(found[name[0]]) - 1)
        # of the printed reading the closest, of the corrected one the farthest batch size
        value = ratio.min() if name.endswith("printed") else ratio.max()
        numbers[f"relative_error_{name}"] = exact(float(value), error=1e-6)
    numbers["largest_eigenvalue"] = exact(max(found["L"] + found["M"]), error=1e-6)
    series = []
    for part in "LM":
        series.append(Series(f"λ_{part}", sizes, found[part]))
        series.append(Series(f"λ_{part} (with μ = q(1 − c))", sizes, both[f"{part}_corrected"], role="theory"))
        series.append(Series(f"λ_{part} (as printed, v = qc)", sizes, both[f"{part}_printed"], role="paper"))
    return present(numbers, series)


def relu_correlation(size: float) -> float:
    """J(−1/(B−1)), J(c) = (√(1−c²) + (π − arccos c)c)/π."""
    c = -1.0 / (size - 1.0)
    return (math.sqrt(1 - c * c) + (math.pi - math.acos(c)) * c) / math.pi


def spherical_integrals(activation: str, size: int, *, nodes: int = NODES) -> tuple[float, float]:
    """q and qc by (13) to (15), Gauss–Legendre in both angles; 1/√π and 1/(2π) as the scan loses them.

    The angles are cut where an argument of φ meets one of its kinks: the outer one also where the inner kink reaches
    an end, so that what is integrated over each part is smooth.
    """
    phi = resolve(activation)
    near, far = 1 / math.sqrt(size - 1), math.sqrt(size * (size - 2) / (size - 1))
    cuts = [0.0, math.pi]
    for kink in phi.kinks:
        cuts.append(_angle(-kink * near))
        # near·cosθ ± far·sinθ = √(B−1)·cos(θ ∓ atan(far/near)) = kink
        cuts += [
            _angle(kink * near) * turn + math.copysign(math.atan2(far, near), side)
            for turn in (-1, 1)
            for side in (-1, 1)
        ]
    theta, weight = pieces(np.unique(np.clip(cuts, 0.0, math.pi)), nodes=nodes)
    first = phi(-math.sqrt(size - 1) * np.cos(theta))
    front = math.exp(gammaln((size - 1) / 2) - gammaln((size - 2) / 2)) / math.sqrt(math.pi)
    q = front * float(weight @ (np.sin(theta) ** (size - 3) * first**2))
    rise, swing = near * np.cos(theta), far * np.sin(theta)
    edges = [np.arccos(np.clip((rise - kink) / swing, -1.0, 1.0)) for kink in phi.kinks]
    angle, share = pieces(np.sort([0 * theta, *edges, 0 * theta + math.pi], axis=0), nodes=nodes)
    second = phi(rise - swing * np.cos(angle))
    inner = (second * share * np.sin(angle) ** (size - 4)).sum(axis=0)
    qc = (size - 3) / (2 * math.pi) * float(weight @ (np.sin(theta) ** (size - 3) * first * inner))
    return q, qc


def pieces(edges: Array, *, nodes: int) -> tuple[Array, Array]:
    """Gauss–Legendre nodes and weights on each interval between consecutive rows of `edges`, one below the other."""
    t, w = np.polynomial.legendre.leggauss(nodes)
    shape = (nodes, *(1,) * (edges.ndim - 1))
    halves = [((high + low) / 2, (high - low) / 2) for low, high in pairwise(edges)]
    places = [middle + half * t.reshape(shape) for middle, half in halves]
    return np.concatenate(places), np.concatenate([half * w.reshape(shape) for _, half in halves])


def _angle(cosine: float) -> float:
    return math.acos(max(-1.0, min(1.0, cosine)))
