"""Which tokens of a batch the loss knows of, by the gradients that come back to their embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 8  # different ones in a batch from which on a share of them says something


def are_told_apart(tokens: Tensor) -> bool:
    """Whether a tensor holds tokens of several kinds in rows that differ: positions are the same for every sample."""
    if tokens.dim() != 2 or tokens.is_floating_point() or bool((tokens[1:] == tokens[:1]).all()):
        return False
    return len(torch.unique(tokens)) >= TOKENS


def share_unread(tokens: Tensor, gradient: Tensor) -> float:
    """The share of what the tokens of a batch tell that the loss knows nothing of.

    It is the largest of three: of the different tokens, of the positions, and of the information, −ln of how often a
    token occurs. Padding is one token among many and tells little: a mask that hides it hides nearly nothing, and one
    that is turned around nearly all. Where no gradient comes back at all the answer is 0: other findings speak of that.
    """
    if gradient.shape[:2] != tokens.shape:
        return 0.0
    read = (gradient != 0).flatten(2).any(-1)
    if not bool(read.any()):
        return 0.0
    different, places, counts = torch.unique(tokens, return_inverse=True, return_counts=True)
    told = -(counts.double() / tokens.numel()).log()[places]
    differ = (tokens != tokens[:1]).any(0)  # a place that holds one token in every sample is padding
    shares = (
        len(torch.unique(tokens[read])) / len(different),
        float(read.any(0)[differ].double().mean()),
        float(told[read].sum() / told.sum()),
    )
    return 1 - min(shares)
