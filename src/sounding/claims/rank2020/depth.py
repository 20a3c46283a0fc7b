"""Rank against depth: figures 2 and 3b, and Corollary 15 with its assumption."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Scale, Setting
from sounding.claims.number import DRAWN, Number, estimate, exact, mean_of
from sounding.claims.picture import Panel, Picture, Series

if TYPE_CHECKING:
    import torch

    from sounding.profile import Profile


def follow_ranks(
    *,
    width: int,
    depth: int,
    every: int,
    runs: int,
    activation: str,
    norm: str,
    generator: torch.Generator,
    device: str,
) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Layers and the numerical rank of each run there: H ↦ φ(BN(HWᵀ)), or φ(HWᵀ) over its Frobenius norm.

    Weights are uniform of unit variance, inputs Gaussian, as many samples as features. Dividing by the Frobenius norm
    at each layer is what the released program does without batch norm; tanh then acts as if it were linear.
    """
    import torch

    from sounding.activations import resolve
    from sounding.measures import numerical_rank
    from sounding.weights import draw_uniform

    function = resolve(activation).torch()
    on = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    state = torch.randn(runs, width, width, generator=on, device=device)
    shape = (runs, width, width)
    layers, ranks = [0], [numerical_rank(state)]
    for layer in range(1, depth + 1):
        state = state @ draw_uniform(shape, generator=on, dtype=state.dtype, device=device).mT
        if norm == "batch":
            state = state - state.mean(-2, keepdim=True)
            state = state / state.square().mean(-2, keepdim=True).sqrt().clamp_min(1e-30)
        state = function(state)
        if norm == "none":
            state = state / torch.linalg.matrix_norm(state)[:, None, None].clamp_min(1e-30)
        if layer % every == 0:
            layers.append(layer)
            ranks.append(numerical_rank(state))
    return layers, torch.stack(ranks).cpu().numpy()


def measure_fig2(values: Mapping[str, Any], context: Context) -> Outcome:
    """The rank of the last hidden layer against depth, with and without batch norm."""
    width = values["width"]
    numbers: dict[str, Number] = {}
    series = []
    for index, (norm, label) in enumerate((("batch", "batch norm"), ("none", "no norm"))):
        layers, ranks = follow_ranks(
            width=width,
            depth=values["depth"],
            every=values["every"],
            runs=values["runs"],
            activation=values["activation"],
            norm=norm,
            generator=context.generator(index),
            device=context.device,
        )
        late = 3 * len(layers) // 4
        numbers[f"rank_{'with' if norm == 'batch' else 'without'}_batch_norm"] = _steady(ranks[late:])
        points = [_steady(row[None]) for row in ranks]
        error = np.array([n.high - n.value for n in points])
        series.append(Series(label, layers, [n.value for n in points], error=error))
    root = math.sqrt(width)
    series.append(Series("√d (the paper's floor)", [0, values["depth"]], [root, root], role="paper"))
    series.append(Series("1: collapse", [0, values["depth"]], [1.0, 1.0], role="bound"))
    panel = Panel("layer", "numerical rank", series, y_scale="log", title=values["activation"])
    return Outcome(numbers, Picture((panel,), values["caption"]))


def _steady(ranks: np.ndarray[Any, Any]) -> Number:
    """The mean over layers, as a mean over runs; all runs alike is exact."""
    by_run = ranks.mean(axis=0)
    return exact(float(by_run[0])) if np.ptp(by_run) == 0 else mean_of(by_run)


def measure_cor15(values: Mapping[str, Any], context: Context) -> Outcome:
    """Rank and soft rank at every layer, from a full-rank and from a nearly collinear input."""
    from sounding.chain import simulate

    width, depth = values["width"], values["depth"]
    full, near = (
        simulate(
            width=width,
            batch_size=width,
            depth=last,
            runs=values["runs"],
            residual=values["residual"],
            weights="uniform",
            center=False,
            start=start,
            every=every,
            measures=["numerical_rank", "soft_rank"],
            profile=True,
            dtype="float64",
            generator=context.generator(index),
        ).profile
        for index, (start, last, every) in enumerate(
            (("orthogonal", depth, values["every"]), (values["collinear"], values["soft_depth"], 1))
        )
    )
    rank = [full.value("numerical_rank", layer=layer) for layer in full.layers if layer]
    soft = [near.value("soft_rank", layer=layer) for layer in (1, values["soft_depth"])]
    bound = math.sqrt((1 - values["regularity"]) * width)
    over = [_of_runs(e.value / bound, (e.stderr or 0.0) / bound, values["runs"]) for e in rank]
    error = math.hypot(*(e.stderr or 0.0 for e in soft))
    numbers = {
        "smallest_rank_over_bound": min(over, key=lambda n: n.low),
        "increase_of_soft_rank": _of_runs(soft[-1].value - soft[0].value, error, values["runs"]),
    }

    def curve(label: str, profile: Profile, name: str) -> Series:
        known = np.array([layer for layer in profile.layers if layer])
        wanted = np.geomspace(known[0], known[-1], 12)
        picked = sorted({int(known[np.argmin(np.abs(known - layer))]) for layer in wanted})
        points = [profile.value(name, layer=layer) for layer in picked]
        return Series(label, picked, [p.value for p in points], error=[DRAWN * (p.stderr or 0.0) for p in points])

    panels = (
        Panel(
            "layer",
            "rank of H",
            (
                curve("full-rank input", full, "numerical_rank"),
                Series("√((1 − α)d)", [1, depth], [bound, bound], role="bound"),
            ),
            title="rank",
            x_scale="log",
        ),
        Panel(
            "layer",
            "soft rank at ½",
            (
                curve("full-rank input", full, "soft_rank"),
                curve("nearly collinear input", near, "soft_rank"),
                Series("½-bound, (1 − τ)²√((1 − α)d)", [1, depth], [bound / 4, bound / 4], role="bound"),
            ),
            title="soft rank",
            x_scale="log",
        ),
    )
    caption = (
        "The rank of a full-rank input stays above the bound at every layer. The soft rank does not only fall: from "
        "nearly collinear samples it grows."
    )
    return Outcome(numbers, Picture(panels, caption))


def _of_runs(value: float, stderr: float, runs: int) -> Number:
    """Student's interval of a mean over runs; all runs alike is exact."""
    return exact(value) if stderr == 0 else estimate(value, stderr, samples=runs)


def _fig2(activation: str, caption: str) -> dict[str, Any]:
    return {"width": 32, "activation": activation, "caption": caption, "runs": 10}


_FIG2_PAPER = "d = N = 32, Gaussian inputs, 10 runs, up to 50 000 layers"
_FIG2_RELEASED = (
    "one run; U[−√3, √3]; centred batch norm; the vanilla state is divided by its Frobenius norm at each layer; the "
    '"ReLU" panel applies tanh'
)
_COR15: dict[Scale, Setting] = {
    "quick": Setting(
        {
            "width": 32,
            "depth": 3000,
            "every": 50,
            "soft_depth": 300,
            "runs": 8,
            "residual": 0.1,
            "collinear": "collinear:1e-3",
            "regularity": 0.862,
        }
    )
}


def _fig2_claim(
    suffix: str, activation: str, title: str, statement: str, caption: str, note: str = "", released: str = ""
) -> Claim:
    common = _fig2(activation, caption)
    return Claim(
        id=f"rank2020-fig2-{suffix}",
        seed="rank2020",
        place=f"figure 2 ({title})",
        kind="figure",
        statement=statement,
        expectations=(
            Expectation("rank_with_batch_norm", "above √d = 5.66", low=math.sqrt(32)),
            Expectation("rank_without_batch_norm", "collapsed to one, nearer to 1 than to 2", high=1.5),
        ),
        settings={
            "quick": Setting({**common, "depth": 6000, "every": 300}, "6000 layers"),
            "paper": Setting({**common, "depth": 50000, "every": 1000}),
        },
        measure=measure_fig2,
        paper=_FIG2_PAPER,
        released=released or _FIG2_RELEASED,
        note=note,
    )


CLAIMS: tuple[Claim, ...] = (
    _fig2_claim(
        "linear",
        "identity",
        "left, linear",
        "In linear networks of width 32 the rank falls to one without batch norm and stays above √d with it.",
        "Batch norm stops the fall of the rank above √d; without it one direction is left.",
    ),
    _fig2_claim(
        "relu",
        "relu",
        "right, as captioned: ReLU",
        "In ReLU networks of width 32 the rank falls to one without batch norm and stays above √d with it.",
        "With ReLU, as captioned: batch norm keeps full rank, without it one direction is left.",
        note="The released program applies tanh in this panel (rank2020-fig2-tanh); here ReLU is run.",
    ),
    _fig2_claim(
        "tanh",
        "tanh",
        "right, as run: tanh",
        "In tanh networks of width 32, the ones that were run, the rank falls to one without batch norm and "
        "stays above "
        "√d with it.",
        "With tanh, as run: batch norm keeps full rank, without it one direction is left.",
        note="Without batch norm the state is divided by its Frobenius norm at each layer, so tanh acts as if linear.",
    ),
    Claim(
        id="rank2020-cor15",
        seed="rank2020",
        place="corollary 15",
        kind="theorem",
        statement="Under the setting of theorem 14, rank(H_ℓ) is of order √d or more at every finite layer.",
        expectations=(Expectation("smallest_rank_over_bound", "rank ≥ √((1 − α)d) at every layer", low=1.0),),
        settings=_COR15,
        measure=measure_cor15,
        paper="a corollary; no experiment",
        note="α = 0.862 at width 32, from rank2020-fig8.",
    ),
    Claim(
        id="rank2020-cor15-assumption",
        seed="rank2020",
        place="corollary 15, its assumption",
        kind="theorem",
        statement="The soft rank never grows with depth, so that its bound, too, holds at every layer.",
        expectations=(Expectation("increase_of_soft_rank", "no increase from the first layer to the last", high=0.0),),
        correction=Correction(
            "The soft rank can grow: nearly collinear inputs of width 32 rise from 1 to about 7. The bound speaks of "
            "averages over depth (theorem 14), and of the rank at each layer.",
            (
                Expectation("increase_of_soft_rank", "it grows by several", low=1.0),
                Expectation("smallest_rank_over_bound", "the part on the rank stays true", low=1.0),
            ),
        ),
        settings=_COR15,
        measure=measure_cor15,
        paper="assumed, not shown",
    ),
)
