"""What is wrong between modules: attention that looks at one key, tokens that are alike, branches and entries that
stand out.

Severity is what short trainings lost (`bench/inside_harm.py`, docs/verdict.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from sounding.probe.calls import Pass
from sounding.probe.findings.batch import find_degenerate_batch
from sounding.probe.findings.collapse import find_rank_collapse
from sounding.probe.inside.listen import Inside
from sounding.probe.inside.oddities import BENDS
from sounding.probe.inside.roles import block_of
from sounding.probe.inside.rows import Seen, rows_of
from sounding.probe.inside.sentences import SENTENCES
from sounding.probe.reading import Reading
from sounding.probe.records import Finding, FindingKind, Severity, Unmeasured
from sounding.probe.sentences import tell
from sounding.probe.thresholds import THRESHOLDS
from sounding.profile import Row

READ = (
    0.003  # of a new state taken in at each step: at 0.02 no training suffered, at 0.0025 SGD did (bench/gates_harm.py)
)
MOST = 0.5  # of the attentions of a network: a single block that looks at one key did no harm
GATES = {
    "input_gate_mean": ("nothing gets into the cell", "start the input gate's bias at zero"),
    "forget_gate_mean": ("the layer forgets everything at the next step, and no gradient goes back through time",
                         "start the forget gate's bias at 1"),
    "output_gate_mean": ("nothing leaves the cell", "start the output gate's bias at zero"),
    "update_gate_mean": ("the layer forgets everything at the next step, and no gradient goes back through time",
                         "start the update gate's bias at zero or above"),
    "new_gate_mean": ("the layer keeps its old state and reads nothing", "start the update gate's bias at zero"),
    "least_gate_mean": ("what it multiplies does not pass, a state that is lost or an input that never enters",
                        "start this gate's bias at zero, or at 1 where it keeps the state"),
}  # fmt: skip
ENOUGH, FEW = 8, 4  # choices per expert from which chance leaves none out; siblings from which on they have a median


def look_inside(
    passes: Sequence[tuple[Pass, Inside]], *, source: str
) -> tuple[tuple[Row, ...], tuple[Finding, ...], tuple[Unmeasured, ...]]:
    """The rows of what was seen between modules, the findings, and what could not be looked at."""
    gaps = dict.fromkeys(inside.reason for _, inside in passes if inside.reason is not None)
    rows, seen = rows_of(passes, source=source)
    found = tuple(finding for find in FINDERS for finding in find(seen)) if seen else ()
    return rows, found, tuple(Unmeasured("network", reason) for reason in gaps)


def find_entropy_collapse(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Rows of attention that look at few keys however many there are, in most of the network's attentions."""
    attentions = [one for one in seen if one.kind == "attention" and "condensation" in one.values]
    collapsed = [one for one in attentions if one.values["condensation"] > THRESHOLDS.condensed]
    raw = [one for one in attentions if one.raw]
    if raw and not collapsed:
        yield tell("raw_scores", layer=raw[0].name, depth=raw[0].layer, attentions=len(raw),
                   evidence={"score_std": raw[0].values["score_std"]})  # fmt: skip
    if not collapsed:
        return
    share = len(collapsed) / len(attentions)
    typical = median(one.values["condensation"] for one in attentions)
    severity: Severity = "low"
    if share >= MOST and typical > THRESHOLDS.condensed_warning:
        severity = "high" if typical > THRESHOLDS.condensed_fatal else "medium"
    worst = max(collapsed, key=lambda one: one.values["condensation"])
    values = worst.values
    where = "its attention" if len(attentions) == 1 else f"{len(collapsed)} of {len(attentions)} attentions"
    yield _finding(
        "entropy_collapse", severity, collapsed[0],
        f"Scores of {where} are so large that rows look at few keys however many there are (up to "
        f"{values['condensation']:.3g} times theory's line; entropy {values['attention_entropy']:.0%} of uniform, "
        f"{values['one_hot_fraction']:.0%} of rows on one key at {worst.name}): little gradient comes back to queries "
        "and keys.",
        ("multiply scores by 1/√d, d the size of a head",
         "sounding repair TARGET --method qk_norm: normalize queries and keys",
         "draw the weights of queries and keys smaller"),
        expected="scores of standard deviation around 1", found=f"{values['score_std']:.3g}",
        evidence={name: values[name] for name in ("condensation", "score_std", "score_max", "attention_entropy",
                                                  "one_hot_fraction")}
        | {"attentions": float(len(attentions)), "collapsed_attentions": float(len(collapsed))},
    )  # fmt: skip


def find_token_collapse(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Positions of a sequence that are the same but for little, from some addition to the end of the stream."""
    additions = [one for one in seen if "token_cosine" in one.values]
    if not additions:
        return
    apart = [1 - one.values["token_cosine"] for one in additions]
    if apart[-1] >= THRESHOLDS.alike:
        return
    first = next(index for index in range(len(apart)) if max(apart[index:]) < THRESHOLDS.alike)
    if first == 0 and len(apart) > 1 and apart[-1] > apart[0] / 2:
        return  # they were alike before the first block
    severity: Severity = "medium" if apart[-1] < THRESHOLDS.alike_warning else "low"
    yield _finding(
        "token_collapse", severity, additions[first],
        f"The tokens of a sequence become alike: at the end of the stream {apart[-1]:.2g} of their signal lies outside "
        f"what they share ({apart[0]:.2g} behind the first branch). What differs between positions is learned more "
        "slowly by that factor.",
        ("scale the branches down (1/√(2L), L blocks), or put the norms in front of them (pre-norm)",
         "start biases at zero"),
        expected=f"more than {THRESHOLDS.alike:.0%} outside what tokens share", found=f"{apart[-1]:.2g}",
        evidence={"apart_at_last": apart[-1], "apart_at_first": apart[0]},
    )  # fmt: skip


def find_massive_activation(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Entries of the stream that are hundreds of times the median one."""
    found = [one for one in seen if one.values.get("largest_over_median", 0.0) > THRESHOLDS.massive]
    if not found:
        return
    worst = max(found, key=lambda one: one.values["largest_over_median"])
    ratio = worst.values["largest_over_median"]
    everywhere = 1 - worst.values.get("token_cosine", 0.0) < THRESHOLDS.alike_warning
    yield _finding(
        "massive_activation", "high" if ratio > THRESHOLDS.massive_fatal and everywhere else "medium", found[0],
        f"An entry of the stream is {ratio:.3g} times the median one behind {worst.name}: norms divide by it, and what "
        "the other features say shrinks.",
        ("look at the biases and norm weights of this layer", "in a trained network: a format with a wide range"),
        expected=f"less than {THRESHOLDS.massive:.0f} times the median", found=f"{ratio:.3g} times",
        evidence={"largest_over_median": ratio},
    )  # fmt: skip


def find_odd_branch(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Branches that write ten times more or less into the stream than their siblings in other blocks."""
    families: dict[tuple[object, ...], list[Seen]] = {}
    for one in seen:
        if one.kind == "addition" and "branch_mean_square" in one.values:  # NaN leaves no value
            families.setdefault(one.shape, []).append(one)
    for members in families.values():
        sizes = [math.sqrt(one.values["branch_mean_square"]) for one in members]
        if len(members) < FEW or not all(map(math.isfinite, sizes)) or not min(sizes) > 0:
            continue
        typical = median(sizes)
        for one, size in zip(members, sizes, strict=True):
            if max(size / typical, typical / size) > THRESHOLDS.odd:
                word = "more" if size > typical else "less"
                factor = size / typical
                yield _finding(
                    "odd_branch", "low", one,
                    f"The branch that ends in {one.name} writes {max(factor, 1 / factor):.3g} times {word} into the "
                    f"stream than its {len(members) - 1} siblings.",
                    ("draw its last layer by the law of its siblings",),
                    expected=f"a root mean square of {typical:.3g}, as its siblings have", found=f"{size:.3g}",
                    evidence={"branch_over_siblings": factor, "branch_over_stream": one.values["branch_over_stream"]},
                )  # fmt: skip


def find_odd_blocks(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Blocks that compute something else than their siblings, which all do the same."""
    for one in seen:
        if one.kind != "block":
            continue
        siblings, missing, extra = one.shape
        assert isinstance(missing, Counter)
        assert isinstance(extra, Counter)
        parts = [f"{verb} {_listed(names)}" for verb, names in (("lacks", missing), ("also has", extra)) if names]
        told = " and ".join(parts) or "does the same in another order"
        bent = bool(parts) and {name.replace(" ", "_") for name in missing | extra} <= {"relu", *BENDS}
        yield _finding(
            "activation" if bent else "odd_branch", "low", one,
            f"The block {one.name!r} computes something else than its {siblings} siblings, which all do the same: "
            f"beside them it {told}.",
            (f"compare the code and settings of {one.name!r} with those of its siblings", "nothing, if it is meant"),
            expected="the operations of its siblings", found=f"it {told}", evidence={},
        )  # fmt: skip


def _listed(counts: Counter[str]) -> str:
    """Operations in words.

    >>> _listed(Counter(["add", "relu", "add"]))
    'the operations “add” (2 times), “relu”'
    """
    told = [f"“{name}”" if count == 1 else f"“{name}” ({count} times)" for name, count in counts.items()]
    return f"the operation{'s' * (len(told) > 1)} " + ", ".join(told[:4] + (["…"] if len(told) > 4 else []))


def find_odd_stream(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Blocks with attention and no shortcuts, and streams that blocks multiply by a number."""
    additions = [one for one in seen if one.kind == "addition" and one.values.get("stream_mean_square", 0) > 0]
    attending = {block_of(one.name): one for one in seen if one.kind == "attention" and block_of(one.name)}
    if len(attending) > 2 and not additions:
        yield _finding(
            "odd_branch", "low", next(iter(attending.values())),
            f"Nothing leads around any of the {len(attending)} blocks with attention: each mixes the tokens once "
            "more, and without a way around they become alike, faster with every block.",
            ("add the input of each part of a block to its output",),
            expected="a sum of each block's input and output", found="none", evidence={"blocks": float(len(attending))},
        )  # fmt: skip
    scaled = [one for one in additions if abs(one.factor) > 1]
    twice = [one for one in scaled if one.again]
    if len(scaled) < FEW and not twice:
        return
    first = (twice or scaled)[0]
    grown = math.log(additions[-1].values["stream_mean_square"] / additions[0].values["stream_mean_square"])
    asked = 2 * sum(math.log(abs(one.factor)) for one in scaled[1:])
    # a norm behind each sum takes DeepNorm's factor back
    if twice or grown > max(0.5 * asked, 2 * math.log(THRESHOLDS.odd)):
        what, remedy = (
            ("add a residual stream to a sum that holds it already, which doubles it", "add the input of a block once")
            if twice else
            (f"multiply the residual stream by {abs(first.factor):.3g} on its way around them",
             "add the input as it is, or put a norm behind each sum, as DeepNorm does")
        )  # fmt: skip
        large = len(scaled) >= FEW and grown > 3 * math.log(THRESHOLDS.odd)
        yield _finding(
            "odd_branch", "medium" if large else "low", first,
            f"{len(scaled)} additions {what}: its mean square grows ×{math.exp(grown):.3g} from the first addition to "
            "the last, and what later blocks write drowns in it.", (remedy,),
            expected="1", found=f"{first.factor:.3g}", evidence={"stream_growth": math.exp(grown)},
        )  # fmt: skip


def find_shut_gates(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Gates of recurrent layers that let nothing through: shut in the mean, whatever comes in."""
    for one in seen:
        gates = {name: value for name, value in one.values.items() if name.endswith("_gate_mean")}
        if "update_gate_mean" in gates:
            read = 1 - gates["update_gate_mean"]  # what a GRU does not keep, it reads
            gates |= {"new_gate_mean": read} if read < READ else {}
        shut = min(gates, key=lambda name: gates[name], default=None)
        # a GRU whose reset gate is shut proposes states from its inputs alone, and still remembers
        if shut is None or gates[shut] >= THRESHOLDS.shut or shut == "reset_gate_mean":
            flat = one.values.get("gate_saturated_fraction", 0.0)
            if flat >= THRESHOLDS.saturated:
                yield _finding(
                    "shut_gates", "medium", one,
                    f"{flat:.0%} of the gates of {one.name} are fully open or shut, where a sigmoid is flat: almost no "
                    "gradient comes back to what opens them.",
                    ("draw the weights in front of the gates smaller, or scale the inputs",),
                    expected="gates around 0.5", found=f"{flat:.0%} flat", evidence=dict(one.values),
                )  # fmt: skip
            continue
        words, remedy = GATES[shut]
        which = shut.split("_")[0].replace("least", "least open")
        yield _finding(
            "shut_gates", "high" if gates[shut] < THRESHOLDS.shut_fatal and shut != "new_gate_mean" else "medium", one,
            f"The {which} gates of {one.name} are {gates[shut]:.2g} open in the mean: {words}.",
            (remedy, "draw weights and biases by torch's own law"),
            expected="gates around 0.5", found=f"{gates[shut]:.2g}", evidence=dict(one.values),
        )  # fmt: skip


def find_router_collapse(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Routers that send all tokens to the same experts, or leave half of the experts without one."""
    for one in seen:
        if one.kind != "router":
            continue
        choices, each, experts, favoured = one.routing
        dead = one.values["dead_expert_fraction"]
        if choices < ENOUGH * experts or (favoured < THRESHOLDS.favoured and dead < MOST):
            continue
        most = f"{favoured:.0%} of the choices of {one.name} fall on {each} of its {experts} experts"
        yield _finding(
            "router_collapse", "low", one,
            f"{most}, and {dead:.0%} of the experts get no token and no gradient.",
            ("add a loss that balances the load, or a bias that is adapted to it", "draw the router's weights smaller"),
            expected="a load of 1 over the number of experts", found=f"{one.values['expert_load_max']:.3g} times that",
            evidence={**one.values, "favoured_share": favoured, "experts": float(experts)},
        )  # fmt: skip


def find_noted(seen: Sequence[Seen]) -> Iterator[Finding]:
    """What was noted at single operations and calls, one finding for each sentence about it."""
    places: dict[str, list[Seen]] = {}
    for one in seen:
        if one.kind == "note":
            places.setdefault(str(one.shape[0]), []).append(one)
    if "mixing" in places:
        places.pop("batch", None)  # the nodes of a graph may be weighed among each other
    for key, members in places.items():
        first, more = members[0], f", and {len(members) - 1} more times" if len(members) > 1 else ""
        said = SENTENCES[key]
        why, found = (text.format(*first.shape[1:], name=first.name) for text in (said.why, said.found))
        yield _finding(
            said.kind, said.severity, first, f"{why}{more}.", tuple(said.remedies.split("\n")),
            expected=said.expected, found=found, evidence={"places": float(len(members))},
        )  # fmt: skip


FINDERS = (
    find_noted,
    find_entropy_collapse,
    find_token_collapse,
    find_massive_activation,
    find_odd_branch,
    find_odd_blocks,
    find_odd_stream,
    find_shut_gates,
    find_router_collapse,
)


def leave_known(findings: tuple[Finding, ...], reading: Reading) -> tuple[Finding, ...]:
    """The findings without those that the measured profile explains better."""
    known = set[str]()
    if any("saturated_fraction" in call.values for call in reading.calls):
        known.add("saturation")  # modules are measured themselves
    explained = [*find_degenerate_batch(reading, THRESHOLDS), *find_rank_collapse(reading, THRESHOLDS)]
    if any(one.severity == "high" for one in explained):
        known.add("unused_input")  # of equal outputs
    return tuple(one for one in findings if one.kind not in known)


def _finding(
    kind: FindingKind,
    severity: Severity,
    place: Seen,
    why: str,
    remedies: tuple[str, ...],
    *,
    expected: str,
    found: str,
    evidence: dict[str, float],
) -> Finding:
    return Finding(kind, severity, place.name, place.layer, evidence, why, "", remedies, expected=expected, found=found)
