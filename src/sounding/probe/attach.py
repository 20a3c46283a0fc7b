"""Theory beside measurement: what mean field theory predicts for a module that was checked, layer by layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sounding.probe.growth import BREAK
from sounding.probe.reading import NETWORK, NETWORK_MEASURES, LayerCall, Reading, read
from sounding.probe.stack import Stack, find_stack
from sounding.profile import Estimate, Profile, Row
from sounding.theory.batchnorm import DEPTH_SCALES, batchnorm, depth_scale
from sounding.theory.length import slope_kurtosis, squared_slope
from sounding.theory.vanilla import layer_maps, uncorrelated_shares

SOURCE = "theory"
QUADRATURE = 1e-7  # tolerance of the integrals, far below the finite-width noise of any measurement beside them
SPREAD = 0.05  # scales and shifts that differ more than this between units are not one batch norm of theory
SMALLEST_BATCH = 4
CORRELATED = 0.75  # mean cosine of inputs from which on their own likeness hides what layers lose
WIDTH_BIAS = 0.08  # of the batch norm growth, times batch/width: 0.5% at a batch of 64 and width 1000
# Of the scatter that one sample's gradient would have: that of a batch is smaller. Over 16 networks each, the root mean
# square of ln(measured/theory) was 0.7 to 1.3 of this half for ReLU and tanh of width 64 to 400, 2.9 for He GELU.
PLAIN_SHARE = 0.5


def attach(model: nn.Module, profile: Profile) -> Profile:
    """Add rows of source "theory" to a measured profile where theory describes the module.

    For a stack of Linear, optional BatchNorm1d and one activation: the mean square and mean cosine after each linear
    map and activation, the gradient growth per layer and the trainable depth of 16 depth scales (meanfield2019).
    Without batch norm the length and correlation maps run on the second moments of the module's own weights and
    biases, from the measured mean square and mean cosine at the first layer; with batch norm it is the fixed point.
    The standard error of a theory row is the allowance for finite width, below.

    `settings["theory"]` of the result says what was applied, or why nothing was; nothing is guessed.
    """
    return attach_to(model, read(profile))[0]


def attach_to(model: nn.Module, reading: Reading) -> tuple[Profile, Reading]:
    """The profile of a reading with rows of theory, and the reading with what theory says of the network."""
    rows, note = _predict(model, reading)
    expected = {row.measure: Estimate(row.value, row.stderr) for row in rows if row.measure in NETWORK_MEASURES}
    settings = {**reading.settings, "theory": note}
    attached = replace(reading, settings=settings, predicted={**reading.predicted, **expected})
    profile = attached.profile()
    return replace(profile, rows=profile.rows + tuple(rows)), attached


def _predict(model: nn.Module, reading: Reading) -> tuple[list[Row], dict[str, Any]]:
    """The rows of theory, and what `settings["theory"]` says of them."""
    found = find_stack(model, reading)
    if isinstance(found, str):
        return [], {"applied": False, "note": found}
    rows, note = _predict_normalized(found, reading) if found.normalized else _predict_vanilla(found, reading)
    if not rows:
        return [], {"applied": False, "note": note}
    told: dict[str, Any] = {
        "applied": True,
        "note": note,
        "activation": found.activation.name,
        "first": found.blocks[0].linear.name,
        "last": found.blocks[-1].last.name,
        "layers": len(found.blocks),
        "width": found.width,
    }
    if not found.normalized and reading.input.get("mean_cosine") > CORRELATED:
        told["uncorrelated_shares"] = _foresee(found)
    return rows, told


def _foresee(stack: Stack) -> list[float]:
    """What the stack would leave of uncorrelated samples: inputs that are alike cannot show what its layers lose."""
    first = stack.blocks[0].linear.get("mean_square")
    layers = [_second_moments(block.weights) for block in stack.blocks[1:]]
    return list(uncorrelated_shares(stack.activation, first, layers, tolerance=QUADRATURE))


def _predict_vanilla(stack: Stack, reading: Reading) -> tuple[list[Row], str]:
    r"""Length and correlation maps down the stack, and the backward factor $\chi = \sigma_w^2 E\varphi'^2$ per layer.

    At width N the squared gradient norm gains $\chi (1 + O(N^{-1/2}))$ per layer with relative variance
    $(3 E\varphi'^4/(E\varphi'^2)^2 - 1)/N$, independently from layer to layer: half of it is
    the allowance of the mean rate.
    """
    activation = stack.activation
    first = stack.blocks[0].linear
    q, c = first.get("mean_square"), first.get("mean_cosine")
    if not (math.isfinite(q) and q > 0 and math.isfinite(c)):
        return [], f"no mean square and cosine were measured at {first.name!r}, where the maps start"
    rows: list[Row] = []
    rates: list[float] = []
    variance = 0.0
    weights = [_second_moments(block.weights) for block in stack.blocks[1:]]
    signals = layer_maps(activation, q, max(-1.0, min(1.0, c)), weights, tolerance=QUADRATURE)
    for block, signal, after in zip(stack.blocks, signals, (*weights, None), strict=False):
        rows += _call_rows(block.linear, signal.variance, signal.correlation, reading.samples)
        if block.last.depth != block.linear.depth and signal.square > 0:
            rows += _call_rows(block.last, signal.square, signal.product / signal.square, reading.samples)
        if after is None:
            break
        chi = after[0] * squared_slope(activation, signal.variance, tolerance=QUADRATURE).value
        rates.append(math.log(chi) if chi > 0 else -math.inf)
        kurtosis = slope_kurtosis(activation, signal.variance, tolerance=QUADRATURE)
        variance += (3 * kurtosis - 1) / block.weights.out_features
    if not rates or not math.isfinite(sum(rates)):
        return [], "the activation has no slope where its inputs lie"
    rate = sum(rates) / len(rates)
    rows += _network(reading, math.exp(rate), relative=PLAIN_SHARE * math.sqrt(variance) / len(rates))
    return rows, (
        "length and correlation maps from the measured mean square and cosine at the first layer, with the second "
        f"moments of the module's weights and biases; the error is that of width {stack.width}"
    )


def _predict_normalized(stack: Stack, reading: Reading) -> tuple[list[Row], str]:
    """The fixed point of batch norm (meanfield2019, Theorems 4 and 7) at every block behind the first."""
    described = _describe_norms(stack, reading)
    if isinstance(described, str):
        return [], described
    batch_size = int(reading.settings["batch_size"])
    name = stack.activation.name
    theory = batchnorm(stack.activation, batch_size=batch_size, tolerance=1e-8, **described)
    point, steps = theory.fixed_point, len(stack.blocks) - 1
    if not point.attracting:
        return [], f"the symmetric fixed point of {name} is not attracting at a batch of {batch_size}"
    rows: list[Row] = []
    for block in stack.blocks[1:]:
        rows += _call_rows(block.last, point.variance, point.correlation, batch_size)
    # the first batch norm divides by the spread of the inputs instead of the fixed point's: one factor in `steps`
    first = stack.blocks[0].linear
    spread = first.get("mean_square") * first.get("distinct_share")
    settled = described["weight_std"] ** 2 * point.mu * (1 - 1 / batch_size)
    eps = described["eps"]
    edge = math.log((settled + eps) / (spread + eps)) if spread * settled > 0 else 0.0
    if abs(edge) > 2 * BREAK:
        edge = 0.0  # the measured rate leaves such a step out as a break
    kurtosis = slope_kurtosis(stack.activation, 1.0, tolerance=QUADRATURE)
    noise = math.sqrt((3 * kurtosis - 1) / (stack.width * steps))
    relative = math.hypot(noise, WIDTH_BIAS * batch_size / stack.width)
    rows += _network(reading, theory.gradient_growth, relative=relative, first=edge / steps)
    return rows, (
        f"fixed point of batch norm over {batch_size} samples, behind a first batch norm that divides by the inputs' "
        f"spread; the error is that of width {stack.width} and {len(stack.blocks)} layers"
    )


def _describe_norms(stack: Stack, reading: Reading) -> dict[str, float] | str:
    """The one batch norm that all blocks share, in the words of theory, or why they do not."""
    if reading.settings.get("mode", "train") != "train":
        return "batch norm was measured with running statistics, and theory is of batch statistics"
    if int(reading.settings.get("batch_size") or 0) < SMALLEST_BATCH:
        return f"theory of batch norm needs a batch of {SMALLEST_BATCH} or more"
    scales, shifts, widths = [], [], []
    for block in stack.blocks:
        norm = block.norm
        if norm is None:
            return "a block without batch norm among blocks with it"
        scales.append(norm.weight.detach().double() if norm.weight is not None else torch.ones(1).double())
        shifts.append(norm.bias.detach().double() if norm.bias is not None else torch.zeros(1).double())
        widths.append(_second_moments(block.weights)[0])
    scale, shift = torch.cat(scales), torch.cat(shifts)
    if max(float(scale.std(correction=0)), float(shift.std(correction=0))) > SPREAD * float(scale.abs().mean()):
        return "scales and shifts of the batch norms differ between units, and theory has one of each"
    eps = {block.norm.eps for block in stack.blocks if block.norm is not None}
    if len(eps) > 1:
        return "the batch norms have different eps"
    return {
        "eps": eps.pop(),
        "scale": float(scale.mean()),
        "shift": float(shift.mean()),
        "weight_std": math.sqrt(sum(widths) / len(widths)),
    }


def _call_rows(call: LayerCall, square: float, cosine: float, samples: int) -> list[Row]:
    """Mean square, mean cosine, and the participation ratio of `samples` samples of equal length and equal cosines."""
    rows = [
        Row(call.depth, call.name, "mean_square", square, None, SOURCE),
        Row(call.depth, call.name, "mean_cosine", cosine, None, SOURCE),
    ]
    if samples > 1:
        common, other = 1 + (samples - 1) * cosine, 1 - cosine
        ratio = samples**2 / (common**2 + (samples - 1) * other**2)
        rows.append(Row(call.depth, call.name, "participation_ratio", ratio, None, SOURCE))
    return rows


def _network(reading: Reading, growth: float, *, relative: float, first: float = 0.0) -> list[Row]:
    """Growth and rate of this network, and the depth of 16 depth scales where growth differs from 1 beyond its error.

    `first` is what the first layer adds to ln growth of the whole network, which a deeper one would have less of.
    """
    last = reading.calls[-1].depth
    here = growth * math.exp(first)
    rows = [
        Row(last, NETWORK, "gradient_growth", here, here * relative, SOURCE),
        Row(last, NETWORK, "gradient_log_rate", math.log(here) / 2, relative / 2, SOURCE),
    ]
    if abs(math.log(growth)) > 2 * relative:
        rows.append(Row(last, NETWORK, "trainable_depth", DEPTH_SCALES * depth_scale(growth), None, SOURCE))
    return rows


def _second_moments(linear: nn.Linear) -> tuple[float, float]:
    """fan_in times the mean squared weight, and the mean squared bias: σ_w² and σ_b² as this module has them."""
    weight = _mean_square(linear.weight) * linear.in_features
    bias = getattr(linear, "bias", None)  # a subclass may have none
    return weight, _mean_square(bias) if isinstance(bias, Tensor) else 0.0


def _mean_square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2 / tensor.numel()
