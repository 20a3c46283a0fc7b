"""What theory says about a random network without drawing a weight: the public face of `sounding.theory`.

>>> from sounding import predict
>>> print(predict.batchnorm("relu", batch_size=32))
BatchNorm(relu, B=32): gradients grow ×1.52195 per layer (squared norm), depth scale 2.38, trainable to about 38 layers
  fixed point  variance 0.5000  correlation 0.3023  attracting

Batch normalization: `batchnorm`, `critical_eps`. Plain networks: `vanilla`, `critical`, `phase_diagram`, `trajectory`.
Kernel maps: `kernel`, `sequence`. Gram matrices of a batch: `gram`, `gram_deviation`. The theorems of the seeds:
`bounds`. The inverse problem: `prescribe`. numpy and scipy only.
"""

from __future__ import annotations

from sounding.theory import bounds
from sounding.theory.batchnorm import BatchNormPrediction, batchnorm, critical_eps
from sounding.theory.critical import Critical, PhaseDiagram, critical, phase_diagram
from sounding.theory.gram import GramPrediction, gram
from sounding.theory.gram_deviation import GramDeviation, gram_deviation
from sounding.theory.kernel import Kernel, kernel
from sounding.theory.kernel_path import sequence
from sounding.theory.prescribe import Prescription, prescribe
from sounding.theory.vanilla import Vanilla, trajectory, vanilla

__all__ = [
    "BatchNormPrediction",
    "Critical",
    "GramDeviation",
    "GramPrediction",
    "Kernel",
    "PhaseDiagram",
    "Prescription",
    "Vanilla",
    "batchnorm",
    "bounds",
    "critical",
    "critical_eps",
    "gram",
    "gram_deviation",
    "kernel",
    "phase_diagram",
    "prescribe",
    "sequence",
    "trajectory",
    "vanilla",
]
