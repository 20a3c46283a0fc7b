"""What would need absurd memory or time is refused before the work, with an estimate.

Estimates are lower bounds, so that nothing is refused that would have fitted. The memory is that of the machine, or of
the container; SOUNDING_MEMORY=64G (or `inf`) says otherwise, SOUNDING_HOURS=100 (or `inf`) how long a run may take.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile, is_zipfile

from sounding.errors import UsageError

MEMORY, HOURS = "SOUNDING_MEMORY", "SOUNDING_HOURS"
CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
AT_ONCE = 6.0  # hours of a run without a checkpoint: all of it is lost if the machine stops
RESUMED = 24.0 * 30  # hours of a run that goes on from its checkpoint
# what numpy and zipfile raise for a file that is damaged, or made to deceive
UNREADABLE = (OSError, ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, BadZipFile, zlib.error)


def machine_memory() -> float:
    """Bytes that this process can have: of SOUNDING_MEMORY, else the least of machine and container."""
    told = os.environ.get(MEMORY)
    if told:
        number, factor = told.strip().upper().removesuffix("B"), 1
        for power, unit in enumerate("KMGT", start=1):
            if number.endswith(unit):
                number, factor = number.removesuffix(unit), 1024**power
        return _positive(MEMORY, number, hint=f"{MEMORY}=64G") * factor
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    found = (math.inf, pages * (os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1.0))
    told_to_container = (path.read_text().strip() for path in CONTAINER if path.is_file())
    return min(*found, *(float(text) for text in told_to_container if text.isdecimal()))


def require_memory(needed: float, *, what: str, hint: str | None = None) -> None:
    """UsageError where so many bytes are more than there are.

    >>> require_memory(2**20, what="a batch of 4096 samples")
    """
    there = machine_memory()
    if needed > there:
        told = f"{what} would need at least {in_bytes(needed)} of memory, and there are {in_bytes(there)}"
        raise UsageError(told, hint=hint or f"something smaller, or {MEMORY}=64G if there is more")


def require_time(seconds: float, *, what: str, most: float = AT_ONCE) -> None:
    """UsageError where a run would take longer than `most` hours, or than SOUNDING_HOURS says."""
    told = os.environ.get(HOURS)
    allowed = 3600 * (_positive(HOURS, told, hint=f"{HOURS}=100") if told else most)
    if seconds > allowed:
        told = f"{what} would take about {in_time(seconds)}, and at most {in_time(allowed)} are allowed"
        # an infinite number of seconds has no whole number above it
        needed = f"{HOURS}={math.ceil(min(seconds, 1e300) / 3600):.3g}"
        raise UsageError(told, hint=f"something smaller, or {needed}")


def in_bytes(count: float) -> str:
    """Bytes in words.

    >>> in_bytes(12 * 2**30), in_bytes(1e30)
    ('12 GiB', '8.67e+11 EiB')
    """
    # below one byte and beyond all units the logarithm has no place
    power = min(int(math.log(count, 1024)), len(UNITS) - 1) if 1 <= count < math.inf else 0
    return f"{count / 1024**power:.3g} {UNITS[power]}"


def in_time(seconds: float) -> str:
    """A duration in words.

    >>> in_time(7.5), in_time(7200), in_time(86400 * 800), in_time(3e20)
    ('7.5 seconds', '2 hours', '2.19 years', '9.51e+12 years')
    """
    if seconds < 120:
        return f"{seconds:.2g} seconds" if seconds < 100 else f"{seconds:.0f} seconds"
    for unit, size in (("years", 86400 * 365.25), ("days", 86400.0), ("hours", 3600.0)):
        if seconds >= size * (1 if unit == "years" else 2):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 60:.3g} minutes"


def require_arrays(stream: IO[bytes], path: Path) -> None:
    """UsageError unless the arrays of an .npy or .npz file fit the memory and are as long as their headers say.

    numpy believes a header: one that names twelve gigabytes has them allocated, whatever follows it.

    Raises:
        ValueError, OSError, zipfile.BadZipFile: as numpy would, for what is no such file.
    """
    if is_zipfile(stream):
        stream.seek(0)
        with ZipFile(stream) as archive:
            members = archive.infolist()
            require_memory(sum(member.file_size for member in members), what=f"reading {path}")
            for member in members:
                with archive.open(member) as part:
                    _require_length(part, member.file_size, f"{member.filename!r} of {path}")
    else:
        length = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        _require_length(stream, length, str(path))
    stream.seek(0)


def _require_length(stream: IO[bytes], length: int, what: str) -> None:
    """Refuse an array that memory cannot hold, or whose file is not as long as its header says."""
    import numpy as np

    try:
        version = np.lib.format.read_magic(stream)
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except Exception as error:  # numpy hands the header to Python's own parser, which has errors of many kinds
        raise ValueError(f"{what} has no header of numpy") from error
    needed = math.prod(shape) * dtype.itemsize
    require_memory(needed, what=f"an array of shape {shape}, as {what} says,")
    if not dtype.hasobject and stream.tell() + needed != length:  # pickled objects have no length that a header tells
        raise UsageError(f"{what} is damaged: its header says {in_bytes(needed)}, and {in_bytes(length)} are there")


def _positive(name: str, text: str, *, hint: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UsageError(f"expected a positive number in {name}, got {text!r}", hint=hint)
    return value
