"""A report in the terminal: the verdict in words, a table over depth that fits its width, findings with what to try."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from sounding.cli.output import new_table
from sounding.look import (
    TERMINAL_BAD,
    TERMINAL_GOOD,
    TERMINAL_NOTE,
    TERMINAL_WARN,
    write_evidence,
    write_log_norm,
    write_number,
    write_share,
)
from sounding.probe.findings.collapse import share_outside
from sounding.probe.inside.precision import HEADROOMS, find_headroom
from sounding.probe.inside.roles import block_of, find_roles
from sounding.probe.reading import LayerCall, Reading, count_in_band

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from sounding.probe.records import Finding, Report

ROWS = 20  # groups of calls that fit on a screen with the verdict and its findings
UNMEASURED = 8  # things that were not measured, with their reason
EDGES = 3  # calls without a role that are told before the blocks of a transformer, and behind them
COLORS = {"high": TERMINAL_BAD, "medium": TERMINAL_WARN, "low": TERMINAL_NOTE}
STATES = {"healthy": (TERMINAL_GOOD, "✓"), "not known": (TERMINAL_WARN, "?"), "unhealthy": (TERMINAL_BAD, "✗")}
# columns of a terminal from which the table has room for one more number, for three, and for five
WIDE, WIDER, WIDEST = 92, 100, 130
SHORT = 4.0  # bits of float16 below which some layer is so near its ends that the column is shown at any width
GAP = 2  # spaces between columns


@dataclass(frozen=True)
class Column:
    """A measure in the table: heading, what it says in a legend, how a value is written, and from which width on."""

    measure: str
    heading: str
    legend: str
    write: Callable[[float], str]
    width: int = 0


def _write_headroom(bits: float) -> str:
    return "–" if math.isnan(bits) else f"{bits:.0f}"


COLUMNS = (
    Column("mean_square", "size", "mean square of the outputs", write_number),
    Column("participation_ratio", "directions", "how many directions carry the batch", write_number),
    Column("participation_ratio", "spread", "share of the signal outside the dominant direction",
           lambda ratio: write_share(share_outside(ratio))),
    Column("mean_cosine", "cosine", "mean cosine between samples", write_number, width=WIDE),
    Column("gradient_log_norm", "gradient", "norm of the loss's gradient at this output", write_log_norm),
    Column("branch_over_stream", "branch", "what a branch adds over its stream", write_number, width=WIDER),
    Column("headroom_float16", "float16", "doublings left until float16 fails", _write_headroom, width=WIDER),
    Column("headroom_bfloat16", "bfloat16", "… until bfloat16 fails", _write_headroom, width=WIDEST),
    Column("headroom_float8", "float8", "… until float8 e4m3 fails", _write_headroom, width=WIDEST),
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Calls told as one row, medians of their values: consecutive ones, or siblings of one role in several blocks."""

    calls: tuple[LayerCall, ...]
    role: str = ""

    @property
    def place(self) -> str:
        first, last = self.calls[0].depth, self.calls[-1].depth
        return str(first) if first == last else f"{first}–{last}"

    def write_name(self, width: int) -> str:
        """The module's name, or the first and the last, cut to a width."""
        first, last = self.calls[0].name, self.calls[-1].name
        if self.role:
            start, end = (".".join(block_of(name).split(".")[-2:]) for name in (first, last))
            blocks = start if start == end else f"{start}–{end.rpartition('.')[2]}"
            number = blocks.rpartition(".")[2]
            long, short = f"{blocks} {self.role}", f"{number} {self.role}"
            return long if len(long) <= width else shorten(short, width)
        if len(self.calls) == 1:
            return shorten(first, width)
        one, other = _without_common(first, last)
        # the numbers tell calls apart: what both names begin with goes first, from the second and then from both
        for start, end in ((first, last), (first, other), (one, other)):
            if len(start) + len(end) + 3 <= width:
                return f"{start} … {end}"
        first, last, half = one, other, (width - 3) // 2
        return f"{shorten(first, half)} … {shorten(last, half)}"

    def value(self, measure: str) -> float:
        """The median, NaN without a measured value; one non-finite call makes the group NaN or infinite."""
        # NaN stands for not measured, which a median must not see
        values = [value for call in self.calls if not math.isnan(value := _value(call, measure))]
        return median(values) if values else math.nan

    def holds(self, depth: int) -> bool:
        if self.role:
            return any(call.depth == depth for call in self.calls)
        return self.calls[0].depth <= depth <= self.calls[-1].depth


def _value(call: LayerCall, measure: str) -> float:
    return find_headroom(call.values, measure) if measure in HEADROOMS else call.get(measure)


def group_calls(reading: Reading, *, rows: int = ROWS) -> tuple[list[Group], bool]:
    """At most about `rows` groups, and whether only weight layers are told.

    A short network is told call by call. A longer one by its weight layers (activations and norms between them would
    make every column a sawtooth), a very long one by ranges of them. The first and the last layer stay alone. Of a
    long transformer siblings make rows: the first block, those between, and the last, role by role.
    """
    calls: Sequence[LayerCall] = reading.calls
    # without weight layers there is nothing but the calls to tell
    layers = calls if len(calls) <= rows else reading.weight_layers or calls
    told = len(layers) < len(calls)
    if len(layers) <= rows:
        return [Group((call,)) for call in layers], told
    if roles := find_roles(reading):
        return _group_by_role(reading, layers, roles), True
    inner = layers[1:-1]
    count = rows - 2
    edges = [round(index * len(inner) / count) for index in range(count + 1)]
    ranges = [inner[low:high] for low, high in itertools.pairwise(edges) if high > low]
    return [Group(tuple(part)) for part in ((layers[0],), *ranges, (layers[-1],))], told


def _group_by_role(reading: Reading, layers: Sequence[LayerCall], roles: Mapping[int, str]) -> list[Group]:
    """Role by role its calls of the first block, of those between, and of the last; what has no role stays alone."""
    families: dict[str, list[LayerCall]] = {}
    for call in reading.calls:
        if call.depth in roles:
            families.setdefault(roles[call.depth], []).append(call)
    alone = [Group((call,)) for call in layers if call.depth not in roles]
    groups = []
    for role, calls in sorted(families.items(), key=lambda item: item[0].startswith("norm")):  # norms last
        # they differ: one takes the input, one meets the head
        first, last = block_of(calls[0].name), block_of(calls[-1].name)
        parts = ([c for c in calls if block_of(c.name) == first],
                 [c for c in calls if block_of(c.name) not in (first, last)],
                 [c for c in calls if block_of(c.name) == last != first])  # fmt: skip
        groups += [Group(tuple(part), role) for part in parts if part]
    start = min(group.calls[0].depth for group in groups)
    before = [group for group in alone if group.calls[0].depth < start]
    behind = [group for group in alone if group.calls[0].depth > start]
    return [*before[:EDGES], *groups, *behind[-EDGES:]]


def _without_common(first: str, last: str) -> tuple[str, str]:
    """Two names of modules without the modules that both lie in.

    >>> _without_common("blocks.0.c1", "blocks.1.c1")
    ('0.c1', '1.c1')
    """
    parts = [name.split(".") for name in (first, last)]
    # the last part stays, whatever it is
    inner = zip(parts[0][:-1], parts[1][:-1], strict=False)
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], inner)))
    one, other = (".".join(part[common:]) for part in parts)
    return one, other


def shorten(name: str, width: int) -> str:
    """A long module name with its middle left out.

    >>> shorten("encoder.layers.11.self_attn.out_proj", 20)
    'encoder.l…n.out_proj'
    """
    if len(name) <= width:
        return name
    head = (width - 1) // 2  # one place is for the …
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def print_report(report: Report, console: Console, *, title: str = "", legend: bool = True) -> None:
    """The whole report: verdict, table, notes, findings, what was not measured."""
    reading = report.reading
    findings = report.verdict.findings
    if title:
        console.print(Text(title, style="bold underline"))
    about, start = report.environment, report.profile.settings.get("start")
    data = f"on {about['data']}" if "data" in about else ""
    for line in filter(None, (about.get("model"), data, start and start["sentence"])):
        console.print(Text(str(line), style="dim"))
    console.print(write_verdict(report))
    if reading.calls:
        console.print()
        console.print(make_table(reading, findings, width=console.width))
        if legend:
            console.print(Text(_legend(reading, console.width), style="dim"))
        if told := write_theory(report):
            console.print(Text(told, style="dim"))
        if worst := name_worst(reading):
            console.print(Text("\nWorst layers", style="bold"))
            console.print(Text("\n".join(f"  {line}" for line in worst)))
    for index, finding in enumerate(findings, start=1):
        console.print()
        console.print(write_finding(finding, index))
    if report.unmeasured:
        console.print(Text(f"\nNot measured ({len(report.unmeasured)}):", style="bold"))
        for item in report.unmeasured[:UNMEASURED]:
            console.print(Text(f"  {item.name}: {item.reason}"))
        if (more := len(report.unmeasured) - UNMEASURED) > 0:
            console.print(Text(f"  … and {more} more (all of them with --json or --html)"))


def write_theory(report: Report) -> str:
    """How far theory describes the network, and how many measured rows lie in its band; or why it does not."""
    inside, banded = count_in_band(report.profile)
    note = report.profile.settings.get("theory", {})
    if not banded:
        why = note.get("reading") or note.get("note")
        return f"No prediction: {why.rstrip('.')}." if why else ""
    layers = f"{note.get('predicted_layers', '?')} of {note.get('weight_layers', '?')} weight layers"
    told = f"Theory predicts {layers}; {inside} of {banded} measured numbers lie in its 95% band over seeds."
    told += "".join(f" {followed.capitalize()}." for followed in note.get("followed", [])[:1])
    return told + "".join(f" Measured instead of predicted: {part}." for part in note.get("measured_instead", [])[:1])


def write_verdict(report: Report) -> RenderableType:
    """The verdict's sentence with its mark."""
    verdict = report.verdict
    color, mark = STATES[verdict.status]
    if verdict.healthy and verdict.findings:
        color = TERMINAL_WARN
    partial = "Interrupted; what was measured says: " if report.profile.settings.get("partial") else ""
    return Text.assemble((f"{mark} ", f"bold {color}"), (partial, f"bold {TERMINAL_WARN}"), (verdict.summary, "bold"))


def make_table(reading: Reading, findings: Sequence[Finding], *, width: int) -> Table:
    """Depth downwards, a measure per column; the last column points to the findings by number."""
    groups, _ = group_calls(reading)
    shown = [Group((reading.input,)), *groups] if reading.input.values else groups
    columns = _columns(reading, width)
    cells = [[column.write(group.value(column.measure)) for column in columns] for group in shown]
    marks = [_mark(group, shown, findings) for group in shown]
    # the widths of call, of finding, and of each number
    taken = [max(4, *(len(group.place) for group in shown)), max(7, *(len(mark) for mark in marks))]
    values_of = zip(columns, zip(*cells, strict=True), strict=True)
    taken += [max(len(column.heading), *map(len, values)) for column, values in values_of]
    room = max(width - sum(taken) - GAP * len(taken), 12)  # the names of modules get what the numbers leave
    table = new_table(">call", "module", *(f">{column.heading}" for column in columns), "finding")
    table.padding = (0, GAP - 1, 0, 0)
    for group, values, mark in zip(shown, cells, marks, strict=True):
        table.add_row(group.place, Text(group.write_name(room)), *values, mark)
    return table


def _columns(reading: Reading, width: int) -> list[Column]:
    present = {measure for call in (reading.input, *reading.calls) for measure in call.values}
    left = [bits for call in reading.calls if not math.isnan(bits := _value(call, "headroom_float16"))]
    # headroom follows from other measures, and stands in no call itself
    present |= set(HEADROOMS) if left else set()
    short = {"headroom_float16"} if left and min(left) < SHORT else set()
    return [one for one in COLUMNS if one.measure in present and (width >= one.width or one.measure in short)]


def _mark(group: Group, shown: list[Group], findings: Sequence[Finding]) -> Text:
    """The numbers of the findings in this row, or between it and the row before."""
    marks = []
    for index, finding in enumerate(findings, start=1):
        if (depth := finding.depth) is None:
            continue
        # a call that no row tells belongs to the next one that is told, or to the last
        rows = [one for one in shown if one.holds(depth)]
        rows = rows or [one for one in shown if one.calls[0].depth > depth][:1] or shown[-1:]
        if any(one is group for one in rows):
            marks.append(Text(f"[{index}]", style=COLORS[finding.severity]))
    return Text(" ").join(marks)


def _legend(reading: Reading, width: int) -> str:
    groups, only_weights = group_calls(reading)
    columns = _columns(reading, width)
    told = "; ".join(f"{column.heading}: {column.legend}" for column in columns) + "."
    if only_weights:
        told += " Only weight layers are shown." if not any(group.role for group in groups) else " Roles of layers."
    if any(len(group.calls) > 1 for group in groups):
        told += " A range of calls shows medians."
    return told


def name_worst(reading: Reading) -> list[str]:
    """The extremes by name, for tables whose rows are ranges; nothing for a table that shows every layer."""
    groups, _ = group_calls(reading)
    if all(len(group.calls) == 1 for group in groups):
        return []
    layers = reading.weight_layers or reading.calls
    lines = []
    for measure, words, pick, write in (
        ("participation_ratio", "fewest directions", min, write_number),
        ("gradient_log_norm", "largest gradient", max, write_log_norm),
        ("gradient_log_norm", "smallest gradient", min, write_log_norm),
        ("dead_fraction", "most dead units", max, write_share),
        ("saturated_fraction", "most saturated units", max, write_share),
    ):
        # units die behind an activation, which is no weight layer
        among = reading.calls if "fraction" in measure else layers
        measured = [call for call in among if math.isfinite(call.get(measure))]
        if not measured:
            continue
        worst = pick(measured, key=lambda call: call.get(measure))
        if "fraction" in measure and worst.get(measure) == 0:
            continue
        lines.append(f"{words + ':':<21} {write(worst.get(measure)):>8} at call {worst.depth}, {worst.name}")
    return lines


def write_finding(finding: Finding, index: int) -> RenderableType:
    """Severity, kind and place; why; the numbers; what to try."""
    where = finding.parameter or finding.layer
    place = "" if where is None else f" at {where}"
    if finding.depth is not None:
        place += f" (call {finding.depth})"
    head = Text.assemble(
        (f"[{index}] ", COLORS[finding.severity]),
        (finding.kind.replace("_", " "), "bold"),
        (f" · {finding.severity} severity", COLORS[finding.severity]),
        place,
    )
    body = Table.grid(padding=(0, 1))
    body.add_column(no_wrap=True, style="dim", min_width=9)
    body.add_column()
    body.add_row("    why", Text(finding.why))
    numbers = ", ".join(f"{key.replace('_', ' ')} {write_evidence(value)}" for key, value in finding.evidence.items())
    if numbers:
        body.add_row("    found", Text(numbers))
    for position, remedy in enumerate(finding.remedies):
        body.add_row("    try" if position == 0 else "", Text(f"{position + 1}. {remedy}"))
    outer = Table.grid()
    outer.add_row(head)
    outer.add_row(body)
    return outer
