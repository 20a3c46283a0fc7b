"""Who influences whom: samples that change with other samples, positions that see what they should predict, and inputs
that reach nothing.

Two forward passes of three samples tell. In the second one the first sample has other entries from its middle on, the
second one has others up to its middle, and the third stays as it is: its signal may not change at all. A batch norm
mixes samples by design; in these passes each sample is normalized by its own statistics in its place. Where samples
do meet, five more passes tell whether a sample or the others have the greater say in what it gives, and whether their
order has one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sounding.probe.batches import Batch, cut
from sounding.probe.calls import OpenCall, Pass
from sounding.probe.outputs import answer_tensor, leading_tensor, sample_matrix
from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import tell
from sounding.probe.state import DropoutAtRest, plain_execution
from sounding.probe.tap import Tap, survey_model

SAMPLES = 3
CROWD = 16  # samples among which a single one has little to say, where all of them have their say
ENTRIES = 4096  # of a sample's signal that are compared in each layer: whoever is influenced is so nearly everywhere
LOGITS = 64  # of the outputs at each position
SEQUENCE = 4  # positions from which on an input has a middle
PARTS = 8  # of the places of tokens, each of which is changed by itself
MATCH = 0.95  # of the targets that follow the tokens: a few may be padding or the end of a text
SURE = 30.0  # logits of a network that is sure of its answer
MANY, MOST = 0.5, 0.9  # of an input that reaches nothing: padding, borders and masks may leave out less than half


@dataclass(frozen=True)
class Influence:
    """What changes with what, each where it could be seen."""

    samples: bool  # whether the third sample changes with the others, and `call` the first call in which it does
    call: str | None = None
    alike: bool = False  # whether the outputs of all samples are the same
    # whether it is a recurrent layer or an attention where they meet, which takes samples for steps
    steps: bool = False
    # how much the others change what a sample gives, over how much it does so itself; or, if that is more, twice
    # what a single other one does
    foreign: float = 0.0
    ordered: bool = False  # whether what a sample gives changes with the order of the others
    future: bool = False  # whether outputs change with the tokens behind them
    past: bool = True  # whether outputs change with the tokens before them
    leak: str | None = None  # the first call of which they do


class _Alone(DropoutAtRest):
    """Inside, dropout rests, and batch norm takes the statistics of each sample alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.batch_norm:
            given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            if given.get("training"):
                x = given["input"]
                x = nn.functional.layer_norm(x, x.shape[1:], eps=given.get("eps", 1e-5))
                features = (-1, *(1,) * (x.dim() - 2))
                for one, change in ((given.get("weight"), torch.mul), (given.get("bias"), torch.add)):
                    x = x if one is None else change(x, one.view(features))
                return x
        return super().__torch_function__(func, types, args, kwargs)


class _Sketch(Tap):
    """A tap that keeps a part of the last sample's signal at every call, of the first half of the first one's, and of
    what the model returns."""

    def __init__(self, *given: Any, size: int, steps: int) -> None:
        super().__init__(*given)
        self.size, self.steps = size, steps  # the number of samples, and the axis of the positions
        self.kept: dict[str, Tensor] = {}
        self.read: dict[str, Tensor] = {}  # of recurrent layers and attentions, what they are given
        self.early: dict[str, Tensor] = {}
        self.answer: Tensor | None = None

    def measure(self, one: Pass, call: OpenCall, args: Any, output: Any, tensor: Tensor) -> None:
        """Keep some entries of the last sample."""
        call.features = 1  # so that a call that only passes this on is left out
        self._keep(self.kept, call.name, tensor)
        if tensor.dim() == 3 and tensor.shape[0] == self.size and tensor.is_floating_point():
            half = tensor.detach().movedim(self.steps, 1)[0, : tensor.shape[self.steps] // 2].flatten()
            self.early[call.name] = half[:: max(len(half) // ENTRIES, 1)].float().clone()
        if isinstance(call.spec.module, nn.RNNBase | nn.MultiheadAttention) and args:
            self._keep(self.read, call.name, args[0])

    def _keep(self, kept: dict[str, Tensor], name: str, tensor: Any) -> None:
        """Keep a part of the last sample of a tensor under a name."""
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            rows = sample_matrix(tensor.detach(), self.size, first=self.known.axis)
            if rows is not None:  # a copy, since the model may go on in place
                kept[name] = rows[-1, :: max(rows.shape[1] // ENTRIES, 1)].float().clone()

    def end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Keep some outputs of every sample and position."""
        answer = answer_tensor(output)
        if answer is not None and answer.is_floating_point() and answer.dim() > 1:
            rows = answer.detach().movedim(self.steps, 1) if answer.dim() == 3 else answer.detach()
            self.answer = rows[..., :: max(rows.shape[-1] // LOGITS, 1)].float().clone()


def find_influence(root: nn.Module, batch: Batch, *, axis: int) -> Influence | None:
    """What changes with what; None where the model takes no three samples, or is random itself."""
    taken, few = _first(batch, SAMPLES, axis)
    followed = _followed(batch)
    # the halves are changed of the tokens that the targets follow, which a decoder takes beside what it translates,
    # else of the tensor that speaks for the samples
    lead = leading_tensor(few.tensors()) if followed is None else few.tensors()[followed[0]]
    steps = 1 if followed is None else followed[1]
    changed = _change_halves(few, axis, lead, steps, ordered=followed is not None)
    if taken < 2 or changed is None:
        return None
    state = torch.get_rng_state()
    try:
        before, after = (_run(root, one, axis, taken, state, steps) for one in (few, changed))
        known = lead is not None and (followed is not None or not lead.is_floating_point())
        found = _compare(before, after, lead.movedim(steps, 1) if known and lead is not None else None)
        if (found.samples or found.future) and _compare(
            before, _run(root, few, axis, taken, state, steps), None
        ).samples:
            return None  # the model itself is random
        if found.samples:
            taken, more = _first(batch, CROWD, axis)
            last, first = slice(-1, None), slice(0, 1)
            changes = ((slice(0, -1), last), (last, first), (first, last), (slice(0, 2), [1, 0]))
            changed_batches = [_copied(more, axis, taken, *change) for change in changes]
            answers = [_last_answer(_run(root, one, axis, taken, state)) for one in (more, *changed_batches)]
            found = _weigh(found, answers)
    except Exception:
        return None  # a graph that needs all its nodes, a size that is built in: nothing is said
    return found


def _first(batch: Batch, most: int, axis: int) -> tuple[int, Batch]:
    """How many of the first samples are taken, and a batch of them."""
    size = batch.size(axis) or 0
    taken = min(most, size)
    arguments, keywords = (cut(part, slice(0, taken), size, axis) for part in (batch.arguments, dict(batch.keywords)))
    return taken, Batch(arguments, keywords, None)


def _last_answer(seen: _Sketch) -> Tensor | None:
    """The output for the last sample; None where the outputs are no row for each sample, or compare samples."""
    known = seen.answer is not None and seen.answer.shape[:1] == (seen.size,) != seen.answer.shape[1:]
    return seen.answer[-1] if known and seen.answer is not None else None


def _weigh(found: Influence, answers: Sequence[Tensor | None]) -> Influence:
    """How much the last sample's output changes with all others, with itself, with one other, and with their order."""
    known = [one for one in answers if one is not None]
    if len(known) < len(answers):
        return found
    others, itself, single, order = (float((known[0] - one).norm()) for one in known[1:])
    foreign = max(others, 2 * single) / itself if itself else math.inf
    return replace(found, foreign=foreign, ordered=order > 0 and _differ(known[0], known[4]))


def _compare(before: _Sketch, after: _Sketch, tokens: Tensor | None) -> Influence:
    """What has changed between two passes."""
    parted = [name for name in before.kept if name in after.kept and _differ(before.kept[name], after.kept[name])]
    first = parted[0] if parted else None
    if first is not None and 2 * len(parted) < len(before.kept) - [*before.kept].index(first):
        parted, first = [], None  # an expert takes tokens of several samples, and each gets its own back
    steps = first in before.read and not _differ(before.read[first], after.read.get(first, before.read[first]))
    found = Influence(bool(parted), first, steps=steps)
    one, other, size = before.answer, after.answer, before.size
    if one is None or other is None or one.shape != other.shape or one.shape[0] != size or before.known.axis != 0:
        return found
    reaches = _differ(one[-1], other[-1])
    alike = not any(_differ(one[0], row) for row in one[1:])
    found = replace(found, samples=found.samples or reaches, alike=alike)
    if reaches or tokens is None or one.shape[:2] != tokens.shape[:2] or one.dim() != 3:
        return found
    middle = tokens.shape[1] // 2
    future = _differ(one[0, :middle], other[0, :middle])
    ahead = [name for name in before.early if name in after.early and _differ(before.early[name], after.early[name])]
    # behind the end of a short sequence every step gives the same, whatever came before
    padded = not _differ(one[1, middle], one[1, -1])
    past = size < SAMPLES or padded or _differ(one[1, middle:], other[1, middle:])
    return replace(found, future=future, past=past, leak=ahead[0] if future and ahead else None)


def _change_halves(batch: Batch, axis: int, lead: Tensor | None, steps: int, *, ordered: bool) -> Batch | None:
    """The batch with entries of its last sample in the others, of tokens and of series that are continued in one half
    of each alone; None where that changes nothing."""
    size = batch.size(axis) or 0
    if lead is None or lead.layout is not torch.strided or lead.dim() < 2 or axis >= lead.dim():
        return None
    rows = lead.detach().clone().movedim(axis, 0)
    if not (ordered and axis == 0) and (lead.is_floating_point() or rows.dim() != 2 or rows.shape[1] < SEQUENCE):
        changed = _copied(batch, axis, size, slice(0, -1), slice(-1, None))
        same = all(torch.equal(one, other) for one, other in zip(batch.tensors(), changed.tensors(), strict=True))
        return None if same else changed
    order = rows.movedim(steps, 1)  # a view, through which the rows change
    middle = order.shape[1] // 2
    order[0, middle:] = order[-1, middle:]
    order[1:-1, :middle] = order[-1, :middle]
    new = rows.movedim(0, axis).contiguous()
    if torch.equal(new, lead):
        return None
    # what stands beside the tokens changes in the second sample: in the first, it would speak of no mask
    beside = lead is not leading_tensor(batch.tensors())
    others = _copied(batch, axis, size, slice(1, -1), slice(-1, None)) if beside else batch
    swapped = {id(value): other for value, other in zip(batch.tensors(), others.tensors(), strict=True)} | {
        id(lead): new
    }
    return batch.mapped(lambda value: swapped[id(value)])


def _copied(batch: Batch, axis: int, size: int, into: slice, source: slice | list[int]) -> Batch:
    """The batch with some of its samples in the place of others, in every tensor that holds a row for each."""

    def change(value: Tensor) -> Tensor:
        if value.dim() <= axis or value.shape[axis] != size or value.layout is not torch.strided:
            return value
        rows = value.detach().clone().movedim(axis, 0)
        rows[into] = rows[source].clone()
        return rows.movedim(0, axis).contiguous()

    return batch.mapped(change)


def _run(root: nn.Module, batch: Batch, axis: int, size: int, state: Tensor, steps: int = 1) -> _Sketch:
    arguments, keywords, _ = batch.prepare(plain=True)
    tap = _Sketch(survey_model(root, batch_axis=axis), size=size, steps=steps)
    torch.set_rng_state(state)  # noise of the model's own is the same in all passes
    with plain_execution(), tap, _Alone():
        root(*arguments, **keywords)
    return tap


def _differ(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors differ by more than rounding: the root of the machine precision of float32."""
    if x.shape != y.shape or torch.equal(x, y):
        return False
    rounding = math.sqrt(torch.finfo(torch.float32).eps)
    return float((x - y).norm()) > rounding * max(float(x.norm()), float(y.norm()))


def judge_influence(found: Influence | None, batch: Batch, *, causal: bool) -> list[Finding]:
    """Findings about samples that meet and about targets that can be seen; `causal` says that a model claims so."""
    if found is None:
        return []
    told: list[Finding] = []
    if found.samples:
        harmful = found.ordered or found.alike or found.steps or found.foreign >= 1
        more = " All samples get the same output." if found.alike else ""
        more += " It changes with their order, too." if found.ordered else ""
        if harmful and not found.alike and found.foreign >= 1:
            more += " They have as much say in it as the sample itself."
        where = f"from {found.call!r} on" if found.call else "in what the network returns"
        told = [tell("samples_meet", "medium" if harmful else "low", layer=found.call, where=where, more=more)]
    if found.future and (not found.past or causal or _followed(batch) is not None):
        seen = "on later tokens" if found.past else "on later tokens and none before"
        where = f", from {found.leak!r} on" if found.leak else ""
        told.append(tell("sees_the_future", layer=found.leak, seen=seen, where=where))
    return told


def is_copied(output: Any, batch: Batch, targets: Any, loss: Any) -> bool:
    """Whether a network that returns its own tokens would have no loss: the targets were not moved by one place."""
    answer = answer_tensor(output)
    if not isinstance(targets, Tensor) or targets.is_floating_point() or answer is None:
        return False
    # a decoder is given its targets, moved by one place, beside what it translates
    whole = [one for one in batch.tensors() if one.shape == targets.shape == answer.shape[:-1] and one.dim() > 1]
    same = [one for one in whole if float((targets.to(one.device) == one).float().mean()) >= MATCH]
    if not same or not 0 <= int(same[0].min()) < int(same[0].max()) < answer.shape[-1]:
        return False
    tokens = same[0]
    if not callable(loss):
        return True
    copied = SURE * torch.nn.functional.one_hot(tokens.long(), answer.shape[-1]).to(answer.device, answer.dtype)
    try:
        with torch.no_grad():
            value = loss(copied if isinstance(output, Tensor) else type(output)(logits=copied), targets)
        return float(value) < 1 - MATCH
    except Exception:
        return False  # a loss that wants more than logits


def _followed(batch: Batch) -> tuple[int, int] | None:
    """The number of the input tensor that the user's targets continue by one place, and the axis of the places: tokens,
    or a series of numbers with its channels before or behind the steps."""
    targets = batch.targets
    for number, tokens in enumerate(batch.tensors()):
        if not isinstance(targets, Tensor) or targets.shape != tokens.shape or tokens.dim() < 2:
            continue
        series = tokens.is_floating_point() and tokens.dim() == 3
        for axis in (1, 2) if series else () if tokens.is_floating_point() else (1,):
            given = targets.movedim(axis, 1)[:, :-1].to(tokens.device)
            kept = torch.ones_like(given, dtype=torch.bool) if series else given >= 0  # torch marks no target by −100
            same = (given == tokens.movedim(axis, 1)[:, 1:])[kept]
            if tokens.shape[axis] >= SEQUENCE and bool(kept.any()) and float(same.float().mean()) >= MATCH:
                return number, axis
    return None


def share_unreached(inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> float:
    """The largest share, over floating-point inputs, of entries that differ between samples and whose gradient is
    exactly zero for every sample; what all samples share, such as padding, tells nothing."""
    shares = [0.0]
    for given, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None and gradient.dim() > 1 and len(gradient) > 1:
            differing = (given.detach() != given.detach()[:1]).any(0)
            idle = (gradient.detach() != 0).any(0).logical_not() & differing
            shares.append(float(idle.sum()) / max(int(differing.sum()), 1))
    return max(share if share < 1 else 0.0 for share in shares)  # without any gradient other findings speak


def share_unchanging(root: nn.Module, batch: Batch, *, axis: int) -> float:
    """The share of the places of whole numbers (tokens, fields of a table) that change nothing in what is returned.

    Each sample of one batch is the same sample with others' tokens in a part of the places.
    """
    lead, size = leading_tensor(list(batch.tensors())), batch.size(axis) or 0
    if axis or lead is None or lead.is_floating_point() or lead.dim() < 2 or size < SAMPLES:
        return 0.0
    tokens = lead.detach().flatten(1)
    usual = tokens.mode().values.mode().values  # padding, of which the sample that is changed shall have the least
    base = int((tokens != usual).sum(1).argmax())
    differ = tokens != tokens[base]
    places = differ.any(0).nonzero()[:, 0]
    if len(places) < SEQUENCE:
        return 0.0
    parts = places.tensor_split(min(len(places), PARTS))
    rows = tokens[base].repeat(len(parts) + 1, 1)
    for row, part in enumerate(parts, start=1):
        rows[row, part] = tokens[differ.int().argmax(0)[part], part]
    swapped = rows.reshape(-1, *lead.shape[1:])

    def repeat(value: Tensor) -> Tensor:
        mine = value.dim() > 0 and value.shape[0] == size
        return swapped if value is lead else value[[base] * len(rows)] if mine else value

    try:
        answer = _run(root, batch.mapped(repeat), axis, len(rows), torch.get_rng_state()).answer
    except Exception:
        return 0.0  # a size that is built in
    if answer is None or len(answer) != len(rows):
        return 0.0
    idle = sum(len(part) for part, row in zip(parts, answer[1:], strict=True) if not _differ(answer[0], row))
    return idle / len(places) if idle < len(places) else 0.0  # of outputs that never change other findings speak


def judge_reach(entries: float, tokens: float) -> list[Finding]:
    """A finding where most of an input changes nothing: the share of its entries, or of its different tokens."""
    share, parts = max((entries, "entries"), (tokens, "tokens"))
    if share < MANY:
        return []
    severity: Severity = "medium" if share > MOST else "low"
    return [tell("cut_off", severity, layer="input", evidence={"share": share}, parts=parts)]
