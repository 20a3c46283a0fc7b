"""What theory says about a random network without drawing a weight: the public face of `sounding.theory`.

>>> from sounding import predict
>>> print(predict.batchnorm("relu", batch_size=32))
BatchNorm(relu, B=32): gradients grow ×1.52195 per layer (squared norm), depth scale 2.38, trainable to about 38 layers
  fixed point  variance 0.5000  correlation 0.3023  attracting

Batch normalization: `batchnorm`, `critical_eps`, `covariance_map`, `identity_convergence`, `gradient_covariance`,
`backward_profile`, `bsb2_transition`, `simulate_broken_state`. Plain networks: `vanilla`, `critical`, `phase_diagram`,
`trajectory`. Skip connections: `residual`, `transformer`. Kernel maps: `kernel`, `sequence`. Gram matrices of a batch:
`gram`, `gram_deviation`. The theorems of the papers: `bounds`. The inverse problem: `prescribe`,
`prescribe_residual`, `prescribe_transformer`. numpy and scipy only.
"""

from __future__ import annotations

from sounding.theory import bounds
from sounding.theory.backward import backward_profile, gradient_covariance
from sounding.theory.batchnorm import BatchNormPrediction, batchnorm, critical_eps
from sounding.theory.broken_symmetry import bsb2_transition, simulate_broken_state
from sounding.theory.covariance_map import covariance_map
from sounding.theory.critical import Critical, PhaseDiagram, critical, phase_diagram
from sounding.theory.gram import GramPrediction, gram
from sounding.theory.gram_deviation import GramDeviation, gram_deviation
from sounding.theory.identity import identity_convergence
from sounding.theory.kernel import Kernel, kernel
from sounding.theory.kernel_path import sequence
from sounding.theory.prescribe import Prescription, prescribe
from sounding.theory.prescribe_blocks import BlockPrescription, prescribe_residual, prescribe_transformer
from sounding.theory.residual import Residual, Transformer, residual, transformer
from sounding.theory.vanilla import Vanilla, trajectory, vanilla

__all__ = [
    "BatchNormPrediction", "BlockPrescription", "Critical", "GramDeviation", "GramPrediction", "Kernel",
    "PhaseDiagram", "Prescription", "Residual", "Transformer", "Vanilla", "backward_profile", "batchnorm", "bounds",
    "bsb2_transition", "covariance_map", "critical", "critical_eps", "gradient_covariance", "gram",
    "gram_deviation", "identity_convergence", "kernel", "phase_diagram", "prescribe", "prescribe_residual",
    "prescribe_transformer", "residual", "sequence", "simulate_broken_state", "trajectory", "transformer",
    "vanilla",
]  # fmt: skip
