"""The live monitor: `Monitor` for any loop, when to measure, what to measure, and where it goes."""

from __future__ import annotations

from sounding.train.monitor.changes import Event
from sounding.train.monitor.jsonlines import JsonLines, Log, read_json_lines
from sounding.train.monitor.monitor import Monitor
from sounding.train.monitor.schedules import Every, Logarithmic, Steps
from sounding.train.monitor.sinks import Memory, Sink, Snapshot

__all__ = [
    "Event",
    "Every",
    "JsonLines",
    "Log",
    "Logarithmic",
    "Memory",
    "Monitor",
    "Sink",
    "Snapshot",
    "Steps",
    "read_json_lines",
]
