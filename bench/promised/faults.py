"""Faulty networks: `build(name, seed)` gives a model, inputs, targets and a loss, as for the healthy ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench.promised import (
    faults_data,
    faults_images,
    faults_inside,
    faults_outside,
    faults_rows,
    faults_sets,
    faults_steps,
    faults_tokens,
)
from bench.promised.bodies import BODIES, Inputs, Loss
from bench.promised.registry import FAULTS, Fault, lines
from torch import Tensor, nn

FILES = (
    faults_tokens,
    faults_inside,
    faults_images,
    faults_rows,
    faults_sets,
    faults_steps,
    faults_data,
    faults_outside,
)


def build(name: str, seed: int = 0) -> tuple[nn.Module, Inputs, Tensor, Loss]:
    """The faulty network of this name, drawn with this seed, one batch as its engineer gives it, and the loss."""
    fault = FAULTS[name]
    torch.manual_seed(seed)
    model = made(fault)
    inputs, targets = drawn(fault, torch.Generator().manual_seed(seed + 1000))
    return model, inputs, targets, fault.loss or BODIES[fault.body].loss


def made(fault: Fault) -> nn.Module:
    """The healthy network with the fault put in, drawn from torch's own generator."""
    model = BODIES[fault.body].make()
    if fault.model is not None:
        model = fault.model(model) or model
    return model


def drawn(fault: Fault, g: torch.Generator) -> tuple[Inputs, Tensor]:
    """One batch, changed where the fault lies in the data."""
    body = BODIES[fault.body]
    inputs, targets = body.batch(g, fault.size or body.size)
    return fault.batch(inputs, targets) if fault.batch is not None else (inputs, targets)


FACTORIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "qknorm_through_meta": (BODIES["qknorm"].make, faults_inside.qknorm_through_meta),
    "vit_through_meta": (BODIES["vit"].make, faults_images.vit_through_meta),
    "statespace_through_meta": (BODIES["statespace"].make, faults_steps.statespace_through_meta),
}
"""For meta_law: how a network is built eagerly, and how the faulty loader builds it."""


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer with which the engineer trains this network."""
    fault = FAULTS[name]
    parameters = fault.optimizer(model) if fault.optimizer is not None else trained(model)
    return healthy_optimizer(fault.body, parameters)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def healthy_optimizer(body: str, parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> torch.optim.Optimizer:
    recipe = BODIES[body]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=recipe.rate, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=recipe.rate)


def expected() -> dict[str, Any]:
    """What stands in expected.json."""
    healthy = {name: {"architecture": body.make.__name__, "accepted": []} for name, body in BODIES.items()}
    faulty = {
        name: {
            "architecture": BODIES[fault.body].make.__name__,
            "body": fault.body,
            "kinds": list(fault.kinds),
            "place": fault.place,
            "done": fault.text,
            "promised": fault.promised,
        }
        for name, fault in FAULTS.items()
    }
    return {"healthy": healthy, "faulty": faulty}


if __name__ == "__main__":
    text = ",\n".join(f'"{part}": {lines(rows)}' for part, rows in expected().items())
    (Path(__file__).parent / "expected.json").write_text("{\n" + text + "\n}\n")
