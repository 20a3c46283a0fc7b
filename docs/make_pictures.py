"""Draw the pictures of the documentation: `python docs/make_pictures.py [NAME ...]`, all of them without a name.

Each function below draws one picture and returns its figure; its name is the file name under docs/pictures. Seeds are
fixed and the SVG carries no date, so that drawing again on one machine changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

import sounding
from sounding.models import Mlp

FOLDER = Path(__file__).parent / "pictures"


def tutorial() -> Figure:
    """Mean cosine and gradient norm over 50 layers, with and without batch norm; theory, where there is one, dashed."""
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    forward, backward = figure.subplots(1, 2)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 128, generator=generator)
    for norm, label in (("none", "plain"), ("batch", "batch norm")):
        network = Mlp(128, 10, depth=50, width=128, norm=norm, generator=generator)
        profile = sounding.check(network, inputs, generator=generator).profile
        activations = profile.where(lambda row: row.name.endswith(".activation"))
        for axes, measure in ((forward, "mean_cosine"), (backward, "gradient_log_norm")):
            measured = activations.series(measure, source="check").value
            (line,) = axes.plot(range(1, len(measured) + 1), measured, label=label)
            predicted = activations.series(measure, source="theory").value
            axes.plot(range(1, len(predicted) + 1), predicted, "--", color=line.get_color(), lw=1)
    forward.set(xlabel="layer", ylabel="mean cosine between samples", ylim=(0, 1.02))
    backward.set(xlabel="layer", ylabel="ln of the gradient norm")
    for axes in (forward, backward):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"tutorial": tutorial}


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(PICTURES))
    if unknown:
        sys.exit(f"unknown picture {', '.join(unknown)}; one of {', '.join(PICTURES)}")
    FOLDER.mkdir(exist_ok=True)
    matplotlib.rcParams.update({"svg.hashsalt": "sounding", "svg.fonttype": "path"})
    for name in names or PICTURES:
        path = FOLDER / f"{name}.svg"
        PICTURES[name]().savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
