"""Random networks as Markov chains: exact in law, batched, on CPU and GPU, a million layers deep.

`simulate` is the whole interface; `simulate_many` runs widths and residual strengths in one call.
"""

from __future__ import annotations

from sounding.chain.observe import measure_names
from sounding.chain.run import DEFAULT_MEASURES, simulate, simulate_many
from sounding.chain.simulation import Simulation

__all__ = ["DEFAULT_MEASURES", "Simulation", "measure_names", "simulate", "simulate_many"]
