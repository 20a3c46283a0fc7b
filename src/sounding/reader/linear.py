"""Linear maps, convolutions and normalizations: where the laws of a module's own weights enter the description."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from sounding.reader.laws import is_balanced, survey_law
from sounding.reader.layout import Layout
from sounding.reader.softmax import attend, score
from sounding.reader.trace import NotCovered, Trace, handles
from sounding.reader.values import Constant, Function, Measured, Padded, Scores, Traced, Value, each
from sounding.theory.signal.description import (
    ONE,
    ZERO,
    Add,
    Convolution,
    Given,
    Law,
    Linear,
    Mix,
    Normalize,
    Regrid,
    Scale,
    Tied,
)


@handles("mm", "addmm")
def matrix_product(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A signal times a constant matrix, and perhaps a bias in front of both."""
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        raise NotCovered("a matrix product with factors of its own")
    *before, left, right = args
    bias = trace.of(before[0]) if before else None
    if not isinstance(bias, Constant | None):
        raise NotCovered("a matrix product whose bias is no constant")
    first, second = trace.of(left), trace.of(right)
    if isinstance(second, Constant) and not isinstance(first, Constant):
        return _apply(trace, trace.settle(first), second, second.tensor, bias)
    if isinstance(first, Constant) and not isinstance(second, Constant) and bias is None:
        value = trace.settle(second, features=0)  # A x is (xᵀ Aᵀ)ᵀ
        turned = Traced(value.node, Layout(value.layout[::-1]))
        made = _apply(trace, turned, first, first.tensor.T, None)
        return Traced(made.node, Layout(made.layout[::-1]))
    raise NotCovered("the product of two signals")


@handles("bmm", "baddbmm")
def batched_product(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A batch of matrix products: a linear map in disguise, or a half of attention."""
    *before, left, right = args[: 3 if trace.name == "baddbmm" else 2]
    first, second = trace.of(left), trace.of(right)
    if isinstance(first, Scores):
        return attend(trace, first, second, out)
    if isinstance(second, Constant) and right.shape[0] == 1 and not before and not isinstance(first, Constant):
        value = trace.settle(first)
        flat = Traced(value.node, Layout(value.layout[1:]))
        made = _apply(trace, flat, second, second.tensor[0], None)
        return Traced(made.node, Layout([(), *made.layout]))
    if isinstance(first, Constant | Measured) or isinstance(second, Constant | Measured):
        raise NotCovered("a product with one matrix per sample")
    scores = score(trace, trace.settle(first), trace.settle(second))
    if not before:
        return scores
    beta, factor = float(kwargs.get("beta", 1)), float(kwargs.get("alpha", 1))
    # beside beta = 0 the tensor holds whatever lay in memory, NaN included
    return replace(scores, factor=factor, mask=before[0].detach() * beta if beta and before[0].any() else None)


def _apply(trace: Trace, value: Traced, constant: Constant, matrix: Tensor, bias: Constant | None) -> Traced:
    """The value with its last axis sent through a matrix (in, out)."""
    fan_in, fan_out = matrix.shape
    roles = value.layout.roles(-1)
    if "sample" in roles:
        raise NotCovered("a matrix that mixes samples")
    if roles == {"position"}:
        return _mixed(trace, value, constant, matrix, bias)
    if "position" in roles:
        value = trace.flattened(value, len(value.layout) - 1)
    layout = value.layout.with_axis(
        len(value.layout) - 1, (trace.keys.atom("feature", fan_out),) if fan_out > 1 else ()
    )
    rule = Linear(
        fan_in,
        fan_out,
        replace(survey_law(matrix), balanced=is_balanced(matrix.T)),
        ZERO if bias is None else survey_law(bias.tensor),
    )
    inputs: tuple[Traced, ...] = (value,)
    label = f"linear {fan_in} → {fan_out}"
    if constant.parameter in trace.embedded:
        own = _embedding_of(trace, value, fan_in)
        rule, label = Tied(fan_in, fan_out, rule.weight, rule.bias), f"tied {label}"
        if own is not None:
            inputs = (value, own, _image(trace, own, matrix, rule.weight.second_moment))
    return trace.fresh(rule, inputs, layout, label=label, weight=constant.parameter)


def _embedding_of(trace: Trace, value: Traced, features: int) -> Traced | None:
    """The one measured input, of so many features, that a stream of sums, scales and norms began with."""
    waiting, found, seen = [value.node], set[int](), set[int]()
    while waiting:
        draft = trace.drafts[at := waiting.pop()]
        if at in seen:
            continue
        seen.add(at)
        if isinstance(draft.rule, Given) and not draft.rule.constant and draft.features == features:
            found.add(at)
        elif isinstance(draft.rule, Add | Scale | Normalize):
            waiting += draft.inputs
    return Traced(found.pop(), value.layout) if len(found) == 1 else None


def _image(trace: Trace, own: Traced, matrix: Tensor, square: float) -> Traced:
    """What a matrix (in, out) makes of an embedding, in as many features as it has, over the weights' mean square."""
    array = trace.drafts[own.node].features_array
    assert array is not None
    wide = matrix.detach().double()
    values, vectors = torch.linalg.eigh(wide @ wide.T / (wide.shape[1] * max(square, 1e-300)))
    root = vectors * values.clamp_min(0).sqrt()
    made = trace.measure(Measured(array, layout=own.layout), own.layout)
    trace.drafts[made.node].features_array = array.double() @ root.to(array.device)
    return made


def _mixed(trace: Trace, value: Traced, constant: Constant, matrix: Tensor, bias: Constant | None) -> Traced:
    """A linear map over positions: they are mixed by the module's own weights, feature by feature."""
    if len(value.layout.of("position")) != len(value.layout[-1]):
        raise NotCovered("a matrix that mixes some of the positions")
    layout = value.layout.with_axis(len(value.layout) - 1, trace.keys.axis("position", matrix.shape[1]))
    mix = Mix(matrix.detach().double().T.cpu().numpy())
    label = f"positions mixed {matrix.shape[0]} → {matrix.shape[1]}"
    # The entries are random and centred, so that what they mix is uncorrelated with what is added to it.
    make = trace.fresh if constant.parameter else trace.add
    mixed = make(mix, (value,), layout, label=label, weight=constant.parameter)
    if bias is None:
        return mixed
    shape = [1] * (len(layout) - 1) + [-1]
    shift = trace.measure(Constant(bias.tensor.reshape(shape).expand(layout.shape)), layout)
    return trace.add(Add((1.0, 1.0)), (mixed, shift), layout, label="shift per position")


@handles("convolution", "cudnn_convolution")
def convolve(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A convolution with constant weights."""
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = args[:9]
    kernel = trace.of(weight)
    if not isinstance(kernel, Constant):
        raise NotCovered("a convolution whose weights depend on the inputs")
    source = trace.of(x)
    if isinstance(source, Measured) and x.dim() != weight.dim():
        raise NotCovered("a convolution without an axis of samples")
    axes = range(2, x.dim())
    zeros = source.sides if isinstance(source, Padded) else ((0, 0),) * len(axes)
    value = source.base if isinstance(source, Padded) else trace.settle(source, features=1)
    if value.layout.roles(1) - {"feature"} or any(value.layout.roles(axis) - {"position"} for axis in axes):
        raise NotCovered("a convolution over axes that are not positions")
    if value.layout.roles(0) - {"sample"}:
        raise NotCovered("a convolution of part of the positions")
    sizes = value.layout.shape[2:]
    # axes of size 1 hold no atom, a view may have cut a row of tokens into a grid, and the rule wants the whole grid
    if value.layout.points.grid != sizes or trace.drafts[value.node].points.grid != sizes:
        whole = [*value.layout[:2], *((trace.keys.atom("position", size),) for size in sizes)]
        value = trace.add(Regrid(sizes), (value,), Layout(whole), label="grid")
    made = [(trace.keys.atom("position" if axis > 1 else "feature", out.shape[axis]),) for axis in (1, *axes)]
    layout = Layout([value.layout[0], *made])
    if transposed and (any(extra) or any(map(any, zeros))):
        raise NotCovered("a transposed convolution with padding of its output or of its own kind")
    spatial = len(axes)
    rule = Convolution(
        int(x.shape[1]),
        int(out.shape[1]),
        tuple(weight.shape[2:]),
        each(stride, spatial),
        tuple((p + before, p + behind) for p, (before, behind) in zip(each(padding, spatial), zeros, strict=True)),
        each(dilation, spatial),
        int(groups),
        replace(survey_law(kernel.tensor), balanced=not transposed and is_balanced(kernel.tensor)),
        _law(trace, bias, ZERO),
        bool(transposed),
    )
    size = "×".join(map(str, rule.kernel))
    label = f"convolution {size}, {rule.channels_in} → {rule.channels_out}"
    return trace.fresh(rule, (value,), layout, label=label, weight=kernel.parameter)


@handles("constant_pad_nd")
def pad(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Zeros around the grid, which belong to the convolution behind them."""
    value = trace.of(args[0])
    if isinstance(value, Function) and value.apply is not None:
        value = trace.settle(value)
    sides = list(zip(args[1][::2], args[1][1::2], strict=True))[::-1]
    if isinstance(value, Measured) and not value.reason and value.tensor.is_floating_point() and args[0].dim() > 2:
        value = trace.settle(value, features=1)
    if not isinstance(value, Traced) or (args[2] if len(args) > 2 else kwargs.get("value", 0)) or min(args[1]) < 0:
        return None
    axes = range(2, out.dim())
    if len(sides) > len(axes) or any(value.layout.roles(axis) - {"position"} for axis in axes):
        return None
    zeros = ((0, 0),) * (len(axes) - len(sides)) + tuple((int(before), int(behind)) for before, behind in sides)
    return Padded(value, out, label="zeros around the grid" + trace.place_words(), sides=zeros)


@handles("native_layer_norm")
def layer_norm(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Value]:
    """Layer norm over the features of a point, or over all of a sample."""
    x, shape, weight, bias, eps = args[:5]
    value = trace.settle(trace.of(x))
    over = range(x.dim() - len(shape), x.dim())
    roles = set().union(*(value.layout.roles(axis) for axis in over))
    kind: Literal["layer", "group"]
    if roles == {"feature"}:
        kind = "layer"
    elif roles == {"feature", "position"} and all(not value.layout.roles(a) - {"sample"} for a in range(over.start)):
        kind = "group"
    else:
        raise NotCovered("a layer norm over samples or over positions alone")
    return _normalized(trace, value, weight, Normalize(kind, float(eps), shift=_law(trace, bias, ZERO)), "layer norm")


@handles("_fused_rms_norm")
def rms_norm(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Value]:
    """RMS norm over the features of a point."""
    x, shape, weight, eps = args[:4]
    value = trace.settle(trace.of(x))
    over = range(x.dim() - len(shape), x.dim())
    if any(value.layout.roles(axis) - {"feature"} for axis in over):
        raise NotCovered("an RMS norm over more than the features")
    small = float(eps) if eps is not None else torch.finfo(x.dtype).eps
    return _normalized(trace, value, weight, Normalize("rms", small), "RMS norm")


@handles("native_group_norm")
def group_norm(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Value]:
    """Group norm over groups of channels and all positions."""
    x, weight, bias, _, _, _, groups, eps = args[:8]
    value = trace.settle(trace.of(x), features=1)
    rule = Normalize("group", float(eps), shift=_law(trace, bias, ZERO), groups=int(groups))
    return _normalized(trace, value, weight, rule, "group norm" if groups > 1 else "group norm of one group")


@handles("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
def batch_norm(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Value]:
    """Batch norm with the statistics of the batch, or with running ones."""
    if trace.name.endswith("no_training"):
        (x, weight, bias, mean, variance, _, eps), training = args[:7], False
    elif len([item for item in args[3:5] if isinstance(item, Tensor)]) == 2 or args[3] is None:
        x, weight, bias, mean, variance, training, _, eps = args[:8]
    else:  # the form without running statistics
        (x, weight, bias, training, _, eps), mean, variance = args[:6], None, None
    value = trace.settle(trace.of(x), features=1)
    if value.layout.roles(1) - {"feature"}:
        raise NotCovered("a batch norm whose channels are not the features")
    running = None if training else (_law(trace, mean, ZERO), _law(trace, variance, ONE))
    rule = Normalize("batch", float(eps), shift=_law(trace, bias, ZERO), running=running)
    return _normalized(trace, value, weight, rule, "batch norm" if training else "batch norm with running statistics")


def _normalized(trace: Trace, value: Traced, weight: Any, rule: Normalize, label: str) -> list[Value]:
    """The node of a norm with this weight."""
    rule = replace(rule, scale=_law(trace, weight, ONE))
    constant = trace.of(weight) if isinstance(weight, Tensor) else None
    name = constant.parameter if isinstance(constant, Constant) else ""
    return [trace.add(rule, (value,), value.layout, label=label, weight=name)]


def _law(trace: Trace, item: Any, default: Law) -> Law:
    if not isinstance(item, Tensor):
        return default
    value = trace.of(item)
    tensor = value.tensor if isinstance(value, Constant | Measured | Function) else item
    return survey_law(tensor)
