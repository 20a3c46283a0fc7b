"""Cures: every remedy of the papers on a model of your own, in place, with evidence and undo.

A function whose name ends with an underscore changes the model that it is given, wholly or, where it raises, not at
all. `include` and `exclude` choose layers by name: a pattern such as "features.*", several of them, or a function of
name and module. `generator` is the source of randomness, by default torch's own.
"""

from sounding.repair.attention import qk_norm_
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.clipping import AdaptiveClipping
from sounding.repair.evidence import Evidence, Vitals
from sounding.repair.initializers import haar_, he_, lsuv_, orthogonal_init_, xavier_
from sounding.repair.mend import redraw_, reset_norms_, scale_embeddings_, unclone_, zero_biases_
from sounding.repair.methods import METHODS, Method
from sounding.repair.normalization import (
    add_batchnorm,
    add_batchnorm_,
    batch_statistics_,
    break_batchnorm_,
    swap_normalization,
    swap_normalization_,
)
from sounding.repair.orthogonalize import orthogonalize_
from sounding.repair.plan import Plan, plan
from sounding.repair.rank import raise_rank_
from sounding.repair.recommend import Recommendation, Tried, recommend
from sounding.repair.residual import scale_branches_, zero_residual_
from sounding.repair.shaping import ExplosionLaw, explosion_law, shape_activations, shape_activations_
from sounding.repair.tune import tune_batchnorm_

__all__ = [
    "METHODS", "AdaptiveClipping", "Change", "Changes", "Evidence", "ExplosionLaw", "Method", "Plan", "Recommendation",
    "Tried", "Untouched", "Vitals", "add_batchnorm", "add_batchnorm_", "batch_statistics_", "break_batchnorm_",
    "explosion_law", "haar_", "he_", "lsuv_", "orthogonal_init_", "orthogonalize_", "plan", "qk_norm_", "raise_rank_",
    "recommend", "redraw_", "reset_norms_", "scale_branches_", "scale_embeddings_", "shape_activations",
    "shape_activations_", "swap_normalization", "swap_normalization_", "tune_batchnorm_", "unclone_", "xavier_",
    "zero_biases_", "zero_residual_",
]  # fmt: skip
