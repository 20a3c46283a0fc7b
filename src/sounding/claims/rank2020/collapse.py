"""Collapse without normalization: Lemma 3, and what rank one does to gradients, Proposition 19."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, Values, pick
from sounding.claims.number import Number, estimate, exact, highest, lowest, mean_of
from sounding.claims.picture import Panel, Picture, Series, level, points_of
from sounding.claims.walk import draw_normals
from sounding.measures import gradient_alignment
from sounding.profile import Estimate
from sounding.weights import resolve

ROUNDING = 1e-12  # of r − 1 in float64, where a collapse is complete and no two runs differ


def lyapunov_gap(
    strength: float, width: int, *, depth: int, runs: int, weights: str, generator: torch.Generator
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """ln σ₂/σ₁ per layer of the product of I + γW, by QR of two vectors; and what one layer does to their direction.

    Returns the gap (runs,) and 1 − |cos| between the direction after the last layer and the one before it (runs,).
    """
    law = resolve(weights)
    shape = (runs, width, width)
    frame = torch.linalg.qr(draw_normals(generator, runs, width, 2))[0]
    logs = torch.zeros(runs, 2, dtype=torch.float64)
    before = frame
    for _ in range(depth):
        before = frame
        drawn = law.draw(shape, generator=generator, dtype=torch.float64, device=torch.device("cpu"))
        # QR keeps two vectors apart that would align; R holds their growth
        frame, triangle = torch.linalg.qr(frame + strength * (drawn @ frame))
        # the sum over layers is ln of both singular values
        logs += torch.diagonal(triangle, dim1=-2, dim2=-1).abs().log()
    turned = 1 - (frame[..., 0] * before[..., 0]).sum(-1).abs()  # 0 where the one direction that is left stays
    return ((logs[:, 1] - logs[:, 0]) / depth).numpy(), turned.numpy()


def measure_lemma3(values: Values, context: Context) -> Outcome:
    """Products of I + γW: the second singular value falls behind exponentially, at every γ."""
    width, depth, strengths = values["width"], values["depth"], values["strengths"]
    gaps, turns, left, series = [], [], [], []
    for index, gamma in enumerate(strengths):
        shape = {**pick(values, "runs weights"), "depth": values["exponent_depth"]}
        gap, turned = lyapunov_gap(gamma, width, generator=context.generator(2 * index), **shape)
        gaps.append(mean_of(gap))
        turns.append(mean_of(turned))
        profile = simulate(
            **pick(values, "width depth runs weights"), batch_size=width, every=depth // 20, norm="none",
            residual=gamma, measures=["participation_ratio", "orthogonality_gap"], profile=True, dtype="float64",
            generator=context.generator(2 * index + 1),
        ).profile  # fmt: skip
        layers = profile.layers[1:]
        found = [profile.value("participation_ratio", layer=layer) for layer in layers]
        left.append(_distance(found[-1], values["runs"]))
        # a logarithmic axis takes no 0
        series.append(Series(f"γ = {gamma:g}", layers, np.maximum([ratio.value - 1 for ratio in found], 1e-16)))
    numbers = {
        "largest_exponent_gap": highest(gaps),
        "largest_r_minus_1": highest(left),
        "smallest_turn_per_layer": lowest(turns),
    }
    exponents = (points_of("measured", strengths, gaps), level("0: no collapse", strengths, 0.0))
    panels = (
        Panel("layer", "r(H) − 1", series, y_scale="log", title="distance from rank one"),
        Panel("γ", "ln σ₂/σ₁ per layer", exponents, title="Lyapunov exponents"),
    )
    caption = "Without normalization r falls to 1: the second singular value falls behind the first exponentially."
    return Outcome(numbers, Picture(panels, caption))


def _distance(ratio: Estimate, runs: int) -> Number:
    """r − 1 over runs; where they agree, to rounding."""
    number = estimate(ratio.value - 1, ratio.stderr or 0.0, samples=runs)
    return number if number.high - number.value > ROUNDING else exact(number.value, error=ROUNDING)


def measure_prop19(values: Values, context: Context) -> Outcome:
    """Per-sample gradients of each neuron's weights in the last layer, from hidden features of rank 1, 2, …"""
    generator, ranks = context.generator(), values["ranks"]
    samples, width, classes = values["samples"], values["width"], values["classes"]
    aligned: dict[str, list[Number]] = {"cross-entropy": [], "squared error": []}
    for rank in ranks:
        found: dict[str, list[float]] = {loss: [] for loss in aligned}
        for _ in range(values["trials"]):
            hidden = draw_normals(generator, samples, rank) @ draw_normals(generator, rank, width)
            readout = draw_normals(generator, classes, width)
            labels = torch.randint(classes, (samples,), generator=generator)
            for loss in aligned:
                # the class whose gradients are least aligned
                found[loss].append(float(gradient_alignment(_row_gradients(hidden, readout, labels, loss)).min()))
        for loss, row in found.items():
            aligned[loss].append(mean_of(row))
    numbers = {
        "alignment_at_rank_1": lowest(row[0] for row in aligned.values()),
        "alignment_at_largest_rank": highest(row[-1] for row in aligned.values()),
    }
    series = [points_of(loss, ranks, row) for loss, row in aligned.items()]
    series.append(level("1: all collinear (proposition)", ranks, 1.0, "paper"))
    ticks = {float(rank): str(rank) for rank in ranks}
    label = "rank of the last hidden representation"
    panel = Panel(label, "mean |cos| between gradients", series, x_scale="log", ticks=ticks)
    caption = "At rank one every sample pulls each neuron along one line, at full rank not."
    return Outcome(numbers, Picture((panel,), caption))


def _row_gradients(hidden: torch.Tensor, readout: torch.Tensor, labels: torch.Tensor, loss: str) -> torch.Tensor:
    """(classes, samples, width): the gradient of each sample's loss in each row of the readout, by autograd."""

    def of_one(weight: torch.Tensor, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = features @ weight.mT
        if loss == "cross-entropy":
            return torch.nn.functional.cross_entropy(logits, label)
        return (logits - (torch.arange(len(weight)) == label).double()).square().sum()  # the one-hot target

    gradients: torch.Tensor = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(readout, hidden, labels)
    return gradients.transpose(0, 1)  # vmap has samples first
