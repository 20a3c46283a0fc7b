"""Every rule of the signal against explicit random networks of growing width, in standard errors.

    python bench/wide_rules.py --device cuda --widths 256,1024,4096 --seeds 64

Each rule stands between a random linear map of fixed inputs and another one. Of every node the traces of K and D and a
quadratic form of each in fixed weights of the points, and the squared norms of weight gradients, are averaged over
seeds. A line gives, for each width, the largest deviation in standard errors and where it is, and the relative error
there; where a rule leaves out terms of order 1/width, the relative error falls as 1/width. Convolutions have a quarter
of the width as channels, whose nine taps count like it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from signal_networks import measure
from sounding.activations import resolve
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
    Rule,
    Scale,
    Signal,
    Take,
    propagate,
)
from sounding.theory.signal.heads import rotary_angles

INPUTS = 64
ENOUGH = 4.0  # standard errors within which a rule agrees
VECTORS, TOKENS, IMAGES = Points(6), Points(3, (6,)), Points(3, (4, 4))
Step = tuple[Rule, Points]


def linear(inputs: int, outputs: int, gain: float = 1.0, **laws: Law) -> Linear:
    return Linear(inputs, outputs, Law(gain / inputs), **laws)


def chained(points: Points, width: int, *steps: Step) -> Description:
    """Inputs, a random map to the width, the steps, and a random map behind them."""
    nodes = [Node(Given(), (), points, INPUTS), Node(linear(INPUTS, width), (0,), points, width)]
    for rule, behind in steps:
        nodes.append(Node(rule, (len(nodes) - 1,), behind, width))
    if isinstance(steps[-1][0] if steps else None, Flatten):
        nodes[-1] = Node(Flatten(), (len(nodes) - 2,), Points(points.samples), width * points.positions)
    last = nodes[-1]
    nodes.append(Node(linear(last.features, width), (len(nodes) - 1,), last.points, width))
    return Description(tuple(nodes), (len(nodes) - 1,))


def attention(width: int, *, gain: float = 1.0, key_heads: int | None = None, **options: Any) -> Description:
    size = 32
    heads = width // size
    own = heads // 2 if key_heads else heads
    maps = [linear(INPUTS, count * size, gain) for count in (heads, own, own)]
    nodes = [Node(Given(), (), TOKENS, INPUTS)]
    nodes += [Node(one, (0,), TOKENS, one.fan_out) for one in maps]
    nodes.append(Node(Attention(heads, own, size, size**-0.5, **options), (1, 2, 3), TOKENS, width))
    nodes.append(Node(linear(width, width), (4,), TOKENS, width))
    return Description(tuple(nodes), (5,))


def convolved(width: int, *, groups: int = 1, stride: int = 1, transposed: bool = False) -> Description:
    channels = max(width // 4, 32)
    groups = channels if groups < 0 else groups
    size = 4 // stride if not transposed else 4 * stride
    behind = Points(3, (size, size))
    kernel = 3 if stride == 1 else 2
    padding = ((1, 1),) * 2 if stride == 1 else ((0, 0),) * 2
    law, ones = Law(groups / (channels * kernel**2)), (1, 1)
    rule = Convolution(
        channels, channels, (kernel,) * 2, (stride,) * 2, padding, ones, groups, law, transposed=transposed
    )
    nodes = [Node(Given(), (), IMAGES, INPUTS), Node(linear(INPUTS, channels), (0,), IMAGES, channels)]
    nodes += [Node(rule, (1,), behind, channels), Node(linear(channels, channels), (2,), behind, channels)]
    return Description(tuple(nodes), (3,))


def two_branches(width: int, rule: Rule, first: Rule, second: Rule | None = None) -> Description:
    """Two random maps of one input, a function of the first, and a rule of both."""
    nodes = [Node(Given(), (), VECTORS, INPUTS)]
    nodes += [Node(linear(INPUTS, width), (0,), VECTORS, width) for _ in range(2)]
    nodes.append(Node(first, (1,), VECTORS, width))
    nodes.append(Node(second or Scale(Law(0.0, 1.0)), (2,), VECTORS, width))
    joined = 2 * width if isinstance(rule, Join) else width
    nodes.append(Node(rule, (3, 4), VECTORS, joined))
    nodes.append(Node(linear(joined, width), (5,), VECTORS, width))
    return Description(tuple(nodes), (6,))


def residual(width: int, kind: str) -> Description:
    """x + W₂ φ(W₁ norm(x)), twice, as a pre-norm block has it."""
    nodes = [Node(Given(), (), VECTORS, INPUTS), Node(linear(INPUTS, width), (0,), VECTORS, width)]
    for _ in range(2):
        stream = len(nodes) - 1
        nodes.append(Node(Normalize(kind, 1e-5), (stream,), VECTORS, width))  # type: ignore[arg-type]
        nodes.append(Node(linear(width, width, 2.0), (stream + 1,), VECTORS, width))
        nodes.append(Node(Elementwise(resolve("relu")), (stream + 2,), VECTORS, width))
        nodes.append(Node(linear(width, width), (stream + 3,), VECTORS, width))
        nodes.append(Node(Add((1.0, 0.5)), (stream, stream + 4), VECTORS, width))
    return Description(tuple(nodes), (len(nodes) - 1,))


def swish(x: Any) -> Any:
    return x * 1.5 / (1 + (-x).exp())


def cases() -> dict[str, Callable[[int], Description]]:
    """A description of every rule, by the width."""
    generator = np.random.default_rng(1)
    fixed = generator.standard_normal((4, 6)) / 2
    hidden = np.where(generator.random((6, 6)) < 0.3, -np.inf, 0.0)
    np.fill_diagonal(hidden, 0.0)
    shifted = generator.standard_normal((6, 6))
    silu, gelu = Elementwise(resolve("silu")), Elementwise(resolve("gelu"))
    names = ("relu", "leaky_relu:0.1", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "softplus", "elu", "selu", "erf")
    names = (*names, "hardtanh", "sin")
    turns = rotary_angles(6, 32)
    table: dict[str, Callable[[int], Description]] = {
        "linear, weights with a mean, bias": lambda n: chained(
            VECTORS, n, (Linear(n, n, Law(1 / n, 1 / n), Law(0.1, 0.2)), VECTORS)
        ),
        **{
            name: lambda n, name=name: chained(VECTORS, n, (Elementwise(resolve(name)), VECTORS))  # type: ignore[misc]
            for name in names
        },
        "a callable": lambda n: chained(VECTORS, n, (Elementwise(resolve(swish)), VECTORS)),
        "RMS norm": lambda n: chained(VECTORS, n, (Normalize("rms", 1e-3, Law(0.1, 1.0)), VECTORS)),
        "layer norm": lambda n: chained(VECTORS, n, (Normalize("layer", 1e-3, Law(0.1, 1.0), Law(0.1)), VECTORS)),
        "group norm": lambda n: chained(IMAGES, n, (Normalize("group", 1e-3, groups=4), IMAGES)),
        "batch norm, 6 points": lambda n: chained(VECTORS, n, (Normalize("batch", 1e-5), VECTORS)),
        "batch norm, ReLU": lambda n: chained(
            TOKENS, n, (Normalize("batch", 1e-5), TOKENS), (Elementwise(resolve("relu")), TOKENS)
        ),
        "running statistics": lambda n: chained(
            VECTORS, n, (Normalize("batch", 1e-5, running=(Law(0.01, 0.1), Law(0.01, 1.0))), VECTORS)
        ),
        "scale and shift": lambda n: chained(VECTORS, n, (Scale(Law(0.2, 0.5), Law(0.1, 0.1)), VECTORS)),
        "sum": lambda n: two_branches(n, Add((1.0, 0.7)), Elementwise(resolve("relu"))),
        "SwiGLU": lambda n: two_branches(n, Multiply(), silu),
        "GEGLU": lambda n: two_branches(n, Multiply(), gelu),
        "features joined": lambda n: two_branches(n, Join("features"), Elementwise(resolve("tanh"))),
        "part": lambda n: chained(VECTORS, n, (Part(0, n), VECTORS)),
        "positions mixed": lambda n: chained(TOKENS, n, (Mix(fixed), Points(3, (4,)))),
        "positions taken": lambda n: chained(TOKENS, n, (Take((0, 2)), Points(3, (2,)))),
        "flatten": lambda n: chained(Points(3, (4,)), n // 4, (Flatten(), Points(3))),
        "average pooling": lambda n: chained(IMAGES, n, (Pool((2, 2), (2, 2), ((0, 0),) * 2), Points(3, (2, 2)))),
        "convolution": convolved,
        "convolution, 4 groups": lambda n: convolved(n, groups=4),
        "convolution, depthwise": lambda n: convolved(n, groups=-1),
        "convolution, stride 2": lambda n: convolved(n, stride=2),
        "convolution, transposed": lambda n: convolved(n, stride=2, transposed=True),
        "attention": attention,
        "attention, causal": lambda n: attention(n, causal=True),
        "attention, masked": lambda n: attention(n, mask=hidden),
        "attention, position bias": lambda n: attention(n, mask=shifted),
        "attention, a bias of every head": lambda n: attention(
            n, own_masks=np.linspace(0, 1, n // 32)[:, None, None] * shifted
        ),
        "attention, scores of std 4": lambda n: attention(n, gain=4.0),
        "attention, grouped queries": lambda n: attention(n, key_heads=2, causal=True),
        "attention, rotary": lambda n: attention(n, angles=turns, causal=True),
        "attention, QK-norm": lambda n: attention(n, query_norm=Normalize("rms", 1e-5)),
        "two residual blocks, layer norm": lambda n: residual(n, "layer"),
        "two residual blocks, batch norm": lambda n: residual(n, "batch"),
    }
    return table


def correlated(points: Points) -> np.ndarray:
    """Inputs whose points differ in length and share a direction."""
    generator = np.random.default_rng(3)
    shape = (points.samples, *points.grid)
    length = 1 + 0.5 * generator.random(shape)[..., None]
    own, common = generator.standard_normal((*shape, INPUTS)), generator.standard_normal(INPUTS)
    return np.asarray(length * (0.8 * own + 0.6 * common))


def reduced(signal: Signal) -> np.ndarray:
    """The trace, and a form in fixed weights of the points, which no norm and no softmax makes zero."""
    weights = np.random.default_rng(5).standard_normal(len(signal.gram))
    return np.array([np.trace(signal.gram), weights @ signal.gram @ weights])


def judge(description: Description, *, seeds: int, device: str) -> list[tuple[float, float, str]]:
    """The deviation in standard errors, the relative error and the name of every number."""
    inputs = {0: correlated(description.nodes[0].points)}
    measured, start = measure(description, inputs, seeds=seeds, reduce=reduced, device=device)
    given = {0: Signal.of_features(inputs[0])}
    # heads of attention are drawn until their mean is far better known than that of the networks
    found = propagate(description, given=given, gradients=start, draws=4096, precision=1e-3)
    sides = (("K", found.forward, measured.forward), ("D", found.backward, measured.backward))
    judged = []
    for index in range(1, len(description.nodes)):
        rule = type(description.nodes[index].rule).__name__
        for side, predicted, seen in sides:
            one = predicted[index]
            assert one is not None
            (value, error), expected = seen[index], reduced(one)
            scale = max(abs(float(expected[0])), 1e-300)
            for what, mean, sd, theory in zip(("trace", "form"), value, error, expected, strict=True):
                spread = max(float(sd), 1e-7 * scale)  # what no seed moves is compared by rounding
                judged.append(((mean - theory) / spread, (mean - theory) / scale, f"{side} {what} at {rule} {index}"))
        square = found.weight_gradients[index]
        if square is not None:
            mean, sd = measured.weights[index]
            judged.append(((mean - square) / max(sd, 1e-7 * square), mean / square - 1, f"weight gradient {index}"))
    return judged


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--widths", default="256,1024")
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    widths = [int(one) for one in options.widths.split(",")]
    outside = 0
    for name, build in cases().items():
        if options.only not in name:
            continue
        words = []
        for width in widths:
            judged = judge(build(width), seeds=options.seeds, device=options.device)
            errors, relative, where = max(judged, key=lambda one: abs(one[0]))
            outside += abs(errors) > ENOUGH and width >= 1024
            mark = "*" if abs(errors) > ENOUGH else " "
            words.append(f"{width:5}: {errors:6.1f}{mark} ({100 * relative:6.2f}%, {where})")
        print(f"{name:34} " + "   ".join(words), flush=True)
    print(f"beyond {ENOUGH:g} standard errors at width 1024 and more: {outside}")


if __name__ == "__main__":
    main()
