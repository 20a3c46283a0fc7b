"""Views, transposes, cuts and joins: what they do to the meaning of the axes."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sounding.reader.layout import COPIES, TURNS, VIEWS, Atom, Axis, Layout, moved, same_roles
from sounding.reader.trace import NotCovered, Trace, handles
from sounding.reader.values import Constant, Function, Measured, Scores, Traced, Value, each
from sounding.theory.signal.description import Join, Mix, Part, Pool, Take


def _subject(trace: Trace, item: Any) -> Value:
    """What a view looks at: a node, or scores, or a function that nothing is known of yet."""
    value = trace.of(item)
    if isinstance(value, Function):
        if not value.known:
            raise NotCovered(value.label)
        return trace.settle(value)
    return value


@handles(*COPIES, "lift_fresh", "_conj", "copy")
def unchanged(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Value | None:
    """A copy of a value is that value."""
    item = args[1] if trace.name == "copy" else args[0]
    return trace.of(item) if item.shape == out.shape else None


@handles("as_strided")
def restrided(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Other strides along axes of size 1 alone, as global pooling writes them, change nothing."""
    value = trace.of(args[0])
    usual = [math.prod(out.shape[axis + 1 :]) for axis in range(out.dim())]
    same = all(size == 1 or step == want for size, step, want in zip(out.shape, args[2], usual, strict=True))
    return value if same and isinstance(value, Traced) and value.layout.shape == tuple(out.shape) else None


@handles(*VIEWS, *TURNS)
def move(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Another shape of the same numbers, or axes in another order."""
    value = _subject(trace, args[0])
    if isinstance(value, Scores) and trace.name in ("permute", "transpose", "t"):
        raise NotCovered("products of queries and keys are transposed")
    if not isinstance(value, Traced):
        return value if isinstance(value, Scores) else None
    layout = moved(trace.name, value.layout, args, tuple(out.shape))
    if layout is None:
        raise NotCovered(f"a view as {tuple(out.shape)} cuts across samples, positions and features")
    return Traced(value.node, layout)


@handles("expand")
def spread(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A value repeated along an axis; repeated heads of grouped queries are features seen again."""
    value = _subject(trace, args[0])
    if not isinstance(value, Traced):
        return value if isinstance(value, Scores) else None
    layout = [()] * (out.dim() - len(value.layout)) + list(value.layout)
    axes: list[Axis] = []
    for axis, size, have in zip(layout, out.shape, Layout(layout).shape, strict=True):
        if size == have:
            axes.append(axis)
        else:
            again = trace.keys.atom("feature", int(size))
            axes.append((Atom("feature", (-again.key[0],), again.size),))  # a negative key marks repetition
    return Traced(value.node, Layout(axes))


@handles("slice", "select", "narrow")
def cut(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Part of an axis: some positions, or some features."""
    value = _subject(trace, args[0])
    if not isinstance(value, Traced):
        return None
    axis = args[1] % len(value.layout) if len(args) > 1 else 0
    size = value.layout.shape[axis]
    if trace.name == "select":
        start = args[2] % size
        return _part(trace, value, axis, start, start + 1, 1, drop=True)
    bounds = [*args[2:], None, None, None]
    begin, end, stride = slice(bounds[0], bounds[1], bounds[2]).indices(size)
    return _part(trace, value, axis, begin, end, stride, drop=False)


@handles("split", "split_with_sizes", "chunk", "unbind")
def pieces(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Value] | None:
    """All parts of an axis."""
    value = _subject(trace, args[0])
    if not isinstance(value, Traced):
        return None
    single = trace.name == "unbind"  # whose parts lose the axis, and whose arguments know no sizes
    axis = args[1] if single and len(args) > 1 else args[2] if len(args) > 2 else kwargs.get("dim", 0)
    axis %= len(value.layout)
    lengths = [1 if single else item.shape[axis] for item in out]
    ends = list(accumulate(lengths))
    return [
        _part(trace, value, axis, end - length, end, 1, drop=single) for length, end in zip(lengths, ends, strict=True)
    ]


def _part(trace: Trace, value: Traced, axis: int, start: int, stop: int, step: int, *, drop: bool) -> Traced:
    """The value of which a range along one axis is kept: features become a part, positions are taken."""
    layout, atoms = value.layout, value.layout[axis]
    length = max(0, -(-(stop - start) // step))
    if length == layout.shape[axis]:
        return value
    roles = layout.roles(axis)
    if "sample" in roles:
        raise NotCovered("some of the samples are left out")
    if len(roles) != 1 or length == 0:
        raise NotCovered("an axis is cut across its meaning")
    (role,) = roles
    key = (*atoms[0].key, 2 + start)  # behind 0 and 1, which the halves of a split atom have
    left: Axis = (Atom(role, key, length),) if length > 1 else ()
    small = Layout([*layout[:axis], *([] if drop else [left]), *layout[axis + 1 :]])
    draft = trace.drafts[value.node]
    if role == "feature":
        sources = frozenset((source, key, length) for source in draft.sources)
        inner = math.prod(atom.size for atom in layout.of("feature") if atom.key > atoms[0].key)
        rule = Part(start * inner, stop * inner)
        part = trace.add(
            rule, (value,), small, label=f"features {start * inner} to {stop * inner - 1}", sources=sources
        )
        trace.parts[part] = value
        return part
    grid = np.arange(layout.points.positions).reshape([a.size for a in layout.of("position")])
    merged, place = _along(layout, axis, grid)
    kept = np.take(merged, range(start, stop, step), axis=place).ravel()
    return trace.add(Take(tuple(map(int, kept))), (value,), small, label=f"{len(kept)} of the positions")


def _along(layout: Layout, axis: int, grid: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """The numbers of the positions with those that one axis holds merged, and which axis of them that is."""
    along = [layout.of("position").index(atom) for atom in layout[axis]]
    if along != list(range(along[0], along[0] + len(along))):
        raise NotCovered("positions are cut in another order than their own")
    return grid.reshape(*grid.shape[: along[0]], -1, *grid.shape[along[-1] + 1 :]), along[0]


@handles("roll")
def roll(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Positions shifted around, as windows of attention are from one block to the next."""
    value = _subject(trace, args[0])
    if not isinstance(value, Traced) or len(args) < 3:
        return None
    layout = value.layout
    grid = np.arange(layout.points.positions).reshape([a.size for a in layout.of("position")])
    for shift, axis in zip(args[1], args[2], strict=True):
        if layout.roles(axis % len(layout)) != {"position"}:
            raise NotCovered("samples or features are shifted around")
        merged, place = _along(layout, axis % len(layout), grid)
        grid = np.roll(merged, shift, place).reshape(grid.shape)
    return trace.add(Take(tuple(map(int, grid.ravel()))), (value,), layout, label="positions shifted around")


@handles("cat", "concat")
def join(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Values side by side."""
    items = [item for item in args[0] if item.numel()]
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    if len(items) == 1:
        return trace.of(items[0])
    found = [trace.of(item) for item in items]
    whole_of = _parent(trace, found)
    if whole_of is not None and whole_of.layout.shape == tuple(out.shape):
        # halves of one value turned and joined again, as rotary embeddings do on the way to a rotation
        return Function(whole_of, out, label="its parts joined in another way")
    known = next((value for value in found if isinstance(value, Traced)), None)
    if known is None:
        raise NotCovered("joined values of which none is a node")
    roles = known.layout.roles(axis)
    if roles not in ({"feature"}, {"position"}):
        raise NotCovered("values are joined along samples")
    (role,) = roles
    parts: list[Traced] = []
    for item, value in zip(items, found, strict=True):
        if isinstance(value, Constant | Measured):
            if isinstance(value, Measured) and value.reason:
                raise NotCovered(value.reason)
            other = known.layout.with_axis(axis, (trace.keys.atom(role, item.shape[axis]),))
            parts.append(trace.measure(value, other))
        else:
            settled = _subject(trace, item)
            assert isinstance(settled, Traced)
            parts.append(settled)
    whole = known.layout.with_axis(axis, (trace.keys.atom(role, out.shape[axis]),))
    if not all(same_roles(part.layout.with_axis(axis, whole[axis]), whole) for part in parts):
        raise NotCovered("joined values do not mean the same by their axes")
    if role == "position" and known.layout.of("position") != list(known.layout[axis]):
        raise NotCovered("positions of a grid are joined along one axis")
    if role == "feature":
        return trace.joined(tuple(part.node for part in parts), whole)
    if not trace.independent(*parts):
        raise NotCovered("joined values are not independent")
    return trace.add(Join("positions"), tuple(parts), whole, label="positions joined")


def _parent(trace: Trace, values: list[Value]) -> Traced | None:
    """The one value whose parts these are, scaled or not."""
    parents: set[Traced] = set()
    for value in values:
        if isinstance(value, Function) and value.layout is not None and value.factor is None:
            return None
        node = value.base if isinstance(value, Function) else value
        if not isinstance(node, Traced) or node not in trace.parts:
            return None
        parents.add(trace.parts[node])
    return parents.pop() if len(parents) == 1 else None


@handles("mean", "sum")
def average(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A mean or sum over all positions."""
    value = trace.of(args[0])
    if isinstance(value, Function) and not value.known:
        return None
    layout = value.base.layout if isinstance(value, Function) else value.layout if isinstance(value, Traced) else None
    if layout is None:
        return None
    dims = args[1] if len(args) > 1 and args[1] is not None else list(range(len(layout)))
    chosen = {axis % len(layout) for axis in (dims if isinstance(dims, list | tuple) else [dims])}
    if any(layout.roles(axis) - {"position"} for axis in chosen):
        return None  # over features: perhaps half of a norm
    node = _subject(trace, args[0])
    assert isinstance(node, Traced)
    grid = layout.of("position")
    gone = [atom for axis in chosen for atom in layout[axis]]
    count = math.prod(atom.size for atom in gone)
    weight = 1.0 if trace.name == "sum" else 1.0 / count
    keep = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    axes = [() if place in chosen else axis for place, axis in enumerate(layout)]
    small = Layout(axis for place, axis in enumerate(axes) if keep or place not in chosen)
    if weight != 1 and len(gone) == len(grid) > 0:  # over all positions, which sub-grids can follow too
        sizes = node.layout.points.grid
        whole = Pool(sizes, sizes, ((0, 0),) * len(sizes))
        return trace.add(whole, (node,), small, label="mean over positions")
    numbers = np.arange(math.prod(a.size for a in grid)).reshape([a.size for a in grid] or [1])
    order = [grid.index(a) for a in grid if a not in gone] + [grid.index(a) for a in gone]
    rows = numbers.transpose(order).reshape(-1, count) if grid else numbers.reshape(1, 1)
    matrix = np.zeros((len(rows), numbers.size))
    np.put_along_axis(matrix, rows, weight, axis=1)
    return trace.add(Mix(matrix), (node,), small, label="mean over positions" if weight != 1 else "sum over positions")


@handles(
    "avg_pool2d", "avg_pool1d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d"
)
def pool(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Average pooling over windows."""
    value = _subject(trace, args[0])
    if not isinstance(value, Traced):
        return None
    spatial = out.dim() - 2
    given = trace.arguments(args, kwargs)
    if "adaptive" in trace.name:
        sizes = list(zip(value.layout.shape[2:], out.shape[2:], strict=True))
        if any(size % wanted for size, wanted in sizes):
            raise NotCovered("adaptive pooling with windows of different sizes")
        given = {"kernel_size": [size // wanted for size, wanted in sizes]}
    kernel, padding = each(given["kernel_size"], spatial), each(given.get("padding", 0), spatial)
    stride = each(given.get("stride") or kernel, spatial)
    if given.get("ceil_mode"):
        raise NotCovered("average pooling that rounds its size up")
    if given.get("divisor_override"):
        raise NotCovered("average pooling with a divisor of its own")
    layout = Layout([*value.layout[:2], *(trace.keys.axis("position", size) for size in out.shape[2:])])
    rule = Pool(kernel, stride, tuple((p, p) for p in padding), bool(given.get("count_include_pad", True)))
    return trace.add(rule, (value,), layout, label="average pooling")
