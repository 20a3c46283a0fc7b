"""Repaired weights as a file that is safe to load: no pickled code, written whole or not at all."""

from __future__ import annotations

import importlib
import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from sounding.cli.output import require_writable
from sounding.errors import UsageError
from sounding.files import place

if TYPE_CHECKING:
    from torch import nn

TORCH = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"


def require_weights_path(path: Path) -> None:
    """Find out before the work that a weights file cannot be written."""
    if path.suffix not in (*TORCH, SAFETENSORS):
        raise UsageError(
            f"expected a weights file ending in .pt or {SAFETENSORS}, got {str(path)!r}",
            hint=f"{path.with_suffix('.pt')}",
        )
    if path.suffix == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise UsageError(
            f"{path} needs the package 'safetensors', which is not installed",
            hint=f"pip install safetensors, or {path.with_suffix('.pt')}, which torch loads with weights_only=True",
        )
    require_writable(path)


def write_weights(model: nn.Module, path: Path) -> Path:
    """The state_dict of a model: `torch.load(path, weights_only=True)` or safetensors' `load_file` reads it."""
    import torch

    # values on the CPU, each tensor by itself: a view would drag its whole storage into the file
    values = {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }
    if path.suffix == SAFETENSORS:
        tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, torch.Tensor)}
        data: bytes = importlib.import_module("safetensors.torch").save(tensors)
    else:
        buffer = io.BytesIO()
        torch.save(values, buffer)
        data = buffer.getvalue()
    place(path, data)
    return path
