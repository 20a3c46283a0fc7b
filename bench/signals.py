"""The signal's calculus: a residual network beside its prediction, and what predictions of large networks cost.

python bench/signals.py accuracy   # the table of docs/signal.md: six seeds of a pre-activation ResNet with batch norm
python bench/signals.py cost       # processor seconds and memory: a ResNet-50 on 16 images, a GPT of 12 blocks
python bench/signals.py beside     # processor seconds of reading, of theory and of a check's measurement, in turns
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import sounding
from signal_networks import measure
from sounding.activations import resolve
from sounding.reader.prediction import predict
from sounding.theory.signal import (
    Add,
    Attention,
    Description,
    Elementwise,
    Given,
    Law,
    Linear,
    Node,
    Normalize,
    Part,
    Points,
    Pool,
    Rule,
    Signal,
    measures,
    propagate,
    spacings,
)
from test_signal_windows import convolve, residual_network, streams

SEEDS = 6
RELU, NORM = Elementwise(resolve("relu")), Normalize("batch", 1e-5)


class Builder:
    """Nodes added one by one."""

    def __init__(self, points: Points, features: int) -> None:
        self.nodes = [Node(Given(), (), points, features)]

    def add(self, rule: Rule, points: Points, features: int, *inputs: int) -> int:
        """The number of a new node."""
        self.nodes.append(Node(rule, inputs, points, features))
        return len(self.nodes) - 1

    def normed(self, rule: Rule, points: Points, features: int, source: int) -> int:
        """A convolution and a batch norm."""
        return self.add(NORM, points, features, self.add(rule, points, features, source))


def resnet50(points: Points) -> Description:
    """Bottleneck blocks of 3, 4, 6 and 3, the stride in the 3 × 3 convolution, global pooling, ten classes."""
    net = Builder(points, 3)
    stream, channels = net.add(RELU, points, 64, net.normed(convolve((3, 64), 3, padding=1), points, 64, 0)), 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if block == 0 and stage else 1
            behind = Points(points.samples, tuple(size // stride for size in points.grid))
            first = net.add(RELU, points, inner, net.normed(convolve((channels, inner), 1), points, inner, stream))
            rule = convolve((inner, inner), 3, padding=1, stride=stride)
            second = net.add(RELU, behind, inner, net.normed(rule, behind, inner, first))
            branch = net.normed(convolve((inner, 4 * inner), 1), behind, 4 * inner, second)
            if block == 0:
                rule = convolve((channels, 4 * inner), 1, stride=stride)
                stream = net.normed(rule, behind, 4 * inner, stream)
            stream = net.add(RELU, behind, 4 * inner, net.add(Add((1.0, 1.0)), behind, 4 * inner, stream, branch))
            points, channels = behind, 4 * inner
    pooled = net.add(Pool(points.grid, points.grid, ((0, 0),) * 2), Points(points.samples), channels, stream)
    output = net.add(Linear(channels, 10, Law(1 / channels)), Points(points.samples), 10, pooled)
    return Description(tuple(net.nodes), (output,))


def gpt(points: Points, width: int = 768) -> Description:
    """Twelve causal pre-norm blocks with GPT-2's initialization."""
    net, stream = Builder(points, width), 0
    norm, inner, last = Normalize("layer", 1e-5), Law(4e-4), Law(4e-4 / 24)
    for _ in range(12):
        fused = Linear(width, 3 * width, inner)
        both = net.add(fused, points, 3 * width, net.add(norm, points, width, stream))
        parts = [net.add(Part(at * width, (at + 1) * width), points, width, both) for at in range(3)]
        heads = net.add(Attention(12, 12, width // 12, (width // 12) ** -0.5, causal=True), points, width, *parts)
        branch = net.add(Linear(width, width, last), points, width, heads)
        stream = net.add(Add((1.0, 1.0)), points, width, stream, branch)
        hidden = net.add(Linear(width, 4 * width, inner), points, 4 * width, net.add(norm, points, width, stream))
        hidden = net.add(Elementwise(resolve("gelu")), points, 4 * width, hidden)
        branch = net.add(Linear(4 * width, width, last), points, width, hidden)
        stream = net.add(Add((1.0, 1.0)), points, width, stream, branch)
    return Description(tuple(net.nodes), (stream,))


def accuracy() -> None:
    """Measured and predicted mean square, mean cosine and squared gradient along the stream."""
    description = residual_network(Points(16, (8, 8)), blocks=12, width=64)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((16, 8, 8, 3)) + 0.5 * rng.standard_normal((16, 1, 1, 3))
    values += 0.3 * rng.standard_normal(3)

    def reduce(signal: Signal) -> np.ndarray:
        cosine = measures(signal, 64, finite_width=False, spectrum=False)["mean_cosine"]
        return np.array([signal.total / signal.points.size, cosine, signal.total])

    measured, start = measure(description, {0: values}, seeds=SEEDS, reduce=reduce)
    found = propagate(description, given={0: Signal.of_features(values)}, gradients=start)
    last = measured.backward[description.outputs[0]][0][2]
    for block, index in enumerate(streams(description)):
        (value, error), (pull, pull_error) = measured.forward[index], measured.backward[index]
        forward, backward = found.forward[index], found.backward[index]
        assert forward is not None
        assert backward is not None
        spread, expected = error * SEEDS**0.5, reduce(forward)
        print(
            f"block {block:2}  mean square {value[0]:.3f} ({spread[0]:.3f}) {expected[0]:.3f}  cosine {value[1]:.3f} "
            f"({spread[1]:.3f}) {expected[1]:.3f}  gradient {pull[2] / last:.3f} "
            f"({pull_error[2] * SEEDS**0.5 / last:.3f}) {backward.total / last:.3f}"
        )


def cost() -> None:
    """Processor seconds of one core and the largest memory so far."""
    rng = np.random.default_rng(0)
    for name, description in (("ResNet-50", resnet50(Points(16, (32, 32)))), ("GPT", gpt(Points(8, (128,))))):
        first, output = description.nodes[0], description.outputs[0]
        values = rng.standard_normal((first.points.samples, *first.points.grid, first.features))
        node = description.nodes[output]
        pull = rng.standard_normal((node.points.samples, *node.points.grid, node.features))
        planned = spacings(description)
        start = time.process_time()
        given = {0: Signal.of_features(values, spacing=planned[0])}
        gradients = {output: Signal.of_features(pull, reduce="sum", spacing=planned[output])}
        found = propagate(description, given=given, gradients=gradients)
        seconds = time.process_time() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{name}: {len(description.nodes)} nodes, {seconds:.1f} s, {memory:.2f} GiB, cut: {dict(found.notes)}")


class Logits(torch.nn.Module):
    """A network of transformers that gives its logits alone."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs).logits


def beside() -> None:
    """Medians of three turns of reading, theory and the measurement of a full check, on one core."""
    from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = torch.randint(0, 1000, (8, 128))
    config = GPT2Config(n_embd=256, n_layer=12, n_head=8, vocab_size=1000, use_cache=False)
    cases = [("GPT, 12 blocks of width 256, 8 × 128 tokens", GPT2LMHeadModel(config), words, words)]
    for samples, size in ((16, 32), (32, 64), (8, 224)):
        images, classes = torch.randn(samples, 3, size, size), torch.randint(0, 10, (samples,))
        model = ResNetForImageClassification(ResNetConfig(num_labels=10))
        cases.append((f"ResNet-50, {samples} images of {size} × {size}", model, images, classes))
    for name, model, inputs, targets in cases:
        wrapped, turns = Logits(model), []
        for _ in range(4):
            times = [time.process_time()]
            blueprint = sounding.read(wrapped, inputs, targets)
            times.append(time.process_time())
            predict(blueprint)
            times.append(time.process_time())
            sounding.check(wrapped, inputs, targets, theory=False)
            times.append(time.process_time())
            turns.append(np.diff(times))
        read, theory, check = np.median(turns[1:], axis=0)  # the first turn warms up
        print(f"{name}: read {read:.2f} s, theory {theory:.2f} s, check without theory {check:.2f} s", flush=True)


if __name__ == "__main__":
    {"accuracy": accuracy, "cost": cost, "beside": beside}[sys.argv[1] if len(sys.argv) > 1 else "cost"]()
