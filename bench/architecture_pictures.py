"""Draw prediction, 95% band and measurement over depth for a GPT, a ViT and a ResNet.

    python bench/architecture_pictures.py docs/pictures

Writes theory_gpt.svg, theory_vit.svg and theory_resnet.svg: three panels each, the mean square, the mean cosine between
samples and the gradient norm at every measured call in execution order.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from architecture_networks import CHOSEN, Gpt

import sounding
from sounding.look import SERIES, style

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "sounding", **style()})  # equal pictures are equal files
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of a backend

PANELS = (
    ("mean_square", "mean square"),
    ("mean_cosine", "mean cosine between samples"),
    ("gradient_log_norm", "ln gradient norm"),
)
NETWORKS = {
    "gpt": ("GPT, 12 blocks of width 96", lambda: (Gpt(12), torch.randint(200, (8, 24)))),
    "vit": ("ViT of transformers, 4 blocks of width 96", CHOSEN["vit"]),
    "resnet": ("ResNet-20 with 32 to 128 channels", CHOSEN["resnet-20"]),
}


def draw(name: str, target: Path) -> None:
    """One picture of three panels."""
    title, build = NETWORKS[name]
    torch.manual_seed(0)
    model, inputs = build()
    profile = sounding.check(model, inputs, theory=True, generator=torch.Generator().manual_seed(0)).profile
    figure, axes = plt.subplots(1, len(PANELS), figsize=(8.4, 2.7), layout="constrained")
    for axis, (measure, label) in zip(axes, PANELS, strict=True):
        rows = [row for row in profile if row.measure == measure and row.name != "network"]
        theory = sorted((row for row in rows if row.source == "theory"), key=lambda row: row.layer)
        known = {(row.layer, row.name) for row in theory}
        found = [row for row in rows if row.source != "theory" and (row.layer, row.name) in known]
        depth = [row.layer for row in theory]
        low, high = ([row.value + sign * (row.stderr or 0.0) for row in theory] for sign in (-2, 2))
        axis.fill_between(depth, low, high, color=SERIES[0], alpha=0.25, linewidth=0, label="95% band")
        axis.plot(depth, [row.value for row in theory], color=SERIES[0], linewidth=1, label="theory")
        axis.plot([row.layer for row in found], [row.value for row in found], "k.", markersize=3, label="measured")
        if measure == "mean_square":
            axis.set_yscale("log")
        axis.set_xlabel("call in execution order")
        axis.set_title(label)
        if measure == "mean_cosine":
            axis.set_ylim(min(0.0, *(row.value for row in theory)) - 0.05, 1.05)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle(title)
    figure.savefig(target / f"theory_{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draw all of them into the folder that is named."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name in NETWORKS:
        draw(name, target)


if __name__ == "__main__":
    main()
