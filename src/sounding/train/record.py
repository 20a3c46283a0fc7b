"""What is needed to repeat a training, and to know a checkpoint as its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sounding.errors import UsageError
from sounding.probe.environment import describe_environment
from sounding.train.recipe import Recipe, check_steps
from sounding.train.samples import Orders, Samples, sum_tensors


def describe_run(
    networks: Sequence[nn.Module],
    samples: Samples,
    *,
    recipe: Recipe,
    settings: Sequence[Mapping[str, Any]],
    generator: Orders,
    device: torch.device,
    measure_at: Iterable[int],
) -> dict[str, Any]:
    """Versions, seed, recipe, device, data and model, as plain JSON types.

    `seed` is the generator's initial seed, `generator` a sum of the state it had when training began, which differs if
    it was used before; both None for torch's default generator, and lists where every run has a generator.
    """
    first = networks[0]
    about = describe_environment(first)
    return {
        "versions": {name: about[name] for name in ("sounding", "torch", "python", "platform")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": about["threads"],
        "seed": _of_each(generator, torch.Generator.initial_seed),
        "generator": _of_each(generator, lambda one: sum_tensors([one.get_state()])[:16]),
        "recipe": recipe.to_dict(),
        "runs": [dict(entry) for entry in settings],
        "data": samples.describe(),
        "model": {
            "class": type(first).__name__,
            "modules": str(first),
            "parameters": sum(parameter.numel() for parameter in first.parameters()),
            "dtype": str(samples.dtype).removeprefix("torch."),
            "weights": [sketch_tensors(network.state_dict().values()) for network in networks],
        },
        "measure_at": list(check_steps("measure_at", measure_at)),
    }


def _of_each(generator: Orders, tell: Callable[[torch.Generator], Any]) -> Any:
    if generator is None or isinstance(generator, torch.Generator):
        return None if generator is None else tell(generator)
    return [tell(one) for one in generator]


def sketch_tensors(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Three numbers that tell weights of one seed from those of another, and are the same to rounding.

    They are Σ wᵢ cos(kᵢ·i)/‖w‖ for three frequencies: about 1 apart between two draws, 1e-6 where the same draw was
    factorized with another number of threads.
    """
    sums, square, first = torch.zeros(3, dtype=torch.float64), 0.0, 1
    for tensor in tensors:
        values = tensor.detach().cpu().double().nan_to_num().flatten()
        places = torch.arange(first, first + len(values), dtype=torch.float64)
        sums += torch.stack([torch.dot(values, (places * frequency).cos()) for frequency in (1.0, 2**0.5, 3**0.5)])
        square, first = square + float(torch.dot(values, values)), first + len(values)
    return [round(value, 6) for value in (sums / math.sqrt(square or 1.0)).tolist()]


def fingerprint(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that a checkpoint must share to be continued; versions and threads may differ."""
    kept = ("recipe", "runs", "data", "model", "seed", "generator", "device", "measure_at", "kind")
    return {name: record[name] for name in kept if name in record}


def check_rates(rates: Sequence[Any]) -> list[float]:
    """Finite learning rates from 0."""
    for rate in rates:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
            raise UsageError(f"learning rates must be finite and not negative, got {rate!r}", hint="0.1")
    return [float(rate) for rate in rates]


def check_network(network: Any) -> tuple[torch.device, torch.dtype]:
    """Where a network lives and its precision, once it is one that can be trained."""
    if not isinstance(network, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(network).__name__}")
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(f"{type(network).__name__} has no parameter to train", hint="requires_grad_(True)")
    if any(parameter.device.type == "meta" for parameter in network.parameters()):
        raise UsageError("the network lives on the meta device and has no values", hint="to_empty and an init")
    return trained[0].device, trained[0].dtype


def check_recipe(recipe: Any) -> Recipe:
    """A Recipe, and nothing else."""
    if not isinstance(recipe, Recipe):
        raise UsageError(f"expected a Recipe, got {type(recipe).__name__}", hint="Recipe(optimizer='sgd', epochs=10)")
    return recipe


def check_orders(generator: Any, *, runs: int | None) -> None:
    """A generator or None, or, where there are several runs, a list of as many generators."""
    if generator is None or isinstance(generator, torch.Generator):
        return
    several = runs is not None and isinstance(generator, Sequence)
    if not several or not all(isinstance(one, torch.Generator) for one in generator):
        expected = "a torch.Generator" if runs is None else "a torch.Generator, or a list of one for each network"
        raise UsageError(
            f"expected {expected}, got {type(generator).__name__}", hint="torch.Generator().manual_seed(0)"
        )
    if len(generator) != runs:
        raise UsageError(f"expected one generator for each of {runs} networks, got {len(generator)}")
