"""Sounding: how signal travels through very deep networks.

Five verbs and one noun. `predict` says what theory expects of a random network, `simulate` draws it, `check` measures
your `torch.nn.Module`, `repair` mends it, `reproduce` redoes the papers. Each speaks in a `Profile`: a table over
depth. Reading this file is reading the table of contents; every name is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

__version__ = "1.0.0"

_MODULES = ("activations", "errors", "measures", "predict", "theory", "weights", "chain", "repair", "data", "models",
            "train", "claims")  # fmt: skip
_INDEX = {
    **{name: f"sounding.{name}" for name in _MODULES},
    "Estimate": "sounding.profile",
    "Profile": "sounding.profile",
    "Row": "sounding.profile",
    "audit": "sounding.start",
    "check": "sounding.probe",
    "compare": "sounding.probe.compare",
    "watch": "sounding.probe",
    "read": "sounding.reader",
    "depth": "sounding.reader.depth",
    "Report": "sounding.probe",
    "Verdict": "sounding.probe",
    "Finding": "sounding.probe",
    "write_html": "sounding.report",
    "simulate": "sounding.chain",
    "prescribe": "sounding.theory.prescribe",
    "plan": "sounding.repair",
    "recommend": "sounding.repair",
    "Monitor": "sounding.train.monitor",
    "sweep": "sounding.sweeping.run",
    "reproduce": "sounding.reproduction",
}

__all__ = ["__version__", *sorted(_INDEX)]

if TYPE_CHECKING:
    from sounding import activations as activations
    from sounding import chain as chain
    from sounding import claims as claims
    from sounding import data as data
    from sounding import errors as errors
    from sounding import measures as measures
    from sounding import models as models
    from sounding import predict as predict
    from sounding import repair as repair
    from sounding import theory as theory
    from sounding import train as train
    from sounding import weights as weights
    from sounding.chain import simulate as simulate
    from sounding.probe import Finding as Finding
    from sounding.probe import Report as Report
    from sounding.probe import Verdict as Verdict
    from sounding.probe.check import check as check
    from sounding.probe.compare import compare as compare
    from sounding.probe.watch import watch as watch
    from sounding.profile import Estimate as Estimate
    from sounding.profile import Profile as Profile
    from sounding.profile import Row as Row
    from sounding.reader.depth import depth as depth
    from sounding.reader.module import read as read
    from sounding.repair.plan import plan as plan
    from sounding.repair.recommend import recommend as recommend
    from sounding.report import write_html as write_html
    from sounding.reproduction import reproduce as reproduce
    from sounding.start.audit import audit as audit
    from sounding.sweeping.run import sweep as sweep
    from sounding.theory.prescribe import prescribe as prescribe
    from sounding.train.monitor import Monitor as Monitor

__getattr__, __dir__ = lazily(__name__, _INDEX)
