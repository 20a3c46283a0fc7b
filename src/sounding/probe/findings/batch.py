"""degenerate_batch and batch_too_small: the batch itself does not let signal, or a verdict, through."""

from __future__ import annotations

import math

from sounding.probe.findings.collapse import share_outside
from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import tell
from sounding.probe.thresholds import Thresholds
from sounding.theory.batchnorm import batchnorm

FEW = 2  # samples of whose places batch norm takes its statistics
ROUNDING = 1e-6  # of shares and ratios in float32; 1e-8 and 1e-4 give the same findings in the tests


def find_degenerate_batch(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """Repeated, linearly dependent or nearly parallel samples at the input.

    More samples than features are dependent always and say nothing; then only repetition counts. A batch of rank k
    stays of rank k or less through every linear layer, whatever the weights (rank2020), so a dependent batch limits
    what the check can see; a batch of one direction makes it blind, which is of high severity. Where one direction
    holds 99% of the signal (data in raw units, without its mean subtracted) what differs is learned last.
    """
    source, samples = reading.input, reading.samples
    if samples < 2 or not source.values:
        return []
    rank, repeated = source.get("numerical_rank"), source.get("repeated_fraction")
    distinct, ratio = source.get("distinct_share"), source.get("participation_ratio")
    features = source.features or math.inf
    differing = repeated < 1 - 1.5 / samples  # a constant tensor beside one that differs is no degenerate batch
    alike = repeated > 1 - 1.5 / samples or (distinct < ROUNDING and not differing)
    alike = alike or (distinct >= ROUNDING and ratio < 1 + ROUNDING and features > 1)
    dependent = samples <= features / 2 and rank < samples  # nearer to d, blank features alone make samples dependent
    left = share_outside(ratio)
    parallel = left < thresholds.parallel and features > 1
    severity: Severity | None = None
    if alike:
        severity = "high"
    elif repeated >= 0.5:
        severity = "medium"
    elif repeated > 0 or dependent or (samples <= features and rank <= samples / 2):
        severity = "low"  # what differs may lie in few directions by nature: waves, or a table of a few causes
    if severity is None and not parallel:
        return []
    evidence = {
        "samples": float(samples),
        "numerical_rank": rank,
        "repeated_fraction": repeated,
        "distinct_share": distinct,
        "participation_ratio": ratio,
    } | ({"share_outside": left} if severity is None else {})
    evidence = {key: value for key, value in evidence.items() if math.isfinite(value)}
    what = f"The {samples} samples span only {rank:.0f} directions"
    if alike:
        what = f"All {samples} samples lie along one direction, so nothing can be said about how they are told apart"
    elif repeated > 0:
        what = f"{round(repeated * samples)} of {samples} samples repeat an earlier one"
    # samples that differ, on a scale that hides it, or that are too few, ask for another scale and for more of them
    key = "parallel_batch" if severity is None else "degenerate_batch" if repeated > 0 else "dependent_batch"
    return [tell(key, severity, layer=source.name, depth=0, evidence=evidence, what=what)]


def find_batch_too_small(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """Batch norm over so few values that its own noise carries the gradient, or one sample only.

    With B values per feature E[1/σ²] = B/((B − 3)μ) is infinite for B ≤ 3 and the gradient's variance for B ≤ 5;
    ReLU gradients grow by 2.00 per layer at B = 6, by 1.87 at 7, and by 1.47 for large B (meanfield2019, Theorem 8).
    Over two values batch norm returns the sign of their difference and passes no gradient at all.
    """
    if reading.samples == 1:
        return [tell("one_sample", layer=reading.input.name, depth=0, evidence={"samples": 1.0})]
    norms = [call for call in reading.calls if "BatchNorm" in call.kind]
    if not norms or reading.settings.get("mode") == "eval":
        return []
    worst = min(norms, key=lambda call: _values(call, reading))
    values = _values(worst, reading)
    samples = int(reading.settings.get("batch_size") or 0)
    few = 0 < samples <= FEW  # the places of one image are much alike
    if not (0 < values < thresholds.growing_batch or (values and few)):
        return []
    severity: Severity = "high" if values <= 2 else "medium" if values < thresholds.normal_batch else "low"
    key = "places_of_few" if values > FEW * samples and samples <= FEW else "batch_too_small"
    evidence = {"values_per_feature": float(values), "line": float(thresholds.growing_batch)}
    return [
        tell(
            "two_values" if values <= 2 else key, severity, layer=worst.name, depth=worst.depth, evidence=evidence,
            values=values, samples=samples, moment=_moment(values),
        )
    ]  # fmt: skip


def _values(call: LayerCall, reading: Reading) -> int:
    """Over how many values a batch norm takes its statistics: the batch, times the positions where told."""
    known = "positions" in reading.settings or "1d" in call.kind
    batch_size = int(reading.settings.get("batch_size") or reading.samples)
    return batch_size * call.positions if known else 0


def _moment(values: int) -> str:
    """What so few values do to the gradient, in words."""
    if values <= 3:
        return "the expected squared gradient behind it is infinite"
    if values <= 5:
        return "the squared gradient behind it has infinite variance"
    growth, limit = (batchnorm("relu", batch_size=size).gradient_growth for size in (values, math.inf))
    return f"ReLU gradients grow by {growth:.2f} per layer, against {limit:.2f} for a large batch"
