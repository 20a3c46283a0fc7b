"""Explicit random networks for descriptions: every weight drawn from its law, values and gradients measured in torch.

One interpreter serves the tests of all rules: what a description says is run as it says, at the widths it says, and the
second moments of values and gradients are averaged over seeds with their standard errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sounding.theory.signal import (
    Add,
    Attention,
    Convolution,
    Description,
    Elementwise,
    Flatten,
    Given,
    Join,
    Law,
    Linear,
    Mix,
    Multiply,
    Node,
    Normalize,
    Part,
    Points,
    Pool,
    Regrid,
    Scale,
    Signal,
    Take,
)
from tolerance import TOLERANCE


def chain(given: Node, *steps: tuple[Any, Points, int]) -> Description:
    """A description in which each node feeds the next; steps are (rule, points, features)."""
    nodes = [given]
    for rule, points, features in steps:
        nodes.append(Node(rule, (len(nodes) - 1,), points, features))
    return Description(tuple(nodes), (len(nodes) - 1,))


def draw(law: Law, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of Gaussian entries of a law, independent but for sums of zero, on the generator's device."""
    unit = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
    if law.balanced:
        rows = unit.flatten(1)
        unit = ((rows - rows.mean(1, keepdim=True)) / (1 - 1 / rows.shape[1]) ** 0.5).reshape(shape)
    return law.mean + law.variance**0.5 * unit


def run_rule(node: Node, inputs: list[Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """The value of a node, (samples, *grid, features), and its weight."""
    rule: Any = node.rule
    match rule:
        case Linear():
            weight = draw(rule.weight, (rule.fan_out, rule.fan_in), generator).requires_grad_()
            return inputs[0] @ weight.T + draw(rule.bias, (rule.fan_out,), generator), weight
        case Convolution():
            return _convolve(rule, inputs[0], generator)
        case Elementwise():
            return rule.activation.torch()(inputs[0]), None
        case Normalize():
            return _normalize(rule, inputs[0], generator), None
        case Add():
            return sum(c * x for c, x in zip(rule.coefficients, inputs, strict=True)), None
        case Scale():
            features = inputs[0].shape[-1]
            factor, shift = draw(rule.factor, (features,), generator), draw(rule.shift, (features,), generator)
            return factor * inputs[0] + shift, None
        case Multiply():
            return inputs[0] * inputs[1], None
        case Mix():
            return torch.einsum("pq,sqf->spf", torch.tensor(rule.matrix, device=generator.device), inputs[0]), None
        case Pool():
            moved = inputs[0].movedim(-1, 1)
            moved = functional.avg_pool2d(
                moved, rule.kernel, rule.stride, rule.padding[0][0], count_include_pad=rule.count_padding
            )
            return moved.movedim(1, -1).reshape(node.points.samples, *node.points.grid, -1), None
        case Take():
            return inputs[0].flatten(1, -2)[:, list(rule.positions)], None
        case Join():
            return torch.cat(inputs, dim=-1 if rule.axis == "features" else 1), None
        case Part():
            return inputs[0][..., rule.start : rule.stop], None
        case Flatten():
            return inputs[0].flatten(1), None
        case Regrid():
            return inputs[0].reshape(inputs[0].shape[0], *rule.grid, -1), None
        case Attention():
            return _attend(rule, inputs, generator), None
    raise AssertionError(f"no network for {rule}")


def _attend(rule: Attention, inputs: list[Tensor], generator: torch.Generator) -> Tensor:
    counts = (rule.heads, rule.key_heads, rule.key_heads)
    parts = [x.unflatten(-1, (count, -1)).transpose(1, 2) for x, count in zip(inputs, counts, strict=True)]
    queries, keys = (_turned(rule, _head_norm(rule, one, generator)) for one in parts[:2])
    again = rule.heads // rule.key_heads
    scores = rule.scale * queries @ keys.repeat_interleave(again, 1).transpose(-1, -2)
    if rule.mask is not None:
        mask = torch.tensor(rule.mask, device=generator.device)
        scores = scores + (mask if mask.dim() == 2 else mask[:, None])
    if rule.own_masks is not None:
        scores = scores + torch.tensor(rule.own_masks, device=generator.device)
    if rule.causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    return (scores.softmax(-1) @ parts[2].repeat_interleave(again, 1)).transpose(1, 2).flatten(2)


def _head_norm(rule: Attention, x: Tensor, generator: torch.Generator) -> Tensor:
    norm = rule.query_norm
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    scale, shift = (draw(law, (x.shape[1], 1, x.shape[3]), generator) for law in (norm.scale, norm.shift))
    return scale * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() + shift


def _turned(rule: Attention, x: Tensor) -> Tensor:
    """Rotary embedding of the first features of a head, in pairs of halves."""
    if rule.angles is None:
        return x
    angles = torch.tensor(rule.angles, device=x.device)
    pairs = angles.shape[1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()]
    return torch.cat([*turned, x[..., 2 * pairs :]], dim=-1)


def _convolve(rule: Convolution, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    size = len(rule.kernel)
    if rule.transposed:
        shape = (rule.channels_in, rule.channels_out // rule.groups, *rule.kernel)
    else:
        shape = (rule.channels_out, rule.channels_in // rule.groups, *rule.kernel)
    weight = draw(rule.weight, shape, generator).requires_grad_()
    bias = draw(rule.bias, (rule.channels_out,), generator)
    apply: Any = {
        (1, False): functional.conv1d,
        (2, False): functional.conv2d,
        (3, False): functional.conv3d,
        (1, True): functional.conv_transpose1d,
        (2, True): functional.conv_transpose2d,
    }[size, rule.transposed]
    padding = tuple(before for before, _ in rule.padding)
    y = apply(
        x.movedim(-1, 1), weight, bias, stride=rule.stride, padding=padding, dilation=rule.dilation, groups=rule.groups
    )
    return y.movedim(1, -1), weight


def _normalize(rule: Normalize, x: Tensor, generator: torch.Generator) -> Tensor:
    features = x.shape[-1]
    if rule.running is not None:
        mean = draw(rule.running[0], (features,), generator)
        variance = draw(rule.running[1], (features,), generator)
        x = (x - mean) / (variance + rule.eps).sqrt()
    elif rule.kind == "rms":
        x = x / (x.square().mean(-1, keepdim=True) + rule.eps).sqrt()
    elif rule.kind == "layer":
        x = functional.layer_norm(x, (features,), eps=rule.eps)
    elif rule.kind == "group":
        x = functional.group_norm(x.movedim(-1, 1), rule.groups, eps=rule.eps).movedim(1, -1)
    else:
        flat = x.reshape(-1, features)
        x = ((flat - flat.mean(0)) / (flat.var(0, correction=0) + rule.eps).sqrt()).reshape(x.shape)
    return draw(rule.scale, (features,), generator) * x + draw(rule.shift, (features,), generator)


@dataclass(frozen=True)
class Measured:
    """Means over seeds with standard errors: K and D of every node, squared norms of weight gradients."""

    forward: dict[int, tuple[np.ndarray, np.ndarray]]
    backward: dict[int, tuple[np.ndarray, np.ndarray]]
    weights: dict[int, tuple[float, float]]


def measure(
    description: Description,
    inputs: dict[int, np.ndarray],
    *,
    seeds: int,
    reduce: Callable[[Signal], np.ndarray] = lambda signal: signal.gram,
    device: str = "cpu",
) -> tuple[Measured, dict[int, Signal]]:
    """Run a description `seeds` times; gradients start as fixed noise at each output, and its D is returned too."""
    kinds: list[dict[int, list[np.ndarray]]] = [{}, {}, {}]
    start: dict[int, Signal] = {}
    for seed in range(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        values: list[Tensor] = []
        weights: dict[int, Tensor] = {}
        for index, node in enumerate(description.nodes):
            if isinstance(node.rule, Given):
                value = torch.tensor(inputs[index], requires_grad=True, device=device)
            else:
                value, weight = run_rule(node, [values[at] for at in node.inputs], generator)
                if weight is not None:
                    weights[index] = weight
            value.retain_grad()
            values.append(value)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for output in description.outputs:
            pull = output_pull(values[output].shape)
            start[output] = Signal.of_features(pull, reduce="sum")
            total = total + (values[output] * torch.tensor(pull, device=device)).sum()
        total.backward()
        for index, value in enumerate(values):
            kinds[0].setdefault(index, []).append(reduce(Signal.of_features(value.detach().cpu().numpy())))
            if value.grad is not None:
                kinds[1].setdefault(index, []).append(
                    reduce(Signal.of_features(value.grad.detach().cpu().numpy(), reduce="sum"))
                )
        for index, weight in weights.items():
            assert weight.grad is not None
            kinds[2].setdefault(index, []).append(np.array(float(weight.grad.square().sum())))
    forward, backward, norms = ({index: _mean(found) for index, found in kind.items()} for kind in kinds)
    return Measured(forward, backward, {i: (float(m), float(e)) for i, (m, e) in norms.items()}), start


def output_pull(shape: tuple[int, ...]) -> np.ndarray:
    """The gradient at an output: Gaussian, correlated between points."""
    rng = np.random.default_rng(7)
    return rng.standard_normal(shape) + 0.7 * rng.standard_normal(shape[-1])


def _mean(found: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    stack = np.stack(found)
    return stack.mean(0), stack.std(0, ddof=1) / len(stack) ** 0.5


def assert_agrees(
    predicted: np.ndarray | float, measured: tuple[Any, Any], *, allowance: float = TOLERANCE.finite_width
) -> None:
    """All entries within five standard errors, and `allowance` of the largest entry for finite width."""
    value, error = (np.asarray(one) for one in measured)
    scale = float(np.abs(value).max())
    over = np.abs(np.asarray(predicted) - value) - TOLERANCE.standard_errors * error - allowance * scale
    assert float(over.max()) <= 0, f"off by {np.abs(np.asarray(predicted) - value).max() / scale:.3g} of the largest"
