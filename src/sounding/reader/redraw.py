"""The exact band: the network's weights drawn anew from their own laws, as often as asked, and measured each time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from sounding.probe.calls import named_parameters
from sounding.profile import Profile, Row
from sounding.reader.laws import is_chance, survey_law
from sounding.theory.signal.description import Law
from sounding.weights import haar_frame

SOURCE = "redraw"
CUT = 2.0  # standard deviations at which a truncated Gaussian is cut, and the variance that is left of 1
LEFT = 1 - 2 * CUT * math.exp(-(CUT**2) / 2) / (math.sqrt(2 * math.pi) * math.erf(CUT / math.sqrt(2)))


def survey_weights(root: nn.Module) -> dict[str, Law]:
    """The law of every parameter that a new start of the network would draw, under its first name.

    Constant parameters (the scale of a norm, biases of zero), frozen ones and buffers are part of the network, not of
    its randomness, and have none. Entries that are exactly zero, such as padding rows and pruned weights, are left out.
    """
    laws = {}
    for name, weight in named_parameters(root):
        if not weight.requires_grad or not weight.is_floating_point():
            continue
        entries = weight.detach()[weight.detach() != 0]
        law = survey_law(weight, entries=entries)
        if law.shape == "constant" or not math.isfinite(law.variance):
            continue
        if is_chance(law.mean, law.variance, entries.numel()):  # as of a bias: other draws have another mean
            law = replace(law, mean=0.0, variance=law.second_moment)
        laws[name] = law
    return laws


def draw_weights_(root: nn.Module, laws: Mapping[str, Law], *, generator: torch.Generator) -> None:
    """Draw the named parameters anew, each from its law; a tied one is drawn once, what is zero stays zero."""
    with torch.no_grad():
        for name, weight in named_parameters(root):
            if name in laws:
                weight.copy_(draw(weight, laws[name], generator=generator))


def draw(weight: Tensor, law: Law, *, generator: torch.Generator) -> Tensor:
    """New entries for a weight, in float64; those of no known law are the old ones in another order."""
    shape, scale = weight.shape, math.sqrt(law.variance)
    held = weight.detach().to("cpu", torch.float64)
    if law.shape == "orthogonal":
        return haar_frame(len(weight), weight.shape[1], generator=generator) * math.sqrt(max(shape) * law.second_moment)
    kept = held != 0
    if law.shape == "other":
        entries = held[kept]
        order = torch.randperm(len(entries), generator=generator)
        return torch.zeros_like(held).masked_scatter_(kept, entries[order])
    if law.shape == "gaussian":
        unit = torch.randn(shape, dtype=torch.float64, generator=generator)
    else:
        even = 2 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1
        # a uniform law of variance 1 ends at √3; a truncated one is the Gaussian quantile of what lies between the cuts
        cut = math.erf(CUT / math.sqrt(2))
        unit = math.sqrt(3) * even if law.shape == "uniform" else math.sqrt(2 / LEFT) * torch.erfinv(cut * even)
    return kept * (law.mean + scale * unit)


def with_bands(profile: Profile, drawn: Sequence[Profile]) -> Profile:
    """The profile with the standard deviation over draws as `stderr` of its rows of theory.

    What theory does not predict gets a row of source "redraw": mean and standard deviation over the draws. Rows that no
    draw moves, such as those of the input, have none. Fewer than two draws have no spread and change nothing.
    """
    found = _moments(drawn)
    rows = [
        row._replace(stderr=found[row[:3]][1]) if row.source == "theory" and row[:3] in found else row
        for row in profile.rows
    ]
    measured = {row[:3] for row in profile.rows if row.source != "theory"}  # by layer, name and measure
    wanted = measured - {row[:3] for row in profile.rows if row.source == "theory"}
    rows += [Row(*key, *moments, SOURCE) for key, moments in found.items() if key in wanted]
    return Profile(tuple(rows), {**profile.settings, SOURCE: {"draws": len(drawn)}})


def _moments(drawn: Sequence[Profile]) -> dict[tuple[int, str, str], tuple[float, float]]:
    """Mean and standard deviation over the draws of every row that is finite in each and differs between them."""
    values: dict[tuple[int, str, str], list[float]] = {}
    for one in drawn:
        for row in one.rows:
            values.setdefault(row[:3], []).append(row.value)
    found = {}
    for key, each in values.items():
        if len(each) == len(drawn) > 1 and all(map(math.isfinite, each)) and (sd := float(np.std(each, ddof=1))) > 0:
            found[key] = float(np.mean(each)), sd
    return found
