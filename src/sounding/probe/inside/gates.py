"""The gates of recurrent layers, computed again step by step from what a layer was given."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sounding.probe.gradients import log_norm

SAMPLES, STEPS = 16, 64  # of a batch and of a sequence that are looked at
FLAT = 4.6  # |z| from which a sigmoid has less than 4% of its largest slope: below 0.01, or above 0.99
SHUT = 0.01  # a gate that is less open, or less shut, is flat: the same line as FLAT
NAMES: dict[str, tuple[str, ...]] = {
    "LSTM": ("input", "forget", "cell", "output"),
    "GRU": ("reset", "update", "new"),
}
SIGMOIDS = ("input", "forget", "output", "reset", "update")
WRITTEN = "least_gate_mean"  # of the gates of a cell that is written out, which have no names
MEASURES = (*(f"{name}_gate_mean" for name in SIGMOIDS), WRITTEN, "gate_saturated_fraction", "time_gradient_log_rate")


@dataclass(eq=False)
class Gates:
    """The gates of one recurrent layer in one pass.

    Args:
        at: how many module calls had ended before it.
        layer: which of a module's stacked layers.
        means: gate → its mean over samples, steps and units; and the share of flat gates.
        rate: holds ln of the gradient's norm per step towards the start, once it came back.
        backward: whether it reads the steps from the end.
    """

    at: int
    layer: int
    means: dict[str, Tensor]
    rate: dict[str, float] = field(default_factory=dict)
    backward: bool = False


def look_at_gates(module: nn.Module, args: Any, at: int) -> list[Gates]:
    """The gates of torch's LSTM and GRU, layer by layer and direction by direction; of their cells, one step."""
    kind = next((kind for kind in NAMES if type(module).__name__ in (kind, f"{kind}Cell")), None)
    inputs = args[0] if args and isinstance(args[0], Tensor) else None
    if kind is None or inputs is None or inputs.dim() != (2 if isinstance(module, nn.RNNCellBase) else 3):
        return []
    if isinstance(module, nn.RNNCellBase):
        state = args[1] if len(args) > 1 else None
        hidden = state[0] if isinstance(state, tuple) else state
        weights = [module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh, None]
        return [Gates(at, 0, _means(kind, [_step(kind, inputs, hidden, None, weights)[0]]))]
    assert isinstance(module, nn.RNNBase)
    steps = inputs.detach().transpose(0, 1) if module.batch_first else inputs.detach()
    steps = steps[:STEPS, :SAMPLES].float()
    found: list[Gates] = []
    for layer in range(module.num_layers):
        outputs = []
        for backward in (False, True)[: 1 + module.bidirectional]:
            weights = _weights(module, f"l{layer}{'_reverse' if backward else ''}")
            gates, states = _unroll(kind, steps.flip(0) if backward else steps, weights)
            found.append(Gates(at, layer, gates, backward=backward))
            outputs.append(states.flip(0) if backward else states)
        steps = torch.cat(outputs, -1)
    return found


def unpacked(module: nn.Module, given: Any) -> Any:
    """What a recurrent layer is given; of a packed sequence, the steps that all samples have."""
    if not isinstance(given, PackedSequence):
        return given
    steps, lengths = pad_packed_sequence(given)
    steps = steps[: int(lengths.min())]
    return steps.transpose(0, 1) if getattr(module, "batch_first", False) else steps


def _weights(module: nn.RNNBase, place: str) -> list[Tensor | None]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    return [getattr(module, f"{name}_{place}", None) for name in names]


def _unroll(kind: str, steps: Tensor, weights: Sequence[Tensor | None]) -> tuple[dict[str, Tensor], Tensor]:
    hidden: Tensor | None = None
    cell: Tensor | None = None
    gates, outputs = [], []
    for inputs in steps:
        opened, hidden, cell = _step(kind, inputs, hidden, cell, weights)
        gates.append(opened)
        outputs.append(hidden)
    return _means(kind, gates), torch.stack(outputs)


def _step(
    kind: str, inputs: Tensor, hidden: Tensor | None, cell: Tensor | None, weights: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
    """One step: the gates in front of their sigmoids, the new state and cell."""
    into, across, first, second, projection = (None if one is None else one.detach().float() for one in weights)
    assert into is not None
    assert across is not None
    size = across.shape[1]
    before = inputs.new_zeros(len(inputs), size).float() if hidden is None else hidden.detach().float()
    given, kept = functional.linear(inputs.detach().float(), into, first), functional.linear(before, across, second)
    if kind == "LSTM":
        taken, forget, new, out = (given + kept).chunk(4, -1)
        past = torch.zeros_like(forget) if cell is None else cell
        cell = forget.sigmoid() * past + taken.sigmoid() * new.tanh()
        state = out.sigmoid() * cell.tanh()
        return (taken, forget, out), state if projection is None else functional.linear(state, projection), cell
    (reset, update, new), (reset_kept, update_kept, new_kept) = given.chunk(3, -1), kept.chunk(3, -1)
    reset, update = reset + reset_kept, update + update_kept
    proposed = (new + reset.sigmoid() * new_kept).tanh()
    state = (1 - update.sigmoid()) * proposed + update.sigmoid() * before
    return (reset, update), state, None


def _means(kind: str, gates: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    names = [name for name in NAMES[kind] if name in SIGMOIDS]
    whole = [torch.stack(parts) for parts in zip(*gates, strict=True)]
    means = {f"{name}_gate_mean": part.sigmoid().mean() for name, part in zip(names, whole, strict=True)}
    return {**means, "gate_saturated_fraction": (torch.stack(whole).abs() > FLAT).float().mean()}


class WrittenGates:
    """The gates of recurrent cells that are written out: sigmoids that multiply something, at every step of a loop.

    A loop is a module that is called again ("cell.wx#2"); a gate is known by its place among the gates of its step. One
    that multiplies what is older than the step's matrix products, and whose product goes into another one, is a GRU's
    reset gate, which may be shut.
    """

    def __init__(self) -> None:
        self._sigmoids: set[int] = set()
        self._products: dict[int, tuple[str, int]] = {}
        self._steps: dict[str, int] = {}
        self._gates: dict[tuple[str, int], list[Tensor]] = {}
        self._resets: set[tuple[str, int]] = set()

    def take(
        self, name: str, args: Any, taken: Sequence[int], fresh: Sequence[int], last: str, old: Container[int]
    ) -> None:
        """Look at one operation: what it reads and makes, the module call that ended last, and which of the storages
        that it reads are older than the last matrix product."""
        read = [self._products[key] for key in taken if key in self._products]
        if name in ("mm", "addmm", "bmm"):
            self._resets.update(read)
        self.forget(fresh)
        if name == "cat" and read:
            self._products.update(dict.fromkeys(fresh, read[0]))
        if name == "sigmoid":
            self._sigmoids.update(fresh)
        base, _, step = last.partition("#")
        gate = next((key for key in taken if key in self._sigmoids), None) if name == "mul" and step else None
        if gate is None or len(taken) != 2 or int(step) > STEPS:
            return
        place = self._steps.get(last, 0)
        self._steps[last] = place + 1
        if any(key in old for key in taken if key != gate):
            self._products.update(dict.fromkeys(fresh, (base, place)))
        opened = args[taken.index(gate)].detach()[:SAMPLES].float()
        flat = ((opened < SHUT) | (opened > 1 - SHUT)).float().mean()
        self._gates.setdefault((base, place), []).append(torch.stack([opened.mean(), flat]))

    def forget(self, fresh: Sequence[int]) -> None:
        """What was known of storages that an operation has made anew, where others lay before."""
        for key in fresh:
            self._sigmoids.discard(key)
            self._products.pop(key, None)

    def measures(self) -> dict[str, dict[str, float]]:
        """The mean of the gate that is least open and, of two or more, the share that is flat; resets are left out."""
        found: dict[str, list[tuple[float, float]]] = {}
        for (base, place), steps in self._gates.items():
            if len(steps) > 1 and (base, place) not in self._resets:
                opened, flat = torch.stack(steps).double().mean(0).tolist()
                found.setdefault(base, []).append((opened, flat))
        return {
            base: {WRITTEN: min(opened for opened, _ in gates)}
            | ({"gate_saturated_fraction": sum(flat for _, flat in gates) / len(gates)} if len(gates) > 1 else {})
            for base, gates in found.items()
        }


def note_rate(rate: dict[str, float], axis: int, gradient: Tensor | None) -> None:
    """ln of the gradient's norm per step towards the start, from the last step to the first that got one."""
    if gradient is None or gradient.shape[axis] < 2:
        return
    norms = [log_norm(step) for step in gradient.detach().unbind(axis)]
    finite = [(step, norm) for step, norm in enumerate(norms) if norm > -float("inf")]
    if len(finite) > 1:
        (first, start), (last, end) = finite[0], finite[-1]
        rate["time_gradient_log_rate"] = (start - end) / (last - first)
