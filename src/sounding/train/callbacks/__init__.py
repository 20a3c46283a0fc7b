"""The only place that knows TensorBoard, Weights & Biases, Lightning and transformers' Trainer, each when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

_INDEX = {
    "MonitorCallback": "sounding.train.callbacks.lightning",
    "TensorBoard": "sounding.train.callbacks.tensorboard",
    "TrainerMonitor": "sounding.train.callbacks.hf",
    "WeightsAndBiases": "sounding.train.callbacks.wandb",
}

__all__ = list(_INDEX)

if TYPE_CHECKING:
    from sounding.train.callbacks.hf import TrainerMonitor as TrainerMonitor
    from sounding.train.callbacks.lightning import MonitorCallback as MonitorCallback
    from sounding.train.callbacks.tensorboard import TensorBoard as TensorBoard
    from sounding.train.callbacks.wandb import WeightsAndBiases as WeightsAndBiases

__getattr__, __dir__ = lazily(__name__, _INDEX)
