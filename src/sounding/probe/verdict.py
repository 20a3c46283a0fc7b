"""The verdict: what is wrong in a measured profile, where, how sure, and what to try."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from sounding.errors import UsageError
from sounding.probe.evidence import find_gaps, find_missing
from sounding.probe.findings.batch import find_batch_too_small, find_degenerate_batch
from sounding.probe.findings.collapse import find_gradient_alignment, find_rank_collapse
from sounding.probe.findings.gradients import find_gradient_change
from sounding.probe.findings.remedies import keep_possible
from sounding.probe.findings.units import find_dead_units, find_non_finite, find_saturation
from sounding.probe.findings.unseen import unseen_products
from sounding.probe.reading import Reading, read
from sounding.probe.records import SEVERITIES, Finding, MeasuredKind, Status, TheoryKind, Verdict
from sounding.probe.thresholds import THRESHOLDS, Thresholds
from sounding.profile import Profile

FINDERS = (
    find_non_finite,
    find_degenerate_batch,
    find_batch_too_small,
    find_rank_collapse,
    find_gradient_change,
    find_gradient_alignment,
    find_dead_units,
    find_saturation,
)


def judge(profile: Profile, *, thresholds: Thresholds = THRESHOLDS) -> Verdict:
    """Read a measured profile and say what is wrong, worst first.

    Unhealthy means that a finding is of high severity. Healthy means that there is none, and that enough was measured
    to find one; otherwise the status is not known. Rows from theory are not judged.

    >>> judge(Profile()).summary
    'Not known: nothing was measured, so nothing can be said.'
    """
    if not isinstance(profile, Profile):
        raise UsageError(
            f"expected a Profile, got {type(profile).__name__}", hint="sounding.check(model, inputs).profile"
        )
    return add_kept(judge_reading(read(profile), thresholds=thresholds), profile)


def judge_reading(
    reading: Reading, *, beside: tuple[Finding, ...] = (), thresholds: Thresholds = THRESHOLDS
) -> Verdict:
    """The verdict on a profile that was read already, and on what was found beside it: in parameters and loss."""
    return conclude(reading, [*(finding for find in FINDERS for finding in find(reading, thresholds)), *beside])


def conclude(reading: Reading, findings: Sequence[Finding]) -> Verdict:
    """The verdict that these findings give, and without one of high severity what was measured."""
    possible = keep_possible([_finite(finding) for finding in findings], reading)
    found = tuple(sorted(possible, key=lambda finding: SEVERITIES[finding.severity]))
    theory = tuple(finding for finding in found if finding.kind in get_args(TheoryKind))
    found = tuple(finding for finding in found if finding not in theory)
    missing = find_missing(reading)
    status: Status = "healthy" if missing is None else "not known"
    if any(finding.severity == "high" for finding in found):
        status = "unhealthy"
    gaps = find_gaps(reading)
    # what is low beside the profile, in parameters, loss and attention, is a note and no warning
    told = tuple(one for one in found if one.severity != "low" or one.kind in get_args(MeasuredKind))
    sentence = _explain(reading, told, status, missing, gaps)
    return join_findings(Verdict(status, found, sentence, gaps, len(told) if status == "healthy" else 0), theory)


def join_findings(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """The verdict with the findings of theory, which explain and warn: none of them makes a network unhealthy."""
    if not findings:
        return verdict
    joined = tuple(sorted((*verdict.findings, *map(_finite, findings)), key=lambda one: SEVERITIES[one.severity]))
    told = "; ".join(_phrase(finding, 0) for finding in findings if finding.severity != "low")
    return replace(
        verdict, findings=joined, sentence=f"{verdict.sentence} Theory: {told}." if told else verdict.sentence
    )


def add_kept(verdict: Verdict, profile: Profile) -> Verdict:
    """The verdict with what this start keeps beside a sound one, where theory says it and something was judged."""
    told = profile.settings.get("theory")
    words = told.get("kept_words") if isinstance(told, dict) else None
    known = words is not None and verdict.status != "not known"
    return replace(verdict, sentence=f"{verdict.sentence} {words}") if known else verdict


def _finite(finding: Finding) -> Finding:
    """Evidence is what was measured: numbers that JSON can hold."""
    return replace(finding, evidence={key: value for key, value in finding.evidence.items() if math.isfinite(value)})


def _explain(
    reading: Reading, findings: tuple[Finding, ...], status: Status, missing: str | None, gaps: tuple[str, ...]
) -> str:
    if status == "not known":
        return f"{missing}."
    told = [finding for finding in findings if finding.severity == findings[0].severity]
    phrases = "; ".join(dict.fromkeys(_phrase(finding, reading.depth) for finding in told))
    if status == "unhealthy":
        return f"{phrases}."
    unseen = f" Not looked at: {'; '.join(gaps)}." if gaps else ""
    return f"{phrases or _survival(reading)}.{unseen}"


def _survival(reading: Reading) -> str:
    """What can be said of a network without findings: no more than was measured."""
    depth = reading.depth
    layers = "its one weight layer" if depth == 1 else f"all {depth} weight layers"
    unseen = unseen_products(reading)
    if unseen:
        return f"signal and gradient survive {unseen + depth} multiplications by weights, judged by their ends"
    gradients = [call.get("gradient_log_norm") for call in reading.weight_layers]
    lost = any(math.isnan(gradient) for gradient in gradients)
    silent = sum(gradient == -math.inf for gradient in gradients)
    told = f"signal survives {layers}" if lost else f"signal and gradient survive {layers}"
    return told + (
        f"; the gradient is exactly zero at {silent} of them, behind which weights or units are zero" if silent else ""
    )


def _phrase(finding: Finding, depth: int) -> str:
    """The part of the verdict’s sentence that tells one finding."""
    evidence, where = finding.evidence, f"layer {finding.layer!r}"
    match finding.kind:
        case "rank_collapse":
            if "unseen_products" in evidence:
                products = evidence["unseen_products"] + depth
                return f"representations are collapsed behind the {products:.0f} multiplications by weights"
            return (
                f"representations collapse towards rank one by weight layer {evidence['weight_layer']:.0f} of {depth}"
            )
        case "gradient_explosion" | "gradient_vanishing":
            if "growth" not in evidence:
                return f"no gradient reaches any weight: it ends at {where}"
            if "jump" in evidence:
                power = math.log10(evidence["jump"]) if evidence["jump"] > 0 else -math.inf
                return f"{where} alone multiplies gradients by ×10^{power:.0f} on their way to the input (squared norm)"
            does = "grow" if finding.kind == "gradient_explosion" else "shrink"
            limit = f"{evidence['fatal_depth']:.0f} layers"
            fatal = f"fatal from about {limit} on" if finding.severity == "high" else f"near the limit of about {limit}"
            return (
                f"gradients {does} by ×{evidence['growth']:.3g} per weight layer towards the input (squared norm), "
                f"{fatal}, and there are {evidence['weight_layers']:.0f}"
            )
        case "gradient_alignment":
            return "all samples ask for the same update"
        case "degenerate_batch":
            if finding.severity == "high":
                return "all samples of the batch lie along one direction"
            repeated = evidence.get("repeated_fraction", 0.0)
            if repeated:
                return f"{repeated:.0%} of the samples are repeated"
            parallel = "share_outside" in evidence
            return "the inputs are nearly parallel" if parallel else "the samples are linearly dependent"
        case "batch_too_small":
            return "the batch is too small"
        case "dead_units" if "dead_fraction" in evidence:
            return f"{evidence['dead_fraction']:.0%} of the units of {where} are dead"
        case "saturation" if "saturated_fraction" in evidence:
            share, layers = f"{evidence['saturated_fraction']:.0%}", evidence["layers"]
            if layers > 1:
                return f"the units of {layers:.0f} layers are saturated, {share} of them at {where}"
            return f"{share} of the units of {where} are saturated"
        case "non_finite":
            return f"NaN or infinity appears at {where}"
        case "cause":
            return f"the likely cause is that {finding.found}; the network would do better {finding.expected}"
        case "entropy_collapse" if "score_std" in evidence:
            said = f"the attention scores of {finding.layer!r} have a standard deviation of {evidence['score_std']:.3g}"
            return f"{said}, where about 1 is usual"
        case _:
            return _first_clause(finding)


def _first_clause(finding: Finding) -> str:
    """The first clause of the reason, with the place where it does not name that.

    >>> why = "The outputs are probabilities already (softmax): the loss starts at 2.3. It cannot fall below 1.46."
    >>> _first_clause(Finding("softmax_twice", "medium", "fc", 26, {}, why, "", ()))
    "the outputs are probabilities already (at 'fc')"
    """
    place = finding.parameter or finding.layer or ""
    sentence = re.split(r"\. (?=[A-Z])", finding.why.rstrip("."))[0]
    clause = re.split(r"[:;] ", re.sub(r" \([^()]*\)", "", sentence))[0]
    # a name of a module keeps its letters
    if clause.split(" ")[0].isalpha() and not clause.startswith(place or " "):
        clause = clause[:1].lower() + clause[1:]
    return clause if place in clause else f"{clause} (at {place!r})"
