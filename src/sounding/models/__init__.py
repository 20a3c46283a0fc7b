"""The networks of the examples and the papers, written to be read."""

from __future__ import annotations

from sounding.models.mlp import Mlp

__all__ = ["Mlp"]
