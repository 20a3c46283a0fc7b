"""One experiment, several rows: what a measurement computed is kept for the next row that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sounding.claims.claim import Context, Values
from sounding.encoding import to_plain

P = ParamSpec("P")
T = TypeVar("T")
Shared = Callable[Concatenate[Mapping[str, Any], Context, P], T]

KEPT = 16  # results kept of each function: the most that rows of one figure and its variants ask for in turn


def share(*unseen: str) -> Callable[[Shared[P, T]], Shared[P, T]]:
    """Keep what a function of settings and context returns, for rows that differ in the `unseen` settings only.

    The function does not get the unseen ones.
    """

    def decorate(function: Shared[P, T]) -> Shared[P, T]:
        kept: dict[str, T] = {}

        @wraps(function)
        def shared(values: Values, context: Context, /, *args: P.args, **options: P.kwargs) -> T:
            # so that a key cannot depend on it
            seen = {name: value for name, value in values.items() if name not in unseen}
            # settings hold lists and tables, which cannot be hashed
            key = json.dumps(to_plain([seen, args, options, context.device, context.random_seed]), sort_keys=True)
            if key not in kept:
                if len(kept) == KEPT:  # the oldest goes: dictionaries keep their order
                    kept.pop(next(iter(kept)))
                kept[key] = function(seen, context, *args, **options)
            return kept[key]

        return shared

    return decorate
