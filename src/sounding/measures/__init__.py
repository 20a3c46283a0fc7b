"""Measures: what a batch of features looks like, in one number each. Pure, batched, differentiable.

Rows are samples: every measure takes (..., samples, features) and returns (...) in float64. `isometry` and
`isometry_gap` are defined on a Gram matrix and take that. Whoever holds Gram matrices or spectra already finds the
same names in `sounding.measures.of_gram` and `sounding.measures.of_spectrum`.

>>> import torch
>>> from sounding import measures
>>> batch = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
>>> measures.numerical_rank(batch), measures.isometry_gap(measures.gram(batch))
(tensor(2., dtype=torch.float64), tensor(inf, dtype=torch.float64))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from sounding.measures import of_gram as of_gram
from sounding.measures import of_spectrum as of_spectrum
from sounding.measures.checking import Check, MeasureReport, check_measure
from sounding.measures.of_features import (
    condition_number,
    distinct_share,
    effective_rank,
    gradient_alignment,
    gram,
    isotropy_distance,
    log_norm,
    mean_cosine,
    numerical_rank,
    orthogonality_gap,
    participation_ratio,
    second_moment,
    singular_values,
    soft_rank,
    spectrum,
)
from sounding.measures.of_gram import isometry, isometry_gap

MEASURES: Mapping[str, Callable[..., Tensor]] = MappingProxyType({
    measure.__name__: measure
    for measure in (
        numerical_rank, soft_rank, participation_ratio, effective_rank, orthogonality_gap, isometry, isometry_gap,
        mean_cosine, gradient_alignment, distinct_share, condition_number, log_norm, isotropy_distance,
    )
})  # fmt: skip
"""Every measure that is one number, by name. All take features but `isometry` and `isometry_gap`, which take a Gram
matrix; the functions of `of_gram` take one throughout."""

__all__ = [
    "MEASURES", "Check", "MeasureReport", "check_measure", "condition_number", "distinct_share", "effective_rank",
    "gradient_alignment", "gram", "isometry", "isometry_gap", "isotropy_distance", "log_norm", "mean_cosine",
    "numerical_rank", "of_gram", "of_spectrum", "orthogonality_gap", "participation_ratio", "second_moment",
    "singular_values", "soft_rank", "spectrum",
]  # fmt: skip
