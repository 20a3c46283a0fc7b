"""How many weight layers lie on the shortest way through a network: a residual connection is a way around."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

# Which operand of a multiplication by weights carries the signal; the others are weights and biases.
SIGNAL_OPERAND = {
    "AddmmBackward0": 1,
    "MmBackward0": 0,
    "LinearBackward0": 0,
    "MvBackward0": 0,
    "ConvolutionBackward0": 0,
    "EmbeddingBackward0": 0,
    "CheckpointFunctionBackward": 0,
}
RECURRENT = ("Lstm", "Gru", "Rnn")


def shortest_depth(outputs: Tensor | Iterable[Tensor]) -> int | None:
    """The fewest multiplications by weights on any way from the input to an output, from the autograd graph.

    What theory says of a composition of L layers holds along each way through the network: a plain network has only
    ways of length L, a residual one has a way around every block, and its signal is not lost when a block loses it.
    Attention scores and normalizations cost nothing; each recurrent kernel and each checkpointed block counts as one.

    Returns:
        The count, or None without an autograd graph to read.

    >>> import torch
    >>> plain = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    >>> hidden = torch.nn.Linear(4, 4)(torch.ones(2, 4))
    >>> shortest_depth(plain(hidden)), shortest_depth(hidden + plain(hidden))
    (6, 1)
    """
    tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if not roots:
        return None
    depths: dict[Any, int | None] = {}
    for root in roots:
        for node, operands in _post_order(root, depths):
            depths[node] = _depth(node, operands, depths)
    found = [depth for root in roots if (depth := depths[root]) is not None]
    return min(found, default=None)


def _post_order(root: Any, done: dict[Any, int | None]) -> Iterator[tuple[Any, list[Any]]]:
    """Nodes and their operands, children before parents, without recursion: graphs are deeper than Python's stack."""
    stack: list[tuple[Any, list[Any] | None]] = [(root, None)]
    seen = set(done)
    while stack:
        node, operands = stack.pop()
        if operands is not None:
            yield node, operands
        elif node not in seen:
            seen.add(node)
            operands = [child for child, _ in node.next_functions]
            stack.append((node, operands))
            stack.extend([(child, None) for child in operands if child is not None])


def _depth(node: Any, operands: list[Any], depths: dict[Any, int | None]) -> int | None:
    """The shortest way from the data to this node; None for what depends on parameters alone.

    An operand without a node is data or a constant (a mask, a buffer): it starts a way only where nothing else that
    depends on data comes in.
    """
    variable = getattr(node, "variable", None)
    if variable is not None:  # where gradients end: a parameter, or an input that asks for them
        return None if isinstance(variable, nn.Parameter) else 0
    kind = node.name()
    position = SIGNAL_OPERAND.get(kind)
    cost = 1 if position is not None or any(cell in kind for cell in RECURRENT) else 0
    if position is not None and position < len(operands):
        signal = operands[position]
        if signal is None:
            return cost
        through = depths.get(signal)
        if through is not None:
            return cost + through
    ways = [depth for child in operands if child is not None and (depth := depths.get(child)) is not None]
    if ways:
        return cost + min(ways)
    if kind == "EmbeddingBackward0":
        return cost
    return cost if None in operands else None
