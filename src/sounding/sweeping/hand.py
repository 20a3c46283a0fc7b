"""The process that does tasks, one at a time: `python -m sounding.sweeping.hand`, a JSON object a line in and out.

It ends when its input ends, in the middle of a task too, so that no task outlives the process that asked for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pkgutil
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from sounding import __version__
from sounding.errors import SoundingError, UsageError


def do(function: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that a function gives, plain and flat.

    A mapping, or an object with `to_dict`, is one row, a number is a row with the column `value`, a list has a row for
    each entry. Mappings inside a row become columns `outer.inner`; lists inside a row are left out.
    """
    found = find_function(function)(**arguments)
    entries = found if isinstance(found, list | tuple) else [found]
    plain = [entry.to_dict() if hasattr(entry, "to_dict") else entry for entry in entries]
    rows = [dict(_flat(entry if isinstance(entry, Mapping) else {"value": entry})) for entry in plain]
    if not any(rows):
        raise UsageError(f"expected numbers from {function}, got {type(found).__name__} without any",
                         hint="a mapping of names to numbers")  # fmt: skip
    return rows


def find_function(address: str) -> Any:
    """The function at `module:name`; modules of the working directory are found too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(address)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"no function {address!r} here: {error}", hint="module:name, importable by every worker"
        ) from error
    if not callable(found):
        raise UsageError(f"expected a function at {address!r}, got {type(found).__name__}")
    return found


def explain(error: BaseException) -> str:
    """What a failed task says: the sentence of an error of ours, else its kind and message, never a traceback."""
    return str(error) if isinstance(error, SoundingError) else f"{type(error).__name__}: {error}"


def _flat(found: Mapping[str, Any], prefix: str = "") -> Any:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if hasattr(value, "item"):  # a number of numpy or torch; an array of several has no single one
            with contextlib.suppress(ValueError, RuntimeError):
                value = value.item()
        if isinstance(value, float):
            yield f"{prefix}{name}", value if math.isfinite(value) else str(value)
        elif value is None or isinstance(value, bool | int | str):
            yield f"{prefix}{name}", value


def _answer(line: str) -> dict[str, Any]:
    call = json.loads(line)
    if call["version"] != __version__:
        return {"error": f"the worker has version {__version__} of sounding, the client {call['version']}"}
    began = time.perf_counter()
    try:
        return {"rows": do(call["function"], call["arguments"]), "seconds": time.perf_counter() - began}
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # whatever a task raises must not end the worker
        return {"error": explain(error)}


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a task prints must not be taken for an answer
    # read by a thread, so that the end of the input is seen in the middle of a task
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # an exit of this thread alone would leave the task running

    threading.Thread(target=listen, daemon=True).start()
    while True:
        replies.write(json.dumps(_answer(lines.get()), allow_nan=False) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
