"""Twelve sound networks: ``build(name, seed)`` gives a model, a first batch and a loss.

The networks stand in ``bodies_text``, ``bodies_seq``, ``bodies_image`` and ``bodies_other``; this file only
collects them.  ``draw(generator)`` of an entry gives further batches of the same task.
"""

import torch

from . import bodies_image, bodies_other, bodies_seq, bodies_text

NETWORKS = {
    **bodies_text.NETWORKS,
    **bodies_seq.NETWORKS,
    **bodies_image.NETWORKS,
    **bodies_other.NETWORKS,
}


def names():
    return list(NETWORKS)


def build(name, seed):
    """Give (model, inputs, targets, loss); the same seed gives the same numbers."""
    network = NETWORKS[name]
    torch.manual_seed(seed)
    model = network.make()
    inputs, targets = network.draw(torch.Generator().manual_seed(1000 + seed))
    return model, inputs, targets, network.loss


def run(model, inputs):
    """Call the model with a tensor or with a tuple of tensors."""
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
