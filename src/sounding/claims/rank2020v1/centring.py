"""Mean deduction in batch norm: figure 11 of rank2020v1, the same experiment as figure 7 of rank2020."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.rank2020.convolutions import (
    CENTRING,
    CENTRING_CORRECTION,
    CENTRING_NOTE,
    measure_centring,
    vgg_settings,
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="rank2020v1-fig11",
        seed="rank2020v1",
        place="figure 11",
        kind="figure",
        statement="Mean deduction changes neither the performance of batch norm in a VGG net nor r(H), on which the "
        "bound on the rank rests.",
        expectations=CENTRING,
        settings=vgg_settings(["standard", "uncentred"]),
        measure=measure_centring,
        correction=CENTRING_CORRECTION,
        note=CENTRING_NOTE,
        paper="a VGG net, training accuracy and r(H_L) over iterations",
        released="the program of rank2020, figure 7: VGG-19, momentum 1; no training program",
    ),
)
