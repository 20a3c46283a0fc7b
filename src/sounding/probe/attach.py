"""Theory beside measurement: what mean field theory predicts for a module that was checked, layer by layer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sounding.activations import resolve
from sounding.probe.gaussian import Moments, gaussian_moments, uncorrelated_shares
from sounding.probe.reading import NETWORK, Call, Reading, add_theory, read
from sounding.probe.stack import Block, Stack, find_stack
from sounding.profile import Profile, Row
from sounding.theory.batchnorm import batchnorm, depth_scale
from sounding.theory.homogeneous import homogeneous_batchnorm

SOURCE = "theory"
DEPTH_SCALES = 16.0
SPREAD = 0.05  # scales and shifts that differ more than this between units are not one batch norm of theory
SMALLEST_BATCH = 4
CORRELATED = 0.75  # mean cosine of inputs from which on their own likeness hides what layers lose
NEGLIGIBLE_EPS = 1e-3  # of the variance that batch norm divides by
WIDTH_BIAS = 0.08  # of the batch norm growth, times batch/width: 0.5% at a batch of 64 and width 1000


def attach(model: nn.Module, profile: Profile) -> Profile:
    """Add rows of source "theory" to a measured profile where theory describes the module.

    For a stack of Linear, optional BatchNorm1d and one activation: the mean square and mean cosine after each linear
    map and activation, the gradient growth per layer and the trainable depth of 16 depth scales (meanfield2019).
    Without batch norm the length and correlation maps run on the second moments of the module's own weights and
    biases, from the measured mean square and mean cosine at the first layer; with batch norm it is the fixed point.
    The standard error of a theory row is the allowance for finite width, below.

    `settings["theory"]` of the result says what was applied, or why nothing was; nothing is guessed.
    """
    return attach_and_read(model, profile)[0]


def attach_and_read(model: nn.Module, profile: Profile) -> tuple[Profile, Reading]:
    """What `attach` gives, and how the verdict reads it."""
    reading = read(profile)
    rows, note = _predict(model, reading)
    attached = Profile(profile.rows + tuple(rows), {**profile.settings, "theory": note})
    return attached, add_theory(reading, rows, attached.settings)


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
        "activation": found.activation,
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
    return list(uncorrelated_shares(resolve(stack.activation), first, layers))


def _predict_vanilla(stack: Stack, reading: Reading) -> tuple[list[Row], str]:
    r"""Length and correlation maps down the stack, and the backward factor $\chi = \sigma_w^2 E\varphi'^2$ per layer.

    At width N the squared gradient norm gains $\chi (1 + O(N^{-1/2}))$ per layer with relative variance
    $(3 E\varphi'^4/(E\varphi'^2)^2 - 1)/N$, independently from layer to layer: the allowance of the mean rate.
    """
    activation = resolve(stack.activation)
    first = stack.blocks[0].linear
    q, c = first.get("mean_square"), first.get("mean_cosine")
    if not (math.isfinite(q) and q > 0 and math.isfinite(c)):
        return [], f"no mean square and cosine were measured at {first.name!r}, where the maps start"
    rows: list[Row] = []
    rates: list[float] = []
    variance = 0.0
    for block, after in zip(stack.blocks, (*stack.blocks[1:], None), strict=True):
        moments = gaussian_moments(activation, q, max(-1.0, min(1.0, c)))
        rows += _layer(block, square=q, cosine=c, after=moments, samples=reading.samples)
        if after is None:
            break
        weight, bias = _second_moments(after.weights)
        rates.append(math.log(weight * moments.slope) if weight * moments.slope > 0 else -math.inf)
        variance += (3 * moments.kurtosis - 1) / block.weights.out_features
        q, product = weight * moments.square + bias, weight * moments.product + bias
        if not (math.isfinite(q) and q > 0):
            break
        c = product / q
    if not rates or not math.isfinite(sum(rates)):
        return [], "the activation has no slope where its inputs lie"
    rate = sum(rates) / len(rates)
    rows += _network(reading, math.exp(rate), relative=math.sqrt(variance) / len(rates))
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
    point = _fixed_point(stack.activation, batch_size, described)
    if not point.attracting:
        return [], f"the symmetric fixed point of {stack.activation} is not attracting at a batch of {batch_size}"
    rows: list[Row] = []
    for block in stack.blocks[1:]:
        rows += _call_rows(block.last, point.variance, point.correlation, batch_size)
    steps = len(stack.blocks) - 1
    kurtosis = gaussian_moments(resolve(stack.activation), 1.0, 0.0).kurtosis
    noise = math.sqrt((3 * kurtosis - 1) / (stack.width * steps))
    # The first batch norm divides by the spread of the inputs instead of the fixed point's: one factor in `steps`.
    first = stack.blocks[0].linear
    spread = first.get("mean_square") * first.get("distinct_share")
    edge = abs(math.log(described["weight_std"] ** 2 * point.mu / spread)) / steps if spread * point.mu > 0 else 0.0
    relative = math.hypot(noise, WIDTH_BIAS * batch_size / stack.width, edge)
    rows += _network(reading, point.growth, relative=relative)
    return rows, (
        f"fixed point of batch norm over {batch_size} samples; the error is that of width {stack.width}, "
        f"{len(stack.blocks)} layers and an input that is not at the fixed point"
    )


class _Point(NamedTuple):
    variance: float
    correlation: float
    growth: float
    attracting: bool

    @property
    def mu(self) -> float:
        return self.variance * (1 - self.correlation)


def _fixed_point(name: str, batch_size: int, described: dict[str, float]) -> _Point:
    """In closed form where eps is too small to matter beside the allowance, by quadrature otherwise."""
    activation = resolve(name)
    if activation.degree == 1.0 and described["shift"] == 0.0:
        closed = homogeneous_batchnorm(activation.scaled(described["scale"]), batch_size)
        if described["eps"] <= NEGLIGIBLE_EPS * described["weight_std"] ** 2 * closed.mu:
            attracting = max(closed.forward.L, closed.forward.M) < 1
            return _Point(closed.variance, closed.correlation, closed.backward.G, attracting)
    theory = batchnorm(activation, batch_size=batch_size, tolerance=1e-8, **described)
    point = theory.fixed_point
    return _Point(point.variance, point.correlation, theory.gradient_growth, point.attracting)


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


def _layer(block: Block, *, square: float, cosine: float, after: Moments, samples: int) -> list[Row]:
    rows = _call_rows(block.linear, square, cosine, samples)
    if block.last.depth != block.linear.depth and after.square > 0:
        rows += _call_rows(block.last, after.square, after.product / after.square, samples)
    return rows


def _call_rows(call: Call, square: float, cosine: float, samples: int) -> list[Row]:
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


def _network(reading: Reading, growth: float, *, relative: float) -> list[Row]:
    """Growth, rate and, where the growth differs from 1 by more than its error, the depth of 16 depth scales."""
    last = reading.calls[-1].depth
    rows = [
        Row(last, NETWORK, "gradient_growth", growth, growth * relative, SOURCE),
        Row(last, NETWORK, "gradient_log_rate", math.log(growth) / 2, relative / 2, SOURCE),
    ]
    if abs(math.log(growth)) > 2 * relative:
        rows.append(Row(last, NETWORK, "trainable_depth", DEPTH_SCALES * depth_scale(growth), None, SOURCE))
    return rows


def _second_moments(linear: nn.Linear) -> tuple[float, float]:
    """fan_in times the mean squared weight, and the mean squared bias: σ_w² and σ_b² as this module has them."""
    weight = _mean_square(linear.weight) * linear.in_features
    return weight, _mean_square(linear.bias) if linear.bias is not None else 0.0


def _mean_square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2 / tensor.numel()
