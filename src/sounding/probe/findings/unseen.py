"""Depth that no call shows: products of functions and of scripted modules, which only the autograd graph counts."""

from __future__ import annotations

from sounding.probe.reading import Reading

PRODUCTS_PER_CALL = 2  # attention multiplies by two weights in a call
COLLAPSE_BEGINS = 14  # where ReLU has the share outside below 0.1 for uncorrelated inputs (thesis2024, (5.9) sharpened)


def unseen_products(reading: Reading) -> int:
    """How many multiplications by weights every way through the network passes beyond the calls that were measured."""
    shortest = reading.settings.get("shortest_depth") or 0
    return int(shortest - reading.depth) if shortest > PRODUCTS_PER_CALL * max(reading.depth, 1) else 0
