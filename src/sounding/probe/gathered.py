"""Weights that fully_shard (FSDP2) gathers for a pass and shards again; FullyShardedDataParallel (FSDP1) is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from sounding.errors import UsageError
from sounding.probe.state import all_modules


def refuse_flat(modules: Sequence[nn.Module]) -> None:
    """Raise where FSDP1 wraps a module: reading its weights between passes reads freed memory."""
    flat = _kind("FullyShardedDataParallel")
    if flat is not None and any(isinstance(module, flat) for module in modules):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) is not supported: it keeps weights in flat storage that it frees",
            hint="torch.distributed.fsdp.fully_shard (FSDP2), or measuring the model before it is wrapped",
        )


def groups_of(module: nn.Module) -> Sequence[Any]:
    """The weights that fully_shard handles together for a module; none for any other module."""
    kind = _kind("FSDPModule")
    if kind is None or not isinstance(module, kind):
        return ()
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    single = getattr(state, "_fsdp_param_group", None)  # torch 2.11 and before: one group, under another name
    return tuple(getattr(state, "_fsdp_param_groups", () if single is None else (single,)))


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before fully_shard put its own in front."""
    kind = type(module)
    mixin = _kind("FSDPModule")
    if mixin is None or not issubclass(kind, mixin):
        return kind
    return next(base for base in kind.__mro__[1:] if issubclass(base, nn.Module) and not issubclass(base, mixin))


def gathered_weights(modules: Sequence[nn.Module]) -> dict[int, nn.Parameter]:
    """For weights that fully_shard has gathered and put in place of the sharded ones: id → the sharded one."""
    found: dict[int, nn.Parameter] = {}
    for module in modules:
        for group in groups_of(module):
            for held in group.fsdp_params:
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    gathered = getattr(held, name, None)
                    if gathered is not None:
                        found[id(gathered)] = held.sharded_param
    return found


@contextmanager
def resharded(root: nn.Module) -> Iterator[None]:
    """On leaving, the weights are sharded again, as fully_shard leaves them after a backward pass, also by an error."""
    _reshard(root)
    try:
        yield
    except BaseException:
        reset: Callable[[], None] | None = getattr(root, "reset_iter_state", None)
        if reset is not None and groups_of(root):
            reset()  # what a failed pass left half gathered
        raise
    finally:
        _reshard(root)


def _reshard(root: nn.Module) -> None:
    for module in all_modules(root):
        if groups_of(module):
            sharded: Any = module
            sharded.reshard()


def _kind(name: str) -> Any:
    """A class of torch.distributed.fsdp; None where nobody imported it, so that no model can hold one."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
