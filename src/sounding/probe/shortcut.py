"""How many weight layers lie on the shortest way through a network: a residual connection is a way around."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
BATCHED = "BmmBackward0"  # einsum; by weights where one side depends on parameters alone, by scores otherwise
RECURRENT = ("Lstm", "Gru", "Rnn")
LEAF = "torch::autograd::AccumulateGrad"


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
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    depths = _depths(roots)
    return min((depth for root in roots if (depth := depths[root]) is not None), default=None)


def _depths(roots: Sequence[Any]) -> dict[Any, int | None]:
    """The depth of nodes and of what they need, without recursion: graphs are deeper than Python's stack.

    Of a multiplication by weights the signal is walked alone, and the weights only where it turns out to be none.
    """
    depths: dict[Any, int | None] = {}
    stack: list[tuple[Any, str, list[Any], int | None]] = [(root, "", [], None) for root in roots]
    while stack:
        node, kind, operands, position = stack.pop()
        if kind:
            if position is not None and depths[operands[position]] is None:
                stack.append((node, kind, operands, None))
                stack.extend([(child, "", [], None) for child in operands if child is not None])
            else:
                depths[node] = _depth(kind, operands, depths)
            continue
        if node in depths:
            continue
        kind = node.name()
        if kind == LEAF:  # where gradients end: a parameter, or an input that asks for them
            depths[node] = None if isinstance(node.variable, nn.Parameter) else 0
            continue
        operands = [child for child, _ in node.next_functions]
        position = SIGNAL_OPERAND.get(kind, len(operands))
        if position >= len(operands):
            stack.append((node, kind, operands, None))
            stack.extend([(child, "", [], None) for child in operands if child is not None])
        elif operands[position] is None:
            depths[node] = 1
        else:
            stack.append((node, kind, operands, position))
            stack.append((operands[position], "", [], None))
    return depths


def _depth(kind: str, operands: list[Any], depths: dict[Any, int | None]) -> int | None:
    """The shortest way from the data to a node; None for what depends on parameters alone.

    An operand without a node is data or a constant (a mask, a buffer): it starts a way only where nothing else that
    depends on data comes in.
    """
    position = SIGNAL_OPERAND.get(kind)
    cost = 1 if position is not None or any(cell in kind for cell in RECURRENT) else 0
    if kind == BATCHED and any(child is not None and depths.get(child) is None for child in operands):
        cost = 1
    if position is not None and position < len(operands):
        through = depths.get(operands[position])
        if through is not None:
            return cost + through
    ways = [depth for child in operands if child is not None and (depth := depths.get(child)) is not None]
    if ways:
        return cost + min(ways)
    if kind == "EmbeddingBackward0":
        return cost
    return cost if None in operands else None
