"""A plan: what a cure would change and what that would do, before it is done; then done, then undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sounding.errors import UsageError
from sounding.probe.losses import Loss
from sounding.probe.snapshot import ModelState
from sounding.probe.state import unwrap
from sounding.repair.changes import Changes
from sounding.repair.evidence import Evidence, Fresh, compare, examine
from sounding.repair.methods import Method, choose_methods
from sounding.repair.passes import Inputs, check_inputs
from sounding.repair.snapshot import Difference, all_or_nothing, find_moved, take_snapshot

SHOWN = 6  # changes at either end of a long list


def plan(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    method: str | Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    loss: str | Loss | None = None,
    repeats: int = 1,
    fresh: Fresh | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[str, int, float], None] | None = None,
) -> Plan:
    """What a cure, or several one after the other, would change in a model, with the check before and after.

    The cures run once, here; the model is put back at once, bit for bit, also when a cure raises or is interrupted.
    `apply` sets the very result that was examined: the same random draw, nothing computed again.

    Args:
        model: any module; torch.compile and data-parallel wrappers are looked through.
        inputs: a batch for the cures: a tensor, a tuple of arguments or a mapping of keyword arguments.
        targets: for the evidence: classes or values, as for `sounding.check`.
        method: a name of `sounding.repair.METHODS`, or several in the order in which they are to run.
        options: method → its keyword arguments, such as {"tune_batchnorm": {"shift": 2.0}}.
        loss: for the evidence, as for `sounding.check`.
        repeats: batches over which the evidence is averaged; given inputs are cut into that many.
        fresh: gives (inputs, targets) for the evidence, one batch a call. By default the evidence is taken on `inputs`,
            which some cures have seen.
        generator: source of randomness of the cures.
        progress: of slow cures: called with layer name, step and the value reached.

    Raises:
        UsageError: unknown method or option, bad inputs, nothing to change; the model is as it was.

    >>> network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> planned = plan(network, torch.eye(8), method="haar")
    >>> [change.name for changes in planned.changes for change in changes.changed]
    ['0', '2', '4']
    >>> planned.apply(); torch.allclose(network[0].weight @ network[0].weight.T, torch.eye(8), atol=1e-6)
    True
    >>> planned.undo(); planned.applied
    False
    """
    root = check_model(model)
    chosen = choose_methods(method, options)
    batch, shown = open_batch(inputs, targets, fresh, repeats)
    before = take_snapshot(root)
    try:
        changes = tuple(
            one.run(root, batch, options=values, generator=generator, progress=progress) for one, values in chosen
        )
        if changes and not any(one.changed for one in changes):
            raise UsageError(
                ". ".join(one.why_nothing for one in changes), hint="another method, or another name filter"
            )
        after = take_snapshot(root)
        repaired = examine(root, shown, loss=loss, repeats=repeats, generator=generator)
        before.restore()
        # after the cures, so that what they refuse costs no check
        found = examine(root, shown, loss=loss, repeats=repeats, generator=generator)
    finally:
        before.restore()
    return Plan(root, tuple(chosen), changes, compare(found, repaired), Difference(before, after))


@dataclass(eq=False, repr=False)
class Plan:
    """A repair that has been tried and can be applied and undone.

    Args:
        model: the module it is for.
        chosen: the cures with their options.
        changes: what each changes and leaves, and why.
        evidence: the check before and after.
        difference: between the model and its repaired state.
    """

    model: nn.Module
    chosen: tuple[tuple[Method, dict[str, Any]], ...]
    changes: tuple[Changes, ...]
    evidence: Evidence
    difference: Difference
    _undo: ModelState | None = field(default=None, init=False)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the cures."""
        return tuple(method.name for method, _ in self.chosen)

    @property
    def applied(self) -> bool:
        """Whether the model is in the repaired state."""
        return self._undo is not None

    def apply(self) -> None:
        """Change the model as planned; interrupted in the middle, it is as it was.

        What the cures left alone (running statistics, hooks, gradients, the mode) stays as it is now.

        Raises:
            UsageError: applied already, or the weights have moved since the plan was made, so that the evidence would
                be about another model.
        """
        if self._undo is not None:
            raise UsageError("the plan is applied already", hint="plan.undo() first")
        moved = find_moved(self.difference.before, self.model)
        if moved is not None:
            raise UsageError(f"the model has changed since the plan was made ({moved})", hint="making a new plan")
        with all_or_nothing(self.model) as snapshot:
            self.difference.make()
        self._undo = snapshot

    def undo(self) -> None:
        """Put the model back as it was when `apply` was called, bit for bit: values, buffers, modules, hooks, mode.

        Whatever happened to it since, training too, is taken back with it.
        """
        if self._undo is None:
            raise UsageError("there is nothing to undo: the plan is not applied", hint="plan.apply() first")
        self._undo.restore(versions=False)  # graphs opened since must not take old values for theirs
        self._undo = None

    def recipe(self) -> str:
        """Python lines that rebuild what a state_dict does not hold, before it is loaded; "" where it holds all."""
        lines = []
        for (method, options), changes in zip(self.chosen, self.changes, strict=True):
            if not method.outside:  # a state_dict holds all that it changes
                continue
            values = {**options, **changes.settings}  # what was drawn or measured is given, not done again
            given = "".join(f", {key}={value!r}" for key, value in values.items())
            arguments = "model, inputs" if "inputs" in method.parameters else "model"
            lines.append(f"sounding.repair.{method.name}_({arguments}{given})")
        return "\n".join(lines)

    def __str__(self) -> str:
        state = "applied" if self.applied else "not applied"
        blocks = [f"Plan ({state}): {' + '.join(self.methods) or 'nothing to change'}"]
        blocks += [_shorten(changes) for changes in self.changes]
        return "\n".join([*blocks, "", str(self.evidence)])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "methods": list(self.methods),
            "options": {method.name: options for method, options in self.chosen if options},
            "applied": self.applied,
            "changes": [changes.to_dict() for changes in self.changes],
            "recipe": self.recipe(),
            "evidence": self.evidence.to_dict(),
        }


def open_batch(inputs: Any, targets: Any, fresh: Fresh | None, repeats: int) -> tuple[Inputs, list[tuple[Any, Any]]]:
    """The batch for the cures, arrays as tensors, and those for the evidence; what is no batch is refused."""
    # torch shares the memory of an array, so nothing is copied
    batch = torch.as_tensor(inputs) if isinstance(inputs, np.ndarray) else inputs
    if not isinstance(batch, Tensor | tuple | Mapping):
        raise UsageError(
            f"expected inputs as a tensor, a tuple of arguments or a mapping of keyword arguments, "
            f"got {type(inputs).__name__}"
        )
    check_inputs(batch)
    return batch, [(batch, targets)] if fresh is None else [fresh() for _ in range(repeats)]


def check_model(model: Any) -> nn.Module:
    """The module itself, out of its wrappers; one without values is refused."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    root = unwrap(model)
    if any(is_lazy(tensor) for tensor in [*root.parameters(), *root.buffers()]):
        raise UsageError("the model has lazy layers that have not seen an input yet", hint="running it once first")
    if any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
        raise UsageError("the model lives on the meta device and has no values", hint="model.to_empty(device='cpu')")
    return root


def _shorten(changes: Changes) -> str:
    """The changes of one cure, the middle of a long list left out."""
    head, *lines = str(changes).split("\n")
    notes = [line for line in lines if line.startswith("  note: ")]
    lines = [line for line in lines if line not in notes]
    if len(lines) > 2 * SHOWN:
        left = len(lines) - 2 * SHOWN
        lines = [*lines[:SHOWN], f"  … {left} more", *lines[-SHOWN:]]
    return "\n".join([head, *notes, *lines])
