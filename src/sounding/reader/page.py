"""The page that a person can check: one line a node, with its rule, its inputs and the laws of its weights."""

from __future__ import annotations

from sounding.theory.signal.description import Convolution, Description, Given, Law, Linear, Normalize, Rule, Scale


def render(description: Description, weight_layers: tuple[int, int]) -> str:
    """The description as text."""
    lines, width = [], max((len(node.label) for node in description.nodes), default=0)
    for index, node in enumerate(description.nodes):
        inputs = "of " + ", ".join(map(str, node.inputs)) if node.inputs else ""
        grid = f"×({'×'.join(map(str, node.points.grid))})" if node.points.grid else ""
        shape = f"{node.points.samples}{grid} of {node.features}"
        line = f"{index:4d}  {node.label:<{width}}  {inputs:<12}  {shape:<18}  {_laws(node.rule)}".rstrip()
        lines.append(line + (f"  [{node.name}]" if node.name else ""))
    layers, predicted = weight_layers
    lines.append(f"{predicted} of {layers} weight layers have a rule.")
    lines += [f"Measured instead of predicted: {note}." for note in description.notes]
    return "\n".join(lines)


def _laws(rule: Rule) -> str:
    """The laws and numbers of a rule in words."""
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
    balanced = ", of sum zero for each output" if law.balanced else ""
    return f"{law.shape} of std {law.variance**0.5:.4g}{mean}{balanced}"
