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
from sounding.probe.inside.attention import Attention
from sounding.probe.inside.listen import Inside
from sounding.probe.inside.oddities import BENDS, Note
from sounding.probe.inside.roles import block_of
from sounding.probe.inside.router import Router
from sounding.probe.inside.rows import Seen, of_kind, rows_of
from sounding.probe.inside.stream import Addition
from sounding.probe.inside.trail import Odd
from sounding.probe.reading import Reading
from sounding.probe.records import Finding, Severity, Unmeasured
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
DEEP = 16  # blocks with norms behind their sums that need a warm-up: BERT-base has 12, and trains with a short one
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
    """Rows of attention that look at few keys however many there are, in most of the network's attentions; or scores
    that nothing divides by √d."""
    known = [(one, about) for one, about in of_kind(seen, Attention) if "condensation" in one.values]
    collapsed = [one for one, _ in known if one.values["condensation"] > THRESHOLDS.condensed]
    raw = [one for one, about in known if about.raw]
    if raw and not collapsed:
        evidence = {"score_std": raw[0].values["score_std"]}
        yield _tell("raw_scores", None, raw[0], evidence, attentions=len(raw))
    if not collapsed:
        return
    share = len(collapsed) / len(known)
    typical = median(one.values["condensation"] for one, _ in known)
    severity: Severity = "low"
    if share >= MOST and typical > THRESHOLDS.condensed_warning:
        severity = "high" if typical > THRESHOLDS.condensed_fatal else "medium"
    worst = max(collapsed, key=lambda one: one.values["condensation"])
    measured = ("condensation", "score_std", "score_max", "attention_entropy", "one_hot_fraction")
    evidence = {name: worst.values[name] for name in measured}
    evidence |= {"attentions": float(len(known)), "collapsed_attentions": float(len(collapsed))}
    where = "its attention" if len(known) == 1 else f"{len(collapsed)} of {len(known)} attentions"
    yield _tell("entropy_collapse", severity, collapsed[0], evidence, where=where, worst=worst.name)


def find_token_collapse(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Positions of a sequence that are the same but for little, from some addition to the end of the stream."""
    additions = [one for one in seen if "token_cosine" in one.values]
    apart = [1 - one.values["token_cosine"] for one in additions]
    if not apart or apart[-1] >= THRESHOLDS.alike:
        return
    first = next(index for index in range(len(apart)) if max(apart[index:]) < THRESHOLDS.alike)
    if first == 0 and len(apart) > 1 and apart[-1] > apart[0] / 2:
        return  # they were alike before the first block
    severity: Severity = "medium" if apart[-1] < THRESHOLDS.alike_warning else "low"
    evidence = {"apart_at_last": apart[-1], "apart_at_first": apart[0]}
    yield _tell("token_collapse", severity, additions[first], evidence, line=THRESHOLDS.alike)


def find_massive_activation(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Entries of the stream that are hundreds of times the median one."""
    found = [one for one in seen if one.values.get("largest_over_median", 0.0) > THRESHOLDS.massive]
    if found:
        worst = max(found, key=lambda one: one.values["largest_over_median"])
        ratio = worst.values["largest_over_median"]
        everywhere = 1 - worst.values.get("token_cosine", 0.0) < THRESHOLDS.alike_warning
        severity: Severity = "high" if ratio > THRESHOLDS.massive_fatal and everywhere else "medium"
        evidence = {"largest_over_median": ratio}
        yield _tell("massive_activation", severity, found[0], evidence, worst=worst.name, line=THRESHOLDS.massive)


def find_odd_branch(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Branches that write ten times more or less into the stream than their siblings in other blocks."""
    families: dict[tuple[object, ...], list[Seen]] = {}
    for one, about in of_kind(seen, Addition):
        if "branch_mean_square" in one.values:  # NaN leaves no value
            families.setdefault((about.attends, *about.shape), []).append(one)
    for members in families.values():
        sizes = [math.sqrt(one.values["branch_mean_square"]) for one in members]
        if len(members) < FEW or not all(map(math.isfinite, sizes)) or not min(sizes) > 0:
            continue
        typical = median(sizes)
        for one, size in zip(members, sizes, strict=True):
            ratio = size / typical
            if max(ratio, 1 / ratio) > THRESHOLDS.odd:
                yield _tell(
                    "odd_branch", None, one, word="more" if ratio > 1 else "less", factor=max(ratio, 1 / ratio),
                    siblings=len(members) - 1, typical=typical, size=size,
                    evidence={"branch_over_siblings": ratio, "branch_over_stream": one.values["branch_over_stream"]},
                )  # fmt: skip


def find_odd_blocks(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Blocks that compute something else than their siblings, which all do the same."""
    for one, odd in of_kind(seen, Odd):
        named = (("lacks", odd.missing), ("also has", odd.extra))
        parts = [f"{verb} {_listed(names)}" for verb, names in named if names]
        told = " and ".join(parts) or "does the same in another order"
        bent = bool(parts) and {name.replace(" ", "_") for name in odd.missing | odd.extra} <= {"relu", *BENDS}
        yield _tell("odd_activation" if bent else "odd_block", None, one, {}, siblings=odd.siblings, told=told)


def _listed(counts: Counter[str]) -> str:
    """Operations in words.

    >>> _listed(Counter(["add", "relu", "add"]))
    'the operations “add” (2 times), “relu”'
    """
    told = [f"“{name}”" if count == 1 else f"“{name}” ({count} times)" for name, count in counts.items()]
    return f"the operation{'s' * (len(told) > 1)} " + ", ".join(told[:4] + (["…"] if len(told) > 4 else []))


def find_odd_stream(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Blocks with attention and no shortcuts, and streams that blocks multiply by a number."""
    additions = [(one, about) for one, about in of_kind(seen, Addition) if one.values.get("stream_mean_square", 0) > 0]
    attending = {block_of(one.name): one for one, _ in of_kind(seen, Attention) if block_of(one.name)}
    if len(attending) > 2 and not additions:
        yield _tell("no_shortcuts", None, next(iter(attending.values())), {"blocks": float(len(attending))})
    behind = [(one, about) for one, about in additions if not about.summed]
    if len(attending) >= DEEP and len(behind) >= len(attending):
        kept = math.prod(1 / math.hypot(1, one.values["branch_over_stream"]) for one, _ in behind)
        yield _tell("deep_post_norm", None, behind[1][0], {"blocks": float(len(attending)), "kept": kept})
    scaled = [(one, about) for one, about in additions if abs(about.factor) > 1]
    twice = [(one, about) for one, about in scaled if about.again]
    if len(scaled) < FEW and not twice:
        return
    place, first = (twice or scaled)[0]
    grown = math.log(additions[-1][0].values["stream_mean_square"] / additions[0][0].values["stream_mean_square"])
    asked = 2 * sum(math.log(abs(about.factor)) for _, about in scaled[1:])
    # a norm behind each sum takes DeepNorm's factor back
    if twice or grown > max(0.5 * asked, 2 * math.log(THRESHOLDS.odd)):
        what = f"multiply the residual stream by {abs(first.factor):.3g} on its way around them"
        remedy = "add the input as it is, or put a norm behind each sum, as DeepNorm does"
        if twice:
            what = "add a residual stream to a sum that holds it already, which doubles it"
            remedy = "add the input of a block once"
        large = len(scaled) >= FEW and grown > 3 * math.log(THRESHOLDS.odd)
        yield _tell(
            "growing_stream", "medium" if large else "low", place, {"stream_growth": math.exp(grown)},
            additions=len(scaled), what=what, remedy=remedy, factor=first.factor,
        )  # fmt: skip


def find_shut_gates(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Gates of recurrent layers that let nothing through: shut in the mean, whatever comes in."""
    gated = [one for one in reversed(seen) if any("_gate_" in name for name in one.values)]
    first = {one.name.partition("#")[0]: one for one in gated}  # of a cell in a loop the first call speaks
    for one in reversed(first.values()):
        gates = {name: value for name, value in one.values.items() if name.endswith("_gate_mean")}
        if "update_gate_mean" in gates:
            read = 1 - gates["update_gate_mean"]  # what a GRU does not keep, it reads
            gates |= {"new_gate_mean": read} if read < READ else {}
        gates.pop("reset_gate_mean", None)  # where it is shut, states come from the inputs alone, and are remembered
        shut = min(gates, key=lambda name: gates[name], default="")
        flat = one.values.get("gate_saturated_fraction", 0.0)
        if shut and gates[shut] < THRESHOLDS.shut:
            effect, remedy = GATES[shut]
            severity: Severity = "medium"
            if gates[shut] < THRESHOLDS.shut_fatal and shut != "new_gate_mean":
                severity = "high"
            which = shut.split("_")[0].replace("least", "least open")
            yield _tell("shut_gates", severity, one, dict(one.values), opened=gates[shut], which=which, effect=effect,
                        remedy=remedy)  # fmt: skip
        elif flat >= THRESHOLDS.saturated:
            yield _tell("flat_gates", None, one, dict(one.values), flat=flat)


def find_router_collapse(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Routers that send all tokens to the same experts, or leave half of the experts without one."""
    for one, router in of_kind(seen, Router):
        choices, experts = int(router.counts.sum()), len(router.counts)
        alone = router.favoured >= THRESHOLDS.favoured or one.values["dead_expert_fraction"] >= MOST
        if choices >= ENOUGH * experts and alone:
            evidence = {**one.values, "favoured_share": router.favoured, "experts": float(experts)}
            yield _tell("router_collapse", None, one, evidence, each=router.each)


def find_noted(seen: Sequence[Seen]) -> Iterator[Finding]:
    """What was noted at single operations and calls, one finding for each sentence about it."""
    places: dict[str, list[tuple[Seen, Note]]] = {}
    for one, note in of_kind(seen, Note):
        places.setdefault(note.key, []).append((one, note))
    if "rows_that_meet" in places:
        places.pop("softmax_over_batch", None)  # the nodes of a graph may be weighed among each other
    for key, members in places.items():
        one, note = members[0]
        first, second, *_ = *note.words, "", ""
        more = f", and {len(members) - 1} more times" if len(members) > 1 else ""
        yield _tell(key, None, one, {"places": float(len(members))}, first=first, second=second, more=more)


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


def _tell(key: str, severity: Severity | None, place: Seen, evidence: dict[str, float], **words: object) -> Finding:
    return tell(key, severity, layer=place.name, depth=place.layer, parameter=None, evidence=evidence, **words)
