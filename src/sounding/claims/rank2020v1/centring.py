"""Mean deduction in batch norm: figure 11 of rank2020v1, the same experiment as figure 7 of rank2020."""

from __future__ import annotations
