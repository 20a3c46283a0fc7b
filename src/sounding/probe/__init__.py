"""The depth check of any network: `check` runs it, `watch` measures a loop of your own, a Report says what came out."""

from __future__ import annotations

from sounding.probe.check import check
from sounding.probe.records import Finding, Report, Unmeasured, Verdict
from sounding.probe.watch import Watched, watch

__all__ = ["Finding", "Report", "Unmeasured", "Verdict", "Watched", "check", "watch"]
