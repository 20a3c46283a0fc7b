"""A causal GPT of twelve blocks with GPT-2's initialization: prediction by the Gram calculus beside drawn networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sounding.activations import resolve
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
    Points,
    Propagation,
    Signal,
    propagate,
)
from tolerance import TOLERANCE

WIDTH, HEADS, BLOCKS, SAMPLES, POSITIONS, VOCABULARY = 256, 8, 12, 4, 32, 512
STD = 0.02
POINTS = Points(SAMPLES, (POSITIONS,))


def draw_tokens() -> torch.Tensor:
    """Token numbers of sequences in which few tokens are frequent, as in text."""
    ranks = np.arange(1, VOCABULARY + 1)
    generator = np.random.default_rng(3)
    return torch.from_numpy(generator.choice(VOCABULARY, size=(SAMPLES, POSITIONS), p=1 / ranks / (1 / ranks).sum()))


def describe(blocks: int, *, scale: float) -> tuple[Description, list[int]]:
    """The network from the embedding on, and the numbers of the nodes that are the stream."""
    nodes = [Node(Given(), (), POINTS, WIDTH)]
    last = Law(STD**2 / (2 * BLOCKS))

    def add(rule: object, *inputs: int, features: int = WIDTH) -> int:
        nodes.append(Node(rule, inputs, POINTS, features))  # type: ignore[arg-type]
        return len(nodes) - 1

    stream = [0]
    for _ in range(blocks):
        entering = stream[-1]
        normed = add(Normalize("layer", 1e-5), entering)
        projected = [add(Linear(WIDTH, WIDTH, Law(STD**2)), normed) for _ in range(3)]
        attended = add(Attention(HEADS, HEADS, WIDTH // HEADS, scale, causal=True), *projected)
        middle = add(Add((1.0, 1.0)), entering, add(Linear(WIDTH, WIDTH, last), attended))
        raised = add(Linear(WIDTH, 4 * WIDTH, Law(STD**2)), add(Normalize("layer", 1e-5), middle), features=4 * WIDTH)
        active = add(Elementwise(resolve("gelu")), raised, features=4 * WIDTH)
        stream.append(add(Add((1.0, 1.0)), middle, add(Linear(4 * WIDTH, WIDTH, last), active)))
    return Description(tuple(nodes), (stream[-1],)), stream


def measure(tokens: torch.Tensor, seed: int, *, scale: float) -> dict[str, list[float]]:
    """Mean square, mean cosine of all pairs of points, and squared gradient of a drawn network's stream."""
    torch.manual_seed(seed)
    embedded = torch.randn(VOCABULARY, WIDTH) * STD
    x = (embedded[tokens] + torch.randn(POSITIONS, WIDTH) * STD).requires_grad_()
    stream, small = [x], STD / math.sqrt(2 * BLOCKS)

    def linear(y: torch.Tensor, fan_out: int, std: float = STD) -> torch.Tensor:
        return y @ (torch.randn(y.shape[-1], fan_out) * std)

    def norm(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(y, (WIDTH,), eps=1e-5)

    for _ in range(BLOCKS):
        y = norm(x)
        parts = [linear(y, WIDTH).unflatten(-1, (HEADS, -1)).transpose(1, 2) for _ in range(3)]
        answer = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scale)
        x = x + linear(answer.transpose(1, 2).flatten(2), WIDTH, small)
        x = x + linear(torch.nn.functional.gelu(linear(norm(x), 4 * WIDTH)), WIDTH, small)
        x.retain_grad()
        stream.append(x)
    (x * torch.randn_like(x)).sum().backward()
    last = float(x.grad.pow(2).sum())  # type: ignore[union-attr]
    return {
        "mean_square": [float(y.detach().pow(2).mean()) for y in stream],
        "cosine": [mean_cosine((y @ y.T).detach().double().numpy()) for y in (y.flatten(0, 1) for y in stream)],
        "gradient": [float(y.grad.pow(2).sum()) / last for y in stream],  # type: ignore[union-attr]
    }


def mean_cosine(gram: np.ndarray) -> float:
    root = np.sqrt(np.diag(gram))
    cosines = gram / np.outer(root, root)
    return float((cosines.sum() - len(gram)) / (len(gram) * (len(gram) - 1)))


def predict(tokens: torch.Tensor, *, scale: float) -> tuple[dict[str, list[float]], Propagation]:
    names, places = tokens.numpy().ravel(), np.tile(np.arange(POSITIONS), SAMPLES)
    gram = STD**2 * ((names[:, None] == names) * 1.0 + (places[:, None] == places))
    description, stream = describe(BLOCKS, scale=scale)
    start, end = Signal.full(gram, POINTS), Signal.full(np.eye(POINTS.size), POINTS)
    found = propagate(description, given={0: start}, gradients={stream[-1]: end})
    assert not found.notes
    forward, backward = ([side[at] for at in stream] for side in (found.forward, found.backward))
    return {
        "mean_square": [float(np.mean(np.diag(signal.gram))) for signal in forward],
        "cosine": [mean_cosine(signal.gram) for signal in forward],
        "gradient": [signal.total / POINTS.size for signal in backward],
    }, found


@pytest.mark.slow
@pytest.mark.parametrize("scale", [(WIDTH // HEADS) ** -0.5, 6.0])
def test_a_causal_gpt_is_predicted(scale: float) -> None:
    """Squared gradients within 1%, mean squares within 2.5%, cosines within the spread over seeds; no constant fitted.

    With a scale of 6 instead of 1/√32 scores have a standard deviation of about 3.4, attention is far from uniform and
    the score path carries most of the gradient. What the seeds leave open, five standard errors, is added.
    """
    tokens = draw_tokens()
    predicted, found = predict(tokens, scale=scale)
    measured = [measure(tokens, seed, scale=scale) for seed in range(10)]
    allowed = {"mean_square": 0.025, "gradient": 0.01}
    for name, values in predicted.items():
        table = np.array([one[name] for one in measured])
        spread, middle = table.std(axis=0, ddof=1), table.mean(axis=0)
        for block, value in enumerate(values):
            noise = TOLERANCE.standard_errors * spread[block] / math.sqrt(len(measured))
            error = noise + allowed.get(name, 0.0) * middle[block]
            if name == "cosine":
                error = 2 * spread[block]
            assert abs(value - middle[block]) <= error, (name, block, value, middle[block], spread[block])
    assert len(found.attention) == BLOCKS
