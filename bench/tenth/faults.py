"""All faults: ``build(name, seed)`` gives (model, inputs, targets, loss) with one mistake in it."""

import torch

from . import faults_data, faults_flow, faults_laws, faults_paths, faults_values, faults_wiring
from .planting import FAULTS, plant

PARTS = (faults_values, faults_laws, faults_wiring, faults_flow, faults_paths, faults_data)


def names():
    return list(FAULTS)


def build(name, seed):
    """Give (model, inputs, targets, loss); the sound twin is ``bodies.build(FAULTS[name].network, seed)``."""
    planted = plant(name, seed)
    inputs, targets = planted.draw(torch.Generator().manual_seed(1000 + seed))
    return planted.model, inputs, targets, planted.loss
