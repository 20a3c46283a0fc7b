"""All faults; `build` gives what `bodies.build` gives, with one fault planted."""

from . import bodies
from . import faults_other as _other
from . import faults_text as _text
from . import faults_vision as _vision
from .register import FAULTS, Case

__all__ = ["FAULTS", "build"]
del _other, _text, _vision


def sound_case(name, seed):
    model, x, y, loss = bodies.build(name, seed)
    case = Case(model, loss)
    case.batch = (x, y)
    return case


def case(name, seed):
    chosen = FAULTS[name]
    planted = sound_case(chosen.body, seed)
    chosen.plant(planted)
    return planted


def build(name, seed):
    planted = case(name, seed)
    x, y = planted.feed(*planted.batch)
    return planted.model, x, y, planted.loss
