"""rank_collapse and gradient_alignment: one direction carries the batch, so every sample asks for the same update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sounding.probe.findings.unseen import COLLAPSE_BEGINS, unseen_products
from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import sentences, tell
from sounding.probe.thresholds import THRESHOLDS, Thresholds

ROUNDING = 1e-16  # a share of 0 counts as this in a mean of logarithms; from 1e-30 to 1e-12 findings are the same
CORRELATED = 0.75  # mean cosine of inputs from which on their own likeness hides what layers lose


def share_outside(participation_ratio: float) -> float:
    r"""The share of the signal outside its dominant direction, from the participation ratio.

    $1 - r^{-1/2}$, where $r = (\sum_i p_i)^2 / \sum_i p_i^2$. With $p_1$ the share of the dominant direction,
    $p_1^2 \le 1/r \le p_1$, so that $1 - r^{-1/2} \le 1 - p_1 \le 1 - 1/r$: exact to first order when one direction
    dominates and all others are many, within a factor of 2 otherwise. 0 for an all-zero batch.

    >>> share_outside(4.0), share_outside(1.0), share_outside(0.0)
    (0.5, 0.0, 0.0)
    """
    return 1 - max(participation_ratio, 1.0) ** -0.5 if math.isfinite(participation_ratio) else math.nan


@dataclass(frozen=True)
class _Collapse:
    """A collapse as the lines see it.

    Args:
        first: the index of the first collapsed weight layer.
        line: the share below which it is.
        severity: how bad.
        foreseen: how many layers theory collapses whatever comes in, where that decided.
        abrupt: whether one or two layers alone left nothing beyond rounding.
    """

    first: int
    line: float
    severity: Severity
    foreseen: int = 0
    abrupt: bool = False


def find_rank_collapse(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """The last weight layers carry their batch along one direction (rank2020, Lemma 3 and figure 1).

    A cosine or a rank at one layer does not separate: after ReLU the mean dominates the second moment in healthy
    networks too, and real inputs are correlated. What separates is how many layers in a row work on a collapsed
    batch: a healthy network of 10 layers can end in one, a network of 50 has dozens. Theory gives the scale: for ReLU
    the share outside falls as (2/(0.30 (ℓ + ℓ₀)))², ℓ₀ = 6.7 for uncorrelated inputs (thesis2024, (5.9) sharpened),
    below 0.1 from layer 14 on.

    Inputs that are alike already leave little to lose: ℓ₀ is 86 at a share of 0.006, and over seeds the layers of a
    narrow network wander by more than 50 of them take. There theory says what the same stack does to uncorrelated
    samples, where it describes the network; else only what was lost against the input counts.
    """
    at_input = share_outside(reading.input.get("participation_ratio"))
    if reading.samples == 1 or at_input == 0.0:
        return []
    layers, shares = _shares(reading, thresholds)
    collapse = _judge(reading, layers, shares, at_input, thresholds)
    if collapse is None:
        return []
    first, start = collapse.first, layers[collapse.first]
    order = reading.order(start)
    evidence = {
        "share_outside_at_layer": shares[first],
        "share_outside_at_last": shares[-1],
        "share_outside_at_input": at_input,
        "line": collapse.line,
        "participation_ratio_at_last": layers[-1].get("participation_ratio"),
        "mean_cosine_at_last": layers[-1].get("mean_cosine"),
        "weight_layer": float(order),
        "collapsed_layers": float(len(layers) - first),
    }
    unseen = unseen_products(reading)
    if unseen:
        evidence["unseen_products"] = float(unseen)
    if collapse.foreseen:
        evidence["collapsed_layers_uncorrelated"] = float(collapse.foreseen)
    cause = _cause(reading, collapse)
    return [
        tell(
            "unseen_collapse" if unseen and not collapse.abrupt else cause, collapse.severity,
            layer=start.name, depth=start.depth, evidence=evidence,
            where=_where(reading, order, unseen), reason=sentences()[cause].reason.format(**evidence),
            at_input=f", {at_input:.2g} at the input" if math.isfinite(at_input) else "",
        )
    ]  # fmt: skip


def _cause(reading: Reading, collapse: _Collapse) -> str:
    """Why samples became alike: the key of a sentence."""
    if collapse.abrupt:
        return "abrupt_collapse"
    if collapse.foreseen:
        return "foreseen_collapse"
    if reading.has_shortcuts:
        return "bypassed_collapse"
    return "normalized_collapse" if any("BatchNorm" in call.kind for call in reading.calls) else "rank_collapse"


def _judge(
    reading: Reading, layers: list[LayerCall], shares: list[float], at_input: float, thresholds: Thresholds
) -> _Collapse | None:
    """Where the collapse begins and how bad it is, None without one.

    Inputs that are alike already make every layer look collapsed: the line is then below their own share, unless theory
    says that the same layers collapse unrelated samples as well.
    """
    most = thresholds.collapsed_layers
    whole = thresholds.bypassed if reading.has_shortcuts else thresholds.outside
    line = min(whole, thresholds.of_input * at_input) if math.isfinite(at_input) else whole
    first, foreseen = _first_collapsed(shares, line), _foresee(reading, thresholds)
    identical = max(shares[-2:], default=1.0) < thresholds.identical and not at_input < thresholds.identical
    if first is not None and (
        identical or max(len(shares) - first, _out_of_sight(reading, layers, shares, thresholds)) >= most
    ):
        return _Collapse(first, line, "high", abrupt=identical and _is_abrupt([1.0, 1.0, *shares], thresholds))
    alike = _first_collapsed(shares, whole)
    if foreseen and alike is not None and len(shares) - alike >= most:
        return _Collapse(alike, whole, "high", foreseen=foreseen)
    # a layer counts for a third of the line at most: a head of zeros, or a dead gate, is no stack
    lost = [min(math.log(line / max(share, ROUNDING)), thresholds.lost / 3) for share in shares[first:]]
    return _Collapse(first, line, "medium") if first is not None and sum(lost) >= thresholds.lost else None


def _out_of_sight(reading: Reading, layers: list[LayerCall], shares: list[float], thresholds: Thresholds) -> int:
    """How many layers that do not show it worked on a collapsed batch, if it is collapsed where they end.

    Products outside of modules do not show it, nor do convolutions: they bring the channels of all samples and
    positions to one direction as linear layers do, and keep a map of amplitudes over positions, which counts as
    difference until it is pooled. The collapse began at layer 14 (thesis2024, (5.9) sharpened).
    """
    hidden = unseen_products(reading)
    if layers[-1].positions == 1 and shares[-1] < thresholds.pooled and not reading.has_shortcuts:
        hidden = max(hidden, sum(layer.positions > 1 for layer in layers))
    return hidden - COLLAPSE_BEGINS


def _is_abrupt(shares: list[float], thresholds: Thresholds) -> bool:
    """Whether what is left falls from visible to rounding within two layers, not by a factor per layer."""
    return any(
        after < thresholds.identical and before > math.sqrt(thresholds.identical)
        for before, after in zip(shares, shares[2:], strict=False)
    )


def needs_foresight(reading: Reading, thresholds: Thresholds = THRESHOLDS) -> bool:
    """Whether the inputs are so alike that theory must say what the layers would do to uncorrelated ones."""
    deep = reading.depth >= thresholds.collapsed_layers and not reading.has_shortcuts
    return deep and reading.input.get("mean_cosine") > CORRELATED


def _foresee(reading: Reading, thresholds: Thresholds) -> int:
    """How many layers of the stack would be collapsed for uncorrelated inputs; 0 where that is not fatal or unknown."""
    theory = reading.settings.get("theory")
    shares = theory.get("uncorrelated_shares") if isinstance(theory, Mapping) else None
    if not shares or reading.has_shortcuts:
        return 0
    first = _first_collapsed([float(share) for share in shares], thresholds.outside)
    count = len(shares) - first if first is not None else 0
    return count if count >= thresholds.collapsed_layers else 0


def find_gradient_alignment(reading: Reading, thresholds: Thresholds) -> list[Finding]:
    """Directional gradient vanishing: the gradients of all samples point the same way (rank2020, section 3).

    High only where the representation itself is collapsed over many layers: a shallow network whose outputs are
    still alike at initialization has aligned gradients too, and trains.
    """
    alignment = reading.network.get("gradient_alignment")
    if alignment is None or not math.isfinite(alignment.value) or reading.samples == 1:
        return []
    collapse = find_rank_collapse(reading, thresholds)
    severity: Severity = collapse[0].severity if collapse else "low"
    line = thresholds.aligned if collapse else thresholds.aligned_alone
    low, _ = alignment.interval(thresholds.deviations)
    if low < line or share_outside(reading.input.get("participation_ratio")) == 0.0:
        return []
    last = reading.weight_layers[-1] if reading.weight_layers else None
    # where nothing collapses, what is common to all samples comes from the data or from biases
    measured = math.isfinite(reading.input.get("participation_ratio"))
    found = tell(
        "collapsed_alignment" if collapse else "gradient_alignment", severity, layer=last.name if last else None,
        depth=last.depth if last else None, evidence={"gradient_alignment": alignment.value, "line": line},
        centre="subtract the mean of the data from the inputs" if measured else "",
    )  # fmt: skip
    return [replace(found, remedies=collapse[0].remedies) if collapse else found]


def _shares(reading: Reading, thresholds: Thresholds) -> tuple[list[LayerCall], list[float]]:
    """The weight layers, each with the largest share outside one direction found before the next weight layer.

    The largest, because a normalization behind a weight layer can restore what the layer alone seems to lose. Calls
    too narrow to have a rank, and silent ones (a branch that starts at zero), have no say.
    """
    depths = {call.depth for call in reading.weight_layers}
    layers: list[LayerCall] = []
    shares: list[float] = []
    for call in reading.calls:
        if call.depth in depths:
            layers.append(call)
            shares.append(-math.inf)
        share = share_outside(call.get("participation_ratio"))
        if not shares or math.isnan(share) or call.get("mean_square") == 0.0 or 0 < call.features < thresholds.narrow:
            continue
        shares[-1] = max(shares[-1], share)
    known = [index for index, share in enumerate(shares) if share > -math.inf]
    return [layers[index] for index in known], [shares[index] for index in known]


def _first_collapsed(shares: list[float], line: float) -> int | None:
    """The first layer below the line from which on the geometric mean of the shares stays below it.

    The mean, because at finite width the share of one layer fluctuates by its own size (its logarithm walks at
    random), so that a single layer above the line does not interrupt a collapse.
    """
    first = None
    total = 0.0
    for behind, index in enumerate(range(len(shares) - 1, -1, -1), start=1):
        total += math.log(max(shares[index], ROUNDING))
        if shares[index] < line and total / behind < math.log(line):
            first = index
    return first


def _where(reading: Reading, order: int, unseen: int) -> str:
    if unseen:
        return f"Behind {unseen + reading.depth} multiplications by weights, {unseen} of them out of sight"
    return f"From weight layer {order} of {reading.depth} on"
