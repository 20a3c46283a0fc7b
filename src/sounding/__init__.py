"""Sounding: how signal travels through very deep networks.

Five verbs and one noun. `predict` says what theory expects of a random network, `simulate` draws it, `check` measures
your `torch.nn.Module`, `repair` mends it, `reproduce` redoes the papers. Each speaks in a `Profile`: a table over
depth. Reading this file is reading the table of contents; every name is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

__version__ = "1.0.0"

_MODULES = ("activations", "chain", "claims", "data", "errors", "measures", "models", "predict", "repair", "theory",
            "train", "weights")  # fmt: skip
_HELD = {
    "": _MODULES,
    "chain": ["simulate"],
    "probe": ["Finding", "Report", "Verdict", "check", "watch"],
    "probe.compare": ["compare"],
    "profile": ["Estimate", "Profile", "Row"],
    "reader": ["read"],
    "reader.depth": ["depth"],
    "repair": ["plan", "recommend"],
    "report": ["write_html"],
    "reproduction": ["reproduce"],
    "start": ["audit"],
    "sweeping.run": ["sweep"],
    "theory.prescribe": ["prescribe"],
    "train.monitor": ["Monitor"],
}

__all__ = [
    "Estimate", "Finding", "Monitor", "Profile", "Report", "Row", "Verdict", "__version__", "activations", "audit",
    "chain", "check", "claims", "compare", "data", "depth", "errors", "measures", "models", "plan", "predict",
    "prescribe", "read", "recommend", "repair", "reproduce", "simulate", "sweep", "theory", "train", "watch",
    "weights", "write_html",
]  # fmt: skip

if TYPE_CHECKING:
    from sounding import (
        activations,
        chain,
        claims,
        data,
        errors,
        measures,
        models,
        predict,
        repair,
        theory,
        train,
        weights,
    )
    from sounding.chain import simulate
    from sounding.probe import Finding, Report, Verdict
    from sounding.probe.check import check
    from sounding.probe.compare import compare
    from sounding.probe.watch import watch
    from sounding.profile import Estimate, Profile, Row
    from sounding.reader.depth import depth
    from sounding.reader.module import read
    from sounding.repair.plan import plan
    from sounding.repair.recommend import recommend
    from sounding.report import write_html
    from sounding.reproduction import reproduce
    from sounding.start.audit import audit
    from sounding.sweeping.run import sweep
    from sounding.theory.prescribe import prescribe
    from sounding.train.monitor import Monitor

__getattr__, __dir__ = lazily(__name__, _HELD)
