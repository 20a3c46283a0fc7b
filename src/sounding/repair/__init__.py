"""Cures: every remedy of the papers on a model of your own, in place, with evidence and undo."""

from sounding.repair.baselines import he_, lsuv_, xavier_
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.clipping import AdaptiveClipping
from sounding.repair.evidence import Evidence, Vitals
from sounding.repair.explosion import ExplosionLaw, explosion_law
from sounding.repair.methods import METHODS, Method
from sounding.repair.normalization import (
    add_batchnorm,
    add_batchnorm_,
    break_batchnorm_,
    swap_normalization,
    swap_normalization_,
)
from sounding.repair.orthogonal import haar_, orthogonal_init_
from sounding.repair.orthogonalize import orthogonalize_
from sounding.repair.plan import Plan, plan
from sounding.repair.rank import raise_rank_
from sounding.repair.recommend import Recommendation, Tried, recommend
from sounding.repair.residual import scale_branches_, zero_residual_
from sounding.repair.shaping import shape_activations, shape_activations_
from sounding.repair.tune import tune_batchnorm_

__all__ = [
    "METHODS",
    "AdaptiveClipping",
    "Change",
    "Changes",
    "Evidence",
    "ExplosionLaw",
    "Method",
    "Plan",
    "Recommendation",
    "Tried",
    "Untouched",
    "Vitals",
    "add_batchnorm",
    "add_batchnorm_",
    "break_batchnorm_",
    "explosion_law",
    "haar_",
    "he_",
    "lsuv_",
    "orthogonal_init_",
    "orthogonalize_",
    "plan",
    "raise_rank_",
    "recommend",
    "scale_branches_",
    "shape_activations",
    "shape_activations_",
    "swap_normalization",
    "swap_normalization_",
    "tune_batchnorm_",
    "xavier_",
    "zero_residual_",
]
