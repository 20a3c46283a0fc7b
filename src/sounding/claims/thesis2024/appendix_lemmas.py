"""Lemmas C.8 to C.21: isometry gaps, least eigenvalues and Jacobians of batch norm, on drawn batches."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import GROUPS, exact, worst
from sounding.claims.picture import Series
from sounding.claims.thesis2024.networks import draw_inputs
from sounding.claims.walk import draw_normals, unit_features, walk
from sounding.measures import isometry_gap
from sounding.weights import draw_orthogonal


def draw_near(width: int, count: int, *, generator: torch.Generator) -> torch.Tensor:
    """Batches (count, d, d) of unit features, from close to orthogonal to nearly dependent, samples as rows."""
    # in a random order, so that groups of cases hold all sizes
    size = 10 ** torch.linspace(-3, 1.5, count, dtype=torch.float64)[torch.randperm(count, generator=generator)]
    noise = draw_normals(generator, count, width, width)
    batch = torch.eye(width, dtype=torch.float64) + size[:, None, None] * noise / math.sqrt(width)
    unit: torch.Tensor = batch / torch.linalg.vector_norm(batch, dim=-2, keepdim=True)
    return unit


def gap_of(batch: torch.Tensor) -> torch.Tensor:
    """The isometry gap ψ of batches."""
    gap: torch.Tensor = isometry_gap(batch @ batch.mT)
    return gap


def turn(count: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Haar matrices (count, d, d) of unit columns."""
    drawn = draw_orthogonal((count, width, width), generator=generator, dtype=torch.float64, device="cpu")
    return drawn / math.sqrt(width)


def measure_lemmaC_8(values: Values, context: Context) -> Outcome:
    """The furthest eigenvalue that a gap of c/(16d) or c²/(16d) allows, where one stands out and the rest are equal."""
    shares: dict[str, list[float]] = {"printed": [], "corrected": []}
    for power, name in ((1, "printed"), (2, "corrected")):
        for c in values["levels"]:
            largest = 0.0
            for d in values["widths"]:
                for sign in (1.0, -1.0):
                    # one eigenvalue is 1 ± e, the others share what is left
                    low, high = 0.0, 0.999 if sign < 0 else float(d - 1)
                    for _ in range(200):  # bisection, to rounding
                        e = (low + high) / 2
                        gap = -(math.log1p(sign * e) + (d - 1) * math.log1p(-sign * e / (d - 1))) / d
                        low, high = (e, high) if gap <= c**power / (16 * d) else (low, e)
                    largest = max(largest, low)
            shares[name].append(largest / c)
    numbers = {f"largest_deviation_over_c_{name}": exact(max(part), error=1e-9) for name, part in shares.items()}
    series = [Series(name, values["levels"], part, role="theory") for name, part in shares.items()]
    return present(numbers, [*series, Series("1", values["levels"], [1.0] * len(values["levels"]), role="bound")])


def measure_lemmaC_9(values: Values, context: Context) -> Outcome:
    """The mean fall of the isometry gap over a layer with Haar weights, over the falls that the lemma promises."""
    generator, near, far = context.generator(), [], []
    for d in values["widths"]:
        for kind in ("isometric", "gaussian"):
            batch = draw_inputs(kind, d, values["inputs"], generator=generator)
            gap = gap_of(batch)
            after = torch.zeros_like(gap)
            for _ in range(values["draws"]):
                turns = turn(len(batch), d, generator)
                after += gap_of(unit_features(batch @ turns.mT)) / values["draws"]
            fall, small = gap - after, gap <= 1 / (16 * d)  # the lemma has one bound near isometry and one far from it
            near.append((fall / (gap / (2 * d**2)))[small])
            far.append((fall * 32 * d**3)[~small])
    numbers = {
        "smallest_fall_over_bound_near": worst(torch.cat(near), np.min),
        "smallest_fall_over_bound_far": worst(torch.cat(far), np.min),
    }
    return present(numbers)


def measure_lemmaC_11(values: Values, context: Context) -> Outcome:
    """The gradient norm of both losses in the logits, over the size of the logits."""
    generator = context.generator()
    norms: dict[str, list[float]] = {"cross_entropy": [], "mean_squared": []}
    for size in values["sizes"]:
        logits = size * draw_normals(generator, values["draws"], values["classes"])
        labels = torch.randint(values["classes"], (values["draws"],), generator=generator)
        logits.requires_grad_()
        entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        targets = torch.nn.functional.one_hot(labels, values["classes"]).double()
        square = (logits - targets).square().mean(1).sum()
        for name, loss in (("cross_entropy", entropy), ("mean_squared", square)):
            # losses are sums over samples, so rows are the gradients of each
            (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
            norms[name].append(float(gradient.norm(dim=1).max()))
    numbers = {
        "largest_gradient_of_cross_entropy": exact(max(norms["cross_entropy"])),
        "growth_of_mean_squared_with_logits": exact(norms["mean_squared"][-1] / norms["mean_squared"][0]),
    }
    return present(numbers, [Series(name.replace("_", " "), values["sizes"], part) for name, part in norms.items()])


def measure_jacobian(values: Values, context: Context) -> Outcome:
    """Lemmas C.13, C.16, C.17, C.20 and C.21: ‖J_BN‖, row norms and least eigenvalues of batches, over each bound."""
    generator = context.generator()
    found: dict[str, list[torch.Tensor]] = {}
    for d in values["widths"]:
        start = draw_near(d, values["draws"], generator=generator)
        batch = start @ turn(len(start), d, generator).mT  # H of the network: unit features, rotated, so its trace is d
        eigen = torch.linalg.eigvalsh(batch.mT @ batch)
        gap = -eigen.clamp_min(1e-300).log().mean(dim=-1)  # a singular batch has an infinite gap
        rows = torch.linalg.vector_norm(batch, dim=-2).min(dim=-1).values
        log_jacobian, least = -rows.log(), -eigen[:, 0].log()
        near = gap <= 1 / (16 * d)
        root = 2 * (d * gap).sqrt()  # the near bound of the lemmas
        parts = {
            "log_jacobian_over_far_bound": log_jacobian / (d * gap + 1),
            "log_jacobian_over_near_bound": (log_jacobian / root)[near],
            "jacobian_squared_times_least_eigenvalue": eigen[:, 0] / rows.square(),
            "least_eigenvalue_over_far_bound": least / (d * gap + 1),
            "least_eigenvalue_over_near_bound": (least / root)[near],
            "least_eigenvalue_over_least_row": eigen[:, 0] / rows.square(),
        }
        for name, part in parts.items():
            found.setdefault(name, []).append(part)
    numbers = {name: worst(torch.cat(found[name])) for name in values["shown"] if name in found}
    if "layer_over_norm" in values["shown"]:
        numbers["layer_over_norm"] = worst(_layer_jacobians(values["widths"][0], values["draws"] // 20, generator))
    return present(numbers)


def _layer_jacobians(d: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """‖∂X′/∂X‖ over ‖J_BN(H)‖ of a layer X′ = BN(XWᵀ) with Haar weights, by automatic differentiation."""

    def norm(h: torch.Tensor) -> torch.Tensor:
        unit: torch.Tensor = h / torch.linalg.vector_norm(h, dim=0)
        return unit

    def layer(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return norm(batch @ weight.T)

    shares = []
    for batch in draw_near(d, max(count, GROUPS), generator=generator):
        matrix = turn(1, d, generator)[0]
        whole = torch.func.jacrev(partial(layer, matrix))(batch).reshape(d * d, d * d)
        inner = torch.func.jacrev(norm)(batch @ matrix.T).reshape(d * d, d * d)
        shares.append(torch.linalg.matrix_norm(whole, 2) / torch.linalg.matrix_norm(inner, 2))
    return torch.stack(shares)


def measure_row_jacobian(values: Values, context: Context) -> Outcome:
    """Lemma C.18 and corollary C.19: the Jacobian of x/‖x‖ by differentiation, against formula and multiplicities."""
    generator, off, counted = context.generator(), [], []
    for d in values["widths"]:
        for _ in range(values["draws"]):
            x = draw_normals(generator, d)
            size = x.norm()
            found = torch.func.jacrev(lambda y: y / y.norm())(x)
            formula = torch.eye(d, dtype=torch.float64) / size - torch.outer(x, x) / size**3
            off.append((found - formula).abs().max())
            # the identity over ‖x‖ but for the direction x itself
            same = (torch.linalg.eigvalsh(found) - 1 / size).abs() < 1e-9
            counted.append((float(same.sum()), d))
    numbers = {
        "largest_deviation_from_formula": worst(torch.stack(off)),
        "multiplicity_over_d_squared_minus_1": exact(max(k / (d**2 - 1) for k, d in counted)),
        "multiplicity_over_d_minus_1": exact(min(k / (d - 1) for k, d in counted)),
    }
    return present(numbers)


def measure_lemmaC_14(values: Values, context: Context) -> Outcome:
    """The mean layer at which the isometry gap falls below 1/(16d), over 512 d⁴ψ²."""
    generator, shares = context.generator(), []
    for d in values["widths"]:
        # each input has `draws` networks of its own
        batch = draw_inputs("gaussian", d, values["inputs"], generator=generator).repeat_interleave(values["draws"], 0)
        first = gap_of(batch)
        hit = torch.zeros(len(batch), dtype=torch.float64)
        weights = (turn(len(batch), d, generator) for _ in range(values["depth"]))
        for state in walk(batch, weights, norm=unit_features):
            # layers above the threshold, counted: the stopping time of a gap that only falls
            hit += (gap_of(state) > 1 / (16 * d)).double()
        mean = hit.reshape(values["inputs"], values["draws"]).mean(1)
        shares.append(mean / (512 * d**4 * first[:: values["draws"]].square()))
    return present({"largest_stopping_time_over_bound": worst(torch.cat(shares))})
