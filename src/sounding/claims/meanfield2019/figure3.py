"""Figure 3: weights and gradients over depth in the first ten steps of training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Setting
from sounding.claims.meanfield2019.sampled import Array
from sounding.claims.number import DRAWN, Number, mean_of
from sounding.claims.picture import Panel, Picture, Series

PARTS = {
    "weights": "norm of the weights",
    "gradients": "norm of the gradient at pre-activations",
    "weight_gradients": "norm of the weights' gradient",
}


@cache
def first_steps(settings: str, depth: int, device: str, random_seed: int) -> dict[str, Array]:
    """ln of the three norms, (runs, steps + 1, depth) each; layer 1 first, step 0 before any learning."""
    import torch

    from sounding.data import load_dataset, normalize

    values, context = json.loads(settings), Context(device, random_seed)
    size, width = values["batch_size"], values["width"]
    data = load_dataset(values["data"], device=context.device)
    found: dict[str, list[Array]] = {name: [] for name in PARTS}
    for run in range(values["runs"]):
        generator = context.generator(100 * run + depth)
        place: dict[str, Any] = {"device": context.device, "generator": context.generator(run, device=context.device)}
        sizes = [math.prod(data.shape), *[width] * depth, data.classes]
        weights = [
            (torch.randn(out, into, **place) / math.sqrt(into)).requires_grad_() for into, out in pairwise(sizes)
        ]
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in PARTS}
        for _ in range(values["steps"] + 1):
            chosen = torch.randint(len(data.train_labels), (size,), generator=generator).to(context.device)
            state = normalize(data, data.train_inputs[chosen]).flatten(1)
            inner = []
            for weight in weights[:-1]:
                inner.append(state @ weight.T)
                centred = inner[-1] - inner[-1].mean(0)
                state = torch.relu(centred * (centred.square().mean(0) + values["eps"]).rsqrt())
            loss = torch.nn.functional.cross_entropy(state @ weights[-1].T, data.train_labels[chosen])
            gradients = torch.autograd.grad(loss, [*weights, *inner])
            rows["weights"].append(_norms(weights[:-1]))
            rows["gradients"].append(_norms(gradients[len(weights) :]))
            rows["weight_gradients"].append(_norms(gradients[: len(weights) - 1]))
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=False):
                    weight -= values["rate"] * size * gradient
        for name, part in rows.items():
            found[name].append(torch.stack(part).log().cpu().numpy())
    return {name: np.array(part) for name, part in found.items()}


def _norms(tensors: Any) -> Any:
    import torch

    return torch.stack([tensor.detach().double().norm() for tensor in tensors])


def measure_first_steps(values: Mapping[str, Any], context: Context) -> Outcome:
    """Slopes and ranges over depth of one of the three norms, before the first step and after it."""
    from sounding.predict import batchnorm

    part, depths = values["part"], values["depths"]
    settings = json.dumps({key: value for key, value in values.items() if key not in ("part", "depths")})
    taken = {depth: first_steps(settings, depth, context.device, context.random_seed) for depth in depths}
    found = {depth: norms[part][:, :, 1:] for depth, norms in taken.items()}
    weights = taken[max(depths)]["weights"][:, 1, 1:]
    deepest = found[max(depths)]
    rate = 0.5 * math.log(batchnorm("relu", batch_size=values["batch_size"], eps=values["eps"]).gradient_growth)
    lower = slice(0, deepest.shape[2] // 2)
    before, after = deepest[:, 0], deepest[:, 1]
    numbers: dict[str, Number] = {
        "slope_before_over_theory": mean_of(_slopes(before) / -rate),
        "slope_after_over_theory": mean_of(_slopes(after[:, lower]) / -rate),
        "relative_slope_after_over_theory": mean_of(_slopes((after - weights)[:, lower]) / -rate),
        "range_before": mean_of(np.ptp(before, axis=1)),
        "range_after": mean_of(np.ptp(after, axis=1)),
        "range_after_over_before": mean_of(np.ptp(after, axis=1) / np.ptp(before, axis=1)),
        "upper_range_after": mean_of(np.ptp(after[:, -(deepest.shape[2] // 3) :], axis=1)),
        "range_after_last_step": mean_of(np.ptp(deepest[:, -1], axis=1)),
    }
    panels = [_draw(logs, depth, part, rate) for depth, logs in found.items()]
    caption = (
        f"ReLU networks of width {values['width']}, {values['data']}, batches of {values['batch_size']}, relative to "
        "the last "
        "layer, mean over runs. Before the first step gradients grow exponentially towards the input; one step later "
        "the "
        "lower weights have grown and the gradients of the lower layers have fallen."
    )
    return Outcome(numbers, Picture(panels, caption))


def _slopes(rows: Array) -> Array:
    layers = np.arange(rows.shape[1]) - (rows.shape[1] - 1) / 2
    return np.asarray(rows @ layers / (layers @ layers))


def _draw(logs: Array, depth: int, part: str, rate: float) -> Panel:
    layers = np.arange(2, depth + 1)
    shown = layers % max(1, depth // 11) == 0
    series = []
    for step in (0, 1, 2, 10):
        if step < logs.shape[1]:
            relative = logs[:, step] - logs[:, step, -1:]
            error = DRAWN * relative.std(0) / math.sqrt(len(relative))
            series.append(Series(f"step {step}", layers[shown], relative.mean(0)[shown], error=error[shown]))
    if part != "weights":
        series.append(Series("step 0 (½ ln λ_G per layer)", [2, depth], [(depth - 2) * rate, 0.0], role="theory"))
    return Panel("layer", f"ln {PARTS[part]}", series, title=f"depth {depth}")


_COMMON = {"eps": 1e-3, "steps": 10}
_QUICK = {**_COMMON, "data": "digits", "width": 128, "batch_size": 64, "depths": [16, 64], "runs": 10, "rate": 1e-3}
_PAPER = {**_COMMON, "data": "mnist", "width": 384, "batch_size": 128, "depths": [16, 32, 64], "runs": 24, "rate": 1e-3}
# depth 64: 62 layers at ½ ln λ_G = 0.196 (B = 128; 0.200 at B = 64), and 20 in the upper third
_WHOLE, _UPPER = 12.1, 3.9
_EXPLOSION = Expectation(
    "slope_before_over_theory", "explosion at ½ ln λ_G per layer before learning", low=0.85, high=1.15
)
_CALM = Expectation("range_after_over_before", "a dramatically smaller range after one step: half or less", high=0.5)
_STABLE = Expectation(
    "upper_range_after",
    "stable over the upper third after one step: at most a quarter of what explosion makes of it",
    high=_UPPER / 4,
)
_FALL = Expectation(
    "slope_after_over_theory", "exponential fall towards the input over the lower half after one step", high=0.0
)
_EQUILIBRIUM = Expectation(
    "range_after_last_step", "an equilibrium: at step 10 half or less of the range of explosion still", high=_WHOLE / 2
)
_STEEP = Expectation(
    "upper_range_after",
    "explosion over the upper third as before: at least three quarters of what it makes of it",
    low=0.75 * _UPPER,
    high=1.25 * _UPPER,
)
_BELOW = Correction(
    "After one step at our rate the gradients of the upper layers explode as before, down to a threshold; below it "
    "they fall towards the input, so that the range is half or less.",
    (_EXPLOSION, _CALM, _STEEP, _FALL),
)


def _row(
    panel: str, part: str, statement: str, expectations: tuple[Expectation, ...], correction: Correction | None = None
) -> Claim:
    return Claim(
        id=f"meanfield2019-fig3{panel}",
        seed="meanfield2019",
        place=f"figure 3{panel}",
        kind="figure",
        statement=statement,
        expectations=expectations,
        correction=correction,
        settings={
            "quick": Setting({**_QUICK, "part": part}, "8×8 digits, width 128"),
            "paper": Setting({**_PAPER, "part": part}),
        },
        measure=measure_first_steps,
        paper="ReLU networks of varying depth, the first 10 steps; data, batch size and rate not given",
        note="The rate is not given. With the 1e-5·B of figure 2 the first step changes the lowest layers alone; we "
        "take 1e-3·B. This rate was set after trial runs, the bounds on the upper layers and the correction after the "
        "result. Depth counts from the output, as in the seed's sentence on the weights. The threshold is where the "
        "step outweighs the weights as drawn: at a hundred times the rate it lay in the upper third in trial runs.",
    )


CLAIMS: tuple[Claim, ...] = (
    _row(
        "a",
        "weights",
        "Before learning the norm of the weights is the same in every layer; after one step it grows exponentially "
        "towards the input.",
        (
            Expectation("range_before", "equal norms at the start, within 5%", high=0.05),
            Expectation("range_after", "after one step they differ by more than a factor 10", low=math.log(10)),
            Expectation(
                "slope_after_over_theory", "exponential over the lower half, like the gradients", low=0.7, high=1.3
            ),
        ),
    ),
    _row(
        "b",
        "gradients",
        "Before learning the gradients at the pre-activations explode; after one step they are stable over the upper "
        "layers down to a threshold, below which they vanish exponentially towards the input, with a dramatically "
        "smaller range, and this is an equilibrium in the first ten steps.",
        (_EXPLOSION, _CALM, _STABLE, _FALL, _EQUILIBRIUM),
        _BELOW,
    ),
    _row(
        "c",
        "weight_gradients",
        "Before learning the gradients of the weights explode; after one step they are stable over the upper layers "
        "down to a threshold, below which they vanish exponentially towards the input, with a dramatically smaller "
        "range, and this is an equilibrium in the first ten steps.",
        (_EXPLOSION, _CALM, _STABLE, _FALL, _EQUILIBRIUM),
        _BELOW,
    ),
)
