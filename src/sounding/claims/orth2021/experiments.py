"""Rows for the training experiments of orth2021 and thesis2024 chapter 2."""

from __future__ import annotations
