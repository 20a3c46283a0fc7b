"""Training: one network in a plain loop, many as one program, with records that repeat and checkpoints that resume.

`train_(network, data, learning_rate=0.1, recipe=Recipe(epochs=5))` trains in place and returns a History;
`train_together_` does the same for a list of networks that share an architecture, with a learning rate each. Names are
imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

_HELD = {
    "alone": ["train_"],
    "callbacks.hf": ["TrainerMonitor"],
    "callbacks.lightning": ["MonitorCallback"],
    "callbacks.trackers": ["TensorBoard", "WeightsAndBiases"],
    "checkpoint": ["Checkpoint"],
    "grid": ["Grid", "make_grid"],
    "history": ["History", "Point"],
    "journal": ["Progress"],
    "layers": ["Residual"],
    "monitor": ["Event", "JsonLines", "Logarithmic", "Monitor", "read_json_lines"],
    "rates": ["Choice", "Choices", "choose_rates"],
    "recipe": ["Recipe"],
    "together": ["train_together_"],
}

__all__ = [
    "Checkpoint", "Choice", "Choices", "Event", "Grid", "History", "JsonLines", "Logarithmic", "Monitor",
    "MonitorCallback", "Point", "Progress", "Recipe", "Residual", "TensorBoard", "TrainerMonitor",
    "WeightsAndBiases", "choose_rates", "make_grid", "read_json_lines", "train_", "train_together_",
]  # fmt: skip

if TYPE_CHECKING:
    from sounding.train.alone import train_
    from sounding.train.callbacks.hf import TrainerMonitor
    from sounding.train.callbacks.lightning import MonitorCallback
    from sounding.train.callbacks.trackers import TensorBoard, WeightsAndBiases
    from sounding.train.checkpoint import Checkpoint
    from sounding.train.grid import Grid, make_grid
    from sounding.train.history import History, Point
    from sounding.train.journal import Progress
    from sounding.train.layers import Residual
    from sounding.train.monitor import Event, JsonLines, Logarithmic, Monitor, read_json_lines
    from sounding.train.rates import Choice, Choices, choose_rates
    from sounding.train.recipe import Recipe
    from sounding.train.together import train_together_

__getattr__, __dir__ = lazily(__name__, _HELD)
