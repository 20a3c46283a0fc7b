"""Which of the remedies that a finding names work on the network at hand."""

from __future__ import annotations

import re
from dataclasses import replace

from sounding.probe.reading import Reading
from sounding.probe.records import Finding

METHODS = re.compile(r"sounding repair TARGET --method ([a-z_,]+)")
REDRAW = {"haar", "he", "xavier", "lsuv", "orthogonalize", "raise_rank", "orthogonal_init", "add_batchnorm"}
LAYERS = re.compile(r"Linear|Conv(Transpose)?[123]d")  # torch's own classes, which those cures know how to draw


def keep_possible(finding: Finding, reading: Reading) -> Finding:
    """The finding without remedies that this network has no place for.

    Cures that draw weights or add norms know torch's own layers, and must find them to be most of the network: GPT-2's
    are of another class. Batch norms are tuned where there are some, activations shaped where they are modules, and
    branches changed where there are ways around layers.
    """
    known = [call for call in reading.weight_layers if LAYERS.search(call.kind)]
    kinds = {call.kind for call in reading.calls}
    shortest = reading.settings.get("shortest_depth")
    missing = set()
    if 2 * len(known) < len(reading.weight_layers):
        missing |= REDRAW
    if not any("BatchNorm" in kind for kind in kinds):
        missing.add("tune_batchnorm")
    if not any("Norm" in kind for kind in kinds):
        missing.add("swap_normalization")
    if kinds <= {call.kind for call in reading.weight_layers}:
        missing.add("shape_activations")
    if shortest is not None and shortest >= reading.depth:
        missing |= {"zero_residual", "scale_branches"}
    kept = tuple(text for text in finding.remedies if not missing & _named(text))
    return replace(finding, remedies=kept)


def _named(remedy: str) -> set[str]:
    found = METHODS.search(remedy)
    return set(found.group(1).split(",")) if found else set()
