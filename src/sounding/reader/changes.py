"""Changes of a description, one thing at a time, from one layer to the whole network: what blame tries."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from sounding.theory.signal import (
    ZERO,
    Add,
    Attention,
    Convolution,
    Description,
    Elementwise,
    Given,
    Law,
    Linear,
    Mix,
    Node,
    Normalize,
    Scale,
    Signal,
)
from sounding.theory.signal.description import Rule

ODD = 4.0  # a variance this many times that of its siblings, or less than its inverse, is odd: random ones agree to 10%
LARGE = 4.0  # a bias whose mean square is this many times the mean square of what it is added to dominates
LOUD = 64.0  # an input whose mean square is this far from 1, in either direction, is worth scaling
NORM = Normalize("layer", 1e-5)
Weight = tuple[int, Node, Linear | Convolution]  # the number of a node, the node and its rule


@dataclass(frozen=True)
class Change:
    """A description with one thing changed."""

    size: int  # 1 for one layer, 2 for one kind of layer, 3 for the whole network
    kind: str  # of the fault that it mends
    layer: str  # the name of the layer or block, "" for the whole network
    text: str  # what is odd, a clause
    cure: str  # what was changed, "with …"
    description: Description = field(repr=False)  # the changed one
    odds: float = 0.0  # how odd it is, ln of a factor
    inserted: tuple[int, ...] = ()  # the numbers, before, of the nodes in front of which a node was put in

    def place(self, index: int) -> int:
        """The number that a node has after the change."""
        return index + sum(at <= index for at in self.inserted)


def propose_changes(description: Description, given: Mapping[int, Signal]) -> list[Change]:
    """Changes worth trying, the smallest first, the oddest of a size first; a layer alone only where it differs."""
    by_rules = (_gains, _roles, _biases, _scores, _branches, _missing)
    by_place = (_norms_everywhere, _post_norms)
    proposed = [change for propose in by_rules for change in propose(description)]
    proposed += _loud_inputs(description, given)
    proposed += [change for propose in by_place for change in propose(description)]
    return sorted(proposed, key=lambda change: (change.size, -change.odds))


def _weights(description: Description) -> list[Weight]:
    nodes = enumerate(description.nodes)
    return [(index, node, node.rule) for index, node in nodes if isinstance(node.rule, Linear | Convolution)]


def fan_in(rule: Linear | Convolution) -> int:
    """How many inputs one output of a weight adds up."""
    if isinstance(rule, Linear):
        return rule.fan_in
    return rule.channels_in // rule.groups * math.prod(rule.kernel)


def gain(rule: Linear | Convolution) -> float:
    """The factor of the mean square through a weight: its variance times its inputs."""
    return rule.weight.second_moment * fan_in(rule)


def with_gain(rule: Linear | Convolution, value: float) -> Linear | Convolution:
    """The rule of a weight with another gain."""
    return dataclasses.replace(rule, weight=Law(value / fan_in(rule)))


def layer_of(node: Node) -> str:
    """The name that a person knows a node by."""
    return node.name or node.weight.rpartition(".")[0] or node.label


def role(name: str) -> str:
    """A name with its numbers left out: what siblings share."""
    return re.sub(r"\d+", "#", name)


def _kin(node: Node, rule: Linear | Convolution) -> tuple[str, int, bool]:
    """What siblings share: their names without numbers, their units, and whether they are grouped convolutions."""
    return role(node.weight), node.features, isinstance(rule, Convolution) and rule.groups > 1


def _groups(weights: Sequence[Weight]) -> dict[tuple[str, int, bool], list[Weight]]:
    groups: dict[tuple[str, int, bool], list[Weight]] = {}
    for index, node, rule in weights:
        groups.setdefault(_kin(node, rule), []).append((index, node, rule))
    return groups


def _usual(weights: Sequence[Weight]) -> float:
    return median([gain(rule) for *_, rule in weights]) if weights else 0.0


def _gains(description: Description) -> Iterator[Change]:
    """Changes that give odd weights their siblings’ variance, or all weights a common law."""
    weights = _weights(description)
    groups = _groups(weights)
    for index, node, rule in weights:
        group = groups[_kin(node, rule)]
        usual = _usual(group if len(group) > 2 else weights)  # of two, neither is the odd one
        ratio = gain(rule) / usual if usual > 0 else 1.0
        if gain(rule) > 0 and not 1 / ODD <= ratio <= ODD:
            text = f"the variance of {layer_of(node)!r} is {ratio:.3g} times that of its siblings"
            cure = f"with its siblings' variance {usual / fan_in(rule):.3g}"
            changed = description.replace(index, rule=with_gain(rule, usual))
            yield Change(1, "gain", layer_of(node), text, cure, changed, abs(math.log(ratio)))
    yield from _mixers(description)
    usual = _usual(weights)
    for name, value in (("1/fan_in (LeCun, near Xavier)", 1.0), ("2/fan_in (He)", 2.0)):
        if usual > 0 and not 0.8 < usual / value < 1.25:
            changed = description
            for index, _, rule in weights:
                if gain(rule) > 0:
                    changed = changed.replace(index, rule=with_gain(rule, value))
            text = f"weights have {usual:.3g}/fan_in as their variance throughout"
            yield Change(3, "gains", "", text, f"with the variance {name} everywhere", changed)


def _mixers(description: Description) -> Iterator[Change]:
    """One map over positions whose size differs from those in its role."""
    groups: dict[str, list[tuple[int, Node, float]]] = {}
    for index, node in enumerate(description.nodes):
        if isinstance(node.rule, Mix) and (node.name or node.weight):
            groups.setdefault(role(layer_of(node)), []).append((index, node, float(np.sum(node.rule.matrix**2))))
    for group in groups.values():
        usual = median([size for _, _, size in group])
        for index, node, size in group if len(group) > 2 else ():
            if size > 0 and usual > 0 and not 1 / ODD <= size / usual <= ODD and isinstance(node.rule, Mix):
                name, ratio = layer_of(node), size / usual
                changed = description.replace(index, rule=Mix(node.rule.matrix / math.sqrt(ratio)))
                text = f"the variance of {name!r} is {ratio:.3g} times that of its siblings"
                yield Change(1, "gain", name, text, "with its siblings' variance", changed, abs(math.log(ratio)))


def _roles(description: Description) -> Iterator[Change]:
    """Every layer in one role, where their variance differs from that of the others: often fan-out for fan-in."""
    groups = _groups([one for one in _weights(description) if gain(one[2]) > 0])
    usual = {key: _usual(group) for key, group in groups.items()}
    for key, group in groups.items():
        others = [usual[other] for other in groups if other != key and len(groups[other]) > 1]
        ratio = usual[key] / median(others) if others and len(group) > 1 else 1.0
        if 1 / ODD <= ratio <= ODD:
            continue
        changed = description
        for index, _, rule in group:
            changed = changed.replace(index, rule=with_gain(rule, usual[key] / ratio))
        first, rule = layer_of(group[0][1]), group[0][2]
        by_outputs = rule.weight.second_moment * _fan_out(rule)
        drawn = f", {by_outputs:.2g}/fan_out" if not 0.8 < _fan_out(rule) / fan_in(rule) < 1.25 else ""
        text = f"{len(group)} layers like {first!r} have {usual[key]:.2g}/fan_in as their variance{drawn}"
        cure = f"with {usual[key] / ratio:.2g}/fan_in there, as the other layers have"
        yield Change(2, "fans", first, text, cure, changed, abs(math.log(ratio)))


def _fan_out(rule: Linear | Convolution) -> int:
    """What `torch.nn.init` takes for the fan-out: it does not know of groups."""
    return rule.fan_out if isinstance(rule, Linear) else rule.channels_out * math.prod(rule.kernel)


def _bias(rule: Rule) -> Law:
    if isinstance(rule, Linear | Convolution):
        return rule.bias
    return rule.shift if isinstance(rule, Normalize | Scale) else ZERO


def _without_bias(rule: Rule) -> Rule:
    return dataclasses.replace(rule, **{"bias" if isinstance(rule, Linear | Convolution) else "shift": ZERO})


def _biases(description: Description) -> Iterator[Change]:
    large = [(i, node) for i, node in enumerate(description.nodes) if _bias(node.rule).second_moment > LARGE]
    everything = description
    for index, node in large:
        size = math.sqrt(_bias(node.rule).second_moment)
        everything = everything.replace(index, rule=_without_bias(node.rule))
        text = f"the biases of {layer_of(node)!r} have the root mean square {size:.3g}"
        changed = description.replace(index, rule=_without_bias(node.rule))
        yield Change(1, "bias", layer_of(node), text, "with biases of zero there", changed, 2 * math.log(size))
    if len(large) > 1:
        text = f"{len(large)} layers have biases with a root mean square above {math.sqrt(LARGE):.1f}"
        yield Change(2, "bias", layer_of(large[0][1]), text, "with biases of zero there", everything)


def _scores(description: Description) -> Iterator[Change]:
    """Changes that divide attention scores by the root of the head size where they are not."""
    found = [(i, node.rule) for i, node in enumerate(description.nodes) if isinstance(node.rule, Attention)]
    wrong = [(i, rule) for i, rule in found if rule.scale * math.sqrt(rule.head_size) > 1.5 and rule.query_norm is None]
    changed = description
    for index, rule in wrong:
        right = dataclasses.replace(rule, scale=rule.head_size**-0.5)
        changed = changed.replace(index, rule=right)
        if len(wrong) < len(found):
            block = _reader(description, index)
            text = f"the attention scores in front of {block!r} are multiplied by {rule.scale:.3g}"
            alone = description.replace(index, rule=right)
            odds = 2 * math.log(rule.scale * math.sqrt(rule.head_size))
            yield Change(1, "scores", block, text, f"with 1/√{rule.head_size} as everywhere else", alone, odds)
    if wrong:
        rule = wrong[0][1]
        text = f"attention scores are multiplied by {rule.scale:.3g}"
        block = _reader(description, wrong[0][0])
        yield Change(2, "scores", block, text, f"with 1/√{rule.head_size}", changed)


def _reader(description: Description, index: int) -> str:
    """The name of the first node with one that reads this one, or the next one's."""
    after = (node for node in description.nodes[index + 1 :] if node.name or node.weight)
    return next((layer_of(node) for node in after), "")


def _residuals(description: Description) -> list[tuple[int, int]]:
    """Sums of a stream and a branch: their number, and which input is the branch."""
    found = []
    for index, node in enumerate(description.nodes):
        if isinstance(node.rule, Add) and len(node.inputs) == 2 and len(set(node.inputs)) == 2:
            one, other = sorted(node.inputs)  # only the later of the two can come from the other
            if leads_to(description, one, other):
                found.append((index, node.inputs.index(other)))
    return found


def leads_to(description: Description, first: int, last: int) -> bool:
    """Whether the value of one node goes into another, at whatever distance."""
    reached = {first}
    for index in range(first + 1, last + 1):
        if reached.intersection(description.nodes[index].inputs):
            reached.add(index)
    return last in reached


def _branches(description: Description) -> Iterator[Change]:
    """One branch that is scaled unlike the others, and all of them scaled by the root of their number."""
    sums = _residuals(description)
    if len(sums) < 2:
        return
    sizes = {index: _branch_size(description, index, branch) for index, branch in sums}
    usual = median(map(abs, sizes.values()))
    for index, branch in sums:
        if usual > 0 and not 1 / ODD <= (abs(sizes[index]) / usual) ** 2 <= ODD:
            block = _reader_before(description, index, branch)
            text = f"the branch that ends at {block!r} is multiplied by {sizes[index]:.3g}"
            changed = _with_branch(description, index, branch, usual)
            odds = abs(2 * math.log(abs(sizes[index]) / usual)) if sizes[index] else 0.0
            yield Change(1, "branch", block, text, f"with {usual:.3g} as the others have", changed, odds)
    text = f"{len(sums)} branches are added to the stream at full size"
    cure = f"with branches scaled by 1/√{len(sums)} (a residual scale or LayerScale)"
    yield Change(2, "branches", _reader_before(description, *sums[0]), text, cure, scale_branches(description))


def scale_branches(description: Description) -> Description:
    """The description with every residual branch divided by the root of their number."""
    sums = _residuals(description)
    for index, branch in sums:
        size = _branch_size(description, index, branch) / math.sqrt(len(sums))
        description = _with_branch(description, index, branch, size)
    return description


def _coefficients(description: Description, index: int) -> tuple[float, ...]:
    rule = description.nodes[index].rule
    assert isinstance(rule, Add)
    return rule.coefficients


def _branch_size(description: Description, index: int, branch: int) -> float:
    """What a branch is multiplied by where it is added, by the sum itself and by a scale in front of it."""
    before = description.nodes[description.nodes[index].inputs[branch]].rule
    factor = math.sqrt(before.factor.second_moment) if isinstance(before, Scale) else 1.0
    return _coefficients(description, index)[branch] * factor


def _with_branch(description: Description, index: int, branch: int, value: float) -> Description:
    coefficients = list(_coefficients(description, index))
    coefficients[branch] *= value / (_branch_size(description, index, branch) or 1.0)
    return description.replace(index, rule=Add(tuple(coefficients)))


def _reader_before(description: Description, index: int, branch: int) -> str:
    """The name of the node that ends a branch."""
    node = description.nodes[description.nodes[index].inputs[branch]]
    while node.inputs and not (node.name or node.weight):
        node = description.nodes[node.inputs[0]]
    return layer_of(node) if node.name or node.weight else ""


def _put_in(description: Description, at: int, readers: Sequence[int], rule: Rule) -> tuple[Description, int]:
    """A description with a node between `at` and its readers, and the number in front of which it stands."""
    place = min(readers)
    new = dataclasses.replace(description.nodes[at], rule=rule, inputs=(at,), name="", weight="", label="put in")

    def moved(index: int) -> int:
        return index + (index >= place)

    nodes = []
    for index, node in enumerate(description.nodes):
        inputs = tuple(place if index in readers and one == at else moved(one) for one in node.inputs)
        nodes.append(dataclasses.replace(node, inputs=inputs))
    nodes.insert(place, new)
    outputs = tuple(moved(one) for one in description.outputs)
    return dataclasses.replace(description, nodes=tuple(nodes), outputs=outputs), place


def _missing(description: Description) -> Iterator[Change]:
    """A norm or a LayerScale that siblings have and this block has not."""
    nodes = description.nodes
    groups: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        if isinstance(node.rule, Linear | Convolution | Mix) and node.weight:
            groups.setdefault(f"{role(node.weight)} {node.features}", []).append(index)
    missing: dict[int, tuple[int, Normalize]] = {}  # where a norm should stand, in front of which weight
    for group in groups.values():
        normed = {i: source(description, i, (Scale, Elementwise)) for i in group}
        usual = [rule for rule in (nodes[at].rule for at in normed.values()) if isinstance(rule, Normalize)]
        for index in group if 2 * len(usual) > len(group) else ():
            if not isinstance(nodes[normed[index]].rule, Normalize | Given):
                missing.setdefault(normed[index], (index, usual[0]))
    for at, (index, norm) in missing.items():
        changed, place = _put_in(description, at, _branches_from(description, at), norm)
        name = layer_of(nodes[index])
        text = f"no norm stands in front of {name!r}, as it does in the other blocks"
        yield Change(1, "norm", name, text, "with such a norm put in", changed, inserted=(place,))
    for group in groups.values():
        scales = {i: _scale_behind(description, i) for i in group}
        known = [one for one in scales.values() if one is not None]
        for index in group if 2 * len(known) > len(group) else ():
            readers = _readers(description, index)
            if scales[index] is None and readers:
                changed, place = _put_in(description, index, readers, known[0])
                name = layer_of(nodes[index])
                text = f"{name!r} goes into the stream without the scale that the other blocks have"
                yield Change(1, "layerscale", name, text, "with such a scale put in", changed, inserted=(place,))


def source(description: Description, index: int, passed: tuple[type[Rule], ...]) -> int:
    """The node that feeds another, rules of these kinds passed over."""
    at = description.nodes[index].inputs[0]
    while isinstance(description.nodes[at].rule, passed):
        at = description.nodes[at].inputs[0]
    return at


def _readers(description: Description, at: int) -> list[int]:
    return [index for index, node in enumerate(description.nodes) if at in node.inputs]


def _branches_from(description: Description, at: int) -> list[int]:
    """The readers of a node but for sums: the skip of a residual block goes around its norm."""
    return [index for index in _readers(description, at) if not isinstance(description.nodes[index].rule, Add)]


def _scale_behind(description: Description, index: int) -> Scale | None:
    rules = [description.nodes[one].rule for one in _readers(description, index)]
    return rules[0] if len(rules) == 1 and isinstance(rules[0], Scale) else None


def _loud_inputs(description: Description, given: Mapping[int, Signal]) -> Iterator[Change]:
    for index, signal in given.items():
        node = description.nodes[index]
        square, readers = signal.mean_square, _readers(description, index)
        if isinstance(node.rule, Given) and readers and square > 0 and not 1 / LOUD < square < LOUD:
            name = _reader(description, index)
            changed, place = _put_in(description, index, readers, Scale(Law(0.0, square**-0.5, "constant")))
            kind, what = ("embedding", "an embedding or bias") if node.rule.own else ("input", "an input")
            text = f"what enters in front of {name!r} ({what}) has the mean square {square:.3g}"
            yield Change(1, kind, name, text, "with the mean square 1", changed, abs(math.log(square)), (place,))


def _norms_everywhere(description: Description) -> Iterator[Change]:
    """A layer norm in front of every branch, or behind every weight layer of a network without branches."""
    if any(isinstance(node.rule, Normalize) for node in description.nodes):
        return
    sums = _residuals(description)
    changed = description
    inserted: list[int] = []
    places = {description.nodes[index].inputs[1 - branch] for index, branch in sums}
    for at in sorted(places or {at for at, _, _ in _weights(description)[:-1]}):
        readers = _branches_from(description, at)
        if readers:
            # each norm that was put in has moved the nodes behind it on by one
            moved = [one + sum(p <= one for p in inserted) for one in (at, *readers)]
            changed, _ = _put_in(changed, moved[0], moved[1:], NORM)
            inserted.append(min(readers))
    if inserted:
        where = "in front of every branch" if sums else "behind every weight layer"
        cure = f"with a layer norm {where}"
        yield Change(3, "norms", "", "nothing normalizes the signal", cure, changed, inserted=tuple(inserted))


def _post_norms(description: Description) -> Iterator[Change]:
    """The norms that stand in the stream, taken out of it: each skip starts in front of the norm."""
    nodes = list(description.nodes)
    count = 0
    for index, branch in _residuals(description):
        skip = nodes[index].inputs[1 - branch]
        before = nodes[skip]
        if isinstance(before.rule, Normalize):
            inputs = list(nodes[index].inputs)
            inputs[1 - branch] = before.inputs[0]
            nodes[index] = dataclasses.replace(nodes[index], inputs=tuple(inputs))
            count += 1
    if count > 1:
        changed = dataclasses.replace(description, nodes=tuple(nodes))
        text = f"{count} norms stand in the stream, each behind a sum (post-norm)"
        yield Change(2, "post_norm", "", text, "with the norms inside the branches (pre-norm)", changed)
