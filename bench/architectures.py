"""How much of networks of many architectures does theory cover, and do their measurements lie in its bands?

    python bench/architectures.py [--seeds 3] [--first 0] [--only gpt2,vit] [--held-out] [--rows]

Prints for each architecture the share of weight layers that have a prediction, the share of rows inside the 95% band
(two standard deviations), what was measured instead, the seconds of the measurement and of theory; and by measure the
mean and the standard deviation of (measured − predicted) / predicted spread. Rows of one network are correlated: the
scatter between seeds says how sure a share is.
"""

from __future__ import annotations

import argparse
import collections
import time
import traceback

import numpy as np
import torch
from architecture_networks import CHOSEN, HELD_OUT

import sounding
from sounding.errors import SoundingError

BAND = 2.0


def judge(name: str, seed: int, *, held_out: bool, rows: bool, timed: bool) -> dict[str, object]:
    """One network: coverage, rows and those inside their band by measure, notes and seconds."""
    torch.manual_seed(seed)
    model, inputs = (HELD_OUT if held_out else CHOSEN)[name]()
    generator = torch.Generator().manual_seed(seed)
    seconds = [0.0, 0.0]
    if timed:
        start = time.process_time()
        sounding.check(model, inputs, theory=False, generator=generator)
        seconds[0] = time.process_time() - start
    start = time.process_time()
    report = sounding.check(model, inputs, theory=True, generator=torch.Generator().manual_seed(seed))
    seconds[1] = time.process_time() - start - seconds[0]
    told = report.profile.settings["theory"]
    if "weight_layers" not in told:
        raise SoundingError(str(told))
    seen = {(row.name, row.measure): row for row in report.profile.rows if row.source != "theory"}
    away: dict[str, list[float]] = collections.defaultdict(list)
    for row in report.profile.rows:
        if row.source != "theory" or (row.name, row.measure) not in seen:
            continue
        found = seen[row.name, row.measure].value
        off = (found - row.value) / max(row.stderr or 0.0, 1e-300)
        away[row.measure].append(off)
        if rows:
            mark = " " if abs(off) <= BAND else "*"
            expected = f"{row.value:10.4g} ± {row.stderr:9.3g}"
            print(f"  {mark} {row.name:44} {row.measure:26} {found:10.4g} {expected} {off:7.1f}")
    disagreed = [one for one in report.verdict.findings if "disagree" in one.kind]
    return {
        "layers": told["weight_layers"],
        "predicted": told["predicted_layers"],
        "away": dict(away),
        "notes": told["measured_instead"],
        "measured": seconds[0],
        "theory": seconds[1],
        "disagreed": disagreed,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--time", action="store_true", help="measure once more without theory, for the seconds of each")
    told = parser.parse_args()
    names = told.only.split(",") if told.only else list(HELD_OUT if told.held_out else CHOSEN)
    totals = collections.Counter()
    for name in names:
        found = []
        for seed in range(told.first, told.first + told.seeds):
            try:
                found.append(judge(name, seed, held_out=told.held_out, rows=told.rows, timed=told.time))
            except Exception as error:  # a crash is a result of this table
                print(f"{name:18} seed {seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if told.rows:
                    traceback.print_exc()
        if not found:
            continue
        away: dict[str, list[float]] = collections.defaultdict(list)
        for one in found:
            for measure, each in one["away"].items():
                away[measure] += each
        whole = [z for each in away.values() for z in each]
        inside, count = sum(abs(z) <= BAND for z in whole), len(whole)
        totals.update(inside=inside, count=count)
        seconds = [min(one[key] for one in found) for key in ("measured", "theory")]
        print(
            f"{name:18} layers {found[0]['predicted']:3d} of {found[0]['layers']:3d}   "
            f"rows in band {100 * inside / max(count, 1):5.1f}% of {count:5d}   "
            f"measured {seconds[0]:6.2f} s, theory {seconds[1]:6.2f} s",
            flush=True,
        )  # fmt: skip
        for measure, each in away.items():
            share = np.mean(np.abs(each) <= BAND)
            print(f"    {measure:26} {100 * share:5.1f}%   off by {np.mean(each):5.2f}, scatter {np.std(each):5.2f}")
        for note in dict.fromkeys(note for one in found for note in one["notes"]):
            print(f"    measured instead: {note}")
        for one in found:
            for finding in one["disagreed"]:
                print(f"    finding: {finding.kind} {finding.severity}: {str(finding)[:220]}")
    print(f"all rows in band: {100 * totals['inside'] / max(totals['count'], 1):.1f}% of {totals['count']}")


if __name__ == "__main__":
    main()
