"""The batches of random networks: figure 1, whose fixed point attracts, and what two batches know of each other."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.chain import Simulation, simulate
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import (
    DRAWN,
    Number,
    estimate,
    exact,
    farthest_ratio,
    fraction_of,
    jackknife,
    mean_of,
    scaled,
    student,
)
from sounding.claims.picture import Map, Panel, Series, level, mean_over, points_of
from sounding.claims.share import share
from sounding.claims.walk import batch_norm, draw_normals, walk, walk_in_law
from sounding.predict import batchnorm, bsb2_transition, simulate_broken_state

# in ln s the integrand falls as s to the left and as s^(−(B−1)/2) to the right, and is analytic in a strip: the cut
# ends and the step leave some 1e-7
LOWEST, STEP = -16.0, 0.5


def map_relu(covariances: torch.Tensor) -> torch.Tensor:
    """V(Σ) of each of (starts, B, B), float64: Theorem 2 at α = 1, the trapezoid rule in ln s.

    B ∫ ds V_φ(S(I + 2sS)⁻¹)/√det(I + 2sS), S = GΣG, V_φ the Gaussian map of ReLU with the kernel
    (√(1 − c²) + (π − arccos c)c)/(2π). `theory.covariance_map` has the same for one
    covariance, of full or low rank, to rounding.
    """
    size = covariances.shape[-1]
    rows = covariances.mean(-1, keepdim=True)
    values, vectors = torch.linalg.eigh(covariances - rows - rows.mT + rows.mean(-2, keepdim=True))
    # the constant vector has no variance; what rounding leaves of it must not become negative
    values = (values / values.mean(-1, keepdim=True)).clamp_min(1e-14)
    highest = 32.0 / (size - 1) - math.log(float(values[:, 1:].min()))
    total = torch.zeros_like(covariances)
    for log in np.arange(LOWEST - math.log(size * float(values.max())), highest, STEP):
        shrunk = values / (1 + 2 * math.exp(log) * values)
        weight = torch.exp(log - 0.5 * torch.log1p(2 * math.exp(log) * values).sum(-1))
        gaussian = (vectors * shrunk[:, None]) @ vectors.mT
        std = torch.diagonal(gaussian, dim1=-2, dim2=-1).sqrt()
        outer = std[:, :, None] * std[:, None, :]
        c = (gaussian / outer).clamp(-1.0, 1.0)
        kernel = torch.sqrt(1 - c * c) + (math.pi - torch.acos(c)) * c
        total += weight[:, None, None] * outer * kernel
    return total * (STEP * size / (2 * math.pi))


def spread_paths(size: int, *, sigma: float, starts: int, layers: int, context: Context, offset: int) -> Array:
    """Standard deviation over mean of the samples' variances, (starts, layers + 1).

    A start has uncorrelated samples whose variances are log-normal, exp(σ·normal).
    """
    normals = draw_normals(context.generator(offset), starts, size)
    covariances = torch.diag_embed(torch.exp(sigma * normals)).to(context.device)
    path = []
    for layer in range(layers + 1):
        own = torch.diagonal(covariances, dim1=-2, dim2=-1)
        path.append(own.std(-1) / own.mean(-1))
        if layer < layers:
            covariances = map_relu(covariances)
    return np.asarray(torch.stack(path, dim=1).cpu().numpy())


NAMED = ["relu", "leaky_relu:0.1", "tanh", "sigmoid"]
COTANGENTS = 4  # random ones of a network, averaged: drawing the network costs more than pulling one back
OTHERS = ["gelu", "silu", "softplus", "elu", "selu", "erf"]


def measure_scope(values: Values, context: Context) -> Outcome:
    """The largest forward eigenvalue over batch sizes, and how unequal the samples of wide deep networks become."""
    sizes = values["batch_sizes"]
    largest = {}
    for name in NAMED + OTHERS:
        found = [batchnorm(name, batch_size=size).forward_eigenvalues for size in sizes]
        largest[name] = [max(eigenvalues.L, eigenvalues.M) for eigenvalues in found]
    crossing = next(size for size in range(4, 200) if batchnorm("gelu", batch_size=size).forward_eigenvalues.L > 1)
    small, large = values["small"], values["large"]
    cases = (("relu", small), ("relu", large), ("gelu", small), ("gelu", large))
    uneven: dict[tuple[str, int], Array] = {}  # standard deviation over mean of the samples' variances, (runs, layers)
    for name, size in cases:
        own = [state.square().mean(-1) for state in follow_states(name, size, values, context, offset=size)]
        ratios = torch.stack([layer.std(-1) / layer.mean(-1) for layer in own], dim=1)
        uneven[name, size] = ratios.double().cpu().numpy()
    far, near, starts = values["field_sigma_far"], values["field_sigma_near"], values["field_starts"]
    field, kinds = {}, ((small, far, starts), (large, far, starts), (large, near, starts // 2))
    for place, (size, sigma, count) in enumerate(kinds):
        shape: dict[str, Any] = {"starts": count, "layers": values["field_layers"], "offset": 1000 + place}
        field[size, sigma] = spread_paths(size, sigma=sigma, context=context, **shape)
    left = {case: paths[:, -1] / paths[:, 0] for case, paths in field.items()}
    numbers = {
        "largest_eigenvalue_used_in_practice": exact(max(max(rows) for rows in largest.values()), error=1e-6),
        "largest_eigenvalue_named": exact(max(max(largest[name]) for name in NAMED), error=1e-6),
        "gelu_repels_from_batch_size": exact(crossing),
        "field_spread_left_relu_small_batch": mean_of(left[small, far]),
        "field_spread_left_relu_large_batch": mean_of(left[large, far]),
        "field_spread_left_relu_near": mean_of(left[large, near]),
        "share_of_starts_that_leave": fraction_of(int((left[large, far] > 1).sum()), starts),
        "field_spread_relu_large_batch": mean_of(field[large, far][:, -1]),
    }
    for name, size in cases:
        which = "small" if size == small else "large"
        numbers[f"spread_{name}_{which}_batch"] = mean_of(uneven[name, size][:, -values["depth"] // 5 :].mean(1))
    lines = [Series(name, sizes, rows, role="theory") for name, rows in largest.items() if name in NAMED + OTHERS[:3]]
    layers = np.arange(1, values["depth"] + 1)
    shown = layers % max(1, values["depth"] // 15) == 0
    paths = [mean_over(f"{name}, B = {size}", layers[shown], path[:, shown]) for (name, size), path in uneven.items()]
    reached = np.arange(0, values["field_layers"] + 1, max(1, values["field_layers"] // 20))
    paths += [
        Series(f"relu, B = {size} (infinite width, from {sigma:g})", reached, path.mean(0)[reached], role="theory")
        for (size, sigma), path in field.items()
    ]
    return present(numbers, (*lines, level("1", sizes, 1)), paths)


@share("activations", "batch_sizes", "window")
def pair_of_batches(
    values: Values, context: Context, name: str, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two batches through the same random networks, each normalized by itself; sample a of one is like a of the other.

    Per run and layer: the mean covariance of samples of different batches; how much larger it is for the alike ones;
    and the same of the gradients, pulled back from equal cotangents, layer 1 first.
    """
    phi = resolve(name).torch()
    width, depth, runs, overlap = (values[key] for key in ("width", "depth", "runs", "overlap"))
    found: list[list[torch.Tensor]] = [[], [], []]
    for run in range(runs):
        place = context.place(run)
        first, other = torch.randn(2, size, width, **place)
        start = torch.stack([first, overlap * first + math.sqrt(1 - overlap**2) * other]).requires_grad_()
        inner, covariance, alike = list[torch.Tensor](), [], []
        weights = (torch.randn(width, width, **place) / math.sqrt(width) for _ in range(depth))
        for state in walk(start, weights, norm=batch_norm, activation=phi, products=inner):
            block = (state[0] @ state[1].T / width).detach().double()
            covariance.append(block.mean())
            alike.append((block.trace() - block.sum() / size) / (size - 1))  # diagonal minus off-diagonal mean
        pulled = torch.zeros(depth, dtype=torch.float64, device=context.device)
        for _ in range(COTANGENTS):
            cotangent = torch.randn(size, width, **place).expand(2, size, width)
            gradients = torch.autograd.grad(state, inner, cotangent, retain_graph=True)
            # between the batches, tr Π; rows of a gradient before batch norm sum to 0
            pulled += torch.stack([(g[0].double() * g[1].double()).sum() for g in gradients])
        for rows, row in zip(found, (torch.stack(covariance), torch.stack(alike), pulled), strict=True):
            rows.append(row)
    covariances, likeness, gradient = (torch.stack(rows).cpu().numpy() for rows in found)
    return covariances, likeness, gradient


def measure_cross_limit(values: Values, context: Context) -> Outcome:
    """The covariance of samples of different batches deep in the network, beside (E φ(x₁))²."""
    numbers, series = {}, []
    for name in values["activations"]:
        measured, theory = [], []
        for size in values["batch_sizes"]:
            covariances, _, _ = pair_of_batches(values, context, name, size)
            measured.append(mean_of(covariances[:, values["depth"] // 2 :].mean(1)))
            theory.append(batchnorm(name, batch_size=size).cross_batch.covariance)
        numbers[f"covariance_over_theory_{name}"] = farthest_ratio(measured, theory)
        series.append(points_of(name, values["batch_sizes"], measured))
        series.append(Series(f"{name} (E φ)²", values["batch_sizes"], theory, role="theory"))
    sizes = values["batch_sizes"]
    apart = max(abs(_relu_cross(size) - batchnorm("relu", batch_size=size).cross_batch.covariance) for size in sizes)
    numbers["closed_form_minus_theory"] = exact(apart, error=1e-10)
    numbers["limit_minus_claim"] = exact(_relu_cross(10**7) - 1 / (2 * math.pi), error=1e-8)
    return present(numbers, series)


def _relu_cross(size: float) -> float:
    """(B − 1)/(4π)·[Γ((B−1)/2)/Γ(B/2)]²."""
    return (size - 1) / (4 * math.pi) * math.exp(2 * (math.lgamma((size - 1) / 2) - math.lgamma(size / 2)))


def measure_cross_rate(values: Values, context: Context) -> Outcome:
    """How fast likeness of two batches is lost either way, beside the eigenvalue of theorem F.1."""
    numbers, panels = {}, []
    pairs = product(NAMED + OTHERS, (5, 8, 16, 64, 256))
    largest = max(batchnorm(name, batch_size=size).cross_batch.eigenvalue for name, size in pairs)
    numbers["largest_eigenvalue"] = exact(largest, error=1e-6)
    for name in values["activations"]:
        size = values["batch_sizes"][-1]
        _, likeness, pulled = pair_of_batches(values, context, name, size)
        eigenvalue = batchnorm(name, batch_size=size).cross_batch.eigenvalue
        depth, (skip, count) = values["depth"], values["window"]
        forward = likeness[:, skip : skip + count]
        backward = pulled[:, ::-1][:, skip : skip + count]
        for way, rows in (("forward", forward), ("backward", backward)):
            rate = partial(_rate_over, unit=eigenvalue, steps=count - 1)
            numbers[f"{way}_rate_over_theory_{name}"] = jackknife(rate, rows)
        layers = np.arange(1, depth + 1)
        line = eigenvalue ** (layers - 1.0)
        series = (
            Series("activations", layers, np.abs(likeness.mean(0) / likeness.mean(0)[0])),
            Series("gradients", layers, np.abs(pulled.mean(0)[::-1] / pulled.mean(0)[-1])),
            Series(f"activations (eigenvalue {eigenvalue:.3f})", layers, line, role="theory"),
        )
        panels.append(Panel(y_label=f"likeness of two batches, {name}", series=series))
    return present(numbers, *panels, size=size)


def _rate_over(rows: np.ndarray, *, unit: float, steps: int) -> float:
    """The rate (mean last/mean first)^(1/steps) over runs, in units of `unit`."""
    ratio = float(rows[:, -1].mean() / rows[:, 0].mean())
    return math.copysign(abs(ratio) ** (1 / steps), ratio) / unit


def follow_states(
    activation: str, size: int, shape: Values, context: Context, *, offset: int
) -> Iterator[torch.Tensor]:
    """The states (runs, B, width) after each layer φ(BN(HWᵀ)) from Gaussian inputs; `shape` is width, depth, runs."""
    place = context.place(offset)
    start = torch.randn(shape["runs"], size, shape["width"], **place)
    walked = walk_in_law(start, depth=shape["depth"], generator=place["generator"], activation=activation)
    next(walked)  # the input
    for chains in walked:
        yield chains.state


def settle(activation: str, size: int, shape: Values, context: Context, *, offset: int) -> torch.Tensor:
    """The last of `follow_states`."""
    return deque(follow_states(activation, size, shape, context, offset=offset), maxlen=1)[0]


@share()
def pull_gradients(shape: Values, context: Context, activation: str, size: int, offset: int) -> Simulation:
    """Gradients through random networks of a width and depth and back, with their profile, in so many runs."""
    options: dict[str, Any] = {"backward": True, "profile": True, "measures": ("mean_cosine",), **shape}
    options |= {"device": context.device, "generator": context.generator(offset)}
    return simulate(activation=activation, batch_size=size, **options)


def measure_eigenvalues(values: Values, context: Context) -> Outcome:
    """λ_G and λ_L of one backward layer, measured in networks at their fixed point."""
    sizes = values["batch_sizes"]
    measured: dict[str, list[Number]] = {"G": [], "L": []}
    for place, size in enumerate(sizes):
        whole, uneven = _pull_back_parts(size, values, context, offset=10 * place)
        measured["G"].append(mean_of(whole))
        measured["L"].append(mean_of(uneven))
    numbers: dict[str, Number] = {}
    series = []
    for part, found in measured.items():
        predicted = [batchnorm("relu", batch_size=size).backward_eigenvalues for size in sizes]
        theory = [float(getattr(eigenvalues, part)) for eigenvalues in predicted]
        ratios = [scaled(number, 1 / unit) for number, unit in zip(found, theory, strict=True)]
        half = np.array([ratio.high - ratio.value for ratio in ratios]) / 2.5758  # back to standard errors
        mean = float(np.mean([ratio.value for ratio in ratios]))
        numbers |= {
            f"{part}_over_theory_at_smallest": ratios[0],
            f"{part}_over_theory_at_largest": ratios[-1],
            f"{part}_over_theory_mean": estimate(mean, float(np.sqrt(np.sum(half**2))) / len(ratios)),
        }
        series.append(points_of(f"λ_{part}", sizes, found))
        series.append(Series(f"λ_{part} (theory)", sizes, theory, role="theory"))
    return present(numbers, series)


def _pull_back_parts(size: int, values: Values, context: Context, *, offset: int) -> tuple[Any, Any]:
    """λ_G and λ_L of each network: how the parts G and L of Π change over one layer.

    The cotangents at the pre-activations of a layer are centred normals, of larger variance for every second sample;
    Π is averaged over neurons, before and after.
    """
    width, runs = values["width"], values["runs"]
    place = context.place(offset + 1)
    signs = torch.where(torch.arange(size, device=context.device) % 2 == 0, 1.0, -1.0)
    signs = signs - signs.mean()  # of odd sizes too the direction sums to 0
    whole, uneven = [], []
    # networks whose weights fit the memory together
    chunk = max(1, min(runs, 20_000_000 // width**2 if context.device == "cpu" else 200_000_000 // width**2))
    for first in range(0, runs, chunk):
        count = min(chunk, runs - first)
        shape = {"width": width, "depth": values["depth"], "runs": count}
        state = settle("relu", size, shape, context, offset=offset + 7 * first)
        weight = torch.randn(count, width, width, **place) / math.sqrt(width)
        before = torch.bmm(state, weight.mT).requires_grad_()
        output = torch.relu(batch_norm(before))
        # of small odd sizes the shifted signs would make a variance negative
        after = torch.randn(count, size, width, **place) * (1 + 0.8 * signs).clamp_min(0.05).sqrt()[:, None]
        after = after - after.mean(1, keepdim=True)  # gradients at h sum to 0 over a batch
        following = torch.randn(count, width, width, **place) / math.sqrt(width)
        (pulled,) = torch.autograd.grad(output, before, torch.bmm(after, following))
        whole.append(pulled.double().square().sum((1, 2)) / after.double().square().sum((1, 2)))
        uneven.append(_part_l(pulled, signs) / _part_l(after, signs))
    return torch.cat(whole).cpu().numpy(), torch.cat(uneven).cpu().numpy()


def _part_l(rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """⟨Π, G diag(signs) G⟩: rows sum to 0, so the signed sum of squares."""
    return (rows.double().square().sum(2) * signs.double()).sum(1)


def measure_gradient_norms(values: Values, context: Context) -> Outcome:
    """ln of the squared gradient norm layer by layer, and its slope against ln λ_G."""
    numbers, series = {}, []
    depth = values["depth"]
    for size in values["batch_sizes"]:
        found = pull_gradients(pick(values, "width depth runs"), context, "relu", size, size)
        theory = math.log(batchnorm("relu", batch_size=size).gradient_growth)
        growth, rate = found.gradients["growth"], found.gradients["log_rate"]
        # the squared norm has twice the rate of the norm
        half = student(values["runs"] - 1) * 2 * (rate.stderr or math.nan)
        numbers[f"slope_over_theory_B{size}"] = exact(math.log(growth.value) / theory, error=half / theory)
        numbers["slope_over_theory_largest_batch"] = numbers[f"slope_over_theory_B{size}"]
        rows = found.profile.series("gradient_log_norm")
        shown = rows.layer % max(1, depth // 20) == 0
        layers, error = depth - rows.layer[shown], 2 * DRAWN * np.nan_to_num(rows.stderr[shown])
        series.append(Series(f"B = {size}", layers, 2 * rows.value[shown], error=error))
        series.append(Series(f"B = {size} (ln λ_G per layer)", [0, depth], [0, depth * theory], role="theory"))
    return present(numbers, series)


def measure_transition(values: Values, context: Context) -> Outcome:
    """The variance over a batch of the entries of its covariance, by degree α, in networks and in the mean field."""
    size = values["batch_size"]
    degrees = np.array(values["degrees"], dtype=np.float64)
    sigmas = np.array([_covariances(float(degree), values, context) for degree in degrees])
    diagonal = np.einsum("aruu->aru", sigmas).var(axis=2)  # over a batch, (degrees, runs)
    off = sigmas[:, :, ~np.eye(size, dtype=bool)].var(axis=2)
    theory = bsb2_transition(size)
    field = []
    for degree in degrees:
        options: dict[str, Any] = {"batch_size": size, "layers": values["layers"], "tolerance": 1e-6}
        generator = np.random.default_rng(context.random_seed)
        state = simulate_broken_state(f"relu_power:{float(degree)!r}", generator=generator, **options)
        field.append(float(state.variances.var()))
    # clear of the transition on either side
    low, high = diagonal[degrees <= theory - 0.15], diagonal[degrees >= theory + 0.15]
    broken = diagonal > values["threshold"]
    # a run without any broken degree says that the jump lies beyond the grid
    first = np.where(broken.any(0), degrees[broken.argmax(0)], degrees[-1] + 1)
    numbers = {
        "variance_below": mean_of(low.max(0)),
        "variance_above": mean_of(high.min(0)),
        "log10_jump": mean_of(np.log10(high.min(0) / low.max(0))),
        "first_broken_degree_minus_theory": mean_of(first - theory),
    }
    ends = [float(min(diagonal.min(), off.min())), float(diagonal.max())]
    series = (
        Series("Var Σ_aa", degrees, np.median(diagonal, axis=1)),
        Series("Var Σ_aa (mean field)", degrees, np.maximum(field, ends[0]), role="theory"),
        Series("Var Σ_ab", degrees, np.median(off, axis=1)),
        Series(f"λ_L = 1 at α = {theory:.3f}", [theory, theory], ends, role="bound"),
    )
    return present(numbers, series)


def _covariances(degree: float, values: Values, context: Context) -> Any:
    """Σ of each network after `layers` layers, (runs, B, B)."""
    shape = {**pick(values, "width runs"), "depth": values["layers"]}
    name, size = f"relu_power:{degree!r}", values["batch_size"]
    wide = settle(name, size, shape, context, offset=int(1000 * degree)).double()
    return (wide @ wide.mT / wide.shape[-1]).cpu().numpy()


def measure_two_phases(values: Values, context: Context) -> Outcome:
    """One covariance of each phase, and how unequal their diagonals are."""
    numbers, panels = {}, []
    for label, degree in (("symmetric", values["symmetric"]), ("broken", values["broken"])):
        sigma = _covariances(degree, values, context)
        own = np.einsum("rii->ri", sigma)
        ratio = own.max(1) / own.min(1)
        numbers[f"log_ratio_of_variances_{label}"] = mean_of(np.log(ratio))
        size = sigma.shape[-1]
        numbers[f"largest_variance_{label}"] = mean_of(own.max(1))
        numbers[f"mean_covariance_{label}"] = mean_of(sigma[:, ~np.eye(size, dtype=bool)].mean(1))
        samples = [float(i) for i in range(1, size + 1)]
        grid = Map("entry of Σ", samples, samples, sigma[0])
        panels.append(Panel(title=f"α = {degree:g}: {label}", map=grid))
    return present(numbers, *panels)
