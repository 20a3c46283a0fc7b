"""Operations on each number alone, sums, products, and what a constant does to a signal."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sounding.reader.laws import survey_law
from sounding.reader.layout import Layout, same_roles
from sounding.reader.recognize import recognize
from sounding.reader.softmax import on_scores
from sounding.reader.trace import NotCovered, Trace, handles
from sounding.reader.values import Constant, Function, Measured, Scores, Traced, Value, scalar, times
from sounding.theory.signal.description import ONE, Add, Multiply, Scale, Take

SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "^"}


@handles("pointwise")
def pointwise(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Value | None:
    """A function of each number of one value alone, kept as a function until somebody uses it."""
    if isinstance(out, Tensor) and _has_scores(trace, args):
        return on_scores(trace, args)
    parts: list[Function | float | Any] = []
    base: Traced | None = None
    for item in args:
        number = scalar(item)
        value = trace.of(item) if isinstance(item, Tensor) else None
        if value is None or (isinstance(value, Constant) and number is not None):
            parts.append(item if number is None or isinstance(item, bool) else number)
            continue
        if isinstance(value, Traced):
            value = Function(value, item, value.layout, lambda x: x, 1.0, "x")
        if not isinstance(value, Function) or (base is not None and value.base != base):
            return None
        base = value.base
        parts.append(value)
    if base is None or not isinstance(out, Tensor) or out.shape != base.layout.shape:
        return None
    functions = [part for part in parts if isinstance(part, Function)]
    operation = _out_of_place(trace.func)
    plain = {key: item for key, item in kwargs.items() if not isinstance(item, Tensor)}
    label = _label(trace.name, parts, plain)
    # each once: a loop that divides a value by a sum of itself would double them at every turn
    inherited = [n for part in functions for n in part.numbers]
    numbers = tuple(dict.fromkeys([*inherited, *(part for part in parts if isinstance(part, float))]))
    known = all(part.apply is not None for part in functions)
    apply = _composed(operation, tuple(parts), plain) if known else None
    # with a keyword (rounding_mode) a quotient is no multiple of the value
    function = Function(base, out, base.layout, apply, None if plain else _factor(trace, parts), label, numbers)
    return function if apply is not None else recognize(trace, function) or function


@handles("_prelu_kernel")
def prelu(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Value | None:
    """A learned slope below zero that is one number still, as it starts: leaky ReLU."""
    slopes = args[1].detach()
    if not bool((slopes == slopes.reshape(-1)[0]).all()):
        return None
    trace.func = torch.ops.aten.leaky_relu.default
    return pointwise(trace, (args[0], float(slopes.reshape(-1)[0])), kwargs, out)


@handles("add", "sub", "rsub")
def add(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A sum: of a function of one node, of a signal and a constant, or of independent signals."""
    if any(scalar(item) is not None for item in args[:2]):
        return pointwise(trace, args, kwargs, out)
    first, second = trace.of(args[0]), trace.of(args[1])
    weight = float(kwargs.get("alpha", 1.0))
    signs = {"add": (1.0, weight), "sub": (1.0, -weight), "rsub": (-weight, 1.0)}[trace.name]
    if _has_scores(trace, args):
        return on_scores(trace, args)
    if isinstance(second, Constant):
        return _add_constant(trace, first, second, signs, out)
    if isinstance(first, Constant):
        return _add_constant(trace, second, first, signs[::-1], out)
    if _one_base(first, second):
        return pointwise(trace, args, kwargs, out)
    left, right = _participants(trace, (first, second), (args[0], args[1]), out)
    if not same_roles(left.layout, right.layout):
        raise NotCovered("the two terms of a sum do not mean the same by their axes")
    if left.node == right.node:
        return trace.add(times(sum(signs)), (left,), left.layout, label="sum with itself")
    if not trace.independent(left, right):
        raise NotCovered("the terms of a sum are not independent")
    return trace.add(Add(signs), (left, right), left.layout, label="sum")


@handles("mul", "div")
def multiply(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A product: with a number, with one constant per feature, or of two independent signals."""
    if any(scalar(item) is not None for item in args[:2]):
        return pointwise(trace, args, kwargs, out)
    first, second = trace.of(args[0]), trace.of(args[1])
    if _has_scores(trace, args):
        return on_scores(trace, args)
    divides = trace.name == "div"
    if isinstance(second, Constant) or (isinstance(first, Constant) and not divides):
        constant, other = (second, first) if isinstance(second, Constant) else (first, second)
        assert isinstance(constant, Constant)
        value = trace.ready(other)
        if value is None or tuple(out.shape) != value.layout.shape:
            return None
        tensor = constant.tensor.reciprocal() if divides else constant.tensor
        if not _per_feature(value.layout, tensor):
            return None
        label = f"scale by {constant.parameter or 'constants'}"
        return trace.add(Scale(survey_law(tensor)), (value,), value.layout, label=label)
    if _one_base(first, second):
        return pointwise(trace, args, kwargs, out)
    if divides:
        return None
    left, right = _participants(trace, (first, second), (args[0], args[1]), out)
    if not same_roles(left.layout, right.layout) or not trace.independent(left, right):
        raise NotCovered("the factors of a product are not independent")
    return trace.add(Multiply(), (left, right), left.layout, label="product")


@handles("masked_fill", "where", "_softmax", "_safe_softmax")
def scores_only(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Masks and the softmax, of which rules exist inside attention only."""
    return on_scores(trace, args) if _has_scores(trace, args) else None


def _has_scores(trace: Trace, args: tuple[Any, ...]) -> bool:
    return any(isinstance(trace.of(item), Scores) for item in args if isinstance(item, Tensor))


def _one_base(first: Value, second: Value) -> bool:
    bases = [value.base if isinstance(value, Function) else value for value in (first, second)]
    return isinstance(bases[0], Traced) and bases[0] == bases[1]


def _participants(
    trace: Trace, values: tuple[Value, Value], items: tuple[Tensor, Tensor], out: Tensor
) -> tuple[Traced, Traced]:
    """The terms of a sum, or the factors of a product, as nodes of the result's shape."""
    uncovered = [isinstance(value, Measured) or (isinstance(value, Function) and not value.layout) for value in values]
    found = [None if measured else trace.settle(value) for value, measured in zip(values, uncovered, strict=True)]
    for at, value in enumerate(values):
        if not uncovered[at]:
            continue
        other, reason = found[1 - at], value.reason if isinstance(value, Measured) else getattr(value, "label", "")
        if reason and (other is None or not trace.is_foreign(other, value)):
            raise NotCovered(reason)
        features = None  # the axis that holds them in what it meets
        if other is not None and tuple(items[at].shape) == other.layout.shape:
            features = next((axis for axis in range(out.dim()) if "feature" in other.layout.roles(axis)), None)
        found[at] = trace.settle(value, features=features)
    left, right = (broadcast(trace, one, tuple(out.shape)) for one in found if one is not None)
    return left, right


def broadcast(trace: Trace, value: Traced, shape: tuple[int, ...]) -> Traced:
    """The value repeated over positions that it does not have."""
    layout = Layout([()] * (len(shape) - len(value.layout)) + list(value.layout))
    if layout.shape == shape:
        return Traced(value.node, layout)
    if layout.of("position"):
        raise NotCovered("a value is repeated along some of its axes only")
    repeated = [
        axis if size == have else trace.keys.axis("position", size)
        for axis, size, have in zip(layout, shape, layout.shape, strict=True)
    ]
    wide = Layout(repeated)
    return trace.add(Take((0,) * wide.points.positions), (value,), wide, label="repeated over positions")


def _add_constant(
    trace: Trace, other: Value, constant: Constant, signs: tuple[float, float], out: Tensor
) -> Value | None:
    """A value plus a constant: a shift of features, or a sum with a measured signal where positions differ."""
    value = trace.settle(other) if isinstance(other, Measured) and not other.reason else trace.ready(other)
    if value is None:
        return None
    value = broadcast(trace, value, tuple(out.shape))
    if signs[0] != 1.0:
        value = trace.add(times(signs[0]), (value,), value.layout, label=f"{signs[0]:g} times")
    tensor = constant.tensor * signs[1]
    label = f"shift by {constant.parameter or 'constants'}"
    if _per_feature(value.layout, tensor):
        return trace.add(Scale(ONE, survey_law(tensor)), (value,), value.layout, label=label)
    given = trace.measure(Constant(tensor.expand(out.shape)), value.layout)
    return trace.add(Add((1.0, 1.0)), (value, given), value.layout, label=label)


def _per_feature(layout: Layout, tensor: Tensor) -> bool:
    """Whether a constant differs between features only."""
    sizes = (1,) * (len(layout) - tensor.dim()) + tuple(tensor.shape)
    return all(size == 1 or not layout.roles(axis) - {"feature"} for axis, size in enumerate(sizes))


def _factor(trace: Trace, parts: list[Any]) -> float | None:
    """c where the function is x ↦ c·x."""
    functions = [part for part in parts if isinstance(part, Function)]
    if len(functions) != 1 or functions[0].factor is None:
        return None
    factor = functions[0].factor
    match trace.name, parts:
        case "neg", _:
            return -factor
        case ("mul", [Function(), float(number), *_]) | ("mul", [float(number), Function(), *_]):
            return factor * number
        case "div", [Function(), float(number), *_] if number:
            return factor / number
    return None


def _label(name: str, parts: list[Any], plain: dict[str, Any]) -> str:
    words = [
        part.label if isinstance(part, Function) else f"{part:g}" if isinstance(part, float) else str(part)
        for part in parts
    ]
    if name in SIGNS and len(words) == 2 and not plain:  # activations are kept by their labels
        return f"({words[0]}{SIGNS[name]}{words[1]})"
    words += [f"{key}={item}" for key, item in plain.items()]
    return f"{name}({', '.join(words)})"


def _out_of_place(func: Any) -> Any:
    """The operation that returns what this one writes over its argument."""
    name = func._overloadpacket.__name__
    if not name.endswith("_"):
        return func
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(plain, func._overloadname, None) or operator.not_


def _composed(operation: Any, parts: tuple[Any, ...], plain: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """A function of one tensor from an operation and its parts."""

    def apply(x: Tensor) -> Tensor:
        inner = [part.apply(x) if isinstance(part, Function) and part.apply else part for part in parts]
        # a number in the place of a tensor, as in 1 - x, must be one of the tensor's kind
        wanted = [argument.type.kind() == "TensorType" for argument in operation._schema.arguments]
        ready = [
            torch.tensor(item, dtype=x.dtype) if tensor and isinstance(item, float) else item
            for item, tensor in zip(inner, wanted, strict=False)
        ]
        found: Tensor = operation(*ready, **plain)
        return found

    return apply
