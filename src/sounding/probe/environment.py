"""Where a check ran."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn

import sounding
from sounding.probe.state import all_modules, all_tensors


def describe_environment(model: nn.Module) -> dict[str, Any]:
    """Versions, device and precision, as plain JSON types."""
    parameters, buffers = all_tensors(all_modules(model))
    tensors = [*parameters, *buffers]
    device = tensors[0].device if tensors else torch.device("cpu")
    return {
        "sounding": sounding.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters}),
        "threads": torch.get_num_threads(),
        "model": type(model).__name__,
    }
