"""Where the verdict draws its lines, each with its reason; the rates they give are in docs/verdict.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """The lines between healthy and not.

    Args:
        depth_scales: a network deeper than this many gradient depth scales does not train (meanfield2019, figure 2).
        near: the share of `depth_scales` from which a rate is worth a warning.
        broken: the share of `depth_scales` from which a single layer that changes the gradient alone is worth naming.
        margin: how far beyond `depth_scales` a measured change must go where its rate is uncertain.
        outside: a layer is collapsed when less than this share of its signal lies outside one direction.
        of_input: and when this share is also less than this part of the input's own, since real inputs are correlated
            before the first layer.
        bypassed: the share that counts instead where residual connections lead around the collapsed layers. What
            differs between samples is then still learned, 1/share times more slowly than what they have in common.
        bypassed_warning: from this share on that is worth a warning.
        pooled: a deep stack over positions is collapsed with less than this share left where its positions are pooled.
        identical: with less than this share left, at the last two layers, samples are the same up to rounding.
        collapsed_layers: a network is collapsed when at least this many of its last weight layers are.
        foreseen_layers: inputs that are alike already do not show what layers lose; there the network is collapsed when
            theory collapses this many of its layers for uncorrelated inputs too, for which 30 are measured.
        collapsed_warning: from this many on it is worth a warning.
        steep: with less than this part of the line left, `steep_layers` collapsed layers are worth a warning.
        steep_layers: see `steep`.
        narrow: fewer features than this say nothing about collapse: an output or bottleneck of one unit has rank one.
        aligned: the gradients of different samples point the same way from this mean cosine on, where their
            representations collapse as well.
        aligned_alone: the same where they do not: pooling alone brings the gradients of a healthy network close.
        dead: the share of dead units from which a layer blocks the signal.
        saturated: the share of saturated units from which a layer blocks the gradient.
        flat: the share of saturated units from which a layer counts towards `paths`.
        paths: with less than e to the minus this of all paths free of saturated units, layers together block it: the
            16 depth scales of the squared norm, as a share of the norm.
        parallel: inputs with less than this share outside one direction are nearly parallel, and slow to learn from.
        normal_batch: batch norm over at least this many values has a gradient of finite variance (meanfield2019).
        growing_batch: batch norm over fewer values than this makes ReLU gradients grow by over 1.8 per layer, where a
            large batch gives 1.47 (meanfield2019, Theorem 8).
        deviations: how many standard errors an estimate must clear its line by.
    """

    depth_scales: float = 16.0
    near: float = 0.75
    broken: float = 0.5
    margin: float = 1.25
    outside: float = 0.1
    of_input: float = 0.5
    bypassed: float = 1e-4
    bypassed_warning: float = 0.01
    pooled: float = 0.01
    identical: float = 1e-12
    collapsed_layers: int = 30
    foreseen_layers: int = 24
    collapsed_warning: int = 8
    steep: float = 0.01
    steep_layers: int = 3
    narrow: int = 4
    aligned: float = 0.99
    aligned_alone: float = 0.999
    dead: float = 0.9
    saturated: float = 0.9
    flat: float = 0.5
    paths: float = 8.0
    parallel: float = 0.01
    normal_batch: int = 6
    growing_batch: int = 8
    deviations: float = 1.959964


THRESHOLDS = Thresholds()
