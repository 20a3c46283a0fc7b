"""Train each fault and its sound twin for a short while and write down which faults hurt.

``python -m tenth.harm``            everything, into harm.json and expected.json beside this file
``python -m tenth.harm gpt_no_mask``  one or more faults anew, put into the files that are there

Same seed, same batches, same number of steps.  Adam for all faults, SGD besides for the kinds where Adam hides a
wrong scale.  The loss is taken on held-out data in eval mode, for faults in data or loss by the sound loss.  ``share``
is the part of the twin's progress that the fault keeps: 1 means no harm, 0 means nothing learned, below 0 worse than
at the start of the twin.  A control (the twin with other batches) says how far the share moves by chance.
"""

import json
import math
import sys
import warnings
from pathlib import Path

import torch

from . import bodies, faults_laws, faults_paths, faults_values, faults_wiring
from .faults import FAULTS
from .planting import plant, prefixes
from .training import train

STEPS = 80
SEEDS = (0, 1, 2)
WITH_SGD = {
    *(faults_values.CONSTANT, faults_values.UNWRITTEN, faults_values.SCALE, faults_values.FANS),
    *(faults_laws.NORMS, faults_laws.BIASES, faults_laws.LAW, faults_laws.HEAD),
    *(faults_wiring.COPIES, faults_wiring.DEEP, faults_paths.ZEROS, faults_paths.LOUD, faults_paths.SHORTCUT),
}
NO_SGD = {"bert"}  # the sound network does not leave its plateau with plain SGD in so few steps
TWINS = {}


def twin(name, seed, sgd, score, shift=0):
    """(before, after) of the sound network; trained once for each way of scoring."""
    key = (name, seed, sgd, score, shift)
    if key not in TWINS:
        model, _, _, loss = bodies.build(name, seed)
        network = bodies.NETWORKS[name]
        lr = network.sgd_lr if sgd else network.lr
        TWINS[key] = train(
            model, network.draw, loss, seed=seed, steps=STEPS, lr=lr, sgd=sgd, score=score, shift=shift
        )  # fmt: skip
    return TWINS[key]


def share(start, end, after):
    return (start - after) / (start - end) if math.isfinite(after) else float("nan")


def measure(name, sgd):
    """Start and end of fault and twin for each seed, and the share of the progress that is left."""
    entry = FAULTS[name]
    network = bodies.NETWORKS[entry.network]
    rows = []
    for seed in SEEDS:
        planted = plant(name, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before, after = train(
                planted.model, planted.draw, planted.loss, seed=seed, steps=STEPS, sgd=sgd,
                lr=network.sgd_lr if sgd else network.lr,
                score=planted.score, held_draw=planted.held_draw or network.draw,
            )  # fmt: skip
        start, end = twin(entry.network, seed, sgd, prefixes if planted.score is prefixes else None)
        rows.append({"fault": (before, after), "twin": (start, end), "share": share(start, end, after)})
    return rows


def verdict(rows, noise):
    """Hurt when every seed ends worse than its twin and the mean share is lower than chance explains."""
    shares = [row["share"] for row in rows]
    if any(not math.isfinite(s) for s in shares):
        return {"hurts": True, "share": None}
    mean = sum(shares) / len(shares)
    return {"hurts": max(shares) < 1 and mean < 1 - max(0.05, noise), "share": round(mean, 3)}


def chance(network, sgd):
    """How far the share of a sound network moves when it sees other batches."""
    moved = []
    for seed in SEEDS:
        start, end = twin(network, seed, sgd, None)
        moved.append(abs(1 - share(start, end, twin(network, seed, sgd, None, shift=1)[1])))
    return max(moved)


def tidy(value):
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: tidy(v) for k, v in value.items()}
    return [tidy(v) for v in value] if isinstance(value, list | tuple) else value


def measure_all(wanted):
    noise, table = {}, {}
    for name in wanted:
        entry = FAULTS[name]
        table[name] = {"network": entry.network, "kind": entry.kind}
        ways = [False] + [True] * (entry.kind in WITH_SGD and entry.network not in NO_SGD)
        for sgd in ways:
            if (entry.network, sgd) not in noise:
                noise[entry.network, sgd] = chance(entry.network, sgd)
            rows = measure(name, sgd)
            table[name]["sgd" if sgd else "adam"] = {**verdict(rows, noise[entry.network, sgd]), "seeds": rows}
        said = {
            way: (table[name][way]["hurts"], table[name][way]["share"])
            for way in table[name].keys() - {"network", "kind"}
        }
        print(name, said, flush=True)
    control = {f"{network} {'sgd' if sgd else 'adam'}": value for (network, sgd), value in noise.items()}
    return tidy({"steps": STEPS, "seeds": SEEDS, "chance": control, "faults": table})


def words(result):
    """How the harm was seen, in one sentence."""
    parts = []
    for way in ("adam", "sgd"):
        if way in result:
            rows = result[way]["seeds"]
            ends = [row["fault"][1] for row in rows]
            got = "not finite" if None in ends else f"{sum(ends) / len(ends):.3f}"
            sound = sum(row["twin"][1] for row in rows) / len(rows)
            parts.append(f"{way}: held-out loss {got} after {STEPS} steps, sound twin {sound:.3f}")
    return "; ".join(parts)


def expectations(report):
    """What a good tool should find, with what was expected of the harm before and what was measured."""
    table = {}
    for name, entry in FAULTS.items():
        result = report["faults"][name]
        table[name] = {
            "network": entry.network,
            "kind": entry.kind,
            "where": entry.where if len(entry.where) > 1 else entry.where[0],
            "what": entry.what,
            "shows_at_start": entry.shows,
            "expected_to_hurt": entry.hurts,
            "hurts": any(result[way]["hurts"] for way in ("adam", "sgd") if way in result),
            "seen": words(result),
        }
        if entry.note:
            table[name]["note"] = entry.note
    return table


def main():
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    report = measure_all(wanted or list(FAULTS))
    here = Path(__file__).parent
    if wanted:
        before = json.loads((here / "harm.json").read_text())
        both = {**before["faults"], **report["faults"]}
        report["faults"] = {name: both[name] for name in FAULTS if name in both}
        report["chance"] = {**before["chance"], **report["chance"]}
    (here / "harm.json").write_text(json.dumps(report, indent=1) + "\n")
    (here / "expected.json").write_text(json.dumps(expectations(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
