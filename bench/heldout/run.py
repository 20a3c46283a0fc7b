"""Faults whose expectations were committed before the first check: which are found, by which name, at which module?

python bench/heldout/run.py [--seed 0] [--only PATTERN]

A finding counts where the sound twin of the same seed does not have it and its severity is among those expected.
"""

import argparse
import importlib.util
import re
import time
from pathlib import Path

from held_cases import CASES
from held_common import Planted
from held_images import ARCHES as IMAGES
from held_other import ARCHES as OTHER
from held_tokens import ARCHES as TOKENS

from sounding.probe.records import Finding

_path = Path(__file__).resolve().parents[1] / "strangers" / "run.py"
_spec = importlib.util.spec_from_file_location("strangers_run", _path)
assert _spec
assert _spec.loader
strangers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(strangers)


def judge(case: Planted, findings: list[Finding], twin: list[Finding]) -> tuple[bool, bool, bool, list[Finding]]:
    """Found at all, found by a right name, the right finding names the module; and what is new."""
    old = {strangers.place(one) for one in twin}
    new = [one for one in findings if strangers.place(one) not in old]
    counted = [one for one in new if one.severity in case.severities]
    right = [one for one in counted if one.kind in case.kinds]
    texts = (" ".join(str(part) for part in (one.layer, one.parameter, one.why, one.found)) for one in right)
    return bool(counted), bool(right), any(re.search(case.module, text) for text in texts), new


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="a pattern of architecture/fault")
    given = options.parse_args()
    totals, alarms, sound, checked, began = [0, 0, 0], 0, 0, 0, time.process_time()
    for arch in (*TOKENS, *IMAGES, *OTHER):
        cases = [one for one in CASES if one.arch == arch.name and re.search(given.only, f"{arch.name}/{one.fault}")]
        if not cases:
            continue
        twin = strangers.look(arch, None, given.seed)
        loud = [strangers.place(one) for one in twin if one.severity != "low"]
        sound, alarms = sound + 1, alarms + bool(loud)
        print(f"{arch.name}: sound twin {f'FALSE ALARM {loud}' if loud else 'quiet'}", flush=True)
        for case in cases:
            try:
                *answer, new = judge(case, strangers.look(arch, case.fault, given.seed), twin)
            except Exception as error:  # a check that raises is a miss, and the others still count
                answer, new = [False, False, False], []
                print(f"  {case.fault}: the check raised {type(error).__name__}: {str(error)[:150]}")
            checked += 1
            totals = [total + part for total, part in zip(totals, answer, strict=True)]
            marks = " ".join(
                word if part else "-" * len(word)
                for word, part in zip(("found", "name", "module"), answer, strict=True)
            )
            print(f"  {marks}  {case.fault}: {case.note}", flush=True)
            if not all(answer):
                print(f"      wanted {case.kinds} at {case.module!r}, {case.severities[0]} or more; "
                      f"new: {[strangers.place(one) for one in new]}")  # fmt: skip
    print(f"seed {given.seed}: {checked} faults of {len({one.sort for one in CASES})} sorts in {sound} architectures: "
          f"{totals[0]} found, {totals[1]} by a right name, {totals[2]} with the module too; "
          f"{alarms} of {sound} sound twins have a finding of medium or high severity; "
          f"{time.process_time() - began:.0f} s of processor time")  # fmt: skip


if __name__ == "__main__":
    main()
