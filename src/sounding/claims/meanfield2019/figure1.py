"""Figure 1: eigenvalues and gradients against theory, and the transition from BSB1 to BSB2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding.claims.claim import Claim, Context, Expectation, Outcome, Setting
from sounding.claims.meanfield2019.networks import pull_gradients, settle
from sounding.claims.number import DRAWN, Number, exact, mean_of, student
from sounding.claims.picture import Map, Panel, Picture, Series

if TYPE_CHECKING:
    import torch


def measure_eigenvalues(values: Mapping[str, Any], context: Context) -> Outcome:
    """λ_G and λ_L of one backward layer, measured in networks at their fixed point."""
    from sounding.predict import batchnorm

    sizes = values["batch_sizes"]
    measured: dict[str, list[Number]] = {"G": [], "L": []}
    for place, size in enumerate(sizes):
        whole, uneven = _pull_back_parts(size, values, context, offset=10 * place)
        measured["G"].append(mean_of(whole))
        measured["L"].append(mean_of(uneven))
    numbers, series = {}, []
    for part, found in measured.items():
        theory = np.array(
            [getattr(batchnorm("relu", batch_size=size).backward_eigenvalues, part) for size in sizes], dtype=np.float64
        )
        ratios = [Number(n.value / t, n.low / t, n.high / t, n.samples) for n, t in zip(found, theory, strict=True)]
        numbers[f"{part}_over_theory_at_smallest"] = ratios[0]
        numbers[f"{part}_over_theory_at_largest"] = ratios[-1]
        numbers[f"{part}_over_theory_mean"] = _pool(ratios)
        series.append(Series(f"λ_{part}", sizes, [n.value for n in found], error=[n.high - n.value for n in found]))
        series.append(Series(f"λ_{part} (theory)", sizes, theory, role="theory"))
    panel = Panel("batch size B", "eigenvalue of the backward Jacobian", series)
    caption = f"ReLU networks of width {values['width']}, one layer back at the fixed point: points; theory: lines."
    return Outcome(numbers, Picture((panel,), caption))


def _pull_back_parts(size: int, values: Mapping[str, Any], context: Context, *, offset: int) -> tuple[Any, Any]:
    """λ_G and λ_L of each network: how the parts G and L of Π change over one layer.

    The cotangents at the pre-activations of a layer are centred normals, of larger variance for every second sample;
    Π is averaged over neurons, before and after.
    """
    import torch

    width, runs = values["width"], values["runs"]
    generator = context.generator(offset + 1, device=context.device)
    place: dict[str, Any] = {"device": context.device, "generator": generator}
    signs = torch.where(torch.arange(size, device=context.device) % 2 == 0, 1.0, -1.0)
    signs = signs - signs.mean()
    whole, uneven = [], []
    chunk = max(1, min(runs, 20_000_000 // width**2 if context.device == "cpu" else 200_000_000 // width**2))
    for first in range(0, runs, chunk):
        count = min(chunk, runs - first)
        state = settle(
            "relu", width, size, depth=values["depth"], runs=count, context=context, offset=offset + 7 * first
        )
        weight = torch.randn(count, width, width, **place) / math.sqrt(width)
        before = torch.bmm(state, weight.mT).requires_grad_()
        centred = before - before.mean(1, keepdim=True)
        output = torch.relu(centred * centred.square().mean(1, keepdim=True).rsqrt())
        after = torch.randn(count, size, width, **place) * (1 + 0.8 * signs).clamp_min(0.05).sqrt()[:, None]
        after = after - after.mean(1, keepdim=True)
        following = torch.randn(count, width, width, **place) / math.sqrt(width)
        (pulled,) = torch.autograd.grad(output, before, torch.bmm(after, following))
        whole.append(pulled.double().square().sum((1, 2)) / after.double().square().sum((1, 2)))
        uneven.append(_part_l(pulled, signs) / _part_l(after, signs))
    return torch.cat(whole).cpu().numpy(), torch.cat(uneven).cpu().numpy()


def _part_l(rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """⟨Π, G diag(signs) G⟩: rows sum to 0, so the signed sum of squares."""
    return (rows.double().square().sum(2) * signs.double()).sum(1)


def _pool(numbers: list[Number]) -> Number:
    from sounding.claims.number import estimate

    half = np.array([number.high - number.value for number in numbers]) / 2.5758
    mean = float(np.mean([number.value for number in numbers]))
    return estimate(mean, float(np.sqrt(np.sum(half**2))) / len(numbers))


def measure_gradient_norms(values: Mapping[str, Any], context: Context) -> Outcome:
    """ln of the squared gradient norm layer by layer, and its slope against ln λ_G."""
    from sounding.predict import batchnorm

    numbers, series = {}, []
    depth = values["depth"]
    for size in values["batch_sizes"]:
        found = pull_gradients(
            "relu", values["width"], size, depth, values["runs"], size, context.device, context.random_seed
        )
        theory = math.log(batchnorm("relu", batch_size=size).gradient_growth)
        growth, rate = found.gradients["growth"], found.gradients["log_rate"]
        half = student(values["runs"] - 1) * 2 * (rate.stderr or math.nan)
        numbers[f"slope_over_theory_B{size}"] = exact(math.log(growth.value) / theory, error=half / theory)
        numbers["slope_over_theory_largest_batch"] = numbers[f"slope_over_theory_B{size}"]
        rows = [row for row in found.profile if row.measure == "gradient_log_norm"]
        shown = [row for row in rows if row.layer % max(1, depth // 20) == 0]
        layers = [depth - row.layer for row in shown]
        error = [2 * DRAWN * (row.stderr or 0.0) for row in shown]
        series.append(Series(f"B = {size}", layers, [2 * row.value for row in shown], error=error))
        series.append(Series(f"B = {size} (ln λ_G per layer)", [0, depth], [0, depth * theory], role="theory"))
    panel = Panel("layers back from the output", "ln of the squared gradient norm", series)
    caption = f"ReLU networks of width {values['width']}: gradients grow with slope ln λ_G, more for small batches."
    return Outcome(numbers, Picture((panel,), caption))


def measure_transition(values: Mapping[str, Any], context: Context) -> Outcome:
    """The variance over a batch of the entries of its covariance, by degree α, in networks and in the mean field."""
    from sounding.predict import bsb2_transition

    size = values["batch_size"]
    degrees = np.array(values["degrees"], dtype=np.float64)
    diagonal, off = (
        np.array(part) for part in zip(*(_entry_variances(a, values, context) for a in degrees), strict=True)
    )
    theory = bsb2_transition(size)
    field = [_settled_variance(a, size, values["layers"], context) for a in degrees]
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


def _covariances(degree: float, values: Mapping[str, Any], context: Context) -> Any:
    """Σ of each network after `layers` layers, (runs, B, B)."""
    state = settle(f"relu_power:{degree!r}", values["width"], values["batch_size"], depth=values["layers"],
                   runs=values["runs"], context=context, offset=int(1000 * degree))  # fmt: skip
    wide = state.double()
    return (wide @ wide.mT / wide.shape[-1]).cpu().numpy()


def _entry_variances(degree: float, values: Mapping[str, Any], context: Context) -> tuple[Any, Any]:
    sigma = _covariances(float(degree), values, context)
    size = sigma.shape[-1]
    off = sigma[:, ~np.eye(size, dtype=bool)]
    return np.einsum("rii->ri", sigma).var(axis=1), off.var(axis=1)


def _settled_variance(degree: float, size: int, layers: int, context: Context) -> float:
    from sounding.predict import simulate_broken_state

    generator = np.random.default_rng(context.random_seed)
    state = simulate_broken_state(
        f"relu_power:{float(degree)!r}", batch_size=size, layers=layers, generator=generator, tolerance=1e-6
    )
    return float(state.variances.var())


def measure_two_phases(values: Mapping[str, Any], context: Context) -> Outcome:
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


_TRANSITION = "the batch size of (c) is not given; 10 as in (d)"
CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="meanfield2019-fig1a",
        seed="meanfield2019",
        place="figure 1a",
        kind="figure",
        statement="The eigenvalues λ_G and λ_L of the backward Jacobian of ReLU networks follow the theory over batch "
        "size.",
        expectations=tuple(
            Expectation(f"{part}_over_theory_{where}", "measured over theory, 5%", low=0.95, high=1.05)
            for part in "GL"
            for where in ("at_smallest", "at_largest", "mean")
        ),
        settings={
            "quick": Setting(
                {"batch_sizes": [10, 24, 64], "width": 500, "depth": 6, "runs": 160},
                "160 networks of width 500 instead of 200 of width 1000",
            ),
            "paper": Setting(
                {"batch_sizes": [8, 10, 16, 24, 32, 48, 64, 96, 128], "width": 1000, "depth": 10, "runs": 200}
            ),
        },
        measure=measure_eigenvalues,
        paper="ReLU, width 1000, 200 networks, batch sizes to about 110",
        note="Below B = 8 the variance of 1/|Gh|² is too large for a Monte Carlo average.",
    ),
    Claim(
        id="meanfield2019-fig1b",
        seed="meanfield2019",
        place="figure 1b",
        kind="figure",
        statement="The squared gradient norm of ReLU networks grows exponentially over 100 layers at the theoretical "
        "rate, for batches of 8 to 128.",
        expectations=tuple(
            Expectation(f"slope_over_theory_{size}", "slope over ln λ_G, 5%", low=0.95, high=1.05)
            for size in ("B8", "B16", "B32", "largest_batch")
        ),
        settings={
            "quick": Setting(
                {"batch_sizes": [8, 16, 32], "width": 400, "depth": 40, "runs": 6},
                "6 networks of width 400 and 40 layers instead of 200, 1000 and 100; batches to 32",
            ),
            "paper": Setting({"batch_sizes": [8, 16, 32, 64, 128], "width": 1000, "depth": 100, "runs": 200}),
        },
        measure=measure_gradient_norms,
        paper="ReLU, width 1000, 200 networks, 100 layers, batch sizes 8, 16, 32, 64, 128",
    ),
    Claim(
        id="meanfield2019-fig1c",
        seed="meanfield2019",
        place="figure 1c",
        kind="figure",
        statement="For max(x, 0)^α the variance over the entries of the batch covariance jumps at a degree α: the "
        "symmetry between samples breaks (BSB1 to BSB2), where the symmetric fixed point loses stability.",
        expectations=(
            Expectation("log10_jump", "a jump: at least a factor 30 across the transition", low=1.5),
            Expectation("variance_below", "symmetric below: next to no variance", high=0.02),
            Expectation("variance_above", "broken above: of the order of the variance itself", low=0.1),
            Expectation(
                "first_broken_degree_minus_theory",
                "the jump is where λ_L = 1, to one step of the grid",
                low=-0.11,
                high=0.11,
            ),
        ),
        settings={
            "quick": Setting(
                {
                    "batch_size": 10,
                    "width": 1000,
                    "runs": 12,
                    "layers": 100,
                    "threshold": 0.05,
                    "degrees": [0.5, 0.8, 1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0],
                },
                _TRANSITION,
            ),
            "paper": Setting(
                {
                    "batch_size": 10,
                    "width": 4000,
                    "runs": 50,
                    "layers": 200,
                    "threshold": 0.05,
                    "degrees": [round(0.5 + 0.1 * k, 1) for k in range(16)],
                },
                _TRANSITION,
            ),
        },
        measure=measure_transition,
        paper="α from 0.5 to 2, the variance of Σ_aa and Σ_ab on a logarithmic axis; width and batch size not given",
        note="The text gives no number for the transition; λ_L = 1 puts it at α = 1.4007 for B = 10.",
    ),
    Claim(
        id="meanfield2019-fig1d",
        seed="meanfield2019",
        place="figure 1d",
        kind="figure",
        statement="Representative batch covariances at B = 10: one diagonal and one off-diagonal value (0.5 and 0.13) "
        "in "
        "the symmetric phase, blocks of very different size in the broken one.",
        expectations=(
            Expectation(
                "log_ratio_of_variances_symmetric", "equal variances, within 40% of each other", high=math.log(1.4)
            ),
            Expectation("log_ratio_of_variances_broken", "some samples at least 10 times others", low=math.log(10)),
            Expectation("largest_variance_symmetric", "colour scale of the figure: 0.45 to 0.6", low=0.45, high=0.6),
            Expectation("mean_covariance_symmetric", "colour scale of the figure: about 0.12", low=0.10, high=0.16),
        ),
        settings={
            "quick": Setting(
                {"batch_size": 10, "width": 4000, "runs": 8, "layers": 100, "symmetric": 1.0, "broken": 1.8}
            ),
            "paper": Setting(
                {"batch_size": 10, "width": 4000, "runs": 200, "layers": 200, "symmetric": 1.0, "broken": 1.8}
            ),
        },
        measure=measure_two_phases,
        paper="B = 10; colour scales 0.12 to 0.51 (symmetric) and 0.1 to 6.1 (broken); degrees not given",
        note="α = 1 for the symmetric phase, as its colours say; α = 1.8 for the broken one is ours. Fluctuations of "
        "finite "
        "width left it undecided at width 1000; 4000 is used.",
    ),
)
