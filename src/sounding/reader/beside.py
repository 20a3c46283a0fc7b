"""Prediction beside measurement: rows of theory for every measured row that a module's description reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sounding.errors import SoundingError
from sounding.probe.batches import Batch
from sounding.probe.losses import Loss
from sounding.probe.records import Finding
from sounding.probe.state import Mode
from sounding.profile import Profile, Row
from sounding.reader.blame import find_cause
from sounding.reader.disagreement import find_disagreement
from sounding.reader.module import read_batch
from sounding.reader.prediction import Prediction, estimate_seconds, predict

SOURCE = "theory"
PATIENCE = 2.0  # seconds that a check may add without being asked
HASTE = 0.1  # seconds that one prediction may take for a check to look for a cause without being asked


def lay_beside(
    profile: Profile,
    model: nn.Module,
    batch: Batch,
    *,
    loss: str | Loss | None,
    mode: Mode,
    batch_axis: int | None,
    generator: torch.Generator | None,
    hurry: bool = False,
) -> tuple[Profile, tuple[Finding, ...]]:
    """The profile with rows of source "theory" beside its measured ones, and what theory finds in it.

    A row of theory has the layer, name and measure of the measured row; its `stderr` is the standard deviation over
    seeds, so that two of them are the 95% band. `settings["theory"]` says how many weight layers are predicted, and
    what was measured instead and why.
    """
    told: dict[str, Any] = dict(profile.settings.get("theory", {}))
    try:
        blueprint = read_batch(model, batch, loss=loss, mode=mode, batch_axis=batch_axis, generator=generator)
        seconds = estimate_seconds(blueprint)
        if hurry and seconds > PATIENCE:
            told["reading"] = f"theory was left out, it would take about {seconds:.0f} s; theory=True asks for it"
            return replace(profile, settings={**profile.settings, "theory": told}), ()
        prediction = predict(blueprint)
        training = mode == "train" or (mode == "keep" and model.training)
        findings = (
            *find_disagreement(profile, model, blueprint, prediction, training=training),
            *(find_cause(profile, blueprint, prediction) if not hurry or seconds < HASTE else ()),
        )
    except (SoundingError, RuntimeError, ValueError, ArithmeticError) as error:
        # What a stranger's module does under a trace must not cost the user the measurement.
        told["reading"] = f"the module could not be read: {error}"
        return replace(profile, settings={**profile.settings, "theory": told}), ()
    layers, predicted = blueprint.weight_layers
    told |= {"weight_layers": layers, "predicted_layers": predicted, "samples": prediction.samples}
    told["measured_instead"] = list(prediction.notes)
    rows = _merged(profile, prediction)
    if predicted and not told.get("applied"):
        told |= {"applied": True, "plain_stack": told.get("note", "")}
        told["note"] = (
            f"the module's own description, rule by rule: {predicted} of {layers} weight layers are predicted"
        )
    return replace(profile, rows=rows, settings={**profile.settings, "theory": told}), findings


def _merged(profile: Profile, prediction: Prediction) -> tuple[Row, ...]:
    """Measured rows, then those of theory; what the description says of a row replaces an earlier prediction of it."""
    layers: Mapping[tuple[str, str], int] = {
        (row.name, row.measure): row.layer for row in profile.rows if row.source != SOURCE
    }
    expected = [
        Row(layers[item.name, item.measure], item.name, item.measure, item.value, item.stderr, SOURCE)
        for item in prediction.rows
        if (item.name, item.measure) in layers
    ]
    known = {(row.name, row.measure) for row in expected}
    kept = [row for row in profile.rows if row.source != SOURCE or (row.name, row.measure) not in known]
    return (*kept, *expected)
