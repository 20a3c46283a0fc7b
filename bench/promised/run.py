"""Check every network of the set with and without each fault, and count what is found.

    python -m bench.promised.run [--set promised|fresh|later|eighth|ninth|tenth] [--seed N] [--only PATTERN]

A finding counts if the sound network of the same seed has none of the same kind at the same place that is as severe. A
fault is named if one of them is of an accepted kind, and placed if one of those names an accepted module too, something
inside it, or the block that holds it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import sounding

ORDER = {"low": 0, "medium": 1, "high": 2}
HERE = Path(__file__).parent.parent


def look(model: object, inputs: object, targets: object, loss: object) -> tuple[sounding.Finding, ...]:
    """What a check with theory finds."""
    return sounding.check(model, inputs, targets, loss=loss, theory=True).verdict.findings


def new_findings(found: Iterable[sounding.Finding], sound: Iterable[sounding.Finding]) -> list[sounding.Finding]:
    """The findings that the sound network does not have."""
    known: dict[tuple[str, str | None, str | None], int] = {}
    for each in sound:
        key = (each.kind, each.layer, each.parameter)
        known[key] = max(known.get(key, -1), ORDER[each.severity])
    return [each for each in found if ORDER[each.severity] > known.get((each.kind, each.layer, each.parameter), -1)]


def in_place(finding: sounding.Finding, places: list[str]) -> bool:
    """Whether a finding names one of the places, something in it, or what holds it; "" alone stands for everywhere, and
    beside other places for a finding about the whole network."""
    # "input" and "model" stand for the whole network; first_sight.txt of promised and fresh was made without this line
    names = [one for one in (finding.layer, finding.parameter) if one and one not in ("input", "model")]
    if places == [""] or (not names and "" in places):
        return True
    return any(one.startswith(place) or place.startswith(f"{one}.") for one in names for place in places if place)


def words(findings: Iterable[sounding.Finding]) -> str:
    said = (f"{each.kind} ({each.severity}) at {each.parameter or each.layer or 'network'}" for each in findings)
    return "; ".join(said) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression for names of faults and of sound networks")
    parser.add_argument("--set", choices=["promised", "fresh", "later", "eighth", "ninth", "tenth"], default="promised")
    options = parser.parse_args()
    bodies, faults = (importlib.import_module(f"bench.{options.set}.{part}") for part in ("bodies", "faults"))
    read = json.loads((HERE / options.set / "expected.json").read_text("utf-8"))
    harm = json.loads((HERE / options.set / "harm.json").read_text("utf-8"))
    if options.set == "tenth":  # it has its own words for kinds, and one form for a place and for several
        kinds = json.loads((HERE / options.set / "kinds.json").read_text("utf-8"))
        harm = {name: {"harmful": wanted["hurts"]} for name, wanted in read.items()}
        read = {name: {"kinds": kinds[wanted["kind"]], "done": wanted["what"], "body": wanted["network"],
                       "places": [wanted["where"]] if isinstance(wanted["where"], str) else wanted["where"]}
                for name, wanted in read.items() if wanted["shows_at_start"]}  # fmt: skip
    expected = {name: wanted for name, wanted in read.get("faulty", read).items() if wanted.get("promised", True)}
    start = time.process_time()
    sound: dict[str, tuple[sounding.Finding, ...]] = {}
    warned = []
    counts: Counter[str] = Counter()
    of_body = {name: wanted.get("body") or getattr(faults.FAULTS[name], "body", name.partition("_")[0])
               for name, wanted in expected.items()}  # fmt: skip
    asked = {of_body[name] for name in expected if re.search(options.only, name)}
    for name in getattr(bodies, "BODIES", None) or bodies.names():
        if name in asked or re.search(options.only, name):
            sound[name] = look(*bodies.build(name, options.seed))
            print(f"{name} sound: {words(sound[name])}", flush=True)
            counts["twins"] += 1
            warned += [name] * any(each.severity != "low" for each in sound[name])
    if options.set in ("eighth", "ninth", "tenth"):  # sound networks that look unusual
        unusual = importlib.import_module(f"bench.{options.set}.sound")
        for name in unusual.SOUND:
            if re.search(options.only, name):
                found = look(*unusual.build(name, options.seed))
                print(f"{name}: {words(found)}", flush=True)
                counts["twins"] += 1
                warned += [name] * any(each.severity != "low" for each in found)
    for name, wanted in expected.items():
        if not re.search(options.only, name):
            continue
        places = wanted.get("places") or [wanted["place"]]
        counts["faults"] += 1
        try:
            found = new_findings(look(*faults.build(name, options.seed)), sound[of_body[name]])
        except Exception as error:
            counts["errors"] += 1
            print(f"  {name}: raised {type(error).__name__}: {error}", flush=True)
            continue
        named = [each for each in found if each.kind in wanted["kinds"]]
        placed = [each for each in named if in_place(each, places)]
        counts["found"] += bool(found)
        counts["named"] += bool(named)
        counts["placed"] += bool(placed)
        counts["warned"] += any(each.severity != "low" for each in placed)
        marks = " ".join(
            word if one else "-" * len(word) for word, one in (("found", found), ("named", named), ("placed", placed))
        )
        harmful = "harmful" if harm.get(name, {}).get("harmful") else "by nature"
        print(f"  {name:<34}{marks}  {harmful}; {words(found)}", flush=True)
        if not placed:
            print(f"      wanted {', '.join(wanted['kinds'])} at {', '.join(places) or 'anywhere'}: {wanted['done']}")
    of = counts["faults"]
    print(f"\nfaults: {of}")
    for key, told in (
        ("found", "found at all"),
        ("named", "by a right name"),
        ("placed", "with the right module too"),
        ("warned", "with the right module, of medium or high severity"),
        ("errors", "checks that raised"),
    ):
        print(f"{told}: {counts[key]} ({counts[key] / max(of, 1):.1%})")
    print(f"sound networks with a finding of medium or high severity: {len(warned)} of {counts['twins']} {warned}")
    print(f"{time.process_time() - start:.0f} s of processor time")


if __name__ == "__main__":
    main()
