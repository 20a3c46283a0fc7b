"""Which cures, alone and together, are worth trying on a model: by what is in it, cheap ones first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sounding.errors import TargetError, UsageError
from sounding.probe.calls import multiplies
from sounding.probe.records import Finding
from sounding.probe.units import is_activation, name_activation
from sounding.repair.branches import find_branches
from sounding.repair.layers import BATCH_NORMS
from sounding.repair.mend import MENDS
from sounding.repair.methods import METHODS
from sounding.repair.normalization import NORMS
from sounding.repair.orthogonalize import HOMOGENEOUS
from sounding.repair.passes import Inputs, call_layers
from sounding.repair.snapshot import take_snapshot

Candidate = tuple[tuple[str, ...], dict[str, dict[str, Any]]]
RELU_GAIN = 2**0.5  # He: half of the units are 0, so the others carry twice the mean square
# what branches that add up do: to the gradients, or to the outputs
ADDED_UP = {"gradient_explosion", "gradient_vanishing", "rank_collapse", "huge_signal", "start_loss", "non_finite"}

# which cure does to a module what blame did to its description; the first two act on the one layer that is named
OF_ONE_LAYER = {"gain": "redraw", "bias": "zero_biases"}
OF_A_KIND = {"embedding": "scale_embeddings", "branches": "scale_branches", "scores": "qk_norm"}


def list_for_cause(kind: str, layer: str) -> list[Candidate]:
    """The cure for what blame names, as it names it; none where only the model's code could change it."""
    if kind in OF_ONE_LAYER:
        return [((OF_ONE_LAYER[kind],), {OF_ONE_LAYER[kind]: {"include": [layer]}})]
    return [((OF_A_KIND[kind],), {})] if kind in OF_A_KIND else []


def list_candidates(model: nn.Module, inputs: Inputs, findings: Sequence[Finding]) -> list[Candidate]:
    """Cures and combinations that can apply, with options; () stands for leaving the model alone.

    What the audit named comes first, each cure alone and all together. Other combinations are listed when one cure
    prepares the ground for the next: Haar weights need near-linear activations (thesis2024, 6.4), and batch norm that
    was added needs the tuning of any other.
    """
    mends = _mends(model, findings)
    # the first candidate is the model as it is
    found = ["", *mends, *(["+".join(mends)] if len(mends) > 1 else [])]
    kinds = {finding.kind for finding in findings}
    if "entropy_collapse" in kinds:
        found.append("qk_norm")
    if kinds & ADDED_UP:
        with contextlib.suppress(UsageError, TargetError):  # no branch was found
            find_branches(model, inputs)
            found += ["scale_branches", "zero_residual"]
    order = [call.module for call in call_layers(model, inputs)]
    batch_normed = any(isinstance(module, BATCH_NORMS) for module in order)
    normed = any(isinstance(module, NORMS) for module in order)
    shapable = any(is_activation(module) and not isinstance(module, HOMOGENEOUS) for module in order)
    rectified = any(isinstance(module, HOMOGENEOUS) for module in order)
    known = {name_activation(module) for module in order} - {None}
    if batch_normed:
        found += ["tune_batchnorm", "haar+tune_batchnorm"]
    found.append("haar")
    if shapable:
        found += ["shape_activations", "haar+shape_activations"]
    deep = sum(multiplies(module) for module in order) > 1  # a network without a hidden layer has no rank to raise
    raising = ["raise_rank"] if deep else []
    if not normed:
        found += ["he" if rectified else "xavier", "lsuv", "orthogonalize", *raising, "add_batchnorm"]
        if len(known) == 1:  # theory tunes the norm for the one activation behind it
            found += ["add_batchnorm+tune_batchnorm", "add_batchnorm+haar+tune_batchnorm"]
        if shapable:
            found.append("add_batchnorm+haar+shape_activations")
    elif not batch_normed:
        found += [*raising, "orthogonalize"]
    # a norm undoes any gain
    gain: dict[str, dict[str, Any]] = {"haar": {"gain": RELU_GAIN}} if rectified and not normed else {}
    return [(tuple(name.split("+")) if name else (), gain if name == "haar" else {}) for name in found]


def _mends(model: nn.Module, findings: Sequence[Finding]) -> list[str]:
    """The cures that change something among those that the findings of the audit ask for, tried on a copy."""
    asked = {finding.kind for finding in findings if finding.parameter is not None}
    found = []
    for name in ("batch_statistics", *MENDS):
        if name in MENDS and not asked & set(MENDS[name]):
            continue
        snapshot = take_snapshot(model)
        try:
            # no mending cure looks at the inputs
            METHODS[name].run(model, (), options={}, generator=torch.Generator().manual_seed(0))
            found.append(name)
        except UsageError:
            continue
        finally:
            snapshot.restore()
    return found
