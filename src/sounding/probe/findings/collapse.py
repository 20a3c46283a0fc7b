"""rank_collapse and gradient_alignment: one direction carries the batch, so every sample asks for the same update."""

from __future__ import annotations

import math

from sounding.probe.reading import Call, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.thresholds import Thresholds


def share_outside(participation_ratio: float) -> float:
    r"""The share of the signal outside its dominant direction, from the participation ratio.

    $1 - r^{-1/2}$, where $r = (\sum_i p_i)^2 / \sum_i p_i^2$. With $p_1$ the share of the dominant direction,
    $p_1^2 \le 1/r \le p_1$, so that $1 - r^{-1/2} \le 1 - p_1 \le 1 - 1/r$: exact to first order when one direction
    dominates and all others are many, within a factor of 2 otherwise. 0 for an all-zero batch.

    >>> share_outside(4.0), share_outside(1.0), share_outside(0.0)
    (0.5, 0.0, 0.0)
    """
    return 1 - max(participation_ratio, 1.0) ** -0.5 if math.isfinite(participation_ratio) else math.nan


def find_rank_collapse(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """The last weight layers carry their batch along one direction (rank2020, Lemma 3 and figure 1).

    A cosine or a rank at one layer does not separate: after ReLU the mean dominates the second moment in healthy
    networks too, and real inputs are correlated. What separates is how many layers in a row work on a collapsed
    batch: a healthy network of 10 layers can end in one, a network of 50 has dozens.
    """
    layers = _judgeable(reading, thresholds)
    at_input = share_outside(reading.input.get("participation_ratio"))
    if reading.samples == 1 or at_input == 0.0:
        return []
    line = thresholds.outside
    if math.isfinite(at_input):
        line = min(line, thresholds.of_input * at_input)
    shares = [share_outside(call.get("participation_ratio")) for call in layers]
    first = _first_persistent([share < line for share in shares], thresholds.persistence)
    if first is None or len(layers) - first < thresholds.collapsed_warning:
        return []
    count = len(layers) - first
    severity: Severity = "high" if count >= thresholds.collapsed_layers else "medium"
    start = layers[first]
    order = reading.order(start)
    return [
        Finding(
            kind="rank_collapse",
            severity=severity,
            layer=start.name,
            depth=start.depth,
            evidence={
                "share_outside_at_layer": shares[first],
                "share_outside_at_last": shares[-1],
                "share_outside_at_input": at_input,
                "line": line,
                "participation_ratio_at_last": layers[-1].get("participation_ratio"),
                "mean_cosine_at_last": layers[-1].get("mean_cosine"),
                "weight_layer": float(order),
                "collapsed_layers": float(count),
            },
            why=(
                f"From weight layer {order} of {len(reading.weight_layers)} on, under {line:.1%} of the signal "
                f"lies outside one direction ({shares[-1]:.2g} at the last, {at_input:.2g} at the input), and products "
                "of random layers without normalization collapse to rank one with depth (rank2020)."
            ),
            seed="rank2020",
            remedies=_remedies(reading),
        )
    ]


def find_gradient_alignment(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """Directional gradient vanishing: the gradients of all samples point the same way (rank2020, section 3).

    High only where the representation itself is collapsed over many layers: a shallow network whose outputs are
    still alike at initialization has aligned gradients too, and trains.
    """
    alignment = reading.network.get("gradient_alignment")
    if alignment is None or not math.isfinite(alignment.value) or reading.samples == 1:
        return []
    low, _ = alignment.interval(thresholds.deviations)
    if low < thresholds.aligned or share_outside(reading.input.get("participation_ratio")) == 0.0:
        return []
    collapse = find_rank_collapse(reading, thresholds)
    severity: Severity = collapse[0].severity if collapse else "low"
    last = reading.weight_layers[-1] if reading.weight_layers else None
    return [
        Finding(
            kind="gradient_alignment",
            severity=severity,
            layer=last.name if last else None,
            depth=last.depth if last else None,
            evidence={"gradient_alignment": alignment.value, "line": thresholds.aligned},
            why=(
                f"The gradients of different samples at the last layer have a mean cosine of {alignment.value:.4f}: "
                "when representations collapse, the direction of the gradient no longer depends on the sample, "
                "directional gradient vanishing (rank2020)."
            ),
            seed="rank2020",
            remedies=_remedies(reading),
        )
    ]


def _judgeable(reading: Reading, thresholds: Thresholds) -> list[Call]:
    """Weight layers wide enough to have a rank, that carry signal, up to a narrow or silent output."""
    return [
        call
        for call in reading.weight_layers
        if math.isfinite(call.get("participation_ratio"))
        and call.get("mean_square") != 0.0
        and not 0 < call.features < thresholds.narrow
    ]


def _first_persistent(collapsed: list[bool], persistence: float) -> int | None:
    """The first collapsed index from which on at least a share `persistence` is collapsed, None without one."""
    behind = 0
    first = None
    for index in range(len(collapsed) - 1, -1, -1):
        behind += collapsed[index]
        if collapsed[index] and behind >= persistence * (len(collapsed) - index):
            first = index
    return first


def _remedies(reading: Reading) -> tuple[str, ...]:
    cures = (
        "sounding repair --method raise_rank: pre-train the weights to raise the rank (rank2020, Algorithm 1)",
        "sounding repair --method orthogonalize: orthogonalize layer by layer, then check the gradients again",
    )
    if any(call.normalizes for call in reading.calls):
        return (*cures, "make it shallower, or add residual connections")
    return ("sounding repair --method add_batchnorm: normalize between linear map and activation", *cures)
