"""Faults that were planted in networks by people who had not seen the code: how many does a check find?

python bench/strangers/run.py [--seeds 0 1 2] [--only PATTERN]

Every case names, before the first check, which module, parameter or word a finding must name and how severe it may be.
A finding counts where the sound twin of the same seed does not have it. Needs transformers and scikit-learn.
"""

import argparse
import re
import warnings

import nets_attention
import nets_hf
import nets_plain
import nets_recurrent
import torch
from cases_attention import CASES as ATTENTION
from nets_common import Arch, Case, seed_all

import sounding
from sounding.probe.records import Finding

FILES = (nets_plain, nets_attention, nets_recurrent, nets_hf)
ARCHES = {arch.name: arch for file in FILES for arch in file.ARCHES}
EXTRA = [arch for file in (nets_recurrent, nets_hf) for arch in file.extra_healthy()]
CASES = [*nets_plain.CASES, *ATTENTION, *nets_recurrent.CASES, *nets_hf.CASES]


def look(arch: Arch, fault: str | None, seed: int) -> list[Finding]:
    """The findings; a faulty network has the random numbers of its twin where it can."""
    seed_all(1000 + seed)
    network = arch.make(fault)
    inputs, targets = arch.draw(torch.Generator().manual_seed(5000 + seed), fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(sounding.check(network, inputs, targets, loss=arch.loss).verdict.findings)


def place(finding: Finding) -> tuple[str, str, str]:
    return finding.kind, finding.severity, finding.parameter or finding.layer or ""


def judge(case: Case, findings: list[Finding], twin: list[Finding]) -> tuple[bool, bool]:
    """Whether something new of an acceptable severity was found, and whether it has the right name."""
    old = {place(one) for one in twin}
    new = [one for one in findings if place(one) not in old and one.severity in case.severities]
    places = (f"{one.layer or ''} {one.parameter or ''}" for one in new)
    words = (" ".join((one.kind, one.why, one.expected, one.found)) for one in new)
    named = any(re.search(case.names, text) for text in places)
    return bool(new), named or any(re.search(case.names, text, re.IGNORECASE) for text in words)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--only", default="", help="a pattern of architecture/fault")
    given = options.parse_args()
    found = named = checked = alarms = healthy = 0
    for seed in given.seeds:
        for arch in [*ARCHES.values(), *EXTRA]:
            cases = [
                one for one in CASES if one.arch == arch.name and re.search(given.only, f"{arch.name}/{one.fault}")
            ]
            if not cases and given.only:
                continue
            twin = look(arch, None, seed)
            healthy += 1
            loud = [place(one) for one in twin if one.severity != "low"]
            alarms += bool(loud)
            if loud:
                print(f"false alarm: {arch.name}, seed {seed}: {loud}", flush=True)
            for case in cases:
                seen, right = judge(case, look(arch, case.fault, seed), twin)
                found, named, checked = found + seen, named + right, checked + 1
                if not right:
                    print(f"{'wrong name' if seen else 'missed'}: {arch.name}/{case.fault}, seed {seed}: {case.note}",
                          flush=True)  # fmt: skip
    print(f"{checked} checks of {len(CASES)} faults of {len({one.kind for one in CASES})} kinds in {len(ARCHES)} "
          f"architectures: {named} with the right name, {found} found at all; "
          f"{alarms} of {healthy} sound networks warned")  # fmt: skip


if __name__ == "__main__":
    main()
