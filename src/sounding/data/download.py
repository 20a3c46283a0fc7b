"""From a URL to a file whose sum is right: resumed, bounded, and put in its place in one step or not at all."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sounding import __version__
from sounding.data.catalogue import Remote
from sounding.errors import DataError

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known

CHUNK = 1 << 18  # bytes read at a time: what a kill loses, and how often progress is told
TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 3  # at each home; what came so far is kept, and the next attempt goes on from there
PAUSE = 0.5  # seconds, growing with the attempt


class _Refused(Exception):
    """A home does not give the file; another attempt at it may help or not."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


def download(remote: Remote, target: Path, *, progress: Progress | None = None) -> None:
    """Fetch a file into `target`.

    Bytes are collected in `target.part`, which a later call continues (HTTP Range); a server that ignores the range
    starts anew. Only a file of the right sum takes the name `target`, by rename. A complete file of the wrong sum is
    kept as `target.corrupt` and fetched again, from the next home if there is one.

    Raises:
        DataError: every home refused, or the file cannot be written; what arrived stays in `target.part`.
    """
    part = target.with_name(target.name + ".part")
    reasons: list[str] = []
    for url in remote.urls:
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            try:
                _fetch(url, remote, part, progress)
                if md5_of(part) != remote.md5:
                    told = f"sent other bytes than the published ones (kept as {set_aside(part).name})"
                    raise _Refused(told, final=attempt > 0)  # the same other bytes twice are no accident of the line
                os.replace(part, target)
                return
            except _Refused as refusal:
                reasons.append(f"{url} {refusal}")
                if refusal.final:
                    break
            except OSError as error:
                raise cannot_write(target, error) from error
    told = "; ".join(dict.fromkeys(reasons))
    kept = f"; {part.stat().st_size} bytes are kept for the next try" if part.exists() else ""
    raise DataError(
        f"cannot download {remote.name}: {told}{kept}", hint=f"again later, or put the file at {target} by hand"
    )


def cannot_write(path: Path, error: OSError) -> DataError:
    """What an error of the disk means for the data folder."""
    hint = "SOUNDING_DATA=FOLDER with a folder that has room and that you may write to"
    if error.errno == errno.ENOSPC:
        return DataError(f"no space left on the disk for {path}", hint=hint)
    return DataError(f"cannot write {path}: {error.strerror or error}", hint=hint)


def set_aside(path: Path) -> Path:
    """Rename a damaged file so that nothing reads it; an earlier one of the name is replaced."""
    aside = path.with_name(path.name.removesuffix(".part") + ".corrupt")
    os.replace(path, aside)
    return aside


def md5_of(path: Path) -> str:
    """The md5 sum of a file; against accidents, not against attackers."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(url: str, remote: Remote, part: Path, progress: Progress | None) -> None:
    """Bring `part` to the full length, or refuse; what has arrived stays."""
    offset = part.stat().st_size if part.exists() else 0
    if offset > remote.most:  # what is there cannot be a part of the file
        part.unlink()
        offset = 0
    if offset == remote.size:
        return
    headers = {"User-Agent": f"sounding/{__version__}", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            start, total = _read_head(response, offset, remote)
            with part.open("r+b" if start else "wb") as stream:
                stream.seek(start)
                stream.truncate()  # a server that ignores the range sends what is there once more
                arrived = _receive(response, stream, remote, start, total, progress)
                stream.flush()
                os.fsync(stream.fileno())  # or a crash could leave a file of the right length with holes
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and offset:
            if remote.size is None:
                return  # nothing behind what is there: the sum decides
            part.unlink()
        gone = 400 <= error.code < 500 and error.code not in (408, 416, 429)  # too slow, no such range, too often
        raise _Refused(f"answered {error.code} {error.reason}", final=gone) from error
    except urllib.error.URLError as error:
        raise _Refused(f"cannot be reached ({error.reason})", final=False) from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _Refused(f"broke off ({type(error).__name__})", final=False) from error
    if total is not None and arrived < total:
        raise _Refused(f"broke off after {arrived} of {total} bytes", final=False)


def _read_head(response: http.client.HTTPResponse, offset: int, remote: Remote) -> tuple[int, int | None]:
    """Where the bytes that follow belong, and how many there will be in all."""
    if "text/html" in (response.headers.get("Content-Type") or "").lower():
        raise _Refused("answered with a web page instead of the file", final=True)
    start = 0
    if response.status == 206:  # a part, as asked for; any other answer begins at the first byte
        match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
        if match is None or int(match[1]) > offset:
            raise _Refused("answered with another part than the one asked for", final=True)
        start = int(match[1])
    length = response.headers.get("Content-Length") or ""
    total = start + int(length) if length.isdecimal() else remote.size
    if remote.size is not None and total != remote.size:
        raise _Refused(f"offers {total} bytes where the file has {remote.size}", final=True)
    if total is not None and total > remote.most:
        raise _Refused(f"offers {total} bytes, more than the file can have", final=True)
    return start, total


def _receive(
    response: http.client.HTTPResponse,
    stream: BinaryIO,
    remote: Remote,
    start: int,
    total: int | None,
    progress: Progress | None,
) -> int:
    """Write what arrives behind what is there; returns how many bytes there are then."""
    arrived = start
    while True:
        try:
            chunk = response.read(CHUNK)
        except (OSError, http.client.HTTPException) as error:  # of the network: of the disk it means something else
            raise _Refused(f"broke off ({type(error).__name__})", final=False) from error
        if not chunk:
            return arrived
        arrived += len(chunk)
        if arrived > remote.most:
            raise _Refused(f"sends more than the {remote.most} bytes the file can have", final=True)
        stream.write(chunk)
        if progress is not None:
            progress(remote.name, arrived, total)
