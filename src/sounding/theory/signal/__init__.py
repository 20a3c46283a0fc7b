"""The signal as a Gram matrix: theory for any architecture, in numpy and scipy only.

Points are (sample, position) pairs. Forwards every block maps K, the mean over features of h_a h_b; backwards it maps
D, the sum over features of the gradients' products g_a g_b. Every measure of a depth check is a function of the two.

- `description`: what theory is told about a network: nodes, each with a rule, its inputs and the law of its weights.
- `signal`: K (or D) over the pairs of points that are followed, and the measures read off it.
- `rules`, `gaussian`, `normalize`, `batch`, `windows`, `attention`: the rules; `propagate` runs a description.
"""

from sounding.theory.signal.description import (
    ONE,
    ZERO,
    Add,
    Attention,
    Convolution,
    Description,
    Elementwise,
    Flatten,
    Given,
    Join,
    Law,
    Linear,
    Mix,
    Multiply,
    Node,
    Normalize,
    Part,
    Points,
    Pool,
    Regrid,
    Rotate,
    Rule,
    Scale,
    Take,
    Tied,
)
from sounding.theory.signal.measures import measures
from sounding.theory.signal.plan import spacings
from sounding.theory.signal.propagate import Propagation, propagate
from sounding.theory.signal.signal import Signal

__all__ = [
    "ONE",
    "ZERO",
    "Add",
    "Attention",
    "Convolution",
    "Description",
    "Elementwise",
    "Flatten",
    "Given",
    "Join",
    "Law",
    "Linear",
    "Mix",
    "Multiply",
    "Node",
    "Normalize",
    "Part",
    "Points",
    "Pool",
    "Propagation",
    "Regrid",
    "Rotate",
    "Rule",
    "Scale",
    "Signal",
    "Take",
    "Tied",
    "measures",
    "propagate",
    "spacings",
]
