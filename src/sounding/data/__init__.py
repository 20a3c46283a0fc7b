"""Batches to look at a network with: real ones that are embedded, synthetic ones, and your own file.

`load_batch("digits", batch_size=64)` is the whole interface; `names()` lists the sources.
"""

from __future__ import annotations

from sounding.data.batch import Batch
from sounding.data.sources import DEFAULT_BATCH_SIZE, load_batch, names

__all__ = ["DEFAULT_BATCH_SIZE", "Batch", "load_batch", "names"]
