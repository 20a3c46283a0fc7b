"""What a network keeps of its signal and gradient, beside what a sound start of the same architecture would keep."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sounding.activations.activation import Activation
from sounding.probe.reading import Reading
from sounding.probe.thresholds import THRESHOLDS
from sounding.reader.changes import gain, scale_branches, source, with_gain
from sounding.reader.module import Blueprint
from sounding.reader.prediction import start_of
from sounding.theory.critical import critical
from sounding.theory.length import squared_slope
from sounding.theory.signal import (
    ONE,
    ZERO,
    Attention,
    Convolution,
    Description,
    Elementwise,
    Flatten,
    Given,
    Linear,
    Mix,
    Normalize,
    Part,
    Pool,
    Regrid,
    Rotate,
    Scale,
    Take,
    propagate,
)
from sounding.theory.signal.measures import mean_cosine

FOLLOWED = 4  # samples, where no batch norm needs them all: what a start keeps hardly depends on how many
MANY = 2.0  # from which a share is told as a factor
# What passes an activation on to the weight that reads it without another random map in between.
PASSED = (Pool, Flatten, Regrid, Take, Part, Rotate, Scale, Mix)


@dataclass(frozen=True)
class Kept:
    """What one start keeps."""

    # the norm of the gradient at the first weight layer over that at the last; with ways around layers the largest of
    # the first quarter of them over the largest of the last
    gradient: float
    apart: float  # one minus the mean cosine between samples behind the last weight layer, 1 for unrelated ones

    @property
    def scales(self) -> float:
        """The depth scales that the gradient spans."""
        return 2 * abs(math.log(self.gradient))


def draw_soundly(description: Description) -> Description:
    """The description with the start that its architecture asks for.

    Every weight gets the critical variance of the activation that it reads: 2/fan_in behind ReLU (He), 1/fan_in behind
    tanh, a norm or a sum (LeCun, near Xavier). Weights of zero stay, since they are a practice. Biases are 0, norms 1,
    scores multiplied by 1/√d, and branches that no norm tames are divided by the root of their number.
    """
    if not any(isinstance(node.rule, Normalize) for node in description.nodes):
        description = scale_branches(description)
    for index, node in enumerate(description.nodes):
        rule = node.rule
        if isinstance(rule, Linear | Convolution):
            read_by = description.nodes[source(description, index, PASSED)].rule
            wanted = _critical_gain(read_by.activation if isinstance(read_by, Elementwise) else None)
            drawn = with_gain(rule, wanted) if gain(rule) > 0 else rule
            description = description.replace(index, rule=dataclasses.replace(drawn, bias=ZERO))
        elif isinstance(rule, Normalize):
            description = description.replace(index, rule=dataclasses.replace(rule, scale=ONE, shift=ZERO))
        elif isinstance(rule, Attention) and rule.query_norm is None:
            description = description.replace(index, rule=dataclasses.replace(rule, scale=rule.head_size**-0.5))
    return description


@functools.lru_cache(maxsize=64)
def _critical_gain(activation: Activation | None) -> float:
    """The variance times fan-in at which gradients keep their size: at the edge of chaos where small signals stay
    small there, else (GELU, sigmoid) for signals of unit variance."""
    if activation is None:
        return 1.0
    edge = critical(activation)
    if edge.weight_std is not None and "grow" not in edge.note:
        return edge.weight_std**2
    slope = squared_slope(activation, 1.0).value
    return 1 / slope if slope else 1.0  # no gain wakes an activation that is flat everywhere


def compare_with_sound(reading: Reading, blueprint: Blueprint) -> tuple[Kept, Kept] | None:
    """What was measured that this start keeps, and what theory says that a sound one would; None where theory does not
    reach from the first weight layer to the last, or where nothing was measured there."""
    layers = reading.weight_layers
    names = {**blueprint.description.names, **blueprint.aliases}
    cut = any(isinstance(node.rule, Given) and node.rule.reason for node in blueprint.description.nodes)
    if cut or len(layers) < 2 or any(call.name not in names for call in layers):
        return None
    description, given, gradients = start_of(blueprint, most=FOLLOWED)
    description, generator = draw_soundly(description), np.random.default_rng(0)
    with np.errstate(all="ignore"):  # what a layer lost altogether ends as NaN, and is left out below
        found = propagate(description, given=given, gradients=gradients, draws=8, generator=generator)
    nodes = [names[call.name] for call in layers]
    totals = [0.0 if (one := found.backward[at]) is None else one.total for at in nodes]
    behind = found.forward[nodes[-1]]
    if behind is None:
        return None
    measured = [math.exp(2 * norm) if (norm := call.get("gradient_log_norm")) < 300 else math.inf for call in layers]
    here = _kept(reading, measured, layers[-1].get("mean_cosine"))
    there = _kept(reading, totals, mean_cosine(behind.sample_gram))
    return None if here is None or there is None else (here, there)


def _kept(reading: Reading, squares: Sequence[float], cosine: float) -> Kept | None:
    quarter = max(1, len(squares) // 4) if reading.has_shortcuts else 1
    first, last = max(squares[:quarter]), max(squares[-quarter:])
    if not (0 < first < math.inf and 0 < last < math.inf and math.isfinite(cosine)):
        return None
    return Kept(math.sqrt(first / last), min(max(1 - cosine, 0.0), 1.0))


def tell_kept(here: Kept, sound: Kept, layers: int) -> str:
    """What is left, over how many depth scales, beside a sound start, in one sentence."""
    gets = f"{write_share(here.gradient)}{' of' if here.gradient < MANY else ''} the last one's gradient"
    scales = f"{here.scales:.0f} depth scale{'' if f'{here.scales:.0f}' == '1' else 's'}"
    lost = sound.scales >= THRESHOLDS.depth_scales
    # where the usual prescription loses more than the network's own start it is no example
    beside = not lost or here.scales >= THRESHOLDS.depth_scales
    gradient = f"; {write_share(sound.gradient)} in a sound start of this architecture" if beside else ""
    apart = f" ({write_share(sound.apart)} in a sound start)" if beside else ""
    blame = ", so the architecture is to blame more than the start" if lost and beside else ""
    return (
        f"The first of {layers} weight layers gets {gets} ({scales}{gradient}), and "
        f"{write_share(here.apart)} of the signal behind the last tells samples apart{apart}{blame}."
    )


def write_share(value: float) -> str:
    """A share in per cent, and what is several times the whole as a factor.

    >>> write_share(0.5), write_share(2e-5), write_share(30.0), write_share(253000.0), write_share(2e-21)
    ('50%', '0.002%', '30 times', '250,000 times', '10^-21')
    """
    if value > 0 and not 1e-6 <= value < 1e6:
        return f"10^{math.log10(value):.0f}" + (" times" if value > 1 else "")
    if value >= MANY:
        return f"{float(f'{value:.2g}'):,.0f} times"
    return f"{value:.0%}" if value >= 0.01 else f"{100 * value:.2g}%"
