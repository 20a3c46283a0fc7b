"""The rows of rank2020, in the order of the seed."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.rank2020 import (
    collapse,
    convolutions,
    depth,
    figure3,
    invariant,
    lemmas,
    pretraining,
    training,
)

_ORDER = (
    *("fig1", "fig2-linear", "fig2-relu", "fig2-tanh", "lemma1", "thm2", "fig3a", "fig3a-rank", "fig3b"),
    *(
        "lemma3-gaussian",
        "lemma3-uniform",
        "fig4",
        "fig5",
        "fig6",
        "lemma4",
        "fig7",
        "lemma7",
        "fig8",
        "lemma13",
        "fig9",
    ),
    *("cor15", "cor15-assumption", "prop19", "fig10", "fig11", "fig12", "fig13"),
)
_ROWS = {
    claim.id.removeprefix("rank2020-"): claim
    for module in (lemmas, collapse, depth, figure3, invariant, training, pretraining, convolutions)
    for claim in module.CLAIMS
}

CLAIMS: tuple[Claim, ...] = tuple(sorted(_ROWS.values(), key=lambda claim: _ORDER.index(claim.id[len("rank2020-") :])))
