"""Cures: every remedy of the papers on a model of your own, in place, with evidence and undo."""

from sounding.repair.baselines import he_, lsuv_, xavier_, zero_residual_
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.clipping import AdaptiveClipping
from sounding.repair.orthogonal import haar_, orthogonal_init_
from sounding.repair.orthogonalize import orthogonalize_

__all__ = [
    "AdaptiveClipping",
    "Change",
    "Changes",
    "Untouched",
    "haar_",
    "he_",
    "lsuv_",
    "orthogonal_init_",
    "orthogonalize_",
    "xavier_",
    "zero_residual_",
]
