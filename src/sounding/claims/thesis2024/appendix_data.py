"""Appendix C.4: ranks of the Gram matrices of batches from common data sets, and how alike their samples are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import torch
from scipy import stats

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import LEVEL, Number, distance_from, exact, highest, lowest, over_runs, scaled
from sounding.claims.picture import Panel, Series, points_of, points_over
from sounding.data import load_dataset
from sounding.data.dataset import normalize
from sounding.measures import mean_cosine

SETS = ("cifar-10", "mnist", "fashion-mnist", "cifar-100")
SIZES = (16, 32, 64, 128, 256, 512)  # of batches
# mean and standard deviation over 100 batches of table C.1; for smaller batches every rank is n
PRINTED_RANKS = {
    "cifar-10": {128: (127.99, 0.09), 256: (221.06, 2.89), 512: (203.70, 3.58)},
    "mnist": {128: (128.00, 0.00), 256: (250.48, 1.53), 512: (318.04, 2.82)},
    "fashion-mnist": {128: (128.00, 0.00), 256: (238.19, 3.27), 512: (275.37, 4.20)},
    "cifar-100": {128: (127.92, 0.27), 256: (218.11, 3.69), 512: (201.51, 3.95)},
}
PRINTED_COSINES = {"cifar-10": 0.81, "mnist": 0.40, "fashion-mnist": 0.58, "cifar-100": 0.81}
HALF_DIGIT = 0.005  # the rounding of a cosine that is printed with two digits


def draw_pixels(name: str, size: int, count: int, *, context: Context, offset: int) -> list[torch.Tensor]:
    """Batches (n, pixels) of values in [0, 1] in float32, samples without replacement."""
    stored = load_dataset(name).train_inputs
    factor = 1.0 if stored.is_floating_point() else 1 / 255
    generator = context.generator(offset)
    drawn = [torch.randperm(len(stored), generator=generator)[:size] for _ in range(count)]
    return [stored[chosen].flatten(1).to(context.device, torch.float32) * factor for chosen in drawn]


def measure_ranks(values: Values, context: Context) -> Outcome:
    """Table C.1: `torch.linalg.matrix_rank` of XXᵀ, computed in single and in double precision."""
    ranks: dict[tuple[str, str], list[Number]] = {}
    for _, ((place, name), (at, size)) in context.each(product(enumerate(values["sets"]), enumerate(values["sizes"]))):
        pixels = draw_pixels(name, size, values["batches"], context=context, offset=10 * place + at)
        for kind, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            grams = (batch.to(dtype) @ batch.to(dtype).mT for batch in pixels)
            # singular values as the thesis took them; in double precision eigenvalues are as good, and faster
            counts = [int(torch.linalg.matrix_rank(gram, hermitian=kind == "float64")) for gram in grams]
            ranks.setdefault((name, kind), []).append(over_runs(np.array(counts, dtype=np.float64)))
    numbers = {
        f"rank_{name}_{size}_{kind}": number
        for (name, kind), row in ranks.items()
        for size, number in zip(values["sizes"], row, strict=True)
    }
    if set(values["sets"]) >= set(SETS):
        numbers |= _against_table(numbers)
    panels, sizes = [], values["sizes"]
    for name in values["sets"]:
        series = [points_of(kind, sizes, ranks[name, kind]) for kind in ("float32", "float64")]
        series.append(Series("rank n", sizes, sizes, role="bound"))
        if name in PRINTED_RANKS:
            table = [PRINTED_RANKS[name][n][0] if n in PRINTED_RANKS[name] else n for n in sizes]
            series.append(Series("table C.1", sizes, table, role="paper"))
        panels.append(Panel(series=series, title=name))
    return present(numbers, *panels)


def _scatter(values: Array) -> Number:
    """The standard deviation over batches, with the interval of a Gaussian law's."""
    value, freedom = float(values.std(ddof=1)), len(values) - 1  # of a Gaussian law (n − 1)s²/σ² is χ² of n − 1 degrees
    low, high = (float(np.sqrt(freedom / stats.chi2.ppf((1 + side * LEVEL) / 2, freedom))) for side in (1, -1))
    return Number(value, value * low, value * high, len(values))


def _against_table(numbers: Mapping[str, Number]) -> dict[str, Number]:
    """What the statement and its correction name: the cell that is farthest from the table, or from n."""

    def farthest(kind: str) -> Number:
        """In standard deviations of the table; smaller batches have none."""
        cells = [(PRINTED_RANKS[name][n], numbers[f"rank_{name}_{n}_{kind}"]) for name in SETS for n in (256, 512)]
        return highest(scaled(distance_from(found, mean), 1 / spread) for (mean, spread), found in cells)

    # the table prints n for all of them
    small = [numbers[f"rank_{name}_{n}_float32"].low / n for name in SETS for n in (16, 32, 64)]
    middle = [numbers[f"rank_{name}_128_float32"] for name in SETS]  # here rounding begins to cost a rank
    missing = [n - numbers[f"rank_{name}_{n}_float64"].low for name in SETS for n in SIZES]
    return {
        "least_rank_over_n_up_to_64": exact(min(small)),
        "least_rank_at_128": lowest(middle),
        "deviation_of_true_rank": farthest("float64"),
        "deviation_of_float32_rank": farthest("float32"),
        "largest_loss_of_true_rank": exact(max(missing)),
    }


def measure_cosines(values: Values, context: Context) -> Outcome:
    """The mean cosine similarity of different samples of a batch of raw pixels, and of normalized ones beside it."""
    raw, centred = {}, {}
    for place, name in context.each(values["sets"]):
        pixels = draw_pixels(name, values["size"], values["batches"], context=context, offset=place)
        raw[name] = np.array([float(mean_cosine(batch.double())) for batch in pixels])
        data = load_dataset(name)
        inputs = (normalize(data, batch.cpu().view(-1, *data.shape)).flatten(1).double() for batch in pixels)
        centred[name] = np.array([float(mean_cosine(batch)) for batch in inputs])
    numbers = {f"cosine_{name}": over_runs(found) for name, found in raw.items()}
    numbers |= {f"cosine_normalized_{name}": over_runs(found) for name, found in centred.items()}
    numbers |= {f"scatter_of_one_batch_{name}": _scatter(found) for name, found in raw.items()}
    numbers |= {
        f"excess_in_scatters_{name}": excess_in_scatters(found, PRINTED_COSINES[name])
        for name, found in raw.items()
        if name in PRINTED_COSINES
    }
    known = {name: PRINTED_COSINES[name] for name in values["sets"] if name in PRINTED_COSINES}
    places = list(range(len(values["sets"])))
    kinds = {"raw pixels": raw, "normalized pixels": centred}
    series = [points_over(kind, places, np.array(list(found.values())).T) for kind, found in kinds.items()]
    if known:
        series.append(Series("printed", places, list(known.values()), role="paper"))
    ticks = dict(zip(map(float, places), values["sets"], strict=True))
    return present(numbers, Panel(series=series, ticks=ticks))


def excess_in_scatters(found: Array, printed: float) -> Number:
    """How far the mean over batches lies from a printed value beyond half its digit, over the scatter of one batch.

    The interval is that of the worst corners: of the mean's interval and of the scatter's.
    """
    apart, unit = distance_from(over_runs(found), printed), _scatter(found)
    value, low, high = (max(0.0, end - HALF_DIGIT) for end in (apart.value, apart.low, apart.high))
    return Number(value / unit.value, low / unit.high, high / unit.low, len(found))
