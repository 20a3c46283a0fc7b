"""Trains each faulty network and its sound twin on fresh batches for the same steps; writes harm.txt.

Each line has the training loss (mean of the last ten steps) and the validation error behind a third of the steps and
behind all of them, each for the faulty network and for its twin. Losses are compared only where the fault changed
neither the loss nor the batches nor the range of the outputs.
"""

import math
import sys
from pathlib import Path

import torch

from . import bodies, faults, sound

HEAD = "name | train loss faulty, sound | error at a third faulty, sound | error at the end faulty, sound | verdict"


def measure(body, case, judge):
    modes = [(m, m.training) for m in case.model.modules()]
    state = torch.get_rng_state()
    case.model.eval()
    torch.manual_seed(77)
    errors = []
    with torch.no_grad():
        for _ in range(6):
            x, y = body.data()
            if judge == "own":
                x, y = case.feed(x, y)
            errors.append(float(body.measure(case.model(x), y)))
    for module, mode in modes:
        module.training = mode
    torch.set_rng_state(state)
    return sum(errors) / len(errors)


def train(body, case, judge="own", seed=0):
    parameters = [p for p in case.model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, body.optimizer)(parameters, lr=body.rate)
    torch.manual_seed(1000 + seed)
    losses, early = [], math.nan
    for step in range(body.steps):
        if step == body.steps // 3:
            early = measure(body, case, judge)
        x, y = case.feed(*body.data())
        value = case.loss(case.model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return sum(losses[-10:]) / 10, early, measure(body, case, judge)


def worse(value, twin, share=0.15, least=0.015):
    return not math.isfinite(value) or value > twin + max(share * abs(twin), least)


def verdict(ours, twin, comparable):
    if not math.isfinite(ours[0]):
        return "harmful, loss not finite"
    if worse(ours[2], twin[2]):
        return "harmful"
    if worse(ours[1], twin[1], 0.3, 0.03):
        return "harmful, learns more slowly"
    if comparable and worse(ours[0], twin[0], 0.3, 0.01):
        return "harmful, by loss alone"
    return "no harm seen"


def line(name, ours, twin, words):
    parts = [f"{a:.4g}, {b:.4g}" for a, b in zip(ours, twin, strict=True)]
    return " | ".join([name, *parts, words])


def main(chosen):
    torch.set_num_threads(1)
    lines, twins = {}, {}

    def twin(name):
        if name not in twins:
            twins[name] = train(bodies.BODIES[name], faults.sound_case(name, 0))
        return twins[name]

    for name in [*faults.FAULTS, *sound.SOUND]:
        if chosen and not name.startswith(tuple(chosen)):
            continue
        if name in faults.FAULTS:
            fault = faults.FAULTS[name]
            body, case = bodies.BODIES[fault.body], faults.case(name, 0)
            first = fault.kinds[0]
            comparable = not case.feeds and case.loss is body.loss and first not in ("softmax_twice", "temperature")
            ours = train(body, case, fault.judge)
            words = verdict(ours, twin(fault.body), comparable)
            if fault.later and words in ("no harm seen", "harmful, learns more slowly"):
                words = "later: " + fault.later
        else:
            fault, words = sound.SOUND[name], "sound variant"
            ours = train(bodies.BODIES[fault.body], sound.case(name, 0))
        lines[name] = line(name, ours, twin(fault.body), words)
        print(lines[name], flush=True)
    path = Path(__file__).with_name("harm.txt")
    if chosen and path.exists():
        lines = {old.split(" | ")[0]: old for old in path.read_text().splitlines()[1:]} | lines
    path.write_text("\n".join([HEAD, *(lines[k] for k in [*faults.FAULTS, *sound.SOUND] if k in lines)]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
