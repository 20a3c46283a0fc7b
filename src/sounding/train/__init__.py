"""Training: one network in a plain loop, many as one program, with records that repeat and checkpoints that resume.

`train_(network, data, learning_rate=0.1, recipe=Recipe(epochs=5))` trains in place and returns a History;
`train_together_` does the same for a list of networks that share an architecture, with a learning rate each. Names are
imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

_INDEX = {
    "Checkpoint": "sounding.train.checkpoint",
    "Choice": "sounding.train.rates",
    "Choices": "sounding.train.rates",
    "Grid": "sounding.train.grid",
    "Event": "sounding.train.monitor",
    "History": "sounding.train.history",
    "JsonLines": "sounding.train.monitor",
    "Logarithmic": "sounding.train.monitor",
    "Monitor": "sounding.train.monitor",
    "MonitorCallback": "sounding.train.callbacks",
    "Point": "sounding.train.history",
    "Progress": "sounding.train.journal",
    "Recipe": "sounding.train.recipe",
    "Residual": "sounding.train.layers",
    "TensorBoard": "sounding.train.callbacks",
    "TrainerMonitor": "sounding.train.callbacks",
    "WeightsAndBiases": "sounding.train.callbacks",
    "choose_rates": "sounding.train.rates",
    "make_grid": "sounding.train.grid",
    "read_json_lines": "sounding.train.monitor",
    "train_": "sounding.train.alone",
    "train_together_": "sounding.train.together",
}

__all__ = list(_INDEX)

if TYPE_CHECKING:
    from sounding.train.alone import train_ as train_
    from sounding.train.callbacks import MonitorCallback as MonitorCallback
    from sounding.train.callbacks import TensorBoard as TensorBoard
    from sounding.train.callbacks import TrainerMonitor as TrainerMonitor
    from sounding.train.callbacks import WeightsAndBiases as WeightsAndBiases
    from sounding.train.checkpoint import Checkpoint as Checkpoint
    from sounding.train.grid import Grid as Grid
    from sounding.train.grid import make_grid as make_grid
    from sounding.train.history import History as History
    from sounding.train.history import Point as Point
    from sounding.train.journal import Progress as Progress
    from sounding.train.layers import Residual as Residual
    from sounding.train.monitor import Event as Event
    from sounding.train.monitor import JsonLines as JsonLines
    from sounding.train.monitor import Logarithmic as Logarithmic
    from sounding.train.monitor import Monitor as Monitor
    from sounding.train.monitor import read_json_lines as read_json_lines
    from sounding.train.rates import Choice as Choice
    from sounding.train.rates import Choices as Choices
    from sounding.train.rates import choose_rates as choose_rates
    from sounding.train.recipe import Recipe as Recipe
    from sounding.train.together import train_together_ as train_together_

__getattr__, __dir__ = lazily(__name__, _INDEX)
