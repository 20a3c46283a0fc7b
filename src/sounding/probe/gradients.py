"""Gradient norms that neither overflow nor vanish, and a backward pass that leaves `.grad` alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils.hooks import RemovableHandle

from sounding.probe.late import Late, read_now, wide_norms
from sounding.probe.parts import is_distributed, part_of

# Entries up to which a norm is one operation, and those of a row beyond: in float32 the norm of 4096 normal numbers is
# off by 1e-7, of 65 536 by 5e-7, of 16 million by 6e-4.
NORM_BLOCK, NORM_ROW = 2**16, 2**12
# Entries up to which a gradient is held until the pass is over, 64 KiB: its norm takes longer to launch than to
# compute. A thousand such layers hold 64 MiB.
KEPT = 2**14
SAFE_NORM = (1e-12, 1e18)  # in float32 the squares of smaller or larger gradients are lost


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Call `hook` with the gradient of the loss with respect to the tensor as it is now, before any change in place.

    Behind an operation without a derivative (a quantized layer) torch passes None: nothing came back.
    """
    return cast(RemovableHandle, cast(Any, tensor).register_hook(hook))


def log_norm(gradient: Tensor, *, kept: bool = False) -> float:
    """ln‖gradient‖ without overflow or underflow; −∞ for zero, NaN or ∞ for what is not finite.

    Large ones in blocks whose norms are added in float64: one float32 sum over millions of entries is off in the fourth
    digit. One that is itself differentiable (a gradient penalty) is read detached: what is measured must not enter the
    user's graph. On a GPU the number comes late; a small gradient that is `kept`, since nobody changes it in place
    before it is read, waits for the others. Of a DTensor it is a `Part`: torch's own norm would communicate, and hang
    where one process measures.
    """
    if type(gradient) is not Tensor and is_distributed(gradient):
        return part_of(gradient, lambda part: read_now(log_norm(part)))
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_cuda and gradient.dtype is not torch.float64 and not gradient.is_complex():
        if kept and gradient.numel() <= KEPT:
            return Late(gradient, _log, normed=True)
        return Late(wide_norms([gradient])[0], _log)
    if gradient.dtype is not torch.float32 and gradient.dtype in (torch.float16, torch.bfloat16):
        gradient = gradient.float()
    if gradient.numel() <= NORM_BLOCK:
        norm = vector_norm(gradient).item()
    else:
        flat, whole = gradient.reshape(-1), gradient.numel() // NORM_ROW * NORM_ROW
        rows = vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
        norm = vector_norm(torch.cat([rows, vector_norm(flat[whole:])[None]]).double()).item()
    if SAFE_NORM[0] < norm < SAFE_NORM[1]:
        return math.log(norm)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float64))
    peak = wide.abs().max().item() if wide.numel() else 0.0
    if not 0 < peak < math.inf:
        return -math.inf if peak == 0 else peak
    # in float64, too, the squares of entries beyond 1e154 overflow, and those below 1e-154 vanish
    return math.log(peak) + math.log(vector_norm(wide / peak).item())


def log_norms(gradients: Sequence[Tensor]) -> list[float]:
    """ln‖gradient‖ of each, as `log_norm` gives it; on a GPU those that are plain come from one operation."""
    plain = [one for one in gradients if one.is_cuda and type(one) is Tensor and not one.is_sparse
             and one.dtype in (torch.float32, torch.float16, torch.bfloat16)]  # fmt: skip
    with torch.no_grad():
        wide = {id(one): norm for one, norm in zip(plain, wide_norms(plain), strict=True)}
    return [Late(wide[id(one)], _log) if id(one) in wide else log_norm(one) for one in gradients]


def _log(norm: float) -> float:
    return math.log(norm) if 0 < norm < math.inf else -math.inf if norm == 0 else norm


def join_log_norms(log_norms: Sequence[float]) -> float:
    """½ ln Σ exp(2 l): the norm of parts put side by side."""
    if len(log_norms) == 1:
        return log_norms[0]
    peak = max(log_norms) if not any(map(math.isnan, log_norms)) else math.nan
    if not math.isfinite(peak):
        return peak
    return peak + 0.5 * math.log(math.fsum(math.exp(2 * (value - peak)) for value in log_norms))


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call it when the running backward pass is over, after what was queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def needs_accumulation(scalar: Tensor) -> bool:
    """Whether the graph holds a reentrant checkpoint, which torch.autograd.grad refuses."""
    stack, seen = [scalar.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        stack.extend(parent for parent, _ in node.next_functions)
    return False


@contextmanager
def muted(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hooks that fire when a gradient is stored (an optimizer step inside the backward pass) rest meanwhile."""
    stores = [weight._post_accumulate_grad_hooks for weight in weights]  # torch has no way to put hooks to rest
    saved = [(store, dict(store)) for store in stores if store]
    for store, _ in saved:
        store.clear()
    try:
        yield
    finally:
        for store, hooks in saved:
            store.update(hooks)
