"""The live monitor: `Monitor` for any loop, when to measure, what to measure, and where it goes."""

from __future__ import annotations

from sounding.train.monitor.changes import Event
from sounding.train.monitor.monitor import Monitor
from sounding.train.monitor.selection import Logarithmic
from sounding.train.monitor.sinks import JsonLines, Log, Memory, Sink, Snapshot, read_json_lines

__all__ = ["Event", "JsonLines", "Log", "Logarithmic", "Memory", "Monitor", "Sink", "Snapshot", "read_json_lines"]
