"""Which of the remedies that a finding names work on the network at hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sounding.probe.reading import Reading
from sounding.probe.records import Finding

METHODS = re.compile(r"sounding repair TARGET --method ([a-z_,]+)")
REDRAW = {"haar", "he", "xavier", "lsuv", "orthogonalize", "raise_rank", "orthogonal_init", "add_batchnorm"}
LAYERS = re.compile(r"Linear|Conv(Transpose)?[123]d")  # torch's own classes, which those cures know how to draw
# Modules without weights whose shape no gain changes: positively homogeneous ones, and those that only pass on.
SHAPELESS = re.compile(r"^(Leaky|P|R)?ReLU$|Identity|Flatten|Dropout|Pool|Norm|Embedding")
LEAST_RATIO = 1.001  # a participation ratio below it is too near 1 to be raised by steps of descent
# What stands in the way of every other cure: the weights themselves are none.
BROKEN = ("parameter_not_finite", "never_written", "constant_weight")


def keep_possible(findings: Sequence[Finding], reading: Reading) -> list[Finding]:
    """The findings without remedies that this network has no place for.

    Cures that draw weights or add norms know torch's own layers, and must find them to be most of the network: GPT-2's
    are of another class. Norms are added where there are none. Batch norms are tuned where there are some, activations
    shaped where they are modules that bend, and branches changed where there are ways around layers. The rank is raised
    where there is some. Where weights are broken, other findings name the cure of these instead of their own.
    """
    missing = _find_missing(reading)
    broken = [one for one in findings if one.kind in BROKEN and one.parameter is not None and one.severity != "low"]
    mends = tuple(dict.fromkeys(text for one in broken for text in one.remedies if METHODS.search(text)))
    found = []
    for finding in findings:
        kept = tuple(text for text in finding.remedies if not missing & _named(text))
        if mends and finding.parameter is None and any(map(_named, kept)):
            kept = (*mends, *(text for text in kept if not _named(text)))
        found.append(replace(finding, remedies=kept))
    return found


def _find_missing(reading: Reading) -> set[str]:
    """The cures that the network has no place for."""
    known = [call for call in reading.weight_layers if LAYERS.search(call.kind)]
    kinds = {call.kind for call in reading.calls}
    shortest = reading.settings.get("shortest_depth")
    missing = set()
    if 2 * len(known) < len(reading.weight_layers):
        missing |= REDRAW
    if not any("BatchNorm" in kind for kind in kinds):
        missing.add("tune_batchnorm")
    missing.add("add_batchnorm" if any("Norm" in kind for kind in kinds) else "swap_normalization")
    if all(SHAPELESS.search(kind) for kind in kinds - {call.kind for call in reading.weight_layers}):
        missing.add("shape_activations")
    if shortest is not None and shortest >= reading.depth:
        missing |= {"zero_residual", "scale_branches"}
    if reading.weight_layers[:-1] and reading.weight_layers[-2].get("participation_ratio") < LEAST_RATIO:
        missing.add("raise_rank")
    return missing


def _named(remedy: str) -> set[str]:
    found = METHODS.search(remedy)
    return set(found.group(1).split(",")) if found else set()
