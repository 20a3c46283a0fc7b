"""Models of the library transformers, with weights from its own code: theory covers them, and they lie in its bands."""

from __future__ import annotations

import pytest
import torch
from bench.architecture_networks import CHOSEN

import networks
import sounding

BAND = 2.0  # standard deviations over seeds, for 95%


@pytest.mark.slow
def test_models_of_transformers_are_covered_and_lie_in_their_bands() -> None:
    """At least 80% of the weight layers of each, and 95% of all rows; a network alone may lie a little lower."""
    pytest.importorskip("transformers")
    inside: list[bool] = []
    for name in ("gpt2", "llama", "bert", "vit", "opt", "distilbert", "resnet-hf"):
        with networks.drawn_from(0):
            model, inputs = CHOSEN[name]()
            generator = torch.Generator().manual_seed(0)
            profile = sounding.check(model, inputs, theory=True, generator=generator).profile
        told = profile.settings["theory"]
        assert told["predicted_layers"] >= 0.8 * told["weight_layers"], name
        seen = {(row.name, row.measure): row.value for row in profile if row.source == "check"}
        rows = [row for row in profile if row.source == "theory" and row.stderr and (row.name, row.measure) in seen]
        here = [abs(seen[row.name, row.measure] - row.value) <= BAND * row.stderr for row in rows]
        assert len(here) > 100, name
        assert sum(here) >= 0.9 * len(here), name
        inside += here
    assert sum(inside) >= 0.95 * len(inside)
