"""What the outputs of a pass tell beside its targets and its loss: which output is compared with which target, and
targets that the inputs give away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sounding.probe.batches import Batch
from sounding.probe.influence import is_copied
from sounding.probe.outputs import leading_tensor
from sounding.probe.records import Finding
from sounding.probe.sentences import tell

MOST = 2**22  # numbers in an output whose pairing is looked at: four more gradients of the loss alone
PAIRS = 3  # of samples whose targets are exchanged
ROUNDING = 1e-5
FEWEST = 16  # samples from which a correlation says something
COLUMNS = 4096  # of an input that are looked at
SURE = 1 - 1e-6  # correlation of what is computed from a target; of a measured quantity it stays below


def look_at_answers(
    output: Any, batch: Batch, targets: Any, *, loss: Any, told: Sequence[Finding]
) -> tuple[Finding, ...]:
    """What was told already, and what these tell besides, one finding of a kind."""
    found = {one.kind: one for one in told}
    copied = [tell("copied_targets")] if is_copied(output, batch, batch.targets, loss) else []
    for one in (*copied, *find_pairing(output, targets, loss), *find_given_away(batch.tensors(), batch.targets)):
        found.setdefault(one.kind, one)
    return tuple(found.values())


def find_pairing(output: Any, targets: Any, loss: Any) -> Iterator[Finding]:
    """A loss that compares an output with the targets of other samples.

    The targets of two samples, or of two places of one, are exchanged: of a loss that takes each output with its own
    target, the gradients of these two change and no others. A loss that compares outputs with one another (contrastive,
    ranking, overlap of whole batches) is left alone, since any gradient may change there.
    """
    if not callable(loss) or (isinstance(loss, nn.Module) and any(True for _ in loss.buffers())):
        return
    usual = isinstance(output, Tensor) and isinstance(targets, Tensor) and output.is_floating_point()
    if not usual or not output.dim() or not targets.dim() or output.numel() > MOST or len(targets) < PAIRS:
        return
    torch_state = torch.get_rng_state()
    try:
        own, exchanged = _changed_units(output.detach(), targets.detach(), loss)
    except Exception:
        return  # a loss that wants more than it was given speaks for itself elsewhere
    finally:
        torch.set_rng_state(torch_state)
    if exchanged is None or (own and not exchanged):
        return
    all_alike = not own and not exchanged
    what = "each output with the targets of all samples" if all_alike else (
        "outputs with the targets of other samples or places")  # fmt: skip
    changing = "none" if all_alike else "others"
    yield tell(
        "foreign_targets",
        what=f"{what}: when two samples or places exchange their targets, the gradients of {changing}",
    )


def _changed_units(output: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> tuple[bool, bool | None]:
    """Whether gradients where targets are exchanged change, and whether others do; None where outputs are compared with
    one another, or nothing can be told."""
    arranged = _arrange(output, targets)
    if arranged is None:
        return True, None
    single = arranged(output).dim() - 1 == targets.dim()  # one number for each row, else one row for each sample
    units = targets.flatten() if single else targets.flatten(1)

    def gradient(values: Tensor, given: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = values.clone().requires_grad_()
            found: Tensor = torch.autograd.grad(loss(leaf, given), leaf)[0]
        return arranged(found).reshape(len(units), -1)

    def changed(before: Tensor, after: Tensor) -> Tensor:
        moving: Tensor = (before - after).norm(dim=1) > ROUNDING * max(float(before.norm(dim=1).max()), 1e-30)
        return moving

    before = gradient(output, targets)
    if not bool(torch.isfinite(before).all()) or bool(changed(before, gradient(output, targets)).any()):
        return True, None
    moved = output.clone()
    arranged(moved)[(0,) * targets.dim() if single else 0] += 0.1 * float(output.float().std()) + 0.01
    if bool(changed(before, gradient(moved, targets))[1:].any()):
        return True, None
    pairs = [(0, at) for at in _spread_out(len(units)) if not torch.equal(units[0], units[at])][:PAIRS]
    own = others = False
    for pair in pairs:
        exchanged = units.clone()
        exchanged[list(pair)] = units[list(pair[::-1])]
        moving = changed(before, gradient(output, exchanged.reshape(targets.shape)))
        own |= bool(moving[list(pair)].any())
        moving[list(pair)] = False
        others |= bool(moving.any())
    return own, others if pairs else None


def _arrange(output: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor] | None:
    """How a view of the output comes to have one row for each target, or else for each sample; None where neither is
    known. Classes stand on the last axis, or on the second one as torch's losses have them."""
    shape, wanted = tuple(output.shape), tuple(targets.shape)
    first, second = shape[: len(wanted)] == wanted, shape[:1] + shape[2:] == wanted
    if len(wanted) == 2 and len(shape) > 2 and shape[:2] == wanted[::-1] != wanted:
        return lambda one: one.transpose(0, 1).flatten(2)  # time first
    if first and not second:
        return lambda one: one.flatten(len(wanted)) if one.dim() > len(wanted) else one.unsqueeze(-1)
    if second and not first and len(wanted) > 1:
        return lambda one: one.movedim(1, -1)
    return (lambda one: one.reshape(len(one), -1)) if shape[0] == wanted[0] else None


def _spread_out(count: int) -> list[int]:
    """Numbers from 1 on: the next ones, then ones farther away."""
    return list(dict.fromkeys([1, 2, count // 2, count - 1, *range(3, min(count, 64))])) if count > 2 else []


def find_given_away(inputs: Sequence[Tensor], targets: Any) -> Iterator[Finding]:
    """A column of the inputs that is the target, times a number and plus another one."""
    lead = leading_tensor(list(inputs))
    if not isinstance(targets, Tensor) or lead is None or not lead.is_floating_point() or lead.dim() != 2:
        return
    if len(lead) != targets.numel() or len(lead) < FEWEST or not 1 < lead.shape[1] <= COLUMNS:
        return
    columns, wanted = lead.detach().double(), targets.detach().double().flatten().to(lead.device)
    columns, wanted = columns - columns.mean(0), wanted - wanted.mean()
    sizes = columns.norm(dim=0) * wanted.norm()
    alike = torch.where(sizes > 0, (wanted @ columns).abs() / sizes.clamp_min(1e-300), torch.zeros_like(sizes))
    best = int(alike.argmax())
    if not float(alike[best]) > SURE or math.isnan(float(alike[best])):
        return
    yield tell("given_away", evidence={"column": float(best)})
