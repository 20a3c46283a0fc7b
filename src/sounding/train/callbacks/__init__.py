"""The only place that knows TensorBoard, Weights & Biases, Lightning and transformers' Trainer, each when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

_HELD = {
    "hf": ["TrainerMonitor"],
    "lightning": ["MonitorCallback"],
    "trackers": ["TensorBoard", "WeightsAndBiases"],
}

__all__ = ["MonitorCallback", "TensorBoard", "TrainerMonitor", "WeightsAndBiases"]

if TYPE_CHECKING:
    from sounding.train.callbacks.hf import TrainerMonitor
    from sounding.train.callbacks.lightning import MonitorCallback
    from sounding.train.callbacks.trackers import TensorBoard, WeightsAndBiases

__getattr__, __dir__ = lazily(__name__, _HELD)
