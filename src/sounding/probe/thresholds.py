"""Where the verdict draws its lines, each with its reason; the rates they give are in docs/verdict.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """The lines between healthy and not.

    Args:
        depth_scales: a network deeper than this many gradient depth scales does not train (meanfield2019, figure 2).
        near: the share of `depth_scales` from which a rate is worth a warning.
        margin: how far beyond `depth_scales` a measured change must go where its rate is uncertain.
        outside: a layer is collapsed when less than this share of its signal lies outside one direction.
        of_input: and when this share is also less than this part of the input's own, since real inputs are correlated
            before the first layer.
        bypassed: the share that counts instead where residual connections lead around the collapsed layers.
        collapsed_layers: a network is collapsed when at least this many of its last weight layers are.
        collapsed_warning: from this many on it is worth a warning.
        steep: with less than this part of the line left, `steep_layers` collapsed layers are worth a warning.
        steep_layers: see `steep`.
        narrow: fewer features than this say nothing about collapse: an output or bottleneck of one unit has rank one.
        aligned: the gradients of different samples point the same way from this mean cosine on, where their
            representations collapse as well.
        aligned_alone: the same where they do not: pooling alone brings the gradients of a healthy network close.
        dead: the share of dead units from which a layer blocks the signal.
        saturated: the share of saturated units from which a layer blocks the gradient.
        normal_batch: batch norm over at least this many values has a gradient of finite variance (meanfield2019).
        growing_batch: batch norm over fewer values than this makes ReLU gradients grow by over 1.8 per layer, where a
            large batch gives 1.47 (meanfield2019, Theorem 8).
        deviations: how many standard errors an estimate must clear its line by.
    """

    depth_scales: float = 16.0
    near: float = 0.75
    margin: float = 1.25
    outside: float = 0.1
    of_input: float = 0.5
    bypassed: float = 0.01
    collapsed_layers: int = 27
    collapsed_warning: int = 8
    steep: float = 0.01
    steep_layers: int = 3
    narrow: int = 4
    aligned: float = 0.99
    aligned_alone: float = 0.999
    dead: float = 0.9
    saturated: float = 0.9
    normal_batch: int = 6
    growing_batch: int = 8
    deviations: float = 1.959964


THRESHOLDS = Thresholds()
