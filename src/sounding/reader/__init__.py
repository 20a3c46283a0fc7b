"""Reading a module: from a `torch.nn.Module` and a batch to a description that theory can run.

- `layout`: which axis of a tensor holds samples, positions or features, through every view and transpose.
- `values`: what the trace knows of a tensor: a constant, a measured value, a node, a function of one node.
- `trace`: one pass of the model, every operation seen, each turned into a rule or named as not covered.
- `linear`, `pointwise`, `shapes`, `softmax`: the operations, family by family.
- `recognize`: norms, rotations and activations, known by their numbers.
- `laws`: the law of a weight's entries, with tests of how sure it is.
- `redraw`: weights drawn anew from their laws, and the band that measuring them gives.
- `extend`, `depth`: a deeper network by theory, and what grows with depth.
- `module`: the front door, `read`.
- `prediction`, `beside`: what theory expects of a check, and its rows beside the measured ones.
- `disagreement`: the first layer that no random network of the description has.
- `changes`, `blame`: one change of the description that makes an unhealthy prediction healthy.
"""

from sounding.reader.module import Blueprint, read

__all__ = ["Blueprint", "read"]
