"""The page that a person can check: one line a node, with its rule, its inputs and the laws of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.theory.signal.description import Convolution, Given, Law, Linear, Node, Normalize, Scale

if TYPE_CHECKING:
    from sounding.reader.module import Blueprint


def render(blueprint: Blueprint) -> str:
    """The description as text."""
    nodes = blueprint.description.nodes
    width = max((len(node.label) for node in nodes), default=0)
    lines = [
        f"{index:4d}  {node.label:<{width}}  {_inputs(node):<12}  {_shape(node):<18}  {_laws(node)}".rstrip()
        + (f"  [{node.name}]" if node.name else "")
        for index, node in enumerate(nodes)
    ]
    layers, predicted = blueprint.weight_layers
    lines.append(f"{predicted} of {layers} weight layers have a rule.")
    lines += [f"Measured instead of predicted: {note}." for note in blueprint.description.notes]
    return "\n".join(lines)


def _inputs(node: Node) -> str:
    return "of " + ", ".join(map(str, node.inputs)) if node.inputs else ""


def _shape(node: Node) -> str:
    grid = "×".join(map(str, node.points.grid))
    return f"{node.points.samples}" + (f"×({grid})" if grid else "") + f" of {node.features}"


def _laws(node: Node) -> str:
    """The laws and numbers of a rule in words."""
    rule = node.rule
    match rule:
        case Linear() | Convolution():
            words = f"weights {_law(rule.weight)}"
            return words if rule.bias.second_moment == 0 else f"{words}, biases {_law(rule.bias)}"
        case Normalize():
            return f"eps {rule.eps:g}, scale {_law(rule.scale)}, shift {_law(rule.shift)}"
        case Scale():
            return f"factor {_law(rule.factor)}, shift {_law(rule.shift)}"
        case Given():
            return rule.reason
    return ""


def _law(law: Law) -> str:
    if law.shape == "constant":
        return f"{law.mean:.4g}"
    mean = f", mean {law.mean:.3g}" if law.mean else ""
    return f"{law.shape} of std {law.variance**0.5:.4g}{mean}"
