"""Figure 1: eigenvalues and gradients of random networks against theory, and the transition from BSB1 to BSB2."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from sounding.chain import Simulation, simulate
from sounding.claims.claim import Context, Outcome, Values, pick
from sounding.claims.number import DRAWN, Number, estimate, exact, mean_of, scaled, student
from sounding.claims.picture import Map, Panel, Picture, Series, points_of
from sounding.claims.share import share
from sounding.claims.walk import batch_norm, walk_in_law
from sounding.predict import batchnorm, bsb2_transition, simulate_broken_state


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
    panel = Panel("batch size B", "eigenvalue of the backward Jacobian", series)
    caption = f"ReLU networks of width {values['width']}, one layer back at the fixed point: points; theory: lines."
    return Outcome(numbers, Picture((panel,), caption))


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
    panel = Panel("layers back from the output", "ln of the squared gradient norm", series)
    caption = f"ReLU networks of width {values['width']}: gradients grow with slope ln λ_G, more for small batches."
    return Outcome(numbers, Picture((panel,), caption))


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
    panel = Panel("degree α of max(x, 0)^α", "variance over the entries of Σ", series, y_scale="log")
    caption = (
        f"B = {size}, networks of width {values['width']}: below the degree where λ_L passes 1 all samples are alike; "
        "above it the variance of the covariance's entries jumps by orders of magnitude."
    )
    return Outcome(numbers, Picture((panel,), caption))


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
        panels.append(Panel("sample", "sample", title=f"α = {degree:g}: {label}", map=grid))
    caption = (
        f"Covariances of a batch of {values['batch_size']} in one network of width {values['width']}: one diagonal and "
        "one off-diagonal value (BSB1), or a few samples that take nearly all the variance (BSB2)."
    )
    return Outcome(numbers, Picture(panels, caption))
