"""How a fault is written down: a function that takes a sound model and gives it back with a mistake in it.

``change`` works in place, or gives another model, or a ``Planted`` with another stream of batches or another loss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .bodies import NETWORKS, run

FAULTS = {}


@dataclass
class Planted:
    model: torch.nn.Module
    draw: Callable | None = None  # the batches it is trained with, when the mistake is in them
    loss: Callable | None = None  # the loss it is trained with, when the mistake is there
    held_draw: Callable | None = None  # the held-out data, when sound data do not fit the model
    score: Callable | None = None  # score(model, inputs, targets) on held-out data, when the plain loss is unfair


@dataclass(frozen=True)
class Fault:
    network: str
    kind: str
    where: tuple
    what: str
    hurts: bool  # what was expected before anything was measured
    shows: bool  # whether it can be seen at the start
    note: str
    change: Callable


def fault(network, kind, where, what, *, hurts=True, shows=True, note=""):
    """Write a fault down under the name of the function."""
    places = (where,) if isinstance(where, str) else tuple(where)

    def keep(change):
        assert change.__name__ not in FAULTS, change.__name__
        assert network in NETWORKS, change.__name__
        FAULTS[change.__name__] = Fault(network, kind, places, what, hurts, shows, note, change)
        return change

    return keep


def plant(name, seed):
    """Give the sound model of this seed with the fault in it, and what goes with it."""
    entry = FAULTS[name]
    network = NETWORKS[entry.network]
    torch.manual_seed(seed)
    planted = entry.change(model := network.make())
    if planted is None:
        planted = Planted(model)
    elif not isinstance(planted, Planted):
        planted = Planted(planted)
    planted.draw = planted.draw or network.draw
    planted.loss = planted.loss or network.loss
    return planted


def become(module, cls):
    """Give a module the forward pass of a subclass, as if it had been built from it."""
    module.__class__ = cls
    return module


def changed(network, alter):
    """The batches of a network, each put through alter(inputs, targets)."""

    def draw(generator):
        return alter(*NETWORKS[network].draw(generator))

    return draw


def likelihood(model, inputs, targets):
    """Held-out loss of a model that gives probabilities."""
    out = run(model, inputs).clamp(min=1e-12)
    if out.dim() == 1:
        return F.binary_cross_entropy(out.clamp(max=1 - 1e-7), targets)
    return F.nll_loss(out.flatten(0, -2).log(), targets.flatten())


def prefixes(model, inputs, targets):
    """Held-out loss of the next word when the rest of the sentence is truly not there."""
    total = 0.0
    words = inputs[-1] if isinstance(inputs, tuple) else inputs
    ends = range(4, words.size(1) + 1, 4)
    for end in ends:
        cut = (inputs[0], words[:, :end]) if isinstance(inputs, tuple) else words[:, :end]
        total = total + F.cross_entropy(run(model, cut)[:, -1], targets[:, end - 1])
    return total / len(ends)
