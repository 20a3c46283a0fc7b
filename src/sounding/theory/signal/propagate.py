"""Run a description forwards and backwards: the signal and the gradient at every node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sounding.errors import UsageError
from sounding.theory.signal import description as kinds
from sounding.theory.signal import rules, windows
from sounding.theory.signal.attention import PRECISION, Attended, attend_signals, attend_signals_backward
from sounding.theory.signal.description import Description, Node
from sounding.theory.signal.normalize import normalize, normalize_backward, scale
from sounding.theory.signal.signal import Signal

Forward = Callable[[Any, Node, tuple[Signal, ...]], Signal]
Backward = Callable[[Any, Node, tuple[Signal, ...], Signal], tuple[Signal, ...]]


def _choice(rule: kinds.Take, signal: Signal) -> kinds.Array:
    return np.eye(signal.points.positions)[list(rule.positions)]


RULES: dict[type, tuple[Forward, Backward]] = {
    kinds.Linear: (rules.linear, rules.linear_backward),
    kinds.Tied: (rules.linear, rules.linear_backward),
    kinds.Convolution: (windows.convolution, windows.convolution_backward),
    kinds.Elementwise: (rules.elementwise, rules.elementwise_backward),
    kinds.Normalize: (
        lambda rule, node, inputs: normalize(rule, inputs[0], node.features),
        lambda rule, node, inputs, gradient: (normalize_backward(rule, inputs[0], gradient, node.features),),
    ),
    kinds.Add: (rules.add, rules.add_backward),
    kinds.Scale: (
        lambda rule, node, inputs: replace(scale(inputs[0], rule.factor, rule.shift), make_shape=inputs[0].make_shape),
        lambda rule, node, inputs, gradient: (scale(gradient, rule.factor, kinds.ZERO),),
    ),
    kinds.Multiply: (rules.multiply, rules.multiply_backward),
    kinds.Mix: (  # K′ = A K Aᵀ within and between samples, D′ = Aᵀ D A
        lambda rule, node, inputs: rules.mixed(rule.matrix, inputs[0], node.points),
        lambda rule, node, inputs, gradient: (rules.mixed(rule.matrix.T, gradient, inputs[0].points),),
    ),
    kinds.Pool: (windows.pool, windows.pool_backward),
    kinds.Take: (  # a matrix of ones where a position is taken: one that is taken twice gets the sum of its gradients
        lambda rule, node, inputs: rules.mixed(_choice(rule, inputs[0]), inputs[0], node.points),
        lambda rule, node, inputs, gradient: (rules.mixed(_choice(rule, inputs[0]).T, gradient, inputs[0].points),),
    ),
    kinds.Part: (  # features of a random map are alike, and D is a sum over features, of which a part has its share
        lambda rule, node, inputs: inputs[0],
        lambda rule, node, inputs, gradient: (gradient,),
    ),
    kinds.Flatten: (rules.flatten, rules.flatten_backward),
    kinds.Regrid: (  # the same pairs of points, named by another grid
        lambda rule, node, inputs: Signal.full(inputs[0].gram, node.points, inputs[0].mean),
        lambda rule, node, inputs, gradient: (Signal.full(gradient.gram, inputs[0].points, gradient.mean),),
    ),
    kinds.Rotate: (  # the rotation back has the same factor
        lambda rule, node, inputs: rules.turned(rule, inputs[0]),
        lambda rule, node, inputs, gradient: (rules.turned(rule, gradient),),
    ),
}


@dataclass(frozen=True)
class Propagation:
    """What a description predicts at each of its nodes."""

    # K at every node, None where the way to it is cut: an input is unknown or no rule covers it
    forward: tuple[Signal | None, ...]
    # D at every node, summed over features; None where no gradient is known to arrive
    backward: tuple[Signal | None, ...]
    # the squared Frobenius norm of dL/dW of Linear and Convolution nodes; None elsewhere
    weight_gradients: tuple[float | None, ...]
    notes: Mapping[int, str]  # why the way was cut, by node
    # scores and entropy of every softmax attention, by node
    attention: Mapping[int, Attended] = field(default_factory=dict)


def propagate(
    description: Description,
    *,
    given: Mapping[int, Signal],
    gradients: Mapping[int, Signal] | None = None,
    draws: int = 32,
    precision: float = PRECISION,
    generator: np.random.Generator | None = None,
    samples: int | None = None,
) -> Propagation:
    """The signal K and the gradient D at every node of a description.

    Gradients that reach one value from several consumers add up as if independent: exact where the branches end in
    centred random weights of their own, an approximation where two branches share weights.

    Args:
        description: the network.
        given: the measured signals of its `Given` nodes, and of any other node at which to start anew.
        gradients: D at the outputs, summed over features; without, only K is computed. At other nodes it is the whole
            measured gradient, with which theory goes on where a part that no rule covers stands behind them.
        draws: heads drawn for each softmax attention, at most.
        precision: the relative standard error of an attention's signal at which drawing stops.
        generator: of these heads; by default one with a fixed start, so that equal descriptions give equal results.
        samples: of the batch whose weight gradients are meant, where the description follows some of them.

    >>> from sounding.theory.signal import Description, Given, Law, Linear, Node, Points, Signal
    >>> nodes = (Node(Given(), (), Points(2), 4), Node(Linear(4, 8, Law(0.5)), (0,), Points(2), 8))
    >>> found = propagate(Description(nodes, (1,)), given={0: Signal.full(np.eye(2), Points(2))})
    >>> found.forward[1].sample_gram.tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    settings = {"draws": draws, "generator": generator or np.random.default_rng(0), "precision": precision}
    run = _Run(description, given, settings)
    for index in range(len(description.nodes)):
        run.forward.append(run.step(index))
    backward, weights = run.backwards(gradients or {}, samples)
    return Propagation(tuple(run.forward), backward, weights, run.notes, run.attention)


class _Run:
    """A description, its measured signals, the settings of attention, and what is known so far."""

    def __init__(self, description: Description, given: Mapping[int, Signal], settings: dict[str, Any]) -> None:
        self.nodes, self.outputs = description.nodes, description.outputs
        self.given, self.settings = given, settings
        self.forward: list[Signal | None] = []
        self.notes: dict[int, str] = {}
        self.attention: dict[int, Attended] = {}

    def step(self, index: int) -> Signal | None:
        """The signal behind one node; None, with a note that says why, where it is not known."""
        node = self.nodes[index]
        if index in self.given:
            self._check_points(self.given[index], index)
            return self.given[index]
        if isinstance(node.rule, kinds.Given):
            self.notes[index] = "its signal was not given"
            return None
        if any(at >= index for at in node.inputs):
            raise UsageError(f"expected the inputs of node {index} to come before it, got {node.inputs}")
        inputs = [self.forward[at] for at in node.inputs]
        known = tuple(one for one in inputs if one is not None)
        if len(known) < len(inputs):
            self.notes[index] = f"its input, node {node.inputs[inputs.index(None)]}, is not known"
            return None
        try:
            found = self._functions(index)[0](node.rule, node, known)
        except UsageError as error:
            self.notes[index] = str(error)
            return None
        # Convolutions keep offsets, and a stride shrinks the grid and the spacing together: so blur, in units of the
        # spacing, is what the input had. A function takes neighbours apart, since its kernel is steepest where values
        # are equal: in a ResNet-50 on smooth images blur fell from 0.53 to 0.07 over one block, and to 0 over two.
        blur = max((one.blur for one in known), default=0.0)
        kept = isinstance(node.rule, kinds.Elementwise) or found.is_full or found.blur == blur
        return found if kept else replace(found, blur=blur)

    def backwards(
        self, gradients: Mapping[int, Signal], samples: int | None
    ) -> tuple[tuple[Signal | None, ...], tuple[float | None, ...]]:
        """The gradient at every node and the squared one of its weights, from the outputs back; None where unknown."""
        count = len(self.nodes)
        arrived: list[Signal | None] = [None] * count
        lost: set[int] = set()  # nodes to which a gradient comes that no rule tells
        weights: list[float | None] = [None] * count
        for index, signal in gradients.items():
            self._check_points(signal, index)
            if index in self.outputs:
                arrived[index] = signal
        for index in range(count - 1, -1, -1):
            node, gradient = self.nodes[index], arrived[index]
            if gradient is not None and gradient.is_full and gradient.points != node.points:
                # a view that drops axes of size 1 names the same points by another grid, without a node of its own
                gradient = replace(gradient, points=node.points, spacing=(1,) * len(node.points.grid))
            if index in lost:  # what is known at such a node is the whole gradient there, which was measured
                arrived[index] = gradient = gradients.get(index)
                lost |= set(node.inputs) if gradient is None else set()
            if gradient is not None and isinstance(node.rule, kinds.Given):
                lost |= set(node.inputs)  # what stands behind a part that no rule covers sends no known gradient back
            if gradient is None or isinstance(node.rule, kinds.Given):
                continue
            inputs = [self.forward[at] for at in node.inputs]
            known = tuple(one for one in inputs if one is not None)
            try:
                if len(known) < len(inputs):
                    raise UsageError("the signal in front of it is not known")
                found = self._functions(index)[1](node.rule, node, known, gradient)
            except UsageError as error:
                self.notes.setdefault(index, f"no gradient passes it: {error}")
                lost |= set(node.inputs)
                continue
            rule = node.rule
            if isinstance(rule, kinds.Linear):
                weights[index] = rules.weight_gradient(known[0], gradient, rule.fan_in, samples)
            elif isinstance(rule, kinds.Convolution):
                seen = windows.window_sums(rule, node, known[0])
                weights[index] = rules.weight_gradient(seen, gradient, rule.channels_in // rule.groups, samples)
            if isinstance(rule, kinds.Tied) and set(gradients) - set(self.outputs):
                lost.add(node.inputs[0])  # what it sends back is made of embeddings, and was measured
                continue
            for at, one in zip(node.inputs, found, strict=True):
                already = arrived[at]
                arrived[at] = one if already is None else already.plus(one)
        return tuple(arrived), tuple(weights)

    def _functions(self, index: int) -> tuple[Forward, Backward]:
        """The forward and the backward function of a node's rule."""
        node = self.nodes[index]
        rule, inputs_at = node.rule, node.inputs
        if isinstance(rule, kinds.Attention):
            settings = self.settings | {"width": self._random_features(inputs_at[-1])}

            def attend(rule: kinds.Attention, node: Node, inputs: tuple[Signal, ...]) -> Signal:
                self.attention[index], signal = attend_signals(rule, inputs, **settings)
                return signal

            return attend, lambda rule, node, inputs, gradient: attend_signals_backward(
                rule, inputs, gradient=gradient, **settings
            )
        if isinstance(rule, kinds.Join):
            features = tuple(self.nodes[at].features for at in inputs_at)
            return (
                lambda rule, node, inputs: rules.join(rule, node, inputs, features),
                lambda rule, node, inputs, gradient: rules.join_backward(rule, node, inputs, gradient, features),
            )
        if isinstance(rule, kinds.Tied) and len(inputs_at) > 1:
            stream, embedding = inputs_at[:2]
            return (
                lambda rule, node, inputs: rules.tied(
                    rule, inputs, rules.share_of(embedding, stream, self.nodes, self.forward)
                ),
                lambda rule, node, inputs, gradient: (
                    *rules.linear_backward(rule, node, inputs, gradient),
                    *(one.like(np.zeros_like(one.matrix)) for one in inputs[1:]),
                ),
            )
        if type(rule) not in RULES:
            raise UsageError(f"no rule covers {type(rule).__name__}")
        return RULES[type(rule)]

    def _random_features(self, at: int) -> float:
        """The number of random features whose mean is the Gram matrix in front of a projection."""
        passing = kinds.Part | kinds.Linear | kinds.Scale | kinds.Normalize
        while isinstance(self.nodes[at].rule, passing) and at not in self.given:
            at = self.nodes[at].inputs[0]
        before, squares = self.forward[at], 0.0
        if before is None:
            return math.inf
        for source in [one for one in self.given if one <= at]:
            own = self.forward[source]
            if own is not None and own.points == before.points:
                squares += float(np.sum(rules.share_of(source, at, self.nodes, self.forward) ** 2 * own.diagonal))
        # of a stream that holds the share s of what is measured, N features scatter by (1 − s²)/N: infinitely many for
        # s = 1
        share = min(squares / max(before.total, 1e-300), 1.0)
        return self.nodes[at].features / (1.0 - share**2) if share < 1.0 else math.inf

    def _check_points(self, signal: Signal, index: int) -> None:
        expected = self.nodes[index].points
        if signal.points != expected:
            raise UsageError(f"expected a signal over {expected} for node {index}, got one over {signal.points}")
