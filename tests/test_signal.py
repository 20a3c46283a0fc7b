"""Every rule of the signal against explicit wide random networks, forwards and backwards."""

from __future__ import annotations

import numpy as np
import pytest

from signal_networks import assert_agrees, chain, measure
from sounding.activations import resolve
from sounding.theory.signal import (
    Add,
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
    Regrid,
    Scale,
    Signal,
    Take,
    propagate,
)
from tolerance import TOLERANCE

WIDTH = 512


def correlated(points: Points, features: int, *, mean: float = 0.0) -> np.ndarray:
    """Input values whose points differ in length and share a direction."""
    rng = np.random.default_rng(3)
    shape = (points.samples, *points.grid)
    common = rng.standard_normal(features)
    length = 1 + 0.5 * rng.random(shape)[..., None]
    return length * (0.8 * rng.standard_normal((*shape, features)) + 0.6 * common) + mean


def he(width: int, *, gain: float = 1.0, mean: float = 0.0) -> Law:
    return Law(gain / width, mean)


def assert_rule(
    description: Description, *, mean: float = 0.0, seeds: int = 12, allowance: float | None = None
) -> None:
    """K, D and weight gradients of every node within standard errors and what finite width leaves."""
    allowed = 3 * TOLERANCE.finite_width if allowance is None else allowance
    inputs = {
        index: correlated(node.points, node.features, mean=mean)
        for index, node in enumerate(description.nodes)
        if isinstance(node.rule, Given)
    }
    measured, start = measure(description, inputs, seeds=seeds)
    given = {index: Signal.of_features(values) for index, values in inputs.items()}
    found = propagate(description, given=given, gradients=start)
    assert not found.notes
    for index in range(len(description.nodes)):
        forward, backward, weight = found.forward[index], found.backward[index], found.weight_gradients[index]
        assert forward is not None
        assert_agrees(forward.gram, measured.forward[index], allowance=allowed)
        assert backward is not None
        assert_agrees(backward.gram, measured.backward[index], allowance=allowed)
        if weight is not None:
            assert_agrees(weight, measured.weights[index], allowance=allowed)


VECTORS = Points(5)
TOKENS = Points(3, (4,))
INPUT = Node(Given(), (), VECTORS, 64)
FIRST = (Linear(64, WIDTH, he(64), Law(0.05, 0.1)), VECTORS, WIDTH)
LAST = (Linear(WIDTH, WIDTH, he(WIDTH)), VECTORS, WIDTH)


def test_linear_maps_with_means_and_biases() -> None:
    """Weights and biases with means: the feature means matter, forwards and backwards."""
    description = chain(
        INPUT,
        (Linear(64, WIDTH, Law(1 / 64, 0.05), Law(0.2, 0.3)), VECTORS, WIDTH),
        (Linear(WIDTH, WIDTH, Law(1 / WIDTH, 0.002)), VECTORS, WIDTH),
    )
    assert_rule(description, mean=0.4, seeds=24)


@pytest.mark.parametrize("name", ["relu", "leaky_relu:0.2", "gelu", "tanh", "hardtanh"])
def test_functions(name: str) -> None:
    """Points of different variance, a bias with a mean, two layers."""
    function = (Elementwise(resolve(name)), VECTORS, WIDTH)
    assert_rule(chain(INPUT, FIRST, function, LAST, function))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_features(kind: str) -> None:
    """A norm with scale and shift behind rectified values, whose features have a mean."""
    norm = Normalize(kind, 1e-2, Law(0.04, 0.9), Law(0.1, -0.2))  # type: ignore[arg-type]
    relu = Elementwise(resolve("relu"))
    assert_rule(chain(INPUT, FIRST, (relu, VECTORS, WIDTH), (norm, VECTORS, WIDTH), LAST))


def test_batch_norm_of_few_vectors() -> None:
    """Eight points: the Laplace integrals are exact, forwards and backwards, however few the points are."""
    points = Points(8)
    norm = Normalize("batch", 1e-3, Law(0.1, 1.0), Law(0.2, 0.1))
    description = chain(
        Node(Given(), (), points, 64),
        (Linear(64, 4 * WIDTH, he(64)), points, 4 * WIDTH),
        (norm, points, 4 * WIDTH),
    )
    inputs = {0: correlated(points, 64)}
    measured, start = measure(description, inputs, seeds=12)
    found = propagate(description, given={0: Signal.of_features(inputs[0])}, gradients=start)
    for predicted, seen in ((found.forward[2], measured.forward[2]), (found.backward[1], measured.backward[1])):
        assert predicted is not None
        assert_agrees(predicted.gram, seen)


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu"])
def test_a_function_behind_batch_norm_bends_its_gradient(name: str) -> None:
    """The gradients of all samples share a direction: what φ′ knows of y counts for a tenth of the squared norm."""
    points = Points(96)
    description = chain(
        Node(Given(), (), points, 64),
        (Linear(64, 2048, he(64)), points, 2048),
        (Normalize("batch", 1e-5), points, 2048),
        (Elementwise(resolve(name)), points, 2048),
    )
    inputs = {0: correlated(points, 64)}
    measured, start = measure(description, inputs, seeds=6, reduce=lambda signal: np.array(signal.total))
    found = propagate(description, given={0: Signal.of_features(inputs[0])}, gradients=start)
    assert found.backward[1] is not None
    assert_agrees(found.backward[1].total, measured.backward[1], allowance=2 * TOLERANCE.finite_width)


def test_running_statistics() -> None:
    norm = Normalize("batch", 1e-5, Law(0.0, 1.1), Law(0.0, 0.2), running=(Law(0.02, 0.1), Law(0.01, 0.8)))
    assert_rule(chain(INPUT, FIRST, (norm, VECTORS, WIDTH)))


def test_group_norm_of_tokens() -> None:
    norm = Normalize("group", 1e-3, Law(0.04, 0.9), Law(0.1, -0.2), groups=8)
    description = chain(
        Node(Given(), (), TOKENS, 64),
        (Linear(64, WIDTH, he(64)), TOKENS, WIDTH),
        (Elementwise(resolve("relu")), TOKENS, WIDTH),
        (norm, TOKENS, WIDTH),
    )
    assert_rule(description)


def test_instance_norm_centres_each_channel() -> None:
    points = Points(2, (24,))
    description = chain(
        Node(Given(), (), points, 64),
        (Linear(64, 2048, he(64)), points, 2048),
        (Normalize("group", 1e-3, groups=2048), points, 2048),
    )
    assert_rule(description, allowance=0.05, seeds=6)


def residual(coefficients: tuple[float, ...]) -> Description:
    """x and a branch of it, added."""
    branch = (
        Node(Linear(64, WIDTH, he(64)), (0,), VECTORS, WIDTH),
        Node(Elementwise(resolve("relu")), (1,), VECTORS, WIDTH),
        Node(Linear(WIDTH, WIDTH, he(WIDTH)), (2,), VECTORS, WIDTH),
        Node(Add(coefficients), (2, 3), VECTORS, WIDTH),
    )
    return Description((INPUT, *branch), (4,))


def test_residual_sums() -> None:
    """The stream holds rectified values with a mean; the branch ends in centred weights."""
    assert_rule(residual((0.7, 1.3)))


def test_sums_share_feature_means() -> None:
    """Two rectified branches: their features are independent, their means are not 0."""
    relu = Elementwise(resolve("relu"))
    nodes = (
        INPUT,
        Node(Linear(64, WIDTH, he(64)), (0,), VECTORS, WIDTH),
        Node(Linear(64, WIDTH, he(64)), (0,), VECTORS, WIDTH),
        Node(relu, (1,), VECTORS, WIDTH),
        Node(relu, (2,), VECTORS, WIDTH),
        Node(Add((1.0, -0.5)), (3, 4), VECTORS, WIDTH),
        Node(Scale(Law(0.1, 0.5), Law(0.2, 0.1)), (5,), VECTORS, WIDTH),
    )
    assert_rule(Description(nodes, (6,)), seeds=16)


def test_a_value_added_to_itself_doubles() -> None:
    nodes = (INPUT, Node(Add((1.0, 1.0)), (0, 0), VECTORS, 64), Node(Multiply(), (1, 1), VECTORS, 64))
    signal = Signal.full(np.eye(5), VECTORS)
    found = propagate(Description(nodes, (1,)), given={0: signal}, gradients={1: signal})
    assert found.forward[1] is not None
    assert found.backward[0] is not None
    assert found.forward[2] is not None
    np.testing.assert_allclose(found.forward[1].gram, 4 * np.eye(5), rtol=TOLERANCE.exact)
    np.testing.assert_allclose(found.backward[0].gram, 4 * np.eye(5), rtol=TOLERANCE.exact)
    np.testing.assert_allclose(found.forward[2].gram, 16 * (1 + 2 * np.eye(5)), rtol=TOLERANCE.closed_form)


def test_gated_products() -> None:
    """SwiGLU: one projection cut in two, a function on one half, their product."""
    nodes = (
        INPUT,
        Node(Linear(64, 2 * WIDTH, he(64)), (0,), VECTORS, 2 * WIDTH),
        Node(Part(0, WIDTH), (1,), VECTORS, WIDTH),
        Node(Part(WIDTH, 2 * WIDTH), (1,), VECTORS, WIDTH),
        Node(Elementwise(resolve("silu")), (2,), VECTORS, WIDTH),
        Node(Multiply(), (4, 3), VECTORS, WIDTH),
        Node(Linear(WIDTH, WIDTH, he(WIDTH)), (5,), VECTORS, WIDTH),
    )
    assert_rule(Description(nodes, (6,)), seeds=24)


def test_a_gate_per_sample_spreads_over_positions() -> None:
    """Squeeze and excitation: the gate has no positions, the stream has."""
    grid = Points(3, (4,))
    nodes = (
        Node(Given(), (), grid, 64),
        Node(Given(), (), Points(3), 64),
        Node(Linear(64, WIDTH, he(64)), (0,), grid, WIDTH),
        Node(Linear(64, WIDTH, he(64)), (1,), Points(3), WIDTH),
        Node(Elementwise(resolve("sigmoid")), (3,), Points(3), WIDTH),
        Node(Multiply(), (2, 4), grid, WIDTH),
    )
    description = Description(nodes, (5,))
    inputs = {0: correlated(grid, 64), 1: correlated(Points(3), 64)}
    given = {index: Signal.of_features(values) for index, values in inputs.items()}
    pull = np.random.default_rng(0).standard_normal((3, 4, WIDTH))
    found = propagate(description, given=given, gradients={5: Signal.of_features(pull, reduce="sum")})
    rng = np.random.default_rng(1)
    products, gates = [], []
    for _ in range(24):
        x, g = (inputs[i] @ (rng.standard_normal((64, WIDTH)) / 8) for i in (0, 1))
        gate = 1 / (1 + np.exp(-g))
        products.append(Signal.of_features(x * gate[:, None]).gram)
        gates.append(Signal.of_features((pull * x).sum(1), reduce="sum").gram)
    for predicted, seen in ((found.forward[5], products), (found.backward[4], gates)):
        assert predicted is not None
        stack = np.stack(seen)
        error = stack.std(0, ddof=1) / len(stack) ** 0.5
        assert_agrees(predicted.gram, (stack.mean(0), error), allowance=3 * TOLERANCE.finite_width)


def test_positions_are_mixed_taken_joined_regridded_and_flattened() -> None:
    """Fixed maps of positions between random maps of features."""
    weights = np.random.default_rng(0).random((6, 4))
    grid, six = Points(3, (2, 2)), Points(3, (6,))
    nodes = (
        Node(Given(), (), grid, 64),
        Node(Linear(64, WIDTH, he(64)), (0,), grid, WIDTH),
        Node(Elementwise(resolve("relu")), (1,), grid, WIDTH),
        Node(Regrid((4,)), (2,), TOKENS, WIDTH),
        Node(Mix(weights), (3,), six, WIDTH),
        Node(Linear(WIDTH, WIDTH, he(WIDTH)), (4,), six, WIDTH),
        Node(Take((5, 0)), (5,), Points(3, (2,)), WIDTH),
        Node(Linear(WIDTH, WIDTH, he(WIDTH)), (3,), TOKENS, WIDTH),
        Node(Join("positions"), (6, 7), six, WIDTH),
        Node(Flatten(), (8,), Points(3), 6 * WIDTH),
        Node(Linear(6 * WIDTH, WIDTH, he(6 * WIDTH)), (9,), Points(3), WIDTH),
    )
    assert_rule(Description(nodes, (10,)), allowance=0.03)


def test_joined_features_weigh_by_their_number() -> None:
    nodes = (
        INPUT,
        Node(Linear(64, WIDTH, he(64)), (0,), VECTORS, WIDTH),
        Node(Linear(64, 2 * WIDTH, he(64, gain=3.0)), (0,), VECTORS, 2 * WIDTH),
        Node(Join("features"), (1, 2), VECTORS, 3 * WIDTH),
        Node(Linear(3 * WIDTH, WIDTH, he(3 * WIDTH)), (3,), VECTORS, WIDTH),
    )
    assert_rule(Description(nodes, (4,)))


def test_an_unknown_input_cuts_the_way_and_says_so() -> None:
    nodes = (INPUT, Node(Given("nothing covers it"), (), VECTORS, 64), Node(Add((1.0, 1.0)), (0, 1), VECTORS, 64))
    found = propagate(Description(nodes, (2,)), given={0: Signal.full(np.eye(5), VECTORS)})
    assert found.forward[1] is None
    assert found.forward[2] is None
    assert "node 1" in found.notes[2]
