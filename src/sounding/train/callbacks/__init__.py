"""The trackers: the only place that knows TensorBoard, Weights & Biases and Lightning. Each is imported when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_INDEX = {
    "MonitorCallback": "sounding.train.callbacks.lightning",
    "TensorBoard": "sounding.train.callbacks.tensorboard",
    "WeightsAndBiases": "sounding.train.callbacks.wandb",
}

__all__ = list(_INDEX)

if TYPE_CHECKING:
    from sounding.train.callbacks.lightning import MonitorCallback as MonitorCallback
    from sounding.train.callbacks.tensorboard import TensorBoard as TensorBoard
    from sounding.train.callbacks.wandb import WeightsAndBiases as WeightsAndBiases


def __getattr__(name: str) -> Any:
    if name not in _INDEX:
        raise AttributeError(f"module 'sounding.train.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(_INDEX[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
