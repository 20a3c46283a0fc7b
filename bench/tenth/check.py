"""``python -m tenth.check``: build everything with three seeds, run forward and backward, twice the same numbers."""

import json
import math
import warnings
from pathlib import Path

import torch

from . import bodies, faults, sound
from .bodies import run
from .planting import FAULTS


def first_loss(build, name, seed):
    """The loss of the first batch, after a backward pass."""
    model, inputs, targets, loss = build(name, seed)
    value = loss(run(model, inputs), targets)
    value.backward()
    return float(value.detach())


def places(name):
    """Names in ``where`` that no parameter or module of the faulty model begins with."""
    model = faults.build(name, 0)[0]
    known = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    known += [n for n, _ in model.named_modules(remove_duplicate=False)]
    return [w for w in FAULTS[name].where if w and not any(n == w or n.startswith(w + ".") for n in known)]


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for build, names, must_be_finite in (
        (bodies.build, bodies.names(), True),
        (sound.build, list(sound.SOUND), True),
        (faults.build, faults.names(), False),
    ):
        for name in names:
            for seed in (0, 1, 2):
                one, two = first_loss(build, name, seed), first_loss(build, name, seed)
                assert one == two or (math.isnan(one) and math.isnan(two)), (name, seed, one, two)
                assert math.isfinite(one) or not must_be_finite, (name, seed, one)
    assert not [missing for name in FAULTS if (missing := places(name))]
    expected = json.loads((Path(__file__).parent / "expected.json").read_text())
    assert set(expected) == set(FAULTS)
    print(f"{len(bodies.names())} networks, {len(sound.SOUND)} sound variants, {len(FAULTS)} faults: all run")


if __name__ == "__main__":
    main()
