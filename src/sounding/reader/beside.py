"""Prediction beside measurement: rows of theory for every measured row that a module's description reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.errors import SoundingError
from sounding.probe.batches import Batch
from sounding.probe.growth import fit_growth
from sounding.probe.losses import Loss
from sounding.probe.reading import NETWORK, Reading, read
from sounding.probe.records import Finding
from sounding.probe.state import Mode
from sounding.profile import Profile, Row
from sounding.reader.blame import find_cause
from sounding.reader.disagreement import find_disagreement
from sounding.reader.module import Blueprint, read_batch
from sounding.reader.prediction import estimate_seconds, predict, start_of
from sounding.reader.sound import FOLLOWED, compare_with_sound, tell_kept
from sounding.theory.batchnorm import DEPTH_SCALES, depth_scale
from sounding.theory.signal import Elementwise, Flatten, Given, Linear, Scale, Signal, propagate

SOURCE = "theory"
PLAIN = (Given, Linear, Elementwise, Scale, Flatten)  # the rules of a plain stack
PREDICTIONS = 20  # of which a search for a cause may take as long, where it is not asked for


def lay_beside(
    profile: Profile,
    model: nn.Module,
    batch: Batch,
    *,
    loss: str | Loss | None,
    mode: Mode,
    batch_axis: int | None,
    generator: torch.Generator | None,
    patience: float = math.inf,
    rows: bool = True,
    foresight: bool = False,
) -> tuple[Profile, tuple[Finding, ...]]:
    """The profile with rows of source "theory" beside its measured ones, and what theory finds in it.

    A row of theory has the layer, name and measure of the measured row; its `stderr` is the standard deviation over
    seeds, so that two of them are the 95% band. `settings["theory"]` says how many weight layers are predicted, and
    what was measured instead and why; with `foresight` also what the layers would leave of uncorrelated samples, with
    `rows=False` that alone.
    """
    told: dict[str, Any] = {"applied": False}

    def with_told(*beside: Row) -> Profile:
        return replace(profile, rows=(*profile.rows, *beside), settings={**profile.settings, "theory": told})

    try:
        blueprint = read_batch(model, batch, loss=loss, mode=mode, batch_axis=batch_axis, generator=generator)
        if foresight and (shares := foresee_shares(blueprint)):
            told["uncorrelated_shares"] = shares
        if not rows:
            return with_told(), ()
        if not blueprint.description.nodes:
            (told["reading"],) = blueprint.description.notes
            return with_told(), ()
        seconds = estimate_seconds(blueprint)
        if seconds > patience:
            told["reading"] = (
                f"theory was left out, it would take about {seconds:.0f} s; theory=True, or --theory, asks for it"
            )
            return with_told(), ()
        prediction = predict(blueprint)
        training = mode == "train" or (mode == "keep" and model.training)
        findings = (
            *find_disagreement(profile, model, blueprint, prediction, training=training),
            *(find_cause(profile, blueprint, prediction) if seconds * PREDICTIONS < patience else ()),
        )
    except (SoundingError, RuntimeError, ValueError, ArithmeticError) as error:
        # What a stranger's module does under a trace must not cost the user the measurement.
        told["reading"] = f"the module could not be read: {error}"
        return with_told(), ()
    layers, predicted = blueprint.weight_layers
    told |= {"weight_layers": layers, "predicted_layers": predicted, "samples": prediction.samples}
    told["measured_instead"] = list(blueprint.description.notes)
    told["followed"] = [note for note in prediction.notes if note not in blueprint.description.notes]
    told["applied"] = predicted > 0
    more = estimate_seconds(blueprint, most=FOLLOWED)
    reading = read(profile)
    kept = compare_with_sound(reading, blueprint) if seconds + more < patience else None
    if kept is not None:
        told["kept"], told["kept_soundly"] = map(asdict, kept)
        told["kept_words"] = tell_kept(*kept, layers)
    told["note"] = f"the module's own description, rule by rule: {predicted} of {layers} weight layers are predicted"
    places = {(row.name, row.measure): row.layer for row in profile.rows}
    beside = [
        Row(places[item.name, item.measure], item.name, item.measure, item.value, item.stderr, SOURCE)
        for item in prediction.rows
        if (item.name, item.measure) in places
    ]
    return with_told(*beside, *_growth_rows(reading, beside)), findings


def _growth_rows(reading: Reading, beside: Sequence[Row]) -> list[Row]:
    """The growth of the predicted gradients over the weight layers, fitted as the measured growth is.

    Its error is that of the difference between the gradients at the two ends. The trainable depth is 16 depth scales,
    where the growth differs from 1 beyond its error.
    """
    gradients = {row.layer: row for row in beside if row.measure == "gradient_log_norm"}
    layers = [call for call in reading.layers if call.weighs]
    curve = [gradients[call.depth].value if call.depth in gradients else math.nan for call in layers]
    if any(map(math.isnan, curve)):  # a fit over some of the layers is no prediction of the measured one
        return []
    growth = fit_growth([curve], [(call.kind, call.features) for call in layers])
    if growth is None or not 0 < growth.growth < math.inf:
        return []
    known = [gradients[call.depth].stderr or 0.0 for call in layers]
    error = math.hypot(known[0], known[-1]) / (len(known) - 1)
    # the factor is e^(2 rate) for squared gradients, so its relative error is twice that of the rate
    found: list[tuple[str, float, float | None]] = [
        ("gradient_growth", growth.growth, 2 * growth.growth * error),
        ("gradient_log_rate", growth.log_rate, error),
    ]
    last = len(reading.layers)
    if abs(growth.log_rate) > 2 * error:
        found.append(("trainable_depth", DEPTH_SCALES * depth_scale(growth.growth), None))
    return [Row(last, NETWORK, measure, value, stderr, SOURCE) for measure, value, stderr in found]


def foresee_shares(blueprint: Blueprint) -> list[float]:
    """One minus the cosine of two uncorrelated samples at every hidden linear layer of a plain network, else [].

    Inputs that are alike cannot show what the layers lose: theory sends samples through them that share nothing.
    """
    nodes = blueprint.description.nodes
    if any(node.points.positions > 1 or not isinstance(node.rule, PLAIN) for node in nodes):
        return []
    if sum(isinstance(node.rule, Given) for node in nodes) != 1:
        return []  # what is measured again on the way knows the real samples
    description, given, _ = start_of(blueprint, most=2)
    ((at, signal),) = given.items()
    size = math.sqrt(signal.mean_square)
    apart = np.array([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]])
    found = propagate(description, given={at: Signal.of_features(size * apart)}, generator=np.random.default_rng(0))
    shares = []
    for node, after in zip(nodes, found.forward, strict=True):
        if isinstance(node.rule, Linear) and after is not None:
            gram = after.sample_gram
            shares.append(1 - float(gram[0, 1] / math.sqrt(gram[0, 0] * gram[1, 1])))
    return shares[:-1]
