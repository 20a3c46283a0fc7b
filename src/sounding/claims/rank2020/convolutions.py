"""Batch norm broken, uncentred and missing in VGG-19 and ResNet-50: figures 5, 7, 10 and 13."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, exact, over_runs, unfinished
from sounding.claims.picture import Panel, Picture, points_over
from sounding.claims.rank2020.images import KINDS, PARTS, Runs, look_times, train_kind, walk_weights
from sounding.claims.rank2020.perceptrons import difference


def find_runs(values: Mapping[str, Any], context: Context) -> dict[str, Runs]:
    """The runs of every kind that a figure shows."""
    found = {}
    for index, kind in enumerate(values["kinds"]):
        found[kind] = train_kind(values, context, kind)
        context.progress((index + 1) / len(values["kinds"]))
    return found


def draw_runs(
    found: Mapping[str, Runs], name: str, values: Mapping[str, Any], label: str, *, log: bool = False
) -> Panel:
    """One quantity over steps, for every kind."""
    series = []
    for kind, runs in found.items():
        rows = getattr(runs, name)
        steps = [0, *look_times(kind, values)][-rows.shape[1] :]
        series.append(points_over(KINDS[kind], steps, rows))
    return Panel("SGD step", label, series, title=label.split(" of ")[0], y_scale="log" if log else "linear")


def measure_breaking(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figures 5 and 13: accuracy and rank with standard and one-sided starts, with and without centring."""
    found = find_runs(values, context)
    standard, broken = found["standard"], found["one-sided"]
    last = broken.accuracy.shape[1] - 1  # a one-sided start may be given up earlier: compared at its last step
    numbers = {
        "accuracy_one_sided": over_runs(broken.accuracy[:, last]),
        "accuracy_standard_minus_one_sided": difference(standard.accuracy[:, last], broken.accuracy[:, last]),
        "rank_standard_minus_one_sided_at_start": difference(standard.rank[:, 0], broken.rank[:, 0]),
        "log_r_standard_minus_one_sided_at_start": difference(np.log(standard.ratio[:, 0]), np.log(broken.ratio[:, 0])),
    }
    if "uncentred" in found:
        numbers["accuracy_standard_minus_uncentred"] = _lag(standard, found["uncentred"])
    panels = (
        draw_runs(found, "accuracy", values, "training accuracy"),
        draw_runs(found, "rank", values, "rank of the last hidden layer"),
        draw_runs(found, "ratio", values, "r(H) of the last hidden layer", log=True),
    )
    caption = "A start of one-sided weights takes the rank and the learning from batch norm; centring matters less."
    return Outcome(numbers, Picture(panels, caption))


def measure_centring(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 7: accuracy and r(H) with and without centring."""
    found = find_runs(values, context)
    standard, uncentred = found["standard"], found["uncentred"]
    numbers = {
        "accuracy_standard_minus_uncentred": _lag(standard, uncentred),
        "accuracy_uncentred": over_runs(uncentred.accuracy[:, -1]),
        "log2_r_standard_over_uncentred": difference(
            np.log2(standard.ratio[:, 1:]).mean(axis=1), np.log2(uncentred.ratio[:, 1:]).mean(axis=1)
        ),
        "log2_r_standard_over_uncentred_at_start": difference(
            np.log2(standard.ratio[:, 0]), np.log2(uncentred.ratio[:, 0])
        ),
    }
    panels = (
        draw_runs(found, "accuracy", values, "training accuracy"),
        draw_runs(found, "ratio", values, "r(H) of the last hidden layer", log=True),
    )
    return Outcome(numbers, Picture(panels, "Both curves of a panel would coincide if centring made no difference."))


def _lag(standard: Runs, uncentred: Runs) -> Number:
    """What centring adds to the training accuracy; longer training may close the gap where networks still learn."""
    lag = difference(standard.accuracy[:, -1], uncentred.accuracy[:, -1])
    middle = uncentred.accuracy.shape[1] // 2 - 1
    learns = difference(uncentred.accuracy[:, -1], uncentred.accuracy[:, middle]).low > 0
    return unfinished(lag, towards=0.0) if learns else lag


def measure_alignment(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 10: gradients of different samples in the readout, and what plain networks learn."""
    found = find_runs(values, context)
    plain, faster, noise = (found[kind] for kind in list(KINDS)[3:])

    numbers: dict[str, Number] = {
        "alignment_plain": over_runs(plain.alignment.mean(axis=1)),
        "alignment_batch_norm": over_runs(found["standard"].alignment.mean(axis=1)),
        "accuracy_plain": over_runs(plain.accuracy[:, -1]),
        "accuracy_plain_100_times_the_rate": over_runs(faster.accuracy[:, -1]),
        "accuracy_batch_norm": over_runs(found["standard"].accuracy[:, -1]),
        "accuracy_plain_minus_random_images": difference(plain.accuracy.mean(axis=1), noise.accuracy.mean(axis=1)),
        "chance": exact(0.1),
    }
    panels = (
        draw_runs(found, "accuracy", values, "training accuracy"),
        draw_runs(found, "alignment", values, "alignment of gradients, mean |cos|"),
    )
    caption = "Without a norm every sample pulls the readout along one line, and the images make no difference."
    return Outcome(numbers, Picture(panels, caption))


def measure_paths(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 10: cosines between what training adds to the weights on images and on random pixels, all else equal."""
    found: dict[str, list[list[float]]] = {"plain": [], "standard": []}
    for run in range(values["runs"]):
        for kind, cosines in found.items():
            paths = [
                walk_weights(name, values, context, offset=run, pixels=1000 + run)
                for name in (kind, f"{kind}, random images")
            ]
            cosines.append([float(a @ b / (a.norm() * b.norm())) for a, b in zip(*paths, strict=True)])
        context.progress((run + 1) / values["runs"])
    numbers = {
        f"cosine_of_paths_{name}": over_runs(np.array(found[kind])[:, -1])
        for kind, name in (("plain", "plain"), ("standard", "batch_norm"))
    }
    steps = [values["steps"] * part // PARTS for part in range(1, PARTS + 1)]
    series = [points_over(KINDS[kind], steps, np.array(rows)) for kind, rows in found.items()]
    panel = Panel("SGD step", "cosine of the paths on images and on random pixels", series)
    return Outcome(
        numbers, Picture((panel,), "Without a norm, images and random pixels lead the weights the same way.")
    )
