"""Check every network of the set with and without each fault, and count what is found.

python bench/faults3/run.py [--seed N] [--only PATTERN]

A finding of a faulty network counts if the sound network of the same seed has none of the same kind at the same place
that is at least as severe, and if it is of the severity that harm.json asks for, or worse. A fault is

- found, if any such finding is there;
- named, if one is of a kind that the fault accepts;
- placed, if one of those also names the module or the parameter.

What is expected stands beside each fault. It was written before any of these networks had been checked.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common import Fault, Network

import sounding
from networks import NETWORKS

HARM = Path(__file__).with_name("harm.json")
ORDER = {"low": 0, "medium": 1, "high": 2}


@dataclass
class Totals:
    """What has been counted so far."""

    faults: int = 0
    found: int = 0
    named: int = 0
    placed: int = 0
    named_at_any_severity: int = 0
    errors: int = 0
    twins: int = 0
    warned: list[str] = field(default_factory=list)
    rows: int = 0
    unpaired: int = 0
    within: int = 0
    layers: int = 0
    predicted: int = 0


def checked(network: Network, seed: int, fault: str | None) -> sounding.Report:
    model, inputs, targets, loss = network.make(seed, fault)
    return sounding.check(model, inputs, targets, loss=loss, theory=True)


def new_findings(found: Iterable[sounding.Finding], sound: Iterable[sounding.Finding]) -> list[sounding.Finding]:
    """The findings that the sound network does not have: not of this kind, not there, or not as severe."""
    known: dict[tuple[str, str | None, str | None], int] = {}
    for each in sound:
        key = (each.kind, each.layer, each.parameter)
        known[key] = max(known.get(key, -1), ORDER[each.severity])
    return [each for each in found if ORDER[each.severity] > known.get((each.kind, each.layer, each.parameter), -1)]


def in_place(finding: sounding.Finding, place: str) -> bool:
    """Whether the finding names the module or the parameter; one about the whole network names the empty string."""
    names = [each for each in (finding.layer, finding.parameter) if each] or [""]
    return any(re.search(place, each) for each in names)


def words(findings: Iterable[sounding.Finding]) -> str:
    said = (f"{each.kind} ({each.severity}) at {each.parameter or each.layer or 'network'}" for each in findings)
    return "; ".join(said) or "nothing"


def judge(fault: Fault, wanted: str, new: list[sounding.Finding], totals: Totals) -> str:
    """Count one fault, and say in a line what was found."""
    severe = [each for each in new if ORDER[each.severity] >= ORDER[wanted]]
    named = [each for each in severe if each.kind in fault.kinds]
    placed = [each for each in named if in_place(each, fault.place)]
    totals.found += bool(severe)
    totals.named += bool(named)
    totals.placed += bool(placed)
    totals.named_at_any_severity += any(each.kind in fault.kinds for each in new)
    marks = [word if there else "-" for word, there in (("found", severe), ("named", named), ("placed", placed))]
    return f"{' '.join(f'{mark:6s}' for mark in marks)} wants {wanted:6s} {words(new)}"


def count_theory(report: sounding.Report, totals: Totals) -> str:
    """Count the predictions of a sound network that lie within two standard deviations of what was measured."""
    measured = {(r.layer, r.name, r.measure): r.value for r in report.profile if r.source not in ("theory", "redraw")}
    rows = [r for r in report.profile if r.source == "theory" and r.stderr is not None]
    paired = [r for r in rows if (r.layer, r.name, r.measure) in measured]
    within = sum(abs(measured[r.layer, r.name, r.measure] - r.value) <= 2 * r.stderr for r in paired)
    settings = report.profile.settings.get("theory") or {}
    layers, predicted = settings.get("weight_layers", 0), settings.get("predicted_layers", 0)
    totals.rows += len(paired)
    totals.unpaired += len(rows) - len(paired)
    totals.within += within
    totals.layers += layers
    totals.predicted += predicted
    return f"theory: {within} of {len(paired)} rows within two deviations, {predicted} of {layers} weight layers"


def one_network(network: Network, seed: int, only: str, severities: dict[str, str], totals: Totals) -> None:
    chosen = [fault for fault in network.faults if re.search(only, f"{network.name}:{fault.name}")]
    if not chosen and not re.search(only, f"{network.name}:sound"):
        return
    begun = time.process_time()
    try:
        report = checked(network, seed, None)
    except Exception as error:  # one failed check must not end the run: it is shown and counted
        totals.errors += 1
        print(f"{network.name}:sound: {type(error).__name__}: {error}", flush=True)
        return
    sound = list(report.verdict.findings)
    totals.twins += 1
    loud = [each for each in sound if each.severity != "low"]
    if loud:
        totals.warned.append(f"{network.name}: {words(loud)}")
    seconds = time.process_time() - begun
    print(f"\n{network.name}:sound: {words(sound)}; {count_theory(report, totals)} ({seconds:.1f} s of processor time)")
    for fault in chosen:
        totals.faults += 1
        name = f"{network.name}:{fault.name}"
        try:
            found = checked(network, seed, fault.name).verdict.findings
        except Exception as error:
            totals.errors += 1
            print(f"  {name:34s} {type(error).__name__}: {error}", flush=True)
            continue
        print(f"  {name:34s} {judge(fault, severities[name], new_findings(found, sound), totals)}", flush=True)


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.1%})" if whole else "0 of 0"


def summary(totals: Totals) -> str:
    lines = [
        f"faults found at the severity wanted: {share(totals.found, totals.faults)}",
        f"and with a right name: {share(totals.named, totals.faults)}",
        f"and with the right module: {share(totals.placed, totals.faults)}",
        f"with a right name at any severity: {share(totals.named_at_any_severity, totals.faults)}",
        f"sound networks with a finding of medium or high severity: {share(len(totals.warned), totals.twins)}",
        *(f"  {each}" for each in totals.warned),
        f"sound networks, rows of theory within two standard deviations: {share(totals.within, totals.rows)}",
        f"sound networks, weight layers with a prediction: {share(totals.predicted, totals.layers)}",
        f"rows of theory without a measured row, not counted: {totals.unpaired}",
        f"checks that raised an error: {totals.errors}",
    ]
    return "\n".join(lines)


def run(networks: Iterable[Network], seed: int, only: str, severities: dict[str, str]) -> Totals:
    totals = Totals()
    for network in networks:
        one_network(network, seed, only, severities, totals)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression for network:fault, or network:sound")
    options = parser.parse_args()
    severities = {name: row["severity"] for name, row in json.loads(HARM.read_text()).items() if "severity" in row}
    print("\n" + summary(run(NETWORKS, options.seed, options.only, severities)))


if __name__ == "__main__":
    main()
